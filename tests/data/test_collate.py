from __future__ import annotations

import pytest
import torch

from loragate.data import Collator
from loragate.errors import ConfigError, DataError

ROWS = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "row": 4}, {"input_ids": [8], "labels": [-100], "row": 2}]


def test_padding_on_the_right():
    batch = Collator(9)(ROWS)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [-100, -100, -100]]
    assert batch["row"].tolist() == [4, 2]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert set(batch) == {"input_ids", "attention_mask", "labels", "row"}


def test_keep_mask_is_boolean_and_false_on_padding():
    rows = [{**ROWS[0], "keep_mask": [0, 1, 0]}, {**ROWS[1], "keep_mask": [1]}]
    batch = Collator(9)(rows)
    assert batch["keep_mask"].dtype == torch.bool
    assert batch["keep_mask"].tolist() == [[False, True, False], [True, False, False]]
    with pytest.raises(DataError, match=r"found keep_mask on rows \[4\] of a batch of 2"):
        Collator(9)([rows[0], ROWS[1]])


def test_a_tokenizer_without_a_pad_token_is_refused():
    with pytest.raises(ConfigError, match="pad_token_id must be a whole number"):
        Collator(None)
