"""A full fine-tune of the tiny base, extracted as adapters of several ranks, one of them gated.

    python benchmarks/extract_tiny.py [--folder DIR] [--questions 200] [--samples 4] [--out FILE]

The shipped base is fine-tuned on the quickstart's 4,096 noisy demonstrations (AdamW, 128 steps of 32, learning rate 1e-3),
once with all its parameters and once with its linear layers alone. `loragate extract` then takes adapters of ranks 1 to 64
out of the result. Each is compared with the fine-tuned model: mean KL divergence of its next-token distributions from the
fine-tuned model's on held-out responses, and accuracy at temperature 1 on test problems (the interval is over questions).
The adapter of rank 16 is calibrated by `loragate calibrate` at the range [0,1], which the quickstart's study favours for
this base. One thread, fixed seeds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel

import loragate as lg
from loragate.cli.main import main as loragate
from loragate.data import Collator, encode_rows, load_rows, render_prompt
from loragate.evaluation import run_suite
from loragate.generation import SamplingConfig, TransformersEngine
from loragate.world.base import load_base, save_base
from loragate.world.demonstrations import demonstrations
from loragate.world.problems import problems, verify

RANKS = (1, 2, 4, 8, 16, 32, 64)
GATED_RANK = 16
STEPS, BATCH, LEARNING_RATE = 128, 32, 1e-3


def fine_tune(model: Any, tokenizer: Any, what: str) -> None:
    """Every parameter ("all"), or those of linear layers ("linear"); cosine with 10 % warm-up, CE per response token."""
    encoded = list(encode_rows(load_rows(demonstrations(STEPS * BATCH, seed=0)), tokenizer, max_length=128))
    collator = Collator(tokenizer.pad_token_id)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(what == "all" or name.endswith("_proj.weight"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step / STEPS))
    model.train()
    for step in range(STEPS):
        batch = collator(encoded[step * BATCH : (step + 1) * BATCH])
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def factor(done: float) -> float:
    return done / 0.1 if done < 0.1 else 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * (done - 0.1) / 0.9))))


class Yardstick:
    """Accuracy on test problems, and the distance of distributions on held-out responses."""

    def __init__(self, tokenizer: Any, questions: int, samples: int) -> None:
        self.tokenizer, self.samples = tokenizer, samples
        self.items = problems("test", questions, (4, 4), seed=0)
        self.prompts = [render_prompt([{"role": "user", "content": item.prompt}], tokenizer) for item in self.items]
        rows = list(encode_rows(load_rows(demonstrations(256, seed=77)), tokenizer, max_length=128))
        self.batch = Collator(tokenizer.pad_token_id)(rows)

    @torch.no_grad()
    def log_probs(self, model: Any) -> torch.Tensor:
        logits = model(input_ids=self.batch["input_ids"], attention_mask=self.batch["attention_mask"]).logits
        return logits[:, :-1][self.batch["labels"][:, 1:] != -100].log_softmax(-1)

    def accuracy(self, model: Any) -> dict[str, float]:
        config = SamplingConfig(max_new_tokens=72, samples=self.samples, seed=2)
        engine = TransformersEngine(model, self.tokenizer, batch_size=400)
        suite = run_suite(
            engine, self.prompts, lambda at, one: verify(self.items[at], one.text, one.finish_reason == "stop"), config
        )
        return asdict(suite.accuracy)


def measure(folder: Path, what: str, questions: int, samples: int) -> dict[str, Any]:
    """Everything, as JSON values."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base, tokenizer = load_base()
    save_base(base, tokenizer, folder / "base")
    began = time.perf_counter()
    fine_tune(base, tokenizer, what)
    base.requires_grad_(False)
    seconds = {"fine-tune": time.perf_counter() - began}
    save_base(base, tokenizer, folder / "tuned")
    yardstick = Yardstick(tokenizer, questions, samples)
    reference = yardstick.log_probs(base)
    rows = [
        {
            "name": "base",
            "accuracy": yardstick.accuracy(load_base()[0]),
            **distance(yardstick, load_base()[0], reference),
        }
    ]
    rows.append({"name": "fine-tuned", "accuracy": yardstick.accuracy(base), "kl": 0.0})
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in demonstrations(STEPS * BATCH, seed=0)))
    for rank in RANKS:
        out = folder / f"rank-{rank}"
        began = time.perf_counter()
        arguments = ["--model", str(folder / "tuned"), "--base", str(folder / "base")]
        assert loragate(["extract", *arguments, "--rank", str(rank), "--out", str(out), "--device", "cpu"]) == 0
        seconds[f"extract {rank}"] = time.perf_counter() - began
        record = json.loads((out / "extract.json").read_text())
        model = PeftModel.from_pretrained(load_base()[0], str(out)).eval()
        rows.append(
            {
                "name": f"rank {rank}",
                "kept": record["energy_kept"],
                "accuracy": yardstick.accuracy(model),
                **distance(yardstick, model, reference),
            }
        )
        left = record["energy_left_out"]
    began = time.perf_counter()
    calibrate = ["calibrate", "--adapter", str(folder / f"rank-{GATED_RANK}"), "--data", str(data), "--out"]
    calibrate += [
        str(folder / "gated"),
        "--range=0,1",
        "--unverified",
        "--batch-size",
        "32",
        "--per-device-train-batch-size",
        "32",
    ]
    calibrate += ["--max-steps", "157", "--max-length", "128", "--device", "cpu"]
    assert loragate(calibrate) == 0
    seconds["calibrate"] = time.perf_counter() - began
    gated = lg.load_gated(folder / "gated")
    rows.append(
        {
            "name": f"rank {GATED_RANK}, gated [0,1]",
            "accuracy": yardstick.accuracy(gated),
            **distance(yardstick, gated, reference),
        }
    )
    return {"left_out": left, "rank_for": record["rank_for_energy"], "rows": rows, "seconds": seconds}


def distance(yardstick: Yardstick, model: Any, reference: torch.Tensor) -> dict[str, float]:
    """KL(fine-tuned ‖ model) in nats per response token."""
    own = yardstick.log_probs(model)
    return {"kl": float((reference.exp() * (reference - own)).sum(-1).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where models and adapters are kept; a temporary one otherwise")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "extract_tiny.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        sizes = (arguments.questions, arguments.samples)
        found = {what: measure(folder / what, what, *sizes) for what in ("all", "linear")}
    arguments.out.write_text(json.dumps(found, indent=2) + "\n")
    for what, part in found.items():
        print(f"fine-tuned: {what} parameters; left out {part['left_out']:.2%}; rank for energy {part['rank_for']}")
        for row in part["rows"]:
            accuracy = row["accuracy"]
            kept = f"{100 * row['kept']:6.2f} %" if "kept" in row else " " * 8
            print(
                f"  {row['name']:22} {kept}  KL {row['kl']:.5f}  {100 * accuracy['mean']:.1f} % "
                f"({100 * accuracy['low']:.1f} to {100 * accuracy['high']:.1f})"
            )


if __name__ == "__main__":
    main()
