"""What makes a trial finished, what does not, and who may work in a folder."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from loragate.errors import DivergenceError, LoragateError
from loragate.files import held
from loragate.gates.range import Range
from loragate.selection.candidate import Candidate
from loragate.selection.probe import Scored
from loragate.selection.store import Store, Study, TrialResult

TRIAL = Candidate(Range(-3, 1), adapter="a")
STUDY = Study((Candidate(None, "adapter", adapter="a"), TRIAL), {"data": 1})
OTHER = Study(STUDY.candidates, {"data": 2})


def result(trial=TRIAL):
    forms = ["n + n", "n", "n", "n + n"]
    scored = Scored(np.array([[0.0, 1.0], [1.0, 1.0]]), {"finished": 1.0}, "abc", "questions", forms=forms)
    return TrialResult(
        trial, scored, None, {"steps": 3, "entropy_after": 0.5}, {"m": {"mean": 1.0}}, {"training": 1.23456}
    )


def test_a_result_reads_as_it_was_written(tmp_path):
    assert Store(tmp_path, STUDY).read(TRIAL) is None
    Store(tmp_path, STUDY).write(result())
    found = Store(tmp_path, STUDY).read(TRIAL)
    assert found.probe.scores.tolist() == [[0, 1], [1, 1]]
    assert (found.candidate, found.modules, found.seconds) == (TRIAL, {"m": {"mean": 1.0}}, {"training": 1.235})
    assert found.probe.forms == ["n + n", "n", "n", "n + n"]
    assert found.probe.with_more(found.probe).forms == 2 * found.probe.forms
    path = Store(tmp_path, STUDY).place(TRIAL) / "result.json"
    earlier = json.loads(path.read_text())
    del earlier["probe"]["forms"]
    path.write_text(json.dumps(earlier))
    assert Store(tmp_path, STUDY).read(TRIAL).probe.forms == [], "an earlier version kept none"


def test_only_a_valid_result_of_this_trial_in_this_sweep_counts(tmp_path):
    Store(tmp_path, STUDY).write(result())
    path = Store(tmp_path, STUDY).place(TRIAL) / "result.json"
    good = json.loads(path.read_text())
    assert Store(tmp_path, OTHER).read(TRIAL) is None
    for change in ({"sweep": "x"}, {"version": 2}, {"trial": {**good["trial"], "seed": 1}}, {"probe": None}):
        path.write_text(json.dumps({**good, **change}))
        assert Store(tmp_path, STUDY).read(TRIAL) is None, change
    for scores in ([], [0.0, 1.0], [[0.0], [1.0, 1.0]], [[None]]):
        path.write_text(json.dumps({**good, "probe": {**good["probe"], "scores": scores}}))
        assert Store(tmp_path, STUDY).read(TRIAL) is None, scores
    path.write_text(json.dumps(good)[:-9])
    assert Store(tmp_path, STUDY).read(TRIAL) is None


def test_a_diverged_trial_is_final_for_its_own_sweep(tmp_path):
    place = Store(tmp_path, STUDY).place(TRIAL)
    place.mkdir(parents=True)
    Store(tmp_path, STUDY).note_failure(TRIAL, LoragateError("no disk"))
    assert Store(tmp_path, STUDY).diverged() == {}
    Store(tmp_path, STUDY).note_failure(TRIAL, DivergenceError("not finite at step 3"))
    assert Store(tmp_path, STUDY).diverged() == {TRIAL.slug: "not finite at step 3"}
    assert Store(tmp_path, OTHER).diverged() == {}


def test_one_process_at_a_time(tmp_path):
    fcntl = pytest.importorskip("fcntl", reason="no such locks on Windows")
    # another process, without the seconds of its imports
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    lock = tmp_path / "lock"

    def other():
        return subprocess.run([sys.executable, "-c", code, str(lock)], capture_output=True, check=False).returncode

    with held(lock, 0.0, "mine"):
        assert other() == 1
    assert other() == 0
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LoragateError, match="taken"), held(lock, 0.0, "taken"):
            pass
