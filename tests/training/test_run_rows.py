"""The rows of a training: which are taken, what data.json says of them, and what is said when they are not there any more."""

import json
from dataclasses import replace

import pytest

from loragate.data import encode_rows
from loragate.errors import ConfigError, DataError
from loragate.training import StageOneSettings
from loragate.training.rows import ROWS_RECORD, keep_rows_record, read_rows
from loragate.training.settings import RowsSettings

ROWS = [{"prompt": f"w{n}", "completion": f"w{n + 1}"} for n in range(8)]


@pytest.fixture
def write(tmp_path):
    def write(rows):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return RowsSettings(data=str(tmp_path / "rows.jsonl"))

    return write


@pytest.fixture
def keep(tokenizer, tmp_path):
    def keep(asked, resume):
        rows = read_rows(asked, 0, begun=tmp_path if resume else None)
        encoded = encode_rows(rows, tokenizer, max_length=40)
        keep_rows_record(asked, StageOneSettings(), 9, tmp_path, rows, encoded, resume)
        return rows

    return keep


def test_the_record_has_counts_order_and_content(write, keep, tmp_path):
    rows = keep(write([*ROWS, {"prompt": "w1", "completion": ""}]), resume=False)
    record = json.loads((tmp_path / ROWS_RECORD).read_text())
    assert (record["rows"], record["trained"], record["without_response"], record["max_rows"]) == (9, 8, 1, 9)
    assert record["order_sha256"] == rows.fingerprint != rows.shuffled(1).fingerprint
    assert record["content_sha256"] == rows.content == rows.shuffled(1).content


def test_a_changed_file_is_named_with_what_changed(write, keep, tmp_path):
    keep(write(ROWS), resume=True)  # without a record there is nothing to compare
    before = (tmp_path / ROWS_RECORD).read_bytes()
    keep(write(ROWS), resume=True)
    for content, change in (
        (ROWS[:-1], "gave 8 rows then and gives 7 now"),
        (ROWS[::-1], "in another order now"),
        ([*ROWS[:-1], ROWS[0]], "not the same ones any more"),
    ):
        with pytest.raises(DataError, match=f"rows.jsonl has changed since the run .*{change}"):
            keep(write(content), resume=True)
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(DataError, match="begun with 8 rows of"):
        keep(RowsSettings(data=str(tmp_path / "rows.jsonl")), resume=True)
    assert (tmp_path / ROWS_RECORD).read_bytes() == before


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
