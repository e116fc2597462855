"""Choosing among candidates on held-out evidence, with the untouched adapter always among them.

    candidate     a range and an objective to try
    choose        the pick: best mean, ties to the adapter
    disjoint      whether questions are also among other rows
    probe         questions with labels, or judged by the adapter's own majority (agreement)
    questions     probe questions from files and from rows that were set aside
    retention     a second probe that may veto and never win
    outcome       what candidates did, and the record of it
    transaction   train → probe → keep or fall back, resumable

What needs torch is imported on first use, so that a command line can be checked without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from loragate.selection.candidate import Candidate
from loragate.selection.choose import Choice, choose

if TYPE_CHECKING:
    from loragate.selection.outcome import Selection
    from loragate.selection.probe import Probe
    from loragate.selection.transaction import Transaction

_EXPORTS = {"Probe": "probe", "Selection": "outcome", "Transaction": "transaction"}

__all__ = ["Candidate", "Choice", "Probe", "Selection", "Transaction", "choose"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'loragate.selection' has no attribute {name!r}")
    return getattr(importlib.import_module(f"loragate.selection.{_EXPORTS[name]}"), name)
