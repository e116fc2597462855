"""A recipe over training seeds: what each run is given, and mean and deviation as the paper's Table 7 has them."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from loragate.cli.main import main
from loragate.errors import ConfigError
from loragate.evaluation.answers import Grade
from loragate.evaluation.results import EvaluationRecord, SuiteResult, TaskInfo, task_result, write_record
from loragate.evaluation.statistics import suite_average
from loragate.files import read_json
from loragate.generation import Sample, SamplingConfig
from loragate.recipes import read_recipe, read_seeds, run, with_seed
from loragate.recipes.seeds import _scores as scores_of

SCALE = "math/qwen2.5-math-1.5b/scale"


def test_only_trainings_change():
    stages = {one.name: one.options for one in with_seed(read_recipe(SCALE), 7).stages}
    before = {one.name: one.options for one in read_recipe(SCALE).stages}
    assert (stages["sft"]["seed"], stages["calibrate"]["seed"]) == (7, 7)
    assert (stages["eval"], stages["retention"]) == (before["eval"], before["retention"])
    assert with_seed(read_recipe("math/qwen2.5-math-1.5b/grid"), 7).stages[1].options["seeds"] == "7"
    with pytest.raises(ConfigError, match=r"--seeds has no effect on math/qwen2\.5-math-1\.5b/base"):
        with_seed(read_recipe("math/qwen2.5-math-1.5b/base"), 7)


@pytest.mark.parametrize("text", ["42", "42,42", "42,x", "1,,2", "42,²"])
def test_seeds_that_are_none(text):
    with pytest.raises(ConfigError, match="two or more different whole numbers"):
        read_seeds(text)


def record_of(right):
    """The gates answered so many of ten questions rightly."""
    samples = [Sample(question, 0, "", (1, 2), "stop", None) for question in range(10)]
    grades = [Grade(question < right, "4", "ok" if question < right else "wrong") for question in range(10)]
    info = TaskInfo("sums", "1", "f", "a", "sums.jsonl", None, "default", "1", SamplingConfig())
    result = task_result("sums", "gated", list(map(str, range(10))), samples, grades)
    return EvaluationRecord("2025-01-31T12:00:00+00:00", {"base": "tiny"}, (info,), (result,), 0, None, {}, 1.0, {})


def test_every_suite_has_its_mean():
    scores = {"math": [1.0, 0.8], "code": [0.1, 0.3]}
    means = tuple(
        SuiteResult("gated", suite_average([np.array([[value]] * 10) for value in values]), suite)
        for suite, values in scores.items()
    )
    found = scores_of(replace(record_of(4), suites=means))
    assert found["gated", "sums"] == pytest.approx(0.4)
    assert (found["gated", "mean of math"], found["gated", "mean of code"]) == pytest.approx((0.9, 0.2))


def test_one_command_runs_all_seeds_and_shows_mean_and_deviation(tmp_path, monkeypatch, capsys):
    """Stand-ins for the stages: an evaluation whose score is 10, 20 and 60 % by seed."""
    right = {42: 1, 3407: 2, 2025: 6}

    def start(command, title, offline):
        config = command[command.index("--config") + 1]
        options = run.read_mapping(run.Path(config))
        out = run.Path(options["out"])
        out.mkdir(parents=True)
        if out.name == "eval":
            write_record(record_of(right[int(out.parent.name.removeprefix("seed-"))]), out / "results.json")

    monkeypatch.setattr(run, "run_command", start)
    out = tmp_path / "seeds"
    words = ["recipes", "run", SCALE, "--tiny", "--seeds", "42,3407,2025", "--out", str(out)]
    assert main(words) == 0
    assert run.read_mapping(out / "seed-3407" / "config" / "1-sft.yaml")["seed"] == 3407
    found = {(one["stage"], one["variant"], one["task"]): one for one in read_json(out / "seeds.json")["scores"]}
    one = found["eval", "gated", "sums"]
    assert one["scores"] == [0.1, 0.2, 0.6]
    assert (one["mean"], one["deviation"]) == (pytest.approx(0.3), pytest.approx(0.2646, abs=1e-4))
    assert "30.00 ± 26.46" in capsys.readouterr().out
    assert "over the seeds 42, 3407, 2025" in (out / "seeds.md").read_text()
    assert json.loads((out / "seed-42" / "stages.json").read_text()).keys() == {"sft", "calibrate", "eval", "retention"}
    assert main([*words, "--resume"]) == 0, "nothing runs again"
    for item in (out / "seed-2025").iterdir():
        if item.name != "tiny-base":
            shutil.rmtree(item) if item.is_dir() else item.unlink()
    assert main([*words, "--resume"]) == 0, "a seed that stopped before its record was written begins"
    assert (out / "seed-2025" / "recipe.json").is_file()
