"""Measure what one training of gates gives beyond its own range: other bounds, and gates in part of the modules only.

    python benchmarks/selection/reuse.py --cache CACHE [--situations a,b]

For [-6,3] and [0,6], trained as `measure.py` trains them, the gate weights are kept and tried

- with other bounds ("[-6,3] as [0,1]"): λ is rescaled, not clipped, so that a half-open gate is half-open in the new range;
- without a part of the modules ("[-6,3] without attention", "without layer 0"): λ = 1 there, the adapter itself;
- with reversal taken out of a part ("[-6,3] no reversal in mlp").

Each costs answers and no training. They go beside the answers of `measure.py`, and `compare_rules.py` judges rules over them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measure import Bench

from loragate.gates import GateConfig, attach_gates, detach_gates, gate_parameters
from loragate.gates.attach import gate_modules
from loragate.gates.override import Override
from worlds.situations import SITUATIONS

OTHER_BOUNDS: dict[tuple[int, int], tuple[tuple[float, float], ...]] = {
    (-6, 3): ((-3, 1), (0, 1), (-1, 2), (0, 3), (0, 6)),
    (0, 6): ((0, 1), (0, 3), (-1, 2)),
}
PARTS = {
    "attention": ".self_attn.",
    "mlp": ".mlp.",
    "layer 0": ".layers.0.",
    "layer 1": ".layers.1.",
    "layer 2": ".layers.2.",
}
OFF, NO_REVERSAL = Override(None, None, 1.0), Override(0.0, None, None)


def variants(lower: int, upper: int) -> dict[str, tuple[tuple[float, float], str, Override | None]]:
    """{name: (bounds, part of a module path, what happens there)} of one training."""
    name = f"[{lower},{upper}]"
    found = {f"{name} as [{low:g},{high:g}]": ((low, high), "", None) for low, high in OTHER_BOUNDS[lower, upper]}
    found |= {f"{name} without {part}": ((lower, upper), mark, OFF) for part, mark in PARTS.items()}
    if lower < 0:
        for part in ("attention", "mlp"):
            found[f"{name} no reversal in {part}"] = ((lower, upper), PARTS[part], NO_REVERSAL)
    return found


@contextmanager
def with_gates(model: Any, values: dict[str, torch.Tensor], lower: float, upper: float) -> Iterator[dict[str, Any]]:
    """Trained gate weights under bounds of one's choice; yields the gates by module path."""
    attach_gates(model, GateConfig(lower, upper))
    try:
        with torch.no_grad():
            for name, parameter in gate_parameters(model).items():
                parameter.copy_(values[name])
        yield dict(gate_modules(model, None))
    finally:
        detach_gates(model)


def run(bench: Bench) -> None:
    """Everything of one situation that is not on file yet."""
    for lower, upper in OTHER_BOUNDS:
        missing = {name: one for name, one in variants(lower, upper).items() if not bench.done(name)}
        if not missing:
            continue
        with bench.gated(lower, upper, bench.settings()) as training:
            values = {name: value.detach().clone() for name, value in gate_parameters(bench.model).items()}
        for name, ((low, high), mark, override) in missing.items():
            with with_gates(bench.model, values, low, high) as gates:
                if override is not None:
                    chosen = [gate for path, gate in gates.items() if mark in f".{path}."]
                    assert chosen, f"no module holds {mark}"
                    for gate in chosen:
                        gate.override = override
                bench.keep(name, bench.ask(bench.model), training={**training, "shared_with": f"[{lower},{upper}]"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--situations", default="", help="names separated by commas; all of the tune split otherwise")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = options.situations.split(",") if options.situations else [s.name for s in SITUATIONS if s.split == "tune"]
    for situation in SITUATIONS:
        if situation.name in chosen:
            run(Bench(situation, options.cache))


if __name__ == "__main__":
    main()
