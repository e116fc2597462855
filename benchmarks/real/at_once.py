"""The study with many methods at a time, for a machine with a GPU that is there for minutes; verdicts are added afterwards.

    python benchmarks/real/at_once.py draw --out FOLDER --records FOLDER [--cells clean-1,noisy-1] [--workers 8] [--minutes 8]
    python benchmarks/real/at_once.py judge --out FOLDER --records FOLDER

`draw` trains and asks what the records lack, many methods beside one another: LoRA first, then the methods named by --first in
every cell, then cell after cell. Asked are the test at every temperature, the rest of the pool greedily and at T = 1, and
the retention; nobody chooses by development questions here. Answers are kept without verdicts, so that graders need neither be
installed there nor take the GPU's time. `judge` adds them, on any machine. RECORDS must hold the base's own solutions (its
retention line), which all processors are to score alike.
"""

from __future__ import annotations

import argparse
import heapq
import os
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import measure
from measure import Asked, Budget, Cell, OutOfTime, asked_of, read_design, records_of, situation_of

SECONDS_LAST = 15  # before the end, in which what runs may still finish a line


def needed(method: str, design: dict[str, Any]) -> str:
    """The method that must be there before this one can be made; none for what starts from the base."""
    spec = design["methods"][method]
    return spec.get("from") or spec.get("random") or ("LoRA" if {"constant", "calibrate"} & set(spec) else "")


def whole(methods: list[str], design: dict[str, Any]) -> list[str]:
    """These methods and all that they are made from, each once, what is needed first."""
    found: dict[str, None] = {}
    for method in methods:
        chain = [method]
        while need := needed(chain[-1], design):
            chain.append(need)
        found |= dict.fromkeys(reversed(chain))
    return list(found)


def wanted(design: dict[str, Any], method: str) -> list[Asked]:
    """Greedy answers first, so that a stop leaves these; the base's answers are one set for all cells, so it gets no rest."""
    usual = [one for one in asked_of(design, method) if one.split != "dev"]
    rest = [replace(one, split="rest") for one in usual if one.split == "test" and one.temperature in (0, 1)]
    return sorted([*usual, *(rest if method != "base" else [])], key=lambda one: one.temperature)


def order(
    design: dict[str, Any], cells: list[str], methods: list[str], first: list[str]
) -> Iterator[tuple[int, str, str]]:
    """(rank, cell, method): LoRA of every cell, on which most others wait, then `first` in every cell, then cell by cell."""
    early = ["LoRA", *first]
    for place, cell in enumerate(cells):
        for rank, method in enumerate(methods):
            if method == "base" and place > 0:
                continue
            yield (
                (early.index(method) * len(cells) + place if method in early else 1000 * (place + 1) + rank),
                cell,
                method,
            )


def cell_of(name: str, given: argparse.Namespace, judges: bool = False) -> Cell:
    import torch

    situation, _, seed = name.rpartition("-")
    precision = "bf16" if torch.cuda.is_available() or measure.real_model.has_bf16() else "fp32"
    return Cell(
        read_design(), situation, int(seed), given.base, given.out, precision, given.smoke, device="auto", judges=judges
    )


def ask(name: str, method: str, given: argparse.Namespace, ends: float) -> float | None:
    """One method of one cell, in this process; what is left in memory is freed. Its seconds, None if there was no time."""
    import torch

    torch.set_num_threads(1)
    began = time.monotonic()
    cell = cell_of(name, given)
    budget = Budget(max(0.0, ends - time.time()) / 60)
    records = records_of(name, cell.design, given.records)
    try:
        measure.run_cell(cell, [method], records, budget, wanted(cell.design, method))
    except OutOfTime:
        return None
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return time.monotonic() - began


def draw(given: argparse.Namespace) -> int:
    """Everything in its order, by processes that begin with what is ready; 1 if anything failed."""
    ends = time.time() + 60 * given.minutes - SECONDS_LAST
    design = read_design()
    cells = given.cells.split(",")
    for name in cells:  # written once, before many read them
        cell = cell_of(name, given)
        for which in ("own", "unseen"):
            cell.rows_file(which)
        cell.questions_file("rest")
        _, of_base = records_of(name, design, given.records)
        if ("base", "retention") not in of_base.lines:
            raise SystemExit(f"{of_base.path} lacks the base's own solutions; copy the line from {measure.RECORDS}")
    methods = whole(given.methods.split(";") if given.methods else list(design["methods"]), design)
    todo = list(order(design, cells, methods, given.first.split(";")))
    waiting: dict[tuple[str, str], list[tuple[int, str, str]]] = {}
    ready: list[tuple[int, str, str]] = []
    for one in todo:
        need = needed(one[2], design)
        (waiting.setdefault((one[1], need), []) if need else ready).append(one)
    heapq.heapify(ready)
    done = failed = 0
    running: dict[Future[float | None], tuple[str, str]] = {}
    pool = begin(given)
    try:
        while ready or running:
            while ready and len(running) < given.workers and time.time() < ends:
                _, name, method = heapq.heappop(ready)
                running[pool.submit(ask, name, method, given, ends)] = (name, method)
            left = ends + SECONDS_LAST - time.time()
            finished, _ = wait(running, timeout=max(0.0, left), return_when=FIRST_COMPLETED)
            if not finished:
                print(f"out of time with {len(running)} running", flush=True)
                break
            broken = False
            for future in finished:
                key = running.pop(future)
                try:
                    seconds = future.result()
                except Exception as problem:
                    failed += 1
                    broken |= isinstance(problem, BrokenProcessPool)
                    print(f"{' '.join(key)} failed: {''.join(traceback.format_exception(problem))[-1500:]}", flush=True)
                    continue
                print(f"{' '.join(key)}: {'no time was left' if seconds is None else f'{seconds:.0f} s'}", flush=True)
                if seconds is not None:
                    done += 1
                    for one in waiting.pop(key, []):
                        heapq.heappush(ready, one)
            if broken:  # a process was killed, and all that ran beside it is lost with its pool
                failed, running = failed + len(running), {}
                pool = begin(given)
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(cancel_futures=True)
    print(f"{done} of {len(todo)} done, {failed} failed", flush=True)
    return int(failed > 0)


def begin(given: argparse.Namespace) -> ProcessPoolExecutor:
    # every process begins anew: one that has spoken to a GPU cannot be copied
    return ProcessPoolExecutor(given.workers, mp_context=get_context("spawn"))


def judge(given: argparse.Namespace) -> int:
    """Verdicts for all lines that have none. An answer that was judged once is not judged again."""
    design = read_design()
    cells = [f"{one['situation']}-{one['seed']}" for one in design["cells"]]
    tokens = {f"base-{situation_of(name, design)['max_new_tokens']}": name for name in reversed(cells)}
    for path in sorted(given.records.glob("*.jsonl.gz")):
        stem = path.name.removesuffix(".jsonl.gz")
        cell, record = cell_of(tokens.get(stem, stem), given, judges=True), measure.Record(path)
        verdicts: dict[tuple[str, int, str], str] = {}
        for line in sorted(record.lines.values(), key=lambda line: "correct" not in line):
            split = line["what"].split(" ")[0]
            if "texts" not in line or split == "retention":
                continue
            keys = [(split, place, text) for place, texts in enumerate(line["texts"]) for text in texts]
            if "correct" in line:
                verdicts |= dict(zip(keys, line["correct"], strict=True))
                continue
            new: list[list[str]] = [[] for _ in line["texts"]]
            for _, place, text in dict.fromkeys(key for key in keys if key not in verdicts):
                new[place].append(text)
            found = cell.judged(split, {"texts": new})["correct"]
            asked = [(split, place, text) for place, texts in enumerate(new) for text in texts]
            verdicts |= dict(zip(asked, found, strict=True))
            record.add({**line, "correct": "".join(verdicts[key] for key in keys)})
        print(f"{path}: {len(record.lines)} lines", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("draw", "judge"))
    parser.add_argument("--out", type=Path, default=Path("runs/real-study"), help="model, adapters and gates")
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--base", type=Path, help="folder of the base model; OUT/base otherwise")
    parser.add_argument("--cells", default="noisy-1,clean-1,clean-0,noisy-0,clean-2,noisy-2")
    parser.add_argument("--methods", default="", help="separated by semicolons; all otherwise")
    parser.add_argument("--first", default="", help="methods that come before all others, separated by semicolons")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--smoke", action="store_true", help="two steps, four questions: figures that mean nothing")
    given = parser.parse_args()
    given.base = given.base or given.out / "base"
    return draw(given) if given.what == "draw" else judge(given)


if __name__ == "__main__":
    # one thread for each process, as there are as many processes as cores
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    sys.exit(main())
