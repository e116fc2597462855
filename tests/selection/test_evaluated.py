"""`loragate eval --sweep`: every cell on suites, as rows of one evaluation, and the maps that are drawn of it."""

from __future__ import annotations

import shutil

import pytest

from loragate.cli.main import main
from loragate.evaluation.results import read_record
from loragate.generation import read_samples
from loragate.report.sources import find_sources

TASK = """\
name: NAME
version: 1
suite: math
dataset: {file: dev.jsonl, schema: {prompt: text, answer: text}}
columns: {question: prompt, gold: answer}
prompt: "{{ question }}"
generation: {samples: 3, temperature: 0.5, max_new_tokens: 1}
grader: exact
"""
CELLS = ["[-3,2], seed 0", "[-3,2], seed 1", "[0,1], seed 0", "[0,1], seed 1"]


@pytest.fixture(scope="module")
def tasks(place, tmp_path_factory):
    """Two tasks of one suite, with 33 and 20 questions."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = (place / "dev.jsonl").read_text().splitlines(keepends=True)
    for name, count in (("many", 33), ("few", 20)):
        (folder / name).mkdir()
        (folder / name / "dev.jsonl").write_text("".join(lines[:count]))
        (folder / name / f"{name}.yaml").write_text(TASK.replace("NAME", name))
    return ",".join(str(folder / name / f"{name}.yaml") for name in ("many", "few"))


@pytest.fixture(scope="module")
def evaluated(swept, tasks, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluated") / "cells"
    assert main(["eval", "--sweep", str(swept), "--tasks", tasks, "--out", str(out)]) == 0
    return out


def test_a_cell_answers_as_its_own_artifact_does(swept, tasks, evaluated, tmp_path):
    record = read_record(evaluated / "results.json")
    assert [row.label for row in record.results if row.task == "few"] == [
        "adapter",
        *(f"gated {name}" for name in CELLS),
    ]
    artifact = swept / "trials" / "entropy_-3_2_seed1" / "gated"
    own = tmp_path / "own"
    assert main(["eval", "--model", str(artifact), "--tasks", tasks, "--controls", "none", "--out", str(own)]) == 0
    for task in ("many", "few"):
        for row, slug in (("gated", "gated--3_2-seed-1"), ("adapter", "adapter")):
            one, other = (
                read_samples(out / "samples" / name / f"{task}.jsonl") for out, name in ((own, row), (evaluated, slug))
            )
            assert one == other
    answers = {
        (evaluated / "samples" / row.name / "many.jsonl").read_text() for row in (evaluated / "samples").iterdir()
    }
    assert len(answers) > 2, "cells answer unlike one another"


def test_the_maps_are_of_the_suite_and_the_report_has_no_cell_as_an_artifact_of_its_own(swept, evaluated):
    record = read_record(evaluated / "results.json")
    assert [row.control for row in record.suites] == [None, *CELLS]
    maps = {path.name for path in evaluated.glob("heatmap*")}
    assert maps == {f"heatmap_math_gated_seed_{seed}.{kind}" for seed in (0, 1) for kind in ("png", "svg")}
    assert not any("trials" in str(source.path) for source in find_sources(swept) if source.kind == "artifact")


def test_a_stopped_evaluation_of_a_sweep_goes_on_and_a_changed_cell_is_noticed(
    swept, tasks, evaluated, tmp_path, capsys
):
    out = shutil.copytree(evaluated, tmp_path / "out")
    cut = out / "samples" / "gated-0_1-seed-0" / "few.jsonl"
    whole = cut.read_text()
    cut.write_text("".join(whole.splitlines(keepends=True)[:7]))
    other = out / "samples" / "adapter" / "few.jsonl"
    stamp = other.stat().st_mtime_ns
    line = ["eval", "--sweep", str(swept), "--tasks", tasks, "--out", str(out), "--resume"]
    assert main(line) == 0
    drawn = [
        [(s.question, s.sample, s.token_ids) for s in read_samples(o / cut.relative_to(out))] for o in (out, evaluated)
    ]
    assert drawn[0] == drawn[1]
    assert other.stat().st_mtime_ns == stamp
    copied = shutil.copytree(swept, tmp_path / "swept")
    for name in ("run.json", "variants.json"):
        text = (out / name).read_text()
        (out / name).write_text(text.replace(str(swept), str(copied)))
    gates = copied / "trials" / "entropy_0_1_seed0" / "gated" / "gates.safetensors"
    shutil.copy(copied / "trials" / "entropy_-3_2_seed0" / "gated" / "gates.safetensors", gates)
    line[2] = str(copied)
    capsys.readouterr()
    assert main(line) != 0
    said = "".join(capsys.readouterr().err.split())
    assert "variants.jsonwasbegunwithgated[0,1],seed0.gates_sha256" in said


def test_cells_at_several_temperatures_meet_the_adapter_at_its_best(swept, tasks, tmp_path):
    out = tmp_path / "out"
    line = [
        "eval",
        "--sweep",
        str(swept),
        "--tasks",
        tasks,
        "--limit",
        "4",
        "--temperature",
        "0.5,0",
        "--out",
        str(out),
    ]
    assert main(line) == 0
    record = read_record(out / "results.json")
    labels = ["adapter", *(f"gated {name}" for name in CELLS)]
    assert [row.label for row in record.results if row.task == "few"] == labels + [f"{one} greedy" for one in labels]
    assert record.find("few", labels[1]).at_best.comparison is not None
    assert {row.control for row in record.suites} == {None, "greedy", *CELLS, *(f"{name} greedy" for name in CELLS)}
    maps = sorted(path.name for path in out.glob("heatmap*.png"))
    assert maps == ["heatmap_math_gated_seed_0.png", "heatmap_math_gated_seed_1.png"], "at the tasks' own temperature"


def test_cells_that_are_not_finished_are_named(swept, tasks, tmp_path, capsys):
    copied = shutil.copytree(swept, tmp_path / "swept")
    (copied / "trials" / "entropy_0_1_seed1" / "gated" / "gate_config.json").unlink()
    out = tmp_path / "out"
    assert main(["eval", "--sweep", str(copied), "--tasks", tasks, "--limit", "4", "--out", str(out)]) == 0
    assert "trials that are not finished, and not scored: [0,1], seed 1" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--model", "x"], "--model"),
        (["--controls", "full"], "--controls"),
        (["--export", "lm-eval"], "--export"),
        (["--suite", "retention"], "retention"),
    ],
)
def test_what_has_no_effect_on_a_sweep_is_refused(swept, tasks, tmp_path, capsys, flags, key):
    assert main(["eval", "--sweep", str(swept), "--tasks", tasks, "--out", str(tmp_path / "out"), *flags]) == 2
    assert key in capsys.readouterr().err


def test_a_folder_that_is_no_sweep(tmp_path, tasks, capsys):
    assert main(["eval", "--sweep", str(tmp_path), "--tasks", tasks, "--out", str(tmp_path / "out")]) == 2
    assert "run.json" in capsys.readouterr().err
