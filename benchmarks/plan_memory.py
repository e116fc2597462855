"""The memory that `loragate.training.plan` estimates against the memory that training takes, for several families and shapes.

    python benchmarks/plan_memory.py [--only NAME] [--replan] [--out FILE]

Each case trains a random model for two steps with the package's own trainer (`train_adapter`, `train_gates`) on a CPU while
PyTorch's profiler records every allocation and release of the CPU allocator. Measured is the most that is alive at one moment of
the second step: weights, adapter, optimiser, gradients, activations and whatever kernels need for a moment. The formula sees the
configuration only. `activations_ratio` compares the same without what is held between steps, which is the harder part. Bytes are
counted, so they repeat; `--replan` compares anew with the measurements in the file, in seconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # which holds the tiny models

import loragate as lg
from loragate.losses.objectives import objectives
from loragate.training import FineTuningSettings, GateTrainingSettings, train_adapter
from loragate.training.plan import Estimate, estimate
from tiny import tiny_tokenizer

SHAPE = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 5}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048}
RANK = 16


class NearTheBase:
    """Gates that keep near the base while the entropy falls: an objective with a KL to it."""

    name, k, outputs, gradients = "base", 100, ("topk_entropy",), None
    requires, settings = frozenset({"reference_kl"}), {}

    def loss(self, stats: Any, context: Any = None) -> torch.Tensor:
        return stats.topk_entropy + stats.kl


def objective_of(case: Case) -> Any:
    """None for the gates' own entropy."""
    if case.objective == "base":
        return NearTheBase()
    return objectives[case.objective] if case.stage == "sft" else None


@dataclass(frozen=True)
class Case:
    """One training to be measured."""

    name: str
    family: str
    stage: str
    sequence: int = 256
    rows: int = 4
    passes: int = 1
    checkpointing: bool = False
    padded: bool = False
    precision: str = "fp32"
    dtype: str = "float32"
    objective: str = "sft"
    dora: bool = False
    shape: tuple[tuple[str, Any], ...] = ()


def cases() -> list[Case]:
    """Families, shapes, stages, checkpointing, precision, accumulation, padding."""
    chosen = [
        Case(f"{family} {stage}{' recompute' if recompute else ''}", family, stage, checkpointing=recompute)
        for family in ("qwen2", "llama", "mistral", "qwen3", "olmo2")
        for stage in ("sft", "calibrate")
        for recompute in (False, True)
    ]
    wide = (("vocab_size", 32768), ("hidden_size", 128), ("intermediate_size", 512), ("tie_word_embeddings", True))
    deep = (("num_hidden_layers", 10), ("vocab_size", 2048))
    for stage in ("sft", "calibrate"):
        start = Case(f"qwen2 {stage}", "qwen2", stage)
        chosen += [
            replace(start, name=f"{start.name} wide vocabulary", shape=wide, sequence=512, rows=2),
            replace(start, name=f"{start.name} deep, long", shape=deep, sequence=1024, rows=1),
            replace(
                start, name=f"{start.name} deep, long, recompute", shape=deep, sequence=1024, rows=2, checkpointing=True
            ),
            replace(start, name=f"{start.name} padded", padded=True),
            replace(start, name=f"{start.name} two passes", passes=2, rows=2),
            replace(start, name=f"{start.name} bf16 autocast", precision="bf16"),
            replace(start, name=f"{start.name} bf16 base", precision="bf16", dtype="bfloat16"),
            replace(
                start, name=f"{start.name} bf16 base, recompute", precision="bf16", dtype="bfloat16", checkpointing=True
            ),
        ]
    sft = Case("qwen2 sft", "qwen2", "sft")
    for name, changed in (
        ("dora", {"dora": True}),
        ("eksft", {"objective": "eksft"}),
        ("talr, two passes", {"objective": "talr", "passes": 2, "rows": 2}),
    ):
        chosen.append(replace(sft, name=f"qwen2 sft {name}", **changed))
        low = {"precision": "bf16", "dtype": "bfloat16", "checkpointing": True, **changed}
        chosen.append(replace(sft, name=f"qwen2 sft {name}, bf16 base, recompute", **low))
    gates = Case("qwen2 calibrate", "qwen2", "calibrate", objective="base")
    chosen.append(replace(gates, name="qwen2 calibrate kl to the base"))
    chosen.append(
        replace(
            gates,
            name="qwen2 calibrate kl to the base, bf16 base, recompute",
            precision="bf16",
            dtype="bfloat16",
            checkpointing=True,
        )
    )
    return chosen


def configuration(case: Case) -> Any:
    return AutoConfig.for_model(
        case.family, **{**SHAPE, **dict(case.shape)}, pad_token_id=0, eos_token_id=1, bos_token_id=2
    )


def rows_of(case: Case) -> tuple[list[dict[str, Any]], float]:
    """Rows of exactly `sequence` tokens, a quarter of them prompt, and the share of response tokens of a pass."""
    prompt = case.sequence // 4
    rows, response = [], 0
    for index in range(2 * case.rows * case.passes):
        answer = case.sequence - prompt - 1
        if case.padded and index % case.rows:
            answer -= case.sequence // 8
        words = [f"w{(17 * index + 31 * at) % 1000}" for at in range(case.sequence)]
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": " ".join(words[: prompt - 2])},
                    {"role": "assistant", "content": " ".join(words[-answer:])},
                ]
            }
        )
        response += answer + 1
    return rows, response / (len(rows) * case.sequence)


def train(case: Case, marks: list[int]) -> None:
    """Two optimiser steps; a mark is left in the profile after each."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(configuration(case), dtype=getattr(torch, case.dtype))
    rows, _ = rows_of(case)
    shared: dict[str, Any] = {
        "batch_size": case.rows * case.passes,
        "per_device_train_batch_size": case.rows,
        "max_steps": 2,
        "max_length": case.sequence,
        "gradient_checkpointing": case.checkpointing,
        "precision": case.precision,
        "logging_steps": 100,
    }

    def mark(report: Any) -> None:
        if not report.values and report.step not in marks:
            marks.append(report.step)
            with record_function("loragate step"):
                pass

    tokenizer = tiny_tokenizer(base.config.vocab_size)
    if case.stage == "sft":
        settings = FineTuningSettings(rank=RANK, objective=case.objective, dora=case.dora, **shared)
        train_adapter(base, tokenizer, rows, settings, on_step=mark)
        return
    record = LoraConfig(
        r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    model = get_peft_model(base, record)
    with torch.no_grad():  # a delta of full size would fail the parity limits in bf16
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.mul_(0.1)
    own = {"objective": objective_of(case), "on_step": mark}
    lg.train_gates(model, tokenizer, rows, lg.GateConfig(-1, 2), GateTrainingSettings(**shared), **own)


def measured(case: Case) -> tuple[int, int]:
    """(bytes held between the two steps, most bytes alive during the second)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        train(case, [])
    events = record.profiler.kineto_results.events()
    first, second = sorted(event.start_ns() for event in events if event.name() == "loragate step")[:2]
    live = held = peak = 0
    for at, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        live += size
        if at < first:
            held = peak = live
        elif at < second:
            peak = max(peak, live)
    return held, peak


def planned(case: Case) -> Estimate:
    """The formula's, from the configuration alone."""
    return estimate(
        configuration(case),
        case.stage,
        sequence=case.sequence,
        rows=case.rows,
        adapter=RANK,
        base=case.dtype,
        autocast=case.precision != "fp32",
        gradient_checkpointing=case.checkpointing,
        objective=objective_of(case),
        dora=case.dora,
        passes=case.passes,
    )


def compare(case: Case, held: float, peak: float) -> dict[str, float]:
    """Estimated and measured MiB of one case, and their ratios; `held` between two steps and `peak` are measured bytes."""
    found = planned(case)
    expected_held = found.weights + found.adapter + found.optimizer
    return {
        "measured_mib": round(peak / 2**20, 3),
        "measured_held_mib": round(held / 2**20, 3),
        "planned_mib": round(found.peak / 2**20, 3),
        "ratio": round(found.peak / peak, 4),
        "held_ratio": round(expected_held / held, 4),
        "activations_ratio": round((found.peak - expected_held) / (peak - held), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name begins with this; the file's other cases stay")
    parser.add_argument("--replan", action="store_true", help="plan anew against the measurements in the file")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "plan_memory.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    if (options.only or options.replan) and options.out.is_file():
        rows = json.loads(options.out.read_text(encoding="utf-8"))["cases"]
    print(f"{'':<42}{'measured':>10}{'planned':>10}{'ratio':>8}{'activations':>13}")
    for case in cases():
        if not case.name.startswith(options.only):
            continue
        known = rows.get(case.name) if options.replan else None
        figures = [2**20 * known[key] for key in ("measured_held_mib", "measured_mib")] if known else measured(case)
        row = rows[case.name] = compare(case, *figures)
        print(
            f"{case.name:<42}{row['measured_mib']:>10.1f}{row['planned_mib']:>10.1f}{row['ratio']:>8.3f}"
            f"{row['activations_ratio']:>13.3f}",
            flush=True,
        )
    results: dict[str, Any] = {"torch": torch.__version__, "machine": platform.machine()}
    for key in ("ratio", "activations_ratio"):
        errors = [abs(row[key] - 1) for row in rows.values()]
        results[f"median_{key}_error"] = round(statistics.median(errors), 4)
        results[f"largest_{key}_error"] = round(max(errors), 4)
        median, most = 100 * statistics.median(errors), 100 * max(errors)
        print(f"{key}: off by {median:.1f} % in the median of {len(errors)} cases, {most:.1f} % at worst")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**results, "cases": rows}, indent=2) + "\n", encoding="utf-8")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
