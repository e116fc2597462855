"""A recipe's run: what is missing is said first, and its folder goes on with the same recipe and is refused to another."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import loragate as lg
from loragate.cli.main import main
from loragate.errors import ConfigError, LoragateError
from loragate.files import read_json
from loragate.recipes import Recipe, Stage, read_recipe, run, run_recipe
from loragate.recipes.recipe import GPUS
from tiny import write_adapter, write_base, write_rows

SCALE = "math/qwen2.5-math-1.5b/scale"


@pytest.fixture
def recipe(tmp_path):
    write_base(tmp_path / "base")
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "completion": "2"}])
    sft = Stage("sft", "sft", {"rank": 4, "model": str(tmp_path / "base"), "data": str(rows)})
    look = Stage("look", "diagnose", {"what": "tokens", "model": "{last}", "run": "runs/x"})
    return Recipe("own", (sft, look))


def changed(recipe, number, **options):
    stages = list(recipe.stages)
    stages[number] = Stage(stages[number].name, stages[number].command, {**stages[number].options, **options})
    return Recipe(recipe.name, tuple(stages))


@pytest.fixture
def started(monkeypatch):
    """The command lines of stages, of which those in `failing` leave half of their work."""
    commands, failing = [], []

    def start(command, title, offline):
        commands.append(command)
        options = yaml.safe_load(Path(command[command.index("--config") + 1]).read_text())
        out = Path(options["out"])
        (out / "run").mkdir(parents=True, exist_ok=True)
        (out / "adapter_config.json").touch()
        if out.name in failing:
            raise LoragateError(f"{title} ended with status 1")

    monkeypatch.setattr(run, "run_command", start)
    return type("Started", (), {"commands": commands, "failing": failing})


def test_finished_stages_are_left_alone(recipe, tmp_path, started):
    out, said = tmp_path / "run", []
    run_recipe(recipe, out, say=said.append)
    config = out / "config" / "1-sft.yaml"
    assert started.commands[0] == [sys.executable, "-m", "loragate", "sft", "--config", str(config)]
    assert yaml.safe_load(config.read_text()) == {**recipe.stages[0].options, "out": f"{out}/sft"}
    assert yaml.safe_load((out / "config" / "2-look.yaml").read_text())["model"] == f"{out}/sft"
    assert list(read_json(out / "stages.json")) == ["sft", "look"]
    with pytest.raises(ConfigError, match=r"holds an earlier run.*--resume"):
        run_recipe(recipe, out)
    run_recipe(recipe, out, resume=True, say=said.append)
    assert len(started.commands) == 2
    assert said[-1] == "[2/2] look: finished before"


def test_what_needs_more_memory_than_there_is_is_said_before_anything_starts(recipe, tmp_path, started, monkeypatch):
    monkeypatch.setitem(GPUS, "h100", replace(GPUS["h100"], memory=2**20))
    said = []
    run_recipe(replace(recipe, machine="h100"), tmp_path / "run", only=["sft"], say=said.append)
    assert said[0].startswith("warning: sft may need ")
    assert said[1] == "[1/2] sft"


def test_a_stage_that_was_not_finished_goes_on_with_what_it_has(recipe, tmp_path, started):
    out, quiet = tmp_path / "run", lambda text: None
    started.failing[:] = ["sft"]
    with pytest.raises(LoragateError, match="ended with status 1"):
        run_recipe(recipe, out, say=quiet)
    with pytest.raises(LoragateError):
        run_recipe(changed(recipe, 0, rank=8), out, resume=True, say=quiet)
    assert "--resume" not in started.commands[-1], "nothing to resume from yet, so it may also change"
    (out / "sft" / "run" / "run.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"1-sft\.yaml was begun with rank = 8, now it is 4.*or remove .*run/sft to begin"
    ):
        run_recipe(recipe, out, resume=True, say=quiet)
    started.failing.clear()
    (out / "sft" / "half.safetensors").touch()
    run_recipe(changed(recipe, 0, rank=8), out, resume=True, say=quiet)
    assert started.commands[-2][-1] == "--resume"
    assert not (out / "sft" / "half.safetensors").exists(), "half a result is written again"
    assert (out / "sft" / "run" / "run.json").exists()


def test_a_failed_stage_begins_again_with_other_options_where_it_was_removed(recipe, tmp_path, started):
    out, quiet, other = tmp_path / "run", lambda text: None, changed(recipe, 1, batch_size=2)
    started.failing[:] = ["look"]
    with pytest.raises(LoragateError, match="ended with status 1"):
        run_recipe(recipe, out, say=quiet)
    (out / "look" / "run" / "run.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        run_recipe(other, out, resume=True, say=quiet)
    assert str(caught.value).endswith(f"or remove {out}/look to begin this stage again; earlier stages stay")
    shutil.rmtree(out / "look")
    started.failing.clear()
    run_recipe(other, out, resume=True, say=quiet)
    assert [command[3] for command in started.commands] == ["sft", "diagnose", "diagnose"]
    assert "--resume" not in started.commands[-1]


def test_other_folders_are_left_alone(recipe, tmp_path, started):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"it holds thesis\.tex"):
        run_recipe(recipe, tmp_path / "mine")
    with pytest.raises(ConfigError, match="there is no run to resume"):
        run_recipe(recipe, tmp_path / "new", resume=True)
    run_recipe(recipe, tmp_path / "run", only=["sft"], say=lambda text: None)
    (tmp_path / "run" / "look").mkdir()
    with pytest.raises(ConfigError, match="this run did not make it"):
        run_recipe(recipe, tmp_path / "run", resume=True, say=lambda text: None)


def test_a_launcher_starts_what_trains_and_says_how_many_processes_there_are(recipe, tmp_path, started):
    recipe = changed(recipe, 0, strategy="fsdp2", processes=8)
    run_recipe(recipe, tmp_path / "run", launcher="accelerate launch -m loragate", say=lambda text: None)
    first, second = started.commands
    assert first[:5] == ["accelerate", "launch", "-m", "loragate", "sft"]
    assert second[0] == sys.executable
    assert not {"strategy", "processes"} & yaml.safe_load(Path(first[-1]).read_text()).keys()


def test_all_that_is_missing_is_said_at_once(recipe, tmp_path, started, monkeypatch):
    def no_vllm():
        raise ConfigError("vLLM is not installed")

    monkeypatch.setattr(run, "require_vllm", no_vllm)
    nowhere = str(tmp_path / "nowhere")
    asked = Stage("asked", "eval", {"model": "{sft}", "tasks": "math500", "data": nowhere, "engine": "vllm"})
    recipe = changed(recipe, 0, data=f"{nowhere}.jsonl")
    recipe = Recipe("own", (*recipe.stages, asked))
    with pytest.raises(ConfigError) as caught:
        run_recipe(recipe, tmp_path / "run")
    said = str(caught.value).split("\n- ")
    assert [line.partition(":")[0] for line in said[1:]] == ["sft", "asked", "asked"]
    assert [word for word in ("nowhere.jsonl", "vLLM", "--data") if word in str(caught.value)] != []
    assert not started.commands
    assert not (tmp_path / "run" / "recipe.json").exists(), "so that the same command can be given again"


def test_what_a_stage_reads_must_be_there(recipe, tmp_path, started):
    with pytest.raises(ConfigError, match=r"look: .*which stage 'sft' leaves: give --stages sft,look"):
        run_recipe(recipe, tmp_path / "run", only=["look"])
    with pytest.raises(ConfigError, match="has no stage 'stf'; did you mean 'sft'"):
        run_recipe(recipe, tmp_path / "run", only=["stf"])
    write_adapter(tmp_path / "adapter", tmp_path / "base")
    with pytest.raises(ConfigError, match=r"look: .*adaptor.*did you mean '.*adapter'"):
        run_recipe(changed(recipe, 1, model=str(tmp_path / "adaptor")), tmp_path / "run", only=["look"])
    other = changed(recipe, 1, model=str(tmp_path / "adapter"))
    run_recipe(other, tmp_path / "run", only=["look"], say=lambda text: None)
    assert started.commands, "an adapter from elsewhere does as well"


def test_questions_that_choose_are_looked_for(tmp_path, monkeypatch, started):
    monkeypatch.setattr(run, "resolve", lambda *_, **__: None)
    name = "code/qwen2.5-math-1.5b/scale-auto"
    with pytest.raises(ConfigError, match=r"--set calibrate\.dev_data=FILE"):
        run_recipe(read_recipe(name), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"calibrate: found no file nowhere\.jsonl \(dev_data\)"):
        run_recipe(read_recipe(name, {"calibrate.dev_data": "nowhere.jsonl"}), tmp_path / "run")


def test_a_process_that_fails_or_is_stopped(monkeypatch):
    with pytest.raises(LoragateError, match=r"\[1/1\] sft ended with status 3.*--resume goes on"):
        run.run_command([sys.executable, "-c", "raise SystemExit(3)"], "[1/1] sft", offline=False)
    with pytest.raises(KeyboardInterrupt):
        run.run_command([sys.executable, "-c", "raise SystemExit(130)"], "[1/1] sft", offline=False)
    with pytest.raises(ConfigError, match="--launcher: nowhere cannot be started"):
        run.run_command(["nowhere"], "[1/1] sft", offline=False)
    code = "import os; raise SystemExit(os.environ['HF_HUB_OFFLINE'] != '1')"
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    run.run_command([sys.executable, "-c", code], "[1/1] sft", offline=True)


def killed_at(words, there, environment):
    """Start a command, and kill it and its children once `there()`."""
    process = subprocess.Popen(words, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    while not there() and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow("kills")
def test_run_killed_resumed_and_used(tmp_path):
    """Both trainings of a recipe as typed, killed with SIGKILL in the first; the gates are then loaded."""
    out = tmp_path / "run"
    words = [sys.executable, "-m", "loragate", "recipes", "run", SCALE, "--tiny", "--stages", "sft,calibrate"]
    words += ["--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    killed_at(words, lambda: list(out.glob("sft/run/checkpoint-1")), environment)
    assert "sft" not in read_json(out / "stages.json")
    assert "--resume" in subprocess.run(words, env=environment, capture_output=True, text=True, check=False).stderr
    done = subprocess.run([*words, "--resume"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sft: going on" in done.stdout
    assert list(read_json(out / "stages.json")) == ["sft", "calibrate"]
    assert read_json(out / "sft" / "run" / "run.json")["data"]["rows"] == 32
    assert read_json(out / "calibrate" / "gate_config.json")["gate"]["lower"] == -6
    assert lg.gate_parameters(lg.load_gated(out / "calibrate"))
    # killed between the end of a stage and its record: the result is written again
    shutil.copytree(out / "sft", tmp_path / "sft")
    (out / "stages.json").write_text("{}")
    assert main([*words[3:-4], "--stages", "sft", "--out", str(out), "--resume"]) == 0
    weights = "adapter_model.safetensors"
    assert (out / "sft" / weights).read_bytes() == (tmp_path / "sft" / weights).read_bytes()
