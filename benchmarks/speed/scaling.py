"""How the cost of a Stage-II step grows: with rows, tokens, layers, width, vocabulary, rank and gated modules.

    python benchmarks/speed/scaling.py [--quick] [--repeats 5] [--threads 1] [--out FILE]

One thing grows, the rest stays at: Qwen2, hidden 256, MLP 1024, 4 layers, vocabulary 8192, one row of 512 tokens of which
75 % are response, rank 16, all seven kinds of modules gated, fp32. FLOPs and bytes kept for the backward are counted; times
are medians of runs in turn. Reported for each curve: the values, the slope of a straight line through their logarithms,
and how far the counts lie from a straight line through the first and the last point (`bend`, a share of the last value).
A bend of 0 means exactly linear; a slope below 1 then only says that something does not grow, the head for example.
Attention is counted apart, since its products grow with the square of a row's length, as in every transformer.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, replace
from typing import Any

from common import Counts, alternate, begin, count, finish, options, slope, spread, step_of, stopwatch, target
from contestants import ALL_KINDS, Shape, gates_loragate

START = Shape(256, 1024, 4, 4, 2, vocabulary=8192, rows=1, sequence=512)
CURVES: dict[str, list[int]] = {
    "rows": [1, 2, 4, 8],
    "sequence": [128, 256, 512, 1024, 2048],
    "layers": [2, 4, 8, 16],
    "hidden": [128, 256, 512, 1024],
    "vocabulary": [4096, 8192, 16384, 32768, 65536],
    "rank": [4, 8, 16, 32, 64, 128],
    "gated": [1, 2, 3, 4, 5, 6, 7],
}
LINEAR = ("rows", "sequence", "layers", "vocabulary")
BEND = 0.01


def shape_at(name: str, value: int, start: Shape = START) -> Shape:
    if name == "gated":
        # from the end: the last kinds of each layer first
        return replace(start, gated=ALL_KINDS[-value:])
    if name == "hidden":
        return replace(start, hidden=value, intermediate=4 * value, heads=value // 64, kv_heads=max(1, value // 128))
    return replace(start, **{name: value})


def bend(values: list[int], costs: list[float]) -> float:
    """Largest distance from the straight line through the first and last point, as a share of the last cost."""
    rise = (costs[-1] - costs[0]) / (values[-1] - values[0])
    return round(max(abs(costs[0] + rise * (x - values[0]) - y) for x, y in zip(values, costs)) / costs[-1], 5)


def curve(name: str, values: list[int], start: Shape, repeats: int, threads: int) -> dict[str, Any]:
    """Counts and times along one curve, with slopes and bends."""
    counted: list[Counts] = []
    sides = {}
    for value in values:
        model, loss = gates_loragate(shape_at(name, value, start))
        counted.append(count(model, loss))
        sides[str(value)] = step_of(model, loss)
    seconds = alternate(sides, repeats, stopwatch(threads))
    del sides, model, loss
    gc.collect()
    times = [spread(seconds[str(value)]) for value in values]
    series = {
        "flops": [one.flops for one in counted],
        "flops_without_attention": [one.weights for one in counted],
        "saved_bytes": [one.saved for one in counted],
    }
    return {
        "values": values,
        **series,
        "seconds": times,
        "slope": {
            **{key: slope(values, costs) for key, costs in series.items()},
            "seconds": slope(values, [one["median"] for one in times]),
        },
        "bend": {key: bend(values, costs) for key, costs in series.items()},
    }


def main() -> None:
    chosen = begin(options(__doc__, "scaling"))
    start = replace(START, sequence=128) if chosen.quick else START
    curves, judged = {}, []
    print(f"\n{'':<12}{'slope: FLOPs':>14}{'no attention':>14}{'saved':>8}{'time':>8}{'bend: no att.':>15}{'saved':>8}")
    for name, values in CURVES.items():
        found = curve(name, values[:3] if chosen.quick else values, start, chosen.repeats, chosen.threads)
        curves[name] = found
        slopes, bends = found["slope"], found["bend"]
        print(
            f"{name:<12}{slopes['flops']:>14}{slopes['flops_without_attention']:>14}{slopes['saved_bytes']:>8}"
            f"{slopes['seconds']:>8}{bends['flops_without_attention']:>15}{bends['saved_bytes']:>8}"
        )
        if name in LINEAR:
            words = f"distance from a straight line over {name}"
            judged.append(target(f"FLOPs without attention: {words}", bends["flops_without_attention"], at_most=BEND))
            judged.append(target(f"saved bytes: {words}", bends["saved_bytes"], at_most=BEND))
    finish(chosen, {"start": asdict(start), "curves": curves, "targets": judged})


if __name__ == "__main__":
    main()
