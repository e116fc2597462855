"""`loragate report` from folders to file."""

import json
import re

import pytest

from loragate.cli.main import main
from loragate.report.page import banner_of, page, statements
from loragate.report.sources import all_sources, find_sources
from pages import evaluation_record, gates_record, row, selection_record, traces


@pytest.fixture
def run(tmp_path):
    """A folder as a quickstart leaves it, with token traces."""
    folder = tmp_path / "run"
    (folder / "adapters" / "sft" / "run").mkdir(parents=True)
    (folder / "gated").mkdir()
    (folder / "results.json").write_text(json.dumps(evaluation_record()))
    (folder / "diagnosis").mkdir()
    (folder / "diagnosis" / "gates.json").write_text(json.dumps(gates_record()))
    (folder / "tokens.json").write_text(json.dumps(traces()))
    (folder / "adapters" / "sft" / "run" / "run.json").write_text(json.dumps({"stage": "sft"}))
    log = [{"step": 1, "nll": 2.0, "topk_entropy": 0.3}, {"step": 2, "nll": 1.5}, {"step": 2, "train_runtime": 90.0}]
    lines = "".join(json.dumps(record) + "\n" for record in log)
    (folder / "adapters" / "sft" / "run" / "metrics.jsonl").write_text(lines + '{"step": 3, "nl')
    gate = {
        "gate": {"lower": -6.0, "upper": 3.0},
        "base": {"id": "org/base"},
        "adapter": {"sha256": "a" * 64},
        "parity": {"initial": 1e-5},
        "selection": {"range": [-6, 3], "reason": "taken by the user"},
        "training": {
            "entropy_before": 0.3,
            "entropy_after": 0.1,
            "steps": 3,
            "training_seconds": 9.0,
            "heldout": {"rows": 64, "entropy_before": 0.35, "entropy_after": 0.15},
            "gates": gates_record()["all"],
        },
    }
    (folder / "gated" / "gate_config.json").write_text(json.dumps(gate))
    return folder


def test_a_folder_becomes_one_file(run, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert text.index("Use the gates") < text.index("<svg ") < text.index("range [-6, 3]: taken by the user")
    assert "org/base" in text
    assert "0.350 to 0.150" in text, "of held-out examples"
    assert "<td>1 min 30 s</td>" in text, "of the training loop"
    assert "run/adapters/sft" in text
    assert "<td>d</td>" in text, "a data set without a revision"
    assert 'id="traces"' in text
    assert "opens in any browser" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run"]


def test_the_evaluations_of_a_choice_are_no_test_of_it(tmp_path):
    folder, told = tmp_path / "gated" / "run", json.dumps(evaluation_record(warnings=()))
    for name in ("dev", "retention"):
        (folder / name).mkdir(parents=True)
        (folder / name / "results.json").write_text(told)
    (folder / "selection.json").write_text(json.dumps(selection_record()))
    sources = all_sources([str(tmp_path)])
    assert {source.kind for source in sources} == {"selection", "dev", "retention"}
    text = page(sources, "r")
    assert ">Dev set (the choice was made on these)" in text
    assert ">Retention set (the choice was made on these)" in text
    assert "gated is significantly better" not in text, "neither in the banner nor among the findings"
    assert [source.kind for source in all_sources([str(folder / "dev")])] == ["dev"]
    (folder / "selection.json").unlink()
    assert {source.kind for source in all_sources([str(tmp_path)])} == {"evaluation"}
    (folder / "run.json").write_text("{}")  # the choice was killed before it was made, or this is a check-up
    assert {source.kind for source in all_sources([str(tmp_path)])} == {"dev", "retention"}


def test_the_gates_of_a_quickstart_have_their_curves(tmp_path):
    trial = tmp_path / "quickstart" / "gated" / "run" / "trials" / "entropy_-6_3_seed0"
    training(trial, {"step": 1, "topk_entropy": 0.3})
    assert [source.kind for source in find_sources(tmp_path / "quickstart")] == ["training"]


def test_a_choice_that_was_stopped_is_not_finished(tmp_path):
    folder = tmp_path / "gated" / "run"
    (folder / "dev").mkdir(parents=True)
    (folder / "dev" / "results.json").write_text(json.dumps(evaluation_record(warnings=())))
    (folder / "run.json").write_text("{}")
    found = banner_of(all_sources([str(tmp_path)]))
    assert found.advice == "The choice or check-up is not finished: nothing is recommended yet"
    assert "--resume" in found.more[0]
    (folder / "selection.json").write_text(json.dumps(selection_record()))
    assert banner_of(all_sources([str(folder / "dev")])).advice.startswith("No scores"), "its record lies beside it"


def test_a_choice_that_was_stopped_while_its_gates_trained_is_not_finished(tmp_path):
    folder = tmp_path / "gated" / "run"
    training(folder / "trials" / "entropy_0_1_seed0", {"step": 1, "nll": 2.0})
    gated = [str(tmp_path / "gated")]
    assert banner_of(all_sources(gated)).advice.startswith("No scores"), "nothing tells of a choice"
    (folder / "run.json").write_text("{}")
    for places in (gated, [str(folder / "trials" / "entropy_0_1_seed0")]):
        found = banner_of(all_sources(places))
        assert found.advice == "The choice or check-up is not finished: nothing is recommended yet"
        assert found.more == [
            "The same command with --resume goes on with it; nothing was scored yet, only gates were trained."
        ]
    (folder / "selection.json").write_text(json.dumps(selection_record()))
    assert banner_of(all_sources([str(folder / "trials")])).advice.startswith("No scores")


def test_of_several_records_of_a_kind_the_sentences_carry_the_names(tmp_path):
    worse = evaluation_record(row("adapter", 0.3), row("gated", 0.2, verdict="worse"))
    for file, record in (("results-math_verify.json", worse), ("results.json", evaluation_record())):
        (tmp_path / file).write_text(json.dumps(record))
    for name in ("first", "gates"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "gates.json").write_text(json.dumps(gates_record()))
    sources = find_sources(tmp_path, "r")
    assert [source.name for source in sources[:2]] == ["r", "r (results-math_verify)"], "results.json is the first"
    said = statements(sources)
    assert any(line.startswith("r: On t, T=1, gated is significantly better") for line in said)
    assert any(line.startswith("r (results-math_verify): On t, T=1, gated is significantly worse") for line in said)
    assert [line.split(":")[0] for line in said[-2:]] == ["r/first", "r/gates"]
    found = banner_of(sources)
    assert found.advice.startswith("Use the gates")
    assert found.more[-1] == "This goes by results.json of r, the first of 2; all are below."
    (tmp_path / "selection.json").write_text(json.dumps(selection_record()))
    assert banner_of(find_sources(tmp_path, "r")).more[-1].startswith("r: On t, T=1, gated is significantly better")
    alone = statements([source for source in sources if source.name == "r"])
    assert alone[0].startswith("On t")


def test_two_choices_are_told_apart_in_the_banner(tmp_path):
    other = {**selection_record(), "rule": "another"}
    for name, record in (("a", selection_record()), ("b", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "selection.json").write_text(json.dumps(record))
    found = banner_of(all_sources([str(tmp_path / "a"), str(tmp_path / "b")]))
    assert found.more[-1] == "This goes by selection.json of a, the first of 2; all are below."


def test_the_range_of_gates_that_are_not_recommended_is_not_named(run):
    path = run / "gated" / "gate_config.json"
    record, selection = json.loads(path.read_text()), selection_record()

    def said(label, weights):
        found = {**selection["recommendation"], "label": label, "weights": weights}
        path.write_text(json.dumps({**record, "selection": {**selection, "recommendation": found}}))
        return next(line for line in statements(find_sources(run)) if "recommended" in line)

    assert said("gated [-6,3] greedy", "gates") == "run/gated: range [-6, 3]; recommended: gated [-6,3] greedy."
    assert said("adapter greedy", "adapter") == "run/gated: gates are off; recommended: adapter greedy."
    assert said("base greedy", "base") == "run/gated: λ is the same at every token; recommended: base greedy."


def test_an_existing_report_is_not_overwritten_unasked(run, tmp_path, capsys):
    out = tmp_path / "report.html"
    out.write_text("mine")
    assert main(["report", str(run), "--out", str(out)]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main(["report", str(run), "--out", str(out), "--overwrite"]) == 0
    assert out.read_text() != "mine"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "needs at least one RUN"),
        (["absent"], "does not exist"),
        (["empty"], "holds nothing that a report can show"),
        (["broken"], "is not JSON"),
        (["empty", "--out", "a.pdf"], "HTML"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, capsys, arguments, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "results.json").write_text("{")
    assert main(["report", *arguments]) in (1, 2)
    assert told in capsys.readouterr().err
    assert not list(tmp_path.glob("*.html"))


def training(folder, *log):
    (folder / "run").mkdir(parents=True)
    (folder / "run" / "run.json").write_text(json.dumps({"stage": "sft"}))
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
    return str(folder)


def test_runs_of_one_name_are_told_apart(tmp_path):
    places = [
        training(tmp_path / seed / "gated", {"step": 1, "nll": value}) for seed, value in (("s0", 3.25), ("s1", 7.5))
    ]
    names = [source.name for source in all_sources([*places, places[0] + "/"])]
    assert names == ["s0/gated", "s1/gated"], "each once, whatever way it is written"
    assert main(["report", *places, "--out", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(shown in text for shown in ("s0/gated", "s1/gated", ">3.25<", ">7.5<"))
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        files.append(tmp_path / name / "results.json")
        files[-1].write_text(json.dumps(evaluation_record()))
    assert [source.name for source in all_sources(list(map(str, files)))] == ["a/results", "b/results"]
    assert [source.name for source in all_sources([places[0], str(files[0])])] == ["gated", "results"]


def test_a_run_that_diverged_is_shown(tmp_path):
    place = training(tmp_path / "r", {"step": 1, "nll": 2.0}, {"step": 2, "nll": float("nan")}, {"step": 3, "nll": 4.0})
    assert main(["report", place, "--out", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<td>nan</td>" in text, "the table says so"
    assert all("nan" not in chart for chart in re.findall(r"<svg .*?</svg>", text, re.DOTALL))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("gate_config.json", {}),
        ("gate_config.json", []),
        ("results.json", {"results": [], "tasks": [], "suites": []}),
        ("selection.json", {"variants": [{"label": "adapter"}], "recommendation": {}}),
        ("gates.json", {"kind": "realised gates", "conclusion": ["x"]}),
        ("gates.json", {"kind": "of another version", "conclusion": ["x"]}),
        ("tokens.json", {}),
        ("metrics.jsonl", {"step": 1, "nll": "low"}),
    ],
    ids=str,
)
def test_a_record_that_lacks_something_is_named(tmp_path, capsys, file, content):
    (tmp_path / file).write_text(json.dumps(content))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "report.html")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{tmp_path / file}: not the" in said
    assert "fault of loragate" not in said


def test_figures_come_as_svg_and_pdf(run, tmp_path, capsys):
    folder = tmp_path / "figures"
    assert main(["report", str(run), "--figures", str(folder)]) == 0
    names = sorted(path.stem for path in folder.glob("*.svg"))
    assert names == ["gates_run_diagnosis", "scores_run_t", "training_run_adapters_sft"]
    assert sorted(path.stem for path in folder.glob("*.pdf")) == names
    assert all(path.read_bytes().startswith(b"%PDF") for path in folder.glob("*.pdf"))
    assert "scores_run_t.svg" in capsys.readouterr().out
    (folder / "scores_run_t.svg").write_text("mine")
    assert main(["report", str(run), "--figures", str(folder)]) == 2
    assert "exists; choose another folder, or give --overwrite" in " ".join(capsys.readouterr().err.split())
    assert (folder / "scores_run_t.svg").read_text() == "mine"
    assert main(["report", str(run), "--figures", str(folder), "--overwrite"]) == 0
