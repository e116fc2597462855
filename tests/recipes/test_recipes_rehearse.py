"""`loragate recipes rehearse`: recipes that between them have every kind of stage are run on stand-ins."""

import json
import sys
from types import SimpleNamespace

import pytest
import yaml

from loragate.cli.main import main
from loragate.errors import LoragateError
from loragate.evaluation.sandbox import probe as probe_sandbox
from loragate.generation import SamplingConfig
from loragate.recipes import read_recipe
from loragate.recipes.files import files
from loragate.recipes.rehearsal import require_endings

BACKBONE = "qwen2.5-math-1.5b"
SCALE = f"math/{BACKBONE}/scale"
REHEARSED = [
    *(f"math/{BACKBONE}/{method}" for method in ("dora", "mask", "lora-continued", "grid", "delta-entropy")),
    *(f"code/{BACKBONE}/{method}" for method in ("scale-auto", "realised-gates")),
    "code/qwen2.5-math-7b/interventions",  # five stages
    "math/llama-3.1-8b/scale",  # a chat template of ours
]
"""With `SCALE`, which is run as typed, every kind of stage, and every way from one to the next."""


@pytest.fixture
def planned(monkeypatch):
    """What the full run needs costs nothing to say: `test_machine.py` asks for it."""
    monkeypatch.setattr("loragate.recipes.ready.estimate", lambda *_, **__: SimpleNamespace(sentence=lambda: "1 GiB"))


def test_a_rehearsal_on_paper(capsys, tmp_path, planned):
    assert main(["recipes", "rehearse", SCALE, "--dry-run", "--out", str(tmp_path / "r")]) == 0
    text = " ".join(capsys.readouterr().out.replace("\\\n", " ").split())
    assert "sft max_rows 100000 320" in text
    assert "sft model Qwen/Qwen2.5-Math-1.5B stand-ins/base" in text
    assert "per_device_train_batch_size: 8" in text, "as shipped"
    assert "the full run, calibrate: 1 GiB" in text
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("wanted", [BACKBONE, pytest.param("", marks=pytest.mark.slow("rehearsals"))])
def test_every_recipe_and_its_rehearsal_fit_the_commands(wanted, capsys):
    assert main(["recipes", "check", *([wanted] if wanted else [])]) == 0
    expected = len(files("domain")) * len(files("method"))
    assert int(capsys.readouterr().out.split()[0]) >= expected * (1 if wanted else len(files("backbone")))


def test_a_folder_that_holds_something_else(tmp_path, capsys, planned):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert main(["recipes", "rehearse", SCALE, "--out", str(tmp_path / "mine")]) == 2
    assert "it holds thesis.tex" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_rehearsal_that_fails_says_how_it_goes_on_and_keeps_its_interpreter(tmp_path, monkeypatch, planned):
    asked, seen = tmp_path / "r", []
    monkeypatch.delenv("LORAGATE_EVAL_PYTHON", raising=False)
    monkeypatch.setattr(
        "loragate.recipes.rehearsal.write_standins", lambda folder: folder.mkdir(parents=True, exist_ok=True)
    )
    monkeypatch.setattr("loragate.recipes.run.require_parts", lambda *_: None)

    def start(command, what, again):
        seen.extend([command[0], again])
        raise LoragateError("failed")

    monkeypatch.setattr("loragate.recipes.run.start", start)
    name = f"math/{BACKBONE}/base"
    for python in (["--eval-python", sys.executable], []):
        assert main(["recipes", "rehearse", name, "--out", str(asked), *python]) == 1
    again = f"loragate recipes rehearse {name} --out {asked}"
    assert seen == [sys.executable, f"{again} --eval-python {sys.executable}", sys.executable, again]
    engine = yaml.safe_load((asked / "run" / "config" / "1-eval.yaml").read_text())["engine"]
    assert engine == "vllm", "the interpreter that the folder remembers has it"


@pytest.mark.parametrize("cut", [[0.0, 0.1], [], [0.75, 1.0]])
def test_answers_that_do_not_end_are_refused(cut, tmp_path, monkeypatch):
    names = ("math500", "aime24")
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "results.json").touch()
    results = [
        SimpleNamespace(task=name, control=None, truncated=share) for name, share in zip(names, cut, strict=False)
    ]
    tasks = [SimpleNamespace(name=name, sampling=SamplingConfig()) for name in names]
    record = SimpleNamespace(tasks=tasks, results=results)
    monkeypatch.setattr("loragate.recipes.rehearsal.read_scores", lambda path: record)
    if 1.0 not in cut:
        require_endings(tmp_path)
        return
    with pytest.raises(LoragateError, match=r"eval/aime24: only 0 %.*end of a turn"):
        require_endings(tmp_path)


@pytest.fixture
def in_this_process(monkeypatch):
    """Stages run in this process, which spares each of them the imports."""

    def call(command, what, again):
        assert main(command[command.index("loragate") + 1 :]) == 0, what

    monkeypatch.setattr("loragate.recipes.run.start", call)
    monkeypatch.setattr("loragate.recipes.rehearsal.start", call)


@pytest.mark.slow("rehearsals")
@pytest.mark.parametrize("name", REHEARSED)
def test_every_stage_of_a_recipe_runs(name, in_this_process, tmp_path):
    if problem := probe_sandbox("bubblewrap"):
        pytest.skip(f"bubblewrap: {problem}")
    for module in ("math_verify", "lm_eval"):
        pytest.importorskip(module, reason=f"{module} is not installed (pip install loragate[eval])")
    folder = tmp_path / "r"
    # programs have no majority: a range is chosen by labelled questions, which whoever runs the recipe has to give
    given = ["--set", "calibrate.probe=mine.jsonl"] if name == f"code/{BACKBONE}/scale-auto" else []
    assert main(["recipes", "rehearse", name, "--out", str(folder), *given]) == 0
    state = json.loads((folder / "run" / "recipe.json").read_text())["state"]
    assert [stage for stage, told in state.items() if told["finished"]] == [s.name for s in read_recipe(name).stages]
    assert (folder / "report.html").is_file()


@pytest.mark.slow("rehearsals")
def test_as_typed(tmp_path, capfd):
    """Each stage in a process of its own, with nothing shared."""
    for module in ("math_verify", "lm_eval"):
        pytest.importorskip(module, reason=f"{module} is not installed (pip install loragate[eval])")
    assert main(["recipes", "rehearse", SCALE, "--out", str(tmp_path / "r")]) == 0
    assert "rehearsed: these stages of math/qwen2.5-math-1.5b/scale ran" in capfd.readouterr().out
