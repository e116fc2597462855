"""What an adapter's files tell before a model is loaded: each kind of fault has a finding, and no folder is an exception."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from loragate.errors import ArtifactError
from loragate.gates.adapter_folder import UnusableAdapterError, read_adapter_folder
from loragate.gates.schema import copy_adapter
from tiny import tiny_adapter

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 9\n"


class Place:
    """An adapter's folder that a test spoils."""

    def __init__(self, path, **lora):
        self.path, self.weights = path, path / "adapter_model.safetensors"
        tiny_adapter(**{"target_modules": ["q_proj", "v_proj"], **lora}).save_pretrained(path)

    def config(self, **more):
        file = self.path / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))

    def tensors(self, change):
        save_file(dict(change(dict(load_file(self.weights)))), self.weights)

    def read(self):
        return read_adapter_folder(self.path)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "adapter")


def renamed(old, new):
    return lambda state: {key.replace(old, new): value for key, value in state.items()}


def every(change):
    return lambda state: {key: change(value) for key, value in state.items()}


def one(change, end="lora_B.weight"):
    def changed(state):
        key = next(key for key in state if key.endswith(end))
        return {**state, key: change(state[key].clone())}

    return changed


def shards(place):
    place.weights.rename(place.path / "adapter_model-00001-of-00002.safetensors")


def nested(place):
    torch.save({"state_dict": load_file(place.weights)}, place.path / "adapter_model.bin")
    place.weights.unlink()


def a_pickled_object(place):
    torch.save({"model": torch.nn.Linear(2, 2)}, place.path / "adapter_model.bin")
    place.weights.unlink()


def file(name, text):
    return lambda place: (place.path / name).write_text(text)


def tensors(change):
    return lambda place: place.tensors(change)


def config(**more):
    return lambda place: place.config(**more)


SPOILT = {
    "no weights": (
        lambda p: p.weights.unlink(),
        "weights-absent",
        "neither adapter_model.safetensors nor adapter_model.bin",
    ),
    "an empty file": (lambda p: p.weights.write_bytes(b""), "weights-absent", "not a readable safetensors file"),
    "a file cut off": (
        lambda p: os.truncate(p.weights, p.weights.stat().st_size // 2),
        "weights-absent",
        "not a readable",
    ),
    "a folder in place of the file": (
        lambda p: (p.weights.unlink(), p.weights.mkdir()),
        "weights-absent",
        "not a readable",
    ),
    "empty tensors": (tensors(every(lambda one: torch.zeros(0))), "weights-absent", "are empty.*ZeRO-3"),
    "NaN": (
        tensors(one(lambda value: value.fill_(float("nan")))),
        "weights-not-finite",
        "1 of its 8 tensors.*not finite",
    ),
    "infinity in fp16": (
        tensors(lambda state: every(torch.Tensor.half)(one(lambda value: value.fill_(float("inf")))(state))),
        "weights-not-finite",
        "not finite",
    ),
    "whole numbers": (
        tensors(every(lambda value: (20 * value).to(torch.int8))),
        "other-format",
        "8 of its 8 tensors hold whole numbers",
    ),
    "a pointer": (file("adapter_model.safetensors", POINTER), "other-format", "Git LFS pointer.*git lfs pull"),
    "a pointer of the configuration": (file("adapter_config.json", POINTER), "other-format", "Git LFS pointer"),
    "shards": (shards, "other-format", "in shards.*Join them"),
    "MLX": (lambda p: p.weights.rename(p.path / "adapters.safetensors"), "other-format", "MLX.*adapters.safetensors"),
    "MLX's configuration": (file("adapter_config.json", '{"lora_parameters": {"rank": 4}}'), "other-format", "MLX"),
    "MLX's names": (
        tensors(lambda state: renamed("lora_B.weight", "lora_b")(renamed("lora_A.weight", "lora_a")(state))),
        "other-format",
        "none of its 8 keys is a factor.*MLX",
    ),
    "a whole model": (lambda p: p.weights.rename(p.path / "model.safetensors"), "other-format", "a whole model"),
    "a checkpoint": (nested, "other-format", "expected tensors by their names, found state_dict"),
    "a pickled object": (a_pickled_object, "other-format", "more than tensors"),
    "no JSON": (file("adapter_config.json", "{"), "config-unreadable", "not a readable configuration"),
    "bytes": (
        lambda p: (p.path / "adapter_config.json").write_bytes(b"\xff\xfe\x00"),
        "config-unreadable",
        "not a readable",
    ),
    "a JSON list": (file("adapter_config.json", "[]"), "config-unreadable", "found a list"),
    "nothing in it": (file("adapter_config.json", "{}"), "config-unreadable", "no key 'peft_type'"),
    "no configuration": (
        lambda p: (p.path / "adapter_config.json").unlink(),
        "config-unreadable",
        "holds no adapter_config",
    ),
    "another method": (config(peft_type="LOHA"), "other-format", "peft_type is LOHA"),
    "an unknown method": (config(peft_type=3), "other-format", "peft_type is 3"),
    "lower case": (config(peft_type="lora"), "other-format", "Write it as 'LORA'"),
    "no rank": (config(r=None), "config-invalid", "'r' must be a whole number above 0, found None"),
    "a rank as text": (config(r="4"), "config-invalid", "found '4'"),
    "an endless alpha": (config(lora_alpha=float("inf")), "config-invalid", "'lora_alpha' must be a number"),
    "ranks as a list": (config(rank_pattern=[8]), "config-invalid", "'rank_pattern' must be whole numbers"),
    "no targets": (config(target_modules=[]), "config-invalid", "adapt nothing"),
    "targets as one text": (config(target_modules="q_proj,v_proj"), "config-invalid", "write it as a list"),
    "a broken pattern": (config(target_modules="(q_proj"), "config-invalid", "no valid regular expression"),
    "repeated layers": (config(layer_replication=[[0, 2], [1, 2]]), "layer-replication", "not the base at λ = 0"),
    "another rank": (config(r=8), "shape-mismatch", "says r = 8.*two trainings"),
    "a lone factor": (
        tensors(lambda state: {key: value for key, value in state.items() if "0.self_attn.q_proj.lora_B" not in key}),
        "keys-missing",
        r"1 of 4 modules have one factor alone.*q_proj \(only A\)",
    ),
    "no copies": (config(modules_to_save=["lm_head"]), "keys-missing", r"lack lm_head \(modules_to_save\)"),
    "no tokens": (config(trainable_token_indices=[1]), "keys-missing", "lack the trained token embeddings"),
    "a classifier": (
        lambda p: (
            p.config(task_type="SEQ_CLS"),
            p.tensors(lambda state: {**state, "base_model.model.score.weight": torch.ones(2, 32)}),
        ),
        "task-type",
        "task_type is SEQ_CLS, with a head",
    ),
    "CorDA": (config(init_lora_weights="corda"), "base-changing-init", "λ = 0"),
    "a random start": (config(init_lora_weights="pissa_niter_4"), "base-changing-init", "no loader finds"),
    "LoftQ": (config(init_lora_weights="loftq", loftq_config={"loftq_bits": 4}), "base-changing-init", "λ = 0"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_cannot_be_used_is_refused_from_the_files(place, name):
    spoil, code, words = SPOILT[name]
    place.read().require_usable("gate")
    spoil(place)
    found = place.read()
    assert code in [one.code for one in found.findings if one.severity == "error"], found.findings
    for purpose in ("load", "gate", "serve"):
        with pytest.raises(ArtifactError, match=words):
            found.require_usable(purpose)
    json.dumps([one.evidence for one in found.findings])


def test_nothing_in_a_folder_is_an_exception(tmp_path):
    for number, (record, weights) in enumerate(
        [
            (b"", b""),
            (b"null", b"{}"),
            (b'"text"', b"\x00" * 64),
            (b"[" * 100_000, b"PK\x03\x04"),
            (b'{"peft_type": "LORA"}', b"\xff" * 8 + b"x"),
            (b'{"peft_type": "LORA", "r": [], "lora_alpha": {}, "bias": [], "modules_to_save": {"a": 1}}', b"1"),
            (b'{"peft_type": "LORA", "r": 1e400, "task_type": [], "trainable_token_indices": 3, "revision": 3}', b"1"),
            (b'{"peft_type": {"a": []}, "base_model_name_or_path": ["x"]}', b"1"),
        ]
    ):
        for name in ("adapter_model.safetensors", "adapter_model.bin"):
            folder = tmp_path / f"{number}-{name}"
            folder.mkdir()
            (folder / "adapter_config.json").write_bytes(record)
            (folder / name).write_bytes(weights)
            with pytest.raises(UnusableAdapterError):
                read_adapter_folder(folder).require_usable()
    for nowhere in (tmp_path / "gone", tmp_path / f"0-{name}" / name, "\0"):
        with pytest.raises(UnusableAdapterError):
            read_adapter_folder(nowhere).require_usable()


def test_some_uses_alone_are_refused(tmp_path):
    def refused(name, **lora):
        found = Place(tmp_path / name, **lora).read()
        return [purpose for purpose in ("load", "gate", "serve") if any(one.forbids(purpose) for one in found.findings)]

    assert refused("plain") == []
    assert refused("untrained", init_lora_weights=True) == ["gate"]
    assert refused("dora", use_dora=True) == ["gate", "serve"]
    assert refused("alora", alora_invocation_tokens=[4]) == ["gate", "serve"]
    assert refused("pissa", init_lora_weights="pissa") == ["gate", "serve"]
    place = Place(tmp_path / "unknown")
    for start, forbidden in (("from data", True), ("gaussian", False), (True, False)):
        place.config(init_lora_weights=start)
        assert any(one.forbids("serve") for one in place.read().findings) == forbidden
    place.tensors(renamed(".weight", ".default.weight"))
    with pytest.raises(ArtifactError, match=r"an adapter's name in it.*loragate export .* --constant 1"):
        place.read().require_usable("serve")
    assert refused("high", r=600) == ["serve"]
    assert refused("copies", modules_to_save=["lm_head"]) == ["serve"]
    assert refused("tokens", trainable_token_indices=[3, 4]) == ["serve"]
    assert refused("biases", bias="lora_only") == ["serve"]
    assert refused("embedding", target_modules=["q_proj", "embed_tokens"]) == []
    for name, alpha, severity in (("strong", 400, "note"), ("off", 0, "warning"), ("reversed", -8, "warning")):
        found = Place(tmp_path / name, lora_alpha=alpha).read()
        severities = [one.severity for one in found.findings if one.code == "scale-unusual"]
        assert severities == [severity]


def test_what_is_changed_beside_the_factors_is_listed(tmp_path):
    whole = {
        "base_model.model.model.embed_tokens.weight": torch.ones(160, 32),
        "base_model.model.model.norm.weight": torch.ones(32),
    }
    for name, lora, more, words in (
        ("plain", {}, {}, []),
        ("copies", {"modules_to_save": ["lm_head"]}, {}, ["whole copies of lm_head (modules_to_save)"]),
        ("tokens", {"trainable_token_indices": [3, 4]}, {}, ["2 trained token embeddings (trainable_token_indices)"]),
        (
            "biases",
            {"bias": "lora_only"},
            {},
            ["4 biases saved along (model.layers.0.self_attn.q_proj.base_layer.bias, …)"],
        ),
        (
            "whole",
            {},
            whole,
            ["embeddings saved along (model.embed_tokens.weight)", "norms saved along (model.norm.weight)"],
        ),
    ):
        place = Place(tmp_path / name, **lora)
        place.tensors(lambda state, more=more: {**state, **more})
        found = place.read()
        assert list(found.non_lora_changes) == words
        assert any(one.code == "base-changed-beside" for one in found.findings) == bool(words)
        found.require_usable("gate")


def test_a_link_that_leads_nowhere_is_passed_over(place, tmp_path):
    (place.path / "latest").symlink_to("nowhere")
    found = place.read()
    found.require_usable("gate")
    assert "latest" not in found.files
    copy_adapter(place.path, tmp_path / "copy")
    read_adapter_folder(tmp_path / "copy").require_usable("gate")


def test_what_peft_reads_is_usable(place):
    place.config(task_type="SEQ_2_SEQ_LM", some_new_key={"a": 1}, megatron_config={"hidden_size": 32}, lora_dropout=0.1)
    place.tensors(renamed(".weight", ".default.weight"))
    place.read().require_usable("gate")
    torch.save(load_file(place.weights), place.path / "adapter_model.bin")
    place.weights.unlink()
    found = place.read()
    found.require_usable("gate")
    assert len(found.tensors) == 8
    assert found.weights.name == "adapter_model.bin"
