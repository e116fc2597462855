from __future__ import annotations

from chat_tokenizers import byte_level, space_adding

from loragate.data.rendering import SegmentTokenizer


def test_a_piece_that_merges_with_the_newline_before_it_is_tokenised_alone():
    tokenizer = space_adding()
    tokenizer.add_tokens(["\n\n"])
    (ids,) = SegmentTokenizer(tokenizer)(["\nfour"], [True])
    assert tokenizer.decode(ids).strip(" ") == "\nfour"


def test_bos_is_not_doubled():
    tokenizer = byte_level(bos="<bos>", adds_bos=True)
    tokenise = SegmentTokenizer(tokenizer)
    (ids,) = tokenise(["<bos>two"], [False])
    assert tokenise.plain_prompt(ids) == ids
    assert ids.count(tokenizer.bos_token_id) == 1
