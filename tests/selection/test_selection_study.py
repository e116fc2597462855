"""Ranges, trials, labels, and the identity file that a resumed sweep is compared with."""

from __future__ import annotations

import json

import pytest

from loragate.errors import ConfigError, DataError
from loragate.gates.range import Range
from loragate.selection.candidate import Candidate, grid, label_of, parse_candidates
from loragate.selection.store import Study


def study(**identity):
    return Study(
        grid("a", [Range(-3, 1), Range(0, 1)], [0, 1], ["entropy"]),
        identity or {"data": {"rows": 3}},
    )


def test_trials_are_the_product_and_the_adapter_comes_first():
    trials = grid("b", [Range(-3.0, 1.0), Range(0.0, 1.5)], [0, 7], ["entropy", "anchored"])
    assert len(trials) == 1 + 2 * 2 * 2
    assert trials[0] == Candidate(None, "adapter", adapter="b")
    assert [trial.range for trial in trials].count(None) == 1
    slugs = [trial.slug for trial in trials]
    assert len(set(slugs)) == len(slugs)
    assert slugs[:2] == ["b_untouched", "b_entropy_-3_1_seed0"]
    assert slugs[-1] == "b_anchored_0_1.5_seed7"


@pytest.mark.parametrize(("seeds", "objectives", "word"), [([0, 0], ["entropy"], "seed 0"), ([0], [], "no objective")])
def test_a_trial_runs_once(seeds, objectives, word):
    with pytest.raises(ConfigError, match=word):
        grid("a", [Range(0.0, 1.0)], seeds, objectives)


def test_a_candidate_reads_as_it_was_written():
    every = [
        Candidate(None, "base"),
        Candidate(None, "adapter", temperature=0.3),
        Candidate(None, "adapter", temperature=0.0),
        Candidate(None, "constant", temperature=0.6, scale=0.5),
        Candidate(Range(-3, 1.5), "ce", 7, "a"),
    ]
    assert [Candidate.from_record(json.loads(json.dumps(one.as_record()))) for one in every] == every
    assert [one.cell for one in every] == ["base", "adapter T=0.3", "adapter greedy", "λ=0.5 T=0.6", "[-3,1.5] ce"]
    assert [one.slug for one in every] == [
        "base",
        "untouched_T0.3",
        "untouched_T0",
        "constant_0.5_T0.6",
        "a_ce_-3_1.5_seed7",
    ]
    assert [one.kind for one in every] == ["base", "adapter", "adapter", "constant", "gates"]
    assert [one.fixed for one in every[:4]] == [0.0, 1.0, 1.0, 0.5]


def test_candidates_are_read_as_typed():
    found = parse_candidates("0,1;-6,3@anchored", "ce", 4)
    assert found == (Candidate(Range(0, 1), "ce", 4), Candidate(Range(-6, 3), "anchored", 4))
    for text, words in (
        ("0,1@anchord", "anchored"),
        ("0,1;0,1", "stands there twice"),
        (" ; ", "found no range"),
        ("x", "two numbers"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_candidates(text)


def test_an_adapter_has_a_short_label():
    assert [label_of(place) for place in ("x/run", "owner/my lora", "/")] == ["run", "my-lora", "adapter"]


def test_the_same_sweep_is_resumed_and_another_is_refused(tmp_path):
    study().begin(tmp_path, resume=False)
    study().begin(tmp_path, resume=True)
    assert json.loads((tmp_path / "sweep.json").read_text())["fingerprint"] == study().fingerprint
    other = study(data={"rows": 4})
    assert other.fingerprint != study().fingerprint
    with pytest.raises(ConfigError, match=r"begun with data\.rows = 3, now it is 4"):
        other.begin(tmp_path, resume=True)
    fewer = Study(study().candidates[:2], study().identity)
    with pytest.raises(ConfigError, match=r"trials\.a_entropy_0_1_seed0"):
        fewer.begin(tmp_path, resume=True)
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        study().begin(tmp_path, resume=True)


def test_another_study_is_named_by_what_differs_and_not_by_its_fingerprint(tmp_path):
    study(data={"rows": 3}).begin(tmp_path, resume=False)
    study(data={"rows": 3}).begin(tmp_path, resume=True)
    with pytest.raises(ConfigError, match="quantization = none, now it is '4bit'"):
        study(data={"rows": 3}, quantization="4bit").begin(tmp_path, resume=True)
    (tmp_path / "sweep.json").write_text("[]")
    with pytest.raises(DataError, match=r"sweep.json: found .*, expected a record"):
        study(data={"rows": 3}).begin(tmp_path, resume=True)
