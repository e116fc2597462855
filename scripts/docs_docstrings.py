"""Docstrings of this package are plain text and put settings that belong together on one line; the site's reader of
docstrings wants Markdown and a line for each. Used by the `mkdocstrings` section of mkdocs.yml.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

SEVERAL = re.compile(r"^( {4})(\w+(?:, \w+)+): (.*)$")


class PlainText(Extension):
    """Prepares every docstring before its sections are read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = escaped(separated(obj.docstring.value))


def separated(text: str) -> str:
    """`a, b: text` of a section as one entry for each name."""
    lines: list[str] = []
    left = text.split("\n")
    while left:
        line = left.pop(0)
        found = SEVERAL.match(line)
        if found is None:
            lines.append(line)
            continue
        more = []
        while left and left[0].startswith(" " * 8):
            more.append(left.pop(0))
        for name in found[2].split(", "):
            lines += [f"{found[1]}{name}: {found[3]}", *more]
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Outside of backticks: no HTML tag, no italics, and no quoted key whose colon would end a type.

    `**kwargs:` at the start of an entry stays, as it is the name of a parameter.
    """
    parts = re.split(r"(`[^`]*`|^ {4}\*\*?\w+:)", text, flags=re.M)
    keep = ("`", "    *")
    return "".join(part if part.startswith(keep) else re.sub(r'[<*]|(?<="):(?= )', _escape, part) for part in parts)


def _escape(found: re.Match[str]) -> str:
    return {"<": "&lt;", "*": "\\*", ":": "&#58;"}[found[0]]
