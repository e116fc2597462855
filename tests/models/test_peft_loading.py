"""Every tensor of an adapter's file is in the model, or it is refused; and the base beneath an adapter is the base."""

import json
import re

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import loragate as lg
from loragate.doctor.static import examine_static
from loragate.errors import ArtifactError, LoragateError
from loragate.gates.control import as_base, base_unavailable_reason
from loragate.models import load_adapter, resolve
from loragate.models.peft_loading import load_peft
from tiny import logits, tiny_adapter, tiny_base, write_base

Q = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.fixture
def place(tmp_path):
    write_base(tmp_path / "base")
    return tmp_path


def adapter(place, change=dict, base=None, **lora):
    """An adapter's folder whose file and configuration are changed: (folder, the model before)."""
    model = tiny_adapter(base=base, **{"target_modules": ["q_proj", "v_proj"], **lora})
    model.peft_config["default"].base_model_name_or_path = str(place / "base")
    model.save_pretrained(place / "adapter")
    file = place / "adapter" / "adapter_model.safetensors"
    save_file({key: value.clone() for key, value in change(load_file(file)).items()}, file)
    return place / "adapter", model


def record(folder, **more):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))


def without(text):
    return lambda state: {key: value for key, value in state.items() if text not in key}


def named(old, new):
    return lambda state: {key.replace(old, new): value for key, value in state.items()}


HALVES = {
    "renamed modules": ({}, named("q_proj", "query_proj"), {}, r"4 of its 8 tensors .*query_proj.*other names"),
    "a deeper base": (
        {"base": {"num_hidden_layers": 3}},
        dict,
        {},
        r"4 of its 12 .*layer 2, and this base ends with layer 1.*deeper",
    ),
    "a shallower base": (
        {"base": {"num_hidden_layers": 1}},
        dict,
        {},
        r"4 that this base needs .*Layers 1 to 1 are missing",
    ),
    "another wrapper": (
        {},
        named("model.model.", "model.language_model.model."),
        {},
        r"8 of its 8 .*rename the prefix",
    ),
    "no prefix": ({}, named("base_model.model.", ""), {}, r"8 of its 8 .*rename the prefix"),
    "outside target_modules": ({}, dict, {"target_modules": ["q_proj"]}, r"4 of its 8 .*target_modules does not name"),
    "other targets": (
        {},
        dict,
        {"target_modules": ["q_proj", "v_proj", "o_proj"]},
        r"4 that this base needs .*o_proj",
    ),
    "a module left out": ({}, without("0.self_attn.v_proj"), {}, r"2 that this base needs .*v_proj"),
    "another adapter's name": (
        {},
        named("lora_A.weight", "lora_A.policy.weight"),
        {},
        r"4 of its 8 .*lora_A.policy.weight",
    ),
    "biases that are not there": (
        {"bias": "lora_only"},
        without(".bias"),
        {},
        r"4 that this base needs .*base_layer.bias",
    ),
    "biases as PEFT called them up to 0.6": (
        {"bias": "lora_only"},
        named(".base_layer.bias", ".bias"),
        {},
        r"4 of its 12 .*proj.bias",
    ),
    "unknown biases": (
        {},
        lambda s: {**s, "base_model.model.model.norm.bias": torch.ones(32)},
        {},
        r"1 of its 9 .*norm.bias",
    ),
}


@pytest.mark.parametrize("name", HALVES)
def test_half_an_adapter_is_refused(place, name):
    how, change, config, words = HALVES[name]
    base = tiny_base(**how["base"]) if "base" in how else None
    folder, _ = adapter(place, change, **{**how, "base": base})
    record(folder, **config)
    for look in (
        lambda: load_adapter(tiny_base(), resolve(folder)),
        lambda: load_peft(tiny_base(), folder, trainable=True),
    ):
        with pytest.raises(ArtifactError, match=words):
            look()
    assert any(re.search(words, str(one)) for one in examine_static(str(folder))[1] if one.severity == "error")


RIGHT = {
    "as it is": ({}, dict, {}),
    "an adapter's name in the keys": ({}, named(".weight", ".default.weight"), {}),
    "a label of another task": ({}, dict, {"task_type": "SEQ_2_SEQ_LM"}),
    "a label of classifiers": ({}, dict, {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}),
    "no label": ({}, dict, {"task_type": None}),
    "an empty label": ({}, dict, {"task_type": ""}),
    "a label in small letters": ({}, dict, {"task_type": "causal_lm"}),
    "a label as Python prints it": ({}, dict, {"task_type": "TaskType.CAUSAL_LM"}),
    "patterns of null": ({}, dict, {"rank_pattern": None, "alpha_pattern": None}),
    "a list of no tokens": ({}, dict, {"trainable_token_indices": []}),
    "copies by the end of their names": ({"modules_to_save": ["layernorm"]}, dict, {}),
    "copies of which one is no module": ({"modules_to_save": ["norm", "embed"]}, dict, {}),
    "dropout": ({}, dict, {"lora_dropout": 0.5}),
    "Megatron's settings": ({}, dict, {"megatron_config": {"hidden_size": 32}}),
    "an initialisation that PEFT does not know": ({}, dict, {"init_lora_weights": "from data"}),
    "biases": ({"bias": "lora_only"}, dict, {}),
    "trained tokens": ({"trainable_token_indices": [5, 9]}, dict, {}),
    "trained tokens, tied": ({"trainable_token_indices": {"embed_tokens": [5]}, "ensure_weight_tying": True}, dict, {}),
    "copies": ({"modules_to_save": ["lm_head"]}, dict, {}),
    "an embedding under LoRA": ({"target_modules": ["q_proj", "embed_tokens"]}, dict, {}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_whole_loads_and_its_base_is_the_base(place, token_ids, name):
    how, change, config = RIGHT[name]
    model = tiny_adapter(**{"target_modules": ["q_proj", "v_proj"], **how})
    torch.manual_seed(7)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            trained = "trainable_tokens_delta" in key or "modules_to_save" in key
            if trained or (how.get("bias") and key.endswith("base_layer.bias")):
                parameter.normal_(std=0.3)
    model.save_pretrained(place / "adapter")
    model.peft_config["default"].base_model_name_or_path = str(place / "base")
    folder = place / "adapter"
    file = folder / "adapter_model.safetensors"
    save_file({key: value.clone() for key, value in change(load_file(file)).items()}, file)
    record(folder, base_model_name_or_path=str(place / "base"), **config)
    assert not any(one.severity != "note" for one in examine_static(str(folder))[1])

    loaded = load_adapter(tiny_base(), resolve(folder))
    expected, base = logits(model, token_ids), logits(tiny_base(), token_ids)
    torch.testing.assert_close(logits(loaded, token_ids), expected, rtol=0, atol=0)
    assert base_unavailable_reason(loaded) == ""
    with as_base(loaded):
        torch.testing.assert_close(logits(loaded, token_ids), base, rtol=0, atol=0)
    torch.testing.assert_close(logits(loaded, token_ids), expected, rtol=0, atol=0)


def test_weights_saved_along_are_displaced_and_put_back(place, token_ids):
    more = {
        "base_model.model.model.embed_tokens.weight": torch.randn(160, 32),
        "base_model.model.model.norm.weight": torch.rand(32),
    }
    folder, plain = adapter(place, lambda state: {**state, **more})
    loaded = load_adapter(tiny_base(), resolve(folder))
    assert not torch.equal(logits(loaded, token_ids), logits(plain, token_ids))
    before = logits(loaded, token_ids)
    gated = lg.attach_gates(loaded, lg.GateConfig(-1, 2))
    with lg.gate_override(gated, constant=0.0):
        assert not torch.equal(logits(gated, token_ids), logits(tiny_base(), token_ids))
    with as_base(gated):
        assert torch.equal(logits(gated, token_ids), logits(tiny_base(), token_ids))
    assert torch.equal(logits(lg.detach_gates(gated), token_ids), before)


def test_of_a_model_from_elsewhere_the_biases_are_not_known(place):
    folder, _ = adapter(place, bias="lora_only")
    assert "trained biases along" in base_unavailable_reason(PeftModel.from_pretrained(tiny_base(), folder))
    assert base_unavailable_reason(tiny_adapter()) == ""


def test_an_initialisation_that_changed_the_base_leaves_none(place):
    folder, _ = adapter(place, init_lora_weights="olora")
    loaded = load_adapter(tiny_base(), resolve(folder))
    assert "λ = 0" in base_unavailable_reason(loaded)


@pytest.mark.parametrize("start", ["pissa_niter_4", "lora_ga", "corda"])
def test_a_start_that_no_loader_finds_again_is_refused(place, start):
    folder, _ = adapter(place)
    record(folder, init_lora_weights=start)
    for trainable in (False, True):
        with pytest.raises(ArtifactError, match=r"no loader finds these .*where it was trained.*path_initial_model"):
            load_peft(tiny_base(), folder, trainable=trainable)
    assert {one.code for one in examine_static(str(folder))[1] if one.severity == "error"} == {"base-changing-init"}


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_start_that_is_found_again_loads_and_is_told(place, token_ids, caplog, start):
    folder, model = adapter(place, init_lora_weights=start)
    with caplog.at_level("WARNING", "loragate"):
        loaded = load_peft(tiny_base(), folder)
    torch.testing.assert_close(logits(loaded, token_ids), logits(model, token_ids), rtol=1e-4, atol=1e-4)
    assert f"init_lora_weights='{start}' subtracts" in caplog.text


def test_a_key_that_this_peft_does_not_know_is_told(place, caplog):
    folder, _ = adapter(place)
    of_others = {"unsloth_version": "2026.9", "swift_extra": {"a": 1}, "lorap_emb_lr": 1e-6, "runtime_config": {"a": 1}}
    record(folder, **of_others, future_list=[], future_flag=False, future_value=None)
    with caplog.at_level("WARNING", "loragate"):
        load_peft(tiny_base(), folder)
    assert caplog.text == ""
    assert examine_static(str(folder))[1] == []
    record(folder, some_future_variant={"x": 1})
    with caplog.at_level("WARNING", "loragate"):
        load_peft(tiny_base(), folder)
    assert re.search(r"PEFT [\d.]+ does not know some_future_variant=\{'x': 1\}.*Upgrade peft", caplog.text)
    (found,) = examine_static(str(folder))[1]
    assert (found.code, found.severity, found.evidence["keys"]) == (
        "config-invalid",
        "warning",
        ["some_future_variant"],
    )


def test_an_adapter_without_a_label_acts_on_the_invocation_of_an_alora(place, token_ids):
    folder, model = adapter(place, alora_invocation_tokens=token_ids[0, 1:3].tolist())
    record(folder, task_type=None)
    loaded = load_peft(tiny_base(), folder)
    assert not torch.equal(logits(loaded, token_ids), logits(tiny_base(), token_ids))
    assert torch.equal(logits(loaded, token_ids), logits(model, token_ids))


def test_trained_tokens_beyond_the_vocabulary_of_the_base(place):
    big = tiny_base()
    big.resize_token_embeddings(168)
    folder, _ = adapter(place, without("base_layer"), base=big, trainable_token_indices=[161, 162])
    words = "has the token 162, and this base has embeddings for 160 tokens.*resize_token_embeddings"
    with pytest.raises(ArtifactError, match=words):
        load_adapter(tiny_base(), resolve(folder))
    (found,) = [one for one in examine_static(str(folder))[1] if one.severity == "error"]
    assert found.code == "shape-mismatch"
    assert re.search(words, str(found))


def test_what_peft_cannot_follow_is_one_sentence(place):
    folder, _ = adapter(place)
    record(folder, layers_to_transform="all")
    with pytest.raises(ArtifactError, match="'layers_to_transform' must be a layer's number"):
        resolve(folder)
    record(folder, layers_to_transform=None, arrow_config={})
    with pytest.raises(LoragateError, match=r"adapter .* cannot be loaded: AttributeError"):
        load_adapter(tiny_base(), resolve(folder))


def test_targets_and_patterns_of_other_names_are_told(place, caplog):
    folder, _ = adapter(place, alpha_pattern={"layers.0.self_attn.q_proj": 3})
    with caplog.at_level("WARNING", "loragate"):
        load_peft(tiny_base(), folder)
    assert caplog.text == ""
    record(folder, alpha_pattern={"language_model.layers.0.self_attn.q_proj": 3})
    with caplog.at_level("WARNING", "loragate"):
        load_peft(tiny_base(), folder)
    words = "no adapted module of this base is called as in alpha_pattern: 'language_model.layers.0"
    assert words in caplog.text
    assert [one.code for one in examine_static(str(folder))[1] if words in str(one)] == ["config-invalid"]
    record(folder, target_modules=r"^language_model\..*q_proj$", alpha_pattern={})
    renamed = "Target modules .*language_model.model of a vision-language model is model.language_model now"
    with pytest.raises(ArtifactError, match=renamed) as refused:
        load_adapter(tiny_base(), resolve(folder))
    assert "resize_token_embeddings" not in str(refused.value)
    assert any(re.search(renamed, str(one)) for one in examine_static(str(folder))[1])


def test_dense_layers_beside_experts_of_earlier_transformers(place):
    sizes = {"vocab_size": 160, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "mlp_only_layers": [0]}
    shape = Qwen3MoeConfig(**sizes, **heads, intermediate_size=48, num_experts=2, num_experts_per_tok=1)
    Qwen3MoeForCausalLM(shape).save_pretrained(place / "base")
    paths = {"0.self_attn.q_proj": (32, 32), "1.self_attn.q_proj": (32, 32)}
    for mlp, inner in {"0.mlp": 48, "1.mlp.experts.0": 16, "1.mlp.experts.1": 16}.items():
        paths |= {f"{mlp}.gate_proj": (32, inner), f"{mlp}.up_proj": (32, inner), f"{mlp}.down_proj": (inner, 32)}
    state = {}
    for path, (width, height) in paths.items():
        state[f"base_model.model.model.layers.{path}.lora_A.weight"] = torch.randn(4, width)
        state[f"base_model.model.model.layers.{path}.lora_B.weight"] = torch.randn(height, 4)
    folder, _ = adapter(place, lambda _: state)
    record(folder, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    (found,) = [one for one in examine_static(str(folder))[1] if one.severity == "error"]
    assert "single experts, as transformers 4 had them" in str(found)
    assert "not covered (here model.layers.0.mlp.gate_proj)" in str(found)
    assert "two trainings" not in str(found)


def test_experts_of_earlier_transformers_load_whatever_their_dropout(place, token_ids):
    shape = {
        "vocab_size": 160,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    base = MixtralForCausalLM(
        MixtralConfig(**shape, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1)
    ).eval()
    state = {}
    paths = {"self_attn.q_proj": (32, 32)} | {
        f"block_sparse_moe.experts.{expert}.{name}": (48, 32) if name == "w2" else (32, 48)
        for expert in range(2)
        for name in ("w1", "w2", "w3")
    }
    for path, (width, height) in paths.items():
        state[f"base_model.model.model.layers.0.{path}.lora_A.weight"] = torch.randn(4, width)
        state[f"base_model.model.model.layers.0.{path}.lora_B.weight"] = torch.randn(height, 4) * 0.1
    folder, _ = adapter(place, lambda _: state)
    record(folder, target_modules=["q_proj", "w1", "w2", "w3"], lora_dropout=0.05)
    plain = logits(base, token_ids)
    loaded = load_peft(base, folder)
    assert not torch.equal(logits(loaded, token_ids), plain)
    record(folder, target_modules=["q_proj", "w1", "w2", "w3", "k_proj"])
    with pytest.raises(ArtifactError, match="k_proj"):
        load_peft(MixtralForCausalLM(base.config), folder)


def test_ranks_of_fused_experts_go_by_the_names_of_their_parameters(place, token_ids):
    sizes = {"vocab_size": 160, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    base = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2)).eval()
    base.save_pretrained(place / "moe")
    names = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    ranks = {"rank_pattern": {"experts.gate_up_proj": 3, "experts.down_proj": 5}, "alpha_pattern": {"gate_up_proj": 64}}
    folder, model = adapter(place, base=base, target_parameters=names, r=8, **ranks)
    loaded = load_peft(Qwen3MoeForCausalLM.from_pretrained(place / "moe"), folder)
    torch.testing.assert_close(logits(loaded, token_ids), logits(model, token_ids), rtol=0, atol=0)
    record(folder, rank_pattern={"experts.gate_up_proj": 3})
    with pytest.raises(ArtifactError, match="another rank than the configuration"):
        load_peft(Qwen3MoeForCausalLM.from_pretrained(place / "moe"), folder)


@pytest.mark.parametrize(
    ("layers", "words"),
    [("", "14 modules have B = 0"), ("layers.1.", "7 modules have B = 0 .of 14")],
    ids=["all", "one"],
)
def test_an_adapter_that_acts_in_part_or_not_at_all_is_told_when_it_is_loaded(tmp_path, caplog, layers, words):
    tiny_adapter().save_pretrained(tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    state = load_file(weights)
    save_file({key: value * 0 if "lora_B" in key and layers in key else value for key, value in state.items()}, weights)
    with caplog.at_level("WARNING", "loragate"):
        load_peft(tiny_base(), tmp_path / "adapter")
    assert re.search(words, caplog.text)
