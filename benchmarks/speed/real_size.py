"""Training steps and decoding at the shape of Qwen2.5-0.5B or 1.5B, beside the products of the base's weights alone.

    python benchmarks/speed/real_size.py [--model 1.5B] [--quick] [--repeats 3] [--threads 1] [--out FILE]

Random weights, LoRA rank 16 on all linear layers. A step is forward and backward, 75 % of the tokens response; the contestants are
those of `contestants.py`. 0.5B is in fp32, 4 rows of 200 tokens; 1.5B in bf16, 8 rows of 110 tokens, adapter, gates in fp32 under
autocast, as TRL and this package train with bf16. The products alone, each base weight once with as many rows, run in the same
rounds: their time, scaled to the arithmetic floor of a gate step (`true_shapes.floor`), is the least that this machine could take.
Decoding is one pass of one token for each row of a batch, greedy, by `generate` of transformers, without autocast; there the
products alone, which read every weight once, are the bound of memory and arithmetic in one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import true_shapes
from common import alternate, begin, count, finish, options, ratios, spread, step_of, stopwatch
from contestants import CONTESTANTS, Shape, adapter
from torch.nn import functional

import loragate as lg

SHAPES = {
    "0.5B": Shape(896, 4864, 24, 14, 2, vocabulary=151936, rows=4, sequence=200),
    "1.5B": replace(true_shapes.SHAPES["Qwen2.5-1.5B"], rows=8, sequence=110, dtype="bfloat16"),
}
TRAINED = ("lora", "lora_trl", "gates_loragate")
BATCHES = (1, 32)
NEW_TOKENS = 9


def products(model: Any, rows: int, head_rows: int) -> tuple[Callable[[], None], int]:
    """Every base weight times `rows` rows, the head's times `head_rows`; and the FLOPs of that."""
    causal = model.get_base_model()
    pairs = [(module.base_layer.weight, rows) for module in causal.modules() if hasattr(module, "base_layer")]
    pairs.append((causal.get_output_embeddings().weight, head_rows))
    inputs = {
        (weight.shape[1], times): torch.randn(times, weight.shape[1], dtype=weight.dtype) for weight, times in pairs
    }

    @torch.no_grad()
    def run() -> None:
        for weight, times in pairs:
            functional.linear(inputs[weight.shape[1], times], weight)

    return run, sum(2 * times * weight.numel() for weight, times in pairs)


def share(model: Any, first: Any) -> None:
    """Give a model the weights of the first one, which its own are equal to: memory for one."""
    weights = dict(first.named_parameters())
    for name, one in model.named_parameters():
        if name in weights:
            one.data = weights[name].data


def cast(shape: Shape) -> AbstractContextManager[Any]:
    """Products of adapter and gates in the base's dtype, as both trainers have them."""
    return torch.autocast("cpu", torch.bfloat16, enabled=shape.dtype == "bfloat16")


def measure_steps(shape: Shape, repeats: int, clock: Callable[[], float]) -> dict[str, Any]:
    """{contestant: counts, seconds, time against LoRA and against the floor at the speed of the products}."""
    least = true_shapes.counts(shape, true_shapes.floor).flops
    sides, counts, models = {}, {}, []
    for name in TRAINED:
        model, loss = CONTESTANTS[name](shape)
        models.append(model)
        share(model, models[0])
        with cast(shape):
            counts[name] = count(model, loss)
        sides[name] = step_of(model, loss)
    sides["products"], flops = products(model, shape.rows * shape.sequence, shape.labelled)
    with cast(shape):
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
    share(models["gated"], models["plain"])
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
    parser.add_argument("--model", choices=SHAPES, default="0.5B")
    if (model := parser.parse_known_args()[0].model) != "0.5B":
        parser.set_defaults(name=f"real_size_{model}")
    chosen = begin(parser)
    clock, shape = stopwatch(chosen.threads), SHAPES[chosen.model]
    if chosen.quick:
        shape = replace(shape, layers=2, rows=1, sequence=64)
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
    finish(
        chosen, {"model": f"Qwen2.5-{chosen.model}", "dtype": shape.dtype, **size, "steps": steps, "decoding": decoding}
    )


if __name__ == "__main__":
    main()
