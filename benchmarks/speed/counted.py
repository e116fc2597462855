"""Counted FLOPs and saved bytes of small steps, held against the committed figures: a regression check without a clock.

    python benchmarks/speed/counted.py            # compare with benchmarks/results/counted.json, exit status 1 if they differ
    python benchmarks/speed/counted.py --update   # write the figures of this source tree

The figures are exact and the same on every machine; they hold for one set of library versions, which the file names.
More of anything is a regression. Less is a gain that the file does not know yet. Either way: run `--update`, look at the
difference, and commit it together with its reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import RESULTS, Counts, count, versions
from contestants import Shape, Step, gates_loragate, lora

from loragate.losses import token_statistics

FILE = RESULTS / "counted.json"
UPDATE = "python benchmarks/speed/counted.py --update"
SMALL = Shape(64, 256, 2, 4, 2, vocabulary=2048, rows=2, sequence=64)


def head(shape: Shape, wanted: str) -> Step:
    """The token-statistics head alone, as Stage I ("log_prob") and Stage II ("topk_entropy") use it."""
    torch.manual_seed(0)
    weight = torch.randn(shape.vocabulary, shape.hidden)
    hidden = torch.randn(shape.rows, shape.sequence, shape.hidden, requires_grad=True)
    labels = torch.randint(0, shape.vocabulary, (shape.rows, shape.sequence))
    labels[:, : shape.prompt] = -100
    owner = torch.nn.Module()
    owner.register_buffer("weight", weight)
    owner.register_parameter("hidden", torch.nn.Parameter(hidden.detach()))

    def loss() -> torch.Tensor:
        stats = token_statistics(owner.hidden, weight, labels, k=shape.k, outputs=(wanted,), gradients=(wanted,))
        return getattr(stats, wanted).sum()

    return owner, loss


def gated_module() -> Step:
    """One gated delta alone, 128 tokens of width 64, rank 16."""
    from loragate.gates.operation import gated_delta
    from loragate.gates.range import Range
    from loragate.gates.signed_map import SignedMap

    torch.manual_seed(0)
    owner = torch.nn.Module()
    owner.register_buffer("a", torch.randn(16, 64))
    owner.register_buffer("b", torch.randn(256, 16))
    owner.register_parameter("x", torch.nn.Parameter(torch.randn(128, 64)))
    owner.register_parameter("weight", torch.nn.Parameter(torch.randn(64) * 1e-6))
    owner.register_parameter("bias", torch.nn.Parameter(torch.zeros(1)))

    def loss() -> torch.Tensor:
        signed_map = SignedMap(Range(-6, 3))
        return gated_delta(owner.x, owner.a, owner.b, owner.weight, owner.bias, signed_map, 1.0).sum()

    return owner, loss


CASES: dict[str, Callable[[], Step]] = {
    "LoRA step, full logits": partial(lora, SMALL),
    "Stage-II step": partial(gates_loragate, SMALL),
    "Stage-II step, three layers": partial(gates_loragate, replace(SMALL, layers=3)),
    "Stage-II step, long row": partial(gates_loragate, replace(SMALL, rows=1, sequence=256)),
    "Stage-II step, wide vocabulary": partial(gates_loragate, replace(SMALL, vocabulary=40960)),
    "Stage-II step, bf16 base": partial(gates_loragate, replace(SMALL, dtype="bfloat16")),
    "Stage-II step, checkpointing": partial(gates_loragate, replace(SMALL, checkpointing=True)),
    "Stage-II step, Qwen3": partial(gates_loragate, replace(SMALL, family="qwen3", head_size=32)),
    "Stage-II step, Llama": partial(gates_loragate, replace(SMALL, family="llama")),
    "head, top-k entropy": partial(head, SMALL, "topk_entropy"),
    "head, log-probability": partial(head, SMALL, "log_prob"),
    "gated delta": gated_module,
}


def counted() -> dict[str, dict[str, int]]:
    """{case: flops, flops_attention, saved_bytes}."""
    found: dict[str, Counts] = {name: count(*make()) for name, make in CASES.items()}
    return {name: counts.record() for name, counts in found.items()}


def pinned() -> dict[str, str]:
    """The versions that the figures depend on, without local build tags."""
    return {
        name: found.split("+")[0] for name, found in versions().items() if name in ("torch", "transformers", "peft")
    }


def differences(known: dict[str, dict[str, int]], found: dict[str, dict[str, int]]) -> list[str]:
    """One sentence for every figure that is not the committed one, and for cases that are new or gone."""
    lines = [f"{name}: {'new' if name in found else 'gone'}" for name in sorted(known.keys() ^ found.keys())]
    for name in known.keys() & found.keys():
        for figure, before in known[name].items():
            now = found[name][figure]
            if now != before:
                word = "MORE" if now > before else "less"
                lines.append(f"{name}: {word} {figure}, {now} for {before} ({100 * (now / before - 1):+.2f} %)")
    return sorted(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write benchmarks/results/counted.json")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = counted()
    known: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {"counted": {}}
    lines = differences(known["counted"], found)
    if chosen.update:
        FILE.write_text(json.dumps({"versions": pinned(), "counted": found}, indent=2) + "\n", encoding="utf-8")
        print(*(lines or ["nothing changed"]), f"written to {FILE.name}", sep="\n")
        return 0
    if lines and known.get("versions") != pinned():
        print(f"counted with {known.get('versions')}, here is {pinned()}")
    print(*(lines or ["as committed"]), sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
