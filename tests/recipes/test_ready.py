"""What a recipe's run refuses before its first stage: all that is missing, here and in the interpreter of its evaluations."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from loragate.cli.main import main
from loragate.errors import ConfigError
from loragate.recipes import Recipe, Stage, ready
from loragate.recipes import run as running
from loragate.recipes.run import Run, require_parts
from loragate.version import __version__
from loragate.world.base import shipped_base_folder

BASE = str(shipped_base_folder())
EVAL = {"model": "{last}", "engine": "vllm", "suite": "math", "controls": "alone"}


def recipe(**evaluation):
    return Recipe(
        "mine",
        "",
        (
            Stage("sft", "sft", {"model": BASE, "data": "nowhere.jsonl"}),
            Stage("calibrate", "calibrate", {"adapter": "{sft}", "data": "nowhere.jsonl", "range": "auto"}),
            Stage("eval", "eval", {**EVAL, **evaluation}),
        ),
    )


def hide(monkeypatch, *names):
    """As if these libraries were not installed; all others stay, as what is imported now is so for every later test."""
    real = importlib.util.find_spec
    there = lambda name, *rest: None if name in names else real(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", there)


def refused(mine, folder, evaluator=""):
    with pytest.raises(ConfigError) as caught:
        require_parts(mine, mine.placed(folder), Run(folder), evaluator)
    return str(caught.value).splitlines()


def test_all_that_is_missing_is_said_at_once(monkeypatch, tmp_path):
    def no_math(name):
        raise ImportError(name)

    monkeypatch.setattr("loragate.evaluation.judging.import_module", no_math)
    hide(monkeypatch, "vllm", "lm_eval", "bitsandbytes")
    first, *lines = refused(recipe(), tmp_path / "run")
    said = [line.removeprefix("- ") for line in lines]
    assert f"{len(said) - 1} things are missing" in first
    assert [line for line in said if line.startswith("sft, calibrate: found no file nowhere.jsonl")]
    assert [line for line in said if line.startswith("eval: vLLM is not installed")]
    assert [line for line in said if "math answers need math-verify" in line]
    assert sum(line.startswith("eval: ") and "A local copy does as well" in line for line in said) == 5
    for way in ("--stages sft,calibrate leaves", "--set eval.engine=transformers", "--eval-python", "eval.data=FOLDER"):
        assert way in said[-1]


def test_what_lies_there_is_not_missed(monkeypatch, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    asked = [json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) for n in range(32)]
    (tmp_path / "probe.jsonl").write_text("\n".join(asked))
    stages = (
        Stage("sft", "sft", {"model": BASE, "data": str(tmp_path / "rows.jsonl")}),
        Stage("sweep", "sweep", {"adapter": "{sft}", "data": "{sft}/rows", "probe": str(tmp_path / "probe.jsonl")}),
        Stage("eval", "eval", {"model": "{last}", "suite": "tiny", "engine": "transformers"}),
        Stage("look", "diagnose", {"what": "gates", "model": "{last}", "run": "{eval}"}),
    )
    mine = Recipe("mine", "", stages)
    require_parts(mine, mine.placed(tmp_path / "run"), Run(tmp_path / "run"))
    (tmp_path / "rows.jsonl").unlink()
    ready._first_row.cache_clear()
    assert "rows.jsonl" in refused(mine, tmp_path / "run")[1]


def test_held_out_rows_are_looked_for(tmp_path):
    rows, nowhere = tmp_path / "rows.jsonl", tmp_path / "apart.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    own = {"adapter": "nowhere", "data": str(rows), "range": "0,1", "unverified": True}
    assert not [text for text in ready.lacking([Stage("late", "calibrate", own)], "runs/x") if "heldout" in text]
    (found,) = ready.lacking([Stage("late", "calibrate", {**own, "heldout": str(nowhere)})], "runs/x")
    assert "apart.jsonl" in found
    (found,) = ready.lacking([Stage("late", "calibrate", {**own, "heldout_split": "test"})], "runs/x")
    assert "split='test'" in found


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"suite": "retention"}, "retention suites need lm-evaluation-harness"),
        ({"suite": "tiny", "quantization": "4bit"}, "needs bitsandbytes"),
        ({"suite": "tiny", "model": "nowhere"}, "nowhere"),
        ({"suite": "tiny", "chat_template": "nowhere.jinja", "model": BASE}, "nowhere.jinja"),
        ({"tasks": "humaneval"}, "no sandbox here"),
    ],
)
def test_an_evaluation_that_could_not_run(values, message, monkeypatch):
    def no_sandbox(tier):
        raise ConfigError("no sandbox here")

    hide(monkeypatch, "vllm", "lm_eval", "bitsandbytes")
    monkeypatch.setattr("loragate.evaluation.judging.require_sandbox", no_sandbox)
    found = ready.lacking([Stage("late", "eval", {"model": "", **values})], "runs/x")
    assert [text for text in found if text.startswith("late: ") and message in text]


def test_a_base_that_vllm_cannot_serve_here_is_missed(monkeypatch, tmp_path):
    monkeypatch.setattr("loragate.recipes.ready.require_vllm", lambda: None)
    monkeypatch.setattr("loragate.recipes.ready.require_gate_plugin", lambda folder: None)
    monkeypatch.setattr("loragate.recipes.ready.vllm_version", lambda: "0.32.0")
    monkeypatch.setattr("loragate.serving.vllm_server.on_cpu", lambda: True)
    heads = "loragate.serving.vllm_server.unserved_heads"
    monkeypatch.setattr(heads, lambda config: f"{config.hidden_size // config.num_attention_heads} features")
    stage = Stage("eval", "eval", {"model": BASE, "suite": "tiny", "engine": "vllm"})
    (text,) = ready.lacking([stage], "runs/x")
    assert "16 features" in text
    hide(monkeypatch, "vllm", "lm_eval", "bitsandbytes")
    trained = Stage("eval", "eval", {"model": "{sft}", "suite": "tiny", "engine": "vllm"})
    mine = Recipe("mine", "", (Stage("sft", "sft", {"model": BASE, "data": str(tmp_path / "rows.jsonl")}), trained))
    assert any("16 features" in line for line in refused(mine, tmp_path / "run")), "the base of what is trained"
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    adapter = Stage("eval", "eval", {**stage.values, "model": str(tmp_path)})
    assert ready.lacking([adapter], "runs/x") == [], "an adapter names its own base, and may have no tokenizer"


def test_vllm_of_another_version_is_missed(monkeypatch):
    monkeypatch.setattr("loragate.recipes.ready.require_vllm", lambda: None)
    monkeypatch.setattr("loragate.recipes.ready.vllm_version", lambda: "0.31.4")
    (text,) = ready.lacking([Stage("late", "eval", {"suite": "tiny", "engine": "vllm"})], "runs/x")
    assert "0.31.4" in text
    assert ">=0.32,<0.33" in text
    monkeypatch.setattr("loragate.recipes.ready.vllm_version", lambda: "0.32.0")
    (text,) = ready.lacking([Stage("late", "eval", {"suite": "tiny", "engine": "vllm"})], "runs/x")
    assert "vLLM" in text, "what cannot be imported is missed, whatever its version says"


def program(folder, text):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


VLLM = {
    "vllm/__init__.py": "",
    "vllm/lora/__init__.py": "",
    "vllm/lora/request.py": "",
    "vllm/platforms.py": "",
    "vllm/lora/worker_manager.py": "class WorkerLoRAManager: pass",
    "vllm/plugins.py": (
        "from vllm.lora.worker_manager import WorkerLoRAManager\n"
        "def load_general_plugins(): WorkerLoRAManager.loragate_gates = ''"
    ),
    "vllm-0.32.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n",
}


@pytest.mark.slow("processes")
@pytest.mark.parametrize(("version", "lacks"), [("0.32.0", ""), ("0.33.1", "0.33.1")])
def test_another_environment_is_asked_in_its_own_interpreter(version, lacks, tmp_path):
    """A wrapper around this python with a vLLM of its own stands for the second environment."""
    for name, text in VLLM.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("0.32.0", version))
    source = Path(ready.__file__).parents[2]
    other = program(tmp_path / "bin", f'PYTHONPATH={tmp_path}/site:{source} exec {sys.executable} "$@"')
    mine = Recipe("mine", "", (Stage("eval", "eval", {**EVAL, "suite": "tiny", "model": BASE}),))
    if lacks:
        assert lacks in refused(mine, tmp_path / "run", other)[1]
    else:
        require_parts(mine, mine.placed("run"), Run(tmp_path / "run"), other)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "No module named x"),
        ({"loragate": "0.0.1", "lacking": []}, "0.0.1"),
        ({"loragate": __version__, "lacking": ["eval: no plugin"]}, "- eval: no plugin"),
    ],
)
def test_an_interpreter_that_cannot_evaluate(answer, told, tmp_path):
    script = f"""echo '{json.dumps(answer)}' > "${{5%.json}}.answer.json" """
    other = program(tmp_path / "bin", script if answer else 'echo "No module named x" >&2; exit 1')
    mine = Recipe("mine", "", (Stage("eval", "eval", {"model": "base", "engine": "vllm"}),))
    assert told in refused(mine, tmp_path / "run", other)[1]


def test_evaluations_run_in_the_interpreter_that_was_named_once(tmp_path, monkeypatch, capfd):
    log, status, out = tmp_path / "log", tmp_path / "status", tmp_path / "run"
    told = json.dumps({"loragate": __version__, "lacking": []})
    other = program(
        tmp_path / "bin",
        f"""echo "$2 $3" >> {log}; [ "$3" = eval ] && exit $(cat {status}); echo '{told}' > "${{5%.json}}.answer.json" """,
    )
    words = ["recipes", "run", "math/qwen2.5-math-1.5b/base", "--out", str(out), "--stages", "eval"]
    words += ["--local-model", BASE]
    monkeypatch.delenv(running.EVAL_PYTHON, raising=False)
    status.write_text("1")
    assert main([*words, "--eval-python", other]) == 1
    asked, started = log.read_text().splitlines()
    assert asked == "loragate recipes"
    assert started == "loragate eval"
    assert json.loads((out / "recipe.json").read_text())["eval_python"] == other
    log.unlink()
    status.write_text("0")
    assert main(words) == 0, capfd.readouterr().err
    assert log.read_text().splitlines()[-1] == "loragate eval", "the folder remembers the interpreter"
    monkeypatch.setenv(running.EVAL_PYTHON, str(tmp_path / "nowhere"))
    assert main([*words[:4], str(tmp_path / "new"), *words[5:]]) == 2
    assert "nowhere" in capfd.readouterr().err
    assert main([*words, "--dry-run", "--eval-python", other]) == 0
    assert capfd.readouterr().out.startswith(f"# {other} -m loragate eval --config ")


@pytest.mark.parametrize(
    ("suite", "probe", "missing"), [("code", "", True), ("math", "", False), ("code", "p.jsonl", False)]
)
def test_a_range_for_programs_is_chosen_by_labels(suite, probe, missing, tmp_path):
    """Without any, calibrate would refuse after hours of Stage I."""
    stages = recipe(suite=suite).with_values({"calibrate.probe": probe} if probe else {}).placed(str(tmp_path))
    found = [text for text in ready.lacking(stages, str(tmp_path)) if "--set calibrate.probe=FILE" in text]
    assert [text.startswith("calibrate: ") for text in found] == [True] * missing
