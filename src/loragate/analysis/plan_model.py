"""A model as a plan sees it: built from its configuration alone, on the meta device, with LoRA and gates on it, and counted.

Nothing is downloaded but the configuration and no weight is allocated, so a 70B model takes a second or two. Counts are
those of the real modules, not of a formula, so that families with biases, shared embeddings or experts come out right.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from loragate.errors import ConfigError, LoragateError
from loragate.gates.attach import gate_layer
from loragate.gates.config import GateConfig
from loragate.gates.eligibility import examine_adapter, lora_layers
from loragate.models import base_config, resolve
from loragate.training.sharding import decoder_layers

LINEAR = (nn.Linear, Conv1D)  # GPT-2 keeps the weights of its linear layers transposed


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, and the shapes that cost and memory follow from.

    Attributes:
        base, lora, gates: parameters of the base, of the LoRA factors and of the gates (0 for Stage I).
        linear: weights of the base's linear layers and experts, without the output head: what is quantised.
        active: of these, the weights that one token passes through (fewer than `linear` with experts).
        head: vocabulary × hidden.
        block: parameters of the largest decoder layer.
        root: parameters outside the decoder layers (embeddings, head, final norm).
        largest_linear: weights of the largest single linear layer.
        modules: (d_in, d_out, rank) of every adapted linear layer.
        layers, hidden, attention_width: of the configuration; the last is heads × head size.
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
    modules: list[tuple[int, int, int]]
    layers: int
    hidden: int
    attention_width: int

    def trained(self, stage: str) -> int:
        """Parameters that get gradients and optimiser state."""
        return self.gates if stage == "calibrate" else self.lora

    @property
    def sizes(self) -> tuple[int, int]:
        """Parameters of gates and of LoRA factors on `modules`: Σ (d_in + 1) and Σ r (d_in + d_out)."""
        return (
            sum(d_in + 1 for d_in, _, _ in self.modules),
            sum(rank * (d_in + d_out) for d_in, d_out, rank in self.modules),
        )

    def flops(
        self, stage: str, sequence: int, *, response_share: float = 0.75, k: int = 100, recompute: bool = False
    ) -> float:
        """Floating-point operations per token of a training step on rows of `sequence` tokens.

        Multiplications and additions of matrix products are counted (2 per weight and token); element-wise work is not. The
        frozen base needs no weight gradients, so a step is a forward and an activation backward of the body, what the
        trained parameters take, and the head on the response positions alone; its backward for the top-k entropy is sparse.

        Args:
            stage: "sft" or "calibrate"; "sft" with response_share 1 is a plain LoRA step with full logits.
            recompute: with gradient checkpointing, which runs the body's forward twice.
        """
        gates, lora = self.sizes
        # scores and weighted values, two products each over the whole sequence (full attention, no causal saving)
        attention = self.layers * 4 * self.attention_width * sequence
        forward = 2 * self.active + attention + 2 * lora
        backward = 2 * self.active + 2 * attention + 2 * lora
        if stage == "calibrate":
            own, head = 4 * gates, 2 * self.head + 2 * k * self.hidden
        else:
            own, head = 2 * lora, 4 * self.head
        return float(forward + backward + own + response_share * head + recompute * forward)


def read_config(name: str, *, revision: str = "", trust: bool = False) -> Any:
    """The transformers configuration behind a hub id, a model folder or a config.json.

    Raises:
        ConfigError: for a name that is none of these, or a file that is no model configuration.
        LoragateError: if the configuration cannot be fetched.
    """
    path = Path(name)
    try:
        if path.suffix == ".json" and path.is_file():
            return AutoConfig.from_pretrained(name, trust_remote_code=trust)
        place = resolve(name, expect="base", what="model", revision=revision or None)
        if path.is_dir() and not place.base.gguf and not (path / "config.json").is_file():
            raise ConfigError(f"{name} holds no config.json; give a model folder, a config.json or a hub id")
        return base_config(place.base, trust)
    except (OSError, ValueError, KeyError, TypeError) as error:
        refusal = ConfigError if path.exists() else LoragateError
        raise refusal(f"the configuration of {name} cannot be read: {str(error).splitlines()[0]}") from error


def base_dtype(config: Any, dtype: str = "auto") -> torch.dtype:
    """The dtype the base is loaded in: the checkpoint's own for "auto"."""
    chosen = getattr(config.get_text_config(), "dtype", None) if dtype == "auto" else getattr(torch, dtype)
    if isinstance(chosen, str):
        chosen = getattr(torch, chosen)
    return chosen or torch.float32


def build_on_meta(
    config: Any, stage: str, rank: int = 16, targets: str = "all-linear", dtype: torch.dtype | None = None
) -> Any:
    """A PeftModel on the meta device with LoRA factors, and for Stage II gates; only what trains requires a gradient.

    Raises:
        ConfigError: for an architecture that is no causal language model, or targets that match nothing.
    """
    names: Any = targets if targets == "all-linear" else [part.strip() for part in targets.split(",") if part.strip()]
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
    text = config.get_text_config()
    causal = model.get_base_model()
    head = causal.get_output_embeddings()
    named = list(model.named_parameters())
    lora = sum(p.numel() for name, p in named if ".lora_A." in name or ".lora_B." in name)
    gates = sum(p.numel() for name, p in named if ".lora_gate." in name)
    own = [(name, p) for name, p in named if ".lora_" not in name]
    linears = [
        module.weight
        for name, module in causal.named_modules()
        if isinstance(module, LINEAR) and module is not head and ".lora_" not in name
    ]
    # fused experts are 3-dimensional parameters; a token passes only the experts it is routed to
    fused = [p for _, p in own if p.dim() == 3]
    linear = sum(weight.numel() for weight in linears)
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    routed = sum(p.numel() for p in fused) * getattr(text, "num_experts_per_tok", 1) // experts
    blocks: list[int] = []
    with suppress(ConfigError):  # without repeated layers everything is in the root
        blocks = [
            sum(p.numel() for name, p in layer.named_parameters() if ".lora_" not in name)
            for layer in decoder_layers(causal)
        ]
    base = sum(p.numel() for _, p in own)
    heads = getattr(text, "num_attention_heads", 0)
    size = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    return Parameters(
        base=base,
        lora=lora,
        gates=gates,
        linear=linear + sum(p.numel() for p in fused),
        active=linear + routed,
        head=head.weight.numel(),
        block=max(blocks, default=0),
        root=base - sum(blocks),
        largest_linear=max((weight.numel() for weight in [*linears, *fused]), default=0),
        modules=[
            (layer.in_features, layer.out_features, layer.r["default"])
            for _, layer in lora_layers(model, "default")
            if isinstance(layer.get_base_layer(), LINEAR)
        ],
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        attention_width=heads * size,
    )


def with_layers(config: Any, layers: int) -> Any:
    """The same configuration with fewer (or more) decoder layers."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    before = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before and before > 1:
            setattr(text, name, [value[index % before] for index in range(layers)])
    text.num_hidden_layers = layers
    return changed


def layer_period(config: Any) -> int:
    """After how many decoder layers their kinds repeat (1 where all are alike)."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or [""]
    periods = range(1, len(kinds) + 1)
    return next(period for period in periods if all(kind == kinds[at % period] for at, kind in enumerate(kinds)))
