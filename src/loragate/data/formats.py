"""The row formats that people have, checked and brought to one shape.

A row is a dict from a file or the hub; `normalize` turns it into `Turns`: a conversation, or a plain prompt with its
completion. Files, templates and tokens are handled elsewhere.

Only `prompt` + `completion` as two strings is raw text, as in TRL. Any other pair of strings (`problem` + `solution`,
`question` + `answer`, …) is a question and its answer, hence one user turn and one assistant turn: glued together
without a template the answer would follow the question with nothing between them.

What a row holds is used or named: columns with a passage belong to the question, switches of a turn are obeyed, null is no text,
and `unused` lists the columns that nothing reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from loragate.errors import DataError, nearest
from loragate.printable import escape_controls, excerpt

Row = Mapping[str, Any]
Message = dict[str, Any]

RAW_PAIR = ("prompt", "completion")
# where no other column of a pair is there: beside an instruction, `input` is its context
BARE_PAIR = ("input", "output")
LATER_PAIRS = (("question", "response"), ("query", "answer"), ("query", "response"))  # where no other pair is there
PAIRS = (
    RAW_PAIR,
    ("prompt", "response"),
    ("problem", "solution"),
    ("question", "answer"),
    *LATER_PAIRS,
    ("instruction", "response"),
    BARE_PAIR,
)

# columns that belong to the question of a pair, in the order in which they follow it
CONTEXT = (
    "input",
    "context",
    "contexts",
    "passage",
    "passages",
    "document",
    "documents",
    "article",
    "paragraph",
    "story",
)
NO_INPUT = ("<noinput>", "noinput", "<no input>", "no input")  # of Alpaca's rows, in small letters
CHOICES = ("choices", "options", "answer_choices", "endings", "A", "option_a")  # what a question lets choose from
SYSTEM = ("system", "system_prompt")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
# keys of a turn, or of a row, that say whether it is learned: axolotl's, OpenAI's and mistral-finetune's, ms-swift's
SWITCHES = ("train", "training", "weight", "loss")
SWITCHED = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}  # csv holds text
TEXT_BLOCKS = ("text", "input_text", "output_text")  # the last two are OpenAI's
REASONING = ("reasoning_content", "reasoning", "thinking")

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
}
CALL_ROLES = ("function_call", "tool_call")
"""Roles of LLaMA-Factory and ms-swift: an assistant turn whose text is the JSON of its tool call, or of a list of them."""


class EmptyResponse(DataError):
    """A row whose response is empty: there is nothing to learn, but nothing is wrong with the other rows."""


@dataclass(frozen=True)
class Turns:
    """One row in the shape that rendering reads.

    Attributes:
        messages: the conversation as `{"role", "content", …}`; empty for a plain row.
        prompt, completion: the two texts of a plain row; None for a conversation.
        keep_mask: optional 0/1 per response token, all trained assistant turns concatenated.
        tools: optional tool schemas for the chat template.
        template_kwargs: optional variables for the chat template, such as enable_thinking.
        trained: indices of the assistant turns that are learned, the others are context; None for all.
    """

    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    completion: str | None = None
    keep_mask: tuple[int, ...] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    template_kwargs: dict[str, Any] | None = None
    trained: tuple[int, ...] | None = None

    @property
    def is_plain(self) -> bool:
        return self.completion is not None


class Format(NamedTuple):
    """One row format: the keys named in messages, the columns that a row of it is made from, and the conversion.

    Attributes:
        columns: of these rows; a row fits where it has all of one of the groups.
        besides: columns that are read where a row has them.
    """

    keys: str
    columns: tuple[tuple[str, ...], ...]
    to_turns: Callable[[Row], Turns]
    besides: tuple[str, ...] = ()

    def matches(self, row: Row) -> bool:
        """Whether the row has the columns, none of them null."""
        return bool(self.groups(row))

    def groups(self, row: Row) -> list[tuple[str, ...]]:
        """The groups of which the row has all columns."""
        found = [group for group in self.columns if _has(row, *group)]
        if len(found) > 1:  # a short answer beside its reasoning, say: the usual pair is the one that is meant
            found = [group for group in found if group not in LATER_PAIRS] or found
        others = {key for pair in PAIRS for key in pair if key not in BARE_PAIR and row.get(key) is not None}
        return [group for group in found if group != BARE_PAIR or not others]


def conversation(entries: Any, key: str) -> tuple[Message, ...]:
    """Every entry of a list, or of that list as JSON text, as a message; `key` names the list in errors."""
    entries = parse_json_column(entries, key)
    if not isinstance(entries, list | tuple):
        raise DataError(f"{key} is {kind_of(entries)}, expected a list of messages")
    return tuple(parse_message(entry, f"{key}[{index}]") for index, entry in enumerate(entries))


def parse_message(entry: Any, place: str) -> Message:
    """One message with the keys `role` and `content`, and `train` where a switch says whether the turn is learned.

    Other keys (tool_calls, reasoning_content) stay for the template; the arguments of a tool call become an object.
    """
    if not isinstance(entry, Mapping):
        raise DataError(f"{place} is {kind_of(entry)}, expected an object with role and content")
    if not {"content", "value", "tool_calls", "function_call", *REASONING} & entry.keys():
        raise DataError(f"{place} has no content; found the keys {', '.join(map(str, entry)) or '(none)'}")
    present: Message = without_nulls(entry)  # a copy, from which the known keys are taken
    if "function_call" in present:  # OpenAI's older form
        present["tool_calls"] = [{"type": "function", "function": present.pop("function_call")}]
    role = present.pop("role", None) or present.pop("from", None)
    value = present.pop("value", None)  # ShareGPT's
    content = present.pop("content", value)
    if content is None:
        if not says_more(present):
            raise DataError(f"the content of {place} is null, expected text. Remove the row or the turn")
        content = ""
    if role in CALL_ROLES:
        present["tool_calls"], role, content = _calls_of_text(content, f"the {role} of {place}"), "assistant", ""
    name = ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
    if name not in ROLES:
        known = (*ROLES, *ROLE_ALIASES, *CALL_ROLES)
        found = excerpt(role) + nearest(role, known) if isinstance(role, str) else kind_of(role)
        raise DataError(f"{place} has as its role {found}; expected one of {', '.join(known)}")
    if "tool_calls" in present:
        present["tool_calls"] = _tool_calls(present["tool_calls"], f"tool_calls of {place}")
    return {"role": name, "content": _content(content, place), **_normalize_train_flag(present, name, place)}


def says_more(message: Mapping[str, Any]) -> bool:
    """Whether a message has something beside its content: a tool call or reasoning."""
    return any(message.get(key) for key in ("tool_calls", *REASONING))


def _normalize_train_flag(present: Message, role: str, place: str) -> Message:
    """The keys of a message with its switches brought to one, `train`."""
    if present.pop("train_detail", None):
        raise DataError(
            f"{place} has train_detail, which is not read. Switch whole turns with train: true or false, or give the row a "
            "keep_mask and choose an objective that reads it"
        )
    found = {key: present.pop(key) for key in SWITCHES if key in present}
    learned = _switch(found, place)
    if learned and role != "assistant":
        raise DataError(
            f"{place} is a turn of the role {role} with {next(iter(found))} switched on; only assistant turns are learned"
        )
    return present if learned is None else {**present, "train": learned}


def _switch(found: Mapping[str, Any], place: str) -> bool | None:
    """What the switches of a turn or of a row say; None without any."""
    said = {key: SWITCHED.get(str(value).strip().casefold()) for key, value in found.items()}
    if wrong := next((key for key in said if said[key] is None), None):
        raise DataError(
            f"{wrong} of {place} is {excerpt(str(found[wrong]))}, expected true, false, 1 or 0: what it marks is learned or is "
            "not. Take it out, or rename it where it says something else"
        )
    if len(set(said.values())) > 1:
        raise DataError(f"{place} has {' and '.join(said)}, which contradict each other. Leave one of them out")
    return next(iter(said.values()), None)


def _switches_of(row: Row) -> dict[str, Any]:
    """The columns that say whether a row is learned; a number in `loss` is one that somebody measured."""
    return {
        key: row[key]
        for key in SWITCHES
        if row.get(key) not in (None, "") and (key != "loss" or isinstance(row[key], bool))
    }


def _calls_of_text(text: Any, place: str) -> list[dict[str, Any]]:
    """The tool calls that are a turn's text: the JSON of an object with name and arguments, or of a list of them."""
    calls = parse_json_column(text, place)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise DataError(f"{place} is {excerpt(str(text))}, expected the JSON of a tool call: name and arguments")
    return [{"type": "function", "function": dict(call)} for call in calls]


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Tool calls whose arguments, where they are the JSON text of an object, are that object: templates write it as JSON."""
    calls = parse_json_column(calls, place)
    whole = isinstance(calls, list) and all(
        isinstance(call, Mapping) and isinstance(call.get("function", call), Mapping) for call in calls
    )
    if not whole:
        raise DataError(f"{place}: found {excerpt(str(calls))}, expected a list of objects with name and arguments")
    return [
        {**call, "function": _arguments_read(call["function"])}
        if isinstance(call.get("function"), Mapping)
        else _arguments_read(call)
        for call in calls
    ]


def _arguments_read(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(arguments), dict):
                return {**function, "arguments": found}
    return dict(function)


def parse_json_column(value: Any, name: str) -> Any:
    """What JSON text holds, as columns of csv and parquet keep lists; anything else as it is.

    Raises:
        DataError: for text that is no JSON.
    """
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is text that is not JSON ({excerpt(str(error))}), and not a list") from None


def without_nulls(value: Any) -> Any:
    """`value` without the null fields of its objects at any depth: a column store writes one for every key that is absent.

    In a tool call or a tool schema they would be rendered, and learned.
    """
    if isinstance(value, Mapping):
        return {str(key): without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def _content(content: Any, place: str) -> str:
    """Text, or a list of text blocks joined; templates of text models concatenate strings."""
    if not isinstance(content, list | tuple):
        return text_of(content, f"the content of {place}")
    blocks = []
    for block in ({"text": one} if isinstance(one, str) else one for one in content):
        if not isinstance(block, Mapping) or block.get("text") is None or block.get("type", "text") not in TEXT_BLOCKS:
            kind = block.get("type") if isinstance(block, Mapping) else kind_of(block)
            raise DataError(
                f"the content of {place} has a block of type {excerpt(str(kind))}; only text can be learned from"
            )
        blocks.append(text_of(block["text"], f"a text block of {place}"))
    return "".join(blocks)


def text_of(value: Any, name: str) -> str:
    """`value` if it is text that can be written as UTF-8, else DataError."""
    if not isinstance(value, str):
        remedy = f": write {value} between quotes" if type(value) in (int, float) else ""
        raise DataError(f"{name} is {kind_of(value)}, expected text{remedy}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name} has half of a surrogate pair at character {error.start}; it is not valid text"
        ) from None
    return value


def pair_messages(question: str, answer: str) -> list[Message]:
    """A user turn and the assistant turn that answers it."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def kind_of(value: Any) -> str:
    """The type of a JSON value in words, for errors."""
    names = {dict: "an object", list: "a list", tuple: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


def detect_format(row: Row) -> str:
    """Return the name of the format of `row`.

    `messages` wins over everything else and `conversations` over key pairs, as datasets often carry the unrendered
    columns beside the conversation.

    Raises:
        DataError: for a row that fits no format, or two formats that would give different texts.
    """
    fitting = [name for name, format in FORMATS.items() if format.matches(row)]
    if len(fitting) > 1 and all(pair in LATER_PAIRS for pair in FORMATS["prompt_completion"].groups(row)):
        fitting = [name for name in fitting if name != "prompt_completion"]
    if not fitting:
        known = "; ".join(f"{name}: {format.keys}" for name, format in FORMATS.items())
        for format in FORMATS.values():
            _refuse_null(row, [group for group in format.columns if any(row.get(key) is not None for key in group)])
        _refuse_preferences(row)
        if _has(row, "input_ids"):
            raise DataError(
                f"found the keys {_key_list(row)}: rows that are token ids already. Give the rows they were made from, with their "
                "texts; in Python, items of input_ids, labels (-100 outside responses) and row are EncodedRows(items) of "
                "loragate.data"
            )
        raise DataError(
            f"found the keys {_key_list(row)}, which fit no known row format. Rename them to those of one: {known}."
        )
    if len(fitting) > 1 and fitting[0] not in ("messages", "sharegpt"):
        raise DataError(
            f"found the keys {_key_list(row)}, which fit {' and '.join(fitting)} alike. "
            "Remove the columns that are not meant."
        )
    return fitting[0]


def _refuse_preferences(row: Row) -> None:
    """Refuse answers of which one is wanted, as for DPO; a row of another format may have them beside its response."""
    if _has(row, "chosen", "rejected"):
        raise DataError(
            f"found the keys {_key_list(row)}: a wanted and an unwanted answer, as for DPO. Only a wanted answer can be learned: "
            "name the question prompt and the chosen answer response, or give the chosen messages as messages."
        )


def _refuse_null(row: Row, groups: Iterable[tuple[str, ...]]) -> None:
    """Name the null that keeps a row from fitting, where it has all columns of a group."""
    null = [key for group in groups if all(key in row for key in group) for key in group if row[key] is None]
    if null:
        raise DataError(f"{null[0]} is null, expected text or a list of messages. Remove the row.")


def unused(row: Row, format: str) -> list[str]:
    """The columns of a row that hold something and that nothing reads; empty for a row of another format."""
    chosen = FORMATS[format]
    groups = chosen.groups(row)
    read = {"keep_mask", *_switches_of(row), *(key for group in groups for key in group)}
    texts = all(isinstance(value, str) for group in groups for value in _pair_values(row, group))
    raw = RAW_PAIR in groups and texts  # of which the options alone are looked at: whether they stand in the prompt
    read |= {*CHOICES} if raw else {*chosen.besides, "tools", "functions", "chat_template_kwargs"}
    if not texts:  # context and history belong to a question that is text, and to no list of messages
        read -= {*CONTEXT, *CHOICES, "history"}
    held = (key for key in row if groups and key not in read)
    return [str(key) for key in held if column_value(row, key) not in (None, "", [], {})]


def normalize(row: Row, format: str, where: str = "") -> Turns:
    """Convert `row` of the named format to `Turns`; `where` (file:line) opens every error message.

    Raises:
        DataError: for a row that does not fit the format or carries no response.
    """
    chosen = FORMATS[format]
    try:
        if _switch(_switches_of(row), "the row") is False:
            raise EmptyResponse("the row is switched off: there is nothing to learn. Remove the row.")
        if not chosen.matches(row):
            _refuse_null(row, chosen.columns)
            raise DataError(f"found the keys {_key_list(row)}, expected the format {format}: {chosen.keys}")
        if media := next((column for column in MEDIA if row.get(column)), None):
            raise DataError(
                f"the column {media} would be left out; only text can be learned from. Remove the row, or the column where the "
                "text does without it"
            )
        if row.get("label") is False:
            raise DataError(
                "label is false, as KTO marks an answer that is not wanted. Remove the row, or the column where it says "
                "something else"
            )
        turns = replace(chosen.to_turns(row), keep_mask=_keep_mask(row))
        if turns.messages and turns.messages[-1]["role"] == "user":
            _refuse_preferences(row)
        if turns.completion is None:
            learned = _learned(turns)
            messages = tuple({key: value for key, value in one.items() if key != "train"} for one in turns.messages)
            return replace(
                turns, messages=messages, trained=learned, tools=_tools(row), template_kwargs=_template_kwargs(row)
            )
        if not turns.completion.strip():
            raise EmptyResponse("the completion is empty: a row needs a response to learn from. Remove the row.")
        return turns
    except DataError as error:
        # of its own type, as an empty response is counted and not an error
        raise type(error)(f"{where}: {error}" if where else str(error)) from None


def _learned(turns: Turns) -> tuple[int, ...]:
    """The assistant turns that are learned: those of the response that no switch turns off."""
    answers = [index for index, message in enumerate(turns.messages) if message["role"] == "assistant"]
    offered = answers if turns.trained is None else [index for index in answers if index in turns.trained]
    if not offered:
        roles = ", ".join(message["role"] for message in turns.messages) or "no messages"
        raise DataError(f"found {roles}, but no assistant turn to learn from. Remove the row.")
    for index in answers:  # turns of context are checked as well: an empty one spoils what follows it
        message = turns.messages[index]
        if not (message["content"].strip() or says_more(message)):
            raise EmptyResponse(
                f"the assistant turn at message {index} is empty: there is nothing to learn. Remove the row."
            )
    learned = tuple(index for index in offered if turns.messages[index].get("train", True))
    if not learned:
        raise EmptyResponse("every assistant turn is switched off: there is nothing to learn. Remove the row.")
    return learned


def _alpaca_row(row: Row) -> Turns:
    return _question_row(row, "instruction", text_of(row["output"], "output"))


def _question_row(row: Row, key: str, answer: str) -> Turns:
    """The conversation of a question's column and its answer, behind what was said before and a system message."""
    messages: list[Message] = []
    history = parse_json_column(row.get("history"), "history") or []
    if not isinstance(history, list | tuple):
        raise DataError(f"history is {kind_of(history)}, expected a list of pairs [user text, assistant text]")
    for index, pair in enumerate(history):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise DataError(f"history[{index}] is {kind_of(pair)}, expected a pair [user text, assistant text]")
        messages += pair_messages(text_of(pair[0], f"history[{index}][0]"), text_of(pair[1], f"history[{index}][1]"))
    question = question_text(row, key)
    refuse_left_out(row, CHOICES, key, question)
    messages += pair_messages(question, answer)
    return Turns(with_system(row, tuple(messages)))


def _pair_row(row: Row) -> Turns:
    fitting = FORMATS["prompt_completion"].groups(row)
    if len(fitting) > 1:
        names = " and ".join("+".join(pair) for pair in fitting)
        raise DataError(f"found {names} in one row, so prompt and response are ambiguous. Remove the pair not meant.")
    pair = fitting[0]
    prompt, completion = _pair_values(row, pair)
    if isinstance(prompt, list) and isinstance(completion, list):  # two parts of one conversation
        before = conversation(prompt, pair[0])
        after = conversation(completion, pair[1])
        whole = with_system(row, before + after)
        return Turns(whole, trained=tuple(range(len(whole) - len(after), len(whole))))
    if isinstance(prompt, list) or isinstance(completion, list):
        raise DataError(
            f"{pair[0]} is {kind_of(prompt)} and {pair[1]} is {kind_of(completion)}; "
            "expected two strings or two lists of messages"
        )
    texts = text_of(prompt, pair[0]), text_of(completion, pair[1])
    if pair == RAW_PAIR:
        refuse_left_out(row, CHOICES, pair[0], texts[0])
        return Turns((), *texts)
    return _question_row(row, pair[0], texts[1])


def _pair_values(row: Row, group: tuple[str, ...]) -> tuple[Any, ...]:
    """The values of the columns of a row; of a pair that is two lists of messages as JSON text, the lists."""
    values = tuple(row[key] for key in group)
    lists = tuple(map(messages_of_json, values)) if group in PAIRS else values
    return lists if all(isinstance(value, list) for value in lists) else values


def messages_of_json(value: Any) -> Any:
    """A list of messages that is JSON text, read; anything else as it is, as a question may be about JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            found = json.loads(value)
            entries = [entry.keys() if isinstance(entry, Mapping) else set() for entry in found]
            if found and all("role" in keys or {"from", "value"} <= keys for keys in entries):
                return found
    return value


def question_text(row: Row, key: str) -> str:
    """The text of a question's column, and behind it those of the context that the row gives."""
    parts = [text_of(row[key], key)]
    for name in CONTEXT:
        value = None if name == key else column_value(row, name)
        if name in ("contexts", "passages", "documents") and isinstance(value, str):
            value = _texts_of_json(value)
        texts = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
        parts += [text_of(text, name) for text in texts]
    return "\n\n".join(part for part in parts if part.strip())


def column_value(row: Row, column: str) -> Any:
    """What a row holds in a column; None for an `input` that only says that there is none."""
    return None if column == "input" and says_no_input(row) else row.get(column)


def says_no_input(row: Row) -> bool:
    """Whether the column `input` only says that there is none: `<noinput>` of Alpaca, `nan` of pandas (`NaN` is a text)."""
    return (said := str(row.get("input")).strip()) == "nan" or said.casefold() in NO_INPUT


def refuse_left_out(row: Row, columns: Iterable[str], key: str, text: str) -> None:
    """Refuse a row of which a column belongs to the question and does not stand in its text, that of the column `key`."""
    for column in columns:
        if column_value(row, column) and not _stands_in(row[column], text):
            raise DataError(
                f"the column {column!r} would be left out; write the whole question into one column {key!r}, or remove "
                f"{column!r} where it is no part of it"
            )


def _stands_in(value: Any, text: str) -> bool:
    """Whether a text holds every text of a value."""
    value = _texts_of_json(value) if isinstance(value, str) else value
    if value is None:  # of options that another row has
        return True
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return all(_stands_in(one, text) for one in value)
    return bool(re.search(rf"(?<!\w){re.escape(str(value).strip())}(?!\w)", text))


def _texts_of_json(value: str) -> str | list[str]:
    """The texts of a list that is JSON text; any other text as it is."""
    if value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            texts = json.loads(value)
            if all(isinstance(text, str) for text in texts):
                return list(texts)
    return value


def _has(row: Row, *keys: str) -> bool:
    return all(row.get(key) is not None for key in keys)


FORMATS: dict[str, Format] = {
    "messages": Format(
        "messages (a list of role and content)",
        (("messages",),),
        lambda row: Turns(with_system(row, conversation(row["messages"], "messages"))),
        SYSTEM,
    ),
    "sharegpt": Format(
        "conversations (a list of from and value)",
        (("conversations",),),
        lambda row: Turns(with_system(row, conversation(row["conversations"], "conversations"))),
        SYSTEM,
    ),
    "alpaca": Format(
        "instruction, output and optionally input",
        (("instruction", "output"),),
        _alpaca_row,
        (*SYSTEM, *CONTEXT, *CHOICES, "history"),
    ),
    "prompt_completion": Format(
        " or ".join("+".join(pair) for pair in PAIRS),
        PAIRS,
        _pair_row,
        (*SYSTEM, *CONTEXT, *CHOICES, "history"),
    ),
}


def with_system(row: Row, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages behind the system message that a file keeps in a column of its own.

    Raises:
        DataError: for two system messages that differ.
    """
    texts = {name: text for name in SYSTEM if (text := text_of(row.get(name) or "", name)).strip()}
    said = {text.strip() for text in texts.values()}
    own = {message["content"].strip() for message in messages if message["role"] == "system"}
    if len(said) > 1 or (own and not said <= own):
        names = [*texts, "a system turn"] if own else [*texts]
        raise DataError(f"found {' and '.join(names)}, which say different things. Remove the one that is not meant")
    if own:
        return messages
    return (*({"role": "system", "content": text} for text in [*texts.values()][:1]), *messages)


def _keep_mask(row: Row) -> tuple[int, ...] | None:
    mask = parse_json_column(row.get("keep_mask"), "keep_mask")
    if mask is None:
        return None
    if not isinstance(mask, list | tuple) or any(not isinstance(bit, int) or bit not in (0, 1) for bit in mask):
        raise DataError("keep_mask must be a list of 0 and 1, one per response token")
    return tuple(int(bit) for bit in mask)


def _tools(row: Row) -> tuple[dict[str, Any], ...] | None:
    """The `tools` column: a list of JSON schemas, or that list as JSON text (how TRL stores it in parquet)."""
    column = "tools" if row.get("tools") or not row.get("functions") else "functions"
    tools = parse_json_column(row.get(column), column)
    if not tools:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{column} is {kind_of(tools)}, expected a list of tool schemas (objects)")
    if column == "functions":  # OpenAI's older form
        tools = [{"type": "function", "function": tool} for tool in tools]
    return tuple(without_nulls(tool) for tool in tools)


def _template_kwargs(row: Row) -> dict[str, Any] | None:
    """The `chat_template_kwargs` column: variables for the template, as TRL hands them on."""
    found = parse_json_column(row.get("chat_template_kwargs"), "chat_template_kwargs")
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise DataError(f"chat_template_kwargs is {kind_of(found)}, expected an object of the template's variables")
    # the arguments of rendering, of which documents alone is a variable of a template
    arguments = {"messages", *signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}
    if taken := sorted(arguments & found.keys()):
        raise DataError(
            f"chat_template_kwargs holds {', '.join(taken)}, which rendering sets itself. Leave it out; only variables of the "
            "template, such as enable_thinking, can be given"
        )
    return dict(without_nulls(found))


def _key_list(row: Row) -> str:
    names = (str(key) for key, value in row.items() if value is not None)
    keys = sorted(name if name == name.strip() else f"'{name}'" for name in names)
    return escape_controls(", ".join(keys[:20])) or "(none)"
