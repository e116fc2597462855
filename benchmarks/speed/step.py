"""One Stage-II step against what users would run instead: FLOPs, saved activations, paired time.

    python benchmarks/speed/step.py [--quick] [--vocabulary 32768 131072] [--intermediate 2048 1376] [--repeats 5]
                                    [--threads 1] [--out FILE]

Shape: Qwen2, hidden 512, 8 layers, 2 rows of 512 tokens, the last 75 % of each is response, LoRA rank 16 on all linear
layers, fp32; the MLP four times as wide as hidden, and 8/3 times (1376), as in Llama. A step is forward and backward
without the optimiser. The contestants are those of `contestants.py`.
"""

from __future__ import annotations

import gc
from typing import Any

from common import Counts, alternate, begin, count, finish, options, ratios, spread, step_of, stopwatch, target
from contestants import CONTESTANTS, NAMES, Shape

# (vocabulary, against, figure): at most
TARGETS = {
    (32768, "lora", "flops"): 0.75,
    (32768, "lora", "saved"): 0.75,
    (32768, "lora", "time"): 0.60,
    (131072, "lora", "flops"): 0.55,
    (131072, "lora", "saved"): 0.48,
    (131072, "lora", "time"): 0.60,
    (32768, "lora_trl", "flops"): 0.75,
    (32768, "lora_trl", "saved"): 1.0,
    (32768, "lora_trl", "time"): 0.75,
    (131072, "lora_trl", "flops"): 0.75,
    (131072, "lora_trl", "saved"): 1.0,
    (131072, "lora_trl", "time"): 0.75,
}
WORDS = {"flops": "FLOPs", "saved": "saved activations", "time": "time"}


def measure(shape: Shape, repeats: int, threads: int) -> dict[str, Any]:
    """{contestant: counts, seconds}, of one shape."""
    counts: dict[str, Counts] = {}
    sides = {}
    for name, make in CONTESTANTS.items():
        model, loss = make(shape)
        counts[name] = count(model, loss)
        sides[name] = step_of(model, loss)
        gc.collect()
    seconds = alternate(sides, repeats, stopwatch(threads))
    rows: dict[str, Any] = {}
    for name, counted in counts.items():
        rows[name] = {**counted.record(), "seconds": spread(seconds[name])}
        for other in ("lora", "lora_trl"):
            rows[name][f"to_{other}"] = {**compared(counted, counts[other]), "time": ratios(seconds, name, other)}
    return rows


def compared(one: Counts, other: Counts) -> dict[str, Any]:
    """Ratios of exact counts."""
    return {
        "flops": round(one.flops / other.flops, 4),
        "flops_without_attention": round(one.weights / other.weights, 4),
        "saved": round(one.saved / other.saved, 4),
    }


def targets(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The limits against what was found."""
    found = []
    for case in cases:
        for (vocabulary, against, figure), limit in TARGETS.items():
            if vocabulary != case["vocabulary"]:
                continue
            value = case["rows"]["gates_loragate"][f"to_{against}"][figure]
            measured = value["median"] if figure == "time" else value
            words = f"{WORDS[figure]} to {NAMES[against]}; vocabulary {vocabulary >> 10}k, MLP {case['intermediate']}"
            found.append(target(words, measured, at_most=limit))
    return found


def main() -> None:
    parser = options(__doc__, "step")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32768, 131072])
    parser.add_argument("--intermediate", type=int, nargs="+", default=[2048, 1376])
    chosen = begin(parser)
    if chosen.quick:
        chosen.vocabulary, chosen.intermediate = [32768], [2048]
    cases = []
    for intermediate in chosen.intermediate:
        for vocabulary in chosen.vocabulary:
            shape = Shape(vocabulary=vocabulary, intermediate=intermediate)
            rows = measure(shape, chosen.repeats, chosen.threads)
            cases.append({"vocabulary": vocabulary, "intermediate": intermediate, "rows": rows})
            print(f"\nvocabulary {vocabulary}, MLP {intermediate}; ratios to LoRA with full logits")
            print(f"{'':<24}{'GFLOP':>8}{'ratio':>7}{'saved MiB':>11}{'ratio':>7}{'seconds':>9}{'ratio':>7}")
            for name, row in rows.items():
                to = row["to_lora"]
                print(
                    f"{NAMES[name]:<24}{row['flops'] / 1e9:>8.1f}{to['flops']:>7.3f}{row['saved_bytes'] / 2**20:>11.1f}"
                    f"{to['saved']:>7.3f}{row['seconds']['median']:>9.3f}{to['time']['median']:>7.3f}"
                )
    print()
    finish(chosen, {"cases": cases, "targets": targets(cases)})


if __name__ == "__main__":
    main()
