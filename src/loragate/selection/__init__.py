"""Choosing among candidates on held-out evidence, with the untouched adapter always among them.

    candidate     a range and an objective to try
    choose        the pick: best mean, ties to the adapter
    disjoint      whether questions are also among other rows
    probe         questions with labels, or judged by the adapter's own majority (agreement)
    questions     probe questions from files and from rows that were set aside
    retention     a second probe that may veto and never win
    references    what needs no gates, asked for comparison only
    outcome       what candidates did, and the record of it
    transaction   train → probe → keep or fall back, resumable

The modules that need torch are imported by their own names, so that a command line can be checked without it.
"""

from loragate.selection.candidate import Candidate
from loragate.selection.choose import Choice, choose

__all__ = ["Candidate", "Choice", "choose"]
