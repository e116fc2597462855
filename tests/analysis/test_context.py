"""What diagnoses read of a stored evaluation, apart from the looks themselves (tests/cli/test_diagnose.py)."""

from types import SimpleNamespace

import pytest

from loragate.analysis import context as room
from loragate.analysis.context import DiagnosticContext
from loragate.analysis.settings import DiagnoseSettings
from loragate.errors import ConfigError
from loragate.evaluation.prepared import Request
from loragate.evaluation.settings import TaskSettings


def test_a_run_of_the_harness_alone_has_no_answers(tmp_path, monkeypatch):
    """Tasks of lm-evaluation-harness have prompts and answers of another form."""
    asked = SimpleNamespace(task=SimpleNamespace(name="retention", harness="mmlu"))
    monkeypatch.setattr(room, "open_evaluation", lambda *_: SimpleNamespace(models={}, tasks=[asked]))
    monkeypatch.setattr(DiagnosticContext, "loaded", SimpleNamespace(sources={}))
    with pytest.raises(ConfigError, match="no answers to read"):
        DiagnosticContext(Request("gated", tmp_path, TaskSettings())).answers(
            "gated", DiagnoseSettings(run=str(tmp_path))
        )


def test_answers_of_another_adapter_or_base_are_named(tmp_path, monkeypatch):
    asked = SimpleNamespace(task=SimpleNamespace(name="retention", harness="mmlu"))
    run = SimpleNamespace(models={"base": "b", "adapter": "other", "gated": "g1"}, tasks=[asked])
    monkeypatch.setattr(room, "open_evaluation", lambda *_: run)
    monkeypatch.setattr(
        DiagnosticContext, "loaded", SimpleNamespace(sources={"base": "b", "adapter": "a", "gated": "g2"})
    )
    said = []
    monkeypatch.setattr(DiagnosticContext, "say", lambda self, line: said.append(line.split("given with the ")[1]))

    def notes(of):
        said.clear()
        with pytest.raises(ConfigError, match="no answers to read"):
            DiagnosticContext(Request("gated", tmp_path, TaskSettings())).answers(
                of, DiagnoseSettings(run=str(tmp_path))
            )
        return list(said)

    assert notes("gated") == ["adapter other; here it is a", "gates g1; here it is g2"]
    assert notes("adapter") == ["adapter other; here it is a"]
    assert notes("base") == []
