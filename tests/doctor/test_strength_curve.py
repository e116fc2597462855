"""The strength curve."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import loragate as lg
from loragate.doctor import examination, strength
from loragate.doctor.answers import examine_answers
from loragate.doctor.exam_context import STRENGTHS, ExamContext, ExamSettings, Losses, shipped_prompts
from loragate.doctor.record import Measures, Static
from loragate.doctor.strength import _choose_strengths, examine_strength
from loragate.losses.head import IGNORE_INDEX
from loragate.models import resolve
from loragate.models.export import export_adapter
from tiny import tiny_base, tiny_rows, tiny_tokenizer, write_adapter, write_base


@pytest.fixture
def exam(tmp_path):
    write_base(tmp_path / "base", tokenizer=tiny_tokenizer())
    write_adapter(tmp_path / "adapter", tmp_path / "base")
    (tmp_path / "run").mkdir()
    settings = ExamSettings(max_new_tokens=6)
    place = resolve(tmp_path / "adapter")
    return ExamContext(place, tmp_path / "run", Measures(Static("adapter", "base")), settings, data=tiny_rows(12))


def reference(model, rows, scale):
    """Nats per label of rows, one row at a time, with every LoRA layer's own scale replaced."""
    layers = [module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "scaling")]
    for layer in layers:
        layer.scaling["default"] *= scale
    sums = count = 0
    for row in rows:
        with torch.no_grad():
            log_probs = model(torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        for place, label in enumerate(row["labels"]):
            if label != IGNORE_INDEX:
                sums, count = sums - log_probs[place - 1, label].item(), count + 1
    for layer in layers:
        layer.scaling["default"] /= scale
    return sums / count


def test_points_are_losses_at_the_strength(exam):
    found, findings = examine_strength(exam)
    assert findings == []
    by_label = {point.label: point for point in found.points}
    assert [float(point.label) for point in found.points if point.group == "scale"] == list(STRENGTHS)
    assert {point.label for point in found.points if point.group != "scale"} == {
        *("lower 0", "lower 0.5", "middle 0", "middle 0.5"),  # two layers
        *("attention 0", "attention 0.5", "mlp 0", "mlp 0.5"),
    }
    base = reference(exam.model, exam.scoring_rows["base"], 1e-30)
    for scale in (0.5, 2.0):
        point = by_label[f"{scale:g}"]
        assert point.target.mean == pytest.approx(reference(exam.model, exam.rows, scale), rel=1e-3)
        lost = reference(exam.model, exam.scoring_rows["base"], scale) - base
        assert point.retention.mean == pytest.approx(lost, rel=1e-3, abs=1e-3)
    assert by_label["0"].retention.mean == pytest.approx(0.0, abs=1e-5)


def test_what_was_read_is_not_read_again(exam, monkeypatch):
    first, _ = examine_strength(exam)
    again = ExamContext(exam.model_source, exam.folder, exam.measures, exam.settings, data=exam.data)
    monkeypatch.setattr(ExamContext, "losses", lambda *_: pytest.fail("read again"))
    assert examine_strength(again)[0] == first


def losses(*means):
    """Rows of ten tokens that differ a little, of these mean losses by strength."""
    spread = np.linspace(-1, 1, 40)
    return {
        f"{scale:g}": Losses(10 * (mean + 0.01 * spread * scale), np.full(40, 10.0), np.arange(40))
        for scale, mean in zip(STRENGTHS, means, strict=True)
    }


@pytest.mark.parametrize(
    ("means", "least", "best"),
    [
        ((2.0, 1.0, 0.5, 0.2, 0.2, 0.3, 0.4, 0.6), "0.75", None),  # the last quarter does nothing
        ((2.0, 1.5, 1.2, 1.1, 1.0, 1.1, 1.2, 1.3), None, None),
        ((2.0, 1.9, 1.8, 1.7, 1.6, 1.2, 0.9, 1.4), None, "1.5"),  # too weak
        ((2.0, 1.5, 1.2, 1.1, 1.0, 0.9, 0.8, 0.7), None, None),  # somewhat better above 1, as every training leaves it
        ((2.0, 0.4, 0.9, 1.4, 1.9, 2.4, 2.8, 4.0), "0.25", "0.25"),  # too strong
        ((2.0, 0.2, 0.5, 0.2, 0.2, 0.3, 0.4, 0.6), "0.75", None),  # 0.25 keeps it, but 0.5 between does not
    ],
)
def test_the_least_strength_and_a_better_one(means, least, best):
    assert _choose_strengths(losses(*means), None, kept=False) == (least, best)


def test_scores_decide_where_there_are_any():
    scores = {
        f"{scale:g}": np.array([1.0] * round(40 * right) + [0.0] * round(40 * (1 - right)))
        for scale, right in zip(STRENGTHS, (0.1, 0.5, 0.7, 0.7, 0.7, 0.7, 0.6, 0.1), strict=True)
    }
    assert _choose_strengths(losses(*[1.0] * 8), scores, kept=False) == ("0.5", None)


def test_nothing_is_chosen_by_a_dev_set_on_which_nothing_is_right(exam, monkeypatch):
    said = []
    exam.say, exam.dev_data = said.append, []
    none = {f"{scale:g}": np.zeros(40) for scale in STRENGTHS}
    monkeypatch.setattr(ExamContext, "score_questions", lambda *_: none)
    monkeypatch.setattr(ExamContext, "prompts", shipped_prompts()[:2])
    found, _ = examine_strength(exam)
    assert found.decided_by == "loss"
    assert any("--dev-grader or --dev-task" in line for line in said)
    assert found.points[0].accuracy.mean == 0


def test_both_parts_give_a_retention_score_one_interval(exam, monkeypatch):
    exam.retention_data = []
    scores = {f"{scale:g}": np.array([1.0] * (40 - 4 * at) + [0.0] * 4 * at) for at, scale in enumerate(STRENGTHS)}
    monkeypatch.setattr(ExamContext, "score_questions", lambda *_: scores)
    monkeypatch.setattr(ExamContext, "prompts", shipped_prompts()[:2])
    asked, (points, _) = examine_answers(exam)[0], examine_strength(exam)
    kept = {point.label: point.kept for point in points.points}
    assert (asked.retention_base, asked.retention_adapter) == (kept["0"], kept["1"])


def test_an_adapter_that_takes_nothing_gives_nothing_back(exam, monkeypatch):
    read = ExamContext.cached_losses

    def likelier(exam, text, label, context):
        """The base's own answers are likelier with the adapter, the more the stronger it is."""
        found = read(exam, text, label, context)
        if text != "base":
            return found
        scale = 0.0 if label == "base" else float(label) if label[0].isdigit() else 1.0
        spread = 1 + 0.1 * np.linspace(-1, 1, len(found.sums))
        return replace(found, sums=found.tokens * (2 - 0.01 * scale * spread))

    monkeypatch.setattr(ExamContext, "cached_losses", likelier)
    monkeypatch.setattr(strength, "_choose_strengths", lambda *_: ("0.5", None))
    found, _ = examine_strength(exam)
    assert found.sentences[0].startswith(
        "At its own strength the adapter takes nothing from the base's own answers: they became likelier by 0.01"
    )
    assert "-" not in found.sentences[0]
    assert found.sentences[1].startswith(
        "0.5 times its strength keeps the loss on the examples and gives nothing back: "
    )


def test_a_base_that_cannot_be_had_has_no_curve(exam, monkeypatch):
    monkeypatch.setattr(ExamContext, "has_base", False)
    assert examine_strength(exam) == (None, [])


@pytest.mark.parametrize("modules", [["q_proj"], ["q_proj", "lm_head"]], ids=["all", "head"])
def test_an_adapter_is_exported_where_that_is_what_was_measured(tmp_path, monkeypatch, modules):
    """One λ leaves an adapted head at full strength; the curve scales it too."""
    write_base(tmp_path / "base", base=tiny_base(tie_word_embeddings=False), tokenizer=tiny_tokenizer())
    write_adapter(tmp_path / "adapter", tmp_path / "base", target_modules=modules)
    export_adapter(str(tmp_path / "adapter"), tmp_path / "half", constant=0.5)

    def examined(name):
        (tmp_path / f"run-{name}").mkdir()
        measures, settings = Measures(Static("adapter", "base")), ExamSettings(max_new_tokens=6)
        place = resolve(tmp_path / name)
        return ExamContext(place, tmp_path / f"run-{name}", measures, settings, data=tiny_rows(12), say=said.append)

    said = []
    exam, half = examined("adapter"), examined("half")
    monkeypatch.setattr(strength, "_choose_strengths", lambda *_: ("0.5", None))
    found, _ = examine_strength(exam)
    measured = next(point.target.mean for point in found.points if point.label == "0.5")
    same = half.losses(half.rows).mean().mean == pytest.approx(measured, rel=1e-5)
    assert same == (len(modules) == 1)
    assert any("loragate export" in sentence for sentence in found.sentences) == same
    assert any("lora_alpha" in sentence and "lm_head" in sentence for sentence in found.sentences) != same
    assert ("loragate export" in exam.format_rescale_command("0.5")) == same
    if not same:
        monkeypatch.setitem(exam.model_source.adapter_contents.config, "alpha_pattern", {"q_proj": 3})
        assert "lora_alpha, and what alpha_pattern holds, by 0.5" in exam.format_rescale_command("0.5")
        assert exam.score_questions("dev", STRENGTHS) == {}
        assert said == ["the dev set is not asked: one λ for the whole adapter does not reach lm_head"]


def test_the_curve_is_part_of_an_examination(exam, monkeypatch):
    monkeypatch.setattr(examination, "PARTS", {"strength": examine_strength})
    found = lg.examine(exam.model_source.folder, data=exam.data, settings=exam.settings)
    assert found.measures.strength.target == "loss"
    assert found.measures.strength.sentences
