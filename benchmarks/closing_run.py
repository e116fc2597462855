"""Both stages on two processes, from a local data set in the hub's format, killed and resumed once, the gates loaded and used.

    python benchmarks/closing_run.py --rows 2048 --out benchmarks/results/closing_run.json

The rows are demonstrations of the tiny world, written as parquet shards beside a dataset card, and read back by the loader
for hub data sets. Stage II runs twice: once without interruption, and once with every process killed by SIGKILL after its
first checkpoint and the same command repeated with --resume. Both must end in the same gates, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

import loragate as lg
from loragate.version import __version__
from loragate.world.base import shipped_base_folder
from loragate.world.demonstrations import demonstrations
from loragate.world.problems import problems, verify

SHARDS = 2
QUESTIONS = 64


def write_dataset(folder: Path, rows: list[dict[str, Any]]) -> None:
    """A data set as the hub lays it out: a card and data/train-*.parquet."""
    from datasets import Dataset

    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: data/train-*\n---\n")
    for shard in range(SHARDS):
        part = Dataset.from_list(rows).shard(SHARDS, shard, contiguous=True)
        part.to_parquet(str(folder / "data" / f"train-{shard:05d}-of-{SHARDS:05d}.parquet"))


def loragate(*arguments: str, kill_after_checkpoint: Path | None = None) -> dict[str, Any]:
    """Run a command; with a run folder, kill all its processes as soon as that folder holds a whole checkpoint."""
    command = [sys.executable, "-m", "loragate", *arguments]
    print("$ loragate " + " ".join(arguments), flush=True)
    began = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    while kill_after_checkpoint is not None and process.poll() is None:
        if any(kill_after_checkpoint.glob("checkpoint-*/trainer_state.json")):
            family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for member in family:
                member.kill()
            process.wait()
            return {"killed": len(family), "seconds": round(time.monotonic() - began, 1)}
        time.sleep(0.01)
    if process.wait() != 0:
        sys.exit(f"closing_run: loragate {arguments[0]} ended with status {process.returncode}")
    if kill_after_checkpoint is not None:
        sys.exit("closing_run: the run was over before it could be killed; give more --rows")
    return {"seconds": round(time.monotonic() - began, 1)}


def answers_right(model: Any, tokenizer: Any, questions: list[Any]) -> int:
    """Greedy answers that the world's verifier accepts."""
    right = 0
    for question in questions:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question.prompt}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        made = model.generate(input_ids=ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :]
        finished = int(made[-1]) == tokenizer.eos_token_id
        right += verify(question, tokenizer.decode(made), finished)
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--stage-one", default="ddp", help="strategy of Stage I: ddp or fsdp2")
    parser.add_argument("--stage-two", default="fsdp2", help="strategy of Stage II: ddp or fsdp2")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="closing-run-") as name:
        record = run(Path(name), arguments)
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))


def run(place: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    data, adapter = place / "dataset", place / "adapter"
    write_dataset(data, demonstrations(arguments.rows, seed=0))
    shared = ["--data", str(data), "--device", "cpu", "--processes", "2", "--per-device-train-batch-size", "16"]
    shared += ["--batch-size", "32", "--save-steps", "16", "--max-length", "128"]
    one = loragate(
        "sft",
        "--model",
        str(shipped_base_folder()),
        "--out",
        str(adapter),
        "--strategy",
        arguments.fine_tuning,
        *shared,
    )
    two = ["calibrate", "--adapter", str(adapter), "--range=-3,1", "--unverified", *shared]
    two += ["--strategy", arguments.gate_training]
    whole = loragate(*two, "--out", str(place / "whole"))
    killed = loragate(*two, "--out", str(place / "gated"), kill_after_checkpoint=place / "gated" / "run")
    saved = sorted(path.name for path in (place / "gated" / "run").glob("checkpoint-*"))
    kept = {path.name: path.stat().st_size for path in (place / "gated" / "run" / saved[-1]).iterdir()}
    resumed = loragate(*two, "--out", str(place / "gated"), "--resume")
    return {
        "loragate": __version__,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "rows": arguments.rows,
        "processes": 2,
        "strategies": [arguments.fine_tuning, arguments.gate_training],
        "stage_one": one,
        "stage_two": whole,
        "killed": {**killed, "checkpoints": saved, "bytes": kept},
        "resumed": resumed,
        **judged(place),
    }


def judged(place: Path) -> dict[str, Any]:
    """What the resumed gates are, beside those of the run that was not interrupted."""
    from safetensors.torch import load_file

    whole, gates = (load_file(str(place / name / "gates.safetensors")) for name in ("whole", "gated"))
    config = json.loads((place / "gated" / "gate_config.json").read_text())
    from loragate.models import open_tokenizer, resolve

    tokenizer = open_tokenizer(resolve(place / "adapter"))
    model = lg.load_gated(place / "gated").eval()
    questions = problems("probe", QUESTIONS)
    ids = torch.tensor([tokenizer("3 + 4", add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        gated = model(input_ids=ids).logits
        with lg.gate_override(model, constant=1.0):
            plain = model(input_ids=ids).logits
    with lg.gate_override(model, constant=1.0):
        adapter_right = answers_right(model, tokenizer, questions)
    return {
        "same_gates_as_uninterrupted": all(torch.equal(whole[name], value) for name, value in gates.items()),
        "tensors": len(gates),
        "largest_gate_weight": max(float(value.abs().max()) for value in gates.values()),
        "largest_logit_change": float((gated - plain).abs().max()),
        "entropy": [config["training"][key] for key in ("entropy_before", "entropy_after")]
        if "training" in config
        else None,
        "greedy_right_of": QUESTIONS,
        "adapter_right": adapter_right,
        "gated_right": answers_right(model, tokenizer, questions),
    }


if __name__ == "__main__":
    main()
