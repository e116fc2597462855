"""Base and adapter by hub id, through the real loading code, out of a local hub cache without a network."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tiny import tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer

REVISION = "0123456789abcdef0123456789abcdef01234567"


def put_in_cache(cache: Path, repository: str, source: Path) -> None:
    """Lay a folder out as huggingface_hub keeps a downloaded model repository."""
    place = cache / "hub" / f"models--{repository.replace('/', '--')}"
    shutil.copytree(source, place / "snapshots" / REVISION)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(REVISION)


def loragate(cache: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "loragate", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.slow("processes")
def test_hub_ids(tmp_path):
    cache = tmp_path / "cache"
    tiny_base().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    adapter = tiny_adapter()
    adapter.peft_config["default"].base_model_name_or_path = "someone/base"
    adapter.save_pretrained(tmp_path / "adapter")
    put_in_cache(cache, "someone/base", tmp_path / "base")
    put_in_cache(cache, "someone/adapter", tmp_path / "adapter")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny_rows(8)))

    arguments = [
        "--adapter",
        "someone/adapter",
        "--data",
        "rows.jsonl",
        "--range=-3,1",
        "--unverified",
        "--out",
        "gated",
    ]
    done = loragate(cache, tmp_path, "calibrate", *arguments, "--batch-size", "8")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "gated" / "gate_config.json").read_text())
    assert record["base"]["id"] == "someone/base"
    assert record["base"]["revision"] == REVISION, "the branch is resolved"
    assert record["adapter"]["id"] == "someone/adapter"
    weights = "adapter_model.safetensors"
    assert (tmp_path / "gated" / "adapter" / weights).read_bytes() == (tmp_path / "adapter" / weights).read_bytes()
    done = loragate(cache, tmp_path, "generate", "--model", "gated", "--prompt", "w1 w2", "--max-new-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    done = loragate(cache, tmp_path, "inspect", "someone/adapter")
    assert "14 modules can be gated" in done.stdout, done.stderr
    done = loragate(cache, tmp_path, "inspect", "someone/missing")
    assert done.returncode == 1
    assert "someone/missing" in done.stderr
    assert "Traceback" not in done.stderr
