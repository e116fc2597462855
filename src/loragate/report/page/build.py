"""What a page is made of, sections of blocks, and how the text of the file is made of these, with style sheet and script in it.

A block is a table (`Table`), or one of these, by kind:

- text: [paragraph]
- chart: what draws it, or its SVG
- tokens: {"traces", "left_out"}, see `tokens_block`

The script is named in the content security policy by its hash; data for it lies in a JSON block whose "<" is escaped, so
that no text in it can end the block.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from io import StringIO
from typing import Any

from markupsafe import Markup

from loragate.report.figures import INK, Draw
from loragate.report.table import Table, joined

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
    blocks: Sequence[Block | Table] = ()


def text(*paragraphs: str) -> Block:
    """Paragraphs."""
    return Block("text", paragraphs)


def chart(draw: Draw, title: str) -> Block:
    """A figure, drawn where it is shown."""
    return Block("chart", draw, title)


def drawn(block: Block | Table) -> Block | Table:
    """The block with its chart as SVG: the ink is the page's own, and text stays text in the page's letters."""
    if not isinstance(block, Block) or block.kind != "chart" or isinstance(block.data, Markup):
        return block
    buffer = StringIO()
    block.data(buffer)
    # a whole document, with an XML head that cannot stand inside HTML: of its root only the size is kept
    root, _, inside = buffer.getvalue().partition("<svg ")[2].partition(">")
    box = re.search(r'viewBox="[^"]*"', root)
    assert box is not None
    inside = re.sub(r"<metadata>.*?</metadata>", "", inside, flags=re.DOTALL)
    inside = re.sub(r' id="[\w.]+_\d+"', "", inside)  # every figure on the page would have them
    inside = re.sub(r"; font-family: [^;\"]*", "", inside)
    inside = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", inside)  # as matplotlib before 3.10 has it
    inside = inside.replace(INK, "currentColor")
    head = Markup('<svg {} role="img" aria-label="{}" class="chart">').format(Markup(box[0]), block.title)
    return replace(block, data=head + Markup(inside))


def tokens_block(traces: Mapping[str, Any], limit: int = TRACE_BYTES) -> Block:
    """The token view of a record of `loragate diagnose tokens`; a page can show one.

    Questions are left out from the end until the rest fits `limit`. The first stays even where it alone passes it; the report
    then refuses by its own limit.
    """
    head = {key: traces[key] for key in ("lower", "upper", "modules")}
    size = len(safe_json(head).encode())
    kept: list[dict[str, Any]] = []
    for question in traces["questions"]:
        size += len(safe_json(question).encode()) + 1
        if kept and size > limit:
            break
        kept.append(question)
    left_out = len(traces["questions"]) - len(kept)
    return Block("tokens", {"traces": {**head, "questions": kept}, "left_out": left_out})


def build_page(title: str, statements: Sequence[str], sections: Sequence[Section], footer: str = "") -> str:
    """The whole HTML text.

    Args:
        title: heading and window title.
        statements: the summary in plain words, one per entry, the most important first; said twice, it is shown once.
        sections: what follows it, in order.
        footer: one line on what wrote the report, and when.
    """
    assets = resources.files("loragate.report.page") / "templates"
    script = (assets / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page: str = _template().render(
        title=title,
        statements=list(dict.fromkeys(statements)),
        sections=[replace(section, blocks=[drawn(block) for block in section.blocks]) for section in sections],
        style=Markup((assets / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=digest,
        footer=footer,
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
