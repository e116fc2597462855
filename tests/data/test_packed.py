"""Long preparation: packed, cached and spread over processes, always with the items of the plain path."""

from __future__ import annotations

import pytest
from chat_tokenizers import CHATML_DEFAULT, THINKING, byte_level

from loragate.data import encoding
from loragate.data.encoding import encode_rows
from loragate.data.loading import load_rows
from loragate.data.packed import PackedRows
from loragate.errors import DataError


@pytest.fixture
def rows(talk):
    rows = [{"messages": talk(f"What is {n}?", f"It is {n}." + " four" * n)} for n in range(1, 41)]
    rows[7] = {"messages": talk("Silent?", " ")}
    rows[9] = {"messages": talk("What is " + "this " * 300 + "?", "Cut.")}
    return rows


ITEMS = [
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "row": 0},
    {"input_ids": [0, 0], "labels": [-100, 0], "row": 4},
]


def test_packing_changes_nothing():
    masks = [{**item, "keep_mask": [0] * (len(item["labels"]) - 1) + [1]} for item in ITEMS]
    for items in (ITEMS, masks):
        packed = PackedRows.of(items)
        assert list(packed) == items
        assert packed[-1] == items[-1]
        assert packed[0:2] == items
        assert list(PackedRows.joined([packed, PackedRows.of([]), packed])) == items * 2
    with pytest.raises(IndexError):
        PackedRows.of(ITEMS)[2]


def test_cached_rows_equal_fresh_ones(rows, tmp_path):
    tokenizer = byte_level(CHATML_DEFAULT)
    plain = encode_rows(rows, tokenizer, max_length=200)
    told = []
    first = encode_rows(rows, tokenizer, max_length=200, cache=tmp_path)
    again = encode_rows(rows, tokenizer, max_length=200, cache=tmp_path, on_progress=lambda *at: told.append(at))
    assert list(plain) == list(first) == list(again)
    assert told == [(40, 40)]
    assert (plain.summary.cached, first.summary.cached, again.summary.cached) == (False, False, True)
    assert (again.summary.rows, again.summary.empty, again.summary.dropped) == (40, 1, 1)
    assert again.summary.response_tokens == plain.summary.response_tokens
    assert len(list(tmp_path.iterdir())) == 1


def test_whatever_changes_the_tokens_changes_the_key(rows, tmp_path):
    def made(rows=rows, template=CHATML_DEFAULT, **settings):
        settings = {"max_length": 200, "system": "none", **settings}
        return encode_rows(rows, byte_level(template), cache=tmp_path, **settings).summary.cached

    assert not made()
    assert made()
    assert not made(rows=rows[::-1])
    assert not made(rows=rows[:-1])
    assert not made(template=THINKING)
    assert not made(max_length=100)
    assert not made(system="keep")
    assert made(system="keep")
    tokenizer = byte_level(CHATML_DEFAULT)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<four>"]})
    assert not encode_rows(rows, tokenizer, max_length=200, cache=tmp_path).summary.cached


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign"])
def test_a_damaged_cache_is_not_trusted(rows, tmp_path, damage, caplog):
    tokenizer = byte_level()
    plain = list(encode_rows(rows, tokenizer, max_length=200, cache=tmp_path))
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[-9] ^= 1
    else:
        content = bytearray(b"not a cache")
    file.write_bytes(content)
    again = encode_rows(rows, tokenizer, max_length=200, cache=tmp_path)
    assert list(again) == plain
    assert not again.summary.cached
    assert encode_rows(rows, tokenizer, max_length=200, cache=tmp_path).summary.cached, "it was written anew"


@pytest.mark.slow("processes")
def test_processes_give_the_same_rows_in_the_same_order(rows, monkeypatch):
    monkeypatch.setattr(encoding, "BATCH", 8)
    tokenizer, told = byte_level(CHATML_DEFAULT), []
    alone = encode_rows(rows, tokenizer, max_length=200)
    spread = encode_rows(
        rows, tokenizer, max_length=200, processes=2, on_progress=lambda done, total: told.append(done)
    )
    assert list(spread) == list(alone)
    assert spread.summary == alone.summary
    assert told == [8, 16, 24, 32, 40]
    with pytest.raises(DataError, match="row 30: found the keys text"):
        encode_rows([*rows[:30], {"text": "?"}, *rows[30:]], tokenizer, max_length=200, processes=2)


def test_rows_without_a_response_are_counted(talk, write):
    rows = [{"messages": talk("a", "b")}, {"messages": talk("a", "")}, {"messages": talk("a", "\n")}]
    summary = encode_rows(rows, byte_level(), max_length=None).summary
    assert (summary.rows, summary.empty, summary.dropped) == (3, 2, 0)
    path = write("rows.jsonl", rows[1:])
    with pytest.raises(DataError, match="the response of every one of 2 rows is empty"):
        encode_rows(load_rows(path), byte_level(), max_length=None)
