"""Shared small models and rows: made on the spot from configurations, never downloaded."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import torch

from tiny import tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer

torch.set_num_threads(1)
# a busy machine must not fail a property for being slow
hypothesis.settings.register_profile("loragate", deadline=None)
hypothesis.settings.load_profile("loragate")


@pytest.fixture
def base():
    return tiny_base()


@pytest.fixture
def adapter():
    return tiny_adapter()


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def rows():
    return tiny_rows(24)


@pytest.fixture
def token_ids():
    return torch.randint(3, 60, (3, 11), generator=torch.Generator().manual_seed(5))
