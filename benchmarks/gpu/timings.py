"""The timed parts of `run.py`: a step, decoding, compilers, one token, the plugin's λ. Random weights are made on the device."""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import contestants
import torch
from common import alternate, ratios, spread, step_of
from contestants import Shape, adapter
from parts import TINY, Task, error, mild, on, require, shaken
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
    """A Stage-II step against a LoRA step, forward and backward without the optimiser, alternated; FLOPs: `true_shapes.py`.

    One row of 2,048 tokens waits for kernels to be started; rows of a real batch (8,192 tokens) wait for the arithmetic.
    """
    wanted = [("tiny", TINY)]
    if not task.rehearsal:
        wanted = [
            (
                f"{name}, {rows * shape.sequence} tokens",
                replace(shape, dtype="bfloat16", rows=rows, checkpointing=large),
            )
            for name, shape in SHAPES.items()
            for rows in (1, 4)
            # with recomputation where activations would not fit
            for large in [rows > 1 and name != "Qwen2.5-1.5B"]
        ]
    for name, shape in wanted:
        names = ["lora", "lora_trl", "gates_loragate"]
        if importlib.util.find_spec("trl") is None or shape.hidden > 2000:  # no third model fits beside the larger ones
            names.remove("lora_trl")
        try:
            rows = step_rows(task, shape, names)
            tokens = {"tokens": shape.rows * shape.sequence, "dtype": shape.dtype, "recomputed": shape.checkpointing}
            task.keep(name, {**tokens, **rows})
        except torch.OutOfMemoryError:
            task.keep(name, "left out: out of memory")
        if task.device == "cuda":
            torch.cuda.empty_cache()


def step_rows(task: Task, shape: Shape, names: list[str]) -> dict[str, Any]:
    """{contestant: peak memory, seconds, ratio to LoRA}; all are in memory together."""
    rows: dict[str, Any] = {}
    sides: dict[str, Callable[[], None]] = {}
    with on(task.device):
        for side in names:
            model, loss = contestants.CONTESTANTS[side](shape)
            run = step_of(model, loss)
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
        still = ids[0].clone()
        graph, logits = captured(lambda: eager(still))
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


def captured(run: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
    """A CUDA graph of `run`, and the tensor that its replays write."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def token(task: Task) -> None:
    """One forward pass for one new token per row: merged, adapter and gated, alternated; eager, as a CUDA graph, and compiled.

    Without the cache's attention, which costs the three the same. Compiled comes last, as each model and width compiles anew.
    """
    shape = TINY if task.rehearsal else replace(SHAPES["Qwen2.5-1.5B"], dtype="bfloat16")
    with on(task.device):
        models = {"adapter": adapter(shape).eval(), "gated": shaken(mild(adapter(shape))).eval()}
        models["merged"] = adapter(shape).merge_and_unload().eval()
    widths = (2,) if task.rehearsal else (1, 32)
    for how in ("eager", "graph", "compiled"):
        if how == "graph" and task.device != "cuda":
            continue
        for rows in widths:
            draw = torch.Generator().manual_seed(rows)
            ids = torch.randint(0, shape.vocabulary, (rows, 1), generator=draw).to(task.device)
            sides = {f"{name}, {how}": one_pass(model, ids, how) for name, model in models.items()}
            seconds = alternate(sides, 2 if task.rehearsal else 30, clock(task))
            row = task.found.get(f"batch {rows}", {"seconds": {}})
            row["seconds"] |= {side: spread(values) for side, values in seconds.items()}
            row[f"gated to adapter, {how}"] = ratios(seconds, f"gated, {how}", f"adapter, {how}")
            task.keep(f"batch {rows}", row)


def one_pass(model: Any, ids: torch.Tensor, how: str) -> Callable[[], Any]:
    """A forward pass without a gradient: eager, replayed from a CUDA graph, or compiled (on a GPU with CUDA graphs)."""
    forward = torch.compile(model, mode="reduce-overhead" if ids.is_cuda else "default") if how == "compiled" else model

    @torch.no_grad()
    def run() -> torch.Tensor:
        return forward(input_ids=ids, use_cache=False).logits

    return captured(run)[0].replay if how == "graph" else run


def serving(task: Task) -> None:
    """λ of 32 slots with a strength each, as the vLLM plugin computes it: a CUDA graph's replays against eager results.

    Slots change between replays, and values in the slots too, as they do while a server runs.
    """
    from loragate.gates.range import Range
    from loragate.gates.signed_map import SignedMap
    from loragate.serving.layers import empty_slots, slot_coefficients, slot_constants

    slots, width, tokens = 32, (64 if task.rehearsal else 8960), (16 if task.rehearsal else 256)
    draw = torch.Generator().manual_seed(5)
    weight, bias, constants = empty_slots(slots, 2, width, task.device)
    weight[:-1].copy_(torch.randn(slots, 2, width, generator=draw) * width**-0.5)
    for slot in range(slots):  # every second slot has gates, the others one λ for all tokens
        strength = slot / 8 - 1
        constants[slot] = slot_constants(SignedMap(Range(-6, 3))).to(task.device)
        if slot % 2:
            constants[slot, :, 2:] = strength  # least and most λ
    dtype = torch.float32 if task.rehearsal else torch.bfloat16
    x = torch.randn(tokens, width, generator=draw).to(task.device, dtype)
    own = torch.randint(-1, slots, (tokens,), generator=draw).to(task.device)

    def run() -> torch.Tensor:
        return slot_coefficients(x, own, weight, bias, constants)

    found = []
    replay, result = captured(run) if task.device == "cuda" else (None, None)
    for again in range(4):
        own.copy_(torch.randint(-1, slots, (tokens,), generator=draw))
        constants[1, :, 2:] = 0.25 * again
        exact = torch.stack(
            [
                torch.zeros(2, dtype=torch.float64)
                if slot < 0
                else reference_coefficients(x[row], weight[slot], bias[slot], constants[slot])
                for row, slot in enumerate(own.tolist())
            ]
        )
        eager = run()
        if replay is not None:
            replay.replay()
            require(bool(torch.equal(result, eager)), "a replay gives other coefficients than eager")
        found.append(float((eager.double().cpu() - exact).abs().max()))
    task.keep("largest error of λ against fp64", found)
    require(max(found) < 1e-4, f"λ is off by {max(found):.2g}")
    if replay is not None:
        a = torch.randn(slots, 16, width, generator=draw).to(task.device, dtype)
        sides = {"λ, eager": run, "λ, graph": replay.replay, "A of one slot": lambda: x @ a[0].t()}
        task.keep("seconds", {side: spread(v) for side, v in alternate(sides, 50, clock(task)).items()})


def reference_coefficients(x_D: Any, weight_ND: Any, bias_N: Any, constants_N4: Any) -> torch.Tensor:
    """λ of one token, [N] fp64, by the formula."""
    x_D, weight_ND, bias_N, constants_N4 = (value.double().cpu() for value in (x_D, weight_ND, bias_N, constants_N4))
    response_N = torch.tanh(weight_ND @ x_D + bias_N)
    below_N, above_N, least_N, most_N = constants_N4.unbind(-1)
    return (1 + torch.where(response_N < 0, below_N, above_N) * response_N).clamp(least_N, most_N)
