"""Adapters that change more than A and B: with tensors of the base saved along, trained tokens, biases, whole modules."""

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from tiny import tiny_adapter, tiny_base, write_base

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
NORMS = ("model.layers.0.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight", "model.norm.weight")
UNTIED = {"tie_word_embeddings": False}
# what an adapter changes beside A and B: (settings of the base, of LoRA, tensors of the base that are saved along)
BESIDE = {
    "factors alone": ({}, {}, ()),
    "embeddings and head": (UNTIED, {}, VOCABULARY),
    "tied embeddings": ({}, {}, VOCABULARY[:1]),
    "norms": (UNTIED, {}, NORMS),
    "embeddings and norms": (UNTIED, {}, (*VOCABULARY, *NORMS)),
    "biases": ({}, {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"}, ()),
    "all biases": ({}, {"target_modules": ["q_proj", "v_proj"], "bias": "all"}, ()),
    "trained tokens": (
        {},
        {
            "trainable_token_indices": {"embed_tokens": [4, 9]},
            "ensure_weight_tying": True,
            "target_modules": ["q_proj"],
        },
        (),
    ),
    "a head of its own on tied embeddings": ({}, {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, ()),
    "modules to save": (UNTIED, {"modules_to_save": ["lm_head", "input_layernorm"], "target_modules": ["q_proj"]}, ()),
}


def make(place, kind, form="safetensors"):
    """(base folder, adapter folder) of a kind; what it changes beside A and B has other values than the base's."""
    of_base, lora, along = BESIDE[kind]
    if not (place / "base").exists():
        write_base(place / "base", **of_base)
    model = tiny_adapter(base=tiny_base(**of_base), **lora)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (
                "trainable_tokens_delta" in name
                or "modules_to_save" in name
                or (lora.get("bias") and name.endswith(".bias"))
            ):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.peft_config["default"].base_model_name_or_path = str(place / "base")
    model.save_pretrained(place / "adapter")
    file = place / "adapter" / "adapter_model.safetensors"
    tensors, base = load_file(file), dict(tiny_base(**of_base).named_parameters(remove_duplicate=False))
    tensors |= {f"base_model.model.{name}": base[name].detach() + 0.3 * torch.randn(base[name].shape) for name in along}
    if form == "safetensors":
        save_file(tensors, file, metadata={"format": "pt"})
    else:
        file.unlink()
        torch.save(tensors, place / "adapter" / "adapter_model.bin")
    return place / "base", place / "adapter"


def loaded(kind, adapter):
    return PeftModel.from_pretrained(tiny_base(**BESIDE[kind][0]), str(adapter)).eval()
