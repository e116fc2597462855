"""Finding the answer in a response: the content of its last complete box.

Only a box counts. A number that happens to stand last in a response that was cut off is not an answer, so a response
without a box has none; so has one whose only box was cut off before it closed.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.S)  # an escaped character is consumed, so that it is no brace
_BARE = re.compile(r"-?\d[\d.,]*\d|-?\d|\\?[A-Za-z]+|[^\s{}]")


def last_boxed(response: str) -> str | None:
    r"""Return what the last complete `\boxed{…}` or `\fbox{…}` of `response` holds, or None.

    Braces are matched, escaped ones (`\{`) included as ordinary characters. `\boxed 5` holds the one token after it.
    Of nested boxes the innermost last one is returned. Surrounding blanks are removed; an empty box holds "".
    """
    boxes = list(_BOX.finditer(response))
    closing = _closing_braces(response) if boxes else {}
    for match in reversed(boxes):
        start = match.end()
        if response.startswith("{", start):
            end = closing.get(start)
            if end is not None:
                return response[start + 1 : end].strip()
        else:
            bare = _BARE.match(response, start)
            if bare is not None and bare.group() != "$":
                return bare.group()
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """The closing brace of every brace that has one, in one pass: answers can repeat an open box thousands of times."""
    pairs: dict[int, int] = {}
    unclosed: list[int] = []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            unclosed.append(match.start())
        elif match.group() == "}" and unclosed:
            pairs[unclosed.pop()] = match.start()
    return pairs


def closing_brace(text: str, start: int) -> int | None:
    r"""Return the index of the brace that closes the one at `start`, or None; `\{` and `\}` do not count."""
    return _closing_braces(text).get(start)
