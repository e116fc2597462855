"""Losses on the examples, of tiny LoRAs that are trained in a second: their base, their strength, what they learnt."""

import json
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel

from loragate.analysis.rows import ClassEntropy, Interval
from loragate.data import Collator, encode_rows
from loragate.doctor import learned as learned_by
from loragate.doctor.answers import end_probability
from loragate.doctor.exam_context import ExamContext, ExamSettings, Losses
from loragate.doctor.learned import SCALES, examine_learned
from loragate.doctor.record import Effect, Measures, Static
from loragate.models import resolve
from tiny import TEMPLATE, WITH_SYSTEM, logits, tiny_adapter, tiny_base, tiny_tokenizer, write_adapter, write_base


def shifted(count, seed=0):
    """A task that a tiny LoRA learns: each word of the question, shifted by 40."""
    draw = random.Random(seed)
    questions = [[draw.randrange(20) for _ in range(4)] for _ in range(count)]
    texts = [[" ".join(f"w{word + step}" for word in one) for step in (0, 40)] for one in questions]
    return [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in texts]


def trained(base, rows, steps, template=TEMPLATE, system="none", **lora):
    model = tiny_adapter(base=base, init_lora_weights=True, **lora).train()
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    batch = Collator(0)(list(encode_rows(rows, tokenizer, max_length=64, system=system)))
    del batch["row"]
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], 0.01)
    for _ in range(steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    base = tiny_base(tie_word_embeddings=False)
    write_base(folder / "base", base, tiny_tokenizer())
    write_adapter(folder / "adapter", folder / "base", trained(base, shifted(24), 60))
    return folder


def examined(folder, tmp_path, data, base="", **given):
    kept = Path(tempfile.mkdtemp(dir=tmp_path))  # each examination has a folder of its own
    exam = ExamContext(resolve(str(folder), str(base)), kept, Measures(Static("a", "b")), ExamSettings(batch_size=32))
    exam.data, heard = data, []
    exam.say = heard.append
    for name, value in given.items():
        setattr(exam, name, value)
    learned, findings = examine_learned(exam)
    return exam, learned, [(one.code, one.severity) for one in findings], findings, heard


def with_alpha(folder, tmp_path, factor):
    shutil.copytree(folder, tmp_path / "scaled")
    file = tmp_path / "scaled" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] * factor}))
    return tmp_path / "scaled"


def test_losses_are_those_of_plain_pytorch(folder, tmp_path):
    exam, learned, codes, *_ = examined(folder / "adapter", tmp_path, shifted(6))
    assert not codes
    assert tuple(learned.scales) == SCALES
    layers = [module for module in exam.model.modules() if hasattr(module, "lora_A")]

    def loss():
        nats = []
        for row in exam.rows:
            labels = torch.tensor(row["labels"])[1:]
            log_p = logits(exam.model, torch.tensor([row["input_ids"]]))[0, :-1].log_softmax(-1)
            nats += [-log_p[at, labels[at]].item() for at in range(len(labels)) if labels[at] >= 0]
        return np.mean(nats)

    for strength in ("0", "0.5", "1"):
        for layer in layers:
            layer.scaling["default"] = 2 * float(strength)
        assert learned.scales[strength].mean == pytest.approx(loss(), rel=1e-4), "alpha / r is 2"
    for layer in layers:
        layer.scaling["default"] = 2.0
    with exam.model.disable_adapter():
        assert learned.base.mean == pytest.approx(loss(), rel=1e-4)
    assert learned.adapter == learned.scales["1"]
    assert learned.gain.mean == pytest.approx(learned.base.mean - learned.adapter.mean)
    assert learned.tokens == sum(label >= 0 for row in exam.rows for label in row["labels"])


@pytest.mark.parametrize(("factor", "code"), [(8, "too-strong"), (4, "too-strong"), (0.125, "too-weak")])
def test_a_lost_alpha_is_named_with_the_factor_that_mends_it(folder, tmp_path, factor, code):
    place = with_alpha(folder / "adapter", tmp_path, factor)
    _, _, codes, (finding,), _ = examined(place, tmp_path, shifted(24))
    assert [name for name, _ in codes] == [code]
    assert float(finding.evidence["best"]) == 1 / factor
    assert finding.remedy.endswith(f"multiply lora_alpha by {1 / factor:g}")
    assert finding.remedy.startswith("train longer") == (code == "too-weak")


def test_an_adapter_worse_than_its_base_at_every_strength_has_another_base(folder, tmp_path):
    """One base knows the task, and the adapter was trained on another one of the same shape."""
    base = PeftModel.from_pretrained(tiny_base(tie_word_embeddings=False), folder / "adapter").merge_and_unload()
    write_base(tmp_path / "base", base, tiny_tokenizer())
    other = tiny_base(7, tie_word_embeddings=False)
    write_adapter(tmp_path / "adapter", tmp_path / "base", trained(other, shifted(24), 15))
    _, learned, codes, (finding,), _ = examined(tmp_path / "adapter", tmp_path, shifted(24))
    assert codes == [("wrong-base", "error")]
    assert learned.gain.high < 0
    assert str(tmp_path / "base") in finding.remedy


def test_an_adapter_that_moves_much_and_gains_little_has_another_base(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(learned_by, "WORSE", 9.0)
    write_base(tmp_path / "other", tiny_base(5, tie_word_embeddings=False), tiny_tokenizer())
    none = Interval(3.0, None, None)
    moved = Effect("examples", 1, 1, 0.5, (ClassEntropy("all", 1, *[none] * 6),), 0, (), ())
    measures = replace(Measures(Static("a", "b")), effect=moved)
    _, _, codes, *_ = examined(folder / "adapter", tmp_path, shifted(24), tmp_path / "other", measures=measures)
    assert codes == [("wrong-base", "warning")]
    _, _, codes, *_ = examined(folder / "adapter", tmp_path, shifted(24), measures=measures)
    assert not codes, "on its own base it gains as much"


def test_what_was_learnt_by_heart_is_not_known_of_other_questions(tmp_path, monkeypatch):
    monkeypatch.setattr(learned_by, "BY_HEART", 0.5)  # training longer would take longer
    monkeypatch.setattr(learned_by, "ANSWER", 10.0)
    monkeypatch.setattr(learned_by, "MEMORIZED_LOSS_RATIO", 3.0)
    base = tiny_base(tie_word_embeddings=False)
    write_base(tmp_path / "base", base, tiny_tokenizer())
    rows = shifted(8)
    write_adapter(tmp_path / "adapter", tmp_path / "base", trained(base, rows, 80, r=16, lora_alpha=16))
    _, learned, codes, *_ = examined(tmp_path / "adapter", tmp_path, rows, dev_data=shifted(24, seed=1))
    assert codes == [("memorised", "warning")]
    assert learned.heldout.mean > learned.adapter.mean + 1
    _, _, codes, *_ = examined(tmp_path / "adapter", tmp_path, rows, dev_data=rows)
    assert not codes
    _, _, codes, (note,), _ = examined(tmp_path / "adapter", tmp_path, rows)
    assert codes == [("memorised", "note")]
    assert "--dev-data" in note.remedy
    short = [{"question": f"w{at} w3", "answer": "w9"} for at in range(8)]
    _, learned, codes, _, heard = examined(tmp_path / "adapter", tmp_path, rows, dev_data=short)
    assert (learned.heldout, codes) == (None, [("memorised", "note")])
    assert "of another kind" in heard[0]
    # the form that the documents name, which is no form of examples
    asked = [
        {"prompt": one["messages"][0]["content"], "answer": one["messages"][1]["content"]}
        for one in shifted(40, seed=1)
    ]
    _, learned, codes, _, heard = examined(tmp_path / "adapter", tmp_path, rows, dev_data=asked)
    assert (codes, heard) == ([("memorised", "warning")], [])
    raw = [{"completion": "w9", **one} for one in asked]
    _, learned, _, _, heard = examined(tmp_path / "adapter", tmp_path, rows, dev_data=raw)
    assert learned.heldout is None
    assert "one is text to complete" in heard[0]


def test_an_adapter_that_gained_nothing_says_so(tmp_path):
    base = tiny_base()
    write_base(tmp_path / "base", base, tiny_tokenizer())
    model = tiny_adapter(base=base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(1e-4)
    write_adapter(tmp_path / "adapter", tmp_path / "base", model)
    _, learned, codes, *_ = examined(tmp_path / "adapter", tmp_path, shifted(12))
    assert codes == [("nothing-learned", "warning")]
    assert abs(learned.gain.mean) < 0.01


def test_without_the_base_strengths_are_still_compared(folder, tmp_path, monkeypatch):
    place = with_alpha(folder / "adapter", tmp_path, 8)
    monkeypatch.setattr(ExamContext, "has_base", False)
    _, learned, codes, _, heard = examined(place, tmp_path, shifted(24))
    assert (learned.base, learned.gain, codes) == (None, None, [("too-strong", "warning")])
    assert "not compared with the base" in heard[0]


def test_rows_of_text_are_read_whole_and_cut_where_they_are_too_long(folder, tmp_path):
    texts = [{"text": " ".join(f"w{at + step}" for step in range(9))} for at in range(5)]
    exam, learned, *_ = examined(folder / "adapter", tmp_path, texts, settings=ExamSettings(max_length=6))
    assert (learned.rows, learned.tokens) == (5, 25)
    assert exam.rows[0]["labels"] == [-100, *exam.rows[0]["input_ids"][1:]]


def test_few_or_no_examples_give_no_verdict(folder, tmp_path):
    place = with_alpha(folder / "adapter", tmp_path, 8)
    _, learned, codes, _, heard = examined(place, tmp_path, shifted(2))
    assert (learned.rows, codes) == (2, [])
    assert "too few" in heard[0]
    assert examined(place, tmp_path, None)[1:3] == (None, [])


def test_examples_that_repeat_are_one_example(folder, tmp_path):
    place = with_alpha(folder / "adapter", tmp_path, 8)
    exam, learned, codes, _, heard = examined(place, tmp_path, shifted(1) * 4)
    assert (learned.rows, learned.adapter.low, codes) == (4, None, [])
    assert heard[0].startswith("1 different example: too few")
    assert end_probability(exam, exam.rows) is None
    (exam, learned, *_), (_, twice, *_) = (examined(place, tmp_path, shifted(6) * times) for times in (1, 2))
    assert (twice.rows, twice.adapter.low) == (12, pytest.approx(learned.adapter.low))
    assert twice.gain.high == pytest.approx(learned.gain.high)
    # what a resumed examination reads back as well
    resumed = replace(exam, _losses={})
    again = resumed.cached_losses("examples", "1", resumed.acting("adapter"))
    assert again.mean() == learned.adapter


def test_differences_are_paired():
    tokens = np.array([4.0, 6.0, 5.0])
    easy = Losses(np.array([4.0, 60.0, 1.0]), tokens, np.arange(3))
    found = easy.paired_difference(replace(easy, sums=easy.sums - 0.5 * tokens))
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))


@pytest.mark.parametrize("trained_with", ["keep", "none"])
def test_the_system_message_of_the_training_is_found(tmp_path, trained_with):
    base, tokenizer = tiny_base(tie_word_embeddings=False), tiny_tokenizer()
    tokenizer.chat_template = WITH_SYSTEM
    write_base(tmp_path / "base", base, tokenizer)
    model = trained(base, shifted(24), 60, WITH_SYSTEM, trained_with)
    write_adapter(tmp_path / "adapter", tmp_path / "base", model)
    other = "none" if trained_with == "keep" else "keep"
    for system, expected in ((trained_with, []), (other, [("system-message", "warning")])):
        settings = ExamSettings(batch_size=32, system=system)
        exam, learned, codes, findings, _ = examined(tmp_path / "adapter", tmp_path, shifted(24), settings=settings)
        assert [one for one in codes if one[0] == "system-message"] == expected
    assert f"--system {trained_with}" in findings[0].remedy
    assert findings[0].evidence[other] == pytest.approx(learned.adapter.mean)
    right = exam.losses(encode_rows(shifted(24), tokenizer, max_length=64, system=trained_with))
    assert findings[0].evidence[trained_with] == pytest.approx(right.mean().mean, rel=1e-4)
