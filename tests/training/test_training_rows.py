"""The rows of a training: which are taken, whether a model can hold them, and how a step is cut into forward passes."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset

import loragate as lg
from loragate.data import EncodedRows, encode_rows, load_rows
from loragate.errors import ConfigError, DataError, TrainingError
from loragate.losses.head import IGNORE_INDEX
from loragate.training import FineTuningSettings, GateTrainingSettings
from loragate.training.checkpoints import TrainingFolder
from loragate.training.rows import (
    TrainingCollator,
    check_fits_model,
    check_packing_isolation,
    encoded_fingerprint,
    iter_step_rows,
    pack_rows,
    read_rows,
)
from loragate.training.settings import RowsSettings
from tiny import tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer

ROWS = [{"prompt": f"w{n}", "completion": f"w{n + 1}"} for n in range(8)]


@pytest.fixture
def write(tmp_path):
    def write(rows):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return RowsSettings(data=str(tmp_path / "rows.jsonl"))

    return write


@pytest.mark.parametrize(
    ("content", "change"),
    [
        (ROWS[:-1], "data.rows = 8, now it is 7"),
        (ROWS[::-1], "data.order_sha256"),
        ([*ROWS[:-1], ROWS[0]], "data.content_sha256"),
    ],
    ids=["fewer", "another order", "other rows"],
)
def test_a_resumed_run_names_what_has_changed_in_the_rows(write, tmp_path, content, change):
    def begin(rows, resume=True):
        TrainingFolder(tmp_path, True, resume).begin({"data": read_rows(write(rows), 0).as_record()})

    begin(ROWS, resume=False)
    begin(ROWS)
    with pytest.raises(TrainingError, match=change):
        begin(content)


def test_which_rows_are_taken(write):
    asked = write(ROWS)
    assert list(read_rows(asked, 3)) == ROWS[:3]
    drawn = replace(asked, select="shuffled")
    whole = read_rows(drawn, 0)
    assert list(whole) == list(read_rows(drawn, 3)) == ROWS  # without a seed the subset is left to the caller
    assert list(read_rows(drawn, 3, seed=5)) == list(whole.shuffled(5).take(3))
    assert list(read_rows(replace(drawn, select_seed=7), 3, seed=5)) == list(whole.shuffled(7).take(3))
    with pytest.raises(ConfigError, match="select_seed has no effect with select first, only with shuffled"):
        read_rows(replace(asked, select_seed=7), 3)


@pytest.fixture
def encoded(tokenizer):
    """(rows, their tokens)."""
    rows = load_rows(tiny_rows(8))
    return rows, encode_rows(rows, tokenizer, max_length=64)


def test_tokens_of_another_base_are_named(tokenizer, encoded):
    rows, tokens = encoded
    largest = max(tokens, key=lambda row: max(row["input_ids"]))
    assert max(largest["input_ids"]) >= 100
    told = f"row {largest['row']} has the token id {max(largest['input_ids'])}, but the base embeds 100 tokens"
    check_fits_model(tiny_base(), tokens, rows.where)
    small = tiny_base(vocab_size=100)
    with pytest.raises(DataError, match=told):
        lg.train_adapter(small, tokenizer, rows, FineTuningSettings(), encoded=tokens)
    with pytest.raises(DataError, match=told):
        lg.train_gates(
            tiny_adapter(base=small), tokenizer, rows, lg.GateConfig(-3, 2), GateTrainingSettings(), encoded=tokens
        )


@pytest.mark.parametrize("masked", [False, True])
def test_the_fingerprint_covers_tokens_labels_and_masks_in_their_order(masked):
    rows, plain = [], hashlib.sha256()
    for index, length in enumerate((3, 1, 5)):
        ids = list(range(10 * index, 10 * index + length))
        row = {"input_ids": ids, "labels": ids, "row": index}
        rows.append({**row, "keep_mask": [at % 2 for at in range(length)]} if masked else row)
        for key in ("input_ids", "labels", *(["keep_mask"] if masked else [])):
            plain.update(np.array(rows[-1][key], np.int64).tobytes())
    assert encoded_fingerprint(EncodedRows(rows)) == plain.hexdigest()
    assert encoded_fingerprint(EncodedRows(rows[::-1])) != plain.hexdigest()


def rows_of(*lengths):
    return [
        {"input_ids": list(range(10 * i, 10 * i + n)), "labels": list(range(10 * i, 10 * i + n)), "row": i}
        for i, n in enumerate(lengths)
    ]


LENGTHS = (3, 9, 1, 5, 2, 8, 4, 7, 6, 2, 3)


def arrange(rows, processes=1, **how):
    """All items that the loader gets, in its order: steps of 4 rows, passes of 2."""
    return [item for step in iter_step_rows(rows, 4, 2, processes, **how) for item in step]


def steps_of(arranged, size=4):
    """The rows of each step, as sets; without the unlabelled fillers."""
    rows = [row["row"] for row in arranged if any(label != IGNORE_INDEX for label in row["labels"])]
    return [set(rows[at : at + size]) for at in range(0, len(rows), size)]


@pytest.mark.parametrize("processes", [1, 2])
def test_grouping_sorts_within_a_step_only(processes):
    rows = rows_of(*LENGTHS)
    arranged = arrange(rows, processes, group_by_length=True)
    assert steps_of(arranged) == steps_of(rows)
    lengths = [len(row["input_ids"]) for row in arranged]
    assert lengths[:4] == [9, 5, 3, 1]
    assert lengths[4:8] == [8, 7, 4, 2]
    assert len(arranged) % (2 * processes) == (1 if processes == 1 else 0)
    assert arrange(rows, processes, group_by_length=True) == arranged


@pytest.mark.parametrize("processes", [1, 2])
def test_packing_makes_as_many_passes_of_the_same_rows(processes):
    rows = rows_of(*LENGTHS)
    passes = arrange(rows, processes, packing=True)
    # 4 + 4 + 3 rows in passes of 2, the last step filled up to a multiple of the processes
    assert len(passes) == 6
    labelled = [{row for row, label in zip(p["row"], p["labels"], strict=True)} for p in passes]
    per_step = [labelled[0] | labelled[1], labelled[2] | labelled[3], labelled[4] | labelled[5]]
    assert per_step == [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10}]
    assert [len(p["row"]) for p in passes[:2]] == [9, 9], "passes of a step are of like length"


def test_packed_rows_lie_end_to_end():
    item = pack_rows([{**row, "keep_mask": [1] * len(row["labels"])} for row in rows_of(2, 3)])
    assert item["input_ids"] == [0, 1, 10, 11, 12]
    assert item["labels"] == [IGNORE_INDEX, 1, IGNORE_INDEX, 11, 12], (
        "the first token of a sequence has nothing before it"
    )
    assert item["position_ids"] == [0, 1, 0, 1, 2]
    assert item["row"] == [0, 0, 1, 1, 1]
    batch = TrainingCollator(tiny_tokenizer())([item])
    assert batch["input_ids"].shape == (1, 5)
    assert "attention_mask" not in batch
    assert batch["keep_mask"].dtype == torch.bool


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_sequences_do_not_see_each_other(attention):
    model = tiny_base()
    model.set_attn_implementation(attention)
    check_packing_isolation(model, torch.device("cpu"))


def test_a_model_that_ignores_the_boundaries_is_refused(monkeypatch):
    model = tiny_base()
    original = model.forward

    def deaf(*args, position_ids=None, **kwargs):
        return original(*args, **kwargs)

    monkeypatch.setattr(model, "forward", deaf)
    with pytest.raises(ConfigError, match="packed sequences read each other"):
        check_packing_isolation(model, torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"per_device_train_batch_size": 2}, True),
        ({"per_device_train_batch_size": 1, "packing": True}, True),
        ({"per_device_train_batch_size": 1}, False),
        ({"per_device_train_batch_size": 2, "max_length": 16}, False),
    ],
)
def test_rows_beyond_the_short_rope_are_named_where_they_share_a_pass(tokenizer, caplog, options, warned):
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 10000.0, **factors}
    base = tiny_base(max_position_embeddings=64, rope_parameters=rope)
    rows = [{"prompt": "w1", "completion": " ".join(["w2"] * count)} for count in (3, 30, 4, 5)]
    settings = FineTuningSettings(batch_size=4, max_steps=1, rank=2, **options)
    lg.train_adapter(base, tokenizer, rows, settings)
    assert ("1 of 4 rows have more than 16 tokens" in caplog.text) is warned


def test_evaluated_rows_beyond_the_short_rope_change_no_other(tokenizer, tmp_path):
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 10000.0, **factors}
    rows = [{"prompt": "w1", "completion": " ".join(["w2"] * count)} for count in (3, 30, 4, 5, 40)]
    mean = {}
    for size in (1, 4):
        trainer = lg.GateTrainer(
            tiny_adapter(base=tiny_base(max_position_embeddings=64, rope_parameters=rope)),
            lg.GateTrainingArguments(str(tmp_path), per_device_eval_batch_size=size),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            gates=lg.GateConfig(-6, 3),
        )
        mean[size] = trainer.evaluate()["eval_topk_entropy"]
    assert mean[4] == pytest.approx(mean[1], abs=1e-6)
    # which is what the gates are measured by, in passes of its own
    encoded = encode_rows(load_rows(rows), tokenizer, max_length=64)
    assert trainer.measure(encoded[:])[0] == pytest.approx(mean[1], abs=1e-6)
