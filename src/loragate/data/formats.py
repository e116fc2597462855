"""The row formats that people have, brought to one shape.

A row is a dict from a file or the hub; `normalize` turns it into `Turns`: a conversation, or a plain prompt with its
completion. This room knows keys and roles and nothing of files, templates or tokens.

Only `prompt` + `completion` as two strings is raw text, as in TRL. Any other pair of strings (`problem` + `solution`,
`question` + `answer`, …) is a question and its answer, hence one user turn and one assistant turn: glued together
without a template the answer would follow the question with nothing between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from loragate.data.messages import Message, conversation, kind_of, pair_messages, text_of, without_nulls
from loragate.errors import ConfigError, DataError, nearest
from loragate.printable import escape_controls

Row = Mapping[str, Any]

RAW_PAIR = ("prompt", "completion")
PAIRS = (
    RAW_PAIR,
    ("prompt", "response"),
    ("problem", "solution"),
    ("question", "answer"),
    ("instruction", "response"),
)


class EmptyResponse(DataError):
    """A row whose response is empty: there is nothing to learn, but nothing is wrong with the other rows."""


class Plain(NamedTuple):
    """Raw text: the completion follows the prompt with nothing between them."""

    prompt: str
    completion: str


class Conversation(NamedTuple):
    """Messages; assistant turns before index `trained_from` are context only."""

    messages: tuple[Message, ...]
    trained_from: int = 0


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


@dataclass(frozen=True)
class Format:
    """One row format: its name, the keys to tell people about, the test and the conversion."""

    name: str
    keys: str
    matches: Callable[[Row], bool]
    to_messages: Callable[[Row], Conversation | Plain]


def detect_format(row: Row) -> str:
    """Return the name of the format of `row`.

    `messages` wins over everything else and `conversations` over key pairs, as datasets often carry the unrendered
    columns beside the conversation.

    Raises:
        DataError: for a row that fits no format, or two formats that would give different texts.
    """
    fitting = [name for name, format in FORMATS.items() if format.matches(row)]
    if not fitting:
        known = "; ".join(f"{format.name}: {format.keys}" for format in FORMATS.values())
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
        ConfigError: for an unknown format name.
        DataError: for a row that does not fit the format or carries no response.
    """
    if format not in FORMATS:
        raise ConfigError(
            f"unknown row format {format!r}, expected one of {', '.join(FORMATS)}{nearest(format, FORMATS)}"
        )
    chosen = FORMATS[format]
    try:
        if not chosen.matches(row):
            raise DataError(f"found the keys {_key_list(row)}, expected the format {chosen.name}: {chosen.keys}")
        body = chosen.to_messages(row)
        keep_mask = _keep_mask(row)
        if isinstance(body, Plain):
            if not body.completion.strip():
                raise EmptyResponse("the completion is empty: a row needs a response to learn from. Remove the row.")
            return Turns(prompt=body.prompt, completion=body.completion, keep_mask=keep_mask)
        _check_responses(body)
        return Turns(messages=body.messages, keep_mask=keep_mask, tools=_tools(row), trained_from=body.trained_from)
    except DataError as error:
        raise type(error)(f"{where}: {error}" if where else str(error)) from None


def _messages_row(row: Row) -> Conversation:
    return Conversation(conversation(row["messages"], "messages"))


def _sharegpt_row(row: Row) -> Conversation:
    return Conversation(_with_system(row, conversation(row["conversations"], "conversations")))


def _alpaca_row(row: Row) -> Conversation:
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
    return Conversation(_with_system(row, tuple(messages)))


def _pair_row(row: Row) -> Conversation | Plain:
    fitting = [pair for pair in PAIRS if _has(row, *pair)]
    if len(fitting) > 1:
        names = " and ".join("+".join(pair) for pair in fitting)
        raise DataError(f"found {names} in one row, so prompt and response are ambiguous. Remove the pair not meant.")
    pair = fitting[0]
    prompt, completion = row[pair[0]], row[pair[1]]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = conversation(prompt, pair[0])
        return Conversation(before + conversation(completion, pair[1]), trained_from=len(before))
    if isinstance(prompt, list) or isinstance(completion, list):
        raise DataError(
            f"{pair[0]} is {kind_of(prompt)} and {pair[1]} is {kind_of(completion)}; "
            "expected two strings or two lists of messages"
        )
    texts = Plain(text_of(prompt, pair[0]), text_of(completion, pair[1]))
    return texts if pair == RAW_PAIR else Conversation(tuple(pair_messages(*texts)))


def _has(row: Row, *keys: str) -> bool:
    return all(row.get(key) is not None for key in keys)


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Format("messages", "messages (a list of role and content)", lambda row: _has(row, "messages"), _messages_row),
        Format(
            "sharegpt",
            "conversations (a list of from and value)",
            lambda row: _has(row, "conversations"),
            _sharegpt_row,
        ),
        Format(
            "alpaca",
            "instruction, output and optionally input",
            lambda row: _has(row, "instruction", "output"),
            _alpaca_row,
        ),
        Format(
            "prompt_completion",
            " or ".join("+".join(pair) for pair in PAIRS),
            lambda row: any(_has(row, *pair) for pair in PAIRS),
            _pair_row,
        ),
    )
}


def _with_system(row: Row, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Alpaca and ShareGPT files may keep the system message in a column of its own."""
    system = text_of(row.get("system") or "", "system")
    if not system.strip() or any(message["role"] == "system" for message in messages):
        return messages
    return ({"role": "system", "content": system}, *messages)


def _check_responses(body: Conversation) -> None:
    answers = [index for index, message in enumerate(body.messages) if message["role"] == "assistant"]
    if not any(index >= body.trained_from for index in answers):
        roles = ", ".join(message["role"] for message in body.messages) or "no messages"
        raise DataError(f"found {roles}, but no assistant turn to learn from. Remove the row.")
    for index in answers:
        message = body.messages[index]
        if not (message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")):
            raise EmptyResponse(
                f"the assistant turn at message {index} is empty: there is nothing to learn. Remove the row."
            )


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
