"""The Triton kernels against their plain twins, in Triton's interpreter (fp32 and fp16; it has no sound bf16 product)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loragate.errors import ConfigError
from loragate.gates import backend

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
LIMIT = {"fp32": 2e-5, "fp16": 4e-3}


@pytest.fixture(scope="module")
def lines(once):
    """Records of the worker."""

    def fill(folder):
        worker = Path(__file__).with_name("kernel_worker.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, str(worker)], capture_output=True, text=True, timeout=900, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        (folder / "lines.jsonl").write_text(done.stdout)

    return [json.loads(line) for line in (once("kernel", fill) / "lines.jsonl").read_text().splitlines()]


@needs_triton
def test_parts_agree_with_their_twins(lines):
    records = [record for record in lines if record["part"] == "parts"]
    assert len(records) == 3 * (7 + 2)
    for record in records:
        assert record["same_form"], record["case"]
        for name, error in record["errors"].items():
            exact = name in ("response", "given_response", "grad_logit", "grad_weight", "given_reduced")
            assert error <= (LIMIT["fp32"] if exact else LIMIT[record["dtype"]]), (record["case"], name)


@needs_triton
def test_the_map_at_its_join_and_ends(lines):
    (record,) = (record for record in lines if record["part"] == "ends")
    assert record["errors"].pop("bits") == 0
    for name, error in record["errors"].items():
        assert error <= 2e-6, name


@needs_triton
@pytest.mark.parametrize("setting", ["triton", "auto"])
def test_the_whole_operation_agrees_with_the_reference(lines, setting):
    records = [record for record in lines if record["setting"] == setting]
    assert len(records) == 8
    for record in records:
        for name, error in record["errors"].items():
            # the bias's gradient is a sum of terms that nearly cancel here
            assert error <= LIMIT[record["dtype"]] * (20 if name == "bias" else 1), (record["case"], name)


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
