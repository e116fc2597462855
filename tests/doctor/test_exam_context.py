"""What an examination reads and asks: as the examples are written, whole or said to be cut."""

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from loragate.data import prompt_ids, render_prompt
from loragate.doctor import exam_context as exam_room
from loragate.doctor.exam_context import ExamContext, ExamSettings
from loragate.doctor.record import Measures, Static
from loragate.losses.head import IGNORE_INDEX
from loragate.models import resolve
from tiny import logits, tiny_adapter, tiny_rows, tiny_tokenizer, write_adapter, write_base

RAW = [{"prompt": f"w{at} w2", "completion": f" w{at} w9"} for at in range(12)]
DEV = [{"prompt": f"w{at} w1", "answer": "w3"} for at in range(40)]


@pytest.fixture
def made(tmp_path):
    """Makes an examination of a tiny adapter."""

    def make(tokenizer=None, lora=None, **given):
        write_base(tmp_path / "base", tokenizer=tokenizer or tiny_tokenizer())
        write_adapter(tmp_path / "adapter", tmp_path / "base", tiny_adapter(**(lora or {})))
        given = {"settings": ExamSettings(max_new_tokens=6), **given}
        return ExamContext(resolve(tmp_path / "adapter"), tmp_path, Measures(Static("a", "b")), **given)

    return make


@pytest.mark.parametrize("raw", [True, False])
def test_questions_are_asked_as_the_examples_are_written(made, monkeypatch, raw):
    exam = made(data=RAW if raw else tiny_rows(12), dev_data=DEV, retention_data=DEV)
    prompts = [one["prompt"] if raw else _turn(one["prompt"]) for one in DEV[:8]]
    assert exam.prompt_ids[-8:] == [prompt_ids(prompt, exam.tokenizer) for prompt in prompts]
    asked = []

    def evaluate(model, tokenizer, tasks, *_, **__):
        asked.append(tasks[0].prompts[:8])
        raise exam_room.GateError("seen")

    monkeypatch.setattr(exam_room, "evaluate", evaluate)
    assert exam.score_questions("dev") == exam.score_questions("retention") == {}
    assert asked == 2 * [tuple(render_prompt(prompt, exam.tokenizer) for prompt in prompts)]


def _turn(text):
    return [{"role": "user", "content": text}]


def test_examples_are_asked_up_to_their_first_response_once_each(made):
    system = {"role": "system", "content": "w1 w2"}
    asked = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}, *_turn("w5")]
    rows = [{"messages": [system, *asked, {"role": "assistant", "content": f"w{6 + at}"}]} for at in range(3)]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}<unk> {{ messages[0]['content'] }} {% endif %}"
        + (tokenizer.chat_template.replace("for m in messages", "for m in messages if m['role'] != 'system'"))
    )
    exam = made(tokenizer, data=rows)
    yours = [ids for ids, one in zip(exam.prompt_ids, exam.prompts, strict=True) if one.kind == "yours"]
    assert [exam.tokenizer.decode(ids) for ids in yours] == ["<unk> w1 w2 <user> w3 <assistant>"], (
        "one question, asked once"
    )
    assert "w1 w2" in exam.prompts[-1].text
    assert "w4" not in exam.prompts[-1].text


@pytest.mark.parametrize("given", ["data", "dev_data"])
def test_the_first_different_questions_are_asked(made, given):
    rows = [{"prompt": f"w{at // 5}", "response": f"w{at}", "answer": f"w{at}"} for at in range(60)]
    exam = made(**{given: rows})
    yours = [ids for ids, one in zip(exam.prompt_ids, exam.prompts, strict=True) if one.kind == "yours"]
    assert yours == [prompt_ids(_turn(f"w{at}"), exam.tokenizer) for at in range(8)]


def test_examples_that_are_too_long_are_counted(made):
    said = []
    rows = [{"prompt": "w1 " * (20 if at % 4 else 2), "response": "w3 " * (2 if at else 20)} for at in range(8)]
    exam = made(data=rows, settings=ExamSettings(max_length=12), say=said.append)
    assert [row["row"] for row in exam.rows] == [0, 4]
    assert len(said) == 1
    assert "of 8 rows (rows in memory) 6 not read, as the prompt alone takes 12 tokens, and 1 cut" in said[0]
    assert "--max-length" in said[0]


def test_a_text_with_its_own_bos_has_one_and_it_is_no_label(made):
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<user> $A", special_tokens=[("<user>", 3)])
    exam = made(tokenizer, data=[{"text": "<user> w1 w2"}, {"text": "w1 w2"}])
    for row in exam.rows:
        assert row["input_ids"] == [3, 6, 7]
        assert row["labels"] == [IGNORE_INDEX, 6, 7]


def test_an_activated_lora_acts_from_its_invocation_tokens_on(made):
    """<assistant>, token 4, begins every response: before it PEFT leaves the adapter out."""
    exam = made(data=tiny_rows(5), lora={"target_modules": ["q_proj", "v_proj"], "alora_invocation_tokens": [4]})

    def expected():
        nats = []
        for row in exam.rows:
            log_p = logits(exam.model, torch.tensor([row["input_ids"]]))[0].log_softmax(-1)
            nats.append(-sum(log_p[at - 1, one].item() for at, one in enumerate(row["labels"]) if one != IGNORE_INDEX))
        return nats

    sums = {}
    for kind in ("base", "adapter"):
        with exam.acting(kind):
            sums[kind] = list(exam.losses(exam.rows).sums)
            assert sums[kind] == pytest.approx(expected(), rel=1e-4)
    assert sums["base"] != pytest.approx(sums["adapter"], rel=1e-3)


def test_the_export_that_is_advised_is_of_the_commit_and_the_base_that_were_measured(made):
    exam = made()
    folder, base = exam.model_source.folder, exam.model_source.base
    assert f"loragate export {folder} --base {base} --constant 0.5 --out OUT" in exam.format_rescale_command("0.5")
