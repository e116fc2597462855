"""Every chat template that TRL ships: the response's text and its end are exactly what carries loss, behind the whole prompt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trl
from chat_tokenizers import byte_level, decoded, learned

from loragate.data import encode_rows
from loragate.errors import DataError

TEMPLATES = {path.stem: path.read_text() for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")}
# family: (what its template writes before an answer's text, what it writes to end the turn)
FAMILIES = {
    "cohere": ("", "<|END_OF_TURN_TOKEN|>"),
    "cohere2": ("", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    "deepseek": None,
    "diffusion_gemma": ("", "<turn|>"),
    "gemma": ("", "<end_of_turn>"),
    "gemma4": ("", "<turn|>"),
    "glm4moe": ("\n<think></think>\n", ""),
    "glm4moe_training": ("\n<think></think>\n", "<|user|>"),
    "gptoss": ("<|channel|>final<|message|>", "<|return|>"),
    "idefics3": (" ", "<end_of_utterance>"),
    "lfm2": ("", "<|im_end|>"),
    "llama3": ("", "<|eot_id|>"),
    "llava_next": (" ", "</s>"),
    "muse_glimmer": (" to=user<|message|>", "<|eot|>"),
    "nemotron": None,
    "phi3": ("", "<|end|>"),
    "qwen": ("", "<|im_end|>"),
    "qwen3_5_think": ("\n</think>\n\n", "<|im_end|>"),
    "qwen3_6": ("\n</think>\n\n", "<|im_end|>"),
    "qwen3_8": ("\n</think>\n\n", "<|im_end|>"),
    "qwen3_training": ("<think>\n\n</think>\n\n", "<|im_end|>"),
    "smolvlm": (" ", "<end_of_utterance>"),
}
# these write earlier answers in another way than the last: only the last one is learned
LAST_ONLY = {"gptoss", "gptoss_training", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}
TALK = [("user", "Ask one?"), ("assistant", "Reply one."), ("user", "Ask two?"), ("assistant", "Reply two.")]
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
# of these families tool calls cannot be learned: not written, or behind a think block that the prompt has opened
REFUSE_CALLS = (
    "cohere",
    "deepseek",
    "gemma",
    "idefics3",
    "lfm2",
    "llama3",
    "llava_next",
    "nemotron",
    "phi3",
    "qwen2_5_vl",
    "smolvlm",
)
WRITE_CALLS = ("gemma4", "lfm2_2_5", "lfm2_v2", "llama3_1", "llama3_2")


def family(stem: str):
    """The longest entry of the table that begins the name."""
    return FAMILIES[max((name for name in FAMILIES if stem.startswith(name)), key=len)]


def tokenizer_of(stem: str):
    """A tokenizer that has the template's control texts as tokens, as the model's own has."""
    tokenizer = byte_level(TEMPLATES[stem], bos="<bos>", eos="<|endoftext|>")
    controls = re.findall(r"<\|[^<>|{}' ]+\|>|<｜[^<>{}' ]+｜>|<end_of_\w+>|<\|?turn\|?>|</s>", TEMPLATES[stem])
    tokenizer.add_tokens(sorted(set(controls)), special_tokens=True)
    return tokenizer


def encode(stem: str, *messages, **columns):
    tokenizer = tokenizer_of(stem)
    talk = [{"role": role, "content": content} for role, content in messages]
    return encode_rows([{"messages": talk, **columns}], tokenizer, max_length=None)[0], tokenizer


@pytest.mark.parametrize("stem", sorted(TEMPLATES))
def test_the_answer_and_its_end_carry_loss_and_nothing_else(stem):
    if family(stem) is None:  # their generation prompt opens a think block that a plain answer does not continue
        with pytest.raises(DataError, match=r"generation prompt ends in .*<think>"):
            encode(stem, *TALK[:2])
        return
    before, end = family(stem)
    end_of_all = end + "\n<|endoftext|>" if stem.startswith("phi3") else end
    encoded, tokenizer = encode(stem, *TALK[:2])
    assert learned(encoded, tokenizer) == f"{before}Reply one.{end_of_all}"
    blocks = [{"type": "text", "text": "Ask one?"}]  # which the templates of vision models read alone
    prompts = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        for content in ("Ask one?", blocks)
    )
    whole = next(text for text in prompts if "Ask one?" in text)
    length = sum(label == -100 for label in encoded["labels"])
    assert whole.endswith(tokenizer.decode(encoded["input_ids"][:length]).removeprefix("<bos>"))
    both, _ = encode(stem, *TALK)
    first = "" if stem in LAST_ONLY else f"{before}Reply one.{end}"
    assert learned(both, tokenizer) == f"{first}{before}Reply two.{end_of_all}"


@pytest.mark.parametrize("stem", sorted(name for name in TEMPLATES if name.startswith("glm4moe")))
def test_the_beginning_of_glm_is_no_system_message(stem):
    """Its answers end in the header of the next turn, which is not the end of a system message."""
    encoded, tokenizer = encode(stem, *TALK[:2])
    assert decoded(encoded, tokenizer).startswith("[gMASK]<sop><|user|>\nAsk one?<|assistant|>")


@pytest.mark.parametrize("stem", sorted(TEMPLATES))
def test_a_tool_call_is_learned_with_its_arguments_or_refused(stem):
    tokenizer = tokenizer_of(stem)
    talk = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    rows = [{"messages": talk}]
    if stem.startswith(REFUSE_CALLS) and not stem.startswith(WRITE_CALLS):
        with pytest.raises(DataError, match=r"does not write its call|renders the answer differently"):
            encode_rows(rows, tokenizer, max_length=None)
        return
    text = learned(encode_rows(rows, tokenizer, max_length=None)[0], tokenizer)
    assert "get_weather" in text
    assert "Paris" in text
    assert '\\"city' not in text, "the arguments are an object, and not the text of one"


CHANNELS = "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' ' ~ m.channel if m.channel else '' }}\n{{ m.content }}<|im_end|>\n"
CHANNELS += "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"


@pytest.mark.parametrize("stem", ["gptoss", "gptoss_training", "qwen2_5"])
def test_a_turn_of_a_channel_that_the_template_does_not_read_is_refused(stem):
    """Harmony's reasoning would be learned as an answer; what the template writes from other keys stands."""
    tokenizer, ask = tokenizer_of(stem), {"role": "user", "content": "Ask one?"}
    final = {"role": "assistant", "channel": "final", "content": "Reply one."}
    for channel in ("analysis", "commentary"):
        turn = {"role": "assistant", "channel": channel, "content": "They ask."}
        with pytest.raises(DataError, match=rf"message 1 has the channel '{channel}', which the .* the key thinking"):
            encode_rows([{"messages": [ask, turn, final]}], tokenizer, max_length=None)
        (item,) = encode_rows([{"messages": [ask, {**turn, "train": False}, final]}], tokenizer, max_length=None)
        assert "Reply one." in learned(item, tokenizer)
        assert "They ask." not in learned(item, tokenizer), "switched off it is context"
        own = byte_level(CHANNELS)
        (item,) = encode_rows([{"messages": [ask, turn, final]}], own, max_length=None)
        assert learned(item, own) == f" {channel}\nThey ask.<|im_end|> final\nReply one.<|im_end|>"
    (item,) = encode_rows([{"messages": [ask, final]}], tokenizer, max_length=None)
    assert "Reply one." in learned(item, tokenizer)
    call = {"role": "assistant", "channel": "commentary", "content": None, "tool_calls": [CALL]}
    (item,) = encode_rows([{"messages": [ask, call]}], tokenizer, max_length=None)
    assert "get_weather" in learned(item, tokenizer)
    if stem != "qwen2_5":
        (item,) = encode_rows([{"messages": [ask, {**final, "thinking": "They ask."}]}], tokenizer, max_length=None)
        assert "<|channel|>analysis<|message|>They ask.<|end|>" in learned(item, tokenizer)


def test_variables_of_the_template_open_nemotron():
    """With thinking switched off in the row, the prompt closes the block that it otherwise leaves open."""
    stem = next(name for name in sorted(TEMPLATES) if name.startswith("nemotron") and name.endswith("_training"))
    encoded, tokenizer = encode(stem, *TALK[:2], chat_template_kwargs={"enable_thinking": False})
    assert learned(encoded, tokenizer) == "Reply one.<|im_end|>"
