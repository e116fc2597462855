"""What a run was trained on, as a small JSON file in its folder, and the check that a resumed run still has it.

Counts, order and content of the rows: enough to say of a data file that it is the same one, or how it has changed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loragate.data.encoding import EncodedRows
from loragate.data.rows import Rows
from loragate.errors import DataError

NAME = "data.json"


def rows_record(rows: Rows, encoded: EncodedRows, **given: Any) -> dict[str, Any]:
    """The record of one run's rows.

    Args:
        rows: as they are trained on, in their order.
        encoded: the same, encoded.
        given: how they were asked for (split, revision, selection, …); kept as it is.
    """
    summary = encoded.summary
    return {
        "source": rows.source,
        **given,
        "format": summary.format,
        "rows": summary.rows,
        "trained": len(encoded),
        "without_response": summary.empty,
        "response_cut": summary.dropped,
        "truncated": summary.truncated,
        "response_tokens": summary.response_tokens,
        "prompt_tokens": summary.prompt_tokens,
        "content_sha256": rows.content,
        "order_sha256": rows.fingerprint,
    }


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record in a run folder; None where there is none, or none that can be read."""
    try:
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def require_same_rows(folder: Path, rows: Rows) -> None:
    """Refuse to go on with a run on other rows than it began with.

    Raises:
        DataError: saying what has changed: their number, their content or only their order.
    """
    before = read_record(folder)
    if before is None or before.get("order_sha256") == rows.fingerprint:
        return
    if before.get("rows") != len(rows):
        change = f"it gave {before.get('rows')} rows then and gives {len(rows)} now"
    elif before.get("content_sha256") == rows.content:
        change = "its rows, or the seed that shuffles them, are in another order now"
    else:
        change = f"its {len(rows)} rows are not the same ones any more"
    raise DataError(
        f"{rows.source} has changed since the run in {folder} began: {change}. Put back what was there, with the settings "
        f"that chose the rows, or begin a new run in another folder"
    )


def describe_missing(folder: Path, error: DataError) -> DataError:
    """The error of reading the data of a run that is resumed, with what the run had."""
    before = read_record(folder)
    if before is None:
        return error
    return DataError(
        f"{error} The run in {folder} was begun with {before.get('rows')} rows of {before.get('source')}; a resumed run needs "
        "them again."
    )
