"""How long answers take to be drawn, and in how much memory: an estimate from the model's configuration alone.

A step adds one token to each answer of a batch. It reads every weight and the keys and values of all contexts, and sends as
many tokens as there are answers through the weights; the longer of the two, at the utilisation that plans assume, is its
time. That is an engine which keeps its batch full, as vLLM does; batches that wait for their longest answer take longer.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from loragate.analysis.plan_machines import Gpu
from loragate.analysis.plan_model import Parameters
from loragate.analysis.plan_time import UTILISATION

BATCH = 256  # answers drawn together where the memory holds them, vLLM's default
SHARE = 0.9  # of the memory that an engine fills, vLLM's default


def decoding(
    parameters: Parameters, config: Any, gpu: Gpu, dtype: torch.dtype, answers: int, tokens: int
) -> tuple[float, float]:
    """(bytes, seconds) of `answers` answers of `tokens` tokens each on one GPU; prompts are not counted.

    Args:
        config: of the model; its key and value heads give the size of a context.
        dtype: of weights, keys and values.
    """
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    context = 2 * text.num_hidden_layers * text.num_key_value_heads * size * dtype.itemsize * tokens
    weights = (parameters.base + parameters.lora) * dtype.itemsize
    batch = max(1, min(BATCH, answers, int((SHARE * gpu.memory * 2**30 - weights) // context)))
    # a context is half full on average
    reading = (weights + batch * context / 2) / (gpu.bandwidth * 1e9)
    multiplying = 2 * batch * (parameters.active + parameters.head + parameters.lora) / (gpu.half * 1e12)
    return weights + batch * context, math.ceil(answers / batch) * tokens * max(reading, multiplying) / UTILISATION
