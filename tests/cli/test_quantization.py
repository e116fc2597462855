"""`--quantization` on the commands: bases in 8 and 4 bits on a CPU, and what is refused before anything is loaded."""

import importlib.util
import json
import logging

import pytest
import torch

from loragate.cli.main import main
from loragate.errors import ConfigError
from loragate.gates.eligibility import quantization_of
from loragate.models import Loading, ModelRef, loading, open_base
from tiny import is_packed, write_base

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="8- and 4-bit bases need bitsandbytes"
)
COMMON = ["--batch-size", "4", "--per-device-train-batch-size", "4", "--max-length", "64", "--device", "cpu"]


@pytest.fixture(scope="module")
def place(made, tmp_path_factory):
    root = tmp_path_factory.mktemp("quantization")
    write_base(root / "base", hidden_size=64, intermediate_size=128)
    (root / "rows.jsonl").symlink_to(made / "messages.jsonl")
    return root


@pytest.fixture(autouse=True)
def avx512_bf16(monkeypatch):
    """4-bit layers that would pack themselves for inference, as on a processor with AVX512-BF16."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)


@needs_bitsandbytes
@pytest.mark.parametrize("storage", ["4bit", "8bit"])
def test_all_the_way(storage, place, tmp_path, monkeypatch):
    flag = ["--quantization", storage]
    data = ["--data", str(place / "rows.jsonl"), *COMMON, *flag]
    assert main(["sft", "--model", str(place / "base"), *data, "--out", str(tmp_path / "adapter")]) == 0
    calibrate = ["calibrate", "--adapter", str(tmp_path / "adapter"), *data, "--ranges=-3,2", "--skip-selection"]
    assert main([*calibrate, "--k", "20", "--out", str(tmp_path / "gated")]) == 0
    record = json.loads((tmp_path / "gated" / "gate_config.json").read_text())
    assert record["base"]["quantization"] == storage
    assert "quantization: " + storage in (tmp_path / "gated" / "run" / "config.yaml").read_text()
    prompt = ["--prompt", "w1 w2", "--max-new-tokens", "4", "--device", "cpu"]
    warnings = []
    monkeypatch.setattr(logging.getLogger("loragate"), "warning", warnings.append)
    assert main(["generate", "--model", str(tmp_path / "gated"), *prompt, *flag]) == 0
    assert warnings == []
    assert main(["generate", "--model", str(tmp_path / "gated"), *prompt]) == 0
    assert len(warnings) == 1
    assert "are loaded on an unquantised base" in warnings[0]
    assert main(["generate", "--model", str(tmp_path / "adapter"), *prompt, *flag]) == 0


@needs_bitsandbytes
@pytest.mark.parametrize("storage", ["4bit", "8bit"])
def test_bases_and_stored_checkpoints(storage, place, tmp_path):
    how = Loading(device="cpu", quantization=storage)
    model = open_base(ModelRef(str(place / "base")), how)
    assert quantization_of(model) == storage
    assert model.model.norm.weight.dtype == loading.torch_dtype(how)
    with torch.no_grad():
        model(input_ids=torch.tensor([[3, 4, 5]]))
    assert not any(is_packed(layer) for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    model.save_pretrained(tmp_path / "stored")
    again = open_base(ModelRef(str(tmp_path / "stored")), Loading(device="cpu"))
    assert quantization_of(again) == storage
    with pytest.raises(ConfigError, match=f"{storage} base already"):
        open_base(ModelRef(str(tmp_path / "stored")), Loading(device="cpu", quantization="4bit"))


def commands(place, out):
    run = ["--data", place / "rows.jsonl", "--out", out]
    return {
        "sft": ["sft", "--model", place / "base", *run],
        "calibrate": ["calibrate", "--adapter", place / "absent", "--ranges=0,1", "--skip-selection", *run],
        "mask": ["mask", "--model", place / "base", "--reference", place / "absent", *run[:-1], f"{out}.jsonl"],
        "generate": ["generate", "--model", place / "base", "--prompt", "w1"],
        "eval": ["eval", "--model", place / "base", "--suite", "tiny", "--out", out],
    }


@pytest.mark.parametrize("command", ["sft", "calibrate", "mask", "generate", "eval"])
def test_refused_at_start(command, place, tmp_path, fails, monkeypatch):
    line = commands(place, tmp_path / "out")[command]
    assert '"none", "8bit", "4bit". Did you mean "4bit"?' in fails(*line, "--quantization", "4bits")
    eight = [*line, "--device", "cpu", "--quantization", "8bit"]
    assert "float32 would be a false promise" in fails(*eight, "--dtype", "float32")
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        assert "pip install bitsandbytes" in fails(*eight)
    if importlib.util.find_spec("bitsandbytes") is not None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", "2")
        assert "8bit base cannot be sharded with fsdp2" in fails(*eight)
    assert not (tmp_path / "out").exists()


def test_vllm_loads_its_own_base(place, tmp_path, fails):
    line = commands(place, tmp_path / "out")["eval"]
    assert "has no effect with vLLM" in fails(*line, "--engine", "vllm", "--quantization", "4bit")
