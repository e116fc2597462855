"""The live table on a terminal and the plain lines elsewhere, from the same files."""

from __future__ import annotations

import io

from rich.console import Console
from test_records import result

from loragate.cli.sweep_table import headline, line, live_table, states_table
from loragate.errors import LoragateError
from loragate.gates.range import Range
from loragate.selection.candidate import grid
from loragate.selection.store import Status, Store, TrialState
from loragate.selection.study import Study

STUDY = Study(grid(["a"], [Range(-3.0, 1.0), Range(0.0, 1.0), Range(-6.0, 3.0)], [0], ["entropy"]), {"data": 1})


def shown(folder, terminal):
    out = Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False)
    store = Store(folder, STUDY)
    places = [store.place(one) for one in STUDY.candidates]
    for place in places:
        place.mkdir(parents=True)
    with live_table(store, out):
        Status(places[2])("training", 3, 10, 0.25)
        store.note_failure(STUDY.candidates[3], LoragateError("no disk"))
        store.write(result())
    return out.file.getvalue()


def test_a_terminal_has_a_table(tmp_path):
    text = shown(tmp_path, True)
    for part in (
        "1 of 4 finished, 1 running, 1 failed",
        "[0,1] entropy, seed 0",
        "3/10",
        "0.250",
        "75.0",
        "[-6,3] entropy",
    ):
        assert part in text


def test_elsewhere_a_line_per_change(tmp_path):
    lines = shown(tmp_path, False).splitlines()
    assert sorted(line.split(" (")[0] for line in lines) == [
        "[-3,1] entropy, seed 0: finished, probe 75.0 %, entropy 0.500",
        "[-6,3] entropy, seed 0: failed, no disk",
        "[0,1] entropy, seed 0: training 3/10",
    ]
    assert any("(1 of 4 finished" in line for line in lines)


def test_without_a_probe_a_line_has_no_score():
    state = TrialState(STUDY.candidates[1], "finished", 3, 3, 0.5)
    assert line(state, "all") == "[-3,1] entropy, seed 0: finished, entropy 0.500 (all)"


def test_many_trials_stay_short_and_the_rest_is_estimated():
    trials = grid(["a"], [Range(-float(n), 1.0) for n in range(100)], [0], ["entropy"])
    states = [TrialState(trial, "finished", score=0.5) for trial in trials[:51]]
    states += [TrialState(trial, "waiting") for trial in trials[51:]]
    assert states_table(states, "").row_count == 6
    assert headline(states, 1, 100.0) == "51 of 101 finished, 0 running, about 1 min 40 s left"
