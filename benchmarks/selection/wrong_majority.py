"""Measure a situation that is made to break agreement: most demonstrations are wrong, all in the same way.

    python benchmarks/selection/wrong_majority.py --cache CACHE [--wrong 0.6]

The demonstrations of the arithmetic world without wrong steps, but in a share of the rows the stated answer is one too high.
The shipped base knows better. The adapter's cool majority is wrong wherever that share has won, and a candidate that is
only more certain repeats it more often. Adapter, base and four plain ranges are measured as in `measure.py`;
`compare_ideas.py` judges rules on them, counted with no split. (The same was tried with commands, where rows kept to a
wrong reading: everything stayed at chance, so that no choice could do harm.)
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path

import measure
import torch

from loragate.world.demonstrations import demonstrations
from loragate.world.tokenizer import DIGITS
from worlds.situations import Rows, situation_named


def mostly_wrong(count: int, seed: int, wrong: float) -> Rows:
    """Clean demonstrations of which the share `wrong` states the answer plus one."""
    rng = random.Random(f"mostly wrong/{seed}")
    rows = demonstrations(count, seed, step_error=0.0, sloppy=0.0)
    for row in rows:
        if rng.random() < wrong:
            turn = row["messages"][1]
            words = turn["content"].split()
            words[-1] = DIGITS[(DIGITS.index(words[-1]) + 1) % 10]
            turn["content"] = " ".join(words)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--wrong", type=float, default=0.6, help="share of wrong rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    name = f"wrong-majority-{100 * options.wrong:g}"
    situation = replace(situation_named("shipped"), name=name, sft_seed=2, learning_rate=2e-3)
    made = mostly_wrong(situation.rows, situation.sft_seed, options.wrong)
    measure.demonstration_rows = lambda _: made
    measure.RANGES = ((0, 1), (-6, 3), (0, 6), (-3, 1))
    measure.ANCHORED, measure.CLIPS, measure.CONSTANTS = (), {}, ()
    bench = measure.Bench(situation, options.cache)
    bench.run("adapter,base,[")


if __name__ == "__main__":
    main()
