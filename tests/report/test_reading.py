"""Every verdict, from rows made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from loragate.report.reading import read_results


def row(name: str, accuracy: float, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "accuracy": {"mean": accuracy, "low": accuracy - 0.04, "high": accuracy + 0.04},
        "retention": {"mean": 0.97, "low": 0.95, "high": 0.99},
        "truncated": 0.01,
        "entropy": 0.5,
        **more,
    }


def read(
    accuracy: float = 0.5, difference: float = 0.2, lora: dict[str, Any] | None = None, **changes: Any
) -> list[str]:
    """What is said of a full set of rows in which SCALE stands clear of everything cheap.

    Args:
        accuracy, difference: of the gated row, whose paired interval reaches 5 points to either side; also its other values.
        lora: other values of the adapter's row.
        changes: accuracies of other rows, or values of the gated one.
    """
    versus = {"mean": difference, "low": difference - 0.05, "high": difference + 0.05, "p": 0.0123}
    scores = {"base": 0.20, "warm": 0.25, "cool": 0.28, "greedy": 0.31, "constant": 0.27, "dft": 0.33}
    names = {
        "warm": "LoRA, T = 0.6",
        "cool": "LoRA, T = 0.3",
        "greedy": "LoRA, greedy",
        "constant": "LoRA, one λ = 0.5",
        "dft": "DFT",
    }
    scores |= {key: value for key, value in changes.items() if key in scores}
    rows = [row(names.get(key, key), score) for key, score in scores.items()]
    own = {key: value for key, value in changes.items() if key not in scores}
    rows += [row("LoRA", 0.30, **({"entropy": 1.1} | (lora or {}))), row("one λ per module, trained", 0.9)]
    rows += [row("SCALE", accuracy, versus_lora=versus, **own)]
    for one in rows:
        apart = one["accuracy"]["mean"] - accuracy
        one["versus_gated"] = {"mean": apart, "low": apart - 0.08, "high": apart + 0.08}
    return read_results(rows, "SCALE")


def only(statements: list[str], start: str) -> str:
    found = [statement for statement in statements if statement.startswith(start)]
    assert len(found) == 1, statements
    return found[0]


def test_better() -> None:
    statements = read()
    assert statements[0] == (
        "SCALE is better than LoRA: 50.0 % against 30.0 %, a difference of +20.0 points "
        "(95 % interval +15.0 to +25.0, p=0.012)."
    )
    assert not any("cheaper fix" in statement for statement in statements)
    assert not any("per module" in statement for statement in statements), "a trained control is not a cheap one"
    assert statements[-1].endswith("do not generalise to other bases, adapters or seeds.")


def test_worse() -> None:
    first = read(0.1, -0.2)[0]
    assert first.startswith("SCALE is worse than LoRA: 10.0 % against 30.0 %, a difference of -20.0 points")
    assert first.endswith("Use LoRA without these gates.")


@pytest.mark.parametrize("difference", [0.03, -0.03, 0.05, -0.05, 0.0])
def test_no_difference_shown(difference: float) -> None:
    """Also at the very edge, where the interval ends at zero."""
    first = read(0.3 + difference, difference)[0]
    assert first.startswith("No difference between SCALE and LoRA is shown")
    assert "does not prove them equal" in first


def test_better_than_the_adapter_but_lower_temperature_better_still() -> None:
    statements = read(cool=0.74)
    assert statements[0].startswith("SCALE is better than LoRA")
    assert only(statements, "LoRA, T = 0.3") == (
        "LoRA, T = 0.3 scores 74.0 %, above SCALE (50.0 %): lower temperature is the cheaper fix here."
    )
    assert not any(statement.startswith("LoRA, T = 0.6") for statement in statements)


@pytest.mark.parametrize(
    ("key", "name", "noun"),
    [
        ("warm", "LoRA, T = 0.6", "lower temperature"),
        ("greedy", "LoRA, greedy", "greedy decoding"),
        ("constant", "LoRA, one λ = 0.5", "one global λ"),
    ],
)
def test_each_cheap_control_above_level_or_below(key: str, name: str, noun: str) -> None:
    above = only(read(**{key: 0.7}), name)
    assert above == f"{name} scores 70.0 %, above SCALE (50.0 %): {noun} is the cheaper fix here."
    level = only(read(**{key: 0.45}), name)
    assert level == (
        f"{name} scores 45.0 %, not told apart from SCALE (50.0 %): {noun} alone may do as much, without training."
    )
    below = only(read(**{key: 0.35}), name)
    assert below == f"{name} scores 35.0 %, below SCALE (50.0 %): {noun} alone does not do as much."


def test_what_does_not_help_is_no_fix() -> None:
    """SCALE is worse than the adapter, and so is the constant λ that beats it."""
    assert only(read(0.05, -0.25), "LoRA, one λ = 0.5") == "LoRA, one λ = 0.5 scores 27.0 %, above SCALE (5.0 %)."


@pytest.mark.parametrize(
    ("key", "accuracy", "expected"),
    [
        ("base", 0.9, "above SCALE: the gated adapter does worse here than no adapter."),
        ("base", 0.5, "not told apart from SCALE: adapter and gates together show no gain."),
        ("base", 0.1, "below SCALE."),
        ("dft", 0.9, "above SCALE: where the fine-tuning can be repeated, it is the better choice here."),
        ("dft", 0.5, "not told apart from SCALE."),
        ("dft", 0.1, "below SCALE."),
    ],
)
def test_base_and_dft(key: str, accuracy: float, expected: str) -> None:
    lead = {"base": "Base, without any adapter, ", "dft": "DFT, another loss in the fine-tuning itself, "}[key]
    assert only(read(**{key: accuracy}), lead) == f"{lead}scores {100 * accuracy:.1f} %, {expected}"


def test_retention_lost_kept_or_gained() -> None:
    def retention(mean: float, low: float, high: float) -> str:
        return only(read(retention={"mean": mean, "low": low, "high": high}), "Retention")

    lost = retention(0.68, 0.6, 0.76)
    assert lost == "Retention is lost against LoRA and the base: SCALE 68.0 %, LoRA 97.0 %, the base 97.0 %."
    assert retention(0.95, 0.93, 0.97).startswith("Retention is kept as far as the intervals can tell: SCALE 95.0 %")
    assert retention(1.0, 0.995, 1.0).startswith("Retention is kept, and above LoRA and the base: SCALE 100.0 %")


def test_truncation() -> None:
    def truncation(scale: float, lora: float) -> str:
        return only(read(truncated=scale, lora={"truncated": lora}), "Cut off")

    assert truncation(0.01, 0.02) == "Cut off at the length limit: 1.0 % of the answers of SCALE, 2.0 % of LoRA."
    assert truncation(0.01, 0.2).endswith("Part of any gain may be that answers now come to an end.")
    more = truncation(0.2, 0.01)
    assert "The gates make more answers run on." in more
    assert more.endswith("A longer limit may change these scores.")


def test_entropy_is_not_taken_for_success() -> None:
    statement = only(read(0.1, -0.2, entropy=0.26), "Entropy")
    assert "0.26 nats for SCALE and 1.10 for LoRA" in statement
    assert "does not show that answers are right" in statement
