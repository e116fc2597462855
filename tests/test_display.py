"""What a person reads while a job runs."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from loragate import display
from loragate.cli import generate
from loragate.display import FILE_WIDTH, Display, console, format_next_command, time_left
from loragate.generation import Sample, TransformersEngine
from loragate.printable import escape_for_terminal
from loragate.selection.selection_run import progress_callback
from tiny import tiny_base, tiny_tokenizer


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is told to go on."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(display, "time", clock)
    return clock


def test_a_log_counts_in_units(clock):
    out = io.StringIO()
    shown = Display(out=Console(file=out, width=40))  # a line stays whole
    with shown.job("training (sft)", unit="step") as job:
        for step in range(1, 121):
            clock.now += 3
            job(step, 1600, "nll 0.31")
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("training (sft): step 4 of 1,600 · nll 0.31")
    assert lines[-2] == "training (sft): step 120 of 1,600 · nll 0.31 · about 1 h 14 min left"
    assert lines[-1] == "training (sft): 6 min 00 s"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(4, "about 10 s left"), (80, "about 1 min 20 s left"), (95, "about 2 min left"), (4000, "about 1 h 07 min left")],
)
def test_an_estimate_is_no_finer_than_it_is(seconds, words):
    assert time_left(seconds) == words


def test_what_was_done_before_a_resume_gives_no_pace(clock, monkeypatch):
    monkeypatch.setattr(display, "time_left", lambda seconds: str(round(seconds)))
    with Display(out=Console(file=io.StringIO())).job("training", 100, "step") as job:
        job(40)
        assert job.remaining_text() == "", "the first news says how far it was"
        clock.now += 10
        job(50)
        assert job.remaining_text() == "50", "a tenth in 10 s"


def test_a_log_is_never_silent_for_long(monkeypatch):
    """A job that reports nothing, as the loading of a large model does."""
    out, spoken = io.StringIO(), threading.Event()
    monkeypatch.setattr(display, "HEARTBEAT_SECONDS", 0.06)
    shown = Display(out=Console(file=out, width=80))
    say = shown.out.print

    def heard(*words, **how):
        say(*words, **how)
        spoken.set()

    monkeypatch.setattr(shown.out, "print", heard)
    with shown.job("loading the model"):
        assert spoken.wait(60)
    assert out.getvalue().splitlines()[0].startswith("loading the model: running for ")


def test_between_two_jobs_the_command_speaks_and_within_one_the_job_alone(monkeypatch):
    """A download before the first job, say; and never both of them."""
    monkeypatch.setattr(display, "HEARTBEAT_SECONDS", 0.06)
    out = io.StringIO()
    screen = Console(file=out, width=80)
    with display.heartbeat("loragate calibrate", screen):
        wait_for(lambda: "loragate calibrate: running for" in out.getvalue())
        with Display(out=screen).job("loading the model"):
            out.truncate(0)
            wait_for(lambda: "loading the model: running for" in out.getvalue())
            assert "loragate calibrate" not in out.getvalue()
    assert not display._open_heartbeats


def test_a_heartbeat_names_the_part_that_has_no_count_of_its_own(monkeypatch):
    monkeypatch.setattr(display, "HEARTBEAT_SECONDS", 0.06)
    out = io.StringIO()
    with Display(out=Console(file=out, width=80)).job("calibrating"):
        with display.phase("measuring entropy on 64 examples"):
            wait_for(
                lambda: re.search(
                    "^calibrating: running for .+, measuring entropy on 64 examples$", out.getvalue(), re.M
                )
            )
        out.truncate(0)
        wait_for(lambda: "calibrating: running for" in out.getvalue())
        assert "measuring" not in out.getvalue().splitlines()[-1]


def test_what_is_printed_breaks_the_silence(monkeypatch):
    monkeypatch.setattr(display, "HEARTBEAT_SECONDS", 1.2)
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with display.heartbeat("loragate eval", Console(file=out, width=80)):
        for _ in range(20):
            time.sleep(0.1)
            console().print("a result")
    assert not out.getvalue()


def wait_for(happened):
    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_job_of_several_phases_has_one_scale(clock, monkeypatch):
    """Steps and answers of all, and the time that both will take, each at its own pace."""
    out = io.StringIO()
    with Display(out=Console(file=out, width=200)).job("calibrating") as job:
        told = progress_callback(job)
        told("training", "", 0, 150, "")
        told("evaluating", "", 0, 80, "")
        for done in range(10, 41, 10):
            clock.now += 11
            told("evaluating", "adapter", done, 80, "")
        assert job.remaining_text() == "", "nothing is known of the steps yet"
        for done in range(10, 151, 10):
            clock.now += 20
            told("training", "[0,1]", done, 150, "entropy 0.050")
    lines = out.getvalue().splitlines()
    assert lines[0] == "calibrating: step 0 of 150 · answer 10 of 80 · evaluating adapter"
    # 14 times 20 s for the steps, and 44 s for the answers
    assert "calibrating: step 10 of 150 · answer 40 of 80 · training [0,1] · entropy 0.050 · about 6 min left" in lines
    assert "calibrating: step 150 of 150 · answer 40 of 80 · training [0,1] · entropy 0.050 · about 50 s left" in lines
    assert job.share() == 0.75


@pytest.mark.parametrize(("columns", "width"), [(None, FILE_WIDTH), ("200", 200)])
def test_a_file_has_room_for_a_table(monkeypatch, columns, width):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert console().width == width


EVIL = "\x1b]0;title\x07\x1b[2Jtext\x9b31m\rover"


def test_what_models_and_files_say_does_not_act_on_a_terminal(monkeypatch):
    assert escape_for_terminal(EVIL) == r"\x1b]0;title\x07\x1b[2Jtext\x9b31m\x0dover"
    assert escape_for_terminal("a\tb\r\nc\n") == "a\tb\r\nc\n"
    file = io.StringIO()
    monkeypatch.setattr("sys.stdout", file)
    console().print(EVIL, markup=False)
    assert not set("\x1b\x07\x9b\r") & set(file.getvalue())
    assert "text" in file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_answers_reach_a_file_as_they_are_and_a_terminal_in_peace(monkeypatch, terminal):
    class Screen(io.StringIO):
        def isatty(self):
            return terminal

    loaded = SimpleNamespace(model=tiny_base(), tokenizer=tiny_tokenizer(), kind="base")
    monkeypatch.setattr("loragate.models.resolve", lambda *_, **__: SimpleNamespace(sampling={}, override=None))
    monkeypatch.setattr("loragate.models.open_model", lambda *_: loaded)
    drawn = [Sample(0, 0, EVIL, (1,), "stop", None)]
    monkeypatch.setattr(TransformersEngine, "draw", lambda *_: (batch for batch in [drawn]))
    monkeypatch.setattr(sys, "stdout", Screen())
    assert generate.run(generate.GenerateOptions(model="x", prompt="w1", raw=True)) == 0
    assert ("\x1b" in sys.stdout.getvalue()) is not terminal


def test_what_was_chosen_for_a_task_is_evaluated_on_it():
    assert format_next_command("gated", "runs/g").startswith(
        "next: loragate eval --model gated --suite math --out runs/g, with"
    )
    assert "--tasks tiny --system keep --out" in format_next_command("gated", "runs/g", "tiny", "keep")
    assert format_next_command("gated", "runs/g", "my task.yaml") == (
        "next: loragate eval --model gated --tasks 'my task.yaml' --out runs/g"
    )
