"""Every verdict, from rows made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from loragate.report.reading import read_results


def row(name: str, group: str, accuracy: float | None, **more: Any) -> dict[str, Any]:
    """A row whose accuracy interval is 4 points to either side; None was not run."""
    value = None if accuracy is None else {"mean": accuracy, "low": accuracy - 0.04, "high": accuracy + 0.04}
    return {
        "name": name,
        "group": group,
        "accuracy": value,
        "retention": {"mean": 0.97, "low": 0.95, "high": 0.99},
        "truncated": 0.01,
        "entropy": 0.5,
        "tokens": 25.0,
        "versus_lora": None,
        "not_run": accuracy is None,
        **more,
    }


def gated(accuracy: float, difference: float, half: float = 0.05, **more: Any) -> dict[str, Any]:
    versus = {"mean": difference, "low": difference - half, "high": difference + half, "p": 0.0123}
    return row("SCALE", "scale", accuracy, versus_lora=versus, **more)


def study(scale: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    """A full set of rows in which SCALE stands clear of everything cheap; `changes` replaces accuracies or whole rows."""
    rows = {
        "base": row("base", "control", 0.20),
        "lora": row("LoRA", "baseline", 0.30, entropy=1.1),
        "warm": row("LoRA, T = 0.6", "control", 0.25),
        "cool": row("LoRA, T = 0.3", "control", 0.28),
        "greedy": row("LoRA, greedy", "control", 0.31),
        "constant": row("LoRA, one λ = 0.5", "control", 0.27),
        "random": row("random gates", "control", None),
        "dft": row("DFT", "baseline", 0.33),
        "scale": scale,
    }
    for key, change in changes.items():
        old = rows[key]
        rows[key] = change if isinstance(change, dict) else row(old["name"], old["group"], change)
    return list(rows.values())


def only(statements: list[str], start: str) -> str:
    found = [statement for statement in statements if statement.startswith(start)]
    assert len(found) == 1, statements
    return found[0]


def test_better() -> None:
    statements = read_results(study(gated(0.5, 0.2)))
    assert statements[0] == (
        "SCALE is better than LoRA: 50.0 % against 30.0 %, a difference of +20.0 points "
        "(95 % interval +15.0 to +25.0, p=0.012)."
    )
    assert not any("cheaper fix" in statement for statement in statements)


def test_worse() -> None:
    first = read_results(study(gated(0.1, -0.2)))[0]
    assert first.startswith("SCALE is worse than LoRA: 10.0 % against 30.0 %, a difference of -20.0 points")
    assert first.endswith("Use LoRA without these gates.")


@pytest.mark.parametrize("difference", [0.03, -0.03, 0.05, -0.05, 0.0])
def test_no_difference_shown(difference: float) -> None:
    """Also at the very edge, where the interval ends at zero."""
    first = read_results(study(gated(0.3 + difference, difference)))[0]
    assert first.startswith("No difference between SCALE and LoRA is shown")
    assert "does not prove them equal" in first


def test_no_verdict_without_a_paired_comparison() -> None:
    unpaired = read_results(study(row("SCALE", "scale", 0.9)))[0]
    assert unpaired == "SCALE was not compared with LoRA question by question, so no verdict is given."
    assert read_results(study(gated(0.9, 0.6), lora=row("LoRA", "baseline", None)))[0] == unpaired


def test_better_than_the_adapter_but_lower_temperature_better_still() -> None:
    statements = read_results(study(gated(0.5, 0.2), cool=0.74))
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
    above = only(read_results(study(gated(0.5, 0.2), **{key: 0.7})), name)
    assert above == f"{name} scores 70.0 %, above SCALE (50.0 %): {noun} is the cheaper fix here."
    level = only(read_results(study(gated(0.5, 0.2), **{key: 0.45})), name)
    assert level == (
        f"{name} scores 45.0 %, not told apart from SCALE (50.0 %): {noun} alone may do as much, without training."
    )
    below = only(read_results(study(gated(0.5, 0.2), **{key: 0.35})), name)
    assert below == f"{name} scores 35.0 %, below SCALE (50.0 %): {noun} alone does not do as much."


def test_what_does_not_help_is_no_fix() -> None:
    """SCALE is worse than the adapter, and so is the constant λ that beats it."""
    statements = read_results(study(gated(0.05, -0.25)))
    assert only(statements, "LoRA, one λ = 0.5") == "LoRA, one λ = 0.5 scores 27.0 %, above SCALE (5.0 %)."


def test_a_paired_difference_decides_where_intervals_overlap() -> None:
    cool = row("LoRA, T = 0.3", "control", 0.53, versus_gated={"mean": 0.03, "low": 0.01, "high": 0.05})
    assert "not told apart" in only(read_results(study(gated(0.5, 0.2), cool=0.53)), "LoRA, T = 0.3")
    assert "lower temperature is the cheaper fix here" in only(
        read_results(study(gated(0.5, 0.2), cool=cool)), "LoRA, T = 0.3"
    )


def test_controls_that_were_not_run_are_named() -> None:
    absent = {"warm": None, "cool": None, "greedy": None, "base": None, "dft": None}
    statements = read_results(study(gated(0.5, 0.2), **absent))
    assert only(statements, "Lower temperature and greedy decoding were not run").endswith("is not known.")
    assert only(statements, "The base was not run").endswith("is not known.")
    assert only(statements, "DFT was not run").endswith("is not known.")
    bare = read_results([row("LoRA", "baseline", 0.3), gated(0.5, 0.2)])
    only(bare, "Lower temperature, greedy decoding and one global λ were not run")
    only(read_results(study(gated(0.5, 0.2), greedy=None)), "Greedy decoding was not run")


def test_kind_names_a_control_that_its_name_does_not() -> None:
    rows = [*study(gated(0.5, 0.2)), row("sharper", "control", 0.9, kind="temperature")]
    assert only(read_results(rows), "Sharper").endswith("lower temperature is the cheaper fix here.")


def test_a_trained_control_is_not_a_cheap_one() -> None:
    rows = study(gated(0.5, 0.2), random=row("one λ per module, trained", "control", 0.9))
    assert not any("per module" in statement for statement in read_results(rows))


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
    statement = only(read_results(study(gated(0.5, 0.2), **{key: accuracy})), lead)
    assert statement == f"{lead}scores {100 * accuracy:.1f} %, {expected}"


def test_retention_lost_kept_gained_or_unknown() -> None:
    def retention(value: dict[str, float] | None) -> str:
        return only(read_results(study(gated(0.5, 0.2, retention=value))), "Retention")

    lost = retention({"mean": 0.68, "low": 0.6, "high": 0.76})
    assert lost == "Retention is lost against LoRA and the base: SCALE 68.0 %, LoRA 97.0 %, the base 97.0 %."
    kept = retention({"mean": 0.95, "low": 0.93, "high": 0.97})
    assert kept.startswith("Retention is kept as far as the intervals can tell: SCALE 95.0 %")
    gained = retention({"mean": 1.0, "low": 0.995, "high": 1.0})
    assert gained.startswith("Retention is kept, and above LoRA and the base: SCALE 100.0 %")
    assert retention(None) == "Retention was not measured: what SCALE costs on other skills is not known."


def test_truncation() -> None:
    def truncation(scale: float, lora: float) -> str:
        rows = study(gated(0.5, 0.2, truncated=scale), lora=row("LoRA", "baseline", 0.3, truncated=lora))
        return only(read_results(rows), "Cut off")

    assert truncation(0.01, 0.02) == "Cut off at the length limit: 1.0 % of the answers of SCALE, 2.0 % of LoRA."
    fewer = truncation(0.01, 0.2)
    assert fewer.endswith("Part of any gain may be that answers now come to an end.")
    more = truncation(0.2, 0.01)
    assert "The gates make more answers run on." in more
    assert more.endswith("A longer limit may change these scores.")


def test_entropy_is_not_taken_for_success() -> None:
    statement = only(read_results(study(gated(0.1, -0.2, entropy=0.26))), "Entropy")
    assert "0.26 nats for SCALE and 1.10 for LoRA" in statement
    assert "does not show that answers are right" in statement


def test_every_reading_ends_with_its_limits() -> None:
    for rows in ([], study(gated(0.5, 0.2)), study(row("SCALE", "scale", None))):
        assert read_results(rows)[-1].endswith("do not generalise to other bases, adapters or seeds.")


def test_gates_that_were_not_run() -> None:
    for rows in ([], study(row("SCALE", "scale", None))):
        statements = read_results(rows)
        assert statements[0] == "SCALE was not run: nothing can be concluded about the gates."
        assert len(statements) == 2


def test_other_names_and_several_gated_rows() -> None:
    rows = study(gated(0.5, 0.2), lora=row("adapter", "baseline", 0.3), warm=row("adapter, T = 0.5", "control", 0.9))
    statements = read_results(rows, adapter_name="adapter")
    assert statements[0].startswith("SCALE is better than adapter")
    assert only(statements, "Adapter, T = 0.5").endswith("lower temperature is the cheaper fix here.")
    first, second = ({**gated(0.5, 0.2), "name": name} for name in ("SCALE [-6,3]", "SCALE [-3,1]"))
    both = read_results([*study(first), second])
    assert sum("is better than LoRA" in statement for statement in both) == 2
    only(both, "2 gated variants are compared on the same questions")
    one = read_results([*study(first), second], gated_name="SCALE [-3,1]")
    assert one[0].startswith("SCALE [-3,1] is better than LoRA")
    assert not any("[-6,3]" in statement or "variants" in statement for statement in one)
