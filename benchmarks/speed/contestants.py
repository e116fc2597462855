"""One training step as different people would run it: LoRA, TRL's fused head, DoRA, gates done naively, this package.

Each contestant builds a random model and returns it with a function that gives the loss; the step is its forward and
backward, without the optimiser. All see the same tokens. Random LoRA factors are not zero, so that nothing is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from fake import build_fake, gates_stay_put, under_fake_mode
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import loragate as lg
from loragate.losses import StatisticsRequest, add_statistics_forward

Step = tuple[nn.Module, Callable[[], torch.Tensor]]
DEVICE = "cpu"
"""Where models are made and batches lie; `benchmarks/gpu` sets it."""
ALL_KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Shape:
    """A model and a batch.

    Attributes:
        hidden, intermediate, layers, heads, kv_heads, head_size, vocabulary, tied, family: of the model.
        rows, sequence: of the batch; every row is `sequence` tokens long.
        response: share of the tokens, the last ones of each row, that are response tokens.
        rank: LoRA's r, on all linear layers.
        k: support of the top-k entropy.
        gated: kinds of modules that get gates; the adapter has all kinds in any case.
        dtype: of the base.
        checkpointing: recompute each decoder layer in the backward.
    """

    hidden: int = 512
    intermediate: int = 2048
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    head_size: int = 0
    vocabulary: int = 32768
    tied: bool = True
    family: str = "qwen2"
    rows: int = 2
    sequence: int = 512
    response: float = 0.75
    rank: int = 16
    k: int = 100
    gated: tuple[str, ...] = ALL_KINDS
    dtype: str = "float32"
    checkpointing: bool = False

    def configuration(self) -> Any:
        size = {"head_dim": self.head_size} if self.head_size else {}
        return AutoConfig.for_model(
            self.family,
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            tie_word_embeddings=self.tied,
            max_position_embeddings=max(4096, self.sequence),
            **size,
        )

    @property
    def prompt(self) -> int:
        """Prompt tokens of each row."""
        return int(self.sequence * (1 - self.response))

    @property
    def labelled(self) -> int:
        """Response tokens of the batch: positions that the head has to project."""
        return self.rows * (self.sequence - max(1, self.prompt))


def adapter(shape: Shape, **lora: Any) -> Any:
    """A PeftModel with random factors, in training mode."""
    torch.manual_seed(0)
    record = LoraConfig(
        r=shape.rank,
        lora_alpha=shape.rank,
        target_modules="all-linear",
        init_lora_weights=lora.pop("init_lora_weights", False),
        task_type="CAUSAL_LM",
        **lora,
    )

    def build() -> Any:
        with torch.device(DEVICE):
            base = AutoModelForCausalLM.from_config(shape.configuration(), dtype=getattr(torch, shape.dtype))
            return get_peft_model(base, record).train()

    model = build_fake(build) if under_fake_mode() else build()
    if shape.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model


def batch(shape: Shape) -> dict[str, torch.Tensor]:
    """Random tokens; labels are −100 on the prompt."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, shape.vocabulary, (shape.rows, shape.sequence), generator=draw)
    labels = ids.clone()
    labels[:, : shape.prompt] = -100
    return {"input_ids": ids.to(DEVICE), "labels": labels.to(DEVICE)}


def lora(shape: Shape) -> Step:
    """A LoRA step with transformers' own loss on full logits."""
    model, data = adapter(shape), batch(shape)
    return model, lambda: model(**data).loss


def lora_trl(shape: Shape) -> Step:
    """A LoRA step as TRL's SFTTrainer runs it: its fused head, with the statistics that the trainer logs.

    On a CPU that head scores every position, on a GPU those of the response. Here it does as on a GPU, which is cheaper.
    """
    from trl.trainer import utils

    model, data = adapter(shape), batch(shape)
    utils.add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy", "is_top1"))

    def loss() -> torch.Tensor:
        with patch.object(utils, "_use_triton", lambda device: True):
            out = model(**data, fused_lm_head=True)
        return -out.log_probs.sum() / out.label_mask.sum()

    return model, loss


def dora(shape: Shape) -> Step:
    """PEFT's DoRA with transformers' own loss on full logits."""
    model, data = adapter(shape, use_dora=True, init_lora_weights=True), batch(shape)
    return model, lambda: model(**data).loss


def gates_naive(shape: Shape) -> Step:
    """λ·(B A x) on the output of each module, top-k entropy of full logits, plain autograd."""
    model, data = adapter(shape), batch(shape)
    model.requires_grad_(False)
    gates = nn.ParameterList()
    for layer in [module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "base_layer")]:
        weight = nn.Parameter(torch.randn(layer.in_features) * 1e-6)
        gates.append(weight)

        def forward(x: torch.Tensor, layer: Any = layer, weight: nn.Parameter = weight) -> torch.Tensor:
            lam = lg.gate_coefficient(x.detach() @ weight, -6, 3, 1.0)
            delta = layer.lora_B["default"](layer.lora_A["default"](x)) * layer.scaling["default"]
            return layer.base_layer(x) + lam.unsqueeze(-1) * delta

        layer.forward = forward
    model.gates = gates

    def loss() -> torch.Tensor:
        logits = model(input_ids=data["input_ids"]).logits[:, :-1]
        return lg.topk_entropy(logits[data["labels"][:, 1:] != -100], shape.k).mean()

    return model, loss


def gates_loragate(shape: Shape) -> Step:
    """This package's gates and token-statistics head, put together as its trainer does."""
    model, data = adapter(shape), batch(shape)
    chosen = None if shape.gated == ALL_KINDS else list(shape.gated)
    config = lg.GateConfig(-6, 3) if chosen is None else lg.GateConfig(-6, 3, target_modules=chosen)
    with gates_stay_put():
        lg.attach_gates(model, config)
    # a fake model has no logits to compare the head with
    add_statistics_forward(model.get_base_model(), verified=True if under_fake_mode() else None)
    request = StatisticsRequest(shape.k, ("topk_entropy",), ("topk_entropy",))

    def loss() -> torch.Tensor:
        stats = model(**data, statistics=request)
        return stats.topk_entropy.sum() / stats.mask.sum()

    return model, loss


CONTESTANTS: dict[str, Callable[[Shape], Step]] = {
    "lora": lora,
    "lora_trl": lora_trl,
    "dora": dora,
    "gates_naive": gates_naive,
    "gates_loragate": gates_loragate,
}
NAMES = {
    "lora": "LoRA, full logits",
    "lora_trl": "LoRA, TRL's fused head",
    "dora": "DoRA, full logits",
    "gates_naive": "gates, naive",
    "gates_loragate": "gates, loragate",
    "floor": "the floor",
}
