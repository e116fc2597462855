"""Is there anything to learn from one's own answers? pass@8 at T = 0.8 among prompts whose greedy answer is wrong.

    python benchmarks/objectives/diagnostic.py --out FOLDER --cache CACHE --cells commands-weak/0,commands-noisy/0
    python benchmarks/objectives/diagnostic.py --out FOLDER --model ADAPTER --base BASE --data QUESTIONS.jsonl [--limit N]

The first form asks adapters of tiny situations (`trial.py`) their development questions; the second any adapter, for rows
with `prompt` and `answer` whose answers stand in a box; `real.py` asks an adapter of the study on the real model. Answers go
to FOLDER as they are drawn, and a stopped run goes on. Where fewer than about a tenth of the wrong prompts have a right
sample, or no more than by chance, an objective that learns from its own answers has next to nothing to learn from. Chance is
how often a prompt's samples hold another prompt's answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from loragate.data import render_prompt
from loragate.evaluation import average_at_k
from loragate.evaluation.grading import grade_math
from loragate.files import write_json
from loragate.generation import Sample, SamplingConfig, TransformersEngine
from loragate.generation.samples import SampleWriter, read_samples
from loragate.models import open_model, resolve
from objectives.learning import GROUP, HEAT
from objectives.losses import vote
from objectives.trial import DEV, MAX_NEW_TOKENS, Cell, judged

SHIFTS = (1, 2, 3)
Judge = Callable[[Sample, int], tuple[bool, str | None]]
"""An answer and the question that it is held against, to the verdict and to what the answer states."""


def drawn(engine: Any, prompts: Sequence[str], config: SamplingConfig, path: Path) -> list[Sample]:
    """The answers on file and those that are missing there."""
    on_file = read_samples(path) if path.is_file() else []
    have = {(sample.question, sample.sample) for sample in on_file}
    wanted = [(question, sample) for question in range(len(prompts)) for sample in range(config.samples)]
    missing = [pair for pair in wanted if pair not in have]
    if missing:
        with SampleWriter(path) as writer:
            engine.generate(prompts, config, pending=missing, on_samples=writer.write)
    return read_samples(path)


def summary(
    greedy: Sequence[bool],
    sampled: np.ndarray,
    stated: Sequence[Sequence[str | None]],
    by_chance: Sequence[np.ndarray],
) -> dict[str, Any]:
    """The figures of one adapter.

    Args:
        greedy: verdicts on the greedy answers, [Q].
        sampled: those on the samples, [Q, K].
        stated: what the samples state; None for nothing.
        by_chance: whether a question's samples hold the right answer to another question, each [Q]: where answers are few,
            eight tries reach one without knowing anything.
    """
    wrong = ~np.asarray(greedy, dtype=bool)
    reached = sampled.any(axis=1)[wrong]
    found = average_at_k(reached[:, None].astype(float)) if wrong.any() else None
    ballots = [vote(answers) for answers in stated]
    elected = [
        winner is not None and bool(verdicts[answers.index(winner)])
        for (winner, _), verdicts, answers in zip(ballots, sampled, stated, strict=True)
    ]
    return {
        "questions": len(greedy),
        "greedy": 100 * float(np.mean(~wrong)),
        f"single at T={HEAT:g}": 100 * float(sampled.mean()),
        "majority of 8": 100 * float(np.mean(elected)),
        "wrong greedily": int(wrong.sum()),
        "of them reached": int(reached.sum()),
        "share": None if found is None else [100 * found.mean, 100 * found.low, 100 * found.high],
        "share by chance": 100 * float(np.mean([other[wrong].mean() for other in by_chance])) if wrong.any() else None,
        "right greedily, a wrong sample": int((~sampled.all(axis=1) & ~wrong).sum()),
    }


def diagnose(engine: Any, prompts: Sequence[str], judge: Judge, limit: int, folder: Path) -> dict[str, Any]:
    """Draw, judge, and write `summary.json` in the folder."""
    one = drawn(engine, prompts, SamplingConfig(0.0, 1.0, limit, 1, 0), folder / "greedy.jsonl")
    eight = drawn(engine, prompts, SamplingConfig(HEAT, 1.0, limit, GROUP, 0), folder / "sampled.jsonl")
    found = [judge(sample, sample.question) for sample in eight]
    sampled = np.array([verdict for verdict, _ in found]).reshape(len(prompts), GROUP)
    stated = [[answer for _, answer in found[at : at + GROUP]] for at in range(0, len(found), GROUP)]
    by_chance = []
    for shift in SHIFTS:
        verdicts = [judge(sample, (sample.question + shift) % len(prompts))[0] for sample in eight]
        by_chance.append(np.array(verdicts).reshape(len(prompts), GROUP).any(axis=1))
    figures = summary([judge(sample, sample.question)[0] for sample in one], sampled, stated, by_chance)
    write_json(folder / "summary.json", figures)
    return figures


def boxed(rows: Sequence[Mapping[str, Any]]) -> Judge:
    """By what stands in the box, against the `answer` of the rows."""
    grade = cache(grade_math)  # short answers repeat

    def judge(sample: Sample, question: int) -> tuple[bool, str | None]:
        found = grade(sample.text, rows[question]["answer"])
        return found.correct, found.extracted

    return judge


def of_cell(name: str, cache: Path, out: Path) -> dict[str, Any]:
    """The development questions of a tiny situation."""
    cell = Cell(name, cache)
    asked = cell.asked["dev"]
    engine = TransformersEngine(cell.frozen, cell.tokenizer, batch_size=DEV * GROUP)
    return diagnose(engine, cell.prompts(asked), partial(judged, asked), MAX_NEW_TOKENS, out / name)


def of_adapter(options: argparse.Namespace) -> dict[str, Any]:
    """Rows of a file, asked of any adapter."""
    rows = [json.loads(line) for line in options.data.read_text(encoding="utf-8").splitlines()][: options.limit]
    loaded = open_model(resolve(options.model, options.base))
    prompts = [render_prompt([{"role": "user", "content": row["prompt"]}], loaded.tokenizer) for row in rows]
    engine = TransformersEngine(loaded.model, loaded.tokenizer, batch_size=options.batch)
    return diagnose(engine, prompts, boxed(rows), options.max_new_tokens, options.out / "adapter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--cells", default="")
    parser.add_argument("--model", default="")
    parser.add_argument("--base", default="")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--limit", type=int, help="questions to ask; all otherwise")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.model:
        print(json.dumps(of_adapter(options), indent=1))
    for name in filter(None, options.cells.split(",")):
        print(name, json.dumps(of_cell(name, options.cache, options.out)), flush=True)


if __name__ == "__main__":
    main()
