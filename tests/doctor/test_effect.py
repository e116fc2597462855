"""What an adapter changes: against plain PyTorch on tiny random models."""

import numpy as np
import pytest
import torch

import loragate as lg
from loragate.doctor import examination
from loragate.doctor.effect import examine_effect
from loragate.doctor.exam_context import ASSUMED_FLOPS_PER_SECOND, LEAST_ROWS, ExamContext, ExamSettings, Prompt
from loragate.doctor.learned import examine_learned
from loragate.doctor.record import Measures, Static
from loragate.gates.strength import kind_of, layer_of, lora_paths
from loragate.models import Loading, resolve
from tiny import logits, shake, tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer, write_adapter, write_base


def exam_of(folder, tmp_path, **given):
    exam = ExamContext(resolve(str(folder)), tmp_path, Measures(Static("a", "b")), ExamSettings(max_new_tokens=6))
    exam.prompts = [Prompt(f"w{at} w7", "english") for at in range(6)]
    for name, rows in given.items():
        setattr(exam, name, rows)
    return exam


def written(tmp_path, base=None, **lora):
    base = base or tiny_base()
    write_base(tmp_path / "base", base, tiny_tokenizer())
    write_adapter(tmp_path / "adapter", tmp_path / "base", tiny_adapter(base=base, **lora))
    return tmp_path / "adapter"


def response_log_probs(exam, row):
    kept = torch.tensor(row["labels"])[1:] >= 0
    return logits(exam.model, torch.tensor([row["input_ids"]]))[0, :-1][kept].log_softmax(-1)


def nats(left, right):
    return torch.nn.functional.kl_div(right, left, reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}, {"target_modules": ["q_proj", "lm_head"]}])
def test_effect_and_cells_against_plain_pytorch(tmp_path, lora):
    base = tiny_base(tie_word_embeddings=False)
    exam = exam_of(written(tmp_path, base, **lora), tmp_path, data=tiny_rows(4))
    effect, findings = examine_effect(exam)
    assert not findings
    assert effect.source == "examples of rows in memory"
    assert effect.rows == 4
    adapter = [response_log_probs(exam, row) for row in exam.rows]
    with exam.model.disable_adapter():
        base = [response_log_probs(exam, row) for row in exam.rows]
    kl = torch.cat([nats(*both) for both in zip(adapter, base, strict=True)])
    entropy = [torch.special.entr(torch.cat(one).exp()).sum(-1).mean().item() for one in (base, adapter)]
    every = effect.classes[0]
    assert (every.name, every.tokens, effect.tokens) == ("all", len(kl), len(kl))
    assert every.kl.mean == pytest.approx(kl.mean().item(), rel=1e-4)
    assert [every.base.mean, every.adapter.mean] == pytest.approx(entropy, rel=1e-4)
    assert every.delta.mean == pytest.approx(entropy[1] - entropy[0], abs=1e-4)
    same = torch.cat(adapter).argmax(-1) == torch.cat(base).argmax(-1)
    assert effect.agree == pytest.approx(same.double().mean().item())

    paths = lora_paths(exam.model)
    places = {(layer_of(path), kind_of(path)) for path in paths}
    places |= {(layer, None) for layer, _ in places if layer is not None} | {(None, kind) for _, kind in places}
    assert {(cell.layer, cell.kind) for cell in effect.cells} == places
    assert effect.cell_tokens == len(kl)
    layers = {path: module for path, module in exam.model.named_modules() if hasattr(module, "lora_A")}
    for cell in effect.cells[::3]:
        off = [p for p in paths if cell.layer in (None, layer_of(p)) and cell.kind in (None, kind_of(p))]
        chosen = [module for name, module in layers.items() if name.removeprefix("base_model.model.") in off]
        for module in chosen:
            module._disable_adapters = True
        without = [response_log_probs(exam, row) for row in exam.rows]
        for module in chosen:
            module._disable_adapters = False
        expected = torch.cat([nats(*both) for both in zip(adapter, without, strict=True)]).mean().item()
        assert cell.nats == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_the_most_changed_tokens_stand_in_their_text(tmp_path):
    exam = exam_of(written(tmp_path), tmp_path, data=tiny_rows(8))
    changed = examine_effect(exam)[0].changed
    assert [one.kl for one in changed] == sorted((one.kl for one in changed), reverse=True)
    assert len(changed) == 12
    top = changed[0]
    text = " ".join((top.before + top.token + top.after).split())
    texts = [" ".join(exam.tokenizer.decode(row["input_ids"]).split()) for row in exam.rows]
    assert any(text in one for one in texts)
    assert len(top.base) == len(top.adapter) == 3
    assert top.base[0][1] >= top.base[1][1]


def test_without_examples_the_answers_of_both_are_read(tmp_path):
    folder = written(tmp_path)
    exam = exam_of(folder, tmp_path)
    plain = examine_effect(exam)[0]
    lg.save_gates(shake(lg.attach_gates(exam.model, lg.GateConfig(-6, 3))), tmp_path / "gated")
    gated = examine_effect(exam_of(tmp_path / "gated", tmp_path))[0]
    assert plain.source.startswith("answers of base and adapter to ")
    assert plain.tokens > 5
    assert plain.classes == gated.classes, "of a gated folder the plain adapter is examined"


def test_an_adapter_that_changes_nothing_is_said_to_be_off(tmp_path, monkeypatch):
    monkeypatch.setattr(examination, "PARTS", {"effect": examine_effect})
    folder = written(tmp_path, init_lora_weights=True)
    found = lg.examine(folder, data=[{"text": "w1 w2 w3 w4"}, {"text": "w5 w6"}])
    (error,) = [one for one in found.findings if one.code == "not-applied"]
    assert error.severity == "error"
    assert error.evidence["tokens"] == found.measures.effect.tokens == 4
    assert found.measures.effect.changed == ()
    assert found.measures.effect.agree == 1
    assert all(cell.nats == 0 for cell in found.measures.effect.cells)


def test_predictions_that_are_not_finite_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(examination, "PARTS", {"effect": examine_effect, "learned": examine_learned})
    found = lg.examine(written(tmp_path, lora_alpha=10**38), data=tiny_rows(5))
    assert [one.code for one in found.findings if one.severity == "error"] == ["weights-not-finite"]
    assert found.measures.effect is found.measures.learned is None


def test_in_bf16_an_adapter_acts(tmp_path):
    exam = exam_of(written(tmp_path), tmp_path, data=tiny_rows(5), loading=Loading(dtype="bfloat16"))
    effect, findings = examine_effect(exam)
    assert exam.model.dtype == torch.bfloat16
    assert not findings
    assert effect.classes[0].kl.mean > 0.01


def test_without_its_base_nothing_is_compared(tmp_path, monkeypatch):
    exam = exam_of(written(tmp_path), tmp_path, data=tiny_rows(5))
    heard = []
    exam.say = heard.append
    monkeypatch.setitem(vars(exam), "has_base", False)
    assert examine_effect(exam) == (None, [])
    assert heard[0].startswith("what the adapter changes is left out")


def test_rows_are_read_as_far_as_time_allows(tmp_path, monkeypatch):
    exam = exam_of(written(tmp_path), tmp_path, data=tiny_rows(20))
    mean = np.mean([len(row["input_ids"]) for row in exam.rows])
    parameters = sum(parameter.numel() for parameter in exam.model.parameters())
    monkeypatch.setitem(ASSUMED_FLOPS_PER_SECOND, "cpu", 2.0 * parameters * 10 * mean)  # ten rows a second
    some = exam.subsample_to_budget(exam.rows, 2, 2.01)
    assert [row["row"] for row in some] == list(range(0, 20, 2)), "spread over all"
    assert len(exam.subsample_to_budget(exam.rows, 2, 0.0)) == LEAST_ROWS
    monkeypatch.setitem(ASSUMED_FLOPS_PER_SECOND, "cpu", 1.0)
    effect = examine_effect(exam)[0]
    assert {(cell.layer is None) + (cell.kind is None) for cell in effect.cells} == {1}, "layers and kinds only"
