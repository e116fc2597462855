from __future__ import annotations

from chat_tokenizers import space_adding

from loragate.data.rendering import SegmentTokenizer


def test_a_piece_that_merges_with_the_newline_before_it_is_tokenised_alone():
    tokenizer = space_adding()
    tokenizer.add_tokens(["\n\n"])
    (ids,) = SegmentTokenizer(tokenizer)(["\nfour"], [True])
    assert tokenizer.decode(ids).strip(" ") == "\nfour"
