"""What a training step needs of one GPU, from the model's configuration alone: memory, FLOPs, trainable parameters.

For each token a layer of a Llama-like decoder keeps two residual streams, q, k, v, the output of attention, three products of
the MLP, and what LoRA and gates read; the peak is the backward pass of a layer, or the head's logits, on top of it. Against
`benchmarks/results/plan_memory.json` (44 trainings of small models of five families) the peak is off by 1.6 % in the median
and 10 % at worst (16-bit base on a CPU, checkpointed). Experts, soft-capped attention and ungated MLPs keep more than is counted,
several times as much at worst: there the sentence says "at least". DoRA keeps two outputs of every adapted layer and makes its
whole delta in every pass; an objective says by what it reads and requires whether a reference and a first pass without gradient
come on top. Letters: D hidden, W width of the MLP, Q and KV widths of queries and keys, H heads, L layers, T tokens of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from loragate.losses.objectives import Objective
from loragate.losses.projection import MIN_TILE_SIDE, TILE_BYTES, tiling

FP32, GIB = 4, 2**30
PACKED = {"8bit": 1.0, "4bit": 0.5 + 1 / 64}  # bytes of a weight; nf4 has a scale of one byte for 64
RESPONSE, K = 0.75, 100  # share of tokens that the head works on, support of the entropy


@dataclass(frozen=True)
class Estimate:
    """Bytes at the peak of a step by part, numbers of parameters, FLOPs per token of a step and of a forward pass without the
    head, bytes of a token in the key-value cache; not `complete` where more is kept."""

    weights: float
    adapter: int
    gradients: int
    optimizer: int
    activations: float
    trainable: int
    flops: float
    forward: float
    cache: int
    complete: bool

    @property
    def peak(self) -> float:
        """Bytes at the worst moment of a step, without what CUDA and fragmentation take, about 1 GiB."""
        return self.weights + self.adapter + self.optimizer + self.gradients + self.activations

    def sentence(self) -> str:
        """ "about 5.1 GiB of GPU memory (weights 2.9, training 0.1, activations 1.1, CUDA 1.0)"."""
        weights, activations, peak = (size / GIB for size in (self.weights, self.activations, self.peak))
        parts = f"weights {weights:.1f}, training {peak - weights - activations:.1f}, activations {activations:.1f}, CUDA 1.0"
        return f"{'about' if self.complete else 'at least'} {peak + 1:.1f} GiB of GPU memory ({parts})"


def estimate(
    source: Any,
    stage: Literal["sft", "calibrate"] = "calibrate",
    *,
    sequence: int = 2048,
    rows: int = 1,
    adapter: int | list[tuple[int, int, int]] = 16,
    base: Literal["float32", "bfloat16", "float16", "8bit", "4bit"] = "bfloat16",
    autocast: bool = True,
    gradient_checkpointing: bool = False,
    objective: Objective | None = None,
    dora: bool = False,
    k: int = K,
    passes: int = 1,
) -> Estimate:
    """The step of a training with `rows` rows of `sequence` tokens in a pass.

    Args:
        source: transformers' configuration of the base, or the base itself, as on the meta device.
        adapter: LoRA's rank, on every linear layer but the head; or (d_in, d_out, rank) of each adapted module.
        base: dtype or quantisation of the base's weights.
        autocast: whether products are in 16 bits.
        objective: of the training; by default cross-entropy of an adapter, and the entropy of gates.
        k: support of the gates' entropy; 0 for the whole vocabulary.
        passes: of a step; what depends on the whole batch is read beforehand where there are several.
    """
    with torch.device("meta"):
        model: Any = source if isinstance(source, nn.Module) else AutoModelForCausalLM.from_config(source)
    text, sft = model.config.get_text_config(), stage == "sft"
    head, names = model.get_output_embeddings(), " ".join(name for name, _ in model.named_modules())
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D) and module is not head]
    shapes = [(m.in_features, m.out_features) if isinstance(m, nn.Linear) else tuple(m.weight.shape) for m in layers]
    modules = [(*shape, adapter) for shape in shapes] if isinstance(adapter, int) else adapter
    sizes = [(parameter.dim(), parameter.numel()) for parameter in model.parameters()]
    total, experts = sum(size for _, size in sizes), sum(size for dims, size in sizes if dims == 3)
    linear = sum(d_in * d_out for d_in, d_out in shapes)
    lora = sum(rank * (d_in + d_out) for d_in, d_out, rank in modules)
    magnitudes = sum(d_out for _, d_out, _ in modules) if dora else 0
    gates = 0 if sft else sum(d_in + 1 for d_in, *_ in modules)
    referred = objective is not None and "reference_kl" in objective.requires
    # statistics of the whole batch: a forward pass that keeps nothing
    beforehand = passes > 1 and bool(getattr(objective, "batch_reads", ()))
    routed = getattr(text, "num_experts_per_tok", None) or 1
    D, H, L, T = text.hidden_size, text.num_attention_heads, text.num_hidden_layers, rows * sequence
    head_size = getattr(text, "head_dim", None) or D // H
    Q, KV = H * head_size, head_size * (getattr(text, "num_key_value_heads", None) or H)
    W = routed * (getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None) or 4 * D)
    size = 4.0 if base == "float32" else 2.0
    c = 2.0 if autocast else size  # bytes of a product
    layer = FP32 * (2 * D + 2 + H) + c * (2 * Q + 2 * KV + 3 * W + sum(rank for *_, rank in modules) / L)
    layer += FP32 * (Q + KV) if "q_norm" in names else 0
    # LoRA casts a 16-bit copy of every input; otherwise modules share two normalised inputs and the MLP's product
    layer += c * sum(d_in for d_in, *_ in modules) / L if sft and c == 2 else 2 * size * D + c * W
    layer += 0 if sft else FP32 * len(modules) / L
    layer += 2 * c * magnitudes / L  # DoRA: the base's output and the delta's
    copies = 2 * (linear + lora * sft) / L if c < size else 0  # of fp32 weights under autocast
    tile = tiling(text.vocab_size, D, "cpu", widened=size == 2)
    logits = FP32 * tile.columns * min(tile.tokens, RESPONSE * T)
    top = T * (size * D + RESPONSE * (2 * FP32 * D + 8 * K * (not sft))) + logits
    # in low precision fp32 rows of the head stand beside the logits, and for k the logits thrice
    top += FP32 * D * tile.columns + 2 * logits * (not sft) if size == 2 else 0
    # logits of the model and the reference, their normalised copies, and the reference's states
    chunk = FP32 * text.vocab_size * min(128, max(MIN_TILE_SIDE, TILE_BYTES // (FP32 * text.vocab_size)))
    top += 4 * chunk + T * RESPONSE * size * D if referred else 0
    kept, moment = L * (layer * T + copies), 8 * W * T
    if dora:  # an identity goes through A and B, and the sum with the weight is measured
        moment += FP32 * max(d_in * (d_in + 3 * d_out) for d_in, d_out, _ in modules)
    if gradient_checkpointing:  # the inputs of layers are kept, and one layer at a time runs again
        kept, moment = L * size * D * T, layer * T + copies + moment
    unpacked = size * max(d_in * d_out for d_in, d_out in shapes) if base in PACKED else 0
    # a step: forward, backward to the activations, what is trained, the head on response positions
    attention = 4 * L * Q * sequence
    every = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    forward = 2 * (linear + experts * routed // every) + attention + 2 * lora
    projection = RESPONSE * 2 * D * text.vocab_size
    # logits and their way back, of gates through k rows of the head; with a KL those of both models, twice
    heads = 5 if referred else 2 if sft else 1 + k / text.vocab_size if k else 3
    own = (2 * lora if sft else 4 * gates) + heads * projection
    own += referred * (forward - 2 * lora) + beforehand * (1 + referred) * (forward + projection)
    if sft:
        # DoRA's delta costs the same however many tokens a pass has, and carries no gradient
        delta = 2 * sum(rank * d_in * (d_in + d_out) for d_in, d_out, rank in modules) // T if dora else 0
        own += (1 + gradient_checkpointing + beforehand) * delta
    return Estimate(
        weights=(total - linear - experts) * size + (linear + experts) * PACKED.get(base, size),
        adapter=FP32 * (lora + magnitudes + gates),
        gradients=FP32 * (gates or lora + magnitudes),
        optimizer=2 * FP32 * (gates or lora + magnitudes),  # AdamW's two moments
        activations=kept + max(moment, top) + unpacked,
        trainable=gates or lora + magnitudes,
        flops=float((2 + gradient_checkpointing) * forward + attention + own),
        forward=float(forward),
        cache=int(2 * L * KV * size),
        complete=not experts and "gate_proj" in names and not getattr(text, "attn_logit_softcapping", None),
    )
