"""What training steps and sampled answers cost, counted from shapes before anything is run, and the GPUs they may run on.

Multiplications and additions of matrix products are counted (2 per weight and token); element-wise work is not. The
frozen base needs no weight gradients, so a Stage-II step is one forward and one activation backward of the body, plus
one projection of the response positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from loragate.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch

    from loragate.analysis.plan_model import Parameters

UTILISATION = 0.4  # share of a GPU's peak that is taken to be reached
DRAWN, FILLED = 256, 0.9  # answers drawn together, and the share of the memory that is filled: vLLM's defaults


@dataclass(frozen=True)
class Gpu:
    """One GPU; throughput and bandwidth are the vendor's figures, dense and without sparsity.

    Attributes:
        name: as given on the command line.
        memory: GiB that a process can use; the driver takes the rest of the nominal size.
        half, single: TFLOP/s of bf16 matrix products (fp16 where there is no bf16), and of fp32 outside tensor cores.
        link: GB/s to and from the other GPUs of the machine, one direction.
        bandwidth: GB/s between its memory and its cores.
        bf16: whether matrix products run in bf16 (else fp16 only).
    """

    name: str
    memory: float
    half: float
    single: float
    link: float
    bandwidth: float
    bf16: bool = True


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200", 178, 2250, 80, 900, 8000),
        Gpu("h200", 139, 989, 67, 450, 4800),
        Gpu("h100", 79, 989, 67, 450, 3350),
        Gpu("h100-pcie", 79, 756, 51, 64, 2000),
        Gpu("mi300x", 191, 1307, 163, 448, 5300),
        Gpu("a100-80", 79, 312, 19.5, 300, 2039),
        Gpu("a100-40", 39, 312, 19.5, 300, 1555),
        Gpu("l40s", 44, 362, 92, 32, 864),
        Gpu("a6000", 47, 155, 39, 56, 768),
        Gpu("a10", 22, 125, 31, 32, 600),
        Gpu("l4", 22, 121, 30, 32, 300),
        Gpu("5090", 31, 210, 105, 64, 1792),
        Gpu("4090", 23, 165, 83, 32, 1008),
        Gpu("3090", 23, 71, 36, 32, 936),
        Gpu("v100-32", 31, 125, 15.7, 150, 900, bf16=False),
        Gpu("t4", 14.5, 65, 8, 16, 320, bf16=False),
    )
}


def find_gpu(text: str) -> Gpu:
    """A GPU by name, or by its memory in GiB (an A100 otherwise).

    Raises:
        ConfigError: for an unknown name or a size that is not positive.
    """
    key = text.strip().lower().replace(" ", "-").removeprefix("nvidia-").removesuffix("gb")
    if key in GPUS:
        return GPUS[key]
    for name, gpu in GPUS.items():  # "a100" is the first of its kind, "h100-80" has one size
        if name.startswith(f"{key}-") or key.startswith(f"{name}-"):
            return gpu
    try:
        memory = float(key.removesuffix("gib").rstrip("-"))
    except ValueError:
        memory = 0.0
    if not 0 < memory < 1e5:
        known = ", ".join(GPUS)
        raise ConfigError(
            f"--gpu-memory must be a number of GiB such as 24, or one of {known}; found {text!r}{nearest(key, GPUS)}"
        )
    return replace(GPUS["a100-80"], name=f"{memory:g} GiB", memory=memory)


@dataclass(frozen=True)
class StepCost:
    """Floating-point operations per token of a sequence, and parameters that train.

    Attributes:
        stage_two: FLOPs per token of a gate-training step with the sparse-backward head.
        stage_one: FLOPs per token of a LoRA step with full logits, for comparison.
        gate_parameters: Σ (d_in + 1) over the gated modules.
        lora_parameters: Σ r (d_in + d_out).
        body_forward: FLOPs per token of one forward of the body, which gradient checkpointing adds to either step.
        stage_one_head: FLOPs per token of a LoRA step with this package's head, which projects response positions only.
    """

    stage_two: float
    stage_one: float
    gate_parameters: int
    lora_parameters: int
    body_forward: float
    stage_one_head: float

    @property
    def ratio(self) -> float:
        """FLOPs of a Stage II step divided by those of a LoRA step."""
        return self.stage_two / self.stage_one

    def per_token(self, stage: str, recompute: bool = False) -> float:
        """FLOPs per token of a step as this package runs it.

        Args:
            stage: "sft" or "calibrate".
            recompute: with gradient checkpointing, which runs the body's forward twice.
        """
        step = self.stage_two if stage == "calibrate" else self.stage_one_head
        return step + (self.body_forward if recompute else 0.0)


def step_cost(
    modules: list[tuple[int, int, int]],
    body_parameters: int,
    head_parameters: int,
    *,
    attention_width: int = 0,
    layers: int = 0,
    sequence: int = 512,
    response_share: float = 0.75,
    k: int = 100,
    hidden: int = 0,
) -> StepCost:
    """Count a step.

    Args:
        modules: (d_in, d_out, rank) of every gated module.
        body_parameters: weights of the body's linear layers that one token uses.
        head_parameters: vocabulary × hidden.
        attention_width, layers, sequence: heads × head size, layers and tokens per sequence, for attention scores.
        response_share: share of tokens that are response tokens.
        k, hidden: support and width, for the sparse backward.
    """
    lora = sum(rank * (d_in + d_out) for d_in, d_out, rank in modules)
    gates = sum(d_in + 1 for d_in, _, _ in modules)
    # scores and weighted values, two products each over the whole sequence (full attention, no causal saving)
    attention = layers * 4 * attention_width * sequence
    forward = 2 * body_parameters + attention + 2 * lora
    activation_backward = 2 * body_parameters + 2 * attention + 2 * lora
    sparse_head = response_share * (2 * head_parameters + 2 * k * hidden)
    stage_two = forward + activation_backward + sparse_head + 2 * gates + 2 * gates
    stage_one = forward + activation_backward + 2 * lora + 4 * head_parameters
    stage_one_head = forward + activation_backward + 2 * lora + response_share * 4 * head_parameters
    return StepCost(
        float(stage_two),
        float(stage_one),
        gates,
        lora,
        float(forward),
        float(stage_one_head),
    )


def decoding(
    parameters: Parameters, config: Any, gpu: Gpu, dtype: torch.dtype, answers: int, tokens: int
) -> tuple[float, float]:
    """(bytes, seconds) of `answers` answers of `tokens` tokens each on one GPU; prompts are not counted.

    A step adds one token to each answer of a batch. It reads every weight and the keys and values of all contexts, and sends
    as many tokens as there are answers through the weights; the longer of the two is its time. That is an engine which keeps
    its batch full, as vLLM does; batches that wait for their longest answer take longer.

    Args:
        config: of the model; its key and value heads give the size of a context.
        dtype: of weights, keys and values.
    """
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads  # GPT-2 has no fewer of the former
    context = 2 * text.num_hidden_layers * heads * size * dtype.itemsize * tokens
    weights = (parameters.base + parameters.lora) * dtype.itemsize
    batch = max(1, min(DRAWN, answers, int((FILLED * gpu.memory * 2**30 - weights) // context)))
    # a context is half full on average
    reading = (weights + batch * context / 2) / (gpu.bandwidth * 1e9)
    multiplying = 2 * batch * (parameters.active + parameters.head + parameters.lora) / (gpu.half * 1e12)
    return weights + batch * context, math.ceil(answers / batch) * tokens * max(reading, multiplying) / UTILISATION
