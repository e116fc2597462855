"""One adapter as people train them, with plain TRL on a real model, examined whole: the page that docs/doctor.md shows.

    python benchmarks/doctor/real.py smollm2-135m --out runs/doctor-real

A LoRA of rank 16 on all linear layers, one pass over short word problems (examples/word_problems, SVAMP and GSM8K, MIT) at 2e-4,
then `loragate doctor` with the examples, the dev set and no other settings. Run again, it goes on with what is missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).parent.parent))
from models import MODELS, model_folder

ROWS = Path("examples/word_problems")


def rows(count: int) -> Dataset:
    """The first examples as prompt and completion, each a conversation of one turn."""
    lines = (ROWS / "train.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    found = map(json.loads, lines)
    turns = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["response"]}],
        }
        for row in found
    ]
    return Dataset.from_list(turns)


def train(base: Path, out: Path, steps: int, batch: int) -> None:
    """TRL's own trainer, with its own settings but for rate, batch and length."""
    settings = SFTConfig(
        output_dir=str(out / "checkpoints"),
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=2e-4,
        max_length=512,
        logging_steps=4,
        save_strategy="no",
        report_to="none",
        bf16=False,
        model_init_kwargs={"dtype": torch.float32},
        seed=0,
    )
    trainer = SFTTrainer(
        model=str(base),
        args=settings,
        train_dataset=rows(steps * batch),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model(str(out / "adapter"))


def main() -> int:
    """Train if there is no adapter yet, then examine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--models", type=Path, default=Path("runs/models"), help="where models are kept")
    parser.add_argument("--out", type=Path, default=Path("runs/doctor-real"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    given = parser.parse_args()
    out = given.out / given.model
    if not (out / "adapter" / "adapter_model.safetensors").is_file():
        train(model_folder(given.model, given.models), out, given.steps, given.batch)
    place = out / "doctor"
    again = ["--resume"] if (place / "run" / "run.json").is_file() else []
    examined = [sys.executable, "-m", "loragate", "doctor", str(out / "adapter"), "--data", str(ROWS / "train.jsonl")]
    return subprocess.run([*examined, "--out", str(place), *again], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
