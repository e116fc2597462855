"""Retention suites through lm-evaluation-harness: rows, prompts, log-likelihoods of gated models, verdicts."""

import gzip
import json
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import loragate as lg
from loragate.errors import ConfigError, DataError
from loragate.evaluation.evaluate import Evaluation
from loragate.evaluation.lm_eval_tasks import grade_by_harness, write_option_likelihoods
from loragate.evaluation.prepared import prepare
from loragate.evaluation.settings import TaskSettings
from loragate.evaluation.tasks import Question, load_questions, load_task
from loragate.evaluation.tasks.questions import ROW_CHECKS
from loragate.evaluation.variants import ModelVariant
from loragate.generation import Sample, TransformersEngine
from loragate.generation.engine import draw_samples, read_samples
from loragate.recipes import QUESTIONS
from loragate.records import to_json
from loragate.report.scores import suites_of
from tiny import VOCABULARY, rehearsal_rows, tiny_adapter, tiny_base, tiny_tokenizer, write_rows

SUITES = ["mmlu_pro", "bbh", "openbookqa"]
DATA = {name: str(QUESTIONS / f"{name}.jsonl") for name in SUITES}


@pytest.fixture
def ask(tmp_path):
    """(prepared task, answers, verdicts) of a model."""

    def asked(model, tokenizer, name, path=None, *, limit=None, batch_size=8, system="none", **settings):
        task, positions = load_task(name), model.config.max_position_embeddings
        questions = load_questions(task, path or DATA[name], limit)
        prepared = prepare(task, questions, tokenizer, TaskSettings(**settings), positions, system)
        engine, file = TransformersEngine(model, tokenizer, batch_size), tmp_path / "samples.jsonl"
        file.unlink(missing_ok=True)
        if prepared.option_pairs:
            write_option_likelihoods(engine, prepared.option_pairs, file, lambda *_: None)
        else:
            draw_samples(engine, prepared.prompts, prepared.sampling, file)
        samples = read_samples(file)
        return prepared, samples, grade_by_harness(task, prepared.questions, samples)

    return asked


def shaken_gates(seed=3):
    model = lg.attach_gates(tiny_adapter(), lg.GateConfig(-6, 3))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lg.gate_parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
    return model


# ----------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_folder_with_one_file_per_subtask_gives_the_same_questions(tmp_path, suffix):
    rows = rehearsal_rows("bbh")
    for subtask in {row["subtask"] for row in rows}:
        bare = [{key: row[key] for key in ("input", "target")} for row in rows if row["subtask"] == subtask]
        path = write_rows(tmp_path / f"{subtask}.jsonl", bare)
        if suffix == ".jsonl.gz":
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    task = load_task("bbh")

    def asked(path):
        return [
            (question.id, question.subset, question.prompt, question.gold)
            for question in load_questions(task, path).questions
        ]

    assert asked(tmp_path) == asked(DATA["bbh"])
    write_rows(tmp_path / "snark.jsonl", [{"input": "a", "target": "b"}])
    with pytest.raises(DataError, match=r"snark\.jsonl is no subset of bbh; did you mean 'snarks'"):
        asked(tmp_path)
    (tmp_path / "snark.jsonl").rename(tmp_path / "snarks.old.jsonl")
    with pytest.raises(DataError, match=r"snarks\.old\.jsonl is no subset of bbh"):
        asked(tmp_path)
    (tmp_path / "snarks.old.jsonl").rename(tmp_path / "snarks.json")
    with pytest.raises(DataError, match="both hold the subset snarks of bbh; keep one of them"):
        asked(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mmlu_pro", {"answer": "Z"}, "found answer 'Z', expected one of A, B, C, D, E"),
        ("mmlu_pro", {"answer_index": 0}, "answer 'D' and answer_index 0 name different options"),
        ("mmlu_pro", {"options": "A or B"}, "column 'options' holds .*A or B"),
        ("mmlu_pro", {"options": ["x"] * 11}, "options has 11 entries"),
        ("mmlu_pro", {"category": "biologie"}, "found category 'biologie'.*did you mean 'biology'"),
        ("mmlu_pro", {"question_id": 9000}, "the id '9000' .*:1 already"),
        ("mmlu_pro", {"question_id": None}, "column 'question_id' holds null"),
        ("mmlu_pro", {"question": " "}, "'question' is empty"),
        ("mmlu_pro", {"question": ...}, "no column 'question'.*mmlu_pro expects question_id"),
        ("bbh", {"subtask": "boolean_expression"}, "found subtask .*did you mean 'boolean_expressions'"),
        ("bbh", {"subtask": ...}, "found subtask None"),
        ("bbh", {"subtask": "word_sorting"}, "input has no 'List:'"),
        ("bbh", {"target": 3}, "column 'target' holds 3"),
        ("openbookqa", {"answerKey": "E"}, "found answerKey 'E', expected one of A, B, C, D"),
        ("openbookqa", {"choices": ["a", "b"]}, "column 'choices' holds"),
        ("openbookqa", {"choices": {"text": ["a", "b"], "label": ["A", "B", "C"]}}, "found choices"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_line(tmp_path, name, change, message):
    rows = rehearsal_rows(name)
    rows[1] = {key: value for key, value in {**rows[1], **change}.items() if value is not ...}
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=re.escape(f"{path}:2: ") + message):
        load_questions(load_task(name), path)


# -------------------------------------------------------------------------------------------------- extraction

FORMS = [
    ("So the answer is (C).", "C", "C"),
    ("The answer is C", "C", "C"),
    (r"Hence \boxed{C}", "C", None),
    (r"Hence $\boxed{\text{(C)}}$.", "C", None),
    ("**Answer:** C", "C", None),
    ("**Answer**: (C) 12 metres", "C", None),
    ("The answer is **C**", "C", None),
    (r"the answer is \(C\)", "C", None),
    ("The correct answer is: option C", "C", None),
    ("The final answer is $C$ because it fits", "C", None),
    ("Option C is correct", "C", None),
    ("Perhaps the answer is (A). No: the answer is (D).", "D", "A"),
    ("The answer is A because of light", "A", "A"),
    ("The answer is A good idea", None, "A"),
    ("The answer is I think B. Answer: B", "B", "I"),
    ("The answer is Carbon", None, "C"),
    ("I do not know", None, None),
]


@pytest.mark.parametrize(("text", "flexible", "strict"), FORMS, ids=[f"form{i}" for i in range(len(FORMS))])
def test_mmlu_pro_answers_are_found_in_their_usual_forms(text, flexible, strict):
    filters = {entry["name"]: entry["filter"][0] for entry in load_task("mmlu_pro").harness.override["filter_list"]}

    def extracted(name):
        found = re.findall(filters[name]["regex_pattern"], text)
        if not found:
            return None
        match = found[filters[name].get("group_select", 0)]
        return match if isinstance(match, str) else next(group for group in match if group)

    assert (extracted("flexible"), extracted("custom-extract")) == (flexible, strict)


# ------------------------------------------------------------------------------------------- through the harness


@pytest.fixture(scope="module")
def harness():
    return pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (pip install loragate[eval])")


@pytest.fixture(scope="module")
def gated():
    return shaken_gates()


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("name", SUITES)
def test_suites_run_offline_quietly_and_the_same_again(harness, gated, no_network, capfd, ask, name):
    prepared, samples, grades = ask(gated, tiny_tokenizer(), name, max_new_tokens=8)
    again = ask(gated, tiny_tokenizer(), name, max_new_tokens=8, batch_size=2)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "it/s" not in captured.err
    assert "metadata" not in captured.err
    assert len(grades) == len(samples) == len(rehearsal_rows(name))
    assert (prepared, grades) == (again[0], again[2])
    if name == "openbookqa":
        assert set(grades[0].scores) == {"acc,none", "acc_norm,none"}
        assert prepared.sampling.max_new_tokens == 1
    else:
        assert prepared.sampling.max_new_tokens == 8
        assert "subsets have no question" in " ".join(prepared.warnings)
        assert [sample.text for sample in samples] == [sample.text for sample in again[1]]
    if name == "mmlu_pro":
        assert prepared.prompts[0].startswith("<user> The following are multiple choice questions")


PLANTED = {
    "mmlu_pro": (
        [r"\boxed{B}", "The answer is (D).", "Answer: A", *(f"The answer is ({letter})" for letter in "AEF")],
        [1, 1, 1, 0, 1, 1],
    ),
    "bbh": (
        [
            "not True is False",
            "It is True.",
            "one million million fruits",  # the harness's own filter raises on this
            "1 + 4 = 5",
            "It must be (A)",
            "anchor lantern pebble",
        ],
        [1, 1, 0, 1, 1, 1],
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_answers_are_scored_strictly_and_flexibly(harness, name):
    texts, right = PLANTED[name]
    questions = load_questions(load_task(name), DATA[name]).questions
    samples = [Sample(index, 0, text, (1,), "stop", None) for index, text in enumerate(texts)]
    grades = grade_by_harness(load_task(name), questions, samples)
    assert [grade.correct for grade in grades] == [score == 1 for score in right]
    if name == "mmlu_pro":
        assert [grade.scores["exact_match,custom-extract"] for grade in grades] == [0, 1, 0, 0, 1, 1]
        assert grades[0].extracted == "B"
        assert [question.subset for question in questions[:3]] == ["biology", "biology", "computer science"]
    else:
        assert (grades[2].extracted, grades[2].reason) == (None, "no_answer")


def openbook_rows(tmp_path):
    draw = np.random.default_rng(0)

    def words(count):
        return " ".join(f"w{number}" for number in draw.integers(0, VOCABULARY - 5, count))

    rows = [
        {
            "id": str(number),
            "question_stem": words(6),
            "choices": {"text": [words(1 + (number + k) % 3) for k in range(4)], "label": list("ABCD")},
            "answerKey": "ABCD"[number % 4],
        }
        for number in range(10)
    ]
    return rows, write_rows(tmp_path / "openbookqa.jsonl", rows)


def own_loglikelihood(model, tokenizer, prompt, continuation):
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    after = tokenizer(continuation, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        log_probs = torch.log_softmax(model(torch.tensor([before + after])).logits[0].double(), dim=-1)
    return sum(float(log_probs[len(before) + place - 1, token]) for place, token in enumerate(after))


@pytest.mark.parametrize("chat_template", [True, False])
def test_loglikelihoods_are_the_gated_models_own(harness, gated, tmp_path, ask, chat_template):
    rows, path = openbook_rows(tmp_path)
    tokenizer = tiny_tokenizer()
    if not chat_template:
        tokenizer.chat_template = None

    def values(model):
        _, samples, _ = ask(model, tokenizer, "openbookqa", path, batch_size=4)
        return np.array([[one for one, _ in json.loads(sample.text)] for sample in samples])

    prepared, _, grades = ask(gated, tokenizer, "openbookqa", path)
    base, with_gates = values(tiny_base()), values(gated)
    with lg.gate_override(gated, constant=0.0):
        switched_off = values(gated)
    with lg.gate_override(gated, constant=1.0):
        adapter = values(gated)
    expected = []
    for row, prompt in zip(rows, prepared.prompts, strict=True):
        assert row["question_stem"] in prompt
        assert prompt.rstrip().endswith("<assistant>") == chat_template
        expected.append([own_loglikelihood(gated, tokenizer, prompt, choice) for choice in row["choices"]["text"]])
    np.testing.assert_allclose(with_gates, expected, atol=1e-4)
    np.testing.assert_allclose(switched_off, base, atol=1e-5)
    np.testing.assert_allclose(adapter, values(tiny_adapter()), atol=1e-5)
    assert np.abs(with_gates - base).min() > 1e-3
    assert np.abs(with_gates - adapter).min() > 1e-4
    gold = np.array(["ABCD".index(row["answerKey"]) for row in rows])
    lengths = np.array([[len(text) for text in row["choices"]["text"]] for row in rows])
    for metric, shown in (("acc,none", expected), ("acc_norm,none", np.array(expected) / lengths)):
        assert [grade.scores[metric] for grade in grades] == (np.argmax(shown, axis=1) == gold).tolist()
    assert [grade.correct for grade in grades] == [grade.scores["acc,none"] == 1 for grade in grades]


def test_a_short_context_cuts_prompts_and_says_so(harness, ask):
    prepared, samples, _ = ask(tiny_base(max_position_embeddings=48), tiny_tokenizer(), "mmlu_pro", limit=1)
    assert any("fewer than 2048 tokens" in one and "the shortest after 12" in one for one in prepared.warnings)
    assert any("3 prompts were cut at the beginning" in warning for warning in prepared.warnings)
    assert {len(tiny_tokenizer()(prompt)["input_ids"]) for prompt in prepared.prompts} == {36}
    assert all(len(sample.token_ids) <= 12 for sample in samples)


def test_a_prompt_with_options_is_cut_only_where_one_does_not_fit(harness, tmp_path, ask):
    rows, _ = openbook_rows(tmp_path)
    rows[0]["question_stem"] += " w1" * 40  # more than three quarters of the positions
    path = write_rows(tmp_path / "long.jsonl", rows)
    tokenizer, limit = tiny_tokenizer(), {"limit": 1}
    whole, _, _ = ask(tiny_base(), tokenizer, "openbookqa", path, **limit)
    longest = max(len(before) + len(after) for before, after in whole.option_pairs[0])
    fits, _, _ = ask(tiny_base(max_position_embeddings=longest), tokenizer, "openbookqa", path, **limit)
    assert (fits.option_pairs, fits.prompts, fits.warnings) == (whole.option_pairs, whole.prompts, whole.warnings)
    cut, _, _ = ask(tiny_base(max_position_embeddings=longest - 1), tokenizer, "openbookqa", path, **limit)
    assert max(len(before) + len(after) for before, after in cut.option_pairs[0]) == longest - 1
    assert any("1 prompt was cut at the beginning" in warning for warning in cut.warnings)


@pytest.mark.contract
def test_answers_and_loglikelihoods_are_those_of_the_harnesss_own_model_class(harness, gated, ask):
    """Also that it tokenises pairs of prompt and option as we do."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    theirs = HFLM(pretrained=gated, tokenizer=tiny_tokenizer(), batch_size=8)
    for name in SUITES:
        prepared, samples, _ = ask(gated, tokenizer, name, max_new_tokens=12)
        how = {"until": list(prepared.sampling.stop), "max_gen_toks": 12, "do_sample": False}
        for prompt, question, sample in zip(prepared.prompts, prepared.questions, samples, strict=True):
            if not question.options:
                request = Instance("generate_until", {}, (prompt, how), 0, (name, 0, 1))
                assert theirs.generate_until([request], disable_tqdm=True) == [sample.text]
                continue
            kind = "loglikelihood"
            requests = [Instance(kind, {}, (prompt, one), 0, (name, 0, 1)) for one in question.options]
            found = [one for one, _ in theirs.loglikelihood(requests, disable_tqdm=True)]
            assert found == pytest.approx([one for one, _ in json.loads(sample.text)], abs=1e-5)


@pytest.mark.contract
def test_the_strict_filter_and_the_subsets_are_still_the_harnesss_own(harness):
    tasks = Path(harness.__file__).parent / "tasks"
    pattern = load_task("mmlu_pro").harness.override["filter_list"][0]["filter"][0]["regex_pattern"]
    assert f"'{pattern}'" in (tasks / "mmlu_pro" / "_default_template_yaml").read_text(encoding="utf-8")
    for name in ROW_CHECKS:
        suite = load_task(name).harness
        for subset in suite.subsets or ("",):
            assert (tasks / suite.files.format(subset=subset.replace(" ", "_"))).is_file()
        if suite.subsets:
            files = (tasks / suite.files).parent.glob("[!_]*.yaml")
            assert len(list(files)) == len(suite.subsets)


def test_bbh_counts_by_its_subsets_and_every_suite_the_same_in_the_average(tmp_path):
    rows = {"mmlu_pro": [1, 1, 0, 0, 0, 0], "bbh": [1, 1, 1, 1, 0, 1], "openbookqa": [1, 0, 0, 0, 1]}
    strata = {"mmlu_pro": [range(6)], "bbh": [range(4), range(4, 6)], "openbookqa": [range(5)]}

    class Part:
        def __init__(self, name):
            self.task = load_task(name)
            self.strata = lambda: [np.array(part) for part in strata[name]]
            self.questions = [Question("0", f"{name} {i}", "", {"i": [name, i]}) for i in range(len(rows[name]))]

    kinds = [ModelVariant("adapter"), ModelVariant("base"), ModelVariant("adapter", "T=0.6", temperature=0.6)]
    rows["arithmetic"], strata["arithmetic"] = [1, 0], [range(2)]
    scores = {("adapter", name): np.array(own, dtype=float)[:, None] for name, own in rows.items()}
    scores |= {("base", name): 1 - table for (_, name), table in scores.items()}
    results = {key: SimpleNamespace(means_Q1=table) for key, table in scores.items()}

    def averages(names):
        one = Evaluation(tmp_path, [Part(name) for name in names], kinds, models={}, canary={}, seed=0)
        return one._averages(results)

    found = averages([*SUITES, "arithmetic"])  # a suite of which one task was asked has no average
    assert [(row.suite, row.variant, row.average.tasks) for row in found] == [
        ("bbh/subsets", "adapter", 2),
        ("bbh/subsets", "base", 2),
        ("retention", "adapter", 3),
        ("retention", "base", 3),
    ]
    assert found[0].average.mean == pytest.approx((1 + 0.5) / 2), "over questions it would be 5 of 6"
    assert found[2].average.mean == pytest.approx((2 / 6 + 0.75 + 2 / 5) / 3)
    assert (found[0].tasks, len(found[2].tasks)) == (("bbh",), 3), "a report names the tasks that are in no average"
    assert found[2].comparison is None
    assert found[3].comparison.mean == pytest.approx(found[3].average.mean - found[2].average.mean)
    assert found[3].comparison.low <= found[3].comparison.mean <= found[3].comparison.high
    titles = [title for title, _ in suites_of({"suites": to_json(found)})]
    assert titles == ["bbh: average of its 2 subsets", "average of the 3 retention tasks (bbh by its subsets)"]
    assert averages(["openbookqa"]) == []
    # a task of one's own may be of a suite whose other tasks ask for no controls
    results["adapter T=0.6", "openbookqa"] = results["adapter", "openbookqa"]
    assert [row.control for row in averages(["openbookqa", "mmlu_pro"])] == [None, None]


def test_tasks_that_ask_the_same_questions_are_no_independent_strata(tmp_path):
    scores = np.random.default_rng(0).integers(0, 2, (60, 1)).astype(float)

    def average(*tasks):
        """Of tasks as (name, questions), all with these scores."""
        parts = [
            SimpleNamespace(task=load_task(name), questions=asked, strata=lambda: [np.arange(60)])
            for name, asked in tasks
        ]
        one = Evaluation(tmp_path, parts, [ModelVariant("adapter")], models={}, canary={}, seed=0)
        (row,) = one._averages({("adapter", name): SimpleNamespace(means_Q1=scores) for name, _ in tasks})
        return row.average

    def questions(name, prompt, ids="HumanEval"):
        return [Question(f"{ids}/{i}", f"{prompt} {i}", "", {"tests": f"{name} {i}"}) for i in range(60)]

    def error(names):
        return float(scores.std(ddof=1)) / 60**0.5 / names**0.5

    plus = ("humaneval_plus", questions("plus", "chat"))
    assert average(("humaneval", questions("", "chat")), plus).stderr == pytest.approx(error(1))
    assert average(("humaneval_raw", questions("", "raw")), plus).stderr == pytest.approx(error(1)), (
        "known by their ids"
    )
    rows = ("mbpp", questions("plus", "another"))
    assert average(rows, plus).stderr == pytest.approx(error(1)), "known by their rows"
    other = average(("mbpp", questions("mbpp", "more", "MBPP")), plus)
    assert (other.stderr, other.questions) == (pytest.approx(error(2)), 120)


# --------------------------------------------------------------------------------------------------- refusals


def test_without_the_harness_the_way_to_install_it_is_named(monkeypatch, ask):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install .\.\[eval\]"):
        ask(tiny_base(), tiny_tokenizer(), "bbh")


def test_suites_are_read_at_the_commit_of_their_task(monkeypatch):
    """docs/tasks.md promises it; without a pin the main branch is followed."""
    asked = []

    def refuse(source, *, split, revision, limit):
        asked.append((source, revision))
        raise DataError("no connection.")

    monkeypatch.setattr("loragate.evaluation.tasks.questions.load_rows", refuse)
    for name in ROW_CHECKS:
        task = load_task(name)
        with pytest.raises(DataError, match=rf"{name}: .*--data {name}=FILE.* columns.*no connection"):
            load_questions(task)
        source, revision = asked[-1]
        assert source.split(":")[0] == task.dataset.hub
        assert revision == task.dataset.revision


def test_sample_files_are_read_in_the_order_of_subsets_with_stable_ids():
    found = load_questions(load_task("bbh"), DATA["bbh"], limit=1)
    subsets = ["boolean_expressions", "object_counting", "snarks", "word_sorting"]
    assert [question.id for question in found.questions] == [f"{subset}/0" for subset in subsets]
    assert "23 of 27 subsets have no question" in found.warnings[0]
    questions = load_questions(load_task("mmlu_pro"), DATA["mmlu_pro"]).questions
    assert [question.id for question in questions][:2] == ["9000", "9001"]
