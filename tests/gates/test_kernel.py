"""Which code runs the gated operation; the Triton kernels themselves are tested in Triton's interpreter (kernel_cases.py)."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loragate.errors import ConfigError
from loragate.gates import backend


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_agree_with_their_twins():
    cases = Path(__file__).with_name("kernel_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", str(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.fixture
def choose(monkeypatch):
    def to(value):
        monkeypatch.setenv(backend.VARIABLE, value)
        backend.chosen.cache_clear()

    yield to
    backend.chosen.cache_clear()


def test_plain_pytorch_is_the_default_and_serves_the_cpu(choose, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tensor = torch.zeros(4, 8)
    for value in ("", "torch", "auto"):
        choose(value)
        assert backend.kernels_for(tensor, tensor, tensor[0, :1]) is None


def test_an_unknown_or_impossible_choice_is_refused(choose, monkeypatch):
    choose("tritn")
    with pytest.raises(ConfigError, match="did you mean 'triton'"):
        backend.chosen()
    choose("triton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Triton, which is not installed"):
        backend.chosen()
