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
from loragate.data.formats import Turns, normalize
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


OPENING = {"role": "assistant", "content": "welcome"}


@pytest.mark.parametrize(
    ("template", "before", "contents", "trained", "responses"),
    [
        (THINKING, [], ("a", "b", "c", "<think>y</think>d"), None, ["b<|im_end|>", "<think>y</think>d<|im_end|>"]),
        (CHATML, [], ("a", "b", "c", "d"), (3,), ["d<|im_end|>"]),
        (CHATML, [OPENING], ("a", "b"), None, ["b<|im_end|>"]),
        (BLOCKS, [], ("a", "b"), None, ["b<|im_end|>"]),
        (NO_END, [], ("a", "b  "), None, ["b  \n"]),
    ],
    ids=["no reasoning", "context", "an answer without a question", "content blocks", "white space without an end"],
)
def test_what_is_a_response(template, before, contents, trained, responses, talk):
    pieces, rewritten = segments(byte_level(template), [*before, *talk(*contents)], trained=trained)
    assert not rewritten
    assert [text for text, response in pieces if response] == responses


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


@pytest.mark.parametrize(
    ("template", "variables"),
    [("{% set enable_thinking = false %}" + QWEN3, {}), (QWEN3, {"enable_thinking": False})],
    ids=["of the template", "of the row"],
)
def test_a_block_that_the_generation_prompt_holds_stays_out_of_responses(template, variables, talk):
    """And variables are given to every rendering."""
    chat = Chat(byte_level(template), template_kwargs=variables)
    pieces, _ = chat.segments(Turns(messages=tuple(talk("a", "b"))), "f:1")
    assert pieces[0].text.endswith("assistant\n<think>\n\n</think>\n\n")
    assert pieces[1:] == [("b<|im_end|>", True)]


WITHOUT_SYSTEM = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
THINKS_FIRST = CHATML.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' %}<think>\n</think>{% endif %}{{ m.content }}"
)


@pytest.mark.parametrize(
    ("template", "system", "message"),
    [
        (None, None, r"this is a conversation, but .*no chat template.*--chat-template FILE.*prompt and completion"),
        (GEMMA, "s", r"the chat template refuses the turns system, user: .*System role not supported"),
        ("{{ messages[0].role }}", None, "the chat template leaves out the text of messages"),
        (WITHOUT_SYSTEM, "s", "the chat template leaves out turns of the role system"),
    ],
)
def test_messages_that_a_template_does_not_render_are_refused(template, system, message, talk):
    with pytest.raises(DataError, match=f"f:9: {message}"):
        Chat(byte_level(template, bos="<bos>")).render(talk("a", system=system), where="f:9")


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (CHATML, [OPENING], "the conversation begins with its only assistant turn"),
        (OPENS_THINKING, ["a", "b"], r".*generation prompt ends in .*<think>.* renders the answer differently: 'b"),
        (CHATML, ["a", "<|im_end|>"], r"the assistant turn at message 1 is the end of a turn alone, '<\|im_end\|>"),
        (
            THINKS_FIRST,
            ["a", "<think>why</think>b"],
            ".*a think block of its own before that of the text.*reasoning_content",
        ),
    ],
)
def test_turns_without_a_response_to_tell_are_refused(template, messages, message, talk):
    messages = messages if messages == [OPENING] else talk(*messages)
    with pytest.raises(DataError, match=f"f:1: {message}"):
        segments(byte_level(template), messages)


def test_template_hash_depends_on_the_template_only():
    assert template_hash(byte_level(CHATML)) == template_hash(byte_level(CHATML, eos="<|im_end|>"))
    assert template_hash(byte_level(CHATML)) != template_hash(byte_level(GEMMA))
    assert len(template_hash(byte_level(CHATML))) == 64
    assert template_hash(byte_level(None)) == "none"


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "note": "say \\"hi\\"", "big": true}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
# how templates write a call: JSON of an object, JSON text as it is, one tag for each argument
AS_JSON = "{{ c.function.name }} {{ c.function.arguments | tojson }}"
AS_TEXT = "{{ c.function.name + ' ' + c.function.arguments }}"
AS_TAGS = "<f={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}<p={{ k }}>{{ v }}</p>{% endfor %}"
AS_PYTHON = "{{ c.function.name }} {{ c.function.arguments }}"
NOT_AT_ALL, FIRST_ONLY = "", "{% if loop.first %}" + AS_JSON + "{% endif %}"
WITHOUT_ARGUMENTS = "{{ c.function.name }}()"


def calling(form, content="{{ m.content }}"):
    calls = "{% for c in m.tool_calls or [] %}" + form + "{% endfor %}"
    return byte_level(CHATML.replace("{{ m.content }}", content + calls))


def called(tokenizer, *answers):
    row = {"messages": [{"role": "user", "content": "q"}, *answers]}
    return Chat(tokenizer).segments(normalize(row, "messages", "f:1"), "f:1")[0][-1].text


@pytest.mark.parametrize(
    ("form", "written"),
    [
        (AS_JSON, 'add {"a": 2, "note": "say \\"hi\\"", "big": true}'),
        (AS_TEXT, 'add {"a": 2, "note": "say \\"hi\\"", "big": true}'),
        (AS_TAGS, '<f=add><p=a>2</p><p=note>say "hi"</p><p=big>True</p>'),
        (AS_PYTHON, 'add {"a": 2, "note": "say \\"hi\\"", "big": true}'),
    ],
)
def test_a_tool_call_goes_in_as_the_template_reads_it(form, written):
    assert called(calling(form), CALLED) == written + "<|im_end|>"


@pytest.mark.parametrize(
    ("form", "answers"),
    [
        (NOT_AT_ALL, [CALLED]),
        (WITHOUT_ARGUMENTS, [CALLED]),
        (FIRST_ONLY, [{**CALLED, "tool_calls": [CALL, CALL]}]),
        (NOT_AT_ALL, [{**CALLED, "content": "I look it up."}]),
        (
            NOT_AT_ALL,
            [{**CALLED, "train": False}, {"role": "user", "content": "4"}, {"role": "assistant", "content": "4"}],
        ),
    ],
    ids=["no calls", "no arguments", "the first alone", "text alone", "in the context"],
)
def test_a_tool_call_that_the_template_leaves_out_is_refused(form, answers):
    with pytest.raises(DataError, match=r"f:1: the assistant turn at message 1: .* does not write its call of add"):
        called(calling(form), *answers)


@pytest.mark.parametrize(
    ("content", "turn", "what"),
    [
        ("{% if not m.tool_calls %}{{ m.content }}{% endif %}", {**CALLED, "content": "I look."}, "text"),
        ("{{ m.content }}", {"role": "assistant", "content": "4", "reasoning_content": "half of eight"}, "reasoning"),
        ("{{ m.content.split('</think>')[-1] }}", {"role": "assistant", "content": "<think>why</think>4"}, "reasoning"),
    ],
)
def test_what_else_a_template_leaves_out_of_an_answer_is_refused(content, turn, what):
    with pytest.raises(
        DataError, match=f"f:1: the assistant turn at message 1: .* does not write its {what}; it would"
    ):
        called(calling(AS_JSON, content), turn)


def test_an_answer_may_end_in_the_header_of_the_next_turn(talk):
    """What ends an answer is then no end of a system message, and the text before the first turn stays."""
    role = "{{ '<|' + m.role + '|>' }}"
    body = "{% for m in messages %}{% if loop.first or messages[loop.index0 - 1].role != 'assistant' %}" + role
    body += "{% endif %}{{ '\\n' + m.content }}{% if m.role == 'assistant' %}<|user|>{% endif %}{% endfor %}"
    body += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    injecting = "{% if messages[0].role != 'system' %}<|system|>{{ '\\n' }}Be helpful.{% endif %}"
    for template in ("[M]<sop>" + body, "[M]<sop>" + injecting + body):
        assert (
            Chat(byte_level(template)).render(talk("hi"), generation_prompt=True) == "[M]<sop><|user|>\nhi<|assistant|>"
        )
