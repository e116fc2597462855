"""Exit statuses are of one kind over all commands: 0 done, 1 a check failed, 2 wrong call or bad input, 130 Ctrl-C or SIGTERM."""

import dataclasses
import os
import signal
import subprocess
import sys

import pytest

from loragate import errors
from loragate.cli import main as entry
from loragate.cli.main import COMMANDS, main
from loragate.signals import sigterm_as_ctrl_c

# what of a command's own is nowhere to be found or no such thing
BAD_INPUT = {
    "quickstart": ("--ranges=1,0",),
    "doctor": ("absent",),
    "sft": ("--model", "absent", "--data", "absent.jsonl", "--out", "out"),
    "calibrate": ("--adapter", "absent", "--data", "d.jsonl", "--dev-data", "absent.jsonl", "--out", "out"),
    "sweep": ("--adapter", "absent", "--data", "absent.jsonl", "--out", "out"),
    "eval": ("--model", "absent", "--tasks", "absent.yaml", "--out", "out"),
    "regrade": ("absent", "--grader", "math_verify"),
    "generate": ("--model", "absent", "--prompt", "w1"),
    "diagnose": ("gates", "--model", "absent", "--run", "absent", "--out", "out"),
    "report": ("absent",),
    "explore": ("absent",),
    "serve": ("absent",),
    "verify": ("absent", "--endpoint", "http://127.0.0.1:9/v1"),
    "export": ("absent", "--out", "out"),
    "push": ("absent", "owner/name"),
    "recipes": ("show", "no/such/recipe"),
    "mask": ("--model", "absent", "--reference", "absent", "--data", "absent.jsonl", "--out", "out.jsonl"),
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_call_ends_with_two(name, fails):
    assert "no-such-flag" in fails(name, "--no-such-flag=1")


@pytest.mark.parametrize("name", BAD_INPUT)
def test_what_is_not_there_ends_with_two_and_leaves_nothing(name, fails, tmp_path):
    said = fails(name, *BAD_INPUT[name])
    assert "fault of loragate" not in said
    assert not list(tmp_path.iterdir())


def test_every_command_has_a_bad_input_but_the_one_that_reads_none():
    assert set(COMMANDS) - set(BAD_INPUT) == {"env"}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (errors.ConfigError("x"), 2),
        (errors.DataError("x"), 2),
        (errors.GateError("x"), 2),
        (errors.ArtifactError("x"), 2),
        (FileNotFoundError(2, "No such file or directory", "a.jsonl"), 2),
        (PermissionError(13, "Permission denied", "out"), 2),
        (errors.SetupError("x"), 2),
        (errors.TrainingError("x"), 1),
        (errors.StoppedError("x"), 130),
        (errors.DivergenceError("x"), 1),
        (errors.LoragateError("x"), 1),
        (OSError(28, "No space left on device", "out"), 1),
        (ConnectionError("x"), 1),
        (KeyError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_what_a_command_raises_decides_its_status(name, raised, status, monkeypatch):
    def run(options):
        raise raised

    monkeypatch.setattr(entry, "load_command", lambda name: dataclasses.replace(command_of(name), run=run))
    assert main([name, *BAD_INPUT.get(name, ())]) == status


@pytest.mark.skipif(os.name != "posix", reason="SIGTERM")
def test_sigterm_stops_a_command_as_ctrl_c_does():
    """Batch systems send it first; in a process of its own, as it ends one that has no handler."""
    code = (
        "import dataclasses, os, signal, sys, time; from loragate.cli import main as entry; command = entry.load_command\n"
        "def run(options):\n"
        "    os.fork() or os.kill(os.getpid(), signal.SIGTERM) or time.sleep(9)\n"  # a helper: it ends without a word
        "    os.wait(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)\n"
        "entry.load_command = lambda name: dataclasses.replace(command(name), run=run)\n"
        "status = entry.main(['quickstart'])\n"
        "sys.exit(status if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else 'not given back')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("stopped by SIGTERM; nothing half-written was left")) == (130, 1)


@pytest.mark.parametrize(("returned", "status"), [(0, 0), (1, 1), (2, 2), (130, 130), (-9, 1), (77, 1), (143, 1)])
def test_the_status_of_a_launcher_is_one_of_ours(returned, status, monkeypatch):
    monkeypatch.setattr(
        entry, "load_command", lambda name: dataclasses.replace(command_of(name), run=lambda options: returned)
    )
    assert main(["env"]) == status


command_of = entry.load_command


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("error: no such file", "no such file"),
        ("Error: loragate: error: no such file", "no such file"),
        ("/a/b.json: /a/b.json cannot be read", "/a/b.json cannot be read"),
        ("/a/b.jsonl: /a/b.jsonl:3: no answer", "/a/b.jsonl:3: no answer"),
        ("set /a/b.jsonl: /a/b.jsonl, line 3: no answer", "set /a/b.jsonl, line 3: no answer"),
        ("a.yaml: key: value", "a.yaml: key: value"),
        ("dev: device: cuda", "dev: device: cuda"),
    ],
)
def test_an_error_names_nothing_twice(message, said, monkeypatch, capsys):
    def run(options):
        raise errors.DataError(message)

    monkeypatch.setattr(entry, "load_command", lambda name: dataclasses.replace(command_of(name), run=run))
    assert main(["env"]) == 2
    assert capsys.readouterr().err == f"loragate: error: {said}\n"


def test_warnings_that_an_adapter_is_not_whole_are_never_hidden():
    """Everything else that libraries warn of is nothing that a reader could act on."""
    code = (
        "import logging, warnings; import loragate; from loragate.display import configure_logging; configure_logging()\n"
        "def say(text): warnings.warn_explicit(text, UserWarning, 'peft_model.py', 1, module='peft.peft_model')\n"
        "say('Found missing adapter keys while loading the checkpoint: [1]')\n"
        "say('OLoRA changes the base weights of the model')\n"
        "say('Something of no use')\n"
        "logging.getLogger('bitsandbytes.backends.cpu.ops').warning('Failed to load CPU gemm_4bit_forward from x')\n"
        "logging.getLogger('bitsandbytes.backends.cpu.ops').warning('something else')\n"
        "for kind in ('bfloat16', 'bfloat16', 'float32'):\n"
        "    logging.getLogger('bitsandbytes.autograd._functions').warning('inputs will be cast from %s', kind)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert "missing adapter keys" in said
    assert "changes the base weights" in said
    assert "something else" in said
    assert "of no use" not in said
    assert "gemm_4bit" not in said
    assert [said.count(f"cast from {kind}") for kind in ("bfloat16", "float32")] == [1, 1], "of 8-bit layers, once"


@pytest.mark.parametrize("rank", [None, "1"])
def test_sigterm_is_as_ctrl_c_but_in_a_launchers_rank(monkeypatch, rank):
    """A launcher ends the ranks that are left where one has failed: none of them is to say what to do next."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    before = signal.getsignal(signal.SIGTERM)
    assert before is signal.SIG_DFL
    with sigterm_as_ctrl_c():
        assert (signal.getsignal(signal.SIGTERM) is before) == (rank is not None)
    assert signal.getsignal(signal.SIGTERM) is before
