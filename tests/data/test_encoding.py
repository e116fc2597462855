from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from chat_tokenizers import CHATML, CHATML_DEFAULT, THINKING, byte_level, decoded, learned

from loragate.data import encoding
from loragate.data.encoding import Collator, EncodedRows, encode_rows
from loragate.data.rows import load_rows
from loragate.errors import ConfigError, DataError


@pytest.fixture
def rows(talk):
    return [{"messages": talk(f"What is {n}?", f"It is {n}." + " four" * n)} for n in range(1, 11)]


def test_rows_and_their_account(rows):
    tokenizer = byte_level(CHATML_DEFAULT)
    encoded = encode_rows(rows, tokenizer, max_length=None)
    assert [item["row"] for item in encoded] == list(range(10))
    assert learned(encoded[2], tokenizer) == "It is 3. four four four<|im_end|>"
    assert decoded(encoded[0], tokenizer).startswith("<|im_start|>user\n")  # no default system message
    assert all(set(item) == {"input_ids", "labels", "row"} for item in encoded)
    summary = encoded.summary
    assert (summary.format, summary.rows, summary.dropped, summary.truncated) == ("messages", 10, 0, 0)
    assert summary.response_tokens == sum(label != -100 for item in encoded for label in item["labels"])
    assert summary.response_tokens + summary.prompt_tokens == sum(len(item["input_ids"]) for item in encoded)
    assert summary.last_turn_only == 0
    assert encoded[1:3] == [encoded[1], encoded[2]]


def test_rows_without_a_response_left_are_dropped_and_counted(rows, talk):
    tokenizer = byte_level()
    rows[4] = {"messages": talk("What is " + "this " * 80 + "?", "It is five.")}
    lengths = [len(item["input_ids"]) for item in encode_rows(rows, tokenizer, max_length=None)]
    limit = lengths[6]
    encoded = encode_rows(rows, tokenizer, max_length=limit)
    assert [item["row"] for item in encoded] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert encoded.summary.dropped == 1
    assert encoded.summary.truncated == sum(length > limit for length in lengths) - 1 == 3
    assert encoded.summary.rows == 10
    assert max(len(item["input_ids"]) for item in encoded) == limit
    with pytest.raises(DataError, match="rows in memory: max_length=2 cuts the whole response of every one of 10 rows"):
        encode_rows(rows, tokenizer, max_length=2)


def test_progress_is_told_batch_by_batch(rows, monkeypatch):
    monkeypatch.setattr(encoding, "BATCH", 4)
    told = []
    encoded = encode_rows(
        rows, byte_level(), max_length=None, on_progress=lambda done, total: told.append((done, total))
    )
    assert told == [(4, 10), (8, 10), (10, 10)]
    assert [item["row"] for item in encoded] == list(range(10))


def test_rows_of_which_only_the_last_turn_is_learned_are_counted(talk):
    rows = [
        {"messages": talk("a", "<think>x</think>b", "c", "d")},
        {"messages": talk("a", "b", "c", "d")},
        {"messages": talk("a", "<think>x</think>b")},
    ]
    assert encode_rows(rows, byte_level(THINKING), max_length=None).summary.last_turn_only == 1


def test_the_first_bad_row_is_named_by_line(write, talk):
    good, bad = {"messages": talk("a", "b")}, {"messages": talk("a")}
    path = write("rows.jsonl", [good, bad, good])
    with pytest.raises(DataError, match=f"{path}:2: found user, but no assistant turn"):
        encode_rows(load_rows(path), byte_level(), max_length=None)
    path = write("rows.jsonl", [good, {"instruction": "a", "output": "b"}])
    with pytest.raises(DataError, match=f"{path}:2: found the keys instruction, output, expected the format messages"):
        encode_rows(load_rows(path), byte_level(), max_length=None)
    path = write("rows.jsonl", [{"text": "a"}])
    with pytest.raises(DataError, match=f"{path}:1: found the keys text, which fit no known row format"):
        encode_rows(load_rows(path), byte_level(), max_length=None)
    path = write("rows.jsonl", [{"text": str(i)} for i in range(9)])
    with pytest.raises(DataError, match=f"{path}:1: found the keys text"):
        encode_rows(load_rows(path).shuffled(seed=3), byte_level(), max_length=None)


def test_keep_masks_are_spread_and_checked(write, talk):
    row = {"messages": talk("a", "b"), "keep_mask": [0, 1]}
    path = write("rows.jsonl", [row, {**row, "keep_mask": [1, 0, 1]}])
    encoded = encode_rows(load_rows(path, limit=1), byte_level(), max_length=None)
    assert encoded[0]["keep_mask"] == [0] * (len(encoded[0]["input_ids"]) - 1) + [1]
    with pytest.raises(DataError, match=f"{path}:2: keep_mask has 3 entries, expected 2: one per response token"):
        encode_rows(load_rows(path), byte_level(), max_length=None)
    path = write("rows.jsonl", [row, {"messages": talk("a", "b")}])
    with pytest.raises(DataError, match=f"{path}:2: the row has no keep_mask, unlike {path}:1; give it on every row"):
        encode_rows(load_rows(path), byte_level(), max_length=None)


def test_tool_calls_from_a_column_store_are_those_of_json_lines(write, tmp_path):
    """A column store writes null for the arguments of other rows' tools; rows of one fingerprint have one text."""
    template = CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    )
    tokenizer = byte_level("{% if tools %}{{ tools | tojson }}{% endif %}" + template)

    def row(name, argument):
        call = {"type": "function", "function": {"name": name, "arguments": {argument: "x"}}}
        schema = {"type": "function", "function": {"name": name, "parameters": {argument: {"type": "string"}}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        return {"messages": [{"role": "user", "content": "q"}, answer], "tools": [schema]}

    data = [row("weather", "city"), row("search", "query")]
    pq.write_table(pa.Table.from_pylist(data), tmp_path / "rows.parquet")
    lines, columns = load_rows(write("rows.jsonl", data)), load_rows(tmp_path / "rows.parquet")
    assert lines.fingerprint == columns.fingerprint
    by_line, by_column = (list(encode_rows(rows, tokenizer, max_length=None)) for rows in (lines, columns))
    assert by_line == by_column
    assert '"arguments": {"query": "x"}' in learned(by_column[1], tokenizer)


ITEMS = [
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "row": 0},
    {"input_ids": [0, 0], "labels": [-100, 0], "row": 4},
]


def test_packing_changes_nothing():
    masks = [{**item, "keep_mask": [0] * (len(item["labels"]) - 1) + [1]} for item in ITEMS]
    for items in (ITEMS, masks):
        packed = EncodedRows(items)
        assert list(packed) == items
        assert packed[-1] == items[-1]
        assert packed[0:2] == items
    with pytest.raises(IndexError):
        EncodedRows(ITEMS)[2]


def test_rows_without_a_response_are_counted(talk, write):
    rows = [{"messages": talk("a", "b")}, {"messages": talk("a", "")}, {"messages": talk("a", "\n")}]
    summary = encode_rows(rows, byte_level(), max_length=None).summary
    assert (summary.rows, summary.empty, summary.dropped) == (3, 2, 0)
    path = write("rows.jsonl", rows[1:])
    with pytest.raises(DataError, match="the response of every one of 2 rows is empty"):
        encode_rows(load_rows(path), byte_level(), max_length=None)


TWO = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "row": 4}, {"input_ids": [8], "labels": [-100], "row": 2}]


def test_padding_on_the_right():
    batch = Collator(9)(TWO)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [-100, -100, -100]]
    assert batch["row"].tolist() == [4, 2]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert set(batch) == {"input_ids", "attention_mask", "labels", "row"}


def test_keep_mask_is_boolean_and_false_on_padding():
    rows = [{**TWO[0], "keep_mask": [0, 1, 0]}, {**TWO[1], "keep_mask": [1]}]
    batch = Collator(9)(rows)
    assert batch["keep_mask"].dtype == torch.bool
    assert batch["keep_mask"].tolist() == [[False, True, False], [True, False, False]]
    with pytest.raises(DataError, match=r"found keep_mask on rows \[4\] of a batch of 2"):
        Collator(9)([rows[0], TWO[1]])


def test_a_tokenizer_without_a_pad_token_is_refused():
    with pytest.raises(ConfigError, match="pad_token_id must be a whole number"):
        Collator(None)


def test_masks_on_some_items_are_refused() -> None:
    """One mask of three would be laid over another item's tokens."""
    with pytest.raises(DataError, match="give it on every one or on none"):
        EncodedRows([ITEMS[0], {**ITEMS[1], "keep_mask": [1] * len(ITEMS[1]["input_ids"])}])
