"""Cells, choice and oracle from hand-made scores."""

from __future__ import annotations

import json

import numpy as np

from loragate.evaluation import average_at_k, compare
from loragate.evaluation.statistics import holm
from loragate.gates.range import Range
from loragate.selection.candidate import grid
from loragate.selection.outcome import best_record, summarise, written_of
from loragate.selection.probe import Scored
from loragate.selection.store import Study, TrialResult

RANGES = [Range(-3, 1), Range(0, 1), Range(-6, 3)]
PLAN = Study(grid("a", RANGES, [0, 1], ["entropy"]), {"x": 1})


def scored(mean, seed):
    return Scored((np.random.default_rng(seed).random((40, 4)) < mean).astype(float), {"finished": 1.0}, "", "q")


def results(means):
    """{slug: result}; `means` is {(lower, upper): share right}, (1, 1) being the adapter."""
    found = {}
    for number, trial in enumerate(PLAN.candidates):
        key = (1.0, 1.0) if trial.range is None else (trial.range.lower, trial.range.upper)
        training = (
            {} if trial.range is None else {"entropy_before": 0.4, "entropy_after": 0.2, "gates": {"below_zero": 0.1}}
        )
        found[trial.slug] = TrialResult(trial, scored(means[key], number), None, training, {}, {"training": 2.0})
    return found


MEANS = {(1.0, 1.0): 0.3, (-3.0, 1.0): 0.7, (0.0, 1.0): 0.35, (-6.0, 3.0): 0.05}


def test_seeds_are_averaged_within_questions_and_holm_covers_all_cells():
    found = results(MEANS)
    summary = summarise(PLAN, found)
    assert [cell["name"] for cell in summary["cells"]] == ["[-3,1]", "[0,1]", "[-6,3]"]
    cell = summary["cells"][0]
    both = np.concatenate([found[f"a_entropy_-3_1_seed{seed}"].probe.scores for seed in (0, 1)], axis=1)
    own = found["a_untouched"].probe.scores
    estimate = average_at_k(both)
    assert (cell["probe"]["mean"], cell["probe"]["low"]) == (estimate.mean, estimate.low)
    assert cell["probe"]["questions"] == 40
    assert cell["answers"] == 40 * 4 * 2
    assert cell["difference"]["p"] == compare(both, own).p
    adjusted = holm([cell["difference"]["p"] for cell in summary["cells"]])
    assert [cell["difference"]["p_holm"] for cell in summary["cells"]] == adjusted
    assert [cell["differs"] for cell in summary["cells"]] == [True, False, True]
    assert summary["seconds"]["training"] == 14.0
    json.dumps(summary, allow_nan=False)


def test_the_best_cell_is_chosen_on_the_probe():
    summary = summarise(PLAN, results(MEANS))
    choice = summary["choices"][0]
    assert (choice["picked"], choice["accepted"], choice["lower"], choice["seed"]) == ("[-3,1]", True, -3.0, 0)
    record = best_record(PLAN, summary, choice, {"kind": "labelled"})
    assert record["method"].startswith("best of 3 on a labelled probe")
    assert (record["candidates"], record["n"], record["range"]) == (3, 320, [-3.0, 1.0])
    assert set(record["evidence"]) == {"adapter", "[-3,1]", "[0,1]", "[-6,3]"}
    assert record["difference"]["comparisons"] == 3
    json.dumps(record, allow_nan=False)


def test_the_adapter_remains_where_nothing_beats_it_and_on_a_tie():
    low = {**MEANS, (1.0, 1.0): 0.99}
    choice = summarise(PLAN, results(low))["choices"][0]
    assert (choice["picked"], choice["accepted"]) == ("adapter", False)
    nothing = dict.fromkeys(MEANS, 0.0)
    assert summarise(PLAN, results(nothing))["choices"][0]["picked"] == "adapter"


def test_what_is_written_beats_the_adapter_by_itself():
    """The cell wins on the average of its seeds, and its first seed is worse than the adapter."""
    found = results(MEANS)
    slug = "a_entropy_-3_1_seed0"
    found[slug] = TrialResult(found[slug].candidate, scored(0.1, 7), None, found[slug].training)
    summary = summarise(PLAN, found)
    choice = summary["choices"][0]
    assert (choice["picked"], choice["seed"]) == ("[-3,1]", 1)
    worse, better = summary["cells"][0]["by_seed"]
    assert worse < choice["adapter_probe"]["mean"] < better
    assert written_of(PLAN, choice).slug == "a_entropy_-3_1_seed1"


def test_a_cell_that_lacks_a_seed_is_shown_but_not_chosen():
    found = results(MEANS)
    del found["a_entropy_-3_1_seed1"]
    summary = summarise(PLAN, found)
    assert summary["cells"][0]["complete"] is False
    assert summary["choices"][0]["picked"] != "[-3,1]"
    assert summary["missing"] == ["a_entropy_-3_1_seed1"]


def test_nothing_finished_yet():
    summary = summarise(PLAN, {})
    assert (summary["choices"], summary["cells"], len(summary["missing"])) == ([], [], 7)
