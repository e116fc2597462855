"""Peak memory of `loragate extract` against the size of the two checkpoints it reads.

    python benchmarks/extract_memory.py [--folder DIR] [--rank 16]

Two random checkpoints in bf16 (Qwen2 shape: hidden 1024, intermediate 4096, 6 layers, vocabulary 64,000, sharded at
100 MB) are written; then the extraction runs in a fresh process that samples its own anonymous memory (what is not the
files themselves) every 5 ms, and reports its peak above what the imports took.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from loragate.conversion.extract import extract_adapter


def write_pair(folder: Path) -> int:
    """Writes the checkpoints; returns the bytes of one."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64_000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "base", max_shard_size="100MB")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    model.save_pretrained(folder / "tuned", max_shard_size="100MB")
    return sum(path.stat().st_size for path in (folder / "base").glob("*.safetensors"))


def anonymous() -> int:
    """Bytes of memory of this process that no file backs (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def child(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    start = peak = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    began = time.perf_counter()
    found = extract_adapter(str(folder / "tuned"), str(folder / "base"), rank)
    seconds = time.perf_counter() - began
    done.set()
    thread.join()
    factors = sum(4 * (a.numel() + b.numel()) for a, b in found.factors.values())
    print(
        f"factors {factors / 2**20:.0f} MiB, peak {(peak - start) / 2**20:.0f} MiB above the imports, {seconds:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.folder, arguments.rank)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        size = write_pair(folder)
        print(f"each checkpoint {size / 2**20:.0f} MiB in bf16, {size / 2**19:.0f} MiB in fp32")
        command = [sys.executable, __file__, "--child", "--folder", str(folder), "--rank", str(arguments.rank)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
