"""Merging a gated adapter is refused before anything of the model is changed, whatever stands before the first gate."""

import copy
import gc
import io
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model

import loragate as lg
from loragate.errors import GateError
from tiny import logits, tiny_adapter, tiny_base

CASES = {
    "some modules gated": ({}, ["down_proj"]),
    "an embedding": ({"target_modules": ["embed_tokens", "q_proj"]}, None),
    "a whole copy": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, None),
}


def gated(case):
    adapter, targets = CASES[case]
    model = tiny_adapter(base=tiny_base(tie_word_embeddings=False), **adapter)
    return lg.attach_gates(model, lg.GateConfig(-1, 2, target_modules=targets))


@pytest.mark.parametrize("method", ["merge_and_unload", "merge_adapter"])
@pytest.mark.parametrize("case", CASES)
def test_a_refused_merge_leaves_base_and_gated_model_as_they_were(case, method, token_ids):
    model = gated(case)
    before, modules = logits(model, token_ids), [name for name, _ in model.named_modules()]
    with model.disable_adapter():
        base = logits(model, token_ids)
    for asked in (model, copy.deepcopy(model)):
        with pytest.raises(GateError, match=r"detach_gates"):
            getattr(asked, method)()
        with pytest.raises(GateError, match=r"detach_gates"):
            getattr(asked, method)(safe_merge=True, adapter_names=["default"])
        assert torch.equal(logits(asked, token_ids), before)
        with asked.disable_adapter():
            assert torch.equal(logits(asked, token_ids), base)
        assert [name for name, _ in asked.named_modules()] == modules


def test_a_mixed_model_refuses_as_a_whole_too(token_ids):
    lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_base(), lora, mixed=True)
    lg.attach_gates(model, lg.GateConfig(-1, 2, target_modules=["down_proj"]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(GateError, match="detach_gates"):
        model.merge_adapter()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_other_adapters_and_detached_gates_merge_as_ever(token_ids):
    model = tiny_adapter()
    plain = logits(model, token_ids)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    lg.attach_gates(model, lg.GateConfig(-1, 2))
    model.merge_adapter(["second"])
    model.unmerge_adapter()
    with pytest.raises(GateError, match="cannot be merged"):
        model.merge_adapter(["second", "default"])
    model.delete_adapter("second")
    merged = lg.detach_gates(model).merge_and_unload()
    torch.testing.assert_close(logits(merged, token_ids), plain, rtol=1e-4, atol=1e-4)


def test_a_pickled_gated_model_refuses_too(token_ids):
    model = gated("an embedding")
    before, file = logits(model, token_ids), io.BytesIO()
    torch.save(model, file)
    del model
    file.seek(0)
    again = torch.load(file, weights_only=False)
    with pytest.raises(GateError, match="detach_gates"):
        again.merge_and_unload()
    assert torch.equal(logits(again, token_ids), before)


def test_a_deleted_gated_model_is_gone_at_once():
    model = gated("some modules gated")
    weights = weakref.ref(next(model.parameters()))
    gc.disable()
    try:
        del model
        assert weights() is None
    finally:
        gc.enable()
