"""A recipe's run: what is missing is said first, its folder goes on with the same recipe and is refused to another."""

import dataclasses
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from loragate.errors import ConfigError, LoragateError
from loragate.recipes import Recipe, Stage
from loragate.recipes.run import Run, RunFolder, interpreter, run_recipe


@pytest.fixture
def recipe():
    sft = Stage("sft", "sft", {"rank": 4, "data": "rows.jsonl"})
    return Recipe("own", "Own", (sft, Stage("eval", "eval", {"model": "{sft}"})))


def test_another_recipe_is_refused_with_the_difference(tmp_path, recipe):
    RunFolder.begin(tmp_path / "run", recipe)
    RunFolder.begin(tmp_path / "run", recipe)
    other = dataclasses.replace(
        recipe, stages=(Stage("sft", "sft", {"rank": 8, "data": "rows.jsonl"}), recipe.stages[1])
    )
    with pytest.raises(ConfigError, match=r"begun with sft\.rank = 4, now it is 8"):
        RunFolder.begin(tmp_path / "run", other)
    with pytest.raises(ConfigError, match=r"begun with eval = .*, now it is none"):
        RunFolder.begin(tmp_path / "run", dataclasses.replace(recipe, stages=recipe.stages[:1]))


def test_an_evaluation_may_change_until_it_has_begun(tmp_path, recipe):
    folder = RunFolder.begin(tmp_path / "run", recipe)
    model = {"model": "{sft}"}
    local = dataclasses.replace(recipe, stages=(recipe.stages[0], Stage("eval", "eval", {**model, "data": "here"})))
    folder.note_stage(recipe.placed(folder.path)[1], started=["now"])
    changed = RunFolder.begin(tmp_path / "run", local)
    assert changed.record["stages"][1]["data"] == "here"
    assert changed.record["state"]["eval"]["started"], "what was done before stays on record"
    assert yaml.safe_load((folder.path / "resolved.yaml").read_text())["eval"]["data"] == "here"
    (folder.path / "eval").mkdir()
    (folder.path / "eval" / "eval.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"begun with eval\.data = 'here', now it is none"):
        RunFolder.begin(tmp_path / "run", recipe)


def test_other_folders_are_left_alone(tmp_path, recipe):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"it holds thesis\.tex"):
        RunFolder.begin(tmp_path / "run", recipe)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder.begin(tmp_path / "file", recipe)
    RunFolder.begin(tmp_path / "new", recipe)
    (tmp_path / "new" / "recipe.json").write_text("{")
    with pytest.raises(LoragateError, match="cannot be read"):
        RunFolder.begin(tmp_path / "new", recipe)


def test_what_a_stage_left_decides_how_it_goes_on(tmp_path, recipe):
    folder = RunFolder.begin(tmp_path / "run", recipe)
    stage = recipe.placed(str(folder.path))[0]
    out = folder.path / "sft"
    assert folder.prepare(stage) is False
    (out / "run").mkdir(parents=True)
    (out / "adapter_model.safetensors").touch()
    with pytest.raises(ConfigError, match="this run did not make it"):
        folder.prepare(stage)
    folder.note_stage(stage, started=["now"])
    assert folder.prepare(stage) is False, "nothing to resume from yet"
    assert not (out / "adapter_model.safetensors").exists(), "half a result is written again"
    (out / "run" / "run.json").write_text("{}")
    assert folder.prepare(stage) is True
    assert not folder.is_finished(stage)
    for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer_config.json"):
        (out / name).touch()
    assert folder.is_finished(stage), "killed after the last file, before the record"
    folder.note_stage(recipe.placed(str(folder.path))[1], finished=True)
    assert RunFolder.begin(tmp_path / "run", recipe).is_finished(recipe.placed(str(folder.path))[1])


@pytest.fixture
def started(monkeypatch):
    """The command lines of stages that leave what they should, and lack nothing."""
    started = []

    def start(command):
        started.append(command)
        config = yaml.safe_load(Path(command[command.index("--config") + 1]).read_text())
        for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer_config.json"):
            Path(config["out"]).mkdir(parents=True, exist_ok=True)
            (Path(config["out"]) / name).touch()
        return 0

    monkeypatch.setattr("loragate.recipes.run.subprocess", SimpleNamespace(Popen=lambda command: command))
    monkeypatch.setattr("loragate.recipes.run.wait_for", start)
    monkeypatch.setattr("loragate.recipes.run.settled", lambda stage, where: None)
    monkeypatch.setattr("loragate.recipes.run.lacking", lambda stages, folder: [])
    return started


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.delenv("LORAGATE_EVAL_PYTHON", raising=False)
    return Run(tmp_path / "run", say=lambda text: None, again="again")


def test_a_python_caller_runs_a_recipe_and_runs_it_on(recipe, run, started):
    seconds = run_recipe(recipe, run)
    assert list(seconds) == ["sft", "eval"]
    config = run.folder / "config" / "1-sft.yaml"
    assert started[0] == [sys.executable, "-m", "loragate", "sft", "--config", str(config)]
    assert config.read_text().startswith(f"# loragate sft --config {config}\n")
    assert yaml.safe_load(config.read_text()) == {"rank": 4, "data": "rows.jsonl", "out": f"{run.folder}/sft"}
    run_recipe(recipe, run)
    assert len(started) == 2, "finished stages are left alone"


def test_a_launcher_starts_what_trains_and_says_how_many_processes_there_are(recipe, run, started):
    sft = dataclasses.replace(recipe.stages[0], values={"data": "rows.jsonl", "strategy": "fsdp2", "processes": 8})
    recipe = dataclasses.replace(recipe, stages=(sft, recipe.stages[1]))
    run_recipe(recipe, dataclasses.replace(run, launcher="accelerate launch -m loragate"))
    first, second = started
    assert first[:5] == ["accelerate", "launch", "-m", "loragate", "sft"]
    assert second[0] == sys.executable
    assert set(yaml.safe_load(Path(first[-1]).read_text())) == {"data", "out"}


def test_nothing_starts_where_something_is_missing(recipe, run, started, monkeypatch):
    missing = lambda stages, folder: [f"{stages[-1].name}: no rows"]  # noqa: E731
    monkeypatch.setattr("loragate.recipes.run.lacking", missing)
    with pytest.raises(ConfigError, match="one thing is missing:\n- eval: no rows"):
        run_recipe(recipe, run)
    with pytest.raises(ConfigError, match="--stages sft leaves the evaluations"):
        run_recipe(recipe, run)
    assert not started


def test_a_gpu_that_may_be_too_small_is_told_of_and_refuses_nothing(recipe, run, started, monkeypatch):
    said = []
    gpu = SimpleNamespace(total_memory=24 * 2**30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: gpu)
    wanted = {name: SimpleNamespace(peak=40.4 * 2**30, sentence=lambda: "40.4 GiB") for name in ("sft", "other")}
    monkeypatch.setattr("loragate.recipes.run.needs", lambda recipe: wanted)
    run_recipe(recipe, dataclasses.replace(run, say=said.append))
    (line,) = [line for line in said if "GiB" in line]
    assert line.startswith("sft: with rows as long as their limit it takes 40.4 GiB, and there are 24")
    assert len(started) == 2


def test_a_stage_that_fails_says_how_it_goes_on(recipe, run, started, monkeypatch):
    monkeypatch.setattr("loragate.recipes.run.wait_for", lambda command: 3)
    with pytest.raises(LoragateError, match=r"ended with status 3.*goes on from there: again"):
        run_recipe(recipe, run)
    with pytest.raises(ConfigError, match="'eval' reads what 'sft' leaves"):
        run_recipe(recipe, dataclasses.replace(run, stages=["eval"]))


def test_the_interpreter_of_evaluations(tmp_path, run):
    with pytest.raises(ConfigError, match=r"--eval-python .*nowhere"):
        interpreter(dataclasses.replace(run, eval_python=str(tmp_path / "nowhere")))
    assert interpreter(run) == ""
    assert interpreter(dataclasses.replace(run, eval_python="sh")) == shutil.which("sh")
