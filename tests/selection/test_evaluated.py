"""`loragate eval --sweep`: every cell on suites, as rows of one evaluation, and the maps that are drawn of it."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from loragate.cli.main import main
from loragate.evaluation.results import read_record
from loragate.generation import read_samples

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


def test_the_map_is_the_mean_over_tasks_with_seeds_averaged(swept, evaluated):
    found = json.loads((evaluated / "cells_math.json").read_text())
    record = read_record(evaluated / "results.json")
    assert [cell["name"] for cell in found["cells"]] == ["[-3,2]", "[0,1]"]
    for cell in found["cells"]:
        of_seeds = [f"{cell['name']}, seed {seed}" for seed in (0, 1)]
        means = [
            np.mean([record.find(task, "gated", name).avg_at_k.mean for name in of_seeds]) for task in ("many", "few")
        ]
        assert cell["score"]["mean"] == pytest.approx(np.mean(means))
        adapter = np.mean([record.find(task, "adapter").avg_at_k.mean for task in ("many", "few")])
        assert cell["difference"]["mean"] == pytest.approx(np.mean(means) - adapter)
    best = max(
        [("adapter", adapter), *((c["name"], c["score"]["mean"]) for c in found["cells"])], key=lambda one: one[1]
    )
    assert found["oracle"]["name"] == best[0]
    assert (found["samples"], found["questions"], found["seeds"], found["tasks"]) == (3, 53, [0, 1], ["many", "few"])
    chosen = json.loads((swept / "selection.json").read_text())["recommendation"]
    assert (found["picked"] or None) == (chosen["range"] and f"[{chosen['range'][0]:g},{chosen['range'][1]:g}]")
    assert (evaluated / "heatmap_math.png").stat().st_size > 1000


def test_the_report_reads_the_map_and_no_cell_as_an_artifact_of_its_own(swept, evaluated, tmp_path, capsys):
    assert main(["report", str(evaluated), str(swept), "--figures", str(tmp_path / "figures")]) == 0
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert any(name.startswith("heatmap_") and "math" in name for name in names)
    from loragate.report.sources import find_sources

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


def test_cells_that_are_not_finished_are_named_and_their_range_is_not_compared(swept, tasks, tmp_path, capsys):
    copied = shutil.copytree(swept, tmp_path / "swept")
    (copied / "trials" / "entropy_0_1_seed1" / "gated" / "gate_config.json").unlink()
    out = tmp_path / "out"
    assert main(["eval", "--sweep", str(copied), "--tasks", tasks, "--limit", "4", "--out", str(out)]) == 0
    assert "trials that are not finished, and not scored: [0,1], seed 1" in " ".join(capsys.readouterr().out.split())
    found = json.loads((out / "cells_math.json").read_text())
    assert [(cell["name"], cell["seeds"]) for cell in found["cells"]] == [("[-3,2]", [0, 1])]


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
