"""The token-statistics head alone: memory and time against vocabulary and tokens, beside full logits and TRL's fused head.

    python benchmarks/speed/head.py [--quick] [--repeats 3] [--threads 1] [--out FILE]

Each side takes final hidden states and a frozen head, and gives the gradient by the hidden states:

- `entropy`: this package's top-100 entropy (Stage II);
- `log_prob`: this package's log-probability of the labels (Stage I);
- `naive`: top-100 entropy of full fp32 logits by autograd;
- `trl`: TRL's chunked log-probability and entropy, with the gradient of the log-probability.

Memory is exact: the largest sum of all storages alive at one moment, without hidden states, labels and the head, with all
that is kept for the backward and the gradient itself. It is counted at the shape of Qwen2.5-1.5B's head (width 1536) on
tensors that hold no data, in fp32, in bf16 on a CPU (where head rows are widened to be multiplied) and in bf16 as on a GPU
(where they are not). FLOPs are counted likewise, as multiples of one projection of all tokens. Times are medians of runs in
turn on a CPU at width 128 in fp32; at such a width the search for the largest counts for more than at a model's own.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from common import alternate, begin, count, finish, options, ratios, slope, spread, stopwatch, target
from fake import StorageTracker, without_data
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

from loragate.losses import token_statistics, topk_entropy
from loragate.losses.projection import preferred_tokens

K = 100
VOCABULARIES = [8192, 32768, 65536, 151936]
TOKENS = [512, 2048, 4096, 16384]
WIDTH, LARGE_V, LARGE_T = 1536, 151936, 4096
TIMED_WIDTH, TIMED_TOKENS, TIMED_VOCABULARY = 128, 128, 8192
TIMED_TOKEN_COUNTS = [512, 1024, 2048, 4096, 8192]
PATHS = {"fp32": torch.float32, "bf16 on a CPU": torch.bfloat16, "bf16 as on a GPU": torch.bfloat16}
LIMIT = 0.7  # GiB


def ours(name: str, chunk: int | None = None) -> Callable[..., torch.Tensor]:
    def loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        stats = token_statistics(hidden, weight, labels, k=K, outputs=(name,), gradients=(name,), chunk_tokens=chunk)
        return getattr(stats, name).sum()

    return loss


def naive(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return topk_entropy((hidden @ weight.T).float(), K).sum()


def trl(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    size = _CHUNKED_LOGPROB_CHUNK_SIZE
    return ChunkedLogProbFunction.apply(hidden, weight, None, labels, 1.0, size, None, 1.0, ("entropy",))[0].sum()


def sides(path: str) -> dict[str, Callable[..., torch.Tensor]]:
    chunk = preferred_tokens("cuda") if path == "bf16 as on a GPU" else None
    return {"entropy": ours("topk_entropy", chunk), "log_prob": ours("log_prob", chunk), "naive": naive, "trl": trl}


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Low-precision head rows are multiplied as they are, into fp32; for tensors without data."""

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return left.new_empty((left.shape[0], right.shape[1]), dtype=torch.float32)

    with (
        patch("loragate.losses.projection.multiplies_directly", lambda weight: True),
        patch("loragate.losses.projection.product_in_fp32", product),
        patch("trl.kernels.chunked_logprob._addmm_fp32", lambda total, left, right: None),
    ):
        yield


def operands(tokens: int, vocabulary: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=draw) * width**-0.5).to(dtype)
    return hidden, weight, torch.randint(0, vocabulary, (tokens,), generator=draw)


def peak(side: Callable[..., torch.Tensor], path: str, tokens: int, vocabulary: int) -> float:
    """MiB at the worst moment of forward and backward."""
    with without_data(tokens), as_on_a_gpu() if path == "bf16 as on a GPU" else nullcontext():
        hidden = torch.empty(tokens, WIDTH, dtype=PATHS[path], requires_grad=True)
        weight = torch.empty(vocabulary, WIDTH, dtype=PATHS[path])
        labels = torch.empty(tokens, dtype=torch.int64)
        tracker = StorageTracker([hidden, weight, labels])
        with tracker:
            side(hidden, weight, labels).backward()
    return round(tracker.peak / 2**20, 1)


def projections(side: Callable[..., torch.Tensor], tokens: int, vocabulary: int) -> float:
    """FLOPs of forward and backward, as multiples of one projection."""
    with without_data(tokens):
        hidden, weight, labels = (
            torch.empty(tokens, WIDTH, requires_grad=True),
            torch.empty(vocabulary, WIDTH),
            torch.empty(tokens, dtype=torch.int64),
        )
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(weight, requires_grad=False)
        flops = count(model, lambda: side(hidden, model.weight, labels)).flops
    return round(flops / (2 * tokens * vocabulary * WIDTH), 4)


def timed(points: list[tuple[int, int]], values: list[int], repeats: int, threads: int) -> dict[str, Any]:
    """Times of all sides at points of (tokens, vocabulary), which grow along `values`."""
    names = ("entropy", "log_prob", "naive", "trl")
    found: dict[str, Any] = {name: [] for name in names}
    found |= {"entropy / naive": [], "entropy / trl": [], "log_prob / trl": []}
    for tokens, vocabulary in points:
        hidden, weight, labels = operands(tokens, vocabulary, TIMED_WIDTH, torch.float32)

        def run(side: Callable[..., torch.Tensor], held: tuple[torch.Tensor, ...] = (hidden, weight, labels)) -> None:
            side(*held).backward()
            held[0].grad = None

        runs = {name: (lambda side=side: run(side)) for name, side in sides("fp32").items()}
        seconds = alternate(runs, repeats, stopwatch(threads))
        for name in names:
            found[name].append(spread(seconds[name]))
        for pair in ("entropy / naive", "entropy / trl", "log_prob / trl"):
            found[pair].append(ratios(seconds, *pair.split(" / ")))
        del hidden, weight, labels, runs
        gc.collect()
    growth = {name: slope(values, [one["median"] for one in found[name]]) for name in names}
    return {"values": values, "seconds": found, "exponent": growth}


def show(title: str, values: list[int], rows: dict[str, list[float]]) -> None:
    print(f"\n{title:<34}" + "".join(f"{value:>10}" for value in values))
    for name, row in rows.items():
        print(f"{name:<34}" + "".join(f"{value:>10.4g}" for value in row))


def main() -> None:
    chosen = begin(options(__doc__, "head", repeats=3))
    vocabularies, tokens = ([8192, 151936], [512, 4096]) if chosen.quick else (VOCABULARIES, TOKENS)
    curves = {"vocabulary": [(LARGE_T, v) for v in vocabularies], "tokens": [(t, LARGE_V) for t in tokens]}
    memory: dict[str, Any] = {}
    for name, points in curves.items():
        values = vocabularies if name == "vocabulary" else tokens
        rows = {
            f"{side}, {path}": [peak(run, path, *point) for point in points]
            for path in PATHS
            for side, run in sides(path).items()
            if path != "bf16 on a CPU" or side not in ("naive", "trl")  # not what they are made for
        }
        memory[name] = {"values": values, "peak_mib": rows}
        show(f"peak MiB against {name}", values, rows)
    flops = {name: projections(side, LARGE_T, LARGE_V) for name, side in sides("fp32").items()}
    show("projections' worth of FLOPs", [LARGE_V], {name: [value] for name, value in flops.items()})
    few = [8192, 32768] if chosen.quick else VOCABULARIES
    short = [512, 2048] if chosen.quick else TIMED_TOKEN_COUNTS
    times = {
        "vocabulary": timed([(TIMED_TOKENS, v) for v in few], few, chosen.repeats, chosen.threads),
        "tokens": timed([(t, TIMED_VOCABULARY) for t in short], short, chosen.repeats, chosen.threads),
    }
    for name, found in times.items():
        medians = {side: [one["median"] for one in column] for side, column in found["seconds"].items()}
        show(f"seconds against {name}", found["values"], medians)
        print(f"exponents of growth: {found['exponent']}")
    at = tokens.index(LARGE_T)
    judged = [
        target(
            f"peak extra GiB, {side}, {LARGE_T} tokens × {LARGE_V}",
            memory["tokens"]["peak_mib"][side][at] / 1024,
            at_most=LIMIT,
        )
        for side in (f"{name}, {path}" for path in PATHS for name in ("entropy", "log_prob"))
    ]
    finish(
        chosen,
        {
            "memory": {"width": WIDTH, "k": K, "vocabulary at": LARGE_T, "tokens at": LARGE_V, **memory},
            "projections": flops,
            "time": {
                "width": TIMED_WIDTH,
                "k": K,
                "vocabulary at": TIMED_TOKENS,
                "tokens at": TIMED_VOCABULARY,
                **times,
            },
            "targets": judged,
        },
    )


if __name__ == "__main__":
    main()
