"""The variant of the base is the base on disk, whatever the adapter changed beside its factors, or it is left out."""

import torch
from safetensors.torch import load_file, save_file

from loragate.evaluation.engines import side_by_side
from loragate.evaluation.variants import ModelVariant, acting, canary
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
    variants, left_out = side_by_side(loaded, "none")
    assert (ModelVariant("base") in variants, left_out) == (True, {})
    with acting(loaded.model, ModelVariant("base"), "adapter"):
        assert torch.equal(logits(loaded.model, token_ids), logits(tiny_base(), token_ids))
    figures = canary(loaded.model, loaded.tokenizer, ["w1 w2 w3"], "adapter")
    assert figures["adapter_from_base"] > 0


def test_where_there_is_no_base_it_is_left_out(tmp_path):
    write_base(tmp_path / "base")
    write_adapter(tmp_path / "adapter", tmp_path / "base", target_modules=["q_proj"], init_lora_weights="olora")
    variants, left_out = side_by_side(open_model(resolve(tmp_path / "adapter"), CPU), "none")
    assert ModelVariant("base") not in variants
    assert "λ = 0" in left_out["base"]
