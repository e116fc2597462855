"""Finding the answer in a response: the content of its last complete box.

Only a box counts. A number that happens to stand last in a response that was cut off is not an answer, so a response
without a box has none; so has one whose only box was cut off before it closed.
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BARE = re.compile(r"-?\d[\d.,]*\d|-?\d|\\?[A-Za-z]+|[^\s{}]")


def last_boxed(response: str) -> str | None:
    r"""Return what the last complete `\boxed{…}` or `\fbox{…}` of `response` holds, or None.

    Braces are matched, escaped ones (`\{`) included as ordinary characters. `\boxed 5` holds the one token after it.
    Of nested boxes the innermost last one is returned. Surrounding blanks are removed; an empty box holds "".
    """
    for match in reversed(list(_BOX.finditer(response))):
        start = match.end()
        if response.startswith("{", start):
            end = closing_brace(response, start)
            if end is not None:
                return response[start + 1 : end].strip()
        else:
            bare = _BARE.match(response, start)
            if bare is not None and bare.group() != "$":
                return bare.group()
    return None


def closing_brace(text: str, start: int) -> int | None:
    r"""Return the index of the brace that closes the one at `start`, or None; `\{` and `\}` do not count."""
    depth, index = 0, start
    while index < len(text):
        character = text[index]
        if character == "\\":
            index += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return index
        index += 1
    return None
