"""What diagnoses read of a stored evaluation, apart from the looks themselves (tests/cli/test_diagnose.py)."""

from types import SimpleNamespace

import pytest

from loragate.analysis import context as room
from loragate.analysis.context import Answers, DiagnosticContext
from loragate.analysis.settings import DiagnoseSettings
from loragate.errors import ConfigError, DataError
from loragate.evaluation.prepared import Request
from loragate.evaluation.settings import TaskSettings
from loragate.evaluation.variants import ModelVariant
from loragate.generation import Sample
from tiny import tiny_tokenizer


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
    del run.models["gated"]
    assert notes("gated") == ["adapter other; here it is a"], "a run without gates has none of another name"
    run.models["gated"] = "g1"
    assert notes("gated") == ["adapter other; here it is a", "gates g1; here it is g2"]
    assert notes("adapter") == ["adapter other; here it is a"]
    assert notes("base") == []


def test_answers_are_cut_and_left_out_as_rows_are_and_it_is_said(tmp_path, monkeypatch):
    """max_length is of prompt and answer together; an answer without a token, or behind too long a prompt, is counted."""
    said = []
    monkeypatch.setattr(DiagnosticContext, "loaded", SimpleNamespace(tokenizer=tiny_tokenizer()))
    monkeypatch.setattr(DiagnosticContext, "say", lambda self, line: said.append(line))
    task = SimpleNamespace(task=SimpleNamespace(name="words"), prompts=["w1 w2", "w1 w2 w3 w4 w5"])
    drawn = [(0, (9, 10, 11, 1)), (0, ()), (0, (9, 1)), (1, (12, 1))]
    answers = Answers(task, [(Sample(question, 0, "", ids, "stop", None), None) for question, ids in drawn])
    context = DiagnosticContext(Request("gated", tmp_path, TaskSettings()))
    rows = context.answer_rows(answers, 5)
    assert [row["row"] for row in rows] == [0, 2]
    assert rows[0]["input_ids"] == [6, 7, 9, 10, 11]
    assert [row["labels"] for row in rows] == [[-100, -100, 9, 10, 11], [-100, -100, 9, 1]]
    assert said == [
        "note: words: of 4 answers 1 left out without a response; 1 left out, as max_length cuts the whole response; "
        "1 cut by max_length"
    ]
    said.clear()
    assert len(context.answer_rows(answers)) == 3
    assert said == ["note: words: of 4 answers 1 left out without a response"]
    nothing = context.answer_rows(Answers(task, answers.graded[1:2]))
    assert nothing == []
    with pytest.raises(DataError, match="answers of the run: no answer has a token to read"):
        context.require_rows(nothing, "answers of the run")


def test_a_run_without_the_variant_names_those_that_it_holds_and_nothing_twice(tmp_path, monkeypatch):
    """Answers of the plain adapter, evaluated before it had gates."""
    task = SimpleNamespace(task=SimpleNamespace(name="words", harness=None))
    variants = [ModelVariant("base"), ModelVariant("adapter"), ModelVariant("adapter", "greedy")]
    run = SimpleNamespace(models={"base": "other", "adapter": "a"}, tasks=[task], variants=variants)
    monkeypatch.setattr(room, "open_evaluation", lambda *_: run)
    monkeypatch.setattr(room, "stored_answers", lambda *_, **__: SimpleNamespace(prepared=task))
    named = {"base": "b", "adapter": "a", "gated": "g"}
    monkeypatch.setattr(DiagnosticContext, "loaded", SimpleNamespace(sources=named, names=named))
    said = []
    monkeypatch.setattr(DiagnosticContext, "say", lambda self, line: said.append(line))
    context, settings = DiagnosticContext(Request("g", tmp_path, TaskSettings())), DiagnoseSettings(run="run")
    context.answers("base", settings)
    context.answers("adapter", settings)
    with pytest.raises(
        ConfigError, match=r"run holds answers of base, adapter, adapter greedy, and none of gated; .*--model g`"
    ):
        context.answers("gated", settings)
    assert said == ["note: the answers in run were given with the base other; here it is b"]
