"""Which tensor of a checkpoint is which weight of the model, and which of them a LoRA can hold.

The model is built on the meta device, so that PEFT's module names and transformers' own renamings at loading decide, and
not a list of families kept here. Linear layers (and GPT-2's Conv1D) can be held; everything else is named by its kind.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from loragate.conversion.extract_checkpoint import Checkpoint
from loragate.errors import ConfigError

LINEAR, TRANSPOSED = "linear layers", "transposed linear layers"
EMBEDDINGS, HEAD, BIASES, VECTORS = "embeddings", "output head", "biases", "norms and other vectors"
EXPERTS, CONVOLUTIONS, OTHER = "fused experts", "convolutions", "other weights"
# settings of the function that no weight holds
_FUNCTION_KEYS = (
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "sliding_window", "layer_types"),
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "hidden_act", "activation_function"),
    *("num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier"),
)


@dataclass(frozen=True)
class Layout:
    """A model's parameters."""

    model: Any  # on the meta device
    kinds: dict[str, str]  # {parameter name: kind}, in model order; the head is listed even where it is tied
    embedding: str  # parameter name of the input embedding
    head: str  # and of the output head


def read_layout(config: Any, trust: bool = False) -> Layout:
    """The layout of the model that a configuration describes."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    paths = {id(module): path for path, module in model.named_modules()}
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    embedding, head = (f"{paths[id(module)]}.weight" for module in (inputs, outputs))
    kinds = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            kinds[full] = HEAD if module is outputs and name == "weight" else _kind(module, name, parameter)
    return Layout(model, kinds, embedding, head)


def _kind(module: nn.Module, name: str, parameter: torch.Tensor) -> str:
    if name == "weight" and isinstance(module, nn.Linear):
        return LINEAR
    if name == "weight" and isinstance(module, Conv1D):
        return TRANSPOSED
    if isinstance(module, nn.Embedding):
        return EMBEDDINGS
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return CONVOLUTIONS
    if name == "bias" or name.endswith("_bias"):
        return BIASES
    if parameter.dim() == 3:
        return EXPERTS
    return VECTORS if parameter.dim() <= 1 else OTHER


@dataclass(frozen=True)
class Sources:
    """Where a checkpoint keeps each parameter."""

    of: dict[
        str, tuple[str, ...]
    ]  # the tensors it is loaded from: several, or a rearranged one, where transformers converts
    converted: frozenset[
        str
    ]  # parameters that are not stored as they are used (experts that are fused at loading, for one)
    foreign: tuple[str, ...]  # tensors that belong to no parameter of the language model
    tied: bool  # whether the head is the embedding in this checkpoint


def find_sources(checkpoint: Checkpoint, layout: Layout) -> Sources:
    """Match a checkpoint's tensors with the parameters of a layout, by transformers' own loading rules.

    Raises:
        ConfigError: if parameters are missing: the checkpoint belongs to another architecture, or is incomplete.
    """
    rules = get_model_conversion_mapping(layout.model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    known = {**layout.model.state_dict(), **dict.fromkeys(layout.kinds, True)}
    of: dict[str, list[str]] = defaultdict(list)
    converted, foreign = set(), []
    for tensor in sorted(checkpoint.files):
        name, converter = rename_source_key(tensor, renamings, converters, layout.model.base_model_prefix, known)
        if name not in layout.kinds:
            foreign.append(tensor)
            continue
        of[name].append(tensor)
        if converter is not None or len(of[name]) > 1:
            converted.add(name)
    tied = bool(checkpoint.text.tie_word_embeddings) or layout.head not in of
    if tied:
        of[layout.head] = list(of.get(layout.embedding, ()))
    if missing := [name for name in layout.kinds if not of.get(name)]:
        raise ConfigError(
            f"{checkpoint} has no weights for {missing[0]}"
            + (f" and {len(missing) - 1} more parameters" if len(missing) > 1 else "")
            + ": it is incomplete or of another architecture than the base"
        )
    return Sources({name: tuple(of[name]) for name in layout.kinds}, frozenset(converted), tuple(foreign), tied)


def require_same_architecture(tuned: Checkpoint, base: Checkpoint) -> None:
    """Refuse two checkpoints that cannot be of one model.

    Raises:
        ConfigError: naming the first difference.
    """
    keys = ["model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"]
    keys += ["num_key_value_heads", "head_dim", "num_experts", "num_local_experts"]
    for key in keys:
        found, expected = getattr(tuned.text, key, None), getattr(base.text, key, None)
        if found != expected:
            raise ConfigError(
                f"{tuned} is another architecture than its base {base}: {key} is {found}, not {expected}. Name the "
                "model it was fine-tuned from with --base"
            )


def changed_settings(tuned: Checkpoint, base: Checkpoint) -> list[str]:
    """Settings of the function that differ between two configurations, as sentences; no adapter can hold them."""
    pairs = {key: (getattr(base.text, key, None), getattr(tuned.text, key, None)) for key in _FUNCTION_KEYS}
    return [
        f"{key} is {now} in the fine-tuned model and {was} in the base, which the adapter will run with"
        for key, (was, now) in pairs.items()
        if was != now
    ]
