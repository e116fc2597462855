"""Ranges, trials, labels, and the identity file that a resumed sweep is compared with."""

from __future__ import annotations

import json

import pytest

from loragate.errors import ConfigError, DataError
from loragate.gates.range import Range
from loragate.sweep import SweepPlan, Trial
from loragate.sweep.plan import label_adapters, make_trials


def plan(**identity):
    return SweepPlan(
        make_trials(["a"], [Range(-3, 1), Range(0, 1)], [0, 1], ["entropy"]),
        identity or {"data": {"rows": 3}},
    )


def test_trials_are_the_product_and_each_adapter_comes_first():
    trials = make_trials(["a", "b"], [Range(-3.0, 1.0), Range(0.0, 1.5)], [0, 7], ["entropy", "anchored"])
    assert len(trials) == 2 * (1 + 2 * 2 * 2)
    assert trials[0] == Trial.untouched("a")
    assert trials[9] == Trial.untouched("b")
    assert [trial.kind for trial in trials].count("adapter") == 2
    slugs = [trial.slug for trial in trials]
    assert len(set(slugs)) == len(slugs)
    assert slugs[1] == "a_entropy_-3_1_seed0"
    assert slugs[-1] == "b_anchored_0_1.5_seed7"
    assert slugs[0] == "a_untouched"


@pytest.mark.parametrize(("seeds", "objectives", "word"), [([0, 0], ["entropy"], "seed 0"), ([0], [], "no objective")])
def test_a_trial_runs_once(seeds, objectives, word):
    with pytest.raises(ConfigError, match=word):
        make_trials(["a"], [Range(0.0, 1.0)], seeds, objectives)


def test_adapters_have_short_labels(tmp_path):
    for name in ("x/run", "y/run"):
        (tmp_path / name).mkdir(parents=True)
    places = [str(tmp_path / "x/run"), str(tmp_path / "y/run"), "owner/my lora"]
    assert list(label_adapters(places)) == ["run", "run-2", "my-lora"]
    with pytest.raises(ConfigError, match="given twice"):
        label_adapters([str(tmp_path / "x/run"), str(tmp_path / "x/../x/run")])
    with pytest.raises(ConfigError, match="no adapter"):
        label_adapters([])


def test_the_same_sweep_is_resumed_and_another_is_refused(tmp_path):
    plan().begin(tmp_path, resume=False)
    plan().begin(tmp_path, resume=True)
    assert json.loads((tmp_path / "sweep.json").read_text())["fingerprint"] == plan().fingerprint
    other = plan(data={"rows": 4})
    assert other.fingerprint != plan().fingerprint
    with pytest.raises(ConfigError, match=r"begun with data\.rows = 3, now it is 4"):
        other.begin(tmp_path, resume=True)
    fewer = SweepPlan(plan().trials[:2], plan().identity)
    with pytest.raises(ConfigError, match=r"trials\.a_entropy_0_1_seed0"):
        fewer.begin(tmp_path, resume=True)
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        plan().begin(tmp_path, resume=True)
