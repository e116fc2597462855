"""The base of the golden artifact: one tiny layer whose weights are plain fractions, the same on every machine and version."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

PROMPT = [3, 7, 1, 11, 5, 2]


def fractions(shape, start):
    """Values -11/64 … 11/64 in a fixed order, exact in fp32."""
    count = 1
    for size in shape:
        count *= size
    return ((torch.arange(count) * 37 + start) % 23 - 11).reshape(shape).to(torch.float32) / 64


def golden_base():
    """A Qwen2 of 8 hidden units and one layer."""
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
            parameter.copy_(
                1 + fractions(parameter.shape, index) if "norm" in name else 4 * fractions(parameter.shape, index)
            )
    return model
