"""What a page is made of, sections of blocks, and how the text of the file is made of these, with style sheet and script in it.

A block is a table (`Sheet`), or one of these, by kind:

- text: [paragraph]
- chart: the SVG
- map: {"columns": [str], "rows": [{"name": str, "cells": [{"text", "note", "background", "ink", "mark"} or None]}],
  "caption": str, "corner": str}
- tokens: {"traces", "left_out"}, see `tokens_block`

The script is named in the content security policy by its hash; data for it lies in a JSON block whose "<" is escaped, so
that no text in it can end the block.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from markupsafe import Markup

from loragate.errors import LoragateError
from loragate.report.table import Sheet, joined

PAGE_LIMIT = 3_000_000
"""Bytes that a report stays below, so that it can be mailed and opened on a phone."""
TRACE_BYTES = 2_300_000


@dataclass(frozen=True)
class Block:
    """Something that the page shows other than a table.

    Attributes:
        kind, data: see the module's text.
        title: heading above it; empty for none.
    """

    kind: str
    data: Any
    title: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page with an entry in its contents."""

    anchor: str
    title: str
    blocks: Sequence[Block | Sheet] = ()


def text(*paragraphs: str) -> Block:
    """Paragraphs."""
    return Block("text", paragraphs)


def tokens_block(traces: Mapping[str, Any], limit: int = TRACE_BYTES) -> Block:
    """The token view of a record of `loragate diagnose tokens`, rounded; a page can show one.

    Questions are left out from the end until the rest fits `limit`. The first stays even where it alone passes it; the page
    then refuses by its own limit.
    """
    head = {key: traces[key] for key in ("lower", "upper", "modules")}
    size = len(safe_json(head).encode())
    kept: list[dict[str, Any]] = []
    for question in traces["questions"]:
        smaller = {**question, "answers": [_rounded(answer) for answer in question["answers"]]}
        size += len(safe_json(smaller).encode()) + 1
        if kept and size > limit:
            break
        kept.append(smaller)
    left_out = len(traces["questions"]) - len(kept)
    return Block("tokens", {"traces": {**head, "questions": kept}, "left_out": left_out})


def _rounded(answer: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = dict(answer)
    for name in ("log_prob", "entropy", "delta_entropy"):
        values[name] = [round(value, 3) for value in values[name]]
    values["top"] = [[[text, round(p, 3)] for text, p in position] for position in answer["top"]]
    return values


def build_page(title: str, statements: Sequence[str], sections: Sequence[Section], footer: str = "") -> str:
    """The whole HTML text.

    Args:
        title: heading and window title.
        statements: the summary in plain words, one per entry, the most important first; said twice, it is shown once.
        sections: what follows it, in order.
        footer: one line on what wrote the report, and when.

    Raises:
        LoragateError: if the page would pass `PAGE_LIMIT`.
    """
    assets = resources.files("loragate.report.page") / "templates"
    script = (assets / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page: str = _template().render(
        title=title,
        statements=list(dict.fromkeys(statements)),
        sections=list(sections),
        style=Markup((assets / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=digest,
        footer=footer,
    )
    size = len(page.encode())
    if size > PAGE_LIMIT:
        raise LoragateError(
            f"the report would be {size / 1e6:.1f} MB, more than {PAGE_LIMIT / 1e6:g} MB; give it fewer runs, or fewer "
            "token traces (diagnose tokens --limit)"
        )
    return page


def safe_json(data: Any) -> str:
    """JSON that can stand inside a script element whatever strings it holds.

    Raises ValueError for a number that is not finite.
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("loragate.report.page", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"joined": joined, "safe_json": lambda data: Markup(safe_json(data))}
    return environment.get_template("page.html")
