from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loragate.data.formats import FORMATS, EmptyResponse, Turns, detect_format, normalize, unused
from loragate.errors import DataError

ASK = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
PAIR = (ASK, ANSWER)


def turns_of(row):
    return normalize(row, detect_format(row), "f:1")


@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("messages", {"messages": [ASK, ANSWER]}),
        ("messages", {"messages": [ASK, ANSWER], "problem": "2+2?", "solution": "four", "source": "x"}),
        ("messages", {"messages": [{**ASK, "tool_calls": None}, {**ANSWER, "name": None}]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}, ANSWER]}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}),
        ("sharegpt", {"conversations": [{"from": "user", "value": "2+2?"}, {"from": "assistant", "value": "4"}]}),
        ("alpaca", {"instruction": "2+2?", "input": "", "output": "4"}),
        ("alpaca", {"instruction": "2+2?", "output": "4"}),
        ("prompt_completion", {"prompt": [ASK], "completion": [ANSWER]}),
        ("prompt_completion", {"prompt": "2+2?", "response": "4"}),
        ("prompt_completion", {"problem": "2+2?", "solution": "4", "lang": "python"}),
        ("prompt_completion", {"question": "2+2?", "answer": "4"}),
        ("prompt_completion", {"instruction": "2+2?", "response": "4"}),
        ("prompt_completion", {"question": "2+2?", "response": "4", "id": "flan.1"}),  # OpenOrca
        ("prompt_completion", {"query": "2+2?", "response": "4", "original_question": "1+1?"}),  # MetaMathQA
        ("prompt_completion", {"query": "2+2?", "answer": "4", "lang": "python"}),  # CodeFeedback
        ("prompt_completion", {"input": "2+2?", "output": "4"}),
        ("alpaca", {"instruction": "2+2?", "input": "<noinput>", "output": "4"}),
        ("alpaca", {"instruction": "2+2?", "input": "nan", "output": "4"}),
        ("messages", {"messages": [{"role": "user", "content": ["2+", {"type": "text", "text": "2?"}]}, ANSWER]}),
        ("alpaca", {"instruction": "2+2?", "input": "Noinput", "output": "4"}),
        ("prompt_completion", {"question": "2+2?", "train": True, "weight": "1.0", "answer": "4"}),
        ("messages", {"messages": [ASK, ANSWER], "choices": ["3", "4"]}),
    ],
)
def test_every_format_becomes_the_same_conversation(format, row):
    assert detect_format(row) == format
    turns = normalize(row, format, "f:1")
    assert turns.messages == PAIR
    assert not turns.is_plain


def test_prompt_and_completion_of_text_are_plain():
    assert turns_of({"prompt": "2+2=", "completion": "4"}) == Turns(prompt="2+2=", completion="4")


def test_alpaca_joins_instruction_and_input_with_a_blank_line():
    turns = turns_of({"instruction": "Add.", "input": "2 and 2", "output": "4"})
    assert turns.messages[0]["content"] == "Add.\n\n2 and 2"


def test_system_and_history_columns_become_turns():
    row = {"system": "Be brief.", "history": [["hi", "hello"]], "instruction": "2+2?", "input": "", "output": "4"}
    assert [(m["role"], m["content"]) for m in turns_of(row).messages] == [
        ("system", "Be brief."),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "2+2?"),
        ("assistant", "4"),
    ]
    row = {"system": "T ", "conversations": [{"from": "system", "value": "T"}, *({"from": "human", "value": "a"},)]}
    row["conversations"].append({"from": "gpt", "value": "b"})
    assert [m["content"] for m in turns_of(row).messages] == ["T", "a", "b"]
    turns = turns_of({"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER], "system": "S"})
    assert [m["content"] for m in turns.messages] == ["S", "2+2?", "4", "2+2?", "4"]
    assert turns.trained == (4,)


def test_all_roles_of_sharegpt():
    names = ["system", "human", "gpt", "tool", "assistant"]
    turns = turns_of({"conversations": [{"from": name, "value": name} for name in names]})
    assert [m["role"] for m in turns.messages] == ["system", "user", "assistant", "tool", "assistant"]


def test_assistant_turns_of_a_conversational_prompt_are_context():
    turns = turns_of({"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER]})
    assert turns.trained == (3,)
    assert len(turns.messages) == 4
    with pytest.raises(DataError, match="no assistant turn to learn from"):
        turns_of({"prompt": [ASK, ANSWER], "completion": [ASK]})


def test_tools_and_further_message_keys_are_carried_to_the_template():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    turns = turns_of({"messages": [ASK, call], "tools": '[{"name": "add"}]'})
    assert turns.tools == ({"name": "add"},)
    assert turns.messages[1] == {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [ASK]}, "f:1: found user, but no assistant turn to learn from"),
        ({"messages": [ASK, {"role": "assistant", "content": " \n"}]}, "f:1: the assistant turn at message 1 is empty"),
        ({"messages": "hello"}, "f:1: messages is text that is not JSON .* and not a list"),
        (
            {"messages": [{"role": "asistant", "content": "x"}]},
            r"has as its role 'asistant'; did you mean 'assistant'\?; expected one of system",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            "a block of type 'image'; only text",
        ),
        (
            {"messages": [ASK, {**ANSWER, "content": [{"type": "reasoning", "text": "x"}]}]},
            "a block of type 'reasoning'",
        ),
        (
            {"messages": [ASK, ANSWER, ASK], "chosen": ANSWER, "rejected": ANSWER},
            "f:1: .*a wanted and an unwanted answer",
        ),
        (
            {"prompt": "a", "completion": "b", "label": False},
            "f:1: label is false, as KTO marks an answer that is not wanted",
        ),
        ({"messages": [ASK, ANSWER], "images": ["a.png"]}, "f:1: the column images would be left out; only text"),
        ({"prompt": "a", "completion": "  "}, "f:1: the completion is empty"),
        ({"prompt": "a", "completion": [ANSWER]}, "prompt is text and completion is a list; expected two strings"),
        ({"prompt": "a", "completion": "b", "response": "c"}, r"prompt\+completion and prompt\+response in one row"),
        ({"instruction": "a", "output": "b", "history": [["x"]]}, r"history\[0\] is a list, expected a pair"),
        ({"conversations": [{"from": "human", "value": "a\ud800"}]}, "half of a surrogate pair at character 1"),
        ({"messages": [ASK, ANSWER], "keep_mask": [1, 2]}, "keep_mask must be a list of 0 and 1"),
        ({"messages": [ASK, ANSWER], "tools": "{"}, "tools is text that is not JSON"),
        ({"messages": [ASK, {**ANSWER, "content": None}]}, r"f:1: the content of messages\[1\] is null, expected text"),
        ({"messages": [{**ASK, "content": None}, ANSWER]}, r"f:1: the content of messages\[0\] is null, expected text"),
        (
            {"messages": [ASK, {**ANSWER, "weight": 0.5}]},
            r"weight of messages\[1\] is '0.5', expected true, false, 1 or 0",
        ),
        ({"messages": [{**ASK, "train": True}, ANSWER]}, "a turn of the role user with train switched on"),
        ({"messages": [ASK, {**ANSWER, "train": True, "weight": 0}]}, "train and weight, which contradict each other"),
        (
            {"messages": [ASK, {**ANSWER, "tool_calls": [{"function": "x"}]}]},
            r"tool_calls of messages\[1\]: found .*objects",
        ),
        ({"messages": [ASK, {**ANSWER, "train_detail": [{"begin_offset": 0}]}]}, "has train_detail, which is not read"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": "x"}]}, r"tool_calls of messages\[1\] is text that is not JSON"),
        (
            {"messages": [ASK, ANSWER], "chat_template_kwargs": [1]},
            "chat_template_kwargs is a list, expected an object",
        ),
        (
            {"messages": [ASK, ANSWER], "chat_template_kwargs": {"tokenize": True}},
            "holds tokenize, which rendering sets",
        ),
        ({"question": "a", "answer": "b", "context": {"title": "c"}}, "f:1: context is an object, expected text"),
        (
            {"conversations": [{"role": "system", "content": "T"}, *PAIR], "system": "S"},
            "f:1: found system and a system turn, which say different things. Remove the one",
        ),
        (
            {"question": "a", "answer": "b", "system": "S", "system_prompt": "T"},
            "f:1: found system and system_prompt, which say",
        ),
        ({"question": "a", "query": "b", "response": "c"}, r"f:1: found question\+response and query\+response in one"),
        (
            {"question": "2+2?", "choices": ["3", "4"], "answer": "4"},
            "f:1: the column 'choices' would be left out; write",
        ),
        (
            {"instruction": "2+2?", "options": {"A": "3", "B": "4"}, "output": "B"},
            "f:1: .*'options' would be left out; write the whole question into one column 'instruction', or remove",
        ),
        ({"prompt": "2+2?", "choices": '["3", "4"]', "completion": "4"}, "f:1: the column 'choices' would be left out"),
        (
            {"question": "a", "answer": "b", "weight": 0.5},
            "f:1: weight of the row is '0.5', expected true, false, 1 or 0",
        ),
        (
            {"messages": [ASK, ANSWER], "train": True, "weight": 0},
            "f:1: the row has train and weight, which contradict",
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_told_with_its_place(row, message):
    with pytest.raises(DataError, match=message) as caught:
        turns_of(row)
    assert str(caught.value).startswith("f:1: ")


@pytest.mark.parametrize("pair", [("prompt", "completion"), ("question", "answer"), ("instruction", "output")])
def test_a_null_in_a_pair_is_told_and_no_unknown_format(pair):
    row = {pair[0]: "a", pair[1]: None}
    with pytest.raises(DataError, match=f"{pair[1]} is null, expected text"):
        detect_format(row)
    with pytest.raises(DataError, match=f"f:2: {pair[1]} is null, expected text"):
        normalize(row, detect_format({pair[0]: "a", pair[1]: "b"}), "f:2")


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"instruction": "Who?", "context": "Ann did.", "response": "Ann."}, "Who?\n\nAnn did."),
        ({"question": "Who?", "passage": "Ann did.", "answer": "Ann."}, "Who?\n\nAnn did."),
        ({"instruction": "Which bread is this?", "input": "Nan", "output": "Ann's."}, "Which bread is this?\n\nNan"),
        (
            {"question": "Who?", "contexts": ["Ann did.", "Bob did not."], "answer": "Ann."},
            "Who?\n\nAnn did.\n\nBob did not.",
        ),
        ({"instruction": "Who?", "input": "Ann did.", "context": " ", "output": "Ann."}, "Who?\n\nAnn did."),
    ],
)
def test_the_context_of_a_question_is_part_of_it(row, question):
    assert turns_of(row).messages[0] == {"role": "user", "content": question}
    assert unused(row, detect_format(row)) == []


def test_a_system_column_opens_the_conversation():
    turns = turns_of({"system_prompt": "Be brief.", "question": "2+2?", "response": None, "answer": "4"})
    assert turns.messages == ({"role": "system", "content": "Be brief."}, *PAIR)
    row = {"system": "Be brief.", "messages": [ASK, ANSWER]}
    assert turns_of(row).messages == turns.messages
    assert unused(row, "messages") == []
    own = {"role": "system", "content": "Be long."}
    with pytest.raises(DataError, match="found system and a system turn, which say different things"):
        turns_of({**row, "messages": [own, ASK, ANSWER]})
    assert turns_of({"system": "Be long. ", "messages": [own, ASK, ANSWER]}).messages == (own, *PAIR)


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        (
            {"instruction": "a", "response": "b", "category": "qa", "id": 0, "note": None, "tags": []},
            ["category", "id"],
        ),
        ({"messages": [ASK, ANSWER], "problem": "2+2?", "source": "x"}, ["problem", "source"]),
        ({"prompt": "a", "completion": "b", "context": "c", "tools": [{"name": "d"}]}, ["context", "tools"]),
        ({"prompt": "a: 1 or 2?", "completion": "1", "choices": ["1", "2"], "input": "<noinput>", "id": 3}, ["id"]),
        ({"prompt": [ASK], "completion": [ANSWER], "tools": [{"name": "d"}], "keep_mask": [1]}, []),
        (
            {"prompt": [ASK], "completion": [ANSWER], "system": "S", "context": "c", "input": "d"},
            ["context", "input"],
        ),
    ],
)
def test_columns_that_nothing_reads_are_known(row, columns):
    assert unused(row, detect_format(row)) == columns


@pytest.mark.parametrize(
    ("off", "on"),
    [
        ({"weight": 0}, {"weight": 1}),
        ({"train": False}, {"train": True}),
        ({"training": False}, {}),
        ({"loss": 0.0}, {}),
    ],
)
def test_turns_that_are_switched_off_are_context(off, on):
    turns = turns_of({"messages": [ASK, {**ANSWER, **off}, {**ASK, **off}, {**ANSWER, **on}]})
    assert turns.trained == (3,)
    assert turns.messages == (*PAIR, *PAIR), "no switch is left for the template to read"
    with pytest.raises(EmptyResponse, match="every assistant turn is switched off"):
        turns_of({"messages": [ASK, {**ANSWER, **off}]})
    assert turns_of({"prompt": [ASK, ANSWER, ASK], "completion": [{**ANSWER, **on}]}).trained == (3,)


@pytest.mark.parametrize(
    "off", [{"train": False}, {"weight": 0}, {"training": "False"}, {"weight": "0"}, {"loss": False}]
)
@pytest.mark.parametrize(
    "row", [{"messages": [ASK, ANSWER]}, {"prompt": "2+2=", "completion": "4"}, {"input": "2+2?", "output": "4"}]
)
def test_a_row_that_is_switched_off_is_no_row_to_learn_from(row, off):
    with pytest.raises(EmptyResponse, match="f:1: the row is switched off: there is nothing to learn"):
        turns_of({**row, **off})
    assert unused({**row, **off}, detect_format(row)) == []
    measured = {**row, "loss": 0.0}
    assert turns_of(measured) == turns_of(row)
    assert unused(measured, detect_format(row)) == ["loss"]


def test_options_that_stand_in_the_question_are_no_reason_to_refuse():
    row = {"question": "2+2? (A) 3 (B) 4", "choices": {"text": ["3", "4"], "label": ["A", "B"]}, "answer": "B"}
    assert turns_of(row).messages[0]["content"] == row["question"]
    assert unused(row, "prompt_completion") == []
    assert turns_of({**row, "choices": '["3", "4"]'}).messages[0]["content"] == row["question"], "as csv holds a list"
    beside = {"question": "2+2?", "context": "3 or 4", "options": ["3", "4"], "answer": "4"}
    assert turns_of(beside).messages[0]["content"] == "2+2?\n\n3 or 4"


@pytest.mark.parametrize("other", ["prompt", "problem", "response", "answer"])
def test_input_and_output_beside_another_question_or_answer_are_no_pair(other):
    with pytest.raises(DataError, match="which fit no known row format"):
        detect_format({"input": "a", "output": "b", other: "c"})


def test_rows_of_token_ids_are_told_where_they_can_be_given():
    with pytest.raises(DataError, match=r"input_ids, labels: rows that are token ids already.* EncodedRows\(items\)"):
        detect_format({"input_ids": [4, 5], "labels": [-100, 5]})


@pytest.mark.parametrize("flat", [False, True])
def test_arguments_as_json_text_are_the_object(flat):
    def call(arguments):
        function = {"name": "add", "arguments": arguments}
        return function if flat else {"type": "function", "function": function}

    def calls(arguments):
        return turns_of({"messages": [ASK, {**ANSWER, "tool_calls": [call(arguments)]}]}).messages[1]["tool_calls"]

    assert calls('{"a": [1, 2]}') == calls({"a": [1, 2]}) == [call({"a": [1, 2]})]
    assert calls("2 and 2") == [call("2 and 2")], "text that is no object stays as it is"


def test_a_function_call_is_a_tool_call():
    called = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 2}'}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    assert turns_of({"messages": [ASK, called]}).messages[1] == {**ANSWER, "content": "", "tool_calls": [call]}


@pytest.mark.parametrize("role", ["function_call", "tool_call"])
def test_a_turn_of_a_call_role_is_a_tool_call_of_the_assistant(role):
    called = [{"from": "human", "value": "2+2?"}, {"from": role, "value": '{"name": "add", "arguments": {"a": 2}}'}]
    turns = turns_of({"conversations": [*called, {"from": "observation", "value": "4"}, {"from": "gpt", "value": "4"}]})
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    assert turns.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert ([message["role"] for message in turns.messages], turns.trained) == (
        ["user", "assistant", "tool", "assistant"],
        (1, 3),
    )
    two = [called[0], {"from": role, "value": '[{"name": "add"}, {"name": "mul"}]'}]
    assert len(turns_of({"conversations": two}).messages[1]["tool_calls"]) == 2
    for text in ("[1]", '{"arguments": {}}'):
        with pytest.raises(
            DataError, match=rf"the {role} of conversations\[1\] is .*expected the JSON of a tool call: name and"
        ):
            turns_of({"conversations": [called[0], {"from": role, "value": text}]})


def test_lists_as_json_text_are_read():
    """csv holds no lists, and TRL keeps tools as text in parquet."""
    row = {"messages": '[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]'}
    turns = turns_of({**row, "tools": '[{"name": "add"}]', "chat_template_kwargs": '{"enable_thinking": false}'})
    assert (turns.messages, turns.tools) == (PAIR, ({"name": "add"},))
    assert turns.template_kwargs == {"enable_thinking": False}
    for key in ("completion", "response"):
        turns = turns_of({"prompt": json.dumps([ASK, ANSWER, ASK]), key: json.dumps([ANSWER])})
        assert (turns.messages, turns.trained) == ((*PAIR, *PAIR), (3,))
        assert turns_of({"prompt": json.dumps([ASK]), key: json.dumps([ANSWER]), "system": "S"}).messages[1:] == PAIR
    assert (
        unused({"prompt": json.dumps([ASK]), "completion": json.dumps([ANSWER]), "tools": "[1]"}, "prompt_completion")
        == []
    )
    row = {"instruction": "2+2?", "output": "4", "history": '[["2+2?", "4"]]', "keep_mask": "[1, 0]"}
    assert (turns_of(row).messages, turns_of(row).keep_mask) == ((*PAIR, *PAIR), (1, 0))
    turns = turns_of({"question": "Who?", "contexts": '["Ann did.", "Bob did not."]', "answer": "Ann."})
    assert turns.messages[0]["content"] == "Who?\n\nAnn did.\n\nBob did not."
    with pytest.raises(DataError, match="history is text that is not JSON"):
        turns_of({**row, "history": "none"})


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        (json.dumps([ASK]), "4"),
        ("2+2?", json.dumps([ANSWER])),
        (
            json.dumps([{"from": "ann@example.org", "subject": "x"}]),
            json.dumps([{"from": "bob@example.org", "subject": "y"}]),
        ),
        ("Sort [3, 1]", "[1, 3]"),
        ("[3, 1]", "[1, 3]"),
        ("[]", "[]"),
        ('[{"name": "a"}]', '[{"name": "b"}]'),
        ("[[[", "[" * 100_000),
    ],
)
def test_text_that_only_looks_like_a_list_of_messages_is_text(prompt, completion):
    turns = turns_of({"prompt": prompt, "completion": completion})
    assert (turns.prompt, turns.completion) == (prompt, completion)
    question = turns_of({"question": "Sort it", "input": '["b", "a"]', "answer": '["a", "b"]'}).messages[0]["content"]
    assert question == 'Sort it\n\n["b", "a"]'


def test_unknown_keys_are_told_beside_the_known_ones():
    with pytest.raises(DataError) as caught:
        detect_format({"text": "hello", "id": 3, "messages": None})
    assert "found the keys id, text, which fit no known row format" in str(caught.value)
    assert "problem+solution" in str(caught.value)
    assert all(name in str(caught.value) for name in FORMATS)


def test_a_row_of_two_formats_is_ambiguous_unless_it_is_a_conversation():
    with pytest.raises(DataError, match="fit alpaca and prompt_completion alike"):
        detect_format({"instruction": "a", "output": "b", "response": "c"})
    # names that came later give way to the usual ones beside them
    assert detect_format({"instruction": "a", "output": "b", "query": "c", "answer": "d"}) == "alpaca"
    assert turns_of({"question": "2+2?", "answer": "4", "response": "It is 4."}).messages[1]["content"] == "4"
    assert turns_of({"instruction": "2+2?", "response": "4", "query": "q"}).messages[0]["content"] == "2+2?"


def test_options_without_a_text_stand_in_every_question():
    row = {"question": "What? A) one B) two", "answer": "A", "options": {"A": "one", "B": "two", "E": None}}
    assert turns_of(row).messages[1]["content"] == "A"
    assert turns_of(row | {"options": {"A": None}}).messages[1]["content"] == "A"
    with pytest.raises(DataError, match="'options' would be left out"):
        turns_of(row | {"options": {"A": "three", "E": None}})


def test_a_pair_of_answers_is_told_how_to_be_learned_from():
    with pytest.raises(DataError, match=r"chosen, prompt, rejected: a wanted and .* the chosen answer response"):
        detect_format({"prompt": "a", "chosen": "b", "rejected": "c"})
    assert turns_of({"messages": [ASK, ANSWER], "chosen": [ANSWER], "rejected": [ANSWER], "label": 0}).messages == PAIR


def test_history_comes_before_the_question_of_a_pair():
    row = {"prompt": "And 3+3?", "response": "6", "history": [["2+2?", "4"]]}
    turns = turns_of(row)
    assert [message["content"] for message in turns.messages] == ["2+2?", "4", "And 3+3?", "6"]
    assert unused(row, "prompt_completion") == []
    assert unused({"prompt": "a", "completion": "b", "history": [["2+2?", "4"]]}, "prompt_completion") == ["history"]


def test_functions_are_tools():
    turns = turns_of({"messages": [ASK, ANSWER], "functions": [{"name": "add"}]})
    assert turns.tools == ({"type": "function", "function": {"name": "add"}},)
    with pytest.raises(DataError, match="functions is an object, expected a list of tool schemas"):
        turns_of({"messages": [ASK, ANSWER], "functions": {"name": "add"}})


def test_a_row_of_another_format_than_named_is_an_error():
    with pytest.raises(DataError, match="f:4: found the keys instruction, output, expected the format messages"):
        normalize({"instruction": "a", "output": "b"}, "messages", "f:4")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "from", "content", "value", "text", "type", "weight", "tool_calls"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
KEYS = ["messages", "conversations", "instruction", "input", "output", "prompt", "completion", "response", "system"]
KEYS += ["train", "choices"]


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*KEYS, "history", "keep_mask", "tools", "context"]), JSON, max_size=5))
def test_any_json_object_is_turns_or_a_data_error(row):
    try:
        outcome = turns_of(row)
    except DataError as error:
        outcome = error
    if isinstance(outcome, Turns):
        assert outcome.is_plain or any(message["role"] == "assistant" for message in outcome.messages)
    else:
        assert str(outcome)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "2+2?", "answer": 4}, "answer is a value of type int, expected text: write 4 between quotes"),
        ({"question": "2+2?", "answer": True}, "answer is a boolean, expected text$"),
    ],
)
def test_a_number_in_place_of_a_text_is_refused_with_what_to_do(row, message):
    with pytest.raises(DataError, match=message):
        turns_of(row)


def test_blanks_around_the_name_of_a_column_are_seen():
    with pytest.raises(DataError, match="found the keys ' response', prompt, which fit no known"):
        detect_format({"prompt": "a", " response": "b"})
