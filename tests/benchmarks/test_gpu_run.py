"""The run of everything that needs a GPU: it survives its parts, and all of them work when rehearsed on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tiny import load_script

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
STUB = """
import json, os, sys, time
name, out = sys.argv[sys.argv.index("--part") + 1], sys.argv[sys.argv.index("--out") + 1]
if name != "kernels":
    open(out, "w").write(json.dumps({"left_out": "no thing"} if name == "four_bit" else {"first case": 1}))
print("words of", name, flush=True)
if name == "step":
    if os.fork() == 0:
        time.sleep(60)
    time.sleep(60)
sys.exit({"parity": 0, "kernels": 7, "four_bit": 3}[name])
"""


@pytest.fixture(scope="module")
def run():
    before = list(sys.path)
    yield load_script(GPU / "run.py")
    sys.path[:] = before


def test_a_part_that_fails_hangs_or_lacks_something_is_recorded_and_the_next_one_runs(run, tmp_path, monkeypatch):
    (tmp_path / "run.py").write_text(STUB)
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "machine", lambda rehearsal: {"python": "3"})
    monkeypatch.setitem(run.LIMITS, "step", 1.0)
    out, seen = tmp_path / "gpu.json", []
    monkeypatch.setattr("builtins.print", lambda *words, **_: seen.append(json.loads(out.read_text())["parts"].keys()))
    run.run_all(["parity", "kernels", "step", "four_bit"], 5, True, out)
    parts = json.loads(out.read_text())["parts"]
    assert [part["state"] for part in parts.values()] == [
        "done",
        "failed with status 7",
        "stopped after 1 s",
        "left out: no thing",
    ]
    assert parts["step"]["result"] == {"first case": 1}, "what a stopped part had measured is kept"
    assert "words of kernels" in parts["kernels"]["log"]
    assert "log" not in parts["parity"]
    assert list(seen[2]) == ["parity"], "the record is written after every part"
    assert run.run_all(["parity"], 0.1, True, out)["parts"]["parity"]["state"] == "left out: no time was left"


@pytest.mark.slow("whole commands")
def test_every_part_works_when_rehearsed(tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, str(GPU / "run.py"), "--rehearse", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=1500,
    )
    record = json.loads(out.read_text())
    states = {name: part["state"] for name, part in record["parts"].items()}
    assert done.returncode == 0, (states, [part.get("log", "")[-500:] for part in record["parts"].values()])
    assert all(state == "done" or state.startswith("left out: no ") for state in states.values()), states
    assert states["parity"] == states["step"] == states["decode"] == states["fsdp2"] == "done"
    assert record["rehearsal"]
    assert record["parts"]["step"]["result"]["tiny"]["gates_loragate"]["seconds"]["median"] > 0
