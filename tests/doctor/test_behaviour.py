"""Behaviour: findings from hand-made answers on a tiny model, and what only the model itself can say against plain PyTorch."""

import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from loragate.doctor import answers
from loragate.doctor import exam_context as exam_module
from loragate.doctor.answers import end_probability, examine_answers
from loragate.doctor.exam_context import ExamContext
from loragate.doctor.record import Measures, Static
from loragate.errors import GateError
from loragate.gates.strength import scale_adapter
from loragate.generation import Sample, TransformersEngine
from loragate.models import open_model, resolve
from tiny import tiny_adapter, tiny_base, write_adapter, write_base

SENTENCE = "I do not know what to say to that."
GERMAN = "Das weiß ich leider nicht, und ich kenne nur die Tiere."
LOOP = "It is so. " * 8
THOUGHT = "<think>They ask something.</think>"


def byte_tokenizer():
    """A token for each byte beside <pad>, <eos> and two roles, so that any text comes back as it was."""
    names = ["<pad>", "<eos>", "<user>", "<assistant>"]
    words = [*names, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True) for name in names])
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}<user>{{ m['content'] }}{% else %}"
        "<assistant>{{ m['content'] }}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, **tokens)


TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A random base and an adapter that changes it a little."""
    root = tmp_path_factory.mktemp("place")
    base = tiny_base(vocab_size=len(TOKENIZER), max_position_embeddings=512)
    write_base(root / "base", base, TOKENIZER)
    write_adapter(root / "adapter", root / "base", tiny_adapter(base=base, lora_alpha=1))
    return root / "adapter"


@pytest.fixture(scope="module")
def loaded(place):
    """The model of `place`, for all tests that leave it as it is."""
    return open_model(resolve(str(place)))


@pytest.fixture
def examined(place, loaded, tmp_path):
    """examined(base, adapter): measures and codes → findings, where both answer each prompt with (text, finish reason).

    They are functions of the prompt's index and the prompt; the model is asked for nothing that is on file.
    """

    def examine(base=None, adapter=None, carried_on=None, **more):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        exam = ExamContext(resolve(str(place)), folder, Measures(Static("", "")), **more)
        exam.__dict__["loaded"] = loaded
        exam.__dict__["texts"] = {"base": [], "adapter": []}  # what is forgotten is tested below
        for kind, answer in (("base", base), ("adapter", adapter)):
            told = [answer(index, prompt) for index, prompt in enumerate(exam.prompts)] if answer else []
            write_samples(folder / f"answers-{kind}.jsonl", told)
        write_samples(folder / "answers-carried-on.jsonl", carried_on or [])
        if base is None:
            exam.__dict__["has_base"] = False
        found, findings = examine_answers(exam)
        return found, {one.code: one for one in findings}

    return examine


def write_samples(path, told):
    lines = []
    for question, (text, reason) in enumerate(told):
        ids = TOKENIZER(text, add_special_tokens=False)["input_ids"] + ([1] if reason == "stop" else [])
        lines.append(json.dumps(asdict(Sample(question, 0, text, tuple(ids), reason, 0.3))) + "\n")
    path.write_text("".join(lines))


def says(text, reason="stop"):
    return lambda index, prompt: (text, reason)


def mixed(first, other, count):
    """`first` to so many prompts, spread evenly, and `other` to the rest of the 48."""
    return lambda index, prompt: (first if index * count % 48 < count else other)(index, prompt)


def test_an_adapter_that_answers_as_its_base_has_no_finding_of_behaviour(examined):
    found, findings = examined(says(SENTENCE), says(SENTENCE))
    assert findings == {}
    assert found.base == found.adapter
    assert found.base.tokens == len(SENTENCE) + 1
    assert found.base.cut == found.base.repeats == 0
    assert found.base.thinking is None
    assert found.base.languages == 0
    assert len(found.pairs) == 48
    assert found.pairs[0].adapter == SENTENCE
    assert not found.pairs[0].flags


def test_repeats_are_counted_against_the_base(examined):
    looping, sound = says(LOOP, "length"), says(SENTENCE)
    found, findings = examined(sound, mixed(looping, sound, 20))
    assert findings["repeats"].severity == "warning"
    assert findings["repeats"].evidence["loops"] == 20
    assert found.adapter.repeats == pytest.approx(20 / 48)
    assert found.pairs[0].flags == ("cut", "repeats")
    assert "repeats" not in examined(sound, mixed(looping, sound, 6))[1]


def test_a_base_that_loops_itself_accuses_no_adapter(examined):
    looping, sound = says(LOOP), says(SENTENCE)
    assert not examined(looping, mixed(looping, sound, 30))[1]
    alone = examined(None, mixed(looping, sound, 40))
    assert "repeats" in alone[1]
    assert alone[0].base is None
    assert alone[0].forgetting == {}
    assert not examined(None, mixed(looping, sound, 20))[1]


def test_silence(examined):
    sound, silent = says(SENTENCE), says("")
    assert "empty-answers" in examined(sound, mixed(silent, sound, 24))[1]
    assert "empty-answers" not in examined(silent, silent)[1]


@pytest.mark.parametrize(("reason", "found"), [("length", True), ("stop", False)])
def test_answers_that_run_on_are_carried_on_before_they_are_called_endless(examined, monkeypatch, reason, found):
    monkeypatch.setattr(answers, "CONTINUATION_TOKENS", 16)
    long = says("What it was and " + "".join(f"when {word} " for word in "abcdefghij"), "length")
    _, findings = examined(says(SENTENCE), long, carried_on=[("and so on", reason)] * 8)
    assert ("never-stops" in findings) == found
    if found:
        assert "8 of 8" in findings["never-stops"].message
        assert findings["never-stops"].evidence["base_cut"] == 0


def test_where_the_base_does_not_end_either_it_is_a_note(examined):
    found = examined(says(SENTENCE, "length"), says(SENTENCE, "length"))[1]["never-stops"]
    assert found.severity == "note"


def test_examples_whose_end_was_not_learned(examined):
    rows = [{"prompt": f"Say {word}.", "response": f"{word}!"} for word in ("one", "two", "three", "four")]
    cut = says(SENTENCE, "length")
    found = examined(cut, cut, data=rows)[1]["never-stops"]  # a random model, which gives the end about 1/260
    assert found.severity == "warning"
    assert found.evidence["end_probability"] < 0.15
    assert "never-stops" not in examined(says(SENTENCE), says(SENTENCE), data=rows)[1]


def test_lost_thinking(examined):
    thinks, closed = says(f"{THOUGHT}\n\n{SENTENCE}"), says(f"{THOUGHT[:20]}", "length")
    found, findings = examined(thinks, says(SENTENCE))
    assert findings["lost-thinking"].evidence == {"thinks": 48, "lost": 48}
    assert found.base.thinking == 1
    assert found.adapter.thinking == 0
    assert "thinking" in found.pairs[3].flags
    assert "lost-thinking" not in examined(thinks, closed)[1]  # cut inside of its thoughts
    assert "lost-thinking" in examined(thinks, says(f"<think>\n\n</think>\n\n{SENTENCE}"))[1]
    assert "lost-thinking" not in examined(says(SENTENCE), says(SENTENCE))[1]


def test_language_drift_of_english_and_of_other_prompts(examined):
    in_own = {
        "de": GERMAN,
        "ru": "Я не знаю.",
        "zh": "我不知道。",
        "ja": "わかりません。",
        "ko": "모르겠습니다.",
        "hi": "मुझे नहीं पता।",
    }

    def base(index, prompt):
        return in_own.get(prompt.language, SENTENCE), "stop"

    found, findings = examined(base, says(SENTENCE))
    assert findings["language-drift"].evidence == {"strays": 6, "of": 6, "languages": ["en"]}
    assert found.base.languages == 0.5
    assert found.adapter.languages == 0
    drifted = examined(base, says(GERMAN))[1]["language-drift"]
    assert drifted.evidence["of"] == 20
    assert drifted.evidence["languages"] == ["de"]
    assert "language-drift" not in examined(base, base)[1]
    assert "language-drift" not in examined(says(SENTENCE), says(SENTENCE))[1]  # nothing to lose


def test_forgetting_is_what_the_bases_own_answers_lose(place, tmp_path):
    exam = ExamContext(resolve(str(place)), tmp_path, Measures(Static("", "")))
    exam.settings = replace(exam.settings, max_new_tokens=6)
    found, _ = examine_answers(exam)
    rows, model = exam.scoring_rows["base"], exam.model
    expected = {}
    for label, strength in (("0", None), ("0.5", 0.5), ("1", 1.0)):
        losses = []
        for row in rows:
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"][1:])
            with torch.no_grad(), model.disable_adapter() if strength is None else scale_adapter(model, strength):
                log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            at = (labels != -100).nonzero()[:, 0]
            losses.append(-log_probs[at, labels[at]].sum().item())
        expected[label] = np.array(losses)
    tokens = sum(sum(label != -100 for label in row["labels"]) for row in rows)
    for label in ("0.5", "1"):
        difference = (expected[label] - expected["0"]).sum() / tokens
        assert found.forgetting[label].mean == pytest.approx(difference, abs=1e-5)
    read = [pair.nats for pair in found.pairs if pair.nats is not None]
    assert len(read) == len(rows)
    assert found.pairs[rows[0]["row"]].nats is not None


@pytest.mark.parametrize(("alpha", "severity"), [(0.05, None), (100, "warning")])
def test_how_much_is_forgotten_decides(tmp_path, alpha, severity):
    base = tiny_base(vocab_size=len(TOKENIZER), initializer_range=0.6)  # of low entropy
    write_base(tmp_path / "base", base, TOKENIZER)
    write_adapter(tmp_path / "adapter", tmp_path / "base", tiny_adapter(base=base, lora_alpha=alpha))
    exam = ExamContext(resolve(str(tmp_path / "adapter")), tmp_path, Measures(Static("", "")))
    exam.settings = replace(exam.settings, max_new_tokens=6)
    found = [one for one in examine_answers(exam)[1] if one.code == "forgets"]
    assert [one.severity for one in found] == ([severity] if severity else [])


def test_end_probability_is_that_of_all_tokens_that_end_an_answer(place, tmp_path):
    exam = ExamContext(resolve(str(place)), tmp_path, Measures(Static("", "")))
    exam.data = [{"prompt": "Say one.", "response": "One."}, {"prompt": "Say more.", "response": "More and more."}]
    found = end_probability(exam, exam.rows)
    expected = []
    for row in exam.rows:
        assert row["labels"][-1] == 1
        with torch.no_grad():
            logits = exam.model(input_ids=torch.tensor([row["input_ids"]])).logits
        expected.append(logits[0, -2].softmax(-1)[1].item())
    assert found.mean == pytest.approx(np.mean(expected), rel=1e-4)
    assert (
        end_probability(exam, [{**row, "labels": [-100, *row["input_ids"][1:-1], -100]} for row in exam.rows]) is None
    )


def test_retention_questions(examined, monkeypatch):
    right = {"0": np.array([1.0] * 30 + [0.0] * 10), "1": np.array([1.0] * 15 + [0.0] * 25)}
    monkeypatch.setattr(ExamContext, "score_questions", lambda exam, name: right)
    found, findings = examined(says(SENTENCE), says(SENTENCE), retention_data=[{}])
    assert found.retention_base.mean == 0.75
    assert found.retention_adapter.mean == 0.375
    assert findings["forgets"].severity == "warning"
    assert "38 %" in findings["forgets"].message
    right["1"] = right["0"]
    assert "forgets" not in examined(says(SENTENCE), says(SENTENCE), retention_data=[{}])[1]


def test_retention_questions_that_nobody_answers_say_nothing_and_it_is_said(examined, monkeypatch):
    scores, said = {"0": np.zeros(48), "1": np.zeros(48)}, []
    monkeypatch.setattr(ExamContext, "score_questions", lambda exam, name: scores)
    examined(says(SENTENCE), says(SENTENCE), retention_data=[{}], say=said.append)
    assert any("by the grader default hardly an answer of base or adapter is right" in line for line in said)
    scores["0"] = np.ones(48)
    said.clear()
    examined(says(SENTENCE), says(SENTENCE), retention_data=[{}], say=said.append)
    assert not said


def test_with_every_retention_question_right_the_interval_has_a_width(examined, monkeypatch):
    scores = {"0": np.ones(48), "1": np.ones(48)}
    monkeypatch.setattr(ExamContext, "score_questions", lambda exam, name: scores)
    found, findings = examined(says(SENTENCE), says(SENTENCE), retention_data=[{}])
    assert found.retention_adapter.mean == 1
    assert 0.85 < found.retention_adapter.low < 0.95
    assert "forgets" not in findings


def test_retention_questions_are_not_asked_of_an_adapter_that_changes_nothing(examined, monkeypatch):
    def refuse(*given, **more):
        raise GateError("the adapter changes no logit")

    monkeypatch.setattr(exam_module, "evaluate", refuse)
    said, questions = [], [{"prompt": f"What is {number} + 1?", "answer": number + 1} for number in range(32)]
    found, findings = examined(says(SENTENCE), says(SENTENCE), retention_data=questions, say=said.append)
    assert found.retention_base is None
    assert "forgets" not in findings
    assert said == ["the retention set is not asked: the adapter changes no logit"]


def test_answers_are_drawn_in_smaller_batches_where_memory_is_too_small(place, tmp_path, monkeypatch):
    exam = ExamContext(resolve(str(place)), tmp_path, Measures(Static("", "")))
    exam.settings = replace(exam.settings, max_new_tokens=2)
    sizes, draw = [], TransformersEngine._generate_batch

    def with_little_memory(engine, causal, prompts, rows, config, limits):
        sizes.append(len(rows))
        if len(rows) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return draw(engine, causal, prompts, rows, config, limits)

    monkeypatch.setattr(TransformersEngine, "_generate_batch", with_little_memory)
    assert [one.question for one in exam.greedy_answers("base")] == list(range(48))
    assert sizes == [48, 24, 12, 12, 12, 12]
