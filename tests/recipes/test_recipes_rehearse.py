"""`loragate recipes rehearse`: every recipe's stages run; equal stages of several recipes run once here."""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from loragate.cli.main import main
from loragate.errors import LoragateError
from loragate.evaluation.sandbox import probe as probe_sandbox
from loragate.recipes import Library, read_recipe
from loragate.recipes.rehearsal import endings, require_endings
from loragate.recipes.standins import write_standins

LIBRARY = Library()
BACKBONE = "qwen2.5-math-1.5b"
SCALE = f"math/{BACKBONE}/scale"
REHEARSED = [
    SCALE,
    *(
        f"math/{BACKBONE}/{method}"
        for method in ("dora", "mask", "lora-continued", "grid", "delta-entropy", "controls")
    ),
    *(f"code/{BACKBONE}/{method}" for method in ("scale-auto", "realised-gates")),
    "code/qwen2.5-math-7b/interventions",  # five stages
    "math/llama-3.1-8b/scale",  # a chat template of ours
    "math/qwen2.5-32b/lora",  # one process in place of eight
]
"""Between them every kind of stage, and every way from one to the next."""


def test_a_rehearsal_on_paper(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("loragate.recipes.machine.plans", lambda recipe: {})  # test_machine.py makes them
    assert main(["recipes", "rehearse", SCALE, "--dry-run", "--out", str(tmp_path / "r")]) == 0
    text = " ".join(capsys.readouterr().out.replace("\\\n", " ").split())
    assert "sft max_rows 100000 320" in text
    assert "sft model Qwen/Qwen2.5-Math-1.5B stand-ins/base" in text
    assert "micro_batch_size: 8" in text, "as shipped"
    assert "the full run on h100" in text
    assert "24,256 answers of at most 4096 tokens" in text
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("wanted", [BACKBONE, pytest.param("", marks=pytest.mark.slow("rehearsals"))])
def test_every_recipe_and_its_rehearsal_fit_the_commands(wanted, capsys):
    assert main(["recipes", "check", *([wanted] if wanted else [])]) == 0
    expected = len(LIBRARY.files("domain")) * len(LIBRARY.files("method"))
    assert int(capsys.readouterr().out.split()[0]) >= expected * (1 if wanted else len(LIBRARY.files("backbone")))


def test_a_folder_that_holds_something_else(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert main(["recipes", "rehearse", SCALE, "--out", str(tmp_path / "mine")]) == 2
    assert "holds no rehearsal" in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_rehearsal_that_fails_says_how_it_goes_on_and_keeps_its_interpreter(tmp_path, monkeypatch):
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


def test_answers_that_do_not_end_are_refused():
    require_endings({"eval/math500": 1.0, "eval/aime24": 0.9})
    require_endings({})
    with pytest.raises(LoragateError, match=r"eval/aime24: only 0 %.*end of a turn"):
        require_endings({"eval/math500": 0.25, "eval/aime24": 0.0})


@pytest.fixture(scope="module")
def standins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rehearsals")
    write_standins(folder / "stand-ins")
    return folder


@pytest.fixture
def stages_once(standins, monkeypatch):
    """Stages run in this process; one whose settings and inputs were seen before is copied."""
    made = standins / "made"

    def write(folder):
        shutil.copytree(standins / "stand-ins", folder, dirs_exist_ok=True)

    def call(command, what, again):
        words = command[command.index("loragate") + 1 :]
        if "--config" not in words:
            assert main(words) == 0, what
            return
        config = yaml.safe_load(Path(words[words.index("--config") + 1]).read_text())
        out, run = config.pop("out"), words[words.index("--config") + 1].partition("/config/")[0]
        seen = {}
        for key, value in config.items():
            text = str(value)
            if text.startswith(f"{run}/"):  # the work of an earlier stage, by what it is
                name = text.removeprefix(f"{run}/").split("/")[0]
                text = text.replace(
                    f"{run}/{name}", (standins / "is" / run.strip("/").replace("/", "-") / name).read_text()
                )
            seen[key] = text.replace(run.removesuffix("/run"), "")
        digest = hashlib.sha256(json.dumps([words[0], seen], sort_keys=True).encode()).hexdigest()
        mark = standins / "is" / run.strip("/").replace("/", "-") / out.removeprefix(f"{run}/")
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(digest)
        if not (made / digest).exists():
            assert main(words) == 0, what
            (made / digest).mkdir(parents=True)
            copy(out, made / digest / "out")
        else:
            copy(made / digest / "out", out)

    def copy(source, target):
        (shutil.copytree if Path(source).is_dir() else shutil.copy)(source, target)

    monkeypatch.setattr("loragate.recipes.rehearsal.write_standins", write)
    monkeypatch.setattr("loragate.recipes.run.start", call)
    monkeypatch.setattr("loragate.recipes.rehearsal.start", call)


@pytest.mark.slow("rehearsals")
@pytest.mark.parametrize("name", REHEARSED)
def test_every_stage_of_a_recipe_runs(name, stages_once, tmp_path):
    if problem := probe_sandbox("bubblewrap"):
        pytest.skip(f"bubblewrap: {problem}")
    for module in ("math_verify", "lm_eval"):
        pytest.importorskip(module, reason=f"{module} is not installed (pip install loragate[eval])")
    folder = tmp_path / "r"
    # programs have no majority: a range is chosen by labelled questions, which whoever runs the recipe has to give
    given = ["--set", "calibrate.probe=mine.jsonl"] if name == f"code/{BACKBONE}/scale-auto" else []
    assert main(["recipes", "rehearse", name, "--out", str(folder), *given]) == 0
    record = json.loads((folder / "rehearsal.json").read_text())
    shipped = read_recipe(name, LIBRARY)
    assert list(record["seconds"]) == [stage.name for stage in shipped.stages]
    assert {item["stage"] for item in record["replaced"]} >= {s.name for s in shipped.stages if not s.values.get("run")}
    assert (folder / "report.html").is_file()
    assert record["needs"] or name.endswith("/base")
    assert endings(folder / "run") == record["ended"]


@pytest.mark.slow("rehearsals")
def test_as_typed(tmp_path, capfd):
    """Each stage in a process of its own, with nothing shared."""
    for module in ("math_verify", "lm_eval"):
        pytest.importorskip(module, reason=f"{module} is not installed (pip install loragate[eval])")
    assert main(["recipes", "rehearse", SCALE, "--out", str(tmp_path / "r")]) == 0
    assert "every stage of math/qwen2.5-math-1.5b/scale ran" in capfd.readouterr().out
    record = json.loads((tmp_path / "r" / "rehearsal.json").read_text())
    assert set(record["ended"]) == {
        f"eval/{name}" for name in ("math500", "minerva", "olympiadbench", "aime24", "amc23")
    }
