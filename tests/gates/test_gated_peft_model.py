"""A gated PeftModel: merging is refused before anything is changed, and saving writes the whole artifact."""

import copy
import json

import pytest
import torch
from peft import LoraConfig, PeftModel, PeftModelForCausalLM

import loragate as lg
from loragate.errors import ArtifactError, ConfigError, GateError
from loragate.gates.schema import read_gate_config
from tiny import logits, shake, tiny_adapter, tiny_base, tiny_tokenizer, write_adapter

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


@pytest.fixture
def told(caplog):
    """What was said since the last call."""

    def read():
        text = caplog.text
        caplog.clear()
        return text

    with caplog.at_level("WARNING", logger="loragate"):
        yield read


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_gated_model_is_pefts_own_with_a_class_of_ours(adapter, token_ids):
    own, plain = type(adapter), logits(adapter, token_ids)
    before = adapter.generate(input_ids=token_ids, max_new_tokens=4, do_sample=False)
    lg.attach_gates(adapter, lg.GateConfig(-1, 2, init_scale=0))
    assert isinstance(adapter, lg.GatedPeftModel)
    assert isinstance(adapter, PeftModelForCausalLM)
    assert adapter.generate(input_ids=token_ids, max_new_tokens=4, do_sample=False).equal(before)
    with adapter.disable_adapter():
        assert not torch.equal(logits(adapter, token_ids), plain)
    assert torch.equal(logits(adapter, token_ids), plain)
    lg.detach_gates(adapter)
    assert type(adapter) is own


def test_save_pretrained_writes_the_whole_artifact_and_from_pretrained_reads_it(saved, tmp_path, token_ids, told):
    model = PeftModel.from_pretrained(tiny_base(), saved / "adapter")
    shake(lg.attach_gates(model, CONFIG))
    model.save_pretrained(tmp_path / "gated")
    expected = ["README.md", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"]
    assert files(tmp_path / "gated") == [*expected, "gate_config.json", "gates.safetensors"]
    again = lg.GatedPeftModel.from_pretrained(tmp_path / "gated", dtype=torch.float32)
    assert isinstance(again, lg.GatedPeftModel)
    assert not any(parameter.requires_grad for parameter in again.parameters())
    assert torch.equal(logits(again, token_ids), logits(model, token_ids))
    on_base = lg.GatedPeftModel.from_pretrained(tiny_base(), tmp_path / "gated")
    assert torch.equal(logits(on_base, token_ids), logits(model, token_ids))
    with pytest.raises(ArtifactError, match="another base"):
        lg.GatedPeftModel.from_pretrained(tiny_base(seed=4), tmp_path / "gated")
    with pytest.raises(ConfigError, match="adapter_name has no effect"):
        lg.GatedPeftModel.from_pretrained(tiny_base(), tmp_path / "gated", adapter_name="mine")
    # as with PEFT, a second call writes over the first one
    shake(model, seed=9)
    model.save_pretrained(tmp_path / "gated", temperature=0.3)
    assert torch.equal(logits(lg.load_gated(tmp_path / "gated"), token_ids), logits(model, token_ids))
    model.save_pretrained(tmp_path / "gated")
    assert files(tmp_path / "gated") == [*expected, "gate_config.json", "gates.safetensors"], "no sampling is left"
    assert told() == ""
    with pytest.raises(ConfigError, match="would pickle"):
        model.save_pretrained(tmp_path / "other", safe_serialization=False)


def test_a_loaded_artifact_is_written_again_with_all_that_it_said(saved, tmp_path, token_ids):
    source = PeftModel.from_pretrained(tiny_base(), saved / "adapter")
    shake(lg.attach_gates(source, CONFIG))
    tiny_tokenizer().save_pretrained(tmp_path / "adapter")
    write_adapter(tmp_path / "adapter", saved / "base")
    evidence = {"training": {"steps": 3}, "selection": {"accepted": True}}
    more = {"k": 20, "adapter_id": "owner/adapter@v1", "stop_token_ids": [1, 9], "temperature": 0.3}
    lg.save_gates(source, tmp_path / "first", adapter_source=tmp_path / "adapter", evidence=evidence, **more)
    model = lg.load_gated(tmp_path / "first")
    model.save_pretrained(tmp_path / "second")
    assert files(tmp_path / "first") == files(tmp_path / "second")
    first, second = (read_gate_config(tmp_path / name) for name in ("first", "second"))
    assert first == second
    model.save_pretrained(tmp_path / "first")
    assert read_gate_config(tmp_path / "first") == second, "onto itself"
    shake(model, seed=9)  # other gates: what was measured of the first ones is not said of them
    model.save_pretrained(tmp_path / "third")
    third = read_gate_config(tmp_path / "third")
    assert (third["training"], third["k"], third.get("sampling")) == (None, None, None)
    assert (third["base"], third["adapter"]) == (first["base"], first["adapter"])
    assert third["stop_token_ids"] == first["stop_token_ids"]
    assert torch.equal(logits(lg.load_gated(tmp_path / "third"), token_ids), logits(model, token_ids))


def test_a_readme_of_the_users_stays(adapter, tmp_path):
    (tmp_path / "README.md").write_text("my notes")
    lg.attach_gates(adapter, CONFIG).save_pretrained(tmp_path, base_id="someone/base")
    assert (tmp_path / "README.md").read_text() == "my notes"
    assert read_gate_config(tmp_path)["base"]["id"] == "someone/base"


def test_several_adapters_are_laid_out_as_peft_does_it(tmp_path, token_ids, told):
    model = tiny_adapter()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    shake(lg.attach_gates(model, CONFIG, "second"), adapter_name="second")
    model.save_pretrained(tmp_path, base_id="someone/base")
    assert told() == ""
    assert (tmp_path / "adapter_config.json").is_file()
    assert "gate_config.json" in files(tmp_path / "second")
    model.save_pretrained(tmp_path / "one", selected_adapters=["default"])
    assert not (tmp_path / "one" / "second").exists()
    model.set_adapter("second")
    twin = lg.GatedPeftModel.from_pretrained(tiny_base(), tmp_path / "second")
    torch.testing.assert_close(logits(twin, token_ids), logits(model, token_ids))
    model.save_pretrained(tmp_path / "none", is_main_process=False)
    assert files(tmp_path / "none") == [] or not (tmp_path / "none").exists()


def test_a_second_adapter_is_not_put_where_the_plain_one_of_the_gates_lies(tmp_path):
    model = tiny_adapter()
    model.add_adapter("adapter", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    lg.attach_gates(model, CONFIG)
    with pytest.raises(GateError, match=r"the adapter 'adapter' would be written to .*selected_adapters"):
        model.save_pretrained(tmp_path / "two", base_id="someone/base")
    assert not (tmp_path / "two").exists()
    model.save_pretrained(tmp_path / "two", selected_adapters=["default"], base_id="someone/base")
    assert "gate_config.json" in files(tmp_path / "two")


def test_the_checkpoint_of_a_trainer_keeps_pefts_form_and_names_the_way_out(adapter, tmp_path, told):
    """From which transformers' Trainer resumes."""
    lg.attach_gates(adapter, CONFIG)
    assert told() == ""
    for place, more in (("checkpoint-3", {}), ("given", {"state_dict": adapter.state_dict()})):
        adapter.save_pretrained(tmp_path / place, **more)
        assert "loragate.save_gates(model, folder)" in told()
        with pytest.raises(ArtifactError, match=r"trainer's checkpoint.*loragate\.save_gates"):
            lg.load_gated(tmp_path / place)
    lg.detach_gates(adapter)
    adapter.save_pretrained(tmp_path / "plain")
    assert told() == ""
    before, after = (json.loads((tmp_path / at / "adapter_config.json").read_text()) for at in ("given", "plain"))
    for record in (before, after):
        record["target_modules"].sort()
    assert before == after
    with pytest.raises(ArtifactError, match=r"plain PEFT adapter without gates; calibrate it first.*--constant"):
        lg.load_gated(tmp_path / "plain")
    (tmp_path / "plain" / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ArtifactError, match="calibrate it first"):
        lg.load_gated(tmp_path / "plain")
