"""The study on the real model: its design, its rows, its tables on a small record, and that work goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from loragate.cli.main import main as command
from loragate.evaluation import grade_math
from tiny import scripts_of, write_base

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "real"
HEATS = ("1", "0.6", "0.3", "0")


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    with scripts_of(FOLDER, ROOT / "scripts", ROOT / "examples" / "word_problems") as load:
        yield SimpleNamespace(**{name: load(name) for name in ("measure", "report", "kinds", "deal_rows")})


@pytest.fixture(scope="module")
def measure(scripts) -> ModuleType:
    return scripts.measure


@pytest.fixture(scope="module")
def design(measure):
    return measure.read_design()


def test_every_method_and_cell_of_the_design_can_be_run(measure, design, capsys):
    for name, spec in design["methods"].items():
        kind = next((kind for kind in measure.DONE if kind in spec), None)
        assert kind or name == "base" or {"constant", "random"} & set(spec)
        for other in (spec.get("from"), spec.get("random")):
            assert other is None or list(design["methods"]).index(other) < list(design["methods"]).index(name)
        if kind:
            options = {**design["adapter" if kind == "sft" else "gates"], **spec[kind], "max_length": 512}
            words = [kind, "--data=rows.jsonl", "--out=out", "--print-config"]
            words.append("--model=base" if kind == "sft" else "--adapter=adapter")
            assert command([*words, *filter(None, (measure.as_flag(*one) for one in options.items()))]) == 0
            objective = spec[kind].get("objective", "sft" if kind == "sft" else "entropy")
            assert f"objective: {objective}" in capsys.readouterr().out
    assert set(design["short"]) | set(design["automatic"]) <= set(design["methods"])
    assert {cell["situation"] for cell in design["cells"]} == set(design["situations"])
    whole = [cell for cell in design["cells"] if cell["list"] == "all"]
    assert len({cell["situation"] for cell in whole}) == 2
    assert len(whole) == 6


def test_no_story_is_both_asked_and_trained_on(scripts, measure):
    example = scripts.deal_rows.example

    def words(name):
        lines = (measure.QUESTIONS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        return [example.content(json.loads(line)["prompt"].replace(example.ASK, "")) for line in lines]

    rows = measure.demonstrations({"style": "short", "rows": 480}, 0)
    trained = [
        example.content(row["prompt"].replace(example.ASK, ""))
        for row in [*rows["own"], *rows["unseen"]]
        if row["id"].startswith("svamp/")
    ]
    for one, other in ((words("test"), trained), (words("dev"), trained), (words("test"), words("dev"))):
        assert max(len(a & b) / len(a | b) for a in one for b in other) < example.SAME_STORY
    looked_at = (ROOT / "examples" / "word_problems" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    asked = (measure.QUESTIONS / "test.jsonl").read_text(encoding="utf-8")
    assert not [line for line in looked_at[: scripts.deal_rows.KNOWN] if f'"{json.loads(line)["id"]}"' in asked]


@pytest.mark.parametrize("style", ["short", "told", "worked"])
def test_rows_are_right_but_for_the_share_that_is_to_be_wrong(measure, style):
    rows = measure.demonstrations({"style": style, "rows": 60, "wrong": 0.2}, 1)
    assert not {row["id"] for row in rows["own"]} & {row["id"] for row in rows["unseen"]}
    right = {name: [grade_math(row["response"], row["answer"]).correct for row in half] for name, half in rows.items()}
    assert all(right["unseen"])
    # another operation may give the same: 2 + 2 and 2 · 2
    assert 12 >= right["own"].count(False) >= 10
    again = measure.demonstrations({"style": style, "rows": 60, "wrong": 0.2}, 2)
    assert {row["id"] for row in again["own"]} != {row["id"] for row in rows["own"]}


@pytest.mark.parametrize("style", ["short", "worked"])
def test_the_rest_of_the_pool_is_dealt_to_nobody(measure, style):
    left = {row["id"] for row in measure.left_out({"style": style}, 1)}
    rows = measure.demonstrations({"style": style, "rows": 480}, 1)
    dealt = {row["id"] for half in rows.values() for row in half}
    assert len(dealt) == 960
    assert len(left) == len(measure.read_pool()) - 960
    assert not left & dealt


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        ("8 - 3", "We subtract 3 from 8."),
        ("700 + (250 * 3)", "First we multiply 250 by 3. Then we add the result to 700."),
        ("(12 + 4) / 2", "First we add 4 to 12. Then we divide the result by 2."),
        ("90 - (12 / 1.5)", "First we divide 12 by 1.5. Then we subtract the result from 90."),
    ],
)
def test_a_formula_is_told_in_words(measure, formula, words):
    assert measure.told(formula) == words


def line(method: str, what: str, correct: np.ndarray) -> dict:
    return {
        "method": method,
        "what": what,
        "samples": correct.shape[1],
        "correct": "".join(str(int(one)) for one in correct.ravel()),
        "texts": [[f"The answer is \\boxed{{{'2 * (3 + 1)' if one else '8 - 3'}}}."] for one in correct[:, 0]],
    }


def record(**methods: dict[str, list[list[int]]]) -> dict:
    return {
        (method, f"test T={heat}"): line(method, f"test T={heat}", np.array(verdicts))
        for method, tables in methods.items()
        for heat, verdicts in tables.items()
    }


def test_a_temperature_is_picked_by_the_other_half(scripts, design):
    # greedy is best on the first half, T = 1 on the second: each half is scored at the other's
    hot, greedy, never = [[0, 0], [0, 0], [1, 1], [1, 0]], [[1], [1], [0], [0]], [[0]] * 4
    lines = record(LoRA={"1": hot, "0.6": never, "0.3": never, "0": greedy})
    asked = scripts.report.heats(design)
    assert scripts.report.at_its_best(lines, "LoRA", asked).tolist() == [0, 0, 0, 0]
    assert scripts.report.at_its_best(record(LoRA={"1": hot}), "LoRA", asked) is None


def test_the_table_counts_fixes_and_breaks_and_says_what_was_not_run(scripts, design):
    rng = np.random.default_rng(0)
    own = {heat: rng.integers(0, 2, (40, 1)).tolist() for heat in HEATS}
    other = dict(own, **{"0": [[1 - own["0"][0][0]], *own["0"][1:]]})
    lines = record(LoRA=own, base={"0": own["0"]}, **{"gates [0,1]": other})
    lines["gates [0,1]", "training"] = {"gates": {"below_zero": 0.25, "above_one": 0.0}}
    lines["base", "retention"] = {"log_likelihoods": [-2.0, -4.0], "tokens": [2, 4]}
    text = scripts.report.tables({"clean-0": lines}, design)
    rows = {
        parts[1].strip(): [part.strip() for part in parts]
        for row in text.splitlines()
        if len(parts := row.split("|")) > 8
    }
    assert {len(parts) for parts in rows.values()} == {len(scripts.report.HEAD) + 2}
    fixed = own["0"][0][0] == 0
    assert rows["gates [0,1]"][7] == ("1 / 0" if fixed else "0 / 1")
    assert rows["base"][2:7].count("not run") == 4
    right = sum(row[0] for row in own["0"])  # in this record the right answers are the longer ones
    assert rows["base"][7:11] == ["0 / 0", f"{100 * right / 40:.0f} / 0", "", "2.72"]
    assert rows["LoRA"][8] == rows["base"][8]
    assert rows["gates [0,1]"][9] == "25 / 0"
    assert "to" in rows["gates [0,1]"][6]
    assert "DFT" not in rows
    assert "Not begun: noisy-0" in text


def test_over_the_cells_a_question_counts_once(scripts, design):
    wrong, right = [[0]] * 4, [[1]] * 4
    mended = [[1], [0], [0], [0]]
    cells = {
        "clean-0": record(LoRA=dict.fromkeys(HEATS, wrong), base=dict.fromkeys(HEATS, mended)),
        "noisy-0": record(LoRA=dict.fromkeys(HEATS, right), base=dict.fromkeys(HEATS, mended)),
        "few-0": record(LoRA=dict.fromkeys(HEATS, wrong), base={"0": right}),  # not whole
    }
    *_, row = scripts.report.over_cells(cells, design).splitlines()
    parts = [part.strip() for part in row.split("|")]
    assert parts[1:3] == ["base", "2"]
    # by question: (1 + 0) / 2, then (0 - 1) / 2 three times
    assert {part.split()[0] for part in parts[3:8]} == {"-25.0"}
    assert parts[8] == "1 / 3"
    assert scripts.report.over_cells({"clean-0": cells["clean-0"]}, design) == ""


def test_later_seeds_have_a_table_of_their_own(scripts, design):
    answers = [[1], [0], [0], [0]]
    wrong, mended = (dict.fromkeys(HEATS, verdicts) for verdicts in ([[0]] * 4, answers))
    first = {"clean-0": record(LoRA=wrong, base=wrong), "noisy-0": record(LoRA=wrong, base=wrong)}
    later = {name: record(LoRA=wrong, base=mended) for name in ("clean-1", "noisy-1")}
    assert "later seeds" not in scripts.report.tables(first, design)
    _, whole, alone = scripts.report.tables(first | later, design).split("**Over the cells")
    assert "| base | 4 | +12.5 " in whole
    assert "| base | 2 | +25.0 " in alone


def test_scores_are_held_against_the_forms_of_answers(scripts):
    # the fake records' right answers are longer ones, so score and share are one
    cells = {f"clean-{seed}": record(LoRA={"0": [[1]] * seed + [[0]] * (4 - seed)}) for seed in range(3)}
    said = scripts.report.agreement_of_forms(cells)
    assert said.startswith("Over 3 sets of greedy answers")
    assert "correlate at 1.00" in said
    assert scripts.report.agreement_of_forms({"clean-0": cells["clean-0"]}) == ""


def test_the_rest_of_the_pool_has_a_table_where_it_was_asked(scripts, design):
    right, left = np.array([[1], [1], [0], [0]]), np.array([[1], [0], [0], [1]])
    lines = {(name, "rest T=0"): line(name, "rest T=0", one) for name, one in (("LoRA", right), ("DFT", left))}
    assert "rest of the pool" in scripts.report.cell_part("clean-1", lines, design)
    *_, adapter, dft = scripts.report.rest_part(lines, design).splitlines()
    assert adapter.startswith("| LoRA | 50.0 (")
    assert adapter.endswith(" |  |  | 50 / 0 |")
    assert "| +0.0 (" in dft
    assert dft.endswith(" | 1 / 1 | 50 / 0 |")
    only = {"texts": [[r"\boxed{1 + 2 - 3}"]], "correct": "1", "samples": 1}
    assert scripts.report.longer_and_right(only) == "100 / –"
    assert scripts.report.rest_part(record(LoRA={"0": [[1]]}), design) == ""


def test_cells_that_ask_the_same_questions_stand_side_by_side_and_are_weighed_as_their_rows_are(scripts, design):
    own, all_of_them = np.array([[1], [1], [0], [0]]), np.array([[1], [1], [1], [1]])
    asked = [("LoRA", own, own), ("DFT", all_of_them, own), ("EAFT", own, all_of_them)]
    cells = {cell: {} for cell in ("clean-1", "noisy-1", "clean-0", "clean-2")}
    for cell, lines in cells.items():
        for name, test, rest in asked[: {"clean-1": 3, "noisy-1": 2, "clean-0": 1}.get(cell, 0)]:
            lines |= {(name, what): line(name, what, one) for what, one in (("test T=0", test), ("rest T=0", rest))}
    several, alone = scripts.report.both_kinds(cells, design).split("\n\n")
    head, _, adapter, dft, eaft = (row[2:-2].split(" | ") for row in several.splitlines())
    assert head[1] == "clean-1: right, %: test / rest"
    assert head[4] == "noisy-1: right, %: test / rest"
    assert adapter == ["adapter", *["50.0 / 50.0", "50 / 50", ""] * 2, ""]
    one, two = (scripts.kinds.share_of_longer_rows(cell) for cell in ("clean-1", "noisy-1"))
    assert dft[1:3] == ["100.0 / 50.0", "100 / 50"]
    assert dft[3].startswith(f"{50 * (1 - one):+.1f} (")
    assert dft[6].startswith(f"{50 * (1 - two):+.1f} (")
    assert dft[7].startswith(f"{50 * (1 - (one + two) / 2):+.1f} (")
    assert eaft[3].startswith(f"{50 * one:+.1f} (")
    assert eaft[4:] == ["not run", "", "", ""]
    assert alone.splitlines()[-1] == "| adapter | 50.0 / 50.0 | 50 / 50 |  |"
    assert scripts.report.both_kinds({"clean-2": {}}, design) == "Not asked yet."


def test_a_method_is_marked_by_its_test_answers_and_held_against_both_losses(scripts, design):
    # in these records right answers are longer ones: DFT goes to one form and loses the rest, LoRA continued goes nowhere
    own, gone = np.array([[1], [1], [0], [0]]), np.array([[0], [0], [0], [0]])
    lines = {}
    for name, test, rest in (("LoRA", own, own), ("DFT", gone, gone), ("LoRA continued", own, gone)):
        lines |= {(name, what): line(name, what, one) for what, one in (("test T=0", test), ("rest T=0", rest))}
    text = scripts.report.marked({"clean-1": lines, "few-0": record(LoRA={"0": own})}, design)
    assert "| clean-1: DFT | 50 | 1.0 / 2.0 | marked | -50.0 | -50.0 |" in text
    assert "| clean-1: LoRA continued | 0 | 2.0 / 2.0 |  | +0.0 | -50.0 |" in text
    assert "| clean-1: base" not in scripts.report.marked(
        {"clean-1": lines | {("base", what): lines["DFT", what] for what in ("test T=0", "rest T=0")}}, design
    )
    assert text.endswith("Of 1 that are marked 1 lose 5 points or more on one of the two kinds, of 1 that are not 1.")
    assert scripts.report.marked({"few-0": record(LoRA={"0": own})}, design) == ""


def test_a_probe_of_two_forms_lacks_kinds_of_rows_with_twenty(scripts):
    asked = {("LoRA", "dev T=0"): line("LoRA", "dev T=0", np.array([[place % 2] for place in range(40)]))}
    *_, row, _, said = scripts.report.narrow({"clean-0": asked, "few-0": {}}).splitlines()
    assert row.startswith("| clean-0 | 2.0 / 1")
    assert row.endswith(" | told |  |  |")
    assert said == "Of the development questions it is told in 1 of 1 cells."
    assert scripts.report.narrow({"few-0": {}}) == ""


def test_development_questions_are_for_what_is_chosen_by_them(measure, design):
    asked = {name: {one.split for one in measure.asked_of(design, name)} for name in design["methods"]}
    assert {name for name, splits in asked.items() if "dev" in splits} == {
        "LoRA",
        "base",
        "λ=0.5",
        "λ=1.5",
        *design["automatic"],
    }
    assert all({"test", "retention"} <= splits for splits in asked.values())


def test_another_family_has_its_table_and_is_in_no_average(scripts, design):
    wrong, right = (dict.fromkeys(HEATS, verdicts) for verdicts in ([[0]] * 4, [[1]] * 4))
    cells = {"clean-0": record(LoRA=wrong, base=wrong), "gemma-0": record(LoRA=wrong, base=right)}
    text = scripts.report.tables(cells, design)
    assert "**gemma-0.**" in text
    assert "Over the cells" not in text
    assert "Over the cells" in scripts.report.tables({"clean-0": cells["clean-0"], "few-0": cells["gemma-0"]}, design)
    assert [scripts.measure.records_of(name, design, Path())[1].path.name for name in cells] == [
        "base-48.jsonl.gz",
        "gemma-48.jsonl.gz",
    ]


def test_the_automatic_choice_goes_by_the_development_answers(scripts, design):
    def tables(share):
        return {heat: [[int(place < share)] for place in range(10)] for heat in HEATS}

    lines = record(LoRA=tables(5), **{name: tables(3) for name in design["automatic"]})
    assert "not run" in scripts.report.automatic("clean-0", lines, design)
    for name in ("LoRA", *design["automatic"]):
        verdicts = np.array([[int(place < (9 if name == "gates [0,1]" else 4))] for place in range(10)])
        lines[name, "dev T=1"] = line(name, "dev T=1", verdicts)
    said = scripts.report.automatic("clean-0", lines, design)
    assert "former rule) [0,1] T=1, -20.0 points" in said
    assert "as recommended now, [0,1] T=1, -20.0 points" in said
    assert "16 settings" in said
    for name, right in (("LoRA", 20), ("gates [0,1]", 40)):  # a right answer has the longer formula
        lines[name, "dev T=0"] = line(name, "dev T=0", np.array([[int(place < right)] for place in range(40)]))
    said = scripts.report.automatic("clean-0", lines, design)
    assert "as recommended now, adapter" in said, "of one form instead of two, where the rows have twenty"


def test_the_pages_show_the_committed_records(scripts, design):
    records = scripts.report.read(scripts.measure.RECORDS, design)
    for path, text in scripts.report.pages(records, scripts.report.read(scripts.report.ON_GPU, design), design).items():
        assert path.read_text(encoding="utf-8") == text, path


def test_a_study_goes_on_where_it_was_stopped(measure, design, tmp_path, monkeypatch, capsys):
    design = {**design, "asked": {**design["asked"], "temperatures": {"0.6": 2, "0": 1}}}
    base = tmp_path / "tiny"
    write_base(base)
    trained, drawn = [], []

    def judge(task, questions, samples, grader):  # in this process, as starting graders takes seconds
        return [grade_math(sample.text, questions[sample.question].gold) for sample in samples]

    monkeypatch.setattr(measure, "judge", judge)
    run, answers = measure.run, measure.Cell.answers
    monkeypatch.setattr(measure, "run", lambda words: (trained.append(words[0]), run(words)))
    monkeypatch.setattr(
        measure.Cell, "answers", lambda cell, *rest: (drawn.append(rest[-1].what), answers(cell, *rest))[1]
    )

    def study(minutes, methods=("LoRA", "gates [0,1]", "λ=0.5"), everything=None):
        cell = measure.Cell(design, "few", 0, base, tmp_path / "out", "fp32", smoke=True)
        records = measure.records_of(cell.name, design, tmp_path / "records")
        measure.run_cell(cell, list(methods), records, measure.Budget(minutes), everything)
        return records

    with pytest.raises(measure.OutOfTime):
        study(0)
    assert (trained, drawn) == ([], [])
    killed = tmp_path / "out" / "few-0" / "LoRA" / "run"  # as a run that was killed at once leaves it
    killed.mkdir(parents=True)
    (killed / "config.yaml").write_text("stage: sft\n", encoding="utf-8")
    own, of_base = study(60)
    assert trained == ["sft", "calibrate"]
    assert len(drawn) == len(own.lines) - 5 == 12  # retention of three, training of two
    assert set(of_base.lines) == {("base", "retention")}
    texts = of_base.lines["base", "retention"]["texts"]
    assert len(texts) == len(own.lines["λ=0.5", "retention"]["tokens"]) == 4
    line = own.lines["LoRA", "test T=0.6"]
    assert [len(line["texts"]), len(line["texts"][0]), len(line["correct"])] == [4, 2, 8]
    before = own.path.read_bytes()
    study(60)
    assert (len(trained), len(drawn)) == (2, 12)
    assert own.path.read_bytes() == before
    # the rest of the pool, on top
    own, _ = study(60, ["LoRA"], measure.REST)
    assert (len(trained), drawn[12:]) == (2, ["rest T=0"])
    assert all(one.startswith("gsm8k/") for one in own.lines["LoRA", "rest T=0"]["questions"])
