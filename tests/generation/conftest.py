"""Tiny random models and a word-level tokenizer, built on the spot."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

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


def build_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", "<stop>", *(f"w{i}" for i in range(4, VOCABULARY))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **special)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """A tokenizer whose special tokens the test names."""
    return build_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(params=["qwen2", "llama"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(1)
    if request.param == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


@pytest.fixture
def qwen2() -> PreTrainedModel:
    torch.manual_seed(1)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()
