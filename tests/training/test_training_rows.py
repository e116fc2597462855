"""The rows of a training: which are taken, whether a model can hold them, and what is said when a run is to go on with others."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

import loragate as lg
from loragate.data import EncodedRows, encode_rows, load_rows
from loragate.errors import ConfigError, DataError, TrainingError
from loragate.training import FineTuningSettings, GateTrainingSettings
from loragate.training.rows import encoded_fingerprint, read_rows, require_short_enough
from loragate.training.run_folder import prepare_folder
from loragate.training.settings import RowsSettings
from tiny import tiny_adapter, tiny_base, tiny_rows

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
    prepare_folder({"data": read_rows(write(ROWS), 0).as_record()}, tmp_path, resume=False)
    prepare_folder({"data": read_rows(write(ROWS), 0).as_record()}, tmp_path, resume=True)
    with pytest.raises(TrainingError, match=change):
        prepare_folder({"data": read_rows(write(content), 0).as_record()}, tmp_path, resume=True)


def test_which_rows_are_taken(write):
    asked = write(ROWS)
    assert list(read_rows(asked, 3)) == ROWS[:3]
    drawn = replace(asked, select="shuffled")
    whole = read_rows(drawn, 0)
    assert list(whole) == list(read_rows(drawn, 3)) == ROWS  # without a seed the subset is left to the caller
    assert list(read_rows(drawn, 3, seed=5)) == list(whole.shuffled(5).take(3))
    assert list(read_rows(replace(drawn, select_seed=7), 3, seed=5)) == list(whole.shuffled(7).take(3))
    with pytest.raises(ConfigError, match="select-seed"):
        read_rows(replace(drawn, select_seed=7), 0)


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
    require_short_enough(tiny_base(), tokens, rows.where)
    small = tiny_base(vocab_size=100)
    with pytest.raises(DataError, match=told):
        lg.train_adapter(small, tokenizer, rows, FineTuningSettings(), encoded=tokens)
    with pytest.raises(DataError, match=told):
        lg.train_gates(
            tiny_adapter(base=small), tokenizer, rows, lg.GateConfig(-3, 2), GateTrainingSettings(), encoded=tokens
        )


def test_rows_longer_than_the_model_are_named(encoded):
    rows, tokens = encoded
    longest = max(tokens, key=lambda row: len(row["input_ids"]))
    with pytest.raises(TrainingError, match=f"row {longest['row']} has {len(longest['input_ids'])} tokens"):
        require_short_enough(tiny_base(max_position_embeddings=8), tokens, rows.where)


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
