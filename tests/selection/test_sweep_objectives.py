"""The objective as an axis: anchored gates, which sample while they train, beside the paper's, with and without Ray."""

from __future__ import annotations

import json
import math

import pytest
from places import arguments, numbers, stamps, sweep

from loragate.errors import LoragateError

ANCHORED = ("--objectives", "entropy,anchored", "--anchor", "mixture", "--max-new-tokens", "4", "--refresh", "1")
CELLS = ("entropy_-3_2", "entropy_0_1", "anchored_-3_2", "anchored_0_1")


def of_both(place, out, *more):
    return arguments(place, out, *ANCHORED, *more, seeds="0")


@pytest.fixture(scope="module")
def both(place, once):
    """Two ranges × two objectives × one seed, in sequence."""

    def fill(folder):
        assert sweep(of_both(place, folder / "sweep", "--runner", "sequential")) == 0

    return once("both-objectives", fill) / "sweep"


def test_each_objective_is_trained_with_its_own_settings(both, swept):
    found = numbers(both)
    assert set(found) == {"one_untouched", *(f"one_{cell}_seed0" for cell in CELLS)}
    for cell in CELLS:
        record = found[f"one_{cell}_seed0"]["training"]
        objective = cell.split("_")[0]
        settings = record["settings"]
        assert settings["objective"] == objective
        assert record["steps"] == 3
        assert ("anchor" in settings) == (objective == "anchored"), "a setting that is not read is not recorded"
    anchored = found["one_anchored_-3_2_seed0"]["training"]["settings"]
    assert (anchored["anchor"], anchored["beta"], anchored["refresh"]) == ("mixture", 1.0, 1)
    gates = {cell: json.dumps(found[f"one_{cell}_seed0"]["gates"]) for cell in CELLS}
    assert len(set(gates.values())) == 4
    # the cells of the paper's objective are those of a sweep without the other
    assert found["one_entropy_-3_2_seed0"]["gates"] == numbers(swept)["one_entropy_-3_2_seed0"]["gates"]


def test_the_choice_is_among_all_objectives(both):
    summary = json.loads((both / "sweep_results.json").read_text())
    cells = {(cell["objective"], cell["lower"], cell["upper"]): cell for cell in summary["cells"]}
    assert set(cells) == {(objective, *b) for objective in ("entropy", "anchored") for b in ((-3.0, 2.0), (0.0, 1.0))}
    assert all(math.isfinite(cell["probe"]["mean"]) for cell in cells.values())
    (choice,) = summary["choices"]
    best = max(cell["probe"]["mean"] for cell in cells.values())
    assert choice["candidates"] == 4
    assert choice["accepted"] == (best > choice["adapter_probe"]["mean"])
    assert (both / "heatmap_anchored.png").exists()
    assert (both / "heatmap.png").exists()


@pytest.mark.slow("training")
def test_an_anchored_trial_that_was_cut_off_goes_on(place, both, tmp_path, monkeypatch):
    """Cut off after a checkpoint, it ends with the numbers of the uninterrupted one."""
    from loragate.training import on_policy

    out, step = tmp_path / "cut", on_policy._Loop._gradient

    def stumble(loop, logged):
        if loop.step == 2:
            raise RuntimeError("the machine went away")
        return step(loop, logged)

    with monkeypatch.context() as patched:
        patched.setattr(on_policy._Loop, "_gradient", stumble)
        with pytest.raises(LoragateError, match="are not finished"):
            sweep(of_both(place, out, "--runner", "sequential"))
    before = stamps(out)
    assert set(before) == {"one_untouched", "one_entropy_-3_2_seed0", "one_entropy_0_1_seed0"}
    assert list((out / "trials" / "one_anchored_0_1_seed0" / "run").glob("checkpoint*"))
    assert sweep(of_both(place, out, "--runner", "sequential", "--resume")) == 0
    after = stamps(out)
    assert {slug: after[slug] for slug in before} == before
    assert numbers(out) == numbers(both)


@pytest.mark.slow("processes")
def test_ray_gives_the_same_numbers(place, both, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed")
    out = tmp_path / "ray"
    assert sweep(of_both(place, out, "--runner", "ray", "--workers", "2")) == 0
    assert numbers(out) == numbers(both)
