"""The adapter inside an artifact: every tensor and file of its source, whatever it changes beside A and B, read back."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import loragate as lg
from beside import BESIDE, loaded, make
from loragate.errors import ArtifactError
from loragate.gates import push, schema
from loragate.gates.artifact import write_adapter
from loragate.gates.schema import adapter_files, is_bitwise_equal, read_adapter
from loragate.selection.trials import copy_artifact
from tiny import logits, tiny_adapter, tiny_base

CONFIG = lg.GateConfig(-3, 2)


def require_same_tensors(one, other):
    left, right = read_adapter(one)[1], read_adapter(other)[1]
    assert left.keys() == right.keys()
    assert all(is_bitwise_equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("kind", BESIDE)
def test_the_copy_holds_every_tensor_and_computes_the_adapter(tmp_path, kind, form, token_ids):
    base, adapter = make(tmp_path, kind, form)
    model = loaded(kind, adapter)
    expected = logits(model, token_ids)
    lg.save_gates(lg.attach_gates(model, CONFIG), tmp_path / "gated", adapter_source=adapter)
    assert not list((tmp_path / "gated").rglob("*.bin"))
    require_same_tensors(adapter, tmp_path / "gated" / "adapter")
    again = lg.load_gated(tmp_path / "gated", base=str(base))
    with lg.gate_override(again, constant=1.0):
        assert torch.equal(logits(again, token_ids), expected)


@pytest.mark.parametrize("how", ["save_pretrained", "sft", "copied on"])
@pytest.mark.parametrize("kind", BESIDE)
def test_without_a_source_the_adapter_is_written_whole(tmp_path, kind, how, token_ids):
    """Of what was trained or saved along, PEFT writes only what it put there itself; the rest is found against the base."""
    base, adapter = make(tmp_path, kind)
    model = loaded(kind, adapter)
    expected = logits(model, token_ids)
    folder = tmp_path / "out"
    if how == "sft":
        write_adapter(model, "default", folder)
        require_same_tensors(adapter, folder)
        assert torch.equal(logits(loaded(kind, folder), token_ids), expected)
        return
    lg.attach_gates(model, CONFIG)
    if how == "save_pretrained":
        model.save_pretrained(folder)
    else:
        lg.save_gates(model, folder)
        copy_artifact(folder, tmp_path / "chosen", {}, 0.0)
        push.prepare_upload(tmp_path / "chosen", tmp_path / "sent", name="name", base_id="owner/name")
        folder = tmp_path / "sent"
    require_same_tensors(adapter, folder / "adapter")
    again = lg.load_gated(folder, base=str(base))
    with lg.gate_override(again, constant=1.0):
        assert torch.equal(logits(again, token_ids), expected)


def test_a_base_that_nobody_can_load_again_is_told(tmp_path, caplog, token_ids):
    """Another adapter merged into it, or a vocabulary of another size: no adapter brings that along."""
    base, _ = make(tmp_path, "factors alone")
    merged = tiny_adapter(seed=7).merge_and_unload()
    model = tiny_adapter(base=merged, target_modules=["q_proj"])
    lg.save_gates(lg.attach_gates(model, CONFIG), tmp_path / "merged", base_id=str(base))
    assert "the base in memory is not" in caplog.text
    assert 'base_id="FOLDER"' in caplog.text
    merged.save_pretrained(tmp_path / "whole")
    caplog.clear()
    large = tiny_base()
    large.resize_token_embeddings(170)
    lg.save_gates(lg.attach_gates(tiny_adapter(base=large), CONFIG), tmp_path / "large", base_id=str(base))
    assert "has a vocabulary of another size (model.embed_tokens.weight)" in caplog.text


FILES = (
    *("README.md", "chat_template.jinja", "chat_template.json", "tekken.json", "qwen.tiktoken", "tokenization_qwen.py"),
    *("source.spm", "generation_config.json", "additional_chat_templates/tool_use.jinja", "preprocessor_config.json"),
    *("tokenizer/tokenizer.model", "merges.txt", "a new kind of file"),
)
LEFT = (
    "optimizer.pt",
    "rng_state_0.pth",
    "training_args.bin",
    "checkpoint-20/adapter_config.json",
    "base.gguf",
    ".cache",
)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_every_file_comes_along_but_pickles_runs_and_other_weights(tmp_path, form):
    _, adapter = make(tmp_path, "factors alone", form)
    for name in (*FILES, *LEFT):
        (adapter / name).parent.mkdir(exist_ok=True)
        (adapter / name).write_text("{}" if name.endswith(".json") else name)
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"a_later_key": {"of": "another version"}}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    model = lg.attach_gates(loaded("factors alone", adapter), CONFIG)
    copy = lg.save_gates(model, tmp_path / "gated", adapter_source=adapter) / "adapter"
    for name in (*FILES, "adapter_config.json"):
        assert (copy / name).read_bytes() == (adapter / name).read_bytes(), name
    there = [path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()]
    assert sorted(there) == sorted([*FILES, "adapter_config.json", "adapter_model.safetensors"])
    push.prepare_upload(tmp_path / "gated", tmp_path / "sent", name="name", base_id="owner/name")
    assert {*FILES} - {*adapter_files(tmp_path / "sent" / "adapter")} == {"a new kind of file"}


def test_names_that_keep_the_adapters_own_name_are_written_as_peft_has_them(tmp_path, token_ids):
    base, adapter = make(tmp_path, "embeddings and head")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(
        {key.replace(".weight", ".default.weight") if "lora_" in key else key: tensors[key] for key in tensors}, file
    )
    model = loaded("embeddings and head", adapter)
    expected = logits(model, token_ids)
    lg.save_gates(lg.attach_gates(model, CONFIG), tmp_path / "gated", adapter_source=adapter)
    found = load_file(tmp_path / "gated" / "adapter" / "adapter_model.safetensors")
    assert found.keys() == tensors.keys()
    again = lg.load_gated(tmp_path / "gated", base=str(base))
    with lg.gate_override(again, constant=1.0):
        assert torch.equal(logits(again, token_ids), expected)


def test_a_module_that_is_loaded_in_16_bits_is_written_so_and_the_files_come_along(tmp_path, caplog, token_ids):
    base, adapter = make(tmp_path, "modules to save")
    (adapter / "tekken.json").write_text("{}")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="bfloat16"), adapter).eval()
    expected = logits(model, token_ids)
    lg.save_gates(lg.attach_gates(model, CONFIG), tmp_path / "gated", adapter_source=adapter)
    assert "in finer precision than they are loaded in" in caplog.text
    assert (tmp_path / "gated" / "adapter" / "tekken.json").is_file()
    again = lg.load_gated(tmp_path / "gated", base=str(base), dtype=torch.bfloat16)
    with lg.gate_override(again, constant=1.0):
        assert torch.equal(logits(again, token_ids), expected)
    lg.load_gated(tmp_path / "gated", base=str(base))


def test_a_faulty_disk_is_noticed(tmp_path, monkeypatch):
    """No command says that it is done where what lies on the disk is another thing."""
    _, adapter = make(tmp_path, "embeddings and head")
    model = lg.attach_gates(loaded("embeddings and head", adapter), CONFIG)
    right = schema.save_file

    def wrong(tensors, path, **more):
        right({key: value + (key.endswith("lm_head.weight")) for key, value in tensors.items()}, path, **more)

    monkeypatch.setattr(schema, "save_file", wrong)
    with pytest.raises(ArtifactError, match=r"lm_head\.weight is not what was to be written"):
        lg.save_gates(model, tmp_path / "written")
    monkeypatch.setattr(shutil, "copyfile", lambda source, target: target.write_bytes(source.read_bytes()[:-1]))
    with pytest.raises(ArtifactError, match=r"is not what .* holds"):
        lg.save_gates(model, tmp_path / "copied", adapter_source=adapter)
    for folder in ("written", "copied"):
        assert not (tmp_path / folder / "gate_config.json").exists()


def test_a_pickle_is_read_without_running_it(tmp_path):
    class Program:
        def __reduce__(self):
            return (print, ("ran",))

    _, adapter = make(tmp_path, "factors alone", "bin")
    torch.save({"a": Program()}, adapter / "adapter_model.bin")
    with pytest.raises(
        ArtifactError, match=r"adapter_model\.bin: not a readable file of tensors .*names print\)"
    ) as no:
        read_adapter(adapter)
    assert "weights_only" not in str(no.value), "torch's text tells how to run it all the same"
    torch.save([1], adapter / "adapter_model.bin")
    with pytest.raises(ArtifactError, match="must hold tensors by their names"):
        read_adapter(adapter)
