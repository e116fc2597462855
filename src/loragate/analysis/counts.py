"""A model without weights, built on the meta device from its configuration, and counted: for `inspect`, `plan` and recipes.

A 70B model with LoRA and gates on it takes a second or two.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from loragate.errors import ConfigError
from loragate.gates.attach import gate_layer
from loragate.gates.eligibility import examine_adapter, lora_layers
from loragate.gates.gate import GateConfig
from loragate.training.sharding import decoder_layers
from loragate.validate import comma_list

LINEAR = (nn.Linear, Conv1D)  # GPT-2 keeps the weights of its linear layers transposed


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, and the shapes that cost and memory follow from.

    Attributes:
        gates: 0 for Stage I.
        linear: weights of the base's linear layers and experts, without the output head: what is quantised.
        active: of these, the weights that one token passes through (fewer than `linear` with experts).
        block, root: parameters of the largest decoder layer, and outside the decoder layers (embeddings, head, final norm).
        largest_linear: weights of the largest single linear layer.
        widest: d_in + 4 d_out of an adapted layer, at most: bytes of a token's input and product in 8 bits.
        attention: layers × heads × head size.
    """

    base: int
    lora: int
    gates: int
    linear: int
    active: int
    head: int
    block: int
    root: int
    largest_linear: int
    widest: int
    hidden: int
    attention: int

    def trained(self, stage: str) -> int:
        """Parameters that get gradients and optimiser state."""
        return self.gates if stage == "calibrate" else self.lora

    def flops(
        self, stage: str, sequence: int, *, response_share: float = 0.75, k: int = 100, recompute: bool = False
    ) -> float:
        """Floating-point operations per token of a training step on rows of `sequence` tokens.

        Matrix products are counted, 2 per weight and token. The frozen base needs no weight gradients, so a step is a forward
        and an activation backward of the body, what the trained parameters take, and the head on the response positions alone,
        whose backward is sparse for the top-k entropy. "sft" with response_share 1 is a plain LoRA step with full logits;
        `recompute` runs the body's forward twice (gradient checkpointing).
        """
        # scores and weighted values, two products each over the whole sequence (full attention, no causal saving)
        attention = 4 * self.attention * sequence
        forward = 2 * self.active + attention + 2 * self.lora
        backward = 2 * self.active + 2 * attention + 2 * self.lora
        if stage == "calibrate":
            own, head = 4 * self.gates, 2 * self.head + 2 * k * self.hidden
        else:
            own, head = 2 * self.lora, 4 * self.head
        return float(forward + backward + own + response_share * head + recompute * forward)


def base_dtype(config: Any, dtype: str = "auto") -> torch.dtype:
    """The dtype the base is loaded in: the checkpoint's own for "auto"."""
    chosen = getattr(config.get_text_config(), "dtype", None) if dtype == "auto" else getattr(torch, dtype)
    if isinstance(chosen, str):
        chosen = getattr(torch, chosen)
    return chosen or torch.float32


def build_on_meta(
    config: Any, stage: str, rank: int = 16, targets: str = "all-linear", dtype: torch.dtype | None = None
) -> Any:
    """A PeftModel on the meta device with LoRA factors, and for Stage II gates; only what trains requires a gradient."""
    names: Any = targets if targets == "all-linear" else comma_list(targets)
    record = LoraConfig(r=rank, lora_alpha=rank, target_modules=names, task_type="CAUSAL_LM")
    try:
        with torch.device("meta"):
            base = AutoModelForCausalLM.from_config(config, dtype=dtype or base_dtype(config))
            model: Any = get_peft_model(base, record)
    except ValueError as error:
        raise ConfigError(f"the model cannot be planned: {str(error).splitlines()[0][:300]}") from error
    if stage == "calibrate":
        # `attach_gates` refuses a model without weights, rightly; a plan needs the modules only
        paths = {verdict.path for verdict in examine_adapter(model, "default") if verdict.status == "gate"}
        model.requires_grad_(False)
        for path, layer in lora_layers(model, "default"):
            if path in paths:
                gate_layer(layer, path, GateConfig(-1.0, 2.0), "default")
                layer.lora_gate.requires_grad_(True)
    return model


def count_parameters(model: Any, config: Any) -> Parameters:
    """Counts of a model made by `build_on_meta`."""
    text, causal = config.get_text_config(), model.get_base_model()

    def size(module: nn.Module, kind: str = "") -> int:
        """Parameters of the base; or of the parts of adapters whose names begin like this."""
        named = module.named_parameters()
        return sum(p.numel() for name, p in named if (f".{kind}" in name if kind else ".lora_" not in name))

    # under LoRA a linear layer is the `base_layer` of its wrapper, and is found there
    head = causal.get_output_embeddings()
    modules = [module for name, module in causal.named_modules() if ".lora_" not in name and module is not head]
    linears = [module.weight for module in modules if isinstance(module, LINEAR)]
    # fused experts are 3-dimensional parameters; a token passes only the experts it is routed to
    fused = [p for name, p in causal.named_parameters() if ".lora_" not in name and p.dim() == 3]
    linear, in_experts = (sum(weight.numel() for weight in weights) for weights in (linears, fused))
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    blocks: list[int] = []
    with suppress(ConfigError):  # without repeated layers everything is in the root
        blocks = [size(layer) for layer in decoder_layers(causal)]
    adapted = [layer for _, layer in lora_layers(model, "default") if isinstance(layer.get_base_layer(), LINEAR)]
    heads = getattr(text, "num_attention_heads", 0)
    # a model without attention has no heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // (heads or 1)
    return Parameters(
        base=size(model),
        lora=size(model, "lora_A.") + size(model, "lora_B."),
        gates=size(model, "lora_gate."),
        linear=linear + in_experts,
        active=linear + in_experts * getattr(text, "num_experts_per_tok", 1) // experts,
        head=head.weight.numel(),
        block=max(blocks, default=0),
        root=size(model) - sum(blocks),
        largest_linear=max((weight.numel() for weight in [*linears, *fused]), default=0),
        widest=max((layer.in_features + 4 * layer.out_features for layer in adapted), default=0),
        hidden=text.hidden_size,
        attention=text.num_hidden_layers * heads * head_size,
    )
