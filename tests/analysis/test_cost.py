"""Time and memory of drawing answers against the same sums written out by hand."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, Qwen2Config

from loragate.analysis.cost import Gpu, decoding

SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
CONFIG = Qwen2Config(intermediate_size=96, vocab_size=100, **SHAPE)
COUNTS = SimpleNamespace(base=10**9, lora=10**7, active=9 * 10**8, head=10**8)
# keys and values of 3 layers, 2 heads of 16, in two bytes
CONTEXT = 2 * 3 * 2 * 16 * 2
WEIGHTS = 2 * (COUNTS.base + COUNTS.lora)


def test_slow_memory_is_what_limits():
    gpu = Gpu("slow", 10, 1000, 50, 100, bandwidth=100)
    memory, seconds = decoding(COUNTS, CONFIG, gpu, torch.bfloat16, answers=512, tokens=1000)
    assert memory == WEIGHTS + 256 * CONTEXT * 1000
    step = (WEIGHTS + 256 * CONTEXT * 1000 / 2) / 100e9
    assert seconds == pytest.approx(2 * 1000 * step / 0.4)


def test_slow_arithmetic_is_what_limits():
    gpu = Gpu("weak", 10, 0.1, 0.1, 100, bandwidth=10**6)
    _, seconds = decoding(COUNTS, CONFIG, gpu, torch.bfloat16, answers=256, tokens=10)
    assert seconds == pytest.approx(10 * 2 * 256 * (9 * 10**8 + 10**8 + 10**7) / 0.1e12 / 0.4)


def test_contexts_that_do_not_fit_are_drawn_later():
    """0.9 GiB hold 20 contexts beside no weights at all."""
    counts = SimpleNamespace(base=0, lora=0, active=1, head=1)
    tokens = int(0.9 * 2**30 / 20 / CONTEXT)
    memory, _ = decoding(counts, CONFIG, Gpu("small", 1, 1, 1, 1, bandwidth=1), torch.bfloat16, 100, tokens)
    assert memory == 20 * CONTEXT * tokens


def test_a_model_without_grouped_heads():
    """GPT-2's configuration has no number of key and value heads: it is that of the queries."""
    config = GPT2Config(n_embd=64, n_head=4, n_layer=3)
    memory, _ = decoding(COUNTS, config, Gpu("any", 10, 1, 1, 1, bandwidth=1), torch.bfloat16, answers=1, tokens=10)
    assert memory == WEIGHTS + 2 * 3 * 4 * 16 * 2 * 10
