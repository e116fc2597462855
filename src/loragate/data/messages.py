"""Messages as data has them, checked and brought to `{"role", "content", …}`.

Knows roles, their ShareGPT names and text blocks; knows nothing of row formats or templates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loragate.errors import DataError, nearest
from loragate.printable import excerpt

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_ALIASES = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool", "ipython": "tool"}


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
    present: Message = without_nulls(entry)
    role = present.pop("role", None) or present.pop("from", None)
    content = present.pop("content", None)
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
