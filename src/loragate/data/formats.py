"""The row formats that people have, checked and brought to one shape.

A row is a dict from a file or the hub; `normalize` turns it into `Turns`: a conversation, or a plain prompt with its
completion. Files, templates and tokens are handled elsewhere.

Only `prompt` + `completion` as two strings is raw text, as in TRL. Any other pair of strings (`problem` + `solution`,
`question` + `answer`, …) is a question and its answer, hence one user turn and one assistant turn: glued together
without a template the answer would follow the question with nothing between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from loragate.errors import DataError, nearest
from loragate.printable import escape_controls, excerpt

Row = Mapping[str, Any]
Message = dict[str, Any]

RAW_PAIR = ("prompt", "completion")
PAIRS = (
    RAW_PAIR,
    ("prompt", "response"),
    ("problem", "solution"),
    ("question", "answer"),
    ("instruction", "response"),
)

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_ALIASES = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool", "ipython": "tool"}


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
        trained_from: assistant turns before this message index are context (the prompt of a prompt/completion row).
    """

    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    completion: str | None = None
    keep_mask: tuple[int, ...] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    trained_from: int = 0

    @property
    def is_plain(self) -> bool:
        return self.completion is not None


class Format(NamedTuple):
    """One row format: the keys named in messages, the test and the conversion."""

    keys: str
    matches: Callable[[Row], bool]
    to_turns: Callable[[Row], Turns]


def conversation(entries: Any, key: str) -> tuple[Message, ...]:
    """Every entry of a list as a message; `key` names the list in errors."""
    if not isinstance(entries, list | tuple):
        raise DataError(f"{key} is {kind_of(entries)}, expected a list of messages")
    return tuple(message(entry, f"{key}[{index}]") for index, entry in enumerate(entries))


def message(entry: Any, place: str) -> Message:
    """One message with the keys `role` and `content`; other keys (tool_calls, reasoning_content) stay for the template."""
    if not isinstance(entry, Mapping):
        raise DataError(f"{place} is {kind_of(entry)}, expected an object with role and content")
    if not {"content", "value", "tool_calls", "reasoning_content"} & entry.keys():
        raise DataError(f"{place} has no content; found the keys {', '.join(map(str, entry)) or '(none)'}")
    present: Message = without_nulls(entry)  # a copy, from which the known keys are taken
    role = present.pop("role", None) or present.pop("from", None)
    content = present.pop("content", None)
    # absent beside tool calls; "value" is ShareGPT's
    content = present.pop("value", "") if content is None else content
    name = ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
    if name not in ROLES:
        known = (*ROLES, *ROLE_ALIASES)
        found = excerpt(role) + nearest(role, known) if isinstance(role, str) else kind_of(role)
        raise DataError(f"{place} has as its role {found}; expected one of {', '.join(known)}")
    return {"role": name, "content": _content(content, place), **present}


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
    for block in content:
        if not isinstance(block, Mapping) or block.get("text") is None:
            kind = block.get("type") if isinstance(block, Mapping) else kind_of(block)
            raise DataError(
                f"the content of {place} has a block of type {excerpt(str(kind))}; only text can be learned from"
            )
        blocks.append(text_of(block["text"], f"a text block of {place}"))
    return "".join(blocks)


def text_of(value: Any, name: str) -> str:
    """`value` if it is text that can be written as UTF-8, else DataError."""
    if not isinstance(value, str):
        raise DataError(f"{name} is {kind_of(value)}, expected text")
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
    if not fitting:
        known = "; ".join(f"{name}: {format.keys}" for name, format in FORMATS.items())
        raise DataError(
            f"found the keys {_key_list(row)}, which fit no known row format. Rename them to those of one: {known}."
        )
    if len(fitting) > 1 and fitting[0] not in ("messages", "sharegpt"):
        raise DataError(
            f"found the keys {_key_list(row)}, which fit {' and '.join(fitting)} alike. "
            "Remove the columns that are not meant."
        )
    return fitting[0]


def normalize(row: Row, format: str, where: str = "") -> Turns:
    """Convert `row` of the named format to `Turns`; `where` (file:line) opens every error message.

    Raises:
        DataError: for a row that does not fit the format or carries no response.
    """
    chosen = FORMATS[format]
    try:
        if not chosen.matches(row):
            raise DataError(f"found the keys {_key_list(row)}, expected the format {format}: {chosen.keys}")
        turns = replace(chosen.to_turns(row), keep_mask=_keep_mask(row))
        if turns.completion is None:
            answers = [index for index, message in enumerate(turns.messages) if message["role"] == "assistant"]
            if not any(index >= turns.trained_from for index in answers):
                roles = ", ".join(message["role"] for message in turns.messages) or "no messages"
                raise DataError(f"found {roles}, but no assistant turn to learn from. Remove the row.")
            for index in answers:  # turns of context are checked as well: an empty one spoils what follows it
                message = turns.messages[index]
                if not (message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")):
                    raise EmptyResponse(
                        f"the assistant turn at message {index} is empty: there is nothing to learn. Remove the row."
                    )
            return replace(turns, tools=_tools(row))
        if not turns.completion.strip():
            raise EmptyResponse("the completion is empty: a row needs a response to learn from. Remove the row.")
        return turns
    except DataError as error:
        # of its own type, as an empty response is counted and not an error
        raise type(error)(f"{where}: {error}" if where else str(error)) from None


def _alpaca_row(row: Row) -> Turns:
    messages: list[Message] = []
    history = row.get("history") or []
    if not isinstance(history, list | tuple):
        raise DataError(f"history is {kind_of(history)}, expected a list of pairs [user text, assistant text]")
    for index, pair in enumerate(history):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise DataError(f"history[{index}] is {kind_of(pair)}, expected a pair [user text, assistant text]")
        messages += pair_messages(text_of(pair[0], f"history[{index}][0]"), text_of(pair[1], f"history[{index}][1]"))
    parts = [text_of(row["instruction"], "instruction"), text_of(row.get("input") or "", "input")]
    question = "\n\n".join(part for part in parts if part.strip())
    messages += pair_messages(question, text_of(row["output"], "output"))
    return Turns(_with_system(row, tuple(messages)))


def _pair_row(row: Row) -> Turns:
    fitting = [pair for pair in PAIRS if _has(row, *pair)]
    if len(fitting) > 1:
        names = " and ".join("+".join(pair) for pair in fitting)
        raise DataError(f"found {names} in one row, so prompt and response are ambiguous. Remove the pair not meant.")
    pair = fitting[0]
    prompt, completion = row[pair[0]], row[pair[1]]
    if isinstance(prompt, list) and isinstance(completion, list):  # two parts of one conversation
        before = conversation(prompt, pair[0])
        return Turns(before + conversation(completion, pair[1]), trained_from=len(before))
    if isinstance(prompt, list) or isinstance(completion, list):
        raise DataError(
            f"{pair[0]} is {kind_of(prompt)} and {pair[1]} is {kind_of(completion)}; "
            "expected two strings or two lists of messages"
        )
    texts = text_of(prompt, pair[0]), text_of(completion, pair[1])
    return Turns((), *texts) if pair == RAW_PAIR else Turns(tuple(pair_messages(*texts)))


def _has(row: Row, *keys: str) -> bool:
    return all(row.get(key) is not None for key in keys)


FORMATS: dict[str, Format] = {
    "messages": Format(
        "messages (a list of role and content)",
        lambda row: _has(row, "messages"),
        lambda row: Turns(conversation(row["messages"], "messages")),
    ),
    "sharegpt": Format(
        "conversations (a list of from and value)",
        lambda row: _has(row, "conversations"),
        lambda row: Turns(_with_system(row, conversation(row["conversations"], "conversations"))),
    ),
    "alpaca": Format(
        "instruction, output and optionally input",
        lambda row: _has(row, "instruction", "output"),
        _alpaca_row,
    ),
    "prompt_completion": Format(
        " or ".join("+".join(pair) for pair in PAIRS),
        lambda row: any(_has(row, *pair) for pair in PAIRS),
        _pair_row,
    ),
}


def _with_system(row: Row, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Alpaca and ShareGPT files may keep the system message in a column of its own."""
    system = text_of(row.get("system") or "", "system")
    if not system.strip() or any(message["role"] == "system" for message in messages):
        return messages
    return ({"role": "system", "content": system}, *messages)


def _keep_mask(row: Row) -> tuple[int, ...] | None:
    mask = row.get("keep_mask")
    if mask is None:
        return None
    if not isinstance(mask, list | tuple) or any(not isinstance(bit, int) or bit not in (0, 1) for bit in mask):
        raise DataError("keep_mask must be a list of 0 and 1, one per response token")
    return tuple(int(bit) for bit in mask)


def _tools(row: Row) -> tuple[dict[str, Any], ...] | None:
    """The `tools` column: a list of JSON schemas, or that list as JSON text (how TRL stores it in parquet)."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise DataError(f"tools is text that is not JSON ({error})") from None
    if not tools:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"tools is {kind_of(tools)}, expected a list of tool schemas (objects)")
    return tuple(without_nulls(tool) for tool in tools)


def _key_list(row: Row) -> str:
    keys = sorted(str(key) for key, value in row.items() if value is not None)
    return escape_controls(", ".join(keys[:20])) or "(none)"
