"""Starting a command on several processes, and what it refuses before it loads anything."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from loragate.errors import ConfigError
from loragate.models import Loading
from loragate.training import FineTuningSettings, GateTrainingSettings, preflight
from loragate.training.settings import LaunchSettings


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LORAGATE_STRATEGY", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    # `relaunch_if_requested` may set this one; monkeypatch then takes it away again
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")


@pytest.fixture
def started(monkeypatch):
    calls = []

    def popen(command, env):
        calls.append((command, env))
        return SimpleNamespace(wait=lambda: 7)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(sys, "argv", ["loragate", "calibrate", "--strategy", "fsdp2"])
    return calls


def begin(quantization="none", **asked):
    settings = GateTrainingSettings(batch_size=8, per_device_train_batch_size=2)
    return preflight.relaunch_if_requested(
        settings, LaunchSettings(**asked), Loading(device="cpu", quantization=quantization)
    )


@pytest.mark.parametrize("strategy", ["", "ddp", "fsdp2"])
def test_the_command_is_started_again_on_several_processes(started, strategy):
    assert begin() is None
    assert started == [], "one process goes on"
    assert begin(**({"strategy": strategy} if strategy else {}), processes=2) == 7
    ((command, environment),) = started
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert "--nproc-per-node=2" in command
    assert command[-4:] == ["loragate", "calibrate", "--strategy", "fsdp2"]
    assert environment["LORAGATE_STRATEGY"] == (strategy or "ddp"), "processes alone mean ddp"
    assert environment["ACCELERATE_USE_CPU"] == "true"


def test_under_a_launcher_nothing_is_started(started, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert begin(strategy="ddp", processes=2) is None
    monkeypatch.setenv("LORAGATE_STRATEGY", "ddp")  # so that monkeypatch takes away what `relaunch_if_requested` writes
    monkeypatch.delenv("LORAGATE_STRATEGY")
    assert begin(strategy="fsdp2") is None
    assert preflight.detect_launch().strategy == "fsdp2"
    assert started == []


@pytest.mark.parametrize(
    ("given", "environment", "words"),
    [
        ({"strategy": "fsdp2", "processes": 2, "quantization": "4bit"}, {}, "cannot be sharded"),
        ({"strategy": "ddp", "processes": 3}, {}, "multiple of per_device_train_batch_size"),
        (
            {"strategy": "ddp"},
            {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "LORAGATE_STRATEGY": "fsdp2"},
            "leave --strategy out",
        ),
        ({"processes": 4}, {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "the launcher started 2"),
    ],
)
def test_what_does_not_fit_is_refused(monkeypatch, given, environment, words):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        begin(**given)


def test_what_is_trained_is_known_before_a_model_is_loaded():
    settings, asked = FineTuningSettings(objective="eksft", dora=True), LaunchSettings(strategy="fsdp2", processes=2)
    with pytest.raises(ConfigError, match=r"(?s)KL to a reference.*DoRA"):
        preflight.relaunch_if_requested(settings, asked, Loading(device="cpu"))


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="this machine has several GPUs to take")
def test_a_strategy_needs_a_number_of_processes_where_there_are_no_gpus():
    with pytest.raises(ConfigError, match="--processes"):
        begin(strategy="ddp")


CHILD = """
import signal, sys, time
def end(number, frame):
    time.sleep(1.5)
    open(sys.argv[1], "w").write(signal.Signals(number).name)
    sys.exit(3)
signal.signal(signal.SIGINT, end)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(30)
"""
PARENT = """
import subprocess, sys
from loragate.training.preflight import wait_for_child
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
try:
    sys.exit(wait_for_child(child))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of a process group")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGINT twice, here alone"])
def test_a_run_that_is_stopped_is_waited_for_until_it_has_written_its_checkpoint(tmp_path, name):
    written = tmp_path / "checkpoint"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, str(written)],
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert parent.stdout.readline() == b"ready\n"
        if name == "SIGINT":
            os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
        elif name == "SIGTERM":
            parent.terminate()  # as `kill` does: the child is not told
        else:
            parent.send_signal(signal.SIGINT)
            time.sleep(0.5)
            parent.send_signal(signal.SIGINT)
        assert parent.wait(timeout=20) == 130
        assert written.read_text() == ("SIGINT" if name == "SIGINT" else "SIGTERM")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.stdout.close()
