"""From sections to the text of the file: the template, the style sheet and the script put into one.

The script is named in the content security policy by its hash; data for it lies in a JSON block whose "<" is escaped, so
that no text in it can end the block.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from markupsafe import Markup

from loragate.errors import LoragateError
from loragate.report.page.content import Section

PAGE_LIMIT = 3_000_000
"""Bytes that a report stays below, so that it can be mailed and opened on a phone."""


def build_page(
    title: str,
    statements: Sequence[str],
    sections: Sequence[Section],
    *,
    traces: Mapping[str, Any] | None = None,
    footer: str = "",
) -> str:
    """The whole HTML text.

    Args:
        title: heading and window title.
        statements: the summary in plain words, one per entry, the most important first; said twice, it is shown once.
        sections: what follows it, in order.
        traces: data of the token view, as `tokens.embedded` makes it; needed by a block of kind "tokens".
        footer: one line on what wrote the report, and when.

    Raises:
        LoragateError: if the page would pass `PAGE_LIMIT`.
    """
    assets = resources.files("loragate.report.page") / "templates"
    script = (assets / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = _template().render(
        title=title,
        statements=list(dict.fromkeys(statements)),
        sections=list(sections),
        style=Markup((assets / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=digest,
        traces=None if traces is None else Markup(safe_json(traces)),
        footer=footer,
    )
    size = len(text.encode())
    if size > PAGE_LIMIT:
        raise LoragateError(
            f"the report would be {size / 1e6:.1f} MB, more than {PAGE_LIMIT / 1e6:g} MB; give it fewer runs, or fewer "
            "token traces (diagnose tokens --limit)"
        )
    return text


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
    return environment.get_template("page.html")
