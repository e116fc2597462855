"""Text from data, made safe to print.

Files and tokenizers may hold terminal escape codes, direction overrides and invisible characters; whatever prints a
piece of data goes through here.
"""

from __future__ import annotations

import unicodedata

_ESCAPED_CATEGORIES = (
    "Cc",
    "Cf",
    "Cs",
    "Co",
    "Cn",
    "Zl",
    "Zp",
)  # control, format, surrogate, private, not assigned, separators
_KEPT = "\n\t\u200c\u200d"  # the joiners are letters' own in Persian, Hindi and others


def escape_for_terminal(text: str) -> str:
    """A text of others with what a terminal would act on written out, as in `\\x1b`; line ends, tabs and joiners stay."""
    # a carriage return alone goes back to the line's beginning and is written out; before a line end it is Windows' own
    return "\r\n".join(escape_controls(part, keep=_KEPT) for part in text.split("\r\n"))


def escape_controls(text: str, keep: str = "") -> str:
    """Replace control, format, surrogate, private and line-separator characters by escapes such as `\\x1b`.

    Characters in `keep` stay as they are.
    """
    if text.isprintable():  # nearly always, and quicker than asking for every character's category
        return text
    return "".join(
        _escape(char) if char not in keep and unicodedata.category(char) in _ESCAPED_CATEGORIES else char
        for char in text
    )


def excerpt(text: str, length: int = 60) -> str:
    """The beginning of `text` between quotes, escaped, with an ellipsis where it was cut."""
    text = text.strip()
    cut = text if len(text) <= length else text[: length - 1] + "…"
    return f"'{escape_controls(cut)}'"


def _escape(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
