"""The variant of the base is the base on disk, whatever the adapter changed beside its factors, or it is left out."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from loragate.errors import ConfigError
from loragate.evaluation.engines import EngineProvider, find_available_variants
from loragate.evaluation.settings import EngineSettings
from loragate.evaluation.variants import ModelVariant, activate_variant, canary, variants_for
from loragate.gates.strength import lora_paths, modules_of_part, scale_adapter
from loragate.models import Loading, open_model, resolve
from tiny import logits, tiny_base, write_adapter, write_base

CPU = Loading(device="cpu")


def test_the_base_of_an_adapter_with_weights_saved_along(tmp_path, token_ids):
    write_base(tmp_path / "base")
    write_adapter(
        tmp_path / "adapter", tmp_path / "base", target_modules=["q_proj"], trainable_token_indices=[7, 9], bias="all"
    )
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    state = {key: value + 0.3 if "lora_" not in key else value for key, value in load_file(file).items()}
    save_file({**state, "base_model.model.model.norm.weight": torch.full((32,), 2.0)}, file)
    loaded = open_model(resolve(tmp_path / "adapter"), CPU)
    variants, left_out = find_available_variants(loaded, "none")
    assert (ModelVariant("base") in variants, left_out) == (True, {})
    with activate_variant(loaded.model, ModelVariant("base"), "adapter"):
        assert torch.equal(logits(loaded.model, token_ids), logits(tiny_base(), token_ids))
    figures = canary(loaded.model, loaded.tokenizer, ["w1 w2 w3"], "adapter")
    assert figures["adapter_from_base"] > 0


def test_where_there_is_no_base_it_is_left_out(tmp_path):
    write_base(tmp_path / "base")
    write_adapter(tmp_path / "adapter", tmp_path / "base", target_modules=["q_proj"], init_lora_weights="olora")
    variants, left_out = find_available_variants(open_model(resolve(tmp_path / "adapter"), CPU), "none")
    assert ModelVariant("base") not in variants
    assert "λ = 0" in left_out["base"]


def test_a_constant_may_hold_for_a_part_of_the_model(tmp_path, token_ids):
    write_base(tmp_path / "base")
    write_adapter(tmp_path / "adapter", tmp_path / "base")
    loaded = open_model(resolve(tmp_path / "adapter"), CPU)
    variants, left_out = find_available_variants(loaded, "cheap", (0.5, "lower=0", "mlp=0.5", "upper=0"))
    half, lower, mlp = variants[-3:]
    assert [one.label for one in (half, lower, mlp)] == ["adapter λ=0.5", "adapter lower λ=0", "adapter mlp λ=0.5"]
    assert (lower.slug, lower.scale, lower.part) == ("adapter-lower-lambda0", 0.0, "lower")
    assert "λ for upper would have no effect" in left_out["adapter upper λ=0"]
    with scale_adapter(loaded.model, dict.fromkeys(modules_of_part("lower", lora_paths(loaded.model)), 0.0)):
        expected = logits(loaded.model, token_ids)
    with activate_variant(loaded.model, lower, "adapter"):
        torch.testing.assert_close(logits(loaded.model, token_ids), expected, atol=3e-3, rtol=0)
    engines = EngineProvider(EngineSettings(), str(tmp_path / "adapter"), "", loaded, tmp_path)
    assert [engines._vllm_names(one)[2] for one in (half, lower)] == ["constant=0.5", "lower=0.0"]


@pytest.mark.parametrize(
    ("lora", "why"),
    [
        ({"target_modules": ["v_proj"], "lora_bias": True}, "lora_bias=True adds a term"),
        ({"target_modules": ["v_proj"], "init_lora_weights": "olora"}, "λ = 0"),
        ({"target_modules": ["v_proj"], "alora_invocation_tokens": [4]}, "ALora variant"),
        ({"target_modules": ["embed_tokens", "lm_head"]}, "keeps full strength"),
    ],
    ids=["lora_bias", "OLoRA", "aLoRA", "embedding and head"],
)
def test_a_constant_that_an_adapter_cannot_have_is_left_out_with_the_reason(tmp_path, lora, why):
    write_base(tmp_path / "base")
    write_adapter(tmp_path / "adapter", tmp_path / "base", **lora)
    loaded = open_model(resolve(tmp_path / "adapter"), CPU)
    variants, left_out = find_available_variants(loaded)
    assert why in left_out["adapter λ=0.5"]
    for variant in variants:  # each can be, before the first answer is drawn
        with activate_variant(loaded.model, variant, "adapter"):
            pass


@pytest.mark.parametrize("text", ["lower=1", "lowwer=0.5", "clip=0:1", "lower=nan"])
def test_a_constant_that_is_none_or_without_effect_is_refused(text):
    with pytest.raises(ConfigError, match=f"--constants {text}: "):
        variants_for("adapter", constants=(text,))
