"""The line about the trials of a sweep: counted from their events, whoever runs them."""

from __future__ import annotations

import io

from rich.console import Console
from test_records import result

from loragate import display
from loragate.cli.sweep import Trials
from loragate.errors import DivergenceError
from loragate.gates.range import Range
from loragate.selection.candidate import grid
from loragate.selection.store import Store, Study

STUDY = Study(grid("a", [Range(-3.0, 1.0), Range(0.0, 1.0), Range(-6.0, 3.0)], [0], ["entropy"]), {"data": 1})


def test_a_line_counts_what_has_ended_and_names_what_runs_here(tmp_path, monkeypatch):
    monkeypatch.setattr(display, "PLAIN_SECONDS", 0.0)
    out = Console(file=io.StringIO(), force_terminal=False, width=100, highlight=False)
    store = Store(tmp_path, STUDY)
    adapter, first, other, last = STUDY.candidates

    def line():
        return out.file.getvalue().splitlines()[-1]

    with display.Display(out=out).job("trials") as job:
        trials = Trials(job, store)
        assert line() == "trials: 0 of 4 finished"
        job.first = (job.began - 10.0, 0.0)  # ten seconds ago
        trials.hear(other, "training", 3, 10, 0.25)
        assert line() == "trials: 0 of 4 finished · [0,1] entropy, seed 0: training 3 of 10, entropy 0.250"
        trials.hear(adapter, "finished", 0, 0, None)
        assert "left" not in line(), "what is not trained tells nothing of the others"
        trials.hear(first, "finished", 0, 0, None)
        assert line().startswith("trials: 2 of 4 finished, about ")
        trials.hear(last, "failed", 0, 0, None)
        assert line().startswith("trials: 2 of 4 finished, 1 failed, about ")
    assert line().endswith(" · 2 of 4 finished, 1 failed")
    store.write(result())
    store.note_failure(last, DivergenceError("of an earlier run"))
    with display.Display(out=out).job("trials") as job:
        Trials(job, store)
        assert line() == "trials: 1 of 4 finished, 1 failed", "what ended before is counted"
