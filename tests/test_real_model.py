"""`make real`: its commands are those of docs/five-minutes.md, their options exist, and a second run goes on where one stopped."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from loragate.cli.main import main
from tiny import load_script

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def script(monkeypatch):
    module = load_script(ROOT / "scripts" / "real_model.py")
    monkeypatch.setattr(module, "fetch", lambda out: None)
    return module


def commands_run(script, monkeypatch, out, *arguments, fails_at=None):
    """The commands that the script runs; the one that is called `fails_at` ends with status 130."""
    ran = []

    def run(words, check):
        ran.append(words[2:])
        return SimpleNamespace(returncode=130 if words[3] == fails_at else 0)

    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr("sys.argv", ["real_model.py", "--out", str(out), *arguments])
    status = script.main()
    assert status == (0 if fails_at is None else 130)
    return ran


def test_the_page_shows_what_is_run(script):
    page = (ROOT / "docs" / "five-minutes.md").read_text(encoding="utf-8")
    shown = [shlex.split(block) for block in re.findall(r"<!-- real -->\n```sh\n(.*?)\n```", page, re.S)]
    assert shown == [shlex.split(command) for command, _ in script.steps("runs/real", "bf16").values()]
    assert script.GGUF in page
    assert script.PACKAGE in page


def test_every_option_exists(script, capsys):
    for name, (command, _) in script.steps("runs/real", "fp32").items():
        words = [*shlex.split(command), *shlex.split(script.SMOKE[name])][1:]
        if words[0] != "report":  # which has no configuration
            assert main([*words, "--print-config"]) == 0, capsys.readouterr().err
            assert capsys.readouterr().out


def test_a_second_run_goes_on(script, monkeypatch, tmp_path, capsys):
    first = commands_run(script, monkeypatch, tmp_path, fails_at="calibrate")
    assert [words[1] for words in first] == ["sft", "calibrate"]
    for file in ("adapter/adapter_model.safetensors", "adapter/run/run.json", "gated/run/run.json"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    second = commands_run(script, monkeypatch, tmp_path, "--smoke")
    assert [(words[1], "--resume" in words) for words in second] == [
        ("calibrate", True),
        ("eval", False),
        ("report", False),
    ]
    assert second[1][-6:] == ["--limit", "4", "--samples", "1", "--max-new-tokens", "8"]
    assert "adapter is there already" in capsys.readouterr().out
