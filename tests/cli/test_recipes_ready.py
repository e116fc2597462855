"""What a recipe's run refuses before its first stage."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from loragate.cli import recipes_ready
from loragate.cli.evaluate import EvalOptions
from loragate.cli.recipes_ready import require_earlier, require_parts
from loragate.errors import ConfigError
from loragate.recipes.recipe import Recipe, Stage

STAGES = Recipe(
    "mine",
    "",
    (
        Stage("sft", "sft", {"model": "a/b"}),
        Stage("calibrate", "calibrate", {"adapter": "{sft}"}),
        Stage("eval", "eval", {"model": "{last}", "engine": "vllm", "suite": "math"}),
    ),
)


class Folder:
    def __init__(self, path, *finished):
        self.path, self.finished = Path(path), finished

    def is_finished(self, stage):
        return stage.name in self.finished


def test_a_stage_whose_material_is_missing_is_refused():
    stages = STAGES.placed("runs/x")
    require_earlier(stages, [], Folder("runs/x"))
    require_earlier(stages, ["sft", "calibrate"], Folder("runs/x"))
    require_earlier(stages, ["calibrate"], Folder("runs/x", "sft"))
    with pytest.raises(ConfigError, match="'calibrate' reads what 'sft' leaves in runs/x/sft") as caught:
        require_earlier(stages, ["calibrate"], Folder("runs/x"))
    assert "--stages sft,calibrate or leave" in str(caught.value)
    with pytest.raises(ConfigError, match="'eval' reads what 'calibrate' leaves"):
        require_earlier(stages, ["eval"], Folder("runs/x", "sft"))


def options_of(stage):
    return EvalOptions(**stage.values)


def test_an_engine_that_is_not_there_is_missed_before_training(monkeypatch):
    monkeypatch.setattr("loragate.generation.vllm_engine.importlib.util.find_spec", lambda name: None)
    stages = STAGES.placed("runs/x")
    with pytest.raises(ConfigError, match="stage 'eval' could not run here: vLLM is not installed") as caught:
        require_parts(stages, options_of)
    assert "--set eval.engine=transformers" in str(caught.value)
    assert "--stages sft,calibrate" in str(caught.value)
    require_parts(stages[:2], options_of)


def test_the_harness_is_missed_before_training(monkeypatch):
    monkeypatch.setattr(recipes_ready.importlib.util, "find_spec", lambda name: None)
    stage = SimpleNamespace(name="retention", command="eval", values={"model": "x", "suite": "retention"})
    with pytest.raises(ConfigError, match="stage 'retention' could not run here: retention suites need"):
        require_parts([stage], options_of)
    require_parts([SimpleNamespace(name="e", command="eval", values={"model": "x", "suite": "tiny"})], options_of)


@pytest.mark.parametrize(("suite", "task"), [("math", "aime24"), ("retention", "[a-z_]+")])
def test_questions_that_cannot_be_had_are_missed_before_training(monkeypatch, suite, task):
    found = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: name))
    monkeypatch.setattr(recipes_ready, "importlib", found)
    monkeypatch.setattr("loragate.evaluation.judging.require_graders", lambda *given: None)
    stages = STAGES.placed("runs/x")
    values = {"model": "x", "suite": suite}
    with pytest.raises(ConfigError, match=f"stage 'late' could not run here: {task}: .*--data {task}=FILE") as caught:
        require_parts([*stages[:2], SimpleNamespace(name="late", command="eval", values=values)], options_of)
    assert "--stages sft,calibrate" in str(caught.value)
