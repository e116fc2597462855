import pytest
from transformers import AutoTokenizer, Qwen2Config

from loragate.world.tokenizer import build_tokenizer, words

USER = {"role": "user", "content": "solve 6 * 0 - 5"}
ASSISTANT = {"role": "assistant", "content": "6 * 0 = 0 0 - 5 = 5 answer 5"}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_every_word_survives_a_round_trip(tokenizer):
    text = " ".join(words())
    encoded = tokenizer(text)["input_ids"]
    assert encoded == list(range(144))
    assert tokenizer.decode(encoded) == text


def test_prompt_is_a_prefix_in_characters_and_tokens(tokenizer):
    prompt = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([USER, ASSISTANT], tokenize=False)
    assert prompt == f"<q> {USER['content']} <a>"
    assert whole == f"{prompt} {ASSISTANT['content']} <eos>"
    prompt_ids = tokenizer(prompt)["input_ids"]
    assert tokenizer(whole)["input_ids"][: len(prompt_ids)] == prompt_ids


def test_auto_tokenizer_beside_a_qwen2_configuration_reads_the_same_ids(tokenizer, tmp_path):
    text = "<q> solve 6 * 0 - 5 <a> answer 5 <eos>"
    for folder in (tmp_path / "saved", tmp_path / "saved-again"):
        Qwen2Config(vocab_size=144).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer(text)["input_ids"] == build_tokenizer()(text)["input_ids"]
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        assert tokenizer.padding_side == "left"
        assert tokenizer.chat_template == build_tokenizer().chat_template
