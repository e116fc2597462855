"""Fixtures of the tests of generation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_decoders import SHAPE, build_tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """A tokenizer whose special tokens the test names."""
    return build_tokenizer


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(pad_token="<pad>", eos_token="<eos>")


@pytest.fixture
def qwen2() -> PreTrainedModel:
    torch.manual_seed(1)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE)).eval()
