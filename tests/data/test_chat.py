from __future__ import annotations

import pytest
from chat_tokenizers import (
    BLOCKS,
    CHATML,
    CHATML_DEFAULT,
    CHATML_TOOLS,
    GEMMA,
    LLAMA2,
    LLAMA3,
    NO_END,
    OPENS_THINKING,
    PREAMBLE,
    QWEN3,
    THINKING,
    THINKING_DEFAULT,
    byte_level,
    space_adding,
)

from loragate.data.chat import Chat, template_hash
from loragate.data.formats import Turns
from loragate.errors import DataError

LLAMA3_TOKENS = {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"}
USER = "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        (CHATML, {}, USER),
        (CHATML_DEFAULT, {}, USER),
        (CHATML_TOOLS, {}, USER),
        (THINKING, {}, USER),
        (THINKING_DEFAULT, {}, USER),
        (PREAMBLE, {}, "A chat follows.\n" + USER),
        (LLAMA3, LLAMA3_TOKENS, "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"),
        (GEMMA, {"bos": "<bos>"}, "<bos><start_of_turn>user\nhi<end_of_turn>\n"),
        (NO_END, {}, "user: hi\n"),
    ],
    ids=["chatml", "qwen2.5", "tools", "qwen3", "thinking-default", "preamble", "llama3.1", "gemma", "no-end"],
)
def test_system_none_takes_out_exactly_the_injected_system_message(template, tokens, expected, talk):
    tokenizer = byte_level(template, **tokens)
    assert Chat(tokenizer, "none").render(talk("hi")) == expected
    kept = Chat(tokenizer, "keep").render(talk("hi"))
    assert kept == tokenizer.apply_chat_template(talk("hi"), tokenize=False)


def test_system_none_takes_a_default_out_of_the_middle_of_a_user_turn(talk):
    chat = Chat(space_adding(LLAMA2))
    assert chat.render(talk("hi", "ho", "hu")) == "<s>[INST] hi [/INST] ho </s><s>[INST] hu [/INST]"


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (byte_level(CHATML_DEFAULT), "<|im_start|>system\nBe brief.<|im_end|>\n" + USER),
        (
            byte_level(LLAMA3, **LLAMA3_TOKENS),
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
        ),
        (space_adding(LLAMA2), "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nhi [/INST]"),
    ],
    ids=["qwen2.5", "llama3.1", "llama2"],
)
def test_a_system_message_of_the_conversation_stays(tokenizer, expected, talk):
    assert Chat(tokenizer, "none").render(talk("hi", system="Be brief.")) == expected


def test_tool_descriptions_stay_in_the_system_block(talk):
    tokenizer = byte_level(CHATML_TOOLS)
    text = Chat(tokenizer).render(talk("hi"), tools=[{"name": "add"}])
    assert text == '<|im_start|>system\nYou are a helpful assistant.\n[{"name": "add"}]<|im_end|>\n' + USER


def test_a_default_system_message_that_changes_is_an_error(talk):
    """A template with the time of day in its system message renders differently after the probe."""
    tokenizer = byte_level(CHATML_DEFAULT)
    chat = Chat(tokenizer)
    tokenizer.chat_template = CHATML_DEFAULT.replace("helpful", "sleepy")
    with pytest.raises(DataError, match=r"f:3: the chat template's own system message changed .*helpful.*sleepy"):
        chat.render(talk("hi"), where="f:3")


def segments(tokenizer, messages, **kwargs):
    pieces, rewritten = Chat(tokenizer).segments(Turns(messages=tuple(messages), **kwargs), "f:1")
    return [(text, response) for text, response in pieces], rewritten


def test_earlier_turns_without_reasoning_are_all_responses(talk):
    pieces, rewritten = segments(byte_level(THINKING), talk("a", "b", "c", "<think>y</think>d"))
    assert not rewritten
    assert [text for text, response in pieces if response] == ["b<|im_end|>", "<think>y</think>d<|im_end|>"]


def test_an_empty_think_block_of_the_template_is_no_response(talk):
    """What is trained after a prompt is what generation is to write after it: neither is given the block."""
    tokenizer = byte_level(QWEN3)
    rendered = tokenizer.apply_chat_template(talk("a", "b"), tokenize=False)
    assert rendered.endswith("assistant\n<think>\n\n</think>\n\nb<|im_end|>\n")
    pieces, rewritten = segments(tokenizer, talk("a", "b", "c", "d"))
    assert not rewritten, "both turns are rendered alike, so both are learned"
    assert [text for text, response in pieces if response] == ["b<|im_end|>", "d<|im_end|>"]
    prompts = ["".join(text for text, _ in pieces[:count]) for count in (1, 3)]
    assert prompts == [Chat(tokenizer).render(talk(*turns), generation_prompt=True) for turns in ("a", "abc")]


@pytest.mark.parametrize("answer", ["<think>\nwhy\n</think>\n\nb", "<think>\n\n</think>\n\nb", "<think></think>b"])
def test_a_think_block_of_the_row_is_learned(talk, answer):
    pieces, _ = segments(byte_level(QWEN3), talk("a", answer))
    inside = "why" if "why" in answer else ""
    assert pieces[-1] == (f"<think>\n{inside}\n</think>\n\nb<|im_end|>", True)


def test_a_template_whose_generation_prompt_holds_the_block_keeps_it_out_of_responses(talk):
    tokenizer = byte_level("{% set enable_thinking = false %}" + QWEN3)
    pieces, _ = segments(tokenizer, talk("a", "b"))
    assert pieces[0][0].endswith("assistant\n<think>\n\n</think>\n\n")
    assert pieces[1:] == [("b<|im_end|>", True)]


def test_white_space_of_a_response_stays_where_no_token_ends_the_turn(talk):
    pieces, _ = segments(byte_level(NO_END), talk("a", "b  "))
    assert pieces == [("user: a\nassistant: ", False), ("b  \n", True)]


def test_context_turns_are_not_responses(talk):
    pieces, _ = segments(byte_level(), talk("a", "b", "c", "d"), trained_from=3)
    assert [text for text, response in pieces if response] == ["d<|im_end|>"]


def test_an_answer_without_a_question_is_context(talk):
    opening = [{"role": "assistant", "content": "welcome"}, *talk("a", "b")]
    pieces, _ = segments(byte_level(), opening)
    assert [text for text, response in pieces if response] == ["b<|im_end|>"]
    with pytest.raises(DataError, match="f:1: the conversation begins with its only assistant turn"):
        segments(byte_level(), opening[:1])


def test_a_generation_prompt_that_answers_do_not_begin_with_is_refused(talk):
    with pytest.raises(
        DataError, match=r"f:1: .*generation prompt ends in .*<think>.* renders the answer differently: 'b"
    ):
        segments(byte_level(OPENS_THINKING), talk("a", "b"))


def test_without_a_template_the_error_tells_the_ways_out(talk):
    with pytest.raises(DataError, match=r"f:9: .*no chat template.*--chat-template FILE.*prompt and completion"):
        Chat(byte_level(None)).render(talk("a"), where="f:9")


def test_the_reason_of_a_refusing_template_is_told(talk):
    tokenizer = byte_level(GEMMA, bos="<bos>")
    with pytest.raises(DataError, match=r"f:2: .*refuses the turns system, user: .*System role not supported"):
        Chat(tokenizer).render(talk("a", system="s"), where="f:2")


def test_templates_that_read_content_blocks_get_them(talk):
    pieces, _ = segments(byte_level(BLOCKS), talk("a", "b"))
    assert pieces == [("user: a<|im_end|>\nassistant: ", False), ("b<|im_end|>", True)]


def test_a_template_that_loses_the_text_is_refused(talk):
    with pytest.raises(DataError, match="f:3: the chat template leaves out the text of messages"):
        Chat(byte_level("{{ messages[0].role }}")).render(talk("a"), where="f:3")


def test_template_hash_depends_on_the_template_only():
    assert template_hash(byte_level(CHATML)) == template_hash(byte_level(CHATML, eos="<|im_end|>"))
    assert template_hash(byte_level(CHATML)) != template_hash(byte_level(GEMMA))
    assert len(template_hash(byte_level(CHATML))) == 64
    assert template_hash(byte_level(None)) == "none"
