"""The line about the trials of a sweep, counted from their files."""

from __future__ import annotations

import io
import time

from rich.console import Console
from test_records import result

from loragate import display
from loragate.cli import sweep
from loragate.cli.sweep import Trials
from loragate.errors import LoragateError
from loragate.gates.range import Range
from loragate.selection.candidate import grid
from loragate.selection.store import Store
from loragate.selection.study import Study

STUDY = Study(grid("a", [Range(-3.0, 1.0), Range(0.0, 1.0), Range(-6.0, 3.0)], [0], ["entropy"]), {"data": 1})


def test_a_line_counts_what_the_files_say_and_names_what_runs_here(tmp_path, monkeypatch):
    monkeypatch.setattr(display, "PLAIN_SECONDS", 0.0)
    monkeypatch.setattr(sweep, "POLL_S", 0.01)
    out = Console(file=io.StringIO(), force_terminal=False, width=100, highlight=False)
    store, trials = Store(tmp_path, STUDY), Trials()
    _, _, other, last = STUDY.candidates

    def wait_for(text):
        until = time.monotonic() + 10
        while text not in out.file.getvalue():
            assert time.monotonic() < until, out.file.getvalue()
            time.sleep(0.01)

    store.note_failure(last, LoragateError("of an earlier attempt"))
    with trials.shown(store, out):
        wait_for("trials: 0 of 4 finished\n")
        trials.hear(other, "training", 3, 10, 0.25)
        wait_for("0 of 4 finished · [0,1] entropy, seed 0: training 3 of 10, entropy 0.250\n")
        store.write(result())
        wait_for("1 of 4 finished, about ")
        assert " s left · [0,1] entropy" in out.file.getvalue()
        store.note_failure(last, LoragateError("no disk"))
        wait_for("1 of 4 finished, 1 failed, about ")
        store.write(result(other))
    assert out.file.getvalue().splitlines()[-1].endswith(" · 2 of 4 finished, 1 failed")
    with trials.shown(store, out):
        wait_for("trials: 2 of 4 finished · ")
