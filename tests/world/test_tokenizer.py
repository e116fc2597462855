"""The tokenizer of the shipped base: a token for each of its 144 words, and prompts that are prefixes."""

import pytest
from transformers import AutoTokenizer, Qwen2Config

from loragate.world.base import SHIPPED_BASE, load_base

USER = {"role": "user", "content": "solve 6 * 0 - 5"}
ASSISTANT = {"role": "assistant", "content": "6 * 0 = 0 0 - 5 = 5 answer 5"}


@pytest.fixture(scope="module")
def tokenizer():
    return load_base()[1]


def test_every_word_survives_a_round_trip(tokenizer):
    text = tokenizer.decode(range(144))
    assert len(text.split()) == 144
    assert tokenizer(text)["input_ids"] == list(range(144))


def test_prompt_is_a_prefix_in_characters_and_tokens(tokenizer):
    prompt = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([USER, ASSISTANT], tokenize=False)
    assert prompt == f"<q> {USER['content']} <a>"
    assert whole == f"{prompt} {ASSISTANT['content']} <eos>"
    prompt_ids = tokenizer(prompt)["input_ids"]
    assert tokenizer(whole)["input_ids"][: len(prompt_ids)] == prompt_ids


def test_auto_tokenizer_beside_a_qwen2_configuration_reads_the_same_ids(tokenizer, tmp_path):
    text = "<q> solve 6 * 0 - 5 <a> answer 5 <eos>"
    again = AutoTokenizer.from_pretrained(SHIPPED_BASE)
    Qwen2Config(vocab_size=144).save_pretrained(tmp_path)
    again.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.decode(again(text)["input_ids"]) == text
    assert again.padding_side == "left"
    assert again.chat_template == tokenizer.chat_template
