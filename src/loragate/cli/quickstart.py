"""`loragate quickstart`: the whole method on the tiny world, offline, with its controls and an honest reading."""

from __future__ import annotations

import os

from loragate.cli.arguments import Command
from loragate.gates.range import parse_ranges
from loragate.quickstart import QuickstartSettings


def run(options: QuickstartSettings) -> int:
    """Run the study, print the table and its reading, write the run folder."""
    parse_ranges(options.ranges)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from loragate.quickstart.run import run_quickstart

    run_quickstart(options)
    return 0


COMMAND = Command(
    name="quickstart",
    summary="The whole method on a tiny synthetic world, offline, in a few minutes on two CPU cores.",
    options=QuickstartSettings,
    run=run,
    examples=(
        "loragate quickstart",
        "loragate quickstart --seed 1 --out runs/second",
        "loragate quickstart --controls full",
    ),
)
