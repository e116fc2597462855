"""Training steps and decoding at the shape of Qwen2.5-0.5B, beside the products of the base's weights alone.

    python benchmarks/speed/real_size.py [--quick] [--repeats 3] [--threads 1] [--out FILE]

Random weights in fp32, LoRA rank 16 on all linear layers. A step is forward and backward of 4 rows of 200 tokens, 75 % of them
response; the contestants are those of `contestants.py`. The products alone, each base weight once with as many rows, run in the
same rounds: their time, scaled to the arithmetic floor of a gate step (`true_shapes.floor`), is the least that this machine could
take. Decoding is one pass of one token for each row of a batch, greedy, by `generate` of transformers; there the products alone,
which read every weight once, are the bound of memory and arithmetic in one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from common import alternate, begin, count, finish, options, ratios, spread, step_of, stopwatch
from contestants import CONTESTANTS, Shape, adapter
from torch.nn import functional
from true_shapes import floor

import loragate as lg

QWEN = Shape(896, 4864, 24, 14, 2, vocabulary=151936, rows=4, sequence=200)
TRAINED = ("lora", "lora_trl", "gates_loragate")
BATCHES = (1, 32)
NEW_TOKENS = 9


def products(model: Any, rows: int, head_rows: int) -> tuple[Callable[[], None], int]:
    """Every base weight times `rows` rows, the head's times `head_rows`; and the FLOPs of that."""
    causal = model.get_base_model()
    pairs = [(module.base_layer.weight, rows) for module in causal.modules() if hasattr(module, "base_layer")]
    pairs.append((causal.get_output_embeddings().weight, head_rows))
    inputs = {(weight.shape[1], times): torch.randn(times, weight.shape[1]) for weight, times in pairs}

    @torch.no_grad()
    def run() -> None:
        for weight, times in pairs:
            functional.linear(inputs[weight.shape[1], times], weight)

    return run, sum(2 * times * weight.numel() for weight, times in pairs)


def measure_steps(shape: Shape, repeats: int, clock: Callable[[], float]) -> dict[str, Any]:
    """{contestant: counts, seconds, time against LoRA and against the floor at the speed of the products}."""
    least = floor(shape).flops
    sides, counts = {}, {}
    for name in TRAINED:
        model, loss = CONTESTANTS[name](shape)
        counts[name] = count(model, loss)
        sides[name] = step_of(model, loss)
    sides["products"], flops = products(model, shape.rows * shape.sequence, shape.labelled)
    seconds = alternate(sides, repeats, clock)
    seconds["floor"] = [value * least / flops for value in seconds["products"]]
    rows: dict[str, Any] = {
        name: {
            **counts[name].record(),
            "seconds": spread(seconds[name]),
            "to_lora": ratios(seconds, name, "lora"),
            "to_floor": ratios(seconds, name, "floor"),
        }
        for name in TRAINED
    }
    speed = [flops / value / 1e9 for value in seconds["products"]]
    return {"floor_flops": least, "gflop_per_second": spread(speed), "rows": rows}


def measure_decoding(shape: Shape, batch: int, repeats: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Seconds of a token's pass: the base's products alone, the plain adapter, gates."""
    models = {"plain": adapter(shape).eval(), "gated": adapter(shape).eval()}
    lg.attach_gates(models["gated"], lg.GateConfig(-6, 3))
    with torch.no_grad():
        for parameter in lg.gate_parameters(models["gated"]).values():
            parameter.normal_(0, 0.02)
    ids = torch.randint(3, 1000, (batch, 8), generator=torch.Generator().manual_seed(0))

    def run(model: Any, tokens: int) -> Callable[[], None]:
        def draw() -> None:
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            model.generate(**given, do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0)

        return draw

    sides = {f"{name} {tokens}": run(model, tokens) for name, model in models.items() for tokens in (1, NEW_TOKENS)}
    sides["products"], _ = products(models["plain"], batch, batch)
    spent = alternate(sides, repeats, clock)
    seconds = {"products": spent["products"]}
    for name in models:  # the prompt's pass is in both
        pairs = zip(spent[f"{name} {NEW_TOKENS}"], spent[f"{name} 1"], strict=True)
        seconds[name] = [(long - short) / (NEW_TOKENS - 1) for long, short in pairs]
    found = {"batch": batch, "seconds": {name: spread(values) for name, values in seconds.items()}}
    return found | {f"{name}_to_products": ratios(seconds, name, "products") for name in models}


def main() -> None:
    parser = options(__doc__, "real_size", repeats=3)
    chosen = begin(parser)
    clock, shape = stopwatch(chosen.threads), QWEN
    if chosen.quick:
        shape = replace(QWEN, layers=2, rows=1, sequence=64)
    steps = measure_steps(shape, chosen.repeats, clock)
    print(f"products alone: {steps['gflop_per_second']['median']:.0f} GFLOP/s")
    for name, row in steps["rows"].items():
        print(
            f"{name:<16}{row['seconds']['median']:>8.2f} s, ÷ LoRA {row['to_lora']['median']:.3f}, "
            f"÷ floor {row['to_floor']['median']:.3f}, saved {row['saved_bytes'] / 2**20:.0f} MiB",
            flush=True,
        )
    decoding = [measure_decoding(shape, batch, chosen.repeats, clock) for batch in BATCHES]
    for found in decoding:
        print(
            f"decoding, batch {found['batch']}: plain ÷ products {found['plain_to_products']['median']:.2f}, "
            f"gated {found['gated_to_products']['median']:.2f}"
        )
    size = {"rows": shape.rows, "sequence": shape.sequence, "response": shape.response, "rank": shape.rank}
    finish(chosen, {"model": "Qwen2.5-0.5B", **size, "steps": steps, "decoding": decoding})


if __name__ == "__main__":
    main()
