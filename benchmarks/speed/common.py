"""What the speed benchmarks share: options, the record of machine and versions, exact counts, paired times, targets.

Every script of this folder runs alone, prints its machine and versions, and writes one JSON file. Counts (FLOPs, bytes
kept for the backward) repeat exactly; times are medians with quartiles of runs that alternate in one process.

FLOPs are those of matrix products: PyTorch's own counter, and what it does not know (attention on a CPU, products with a
vector or in place, `embedding_bag`). A multiplication and an addition count as two; attention counts as full squares, without the
saving of a causal mask; element-wise work, normalisation and searches are not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

RESULTS = Path(__file__).parents[1] / "results"
QUICK = Path(__file__).parents[2] / "build" / "bench"
PACKAGES = ("loragate", "torch", "transformers", "peft", "trl")
_ATEN = torch.ops.aten


def options(text: str, name: str, repeats: int = 5) -> argparse.ArgumentParser:
    """The flags that every script takes; quick runs are written beside the build, not over the committed results."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats and small cases, under a minute")
    parser.add_argument("--repeats", type=int, default=0, help=f"timed runs of each side (default {repeats}; quick 1)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--out", type=Path, help=f"JSON file to write (default results/speed_{name}.json)")
    parser.set_defaults(name=name, usual=repeats)
    return parser


def begin(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse, set the threads, and print what is run on."""
    chosen = parser.parse_args(arguments)
    chosen.repeats = chosen.repeats or (1 if chosen.quick else chosen.usual)
    chosen.out = chosen.out or (QUICK if chosen.quick else RESULTS) / f"speed_{chosen.name}.json"
    torch.set_num_threads(chosen.threads)
    print(", ".join(f"{key} {value}" for part in about(chosen.threads).values() for key, value in part.items()))
    return chosen


def about(threads: int) -> dict[str, dict[str, Any]]:
    """{"machine": ..., "versions": ...}: no names of hosts or users, no paths."""
    machine: dict[str, Any] = {
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "clock": "CPU time" if threads == 1 else "wall time",
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return {"machine": machine, "versions": {"python": platform.python_version(), **versions()}}


def versions() -> dict[str, str]:
    """Of the packages whose code is measured; those that are absent are left out."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def finish(chosen: argparse.Namespace, record: Mapping[str, Any]) -> None:
    """Write the record with its machine and versions, and print its targets."""
    whole = {**about(chosen.threads), "quick": chosen.quick, "repeats": chosen.repeats, **record}
    for row in whole.get("targets", ()):
        print(f"{'met   ' if row['met'] else 'MISSED'}  {row['figure']}: {row['measured']:g} (target {row['target']})")
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(whole, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {chosen.out.name}")


def target(figure: str, measured: float, at_most: float | None = None, at_least: float | None = None) -> dict[str, Any]:
    """One line of a table of targets; the measured figure is compared as it is and shown with three digits."""
    met = (at_most is None or measured <= at_most) and (at_least is None or measured >= at_least)
    limit = f"≤ {at_most:g}" if at_most is not None else f"≥ {at_least:g}"
    return {"figure": figure, "target": limit, "measured": float(f"{measured:.3g}"), "met": met}


# --- exact counts ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """One forward and backward pass.

    Attributes:
        flops: of all matrix products.
        attention: of these, the products inside attention (scores and weighted values).
        saved: bytes of the tensors kept for the backward, each storage once, parameters and buffers left out.
    """

    flops: int
    attention: int
    saved: int

    @property
    def weights(self) -> int:
        """FLOPs without those inside attention: what is linear in the tokens."""
        return self.flops - self.attention

    def record(self) -> dict[str, int]:
        return {"flops": self.flops, "flops_attention": self.attention, "saved_bytes": self.saved}


def _attention(query: Any, key: Any, *rest: Any, **_: Any) -> int:
    """Scores and weighted values: two products over the whole square, for every query head."""
    batch, heads, length, size = query
    return 2 * 2 * batch * heads * length * key[-2] * size


def _attention_backward(gradient: Any, query: Any, key: Any, *rest: Any, **_: Any) -> int:
    """Four products and the scores again."""
    return _attention(query, key) * 5 // 2


def _with_vector(matrix: Any, vector: Any, *rest: Any, **_: Any) -> int:
    return 2 * math.prod(matrix)


def _added_with_vector(start: Any, matrix: Any, vector: Any, *rest: Any, **_: Any) -> int:
    return _with_vector(matrix, vector)


def _added(start: Any, left: Any, right: Any, *rest: Any, **_: Any) -> int:
    return 2 * math.prod(left) * right[-1]


def _bag(weight: Any, indices: Any, *rest: Any, **_: Any) -> int:
    """A weighted sum of rows: the sparse backward of the token-statistics head."""
    return 2 * math.prod(indices) * weight[1]


MORE: dict[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _ATEN.mv: _with_vector,
    _ATEN.dot: _with_vector,
    _ATEN.addmv: _added_with_vector,
    _ATEN.addmv_: _added_with_vector,
    _ATEN.addmm_: _added,
    _ATEN.baddbmm_: _added,
    _ATEN._embedding_bag: _bag,
    _ATEN._embedding_bag_forward_only: _bag,
}


PRODUCT = re.compile(r"mm_?$|mv_?$|matmul|attention|embedding_bag|^_?addr_?$|linear$|^dot$|^vdot$")


class _Unknown(TorchDispatchMode):
    """Fails on a product, or an operator of someone's own, that no formula is known for: it would count as nothing."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = function._overloadpacket
        own = function.namespace not in ("aten", "prim", "prims", "profiler")
        if (own or PRODUCT.search(packet.__name__)) and packet not in flop_registry and packet not in MORE:
            raise RuntimeError(
                f"the operator {packet} is not counted: give it a formula with torch.utils.flop_counter.register_flop_formula"
            )
        return function(*args, **(kwargs or {}))


def count(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Counts:
    """Count one forward and backward pass; gradients are dropped afterwards. Works on fake tensors too."""
    owned = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with FlopCounterMode(display=False, custom_mapping=MORE) as counter, _Unknown():
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            value = loss()
        saved = sum(kept.values())
        if value.requires_grad:
            value.backward()
    model.zero_grad(set_to_none=True)
    by_operator = counter.get_flop_counts()["Global"]
    attention = sum(flops for operator, flops in by_operator.items() if "attention" in str(operator))
    return Counts(counter.get_total_flops(), attention, saved)


def step_of(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """One forward and backward pass without the optimiser, to be timed."""

    def step() -> None:
        loss().backward()
        model.zero_grad(set_to_none=True)

    return step


# --- times ----------------------------------------------------------------------------------------------------------


def stopwatch(threads: int) -> Callable[[], float]:
    """Seconds: this process's CPU time for one thread, so that a busy machine disturbs less; else wall time."""
    if torch.cuda.is_available():

        def synchronised() -> float:
            torch.cuda.synchronize()
            return time.perf_counter()

        return synchronised
    return time.process_time if threads == 1 else time.perf_counter


def alternate(
    sides: Mapping[str, Callable[[], Any]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every side, one run of each in turn, the order reversed every other round; a first round is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name in sorted(sides, key=list(sides).index, reverse=bool(turn % 2)):
            began = clock()
            sides[name]()
            if turn:
                seconds[name].append(clock() - began)
    return seconds


def spread(values: list[float]) -> dict[str, Any]:
    """Median and quartiles, to four digits."""
    quarters = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": _short(statistics.median(values)), "quartiles": [_short(quarters[0]), _short(quarters[2])]}


def slope(values: list[int], costs: list[float]) -> float:
    """Exponent of growth: of the least-squares line through the logarithms; NaN where a cost is 0."""
    if min(costs) <= 0:
        return math.nan
    xs, ys = [math.log(value) for value in values], [math.log(cost) for cost in costs]
    return round(statistics.linear_regression(xs, ys).slope, 3)


def ratios(seconds: Mapping[str, list[float]], side: str, against: str) -> dict[str, Any]:
    """Median and quartiles of the ratios within each round."""
    return spread([a / b for a, b in zip(seconds[side], seconds[against], strict=True)])


def _short(value: float) -> float:
    return float(f"{value:.4g}")
