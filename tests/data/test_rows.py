from __future__ import annotations

import hashlib

import datasets
import pytest

from loragate.data.rows import Rows
from loragate.errors import DataError


def rows_of(items):
    return Rows(items, source="f.jsonl", place="f.jsonl:", numbers=[2 * index + 1 for index in range(len(items))])


def test_a_row_keeps_its_place_through_views():
    rows = rows_of([{"n": n} for n in range(20)])
    view = rows.shuffled(3).take(7)[2:5]
    assert len(view) == 3
    for index, row in enumerate(view):
        assert view.where(index) == f"f.jsonl:{2 * row['n'] + 1}"
    assert view.source == "f.jsonl"


def test_shuffling_depends_on_the_seed_alone_and_changes_nothing_else():
    rows = rows_of([{"n": n} for n in range(50)])
    first, again, other = rows.shuffled(1), rows.shuffled(1), rows.shuffled(2)
    assert list(first) == list(again) != list(other)
    assert sorted(row["n"] for row in first) == list(range(50))
    assert [row["n"] for row in rows] == list(range(50))
    assert [row["n"] for row in rows_of([{"n": n} for n in range(6)]).shuffled(0)] == [4, 2, 1, 0, 5, 3]


def test_fingerprint_is_of_content_and_order():
    a, b = {"x": 1, "y": [1.0, 2.5], "z": None}, {"x": 2, "y": []}
    fingerprint = rows_of([a, b]).fingerprint
    assert fingerprint == rows_of([{"y": [1, 2.5], "x": 1}, b]).fingerprint
    assert len(fingerprint) == 64
    changed = [[b, a], [a], [a, {**b, "x": 3}], [a, {**b, "w": 0}], [{**a, "y": [1, 2.25]}, b]]
    assert len({fingerprint, *(rows_of(items).fingerprint for items in changed)}) == 6


def test_fingerprint_is_the_hash_of_canonical_json_lines():
    rows = rows_of([{"prompt": "ä", "completion": "b"}, {"n": 2.0}])
    assert rows.fingerprint == hashlib.sha256(b'{"completion":"b","prompt":"\\u00e4"}\n{"n":2}\n').hexdigest()


def test_a_row_nested_too_deeply_is_a_data_error():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(DataError, match=r"f.jsonl:1: the row is nested too deeply"):
        _ = rows_of([{"a": deep}]).fingerprint


def test_a_column_store_gives_the_same_rows_and_hashes():
    items = [{"messages": [{"role": "user", "content": f"What is {n}?"}]} for n in range(8)]
    given = rows_of(items).shuffled(3)
    stored = Rows(datasets.Dataset.from_list(items), source="hub", place="hub row ").shuffled(3)
    assert list(stored) == list(given)
    assert stored.as_record() == given.as_record()
    sorted_, shuffled = rows_of(items).as_record(), given.as_record()
    assert sorted_["content_sha256"] == shuffled["content_sha256"] != rows_of(items[1:]).as_record()["content_sha256"]
    assert sorted_["order_sha256"] != shuffled["order_sha256"]
