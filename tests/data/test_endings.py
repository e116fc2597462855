from __future__ import annotations

import pytest
from chat_tokenizers import CHATML, GEMMA, LLAMA2, LLAMA3, NO_END, byte_level, space_adding
from transformers import GenerationConfig

from loragate.data.encoding import encode_rows
from loragate.data.endings import ending_health

ROWS = [
    {"messages": [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "four" * n}]}
    for n in (1, 1, 9, 1)
]


@pytest.mark.parametrize(
    ("tokenizer", "ends"),
    [
        (byte_level(CHATML, eos="<|im_end|>"), ("<|im_end|>",)),
        (byte_level(LLAMA3, bos="<|begin_of_text|>", eos="<|eot_id|>"), ("<|eot_id|>",)),
        (byte_level(GEMMA, bos="<bos>", eos="<end_of_turn>"), ("<end_of_turn>",)),
        (space_adding(LLAMA2), ("", "</s>")),
        (byte_level(None), ("<|endoftext|>",)),
    ],
    ids=["chatml", "llama3", "gemma", "llama2", "no template"],
)
def test_a_template_that_ends_in_eos_is_healthy(tokenizer, ends):
    report = ending_health(tokenizer)
    assert tuple(token.strip() for token in report.end_tokens) == ends
    assert report.stops
    assert report.stop_ids == (tokenizer.eos_token_id,)
    assert report.problems == []
    assert report.share_ending is None


def test_a_base_model_that_never_stops_is_told():
    tokenizer = byte_level(CHATML)
    end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    report = ending_health(tokenizer, encode_rows(ROWS, tokenizer, max_length=None))
    assert not report.stops
    assert report.end_ids == (end,)
    assert report.share_ending == 0.0
    assert report.problems == [
        f"The chat template ends an assistant turn with <|im_end|> (id {end}), while generation stops only at "
        f"<|endoftext|> (id {eos}), from tokenizer.eos_token_id: responses will run on to the token limit. "
        f"Add {end} to generation_config.eos_token_id."
    ]


@pytest.mark.parametrize(("stop", "stops"), [([0, 2], True), (2, True), ([0], False), (None, True)])
def test_the_generation_config_decides_where_it_names_stop_tokens(stop, stops):
    tokenizer = byte_level(CHATML, eos="<|im_end|>")
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]) == [0, 2]
    report = ending_health(tokenizer, generation_config=GenerationConfig(eos_token_id=stop))
    assert report.stops is stops
    assert ("from generation_config.eos_token_id" in "".join(report.problems)) is not stops


def test_the_share_of_rows_that_end_in_a_stop_token():
    tokenizer = byte_level(CHATML, eos="<|im_end|>")
    whole = encode_rows(ROWS, tokenizer, max_length=None)
    assert ending_health(tokenizer, whole).share_ending == 1.0
    cut = encode_rows(ROWS, tokenizer, max_length=len(whole[2]["input_ids"]) - 1)
    report = ending_health(tokenizer, cut)
    assert report.share_ending == 0.75
    assert len(report.problems) == 1
    assert report.problems[0].startswith("25.0% of the rows have a last response that does not end in a stop token")


def test_plain_rows_that_stop_are_healthy_whatever_the_template_says():
    tokenizer = byte_level(CHATML)
    encoded = encode_rows([{"prompt": "two", "completion": " four"}], tokenizer, max_length=None)
    report = ending_health(tokenizer, encoded)
    assert report.share_ending == 1.0
    assert report.problems == []


def test_a_template_without_an_end_of_turn_is_told():
    report = ending_health(byte_level(NO_END))
    assert report.end_ids == ()
    assert len(report.problems) == 1
    assert "writes no token after an assistant turn" in report.problems[0]


def test_an_end_of_turn_in_many_tokens_is_told():
    report = ending_health(byte_level(CHATML.replace("<|im_end|>", "<|fin|>")))
    assert len(report.end_ids) > 1
    assert f"<|fin|> as {len(report.end_ids)} tokens" in report.problems[0]
    assert "as one special token" in report.problems[0]


def test_a_tokenizer_without_any_stop_token_is_told():
    report = ending_health(byte_level(CHATML, eos=None))
    assert report.stop_ids == ()
    assert report.problems == [
        "Neither the tokenizer nor the generation config names an end-of-sequence token, so generation never stops by "
        "itself; set tokenizer.eos_token_id."
    ]
