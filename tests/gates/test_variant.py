"""PEFT and a gated adapter: merging is refused before anything is changed, and PEFT's own saving says that gates are lost."""

import copy
import gc
import io
import json
import pickle
import weakref

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

import loragate as lg
from loragate.errors import ArtifactError, GateError
from tiny import logits, tiny_adapter, tiny_base

CONFIG = lg.GateConfig(-6, 3)
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


@pytest.fixture
def told(caplog):
    """What was said since the last call."""

    def read():
        text = caplog.text
        caplog.clear()
        return text

    with caplog.at_level("WARNING", logger="loragate"):
        yield read


def test_save_pretrained_of_a_gated_model_names_the_way_out(adapter, tmp_path, told):
    lg.attach_gates(adapter, CONFIG)
    assert told() == ""
    adapter.save_pretrained(tmp_path)
    said = told()
    assert "loragate.save_gates(model, folder)" in said
    assert str(tmp_path) in said
    plain = tmp_path / "plain"
    lg.detach_gates(adapter)
    adapter.save_pretrained(plain)
    assert told() == ""
    before, after = (json.loads((place / "adapter_config.json").read_text()) for place in (tmp_path, plain))
    for record in (before, after):
        record["target_modules"].sort()
    assert before == after


def test_a_folder_that_lost_its_gates_is_told_from_a_plain_adapter(adapter, tmp_path):
    adapter.save_pretrained(tmp_path / "plain")
    lg.attach_gates(adapter, CONFIG)
    adapter.save_pretrained(tmp_path / "lost")
    with pytest.raises(ArtifactError, match=r"save_pretrained from a gated model.*loragate\.save_gates"):
        lg.load_gated(tmp_path / "lost")
    with pytest.raises(ArtifactError, match="plain PEFT adapter without gates; calibrate it first"):
        lg.load_gated(tmp_path / "plain")
    (tmp_path / "plain" / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ArtifactError, match="calibrate it first"):
        lg.load_gated(tmp_path / "plain")


def test_save_gates_is_silent_and_leaves_the_warning_on(tmp_path, told):
    model = lg.attach_gates(tiny_adapter(), CONFIG)
    lg.save_gates(model, tmp_path / "gated", base_id="someone/base")
    assert told() == ""
    lg.load_gates(PeftModel.from_pretrained(tiny_base(), tmp_path / "gated" / "adapter"), tmp_path / "gated")
    assert told() == ""
    model.save_pretrained(tmp_path / "lost")
    assert "save_gates" in told()


def test_only_the_gated_adapter_of_a_shared_configuration_warns(tmp_path, told):
    settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = tiny_adapter()
    model.add_adapter("first", settings)
    model.add_adapter("second", settings)
    lg.attach_gates(model, CONFIG, "second")
    model.save_pretrained(tmp_path / "a", selected_adapters=["default", "first"])
    settings.save_pretrained(tmp_path / "b")
    assert told() == ""
    model.save_pretrained(tmp_path / "c")
    assert told().count("'second'") == 1
    model.delete_adapter("second")
    model.add_adapter("second", settings)
    model.save_pretrained(tmp_path / "d")
    assert told() == ""


def test_copies_and_natively_loaded_adapters_warn_for_themselves(adapter, tmp_path, told, token_ids):
    adapter.save_pretrained(tmp_path / "adapter")
    lg.attach_gates(adapter, CONFIG)
    twin = copy.deepcopy(adapter)
    lg.detach_gates(adapter)
    adapter.save_pretrained(tmp_path / "a")
    assert told() == ""
    twin.save_pretrained(tmp_path / "b")
    assert "save_gates" in told()
    assert twin.peft_config["default"] is not adapter.peft_config["default"]
    again = pickle.loads(pickle.dumps(twin))
    assert torch.equal(logits(again, token_ids), logits(twin, token_ids))
    native = tiny_base()
    native.load_adapter(str(tmp_path / "adapter"))
    lg.attach_gates(native, CONFIG)
    native.save_pretrained(tmp_path / "native")
    assert "save_gates" in told()
    with pytest.raises(ArtifactError, match="save_pretrained from a gated model"):
        lg.load_gated(tmp_path / "native")
