from __future__ import annotations

import pytest
from chat_tokenizers import byte_level, space_adding

from loragate.data.rendering import SegmentTokenizer


def test_a_piece_that_merges_with_the_newline_before_it_is_tokenised_alone():
    tokenizer = space_adding()
    tokenizer.add_tokens(["\n\n"])
    (ids,) = SegmentTokenizer(tokenizer)(["\nfour"], [True])
    assert tokenizer.decode(ids).strip(" ") == "\nfour"


def test_special_tokens_of_the_tokenizer_are_added_to_plain_prompts_only():
    tokenizer = space_adding()
    tokenise = SegmentTokenizer(tokenizer)
    assert tokenise.leading == [tokenizer.bos_token_id]
    (ids,) = tokenise(["two plus two"], [False])
    assert tokenizer.bos_token_id not in ids
    assert tokenise.plain_prompt(ids) == tokenizer("two plus two")["input_ids"]


def test_bos_is_not_doubled():
    tokenizer = byte_level(bos="<bos>", adds_bos=True)
    tokenise = SegmentTokenizer(tokenizer)
    (ids,) = tokenise(["<bos>two"], [False])
    assert tokenise.plain_prompt(ids) == ids
    assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_level(bos="<bos>")], ids=["no bos", "bos not added"])
def test_no_bos_where_the_tokenizer_adds_none(tokenizer):
    tokenise = SegmentTokenizer(tokenizer)
    assert tokenise.leading == []
    assert tokenise.plain_prompt([5, 6]) == [5, 6]
    assert tokenise([], []) == []
