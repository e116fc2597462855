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
