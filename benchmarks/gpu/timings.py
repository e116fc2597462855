"""The timed parts of `run.py`: a step, decoding, compilers. Random weights are made on the device."""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import contestants
import torch
from common import alternate, ratios, spread
from contestants import Shape, adapter
from parts import TINY, Task, error, mild, on, require, shaken
from torch import nn
from true_shapes import SHAPES


def clock(task: Task) -> Callable[[], float]:
    def read() -> float:
        if task.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    return read


def peak_bytes(task: Task, run: Callable[[], Any]) -> int | None:
    """Most memory that a run takes above what is there before it."""
    if task.device != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def step(task: Task) -> None:
    """A Stage-II step against a LoRA step, forward and backward without the optimiser, alternated; FLOPs: `true_shapes.py`."""
    shapes = (
        {"tiny": TINY} if task.rehearsal else {name: replace(shape, dtype="bfloat16") for name, shape in SHAPES.items()}
    )
    names = ["lora", "lora_trl", "gates_loragate"]
    if importlib.util.find_spec("trl") is None:
        names.remove("lora_trl")
        task.keep("lora_trl", "left out: no trl")
    for name, shape in shapes.items():
        try:
            rows = step_rows(task, shape, names)
            task.keep(name, {"tokens": shape.rows * shape.sequence, "dtype": shape.dtype, **rows})
        except torch.OutOfMemoryError:
            task.keep(name, "left out: out of memory")
        names = ["lora", "gates_loragate"]  # of the larger shapes no third model fits beside these


def step_rows(task: Task, shape: Shape, names: list[str]) -> dict[str, Any]:
    """{contestant: peak memory, seconds, ratio to LoRA}; all are in memory together."""
    rows: dict[str, Any] = {}
    sides: dict[str, Callable[[], None]] = {}
    with on(task.device):
        for side in names:
            model, loss = contestants.CONTESTANTS[side](shape)

            def run(model: nn.Module = model, loss: Any = loss) -> None:
                loss().backward()
                model.zero_grad(set_to_none=True)

            run()
            rows[side], sides[side] = {"peak_bytes": peak_bytes(task, run)}, run
        seconds = alternate(sides, 2 if task.rehearsal else 7, clock(task))
    for side, row in rows.items():
        row |= {"seconds": spread(seconds[side]), "time_to_lora": ratios(seconds, side, "lora")}
    return rows


def decode(task: Task) -> None:
    """Tokens per second of greedy `generate` with a static cache: base, adapter and gated adapter, alternated."""
    shape = TINY if task.rehearsal else replace(SHAPES["Qwen2.5-1.5B"], dtype="bfloat16")
    prompt, new = (8, 4) if task.rehearsal else (128, 16)
    with on(task.device):
        plain, gated = adapter(shape).eval(), shaken(adapter(shape)).eval()

    def tokens_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                cache_implementation="static",
                disable_compile=True,
            )

    def base(ids: torch.Tensor) -> torch.Tensor:
        with plain.disable_adapter():
            return tokens_of(plain, ids)

    for rows in (1, 2) if task.rehearsal else (1, 64):
        draw = torch.Generator().manual_seed(rows)
        ids = torch.randint(1, shape.vocabulary, (rows, prompt), generator=draw).to(task.device)
        sides = {
            "base": lambda ids=ids: base(ids),
            "adapter": lambda ids=ids: tokens_of(plain, ids),
            "gated": lambda ids=ids: tokens_of(gated, ids),
        }
        require(tokens_of(gated, ids).shape == (rows, prompt + new), "generate returned another number of tokens")
        seconds = alternate(sides, 1 if task.rehearsal else 3, clock(task))
        found = {side: spread([rows * new / spent for spent in values]) for side, values in seconds.items()}
        slower = ratios(seconds, "gated", "adapter")
        task.keep(f"batch {rows}", {"tokens_per_second": found, "time_to_adapter": slower})


def compile(task: Task) -> None:
    """The gated forward under `torch.compile` and in a CUDA graph: equal results, and times."""
    shape = TINY if task.rehearsal else replace(SHAPES["Qwen2.5-1.5B"], layers=8, dtype="bfloat16")
    rows, width = (2, 8) if task.rehearsal else (32, 16)
    with on(task.device):
        model = shaken(mild(adapter(shape))).eval()
    ids = torch.randint(0, shape.vocabulary, (2, rows, width), generator=torch.Generator().manual_seed(1)).to(
        task.device
    )

    @torch.no_grad()
    def eager(ids: torch.Tensor, model: Any = model) -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).logits

    expected = [eager(one).clone() for one in ids]
    # how far this precision is from fp32 with the same weights
    exact = copy.deepcopy(model).float()
    noise = max(2 * error(one, eager(two, exact)) for one, two in zip(expected, ids)) + 1e-4
    del exact
    task.keep("tolerance", noise)
    sides: dict[str, Callable[[], Any]] = {"eager": lambda: eager(ids[0])}
    for mode in ("default",) if task.device == "cpu" else ("default", "reduce-overhead"):
        compiled = torch.compile(model, mode=mode)

        @torch.no_grad()
        def run(ids: torch.Tensor, compiled: Any = compiled) -> torch.Tensor:
            return compiled(input_ids=ids, use_cache=False).logits

        began = time.perf_counter()
        found = [error(run(one).clone(), two) for one, two in zip(ids, expected)]
        task.keep(f"compiled {mode}", {"seconds_to_compile": time.perf_counter() - began, "errors": found})
        require(max(found) <= noise, f"torch.compile in mode {mode} is off by {max(found):.2g}")
        sides[f"compiled {mode}"] = lambda run=run: run(ids[0])
    if task.device == "cuda":
        still, graph = ids[0].clone(), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                eager(still)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            logits = eager(still)
        found = []
        for one, two in zip(ids, expected):
            still.copy_(one)
            graph.replay()
            found.append(error(logits, two))
        task.keep("CUDA graph", {"errors": found})
        require(max(found) <= noise, f"a CUDA graph replays another result: {max(found):.2g}")
        sides["CUDA graph"] = graph.replay
    else:
        task.keep("CUDA graph", "left out: no CUDA")
    seconds = alternate(sides, 2 if task.rehearsal else 20, clock(task))
    task.keep("seconds", {side: spread(values) for side, values in seconds.items()})
