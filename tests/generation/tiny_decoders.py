"""Tiny random decoders and a word-level tokenizer, built on the spot; and what makes two samples the same."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from loragate.generation import Sample, SamplingConfig

VOCABULARY = 24
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,  # wide enough that distributions are far from uniform and rows stop at different times
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}

# prompts of 1 to 6 tokens
PROMPTS = [" ".join(f"w{(5 * i + 3 * j) % 20 + 4}" for j in range(1 + i % 6)) for i in range(9)]
CONFIG = SamplingConfig(temperature=1.0, max_new_tokens=20, samples=3, seed=5)


def build_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", "<stop>", *(f"w{i}" for i in range(4, VOCABULARY))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **special)


def identities(samples: list[Sample]) -> list[tuple[Any, ...]]:
    return [(s.question, s.sample, s.text, s.token_ids, s.finish_reason) for s in samples]
