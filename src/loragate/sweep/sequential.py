"""One trial after the other in this process: no Ray, no other processes, the same files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loragate.sweep.plan import SweepPlan, Trial
from loragate.sweep.trials import Materials, TrialRunner


def run_sequentially(materials: Materials, plan: SweepPlan, folder: Path, pending: Sequence[Trial]) -> None:
    """Run the pending trials; one that fails is noted in its folder and does not stop the others.

    Raises:
        KeyboardInterrupt: on Ctrl-C, after a checkpoint.
    """
    runner = TrialRunner(materials, plan, folder)
    for trial in pending:
        try:
            runner.run(trial)
        except Exception:  # noted by the runner, reported by whoever reads the folder
            continue
