"""Rows cut into forward passes: the same rows in every step, whatever the arrangement."""

import pytest
import torch

from loragate.errors import ConfigError
from loragate.losses.head import IGNORED
from loragate.training import GateTrainingSettings, trainer
from loragate.training.arrangement import PackedCollator, arranged_steps, balanced, packed, require_separate_sequences
from tiny import tiny_base


def rows_of(*lengths):
    return [
        {"input_ids": list(range(10 * i, 10 * i + n)), "labels": list(range(10 * i, 10 * i + n)), "row": i}
        for i, n in enumerate(lengths)
    ]


def settings(**changes):
    return GateTrainingSettings(**{"batch_size": 4, "per_device_train_batch_size": 2, **changes})


LENGTHS = (3, 9, 1, 5, 2, 8, 4, 7, 6, 2, 3)


def arrange(rows, how, processes=1):
    """All items that the loader gets, in its order."""
    return [item for step in arranged_steps(rows, how, processes) for item in step]


def steps_of(arranged, size=4):
    """The rows of each step, as sets; without the unlabelled fillers."""
    rows = [row["row"] for row in arranged if any(label != IGNORED for label in row["labels"])]
    return [set(rows[at : at + size]) for at in range(0, len(rows), size)]


def test_plain_rows_keep_their_order():
    rows = rows_of(*LENGTHS)
    assert arrange(rows, settings()) == rows
    filled = arrange(rows, settings(), processes=2)
    assert filled[:11] == rows
    assert len(filled) == 12
    assert set(filled[11]["labels"]) == {IGNORED}


@pytest.mark.parametrize("processes", [1, 2])
def test_grouping_sorts_within_a_step_only(processes):
    rows = rows_of(*LENGTHS)
    arranged = arrange(rows, settings(group_by_length=True), processes)
    assert steps_of(arranged) == steps_of(rows)
    lengths = [len(row["input_ids"]) for row in arranged]
    assert lengths[:4] == [9, 5, 3, 1]
    assert lengths[4:8] == [8, 7, 4, 2]
    assert len(arranged) % (2 * processes) == (1 if processes == 1 else 0)
    assert arrange(rows, settings(group_by_length=True), processes) == arranged


@pytest.mark.parametrize("processes", [1, 2])
def test_packing_makes_as_many_passes_of_the_same_rows(processes):
    rows = rows_of(*LENGTHS)
    passes = arrange(rows, settings(packing=True), processes)
    # 4 + 4 + 3 rows in passes of 2, the last step filled up to a multiple of the processes
    assert len(passes) == 6
    labelled = [{row for row, label in zip(p["row"], p["labels"], strict=True)} for p in passes]
    per_step = [labelled[0] | labelled[1], labelled[2] | labelled[3], labelled[4] | labelled[5]]
    assert per_step == [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10}]
    assert [len(p["row"]) for p in passes[:2]] == [9, 9], "passes of a step are of like length"


def test_a_pass_without_rows_is_filled_without_labels():
    passes = arrange(rows_of(3), settings(packing=True), 2)
    assert len(passes) == 2
    assert sum(label != IGNORED for p in passes for label in p["labels"]) == 2


def test_packed_rows_lie_end_to_end():
    item = packed([{**row, "keep_mask": [1] * len(row["labels"])} for row in rows_of(2, 3)])
    assert item["input_ids"] == [0, 1, 10, 11, 12]
    assert item["labels"] == [IGNORED, 1, IGNORED, 11, 12], "the first token of a sequence has nothing before it"
    assert item["position_ids"] == [0, 1, 0, 1, 2]
    assert item["row"] == [0, 0, 1, 1, 1]
    batch = PackedCollator()([item])
    assert batch["input_ids"].shape == (1, 5)
    assert "attention_mask" not in batch
    assert batch["keep_mask"].dtype == torch.bool


def test_balanced_parts_are_nearly_equal_and_complete():
    rows = rows_of(*LENGTHS)
    parts = balanced(rows, 3)
    sums = [sum(len(row["input_ids"]) for row in part) for part in parts]
    assert sum(sums) == sum(LENGTHS)
    assert max(sums) - min(sums) <= 2
    assert sorted(row["row"] for part in parts for row in part) == list(range(11))
    assert all([row["row"] for row in part] == sorted(row["row"] for row in part) for part in parts)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_sequences_do_not_see_each_other(attention):
    model = tiny_base()
    model.set_attn_implementation(attention)
    require_separate_sequences(model, torch.device("cpu"))


def test_a_model_that_ignores_the_boundaries_is_refused(monkeypatch):
    model = tiny_base()
    original = model.forward

    def deaf(*args, position_ids=None, **kwargs):
        return original(*args, **kwargs)

    monkeypatch.setattr(model, "forward", deaf)
    with pytest.raises(ConfigError, match="packed sequences read each other"):
        require_separate_sequences(model, torch.device("cpu"))


@pytest.mark.parametrize("how", [{}, {"packing": True}], ids=["plain", "packed"])
def test_a_data_set_that_is_made_in_parts_is_the_same(monkeypatch, how):
    rows = [{**row, "keep_mask": [1] * len(row["labels"])} for row in rows_of(*LENGTHS)]
    for size in (1, 5, 100):
        monkeypatch.setattr(trainer, "ROWS_AT_A_TIME", size)
        assert trainer.as_dataset(rows, settings(**how), 2).to_list() == arrange(rows, settings(**how), 2)
