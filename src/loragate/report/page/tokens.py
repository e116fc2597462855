"""The token view's data, cut to what fits a page.

Traces come from `loragate diagnose tokens` (`analysis/token_traces.py` describes them); here they are only rounded, and
questions are left out from the end until the page keeps its limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loragate.report.page.build import safe_json

TRACE_BYTES = 2_300_000
_ROUNDED = ("log_prob", "entropy", "delta_entropy")


def embedded(traces: Mapping[str, Any], limit: int = TRACE_BYTES) -> tuple[dict[str, Any], int]:
    """(data for the page, number of questions left out) of a trace record.

    The first question stays even where it alone passes `limit`; the page then refuses by its own limit.
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
    return {**head, "questions": kept}, len(traces["questions"]) - len(kept)


def _rounded(answer: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = dict(answer)
    for name in _ROUNDED:
        if values.get(name) is not None:
            values[name] = [round(value, 3) for value in values[name]]
    values["top"] = [[[text, round(p, 3)] for text, p in position] for position in answer.get("top") or []]
    return values
