"""data.json: what a run was trained on, and what is said when it is not there any more."""

from __future__ import annotations

import pytest
from chat_tokenizers import byte_level

from loragate.data import encode_rows, load_rows
from loragate.data.record import NAME, describe_missing, read_record, require_same_rows, rows_record
from loragate.errors import DataError
from loragate.files import write_json


@pytest.fixture
def rows(talk):
    return [{"messages": talk(f"What is {n}?", f"It is {n}.")} for n in range(1, 9)]


def test_counts_order_and_content(rows, talk, tmp_path):
    given = load_rows([*rows, {"messages": talk("?", "")}])
    record = rows_record(given, encode_rows(given, byte_level(), max_length=40), max_rows=9)
    assert (record["rows"], record["trained"], record["without_response"]) == (9, 8, 1)
    assert record["max_rows"] == 9
    assert record["order_sha256"] == given.fingerprint != given.shuffled(1).fingerprint
    assert record["content_sha256"] == given.content == given.shuffled(1).content != load_rows(rows).content
    write_json(tmp_path / NAME, record)
    assert read_record(tmp_path) == record


def test_a_changed_file_is_named_with_what_changed(rows, write, tmp_path):
    path = write("rows.jsonl", rows)
    given = load_rows(path)
    require_same_rows(tmp_path, given)  # a run without a record says nothing
    write_json(tmp_path / NAME, rows_record(given, encode_rows(given, byte_level(), max_length=None)))
    require_same_rows(tmp_path, load_rows(path))
    for content, change in (
        (rows[:-1], "it gave 8 rows then and gives 7 now"),
        (rows[::-1], "are in another order now"),
        ([*rows[:-1], rows[0]], "its 8 rows are not the same ones any more"),
    ):
        with pytest.raises(DataError, match=f"{path} has changed since the run .*{change}"):
            require_same_rows(tmp_path, load_rows(write("rows.jsonl", content)))
    error = describe_missing(tmp_path, DataError("found no file rows.jsonl."))
    assert "begun with 8 rows of" in str(error)


def test_a_seeded_subset_is_the_beginning_of_a_larger_one(rows):
    given = load_rows(rows)
    subset = given.shuffled(42).take(3)
    assert list(subset) == list(given.shuffled(42).take(5))[:3]
    assert list(subset) != list(given.shuffled(43).take(3))


def test_a_column_store_gives_the_same_rows_and_hashes(rows):
    import datasets

    from loragate.data.rows import Rows

    stored = Rows(datasets.Dataset.from_list(rows), source="hub", place="hub row ").shuffled(3)
    given = load_rows(rows).shuffled(3)
    assert list(stored) == list(given)
    assert (stored.fingerprint, stored.content) == (given.fingerprint, given.content)
