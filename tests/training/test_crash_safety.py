"""A run survives what happens to it: kills, torn checkpoints, a full disk, another version or another stage."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import loragate as lg
from loragate.errors import ConfigError, TrainingError
from loragate.training import GateTrainingSettings
from loragate.training import checkpoints as checkpoints_module
from loragate.training.checkpoints import TrainingFolder, find_checkpoint_fault, last_checkpoint
from tiny import gate_values, same, tiny_adapter, tiny_rows, tiny_tokenizer

CONFIG = lg.GateConfig(-3, 2)
SETTINGS = GateTrainingSettings(
    batch_size=4, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, save_steps=1, k=20, max_length=64
)
MORE = pytest.mark.slow("products")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "crash_safety.py"


def train(folder=None, settings=SETTINGS, **more):
    """(result, gates) of a calibration."""
    model = tiny_adapter()
    result = lg.train_gates(model, tiny_tokenizer(), tiny_rows(12), CONFIG, settings, run_folder=folder, **more)
    return result, gate_values(model)


def killed_at(step):
    def kill(report):
        if report.step == step:
            raise RuntimeError("killed")

    return kill


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(folder of a finished run with checkpoint-2 and checkpoint-3, its gates); a test damages a copy."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, train(folder)[1]


@pytest.fixture
def damaged(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "run")


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    """Change one bit, as a disk does."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def begin(identity, folder, resume=False):
    return TrainingFolder(folder, True, resume).begin(identity)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    """Keeping more checkpoints or fewer changes no number, and a resumed run may keep others than before."""
    first, then = (replace(SETTINGS, max_steps=6, save_total_limit=keep) for keep in (0, 3))
    complete, expected = train(tmp_path / "whole", replace(first, save_total_limit=2))
    folder = tmp_path / "run"

    def kept():
        return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))

    with pytest.raises(RuntimeError, match="killed"):
        train(folder, first, on_step=killed_at(4))
    assert kept() == [1, 2, 3]
    with pytest.raises(TrainingError, match="holds an unfinished run"):
        train(folder, first)
    with pytest.raises(TrainingError, match=r"settings\.max_length = 64, now it is 63"):
        train(folder, replace(first, max_length=63), resume=True)
    resumed, found = train(folder, then, resume=True)
    assert kept() == [4, 5, 6]
    assert resumed.steps == complete.steps == 6
    assert same(found, expected)
    steps = [[record for record in result.history if "loss" in record] for result in (resumed, complete)]
    assert steps[0] == steps[1], "it begins at the run's beginning"
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in logged if "loss" in record] == [1, 2, 3, 4, 5, 6]
    assert "train_runtime" in logged[-1]
    assert (folder / "run.json").read_bytes() == (tmp_path / "whole" / "run.json").read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "trainer_state.json").write_text(""),
        lambda folder: (folder / "trainer_state.json").unlink(),
        lambda folder: truncate(folder / "trainer_state.json"),
        lambda folder: truncate(folder / "trained.safetensors"),
        lambda folder: (folder / "optimizer.pt").unlink(),
        lambda folder: flip(folder / "optimizer.pt"),
        lambda folder: flip(folder / "scheduler.pt"),
        lambda folder: (folder / "checksums.json").write_text("{"),
        lambda folder: (folder / "checksums.json").unlink(),
    ],
    ids=[
        *("empty state", "no state", "half a state", "half the weights", "no optimiser", "a bit of the optimiser"),
        *("a bit of the schedule", "half the checksums", "no checksums"),
    ],
)
def test_a_torn_checkpoint_is_passed_over(damaged, damage):
    damage(damaged / "checkpoint-3")
    assert find_checkpoint_fault(damaged / "checkpoint-3")
    assert last_checkpoint(damaged) == damaged / "checkpoint-2"


def test_the_end_is_the_same_after_a_torn_checkpoint(finished, damaged, monkeypatch):
    truncate(damaged / "checkpoint-3" / "trained.safetensors")
    steps, told = [], []
    monkeypatch.setattr(checkpoints_module.logger, "warning", lambda text, *values: told.append(text % values))
    _, found = train(damaged, resume=True, on_step=lambda report: steps.append(report.step))
    assert min(steps) == 3
    assert same(found, finished[1])
    assert not find_checkpoint_fault(damaged / "checkpoint-3")
    assert told == [
        f"{damaged / 'checkpoint-3'} is passed over: trained.safetensors is not what was written",
        f"resuming at step 2, from {damaged / 'checkpoint-2'}",
    ]


def test_a_run_with_damaged_checkpoints_alone_is_not_begun_anew_unasked(finished, damaged, monkeypatch):
    told = []
    monkeypatch.setattr(checkpoints_module.logger, "warning", lambda text, *values: told.append(text % values))
    for number in (2, 3):
        truncate(damaged / f"checkpoint-{number}" / "trained.safetensors")
    before = (damaged / "metrics.jsonl").read_bytes()
    with pytest.raises(
        TrainingError, match=r"checkpoint-3 is damaged \(trained.safetensors is not .*no checkpoint is whole"
    ):
        train(damaged, resume=True)
    assert (damaged / "checkpoint-3").is_dir()
    assert (damaged / "metrics.jsonl").read_bytes() == before
    assert told == []
    for number in (2, 3):  # a kill while they were written leaves them without checksums, and nothing is lost
        (damaged / f"checkpoint-{number}" / "checksums.json").unlink()
    assert same(train(damaged, resume=True)[1], finished[1])
    assert told[-1] == "resuming at step 0: no checkpoint had been written"
    assert f"{damaged / 'checkpoint-2'} is passed over: it was not written to its end" in told


def test_a_second_training_may_begin_anew(finished, damaged):
    """It removes what the first one wrote, finished or not, and nothing else."""
    (damaged / "mine.txt").write_text("mine")
    (damaged / "checkpoint-7").mkdir()
    with pytest.raises(ConfigError, match="leave one of them out"):
        train(damaged, resume=True, overwrite=True)
    result, found = train(damaged, replace(SETTINGS, max_steps=2), overwrite=True)
    assert result.steps == 2
    assert same(found, train(None, replace(SETTINGS, max_steps=2))[1])
    assert sorted(path.name for path in damaged.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    logged = [json.loads(line)["step"] for line in (damaged / "metrics.jsonl").read_text().splitlines()]
    assert logged == [1, 2, 2]
    assert (damaged / "mine.txt").read_text() == "mine"


def test_a_run_goes_on_after_a_write_that_failed_for_want_of_space(finished, tmp_path, monkeypatch):
    kept, save, folder = [], torch.save, tmp_path / "run"

    def failing(value, path, *args, **kwargs):
        if "checkpoint-3" in str(path) and "optimizer" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        save(value, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(OSError, match="No space left"):
        train(folder)
    monkeypatch.undo()
    _, found = train(folder, resume=True, on_step=kept.append)
    assert min(report.step for report in kept) == 3
    assert same(found, finished[1])


@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"save_steps": 2}, marks=MORE)],
    ids=["without a checkpoint", "with a checkpoint"],
)
def test_a_finished_run_is_never_begun_over(tmp_path, changes):
    settings, folder = replace(SETTINGS, **{"save_steps": 0, "objective": "ce", **changes}), tmp_path / "run"

    def contents():
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    _, expected = train(folder, settings)
    before = contents()
    with pytest.raises(TrainingError, match=r"holds the log of a finished run, which is not overwritten.*--resume"):
        train(folder, settings)
    assert contents() == before
    assert same(train(folder, settings, resume=True)[1], expected)


@pytest.mark.parametrize(
    "max_steps", [pytest.param(3, marks=MORE), 5], ids=["at the end of an epoch", "within an epoch"]
)
def test_a_finished_run_that_is_resumed_gives_its_result_and_takes_no_step(tmp_path, max_steps):
    settings = replace(SETTINGS, max_steps=max_steps, save_steps=2, lr_scheduler_type="constant")
    folder, steps = tmp_path / "run", []
    complete, expected = train(folder, settings)
    log = (folder / "metrics.jsonl").read_text()
    assert "train_runtime" in log.splitlines()[-1]
    for _ in range(2):
        resumed, found = train(folder, settings, resume=True, on_step=steps.append)
        assert resumed.steps == complete.steps == max_steps
        assert same(found, expected)
        assert resumed.history == [record for record in complete.history if "train_runtime" not in record]
    assert steps == []
    assert (folder / "metrics.jsonl").read_text() == log


def test_half_a_checkpoint_does_not_push_a_newer_whole_one_out(tmp_path):
    """Killed while checkpoint-6 was written, resumed from 3, stopped by Ctrl-C at 5, with one checkpoint to keep."""
    settings = replace(SETTINGS, save_steps=3, save_total_limit=1, max_steps=6)
    folder, handler = tmp_path / "run", signal.getsignal(signal.SIGINT)

    def interrupt(report):
        if report.step == 4 and not report.values:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(RuntimeError, match="killed"):
        train(folder, settings, on_step=killed_at(5))
    shutil.copytree(folder / "checkpoint-3", folder / "checkpoint-6")
    (folder / "checkpoint-6" / "trainer_state.json").unlink()
    os.utime(folder / "checkpoint-6", (2**31, 2**31))  # the trainer goes by times, which some file systems make up
    with pytest.raises(TrainingError, match=r"stopped by Ctrl-C at step 5 of 6; .*--resume"):
        train(folder, settings, resume=True, on_step=interrupt)
    assert signal.getsignal(signal.SIGINT) is handler
    assert last_checkpoint(folder) == folder / "checkpoint-5"
    assert same(train(folder, settings, resume=True)[1], train(None, settings)[1])


@pytest.mark.slow("kills")
def test_kills_lose_no_finished_checkpoint_and_change_no_bit(tmp_path):
    result = tmp_path / "crash.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", "5", "--seed", "7", "--out", str(result)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(result.read_text())
    assert record["sft"]["kills"] + record["calibrate"]["kills"] == 5
    for stage in ("sft", "calibrate"):
        assert record[stage]["ends"] >= 1
        assert (record[stage]["lost"], record[stage]["differing"], record[stage]["failed"]) == (0, 0, [])
