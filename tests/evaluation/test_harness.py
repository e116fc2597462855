"""Retention suites through lm-evaluation-harness: rows, answers, log-likelihoods of gated models, scores in order."""

import dataclasses
import json
import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

import loragate as lg
from loragate.errors import ConfigError, DataError
from loragate.evaluation import compare
from loragate.evaluation.harness import run_harness
from loragate.evaluation.harness_answers import Answer, greedy_answers
from loragate.evaluation.harness_rows import DEFINITIONS, load_questions, load_suite, suite_names
from loragate.evaluation.retention import Measured, retention_averages
from loragate.evaluation.tasks import load_task
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


def ask(model, tokenizer, tasks, *, batch_size=8, **options):
    positions = model.config.max_position_embeddings
    return run_harness(
        TransformersEngine(model, tokenizer, batch_size), tokenizer, tasks, positions=positions, **options
    )


def shaken_gates(seed=3):
    model = lg.attach_gates(tiny_adapter(), lg.GateConfig(-6, 3))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lg.gate_parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.3)
    return model


# ----------------------------------------------------------------------------------------------------- rows


def test_sample_files_are_read_in_the_order_of_subsets_with_stable_ids():
    assert suite_names() == ["bbh", "bbh_zeroshot", "mmlu_pro", "openbookqa"]
    questions = load_questions(load_suite("bbh"), DATA["bbh"], limit=1)
    assert [item.id for item in questions.items] == [
        "boolean_expressions/0",
        "object_counting/0",
        "snarks/0",
        "word_sorting/0",
    ]
    assert len(questions.missing) == 23
    assert [item.id for item in load_questions(load_suite("mmlu_pro"), DATA["mmlu_pro"]).items][:2] == ["9000", "9001"]


def test_a_folder_with_one_file_per_subtask_gives_the_same_questions(tmp_path):
    rows = sample_rows("bbh")
    for subtask in {row["subtask"] for row in rows}:
        bare = [{key: row[key] for key in ("input", "target")} for row in rows if row["subtask"] == subtask]
        write_rows(tmp_path / f"{subtask}.jsonl", bare)
    suite = load_suite("bbh")
    assert load_questions(suite, str(tmp_path)).items == load_questions(suite, DATA["bbh"]).items
    write_rows(tmp_path / "snark.jsonl", [{"input": "a", "target": "b"}])
    with pytest.raises(DataError, match=r"snark\.jsonl is no subtask of bbh; did you mean 'snarks'"):
        load_questions(suite, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mmlu_pro", {"answer": "Z"}, r":2: found answer 'Z', expected one of A, B, C, D, E for 5 options"),
        ("mmlu_pro", {"answer_index": 0}, r":2: answer 'D' and answer_index 0 name different options"),
        ("mmlu_pro", {"options": "A or B"}, r":2: found options 'A or B', expected a list of at least two texts"),
        ("mmlu_pro", {"options": ["x"] * 11}, r":2: options has 11 entries"),
        ("mmlu_pro", {"category": "biologie"}, r":2: found category 'biologie'.*did you mean 'biology'"),
        ("mmlu_pro", {"question_id": 9000}, r":2: the id '9000' stands at .*:1 too"),
        ("mmlu_pro", {"question_id": None}, r":2: found question_id None"),
        ("mmlu_pro", {"question": None}, r":2: found question None"),
        ("mmlu_pro", {"question": ...}, r":2: the column question is absent.*mmlu_pro needs question_id"),
        ("bbh", {"subtask": "boolean_expression"}, r":2: found subtask .*did you mean 'boolean_expressions'"),
        ("bbh", {"subtask": ...}, r":2: the column subtask is absent"),
        ("bbh", {"subtask": "word_sorting"}, r":2: input has no 'List:'"),
        ("bbh", {"target": 3}, r":2: found target 3"),
        ("openbookqa", {"answerKey": "E"}, r":2: found answerKey 'E', expected one of A, B, C, D"),
        ("openbookqa", {"choices": ["a", "b"]}, r":2: found choices list"),
        ("openbookqa", {"choices": {"text": ["a", "b"], "label": ["A", "B", "C"]}}, r":2: choices has 2 texts and 3"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_line(tmp_path, name, change, message):
    rows = sample_rows(name)
    rows[1] = {key: value for key, value in {**rows[1], **change}.items() if value is not ...}
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=re.escape(path) + message):
        load_questions(load_suite(name), path)


def test_an_absent_file_and_an_unreachable_hub_say_which_file_would_do(monkeypatch):
    with pytest.raises(DataError, match=r"openbookqa: found no file nowhere\.jsonl; .* columns id, question_stem"):
        load_questions(load_suite("openbookqa"), "nowhere.jsonl")
    monkeypatch.setattr(
        "loragate.evaluation.harness_rows.load_rows", lambda *_, **__: (_ for _ in ()).throw(DataError("no hub."))
    )
    with pytest.raises(
        DataError, match=r"mmlu_pro: no hub\. .*--data mmlu_pro=FILE\.jsonl .* options \(list of 2 to 10"
    ):
        load_questions(load_suite("mmlu_pro"))


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
    filters = {entry["name"]: entry["filter"][0] for entry in load_suite("mmlu_pro").override["filter_list"]}

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


def test_three_suites_run_offline_quietly_and_the_same_again(harness, gated, no_network, capfd):
    seen = []
    gated.train()
    options = {"data": DATA, "max_new_tokens": 8, "on_progress": lambda done, total: seen.append((done, total))}
    first = ask(gated, tiny_tokenizer(), SUITES, **options)
    assert gated.training
    gated.eval()
    assert seen[-1] == (32, 32)
    assert seen == sorted(seen)
    again = ask(gated, tiny_tokenizer(), SUITES, **{**options, "on_progress": None}, batch_size=2)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "it/s" not in captured.err
    assert "examples" not in captured.err
    assert list(first) == SUITES
    for name, scores in first.items():
        assert scores.scores.shape == (len(sample_rows(name)), 1)
        assert [sample["question"] for sample in scores.samples] == list(scores.questions)
        assert scores.prompts_hash == again[name].prompts_hash
        assert [s.get("text") for s in scores.samples] == [s.get("text") for s in again[name].samples]
        np.testing.assert_array_equal(scores.scores, again[name].scores)
        assert compare(scores.scores, again[name].scores).mean == 0.0
        assert json.dumps(scores.samples)
        assert scores.settings["num_fewshot"] == 0
        assert scores.version.endswith("+loragate.1")
    assert first["mmlu_pro"].samples[0]["prompt"].startswith("<user> The following are multiple choice questions")
    assert first["mmlu_pro"].settings["max_new_tokens"] == 8
    assert first["mmlu_pro"].truncated == np.mean([s["finish_reason"] == "length" for s in first["mmlu_pro"].samples])
    assert "11 of 14 subsets have no question" in first["mmlu_pro"].warnings[0]
    assert first["openbookqa"].truncated is None
    assert set(first["openbookqa"].samples[0]["scores"]) == {"acc,none", "acc_norm,none"}


def test_planted_answers_are_scored_strictly_and_flexibly_by_question_subset_and_whole(harness, monkeypatch):
    texts = {
        "mitochondrion": r"\boxed{B}",
        "Aa is crossed": "The answer is (D).",
        "constant time": "Answer: A",
        "6-bit": "The answer is (A)",
        "7^2": "The answer is (E)",
        "edges does a cube": "The answer is (F)",
        "not ( True )": "not True is False",
        "True or not": "It is True.",
        "two pears": "one million million fruits",  # the harness's own filter raises on this
        "a drum": "1 + 4 = 5",
        "pebble anchor": "anchor lantern pebble",
        "sarcastic": "It must be (A)",
    }

    def planted(engine, prompts, **_):
        return [Answer(answers.pop(0), 3, "stop", 8, 0) for _ in prompts]

    answers = [texts[key] for key in list(texts)[:6]]
    answers += [
        texts[key] for key in ("not ( True )", "True or not", "two pears", "a drum", "sarcastic", "pebble anchor")
    ]
    both = answers.copy()
    monkeypatch.setattr("loragate.evaluation.harness.greedy_answers", planted)
    found = ask(tiny_base(), tiny_tokenizer(), ["mmlu_pro", "bbh"], data={k: DATA[k] for k in ("mmlu_pro", "bbh")})
    mmlu, bbh = found["mmlu_pro"], found["bbh"]
    assert [sample["text"] for sample in mmlu.samples + bbh.samples] == both
    assert mmlu.scores[:, 0].tolist() == [1, 1, 1, 0, 1, 1]
    assert [sample["scores"]["exact_match,custom-extract"] for sample in mmlu.samples] == [0, 1, 0, 0, 1, 1]
    assert [sample["correct"] for sample in mmlu.samples] == [True, True, True, False, True, True]
    assert mmlu.samples[0]["extracted"] == {"custom-extract": "[invalid]", "flexible": "B"}
    assert {name: estimate.mean for name, estimate in mmlu.by_subset.items()} == {
        "biology": 1.0,
        "computer science": 0.5,
        "math": 1.0,
    }
    assert mmlu.harness_values["exact_match,flexible"] == pytest.approx(mmlu.micro.mean)
    assert mmlu.harness_values["exact_match,custom-extract"] == pytest.approx(0.5)
    assert bbh.scores[:, 0].tolist() == [1, 1, 0, 1, 1, 1]
    assert bbh.samples[2]["extracted"]["flexible-extract"] == "[invalid]"
    assert bbh.micro.mean == pytest.approx(5 / 6)
    assert bbh.macro == pytest.approx((1 + 0.5 + 1 + 1) / 4)
    assert bbh.harness_values["exact_match,flexible-extract"] == pytest.approx(5 / 6)


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
    options = {"data": {"openbookqa": path}, "limit": 1, "system": system}
    (sample,) = ask(tiny_base(), tokenizer, ["openbookqa"], **options)["openbookqa"].samples
    tokenizer.chat_template = own
    question = [{"role": "user", "content": rows[0]["question_stem"]}]
    rendered = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert sample["prompt"] == ("be brief " if whole else "") + rendered


@pytest.mark.parametrize("chat_template", [True, False])
def test_loglikelihoods_are_the_gated_models_own(harness, gated, tmp_path, chat_template):
    rows, path = openbook_rows(tmp_path)
    tokenizer = tiny_tokenizer()

    def score(model):
        options = {"data": {"openbookqa": path}, "chat_template": chat_template, "batch_size": 4}
        return ask(model, tokenizer, ["openbookqa"], **options)["openbookqa"]

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
            [{"role": "user", "content": row["question_stem"]}], tokenize=False, add_generation_prompt=True
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
    for metric, column in columns.items():
        assert with_gates.harness_values[metric] == pytest.approx(np.mean(column))
    assert with_gates.by_subset == {}
    assert with_gates.macro == with_gates.micro.mean


def test_a_short_context_cuts_prompts_and_says_so(harness):
    model = tiny_base(max_position_embeddings=48)
    scores = ask(model, tiny_tokenizer(), ["mmlu_pro"], data={"mmlu_pro": DATA["mmlu_pro"]}, limit=1)["mmlu_pro"]
    assert scores.settings["max_new_tokens"] == 2048
    assert any("had room for 12 to 12 new tokens only, not 2048" in warning for warning in scores.warnings)
    assert any("3 prompts were cut at their beginning" in warning for warning in scores.warnings)
    assert [sample["budget"] for sample in scores.samples] == [12, 12, 12]
    assert all(sample["prompt_tokens_cut"] > 0 for sample in scores.samples)


@pytest.mark.contract
def test_answers_and_loglikelihoods_are_those_of_the_harnesss_own_model_class(harness, gated, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    tokenizer = tiny_tokenizer()
    options = {"data": DATA, "max_new_tokens": 12, "chat_template": False}
    ours = ask(gated, tokenizer, SUITES, **options)

    class Plain(HFLM):
        cut_choices = 0

        def generate_until(self, requests, disable_tqdm=True):
            texts = super().generate_until(requests, disable_tqdm=True)
            self.answers |= {
                (request.task_name, request.doc["loragate_index"]): Answer(text, 0, "stop", 12, 0)
                for request, text in zip(requests, texts)
            }
            return texts

    def plain(*_):
        model = Plain(pretrained=gated, tokenizer=tiny_tokenizer(), batch_size=8)
        model.answers = {}
        return model

    monkeypatch.setattr("loragate.evaluation.harness._bridge", plain)
    for name, theirs in ask(gated, tokenizer, SUITES, **options).items():
        assert theirs.prompts_hash == ours[name].prompts_hash
        assert theirs.harness_values == ours[name].harness_values
        for mine, other in zip(ours[name].samples, theirs.samples):
            assert mine.get("text") == other.get("text")
            assert mine.get("loglikelihoods", []) == pytest.approx(other.get("loglikelihoods", []), abs=1e-5)


@pytest.mark.contract
def test_the_strict_filter_and_the_subsets_are_still_the_harnesss_own(harness):
    tasks = Path(harness.__file__).parent / "tasks"
    pattern = load_suite("mmlu_pro").override["filter_list"][0]["filter"][0]["regex_pattern"]
    assert f"'{pattern}'" in (tasks / "mmlu_pro" / "_default_template_yaml").read_text(encoding="utf-8")
    for name in suite_names():
        suite = load_suite(name)
        for subset in suite.subsets or ("",):
            assert (tasks / suite.harness_files.format(subset=subset.replace(" ", "_"))).is_file()
        if suite.subsets:
            files = (tasks / suite.harness_files).parent.glob("[!_]*.yaml")
            assert len(list(files)) == len(suite.subsets)


def test_bbh_counts_by_its_subsets_and_every_suite_the_same_in_the_average():
    def measured(variant, scores, subsets=None):
        row = SimpleNamespace(variant=variant)
        return Measured(None, row, np.array(scores, dtype=float)[:, None], subsets or ("",) * len(scores), ())

    kinds = ("adapter", "base")
    rows = {"mmlu_pro": [1, 1, 0, 0, 0, 0, 0, 0], "bbh": [1, 1, 1, 1, 0, 1], "openbookqa": [1, 0]}
    subsets = {"mmlu_pro": ("law",) * 2 + ("math",) * 6, "bbh": ("a",) * 4 + ("b",) * 2, "openbookqa": None}
    found = {
        name: {
            kind: measured(kind, [1 - score for score in scores] if kind == "base" else scores, subsets[name])
            for kind in kinds
        }
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


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        (["mmlupro"], {}, "found the task 'mmlupro', expected one of .*did you mean 'mmlu_pro'"),
        (["humaneval"], {}, "runs code"),
        ("bbh", {}, "expected a list with at least one suite"),
        (["bbh"], {"data": {"openbookqa": "x.jsonl"}}, "found data for 'openbookqa'"),
        (["bbh"], {"limit": 0}, "found limit=0"),
        (["bbh"], {"max_new_tokens": True}, "found max_new_tokens=True"),
    ],
    ids=["unknown", "code", "text", "data", "limit", "tokens"],
)
def test_settings_that_cannot_be_used_are_refused(tasks, options, message):
    with pytest.raises(ConfigError, match=message):
        run_harness(None, tiny_tokenizer(), tasks, **options)


def test_a_tokenizer_without_a_template_needs_plain_prompts():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="chat_template=False"):
        run_harness(None, tokenizer, ["bbh"], data={"bbh": DATA["bbh"]})


def test_without_the_harness_the_way_to_install_it_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install loragate\[eval\]"):
        run_harness(None, tiny_tokenizer(), ["bbh"], data={"bbh": DATA["bbh"]})


def test_every_definition_is_complete():
    for path in DEFINITIONS.glob("*.yaml"):
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert set(fields) == {field.name for field in dataclasses.fields(load_suite(path.stem))}
        assert fields["name"] == path.stem


def test_suites_are_read_at_the_commit_of_their_task(monkeypatch):
    """docs/tasks.md promises it; without a pin the main branch is followed."""
    asked = []

    def refuse(source, *, split, revision):
        asked.append((source, revision))
        raise DataError("no connection.")

    monkeypatch.setattr("loragate.evaluation.harness_rows.load_rows", refuse)
    for name in suite_names():
        with pytest.raises(DataError, match=f"--data {name}=FILE"):
            load_questions(load_suite(name))
        source, revision = asked[-1]
        dataset = load_task(name).dataset
        assert source.split(":")[0] == dataset.hub
        assert revision == dataset.revision
    with pytest.raises(DataError):
        load_questions(load_suite("openbookqa"), revision="abc")
    assert asked[-1][1] == "abc"
    with pytest.raises(ConfigError, match="has no effect on the local"):
        load_questions(load_suite("openbookqa"), "rows.jsonl", revision="abc")
