"""PEFT's own saving of a gated adapter: it works as before, and says that the gates are lost on the way."""

import copy
import json
import pickle

import pytest
import torch
from peft import LoraConfig, PeftModel

import loragate as lg
from loragate.errors import ArtifactError
from tiny import logits, tiny_adapter, tiny_base

CONFIG = lg.GateConfig(-6, 3)


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
