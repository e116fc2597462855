"""Retention suites through lm-evaluation-harness: rows, answers, log-likelihoods of gated models, scores in order."""

import dataclasses
import json
import re
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import loragate as lg
from loragate.errors import ConfigError, DataError
from loragate.evaluation.harness import Answer, HarnessScores, greedy_answers, run_harness
from loragate.evaluation.retention import retention_averages
from loragate.evaluation.tasks import load_questions, load_task
from loragate.evaluation.tasks.questions import COLUMNS
from loragate.generation import SamplingConfig, TransformersEngine
from loragate.recipes.standins import QUESTIONS
from loragate.report.scores import suites_of
from tiny import VOCABULARY, tiny_adapter, tiny_base, tiny_tokenizer

SUITES = ["mmlu_pro", "bbh", "openbookqa"]
DATA = {name: str(QUESTIONS / f"{name}.jsonl") for name in SUITES}


def sample_rows(name):
    return [json.loads(line) for line in (QUESTIONS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def ask(model, tokenizer, name, path=None, *, batch_size=8, limit=None, **options):
    task, engine = load_task(name), TransformersEngine(model, tokenizer, batch_size)
    questions = load_questions(task, path or DATA[name], limit)
    return run_harness(engine, tokenizer, task, questions, positions=model.config.max_position_embeddings, **options)


def shaken_gates(seed=3):
    model = lg.attach_gates(tiny_adapter(), lg.GateConfig(-6, 3))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lg.gate_parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
    return model


# ----------------------------------------------------------------------------------------------------- rows


def test_sample_files_are_read_in_the_order_of_subsets_with_stable_ids():
    found = load_questions(load_task("bbh"), DATA["bbh"], limit=1)
    subsets = ["boolean_expressions", "object_counting", "snarks", "word_sorting"]
    assert [question.id for question in found.questions] == [f"{subset}/0" for subset in subsets]
    assert "23 of 27 subsets have no question" in found.warnings[0]
    questions = load_questions(load_task("mmlu_pro"), DATA["mmlu_pro"]).questions
    assert [question.id for question in questions][:2] == ["9000", "9001"]


def test_a_folder_with_one_file_per_subtask_gives_the_same_questions(tmp_path):
    rows = sample_rows("bbh")
    for subtask in {row["subtask"] for row in rows}:
        bare = [{key: row[key] for key in ("input", "target")} for row in rows if row["subtask"] == subtask]
        write_rows(tmp_path / f"{subtask}.jsonl", bare)
    task = load_task("bbh")

    def asked(path):
        return [(question.id, question.row) for question in load_questions(task, path).questions]

    assert asked(tmp_path) == asked(DATA["bbh"])
    write_rows(tmp_path / "snark.jsonl", [{"input": "a", "target": "b"}])
    with pytest.raises(DataError, match=r"snark\.jsonl is no subset of bbh; did you mean 'snarks'"):
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
        ("mmlu_pro", {"question": " "}, "column 'question' is empty"),
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
    rows = sample_rows(name)
    rows[1] = {key: value for key, value in {**rows[1], **change}.items() if value is not ...}
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=re.escape(f"{path}:2: ") + message):
        load_questions(load_task(name), path)


def test_an_absent_file_says_which_would_do():
    with pytest.raises(
        DataError, match=r"found no file nowhere\.jsonl for openbookqa; .* columns id .*, question_stem"
    ):
        load_questions(load_task("openbookqa"), "nowhere.jsonl")


# -------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("gated", [False, True])
def test_answers_are_those_of_the_engine_at_temperature_zero(gated):
    model = shaken_gates() if gated else tiny_base()
    tokenizer = tiny_tokenizer()
    texts = ["<user> w1 w2 <assistant>", "<user> w9 <assistant>", "<user> w4 w5 w6 w7 <assistant>"]
    engine = TransformersEngine(model, tokenizer, batch_size=2)
    expected = engine.generate(texts, SamplingConfig(temperature=0.0, max_new_tokens=24))
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    answers = greedy_answers(engine, prompts, stops=[], max_new_tokens=24, positions=512)
    assert [(a.text, a.tokens, a.finish_reason) for a in answers] == [
        (s.text, len(s.token_ids), s.finish_reason) for s in expected
    ]


def test_a_stop_string_and_the_models_positions_end_an_answer():
    engine = TransformersEngine(tiny_base(max_position_embeddings=40), tiny_tokenizer())
    prompts = [[3, 6, 7, 4], [3, 9, 4], list(range(5, 60))]
    options = {"max_new_tokens": 12, "positions": 40}
    came: list[tuple[int, int]] = []
    free = greedy_answers(engine, prompts, stops=[], on_progress=lambda *step: came.append(step), **options)
    assert came[-1] == (3, 3)
    assert [(answer.budget, answer.cut) for answer in free] == [(12, 0), (12, 0), (10, 25)]
    assert free[2].tokens == 10
    assert free[2].finish_reason == "length"
    words = free[0].text.split()
    stop = next(word for word in words[2:] if word not in words[:2])
    place = words.index(stop)
    stopped = greedy_answers(engine, prompts, stops=[stop], **options)
    assert stopped[0].text == " ".join(words[:place]) + " "
    assert (stopped[0].tokens, stopped[0].finish_reason) == (place + 1, "stop_text")


def test_the_end_of_a_table_of_positions_is_never_passed():
    from transformers import AutoModelForCausalLM, GPT2Config, GPTJConfig, OPTConfig

    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    size = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ffn_dim": 16,
        "word_embed_proj_dim": 16,
    }
    gpt = {"n_positions": 40, "n_embd": 16, "n_layer": 1, "n_head": 2}
    configs = (
        GPT2Config(**gpt, **size),
        GPTJConfig(**gpt, rotary_dim=4, **size),
        OPTConfig(max_position_embeddings=40, **small, **size),
    )
    prompts = [[5 + index % 9] * length for index, length in enumerate((3, 38, 30, 29, 4, 28, 60))]
    options = {"stops": [], "max_new_tokens": 12, "positions": 40}
    for config in configs:
        model = AutoModelForCausalLM.from_config(config).eval()
        alone = greedy_answers(TransformersEngine(model, tokenizer, batch_size=1), prompts, **options)
        assert [answer.budget for answer in alone] == [12, 10, 10, 11, 12, 12, 10]
        assert greedy_answers(TransformersEngine(model, tokenizer, batch_size=7), prompts, **options) == alone


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
def test_suites_run_offline_quietly_and_the_same_again(harness, gated, no_network, capfd, name):
    seen = []
    gated.train()
    options = {"max_new_tokens": 8, "on_progress": lambda done, total: seen.append((done, total))}
    first = ask(gated, tiny_tokenizer(), name, **options)
    assert gated.training
    gated.eval()
    requests = {"mmlu_pro": 6, "bbh": 6, "openbookqa": 20}[name]
    assert seen[-1] == (requests, requests)
    assert seen == sorted(seen)
    again = ask(gated, tiny_tokenizer(), name, **{**options, "on_progress": None}, batch_size=2)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "it/s" not in captured.err
    assert "examples" not in captured.err
    assert len(first.scores) == len(sample_rows(name))
    assert [sample["question"] for sample in first.samples] == list(first.questions)
    assert first.prompts_hash == again.prompts_hash
    assert [s.get("text") for s in first.samples] == [s.get("text") for s in again.samples]
    assert first.scores == again.scores
    assert json.dumps(first.samples)
    assert first.version.endswith("+loragate.1")
    if name == "openbookqa":
        assert set(first.samples[0]["scores"]) == {"acc,none", "acc_norm,none"}
        assert first.settings["max_new_tokens"] is None
    else:
        assert first.settings["max_new_tokens"] == 8
        assert "subsets have no question" in first.warnings[0]
    if name == "mmlu_pro":
        assert first.samples[0]["prompt"].startswith("<user> The following are multiple choice questions")


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
def test_planted_answers_are_scored_strictly_and_flexibly(harness, monkeypatch, name):
    texts, right = PLANTED[name]
    answers = iter(texts)
    monkeypatch.setattr(
        "loragate.evaluation.harness.greedy_answers",
        lambda engine, prompts, **_: [Answer(next(answers), 3, "stop", 8, 0) for _ in prompts],
    )
    found = ask(tiny_base(), tiny_tokenizer(), name)
    assert [sample["text"] for sample in found.samples] == texts
    assert list(found.scores) == right
    assert [sample["correct"] for sample in found.samples] == [score == 1 for score in right]
    if name == "mmlu_pro":
        assert [sample["scores"]["exact_match,custom-extract"] for sample in found.samples] == [0, 1, 0, 0, 1, 1]
        assert found.samples[0]["extracted"] == {"custom-extract": "[invalid]", "flexible": "B"}
        assert found.subsets == ("biology", "biology", "computer science", "computer science", "math", "math")
    else:
        assert found.samples[2]["extracted"]["flexible-extract"] == "[invalid]"


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


@pytest.mark.parametrize(("system", "whole"), [("none", False), ("keep", True)])
def test_a_system_message_that_a_template_slips_in_is_asked_for(harness, tmp_path, system, whole):
    rows, path = openbook_rows(tmp_path)
    tokenizer = tiny_tokenizer()
    own = tokenizer.chat_template
    slipped = "{% if messages[0]['role'] != 'system' %}be brief {% endif %}"
    tokenizer.chat_template = slipped + own
    (sample,) = ask(tiny_base(), tokenizer, "openbookqa", path, limit=1, system=system).samples
    tokenizer.chat_template = own
    question = [{"role": "user", "content": rows[0]["question_stem"]}]
    rendered = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert sample["prompt"] == ("be brief " if whole else "") + rendered


@pytest.mark.parametrize("chat_template", [True, False])
def test_loglikelihoods_are_the_gated_models_own(harness, gated, tmp_path, chat_template):
    rows, path = openbook_rows(tmp_path)
    tokenizer = tiny_tokenizer()
    template = tokenizer.chat_template
    if not chat_template:
        tokenizer.chat_template = None

    def score(model):
        return ask(model, tokenizer, "openbookqa", path, batch_size=4)

    def values(scores):
        return np.array([sample["loglikelihoods"] for sample in scores.samples])

    base, with_gates = score(tiny_base()), score(gated)
    with lg.gate_override(gated, constant=0.0):
        switched_off = score(gated)
    with lg.gate_override(gated, constant=1.0):
        adapter = score(gated)
    expected = []
    for row, sample in zip(rows, with_gates.samples):
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["question_stem"]}],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
        )
        assert sample["prompt"] == (rendered if chat_template else row["question_stem"])
        assert [choice.strip() for choice in sample["choices"]] == row["choices"]["text"]
        expected.append([own_loglikelihood(gated, tokenizer, sample["prompt"], c) for c in sample["choices"]])
    np.testing.assert_allclose(values(with_gates), expected, atol=1e-4)
    np.testing.assert_allclose(values(switched_off), values(base), atol=1e-5)
    np.testing.assert_allclose(values(adapter), values(score(tiny_adapter())), atol=1e-5)
    assert np.abs(values(with_gates) - values(base)).min() > 1e-3
    assert np.abs(values(with_gates) - values(adapter)).min() > 1e-4
    gold = np.array(["ABCD".index(row["answerKey"]) for row in rows])
    columns = {
        metric: [sample["scores"][metric] for sample in with_gates.samples]
        for metric in with_gates.samples[0]["scores"]
    }
    np.testing.assert_array_equal(columns["acc,none"], np.argmax(expected, axis=1) == gold)
    lengths = np.array([[len(text) for text in row["choices"]["text"]] for row in rows])
    right = np.argmax(np.array(expected) / lengths, axis=1) == gold
    np.testing.assert_array_equal(columns["acc_norm,none"], right)


def test_a_short_context_cuts_prompts_and_says_so(harness):
    model = tiny_base(max_position_embeddings=48)
    scores = ask(model, tiny_tokenizer(), "mmlu_pro", limit=1)
    assert scores.settings["max_new_tokens"] == 2048
    assert any("had room for 12 to 12 new tokens only, not 2048" in warning for warning in scores.warnings)
    assert any("3 prompts were cut at their beginning" in warning for warning in scores.warnings)
    assert [sample["budget"] for sample in scores.samples] == [12, 12, 12]
    assert all(sample["prompt_tokens_cut"] > 0 for sample in scores.samples)


@pytest.mark.contract
def test_answers_and_loglikelihoods_are_those_of_the_harnesss_own_model_class(harness, gated, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    ours = {name: ask(gated, tokenizer, name, max_new_tokens=12) for name in SUITES}

    class Plain(HFLM):
        cut_choices = 0

        def generate_until(self, requests, disable_tqdm=True):
            texts = super().generate_until(requests, disable_tqdm=True)
            self.answers |= {
                request.doc["loragate_index"]: Answer(text, 0, "stop", 12, 0) for request, text in zip(requests, texts)
            }
            return texts

    def plain(*_):
        model = Plain(pretrained=gated, tokenizer=tiny_tokenizer(), batch_size=8)
        model.answers = {}
        return model

    monkeypatch.setattr("loragate.evaluation.harness._bridge", plain)
    for name in SUITES:
        theirs = ask(gated, tokenizer, name, max_new_tokens=12)
        assert theirs.prompts_hash == ours[name].prompts_hash
        assert theirs.scores == ours[name].scores
        for mine, other in zip(ours[name].samples, theirs.samples):
            assert mine.get("text") == other.get("text")
            assert mine.get("loglikelihoods", []) == pytest.approx(other.get("loglikelihoods", []), abs=1e-5)


@pytest.mark.contract
def test_the_strict_filter_and_the_subsets_are_still_the_harnesss_own(harness):
    tasks = Path(harness.__file__).parent / "tasks"
    pattern = load_task("mmlu_pro").harness.override["filter_list"][0]["filter"][0]["regex_pattern"]
    assert f"'{pattern}'" in (tasks / "mmlu_pro" / "_default_template_yaml").read_text(encoding="utf-8")
    for name in COLUMNS:
        suite = load_task(name).harness
        for subset in suite.subsets or ("",):
            assert (tasks / suite.files.format(subset=subset.replace(" ", "_"))).is_file()
        if suite.subsets:
            files = (tasks / suite.files).parent.glob("[!_]*.yaml")
            assert len(list(files)) == len(suite.subsets)


def test_bbh_counts_by_its_subsets_and_every_suite_the_same_in_the_average():
    def measured(name, scores):
        names = tuple(map(str, range(len(scores))))
        own = subsets[name] or ("",) * len(scores)
        return HarnessScores(name, "1", "acc,none", tuple(scores), names, own, "", (), {}, ())

    kinds = ("adapter", "base")
    rows = {"mmlu_pro": [1, 1, 0, 0, 0, 0, 0, 0], "bbh": [1, 1, 1, 1, 0, 1], "openbookqa": [1, 0]}
    subsets = {"mmlu_pro": ("law",) * 2 + ("math",) * 6, "bbh": ("a",) * 4 + ("b",) * 2, "openbookqa": None}
    found = {
        name: {kind: measured(name, [1 - score for score in scores] if kind == "base" else scores) for kind in kinds}
        for name, scores in rows.items()
    }
    averages = retention_averages(found)
    assert [(row.suite, row.variant, row.average.tasks) for row in averages] == [
        ("bbh/subsets", "adapter", 2),
        ("bbh/subsets", "base", 2),
        ("retention", "adapter", 3),
        ("retention", "base", 3),
    ]
    assert averages[0].average.mean == pytest.approx((1 + 0.5) / 2), "over questions it would be 5 of 6"
    assert averages[2].average.mean == pytest.approx((2 / 8 + 0.75 + 1 / 2) / 3)
    assert averages[2].comparison is None
    assert averages[3].comparison.mean == pytest.approx(averages[3].average.mean - averages[2].average.mean)
    assert averages[3].comparison.low <= averages[3].comparison.mean <= averages[3].comparison.high
    titles = [title for title, _ in suites_of({"suites": [dataclasses.asdict(row) for row in averages]})]
    assert titles == ["bbh: average of its 2 subsets", "average of the 3 retention tasks (bbh by its subsets)"]
    assert len(retention_averages({"openbookqa": found["openbookqa"]})) == 0


# --------------------------------------------------------------------------------------------------- refusals


def test_without_the_harness_the_way_to_install_it_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install loragate\[eval\]"):
        ask(tiny_base(), tiny_tokenizer(), "bbh")


def test_suites_are_read_at_the_commit_of_their_task(monkeypatch):
    """docs/tasks.md promises it; without a pin the main branch is followed."""
    asked = []

    def refuse(source, *, split, revision, limit):
        asked.append((source, revision))
        raise DataError("no connection.")

    monkeypatch.setattr("loragate.evaluation.tasks.questions.load_rows", refuse)
    for name in COLUMNS:
        task = load_task(name)
        with pytest.raises(DataError, match=rf"{name}: .*--data {name}=FILE.* columns.*no connection"):
            load_questions(task)
        source, revision = asked[-1]
        assert source.split(":")[0] == task.dataset.hub
        assert revision == task.dataset.revision
    with pytest.raises(DataError):
        load_questions(load_task("openbookqa"), revision="a" * 40)
    assert asked[-1][1] == "a" * 40
    with pytest.raises(ConfigError, match="has no effect without a hub data set"):
        load_questions(load_task("openbookqa"), DATA["openbookqa"], revision="abc")
