from __future__ import annotations

import pytest
from chat_tokenizers import CHATML, CHATML_DEFAULT, GEMMA, LLAMA2, LLAMA3, NO_END, QWEN3, byte_level, space_adding
from transformers import GenerationConfig

from loragate.data.encoding import encode_rows
from loragate.data.endings import ending_health, find_endings
from loragate.errors import ConfigError

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


def test_a_base_model_whose_eos_is_another_token_stops_at_the_end_of_the_turn():
    tokenizer = byte_level(CHATML)
    end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    report = ending_health(tokenizer, encode_rows(ROWS, tokenizer, max_length=None))
    assert report.stops
    assert report.end_tokens == ("<|im_end|>",)
    assert report.stop_ids == tuple(sorted((end, eos)))
    assert report.problems == []
    found = find_endings(tokenizer)
    assert (found.token_ids, found.texts, found.declared) == ({end, eos}, (), {eos})
    assert found.added == {"token_ids": [end]}


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML, "<|im_end|>"),
        (CHATML_DEFAULT, "<|im_end|>"),
        (QWEN3, "<|im_end|>"),
        (CHATML.replace("<|im_end|>", " <|im_end|>"), "<|im_end|>"),
        (CHATML.replace("<|im_end|>", "<|im_end|><|endoftext|>"), "<|im_end|>"),
        (CHATML.replace("<|im_end|>", "<fin><|im_end|>"), "<|im_end|>"),
        # it writes the header of an answer whether it is asked for or not
        (CHATML.replace("{% if add_generation_prompt %}", "").removesuffix("{% endif %}"), "<|im_end|>"),
        (CHATML.replace("<|im_end|>", "<fin>"), "<fin>"),
    ],
)
def test_the_token_that_ends_a_turn_is_found(template, ends):
    tokenizer = byte_level(template)
    tokenizer.add_tokens(["<fin>"])
    wanted = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(ends)}
    assert find_endings(tokenizer).token_ids == wanted
    assert find_endings(tokenizer, GenerationConfig(eos_token_id=[7, 8]), [9]).token_ids == wanted | {7, 8, 9}
    assert not find_endings(tokenizer).texts


def test_tokenizer_and_generation_config_count_both():
    tokenizer = byte_level(CHATML, eos="<|im_end|>")
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]) == [0, 2]
    for stop in ([0, 2], 2, [0], None):
        found = find_endings(tokenizer, GenerationConfig(eos_token_id=stop))
        assert found.token_ids == found.declared
        assert found.token_ids == ({0, 2} if isinstance(stop, list) else {2})
        assert found.added == {}


def test_the_share_of_rows_that_end_in_a_stop_token():
    tokenizer = byte_level(CHATML, eos="<|im_end|>")
    whole = encode_rows(ROWS, tokenizer, max_length=None)
    assert ending_health(tokenizer, whole).problems == []
    cut = encode_rows(ROWS, tokenizer, max_length=len(whole[2]["input_ids"]) - 1)
    report = ending_health(tokenizer, cut)
    assert len(report.problems) == 1
    assert report.problems[0].startswith(
        "25.0% of the rows have a last response that does not end where generation stops"
    )


def test_an_end_of_turn_in_ordinary_tokens_is_a_text_to_stop_at():
    tokenizer = byte_level(CHATML.replace("<|im_end|>", "<|fin|>"))
    found = find_endings(tokenizer)
    assert (found.token_ids, found.texts, found.added) == ({0}, ("<|fin|>",), {"texts": ["<|fin|>"]})
    report = ending_health(tokenizer, encode_rows(ROWS, tokenizer, max_length=None))
    assert report.stops
    assert len(report.problems) == 1
    assert len(report.end_tokens) > 1
    assert f"<|fin|> as {len(report.end_tokens)} ordinary token" in report.problems[0]
    assert "as one special token" in report.problems[0]
    whole = encode_rows(ROWS[:2], tokenizer, max_length=None)
    cut = encode_rows(ROWS[:2], tokenizer, max_length=len(whole[0]["input_ids"]) - 1)
    assert "100.0% of the rows" in ending_health(tokenizer, cut).problems[-1]


def test_a_tokenizer_without_any_stop_token_is_told():
    tokenizer = byte_level(NO_END, eos=None)
    report = ending_health(tokenizer)
    assert report.stop_ids == ()
    assert len(report.problems) == 1
    assert "never stops by itself" in report.problems[0]
    with pytest.raises(ConfigError, match="pass stop_token_ids"):
        find_endings(tokenizer)
    assert find_endings(byte_level(CHATML, eos=None)).token_ids == {2}, "the end of the turn is enough"
