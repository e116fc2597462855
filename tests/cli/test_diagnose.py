"""`loragate diagnose` on small local files: every look writes its record and says something; bad input is answered."""

import base64
import errno
import json
import shutil

import pytest
from command_kit import words_task

from loragate import records
from loragate.analysis.alignment import AlignmentRecord
from loragate.analysis.delta_entropy import EntropyRecord
from loragate.analysis.gates import GatesRecord, InterventionsRecord
from loragate.cli.main import main
from loragate.errors import LoragateError
from loragate.evaluation.evaluate import evaluate
from loragate.evaluation.prepared import prepare
from loragate.evaluation.results import read_record
from loragate.evaluation.settings import TaskSettings
from loragate.evaluation.tasks import load_questions, load_task
from loragate.evaluation.variants import ModelVariant
from loragate.files import describe_os_error
from loragate.models import open_model, resolve
from tiny import tiny_rows, tiny_tokenizer, write_rows


@pytest.fixture(scope="module")
def place(saved, tmp_path_factory):
    """base/, adapter/ and gated/, a task and rows."""
    root = tmp_path_factory.mktemp("diagnose")
    for name in ("base", "adapter", "gated"):
        (root / name).symlink_to(saved / name)
    asked = [{"question": f"w{index} w{index + 1}", "answer": f"w{index}"} for index in range(4)]
    write_rows(root / "words.jsonl", asked)
    (root / "words.yaml").write_text(words_task("question", tokens=4))
    write_rows(root / "rows.jsonl", tiny_rows(5))
    return root


def read(kind, path):
    return records.read(kind, path, "run it again")


def diagnose(place, what, out, *more, model="gated"):
    return main(["diagnose", what, "--model", str(place / model), "--out", str(out), *map(str, more)])


def test_entropy_and_interventions_by_its_sign(place, tmp_path, capsys):
    out = tmp_path / "entropy"
    asked = ("--rows", place / "rows.jsonl", "--tasks", place / "words.yaml")
    assert diagnose(place, "entropy", out, *asked, "--suppress", "negative,positive,negative") == 0
    record = read(EntropyRecord, out / "entropy.json")
    assert record.rows == 5
    assert [row.name for row in record.interventions] == ["adapter negative", "adapter positive"]
    assert all(0 <= row.suppressed <= 1 for row in record.interventions)
    assert all(row.adjusted_p >= row.difference.p for row in record.interventions)
    assert (out / "samples" / "adapter-negative" / "words.jsonl").is_file()
    scored = [row.label for row in read_record(out / "results.json").results]
    assert scored == ["adapter", "base", "gated", "adapter negative", "adapter positive"]
    printed = capsys.readouterr().out
    assert record.conclusion[0] in " ".join(printed.split())
    assert diagnose(place, "entropy", tmp_path / "two", *asked, "--temperature", "1,0") == 2
    assert "--temperature 1,0: a diagnosis draws its answers at one temperature" in " ".join(
        capsys.readouterr().err.split()
    )
    assert diagnose(place, "entropy", out, *asked, "--resume") == 0
    assert read(EntropyRecord, out / "entropy.json").interventions == record.interventions


def test_rows_without_a_response_are_not_counted_as_read(place, tmp_path):
    rows = [
        {"prompt": "w1", "completion": "w2 w3"},
        {"prompt": "w1", "completion": ""},
        {"prompt": "w4", "completion": "w5"},
    ]
    write_rows(tmp_path / "some.jsonl", rows)
    assert diagnose(place, "entropy", tmp_path / "entropy", "--rows", tmp_path / "some.jsonl", "--max-rows", 3) == 0
    record = read(EntropyRecord, tmp_path / "entropy" / "entropy.json")
    assert (record.rows, record.about.source) == (2, f"2 of the first 3 rows of {tmp_path / 'some.jsonl'}")


def test_a_full_disk_costs_the_file_and_not_the_measurement(place, tmp_path, capsys, monkeypatch):
    def full(path, value):
        raise LoragateError(describe_os_error(path, OSError(errno.ENOSPC, "No space left on device")))

    monkeypatch.setattr("loragate.analysis.context.write_json", full)
    assert diagnose(place, "entropy", tmp_path / "entropy", "--rows", place / "rows.jsonl") == 1
    heard = capsys.readouterr()
    assert "entropy.json was not written: the disk is full" in " ".join(heard.err.split())
    assert "nats per token on average" in " ".join(heard.out.split())


def test_interventions_then_gates_and_alignment_on_their_answers(place, tmp_path, capsys):
    out = tmp_path / "interventions"
    assert diagnose(place, "interventions", out, "--tasks", place / "words.yaml") == 0
    record = read(InterventionsRecord, out / "interventions.json")
    assert [row.name for row in record.rows] == ["adapter", "base", "gated", "noreverse", "noextrapolate", "unit"]
    assert all(row.difference is not None for row in record.rows if row.name != "gated")
    assert diagnose(place, "gates", tmp_path / "gates", "--run", out, "--tasks", "words") == 0
    assert diagnose(place, "gates", tmp_path / "y", "--run", out, "--tasks", "word") == 2
    assert "the run holds words; did you mean 'words'?" in " ".join(capsys.readouterr().err.split())
    assert diagnose(place, "gates", tmp_path / "first", "--run", out, "--limit", 1) == 0
    first = read(GatesRecord, tmp_path / "first" / "gates.json")
    gates = read(GatesRecord, tmp_path / "gates" / "gates.json")
    assert (first.answers, gates.answers) == (2, 8), "two answers to each of the first, or of all, questions"
    assert (gates.lower, gates.upper) == (-3.0, 2.0)
    assert "They reverse most in" in " ".join(gates.conclusion)
    assert diagnose(place, "alignment", tmp_path / "reward", "--value", "reward", "--run", out) == 0
    reward = read(AlignmentRecord, tmp_path / "reward" / "alignment.json")
    assert (reward.about.settings["value"], reward.rows) == ("reward", 4), "questions; each has two answers"


@pytest.mark.parametrize("what", ["tokens", "gates"])
def test_a_full_disk_leaves_what_was_shown(place, tmp_path, capsys, monkeypatch, what):
    out = tmp_path / "run"
    assert diagnose(place, "interventions", out, "--tasks", place / "words.yaml", "--interventions", "unit") == 0
    capsys.readouterr()

    def full(path, value):
        raise LoragateError(describe_os_error(path, OSError(errno.ENOSPC, "No space left on device")))

    monkeypatch.setattr("loragate.analysis.context.write_json", full)
    assert diagnose(place, what, tmp_path / "look", "--run", out, "--limit", 2) == 1
    shown = capsys.readouterr()
    told = " ".join(shown.err.split())
    assert f"{what}.json was not written: the disk is full" in told
    assert "Of this look the lines above are all that was kept" in told
    if what == "tokens":
        lines = [line for line in shown.out.splitlines() if line.startswith("words/")]
        assert [line.split(":")[0] for line in lines] == ["words/0", "words/1"]
        assert all(f"{of} " in line for line in lines for of in ("base", "adapter", "gated"))
    else:
        assert "λ" in shown.out


def test_one_cell_of_an_evaluated_sweep_is_read_by_the_folder_of_its_gates(place, tmp_path, capsys):
    task, settings = load_task(place / "words.yaml"), TaskSettings(limit=2, samples=1)
    tokenizer = tiny_tokenizer()
    tasks = [prepare(task, load_questions(task, seed=0, limit=2), tokenizer, settings)]
    cells = [ModelVariant("gated", f"[-3,2], seed {seed}", gates=str(tmp_path / f"cell-{seed}")) for seed in (0, 1)]
    for cell in cells:
        shutil.copytree(place / "gated", cell.gates)
    evaluate(
        open_model(resolve(str(place / "adapter"))).model,
        tokenizer,
        tasks,
        [ModelVariant("adapter"), *cells],
        tmp_path / "grid",
    )
    asked = ("--run", tmp_path / "grid")
    assert diagnose(place, "gates", tmp_path / "none", *asked) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "holds answers of adapter, gated [-3,2], seed 0, gated [-3,2], seed 1, and none of gated;" in told
    assert "or a cell of the sweep, --model" in told
    assert diagnose(tmp_path, "gates", tmp_path / "one", *asked, model="cell-1") == 0
    record = read(GatesRecord, tmp_path / "one" / "gates.json")
    assert record.about.source.startswith("answers of the gated [-3,2], seed 1 model to words stored in")


def test_tokens_of_stored_answers(place, tmp_path):
    out = tmp_path / "run"
    assert diagnose(place, "interventions", out, "--tasks", place / "words.yaml", "--interventions", "unit") == 0
    assert diagnose(place, "tokens", tmp_path / "tokens", "--run", out, "--limit", 2) == 0
    record = json.loads((tmp_path / "tokens" / "tokens.json").read_text())
    assert [question["id"] for question in record["questions"]] == ["words/0", "words/1"]
    for index, question in enumerate(record["questions"]):
        assert [answer["variant"] for answer in question["answers"]] == ["base", "adapter", "gated"]
        for answer in question["answers"]:
            stored = (out / "samples" / answer["variant"] / "words.jsonl").read_text().splitlines()
            first = next(row for row in map(json.loads, stored) if (row["question"], row["sample"]) == (index, 0))
            assert len(answer["tokens"]) == len(first["token_ids"])
            assert answer["verdict"]["correct"] in (True, False)
            assert len(base64.b64decode(answer["gates"])) == len(record["modules"]) * len(answer["tokens"])
    assert main(["report", str(out), str(tmp_path / "tokens"), "--out", str(tmp_path / "report.html")]) == 0
    assert 'id="traces"' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("recorded", "asked", "used"), [(0, (), 160), (20, (), 20), (20, ("--k", 0), 160)])
def test_alignment_takes_the_support_of_the_training(place, tmp_path, recorded, asked, used):
    shutil.copytree(place / "gated", tmp_path / "gated")
    config = json.loads((tmp_path / "gated" / "gate_config.json").read_text())
    (tmp_path / "gated" / "gate_config.json").write_text(json.dumps({**config, "k": recorded}))
    rows = ["--rows", place / "rows.jsonl", "--max-rows", 2, *asked]
    assert diagnose(tmp_path, "alignment", tmp_path / "a", *rows) == 0
    assert read(AlignmentRecord, tmp_path / "a" / "alignment.json").k == used


def test_alignment_with_a_reference(place, tmp_path, capsys, monkeypatch):
    """--base says where the adapter's base is; it must not turn a whole model as reference into an adapter."""
    monkeypatch.setenv("COLUMNS", "120")
    more = ["--rows", place / "rows.jsonl", "--max-rows", 2, "--base", place / "base", "--reference", place / "base"]
    assert diagnose(place, "alignment", tmp_path / "b", *more) == 0
    whole = read(AlignmentRecord, tmp_path / "b" / "alignment.json")
    assert whole.value_of == f"log-probability under {place / 'base'}"
    rows = ["--rows", place / "rows.jsonl", "--reference", place / "adapter"]
    assert diagnose(place, "alignment", tmp_path / "a", *rows) == 0
    record = read(AlignmentRecord, tmp_path / "a" / "alignment.json")
    assert len(record.modules) == 14
    assert record.all.total.cosine is not None
    assert record.k == 100
    shown = capsys.readouterr().out
    assert f"{record.all.total.angle:.0f}°" in shown
    assert record.modules[0].name not in shown, "modules are in the record and in the report"


def test_repeated_rows_are_said_and_give_no_interval(place, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", tiny_rows(1) * 3)
    for what, kind in (("entropy", EntropyRecord), ("alignment", AlignmentRecord)):
        assert diagnose(place, what, tmp_path / what, "--rows", rows) == 0
        said = "of 3 rows 2 repeat another; intervals are over the 1 that differ"
        assert said in " ".join(capsys.readouterr().out.split())
        record = read(kind, tmp_path / what / f"{what}.json")
        shown = record.classes[0].delta if what == "entropy" else record.all.total.cosine
        assert (shown.low, shown.high) == (None, None)
    assert (record.rows, record.all.total.verdict) == (1, "not shown")


WITH_ROWS = ("--rows", "{place}/rows.jsonl")


@pytest.mark.parametrize(
    ("what", "model", "more", "words"),
    [
        ("", "gated", (), "needs WHAT"),
        ("entrpy", "gated", (), 'Did you mean "entropy"?'),
        ("gates", "gated", ("--value", "reward"), "--value has no effect with what gates, only with alignment"),
        ("gates", "gated", (), "give --run FOLDER"),
        ("gates", "adapter", ("--run", "r"), "plain adapter; this look needs gates"),
        ("gates", "gated", ("--run", "r", "--suite", "math"), "--suite has no effect with what gates"),
        ("gates", "gated", ("--run", "r", "--resume"), "no task was named"),
        ("tokens", "gated", (), "give --run FOLDER"),
        ("entropy", "gated", (), "needs --rows"),
        ("entropy", "base", WITH_ROWS, "is a base"),
        ("entropy", "gated", (*WITH_ROWS, "--suppress", "up"), "expected one of negative, positive"),
        ("interventions", "gated", (), "needs --suite or --tasks"),
        ("interventions", "gated", ("--suite", "retention"), "lm-evaluation-harness"),
        ("alignment", "gated", ("--rows", "r", "--value", "reward"), "graded answers, not --rows"),
        ("alignment", "gated", (), "give --run FOLDER"),
        ("alignment", "gated", (*WITH_ROWS, "--run", "r"), "leave out one of them"),
    ],
)
def test_what_is_refused(place, tmp_path, capsys, what, model, more, words):
    more = [text.format(place=place) for text in more]
    looks = [what] if what else []
    assert main(["diagnose", *looks, "--model", str(place / model), "--out", str(tmp_path / "x"), *more]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_an_output_folder_is_needed_and_kept(place, tmp_path, capsys):
    assert main(["diagnose", "gates", "--model", str(place / "gated")]) == 2
    assert "needs --out" in capsys.readouterr().err
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine").write_text("kept")
    assert diagnose(place, "entropy", tmp_path / "x", "--rows", place / "rows.jsonl") == 2
    assert "is not empty" in capsys.readouterr().err
