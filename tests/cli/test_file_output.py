"""Tables and progress lines that go into a file: as wide as their text needs, never broken in the middle."""

import io
import time
from types import SimpleNamespace

import pytest

from loragate.display import FILE_WIDTH, PLAIN_SECONDS, Display, console, printable


@pytest.mark.parametrize(("columns", "width"), [(None, FILE_WIDTH), ("200", 200)])
def test_a_file_has_room_for_a_table(monkeypatch, columns, width):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert console().width == width


def test_a_progress_line_stays_one_line():
    from rich.console import Console

    file = io.StringIO()
    display = Display(out=Console(file=file, width=40))
    with display.job("sampling and grading", 4800) as job:
        job.printed -= PLAIN_SECONDS
        job.began = time.monotonic() - 5
        job.advance_to(448, note="sampling adapter negative on a task, 448 of 960")
    first, last = file.getvalue().splitlines()
    assert first.startswith(
        "sampling and grading: 448 of 4,800 · sampling adapter negative on a task, 448 of 960 · about "
    )
    assert last.startswith("sampling and grading: ")


EVIL = "\x1b]0;title\x07\x1b[2Jtext\x9b31m\rover"


def test_what_models_and_files_say_does_not_act_on_a_terminal(monkeypatch):
    assert printable(EVIL) == r"\x1b]0;title\x07\x1b[2Jtext\x9b31m\x0dover"
    assert printable("a\tb\r\nc\n") == "a\tb\r\nc\n"
    file = io.StringIO()
    monkeypatch.setattr("sys.stdout", file)
    console().print(EVIL, markup=False)
    assert not set("\x1b\x07\x9b\r") & set(file.getvalue())
    assert "text" in file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_answers_reach_a_file_as_they_are_and_a_terminal_in_peace(monkeypatch, terminal):
    import sys

    from loragate.cli import generate
    from loragate.generation import Sample, TransformersEngine
    from tiny import tiny_base, tiny_tokenizer

    class Screen(io.StringIO):
        def isatty(self):
            return terminal

    loaded = SimpleNamespace(model=tiny_base(), tokenizer=tiny_tokenizer(), kind="base")
    monkeypatch.setattr("loragate.models.resolve", lambda *_, **__: None)
    monkeypatch.setattr("loragate.models.open_model", lambda *_: loaded)
    monkeypatch.setattr(TransformersEngine, "generate", lambda *_: [Sample(0, 0, EVIL, (1,), "stop", None)])
    monkeypatch.setattr(sys, "stdout", Screen())
    assert generate.run(generate.GenerateOptions(model="x", prompt="w1", raw=True)) == 0
    assert ("\x1b" in sys.stdout.getvalue()) is not terminal
