"""Attention of short rows on a CPU, forward and backward: plain (`eager`) against PyTorch's fused one (`sdpa`).

    python benchmarks/speed/attention.py [--quick] [--repeats 5] [--out FILE]

Both are the functions that transformers calls, with the masks that it makes, at the shape of SmolLM2-135M: 9 heads over 3 of
keys and values, 64 wide, 8 rows. Training picks between them (`loragate.training.model_state.short_row_attention`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from common import alternate, begin, finish, options, ratios, spread, stopwatch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

ROWS, HEADS, SHARED, WIDTH = 8, 9, 3, 64
LENGTHS = (64, 128, 192, 256, 512)


def sides(length: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """One forward and backward pass of each on the same numbers, with a causal mask."""
    torch.manual_seed(0)
    read = [torch.randn(ROWS, n, length, WIDTH, dtype=dtype, requires_grad=True) for n in (HEADS, SHARED, SHARED)]
    slope = torch.randn(ROWS, length, HEADS, WIDTH, dtype=dtype)
    seen = torch.ones(length, length).tril().bool().expand(ROWS, 1, length, length)
    added = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    module = SimpleNamespace(num_key_value_groups=HEADS // SHARED, training=True, is_causal=True)

    def once(attend: Any, mask: torch.Tensor) -> None:
        out, _ = attend(module, *read, mask, scaling=WIDTH**-0.5, dropout=0.0)
        torch.autograd.grad(out, read, slope)

    return {"sdpa": partial(once, sdpa_attention_forward, seen), "eager": partial(once, eager_attention_forward, added)}


def main() -> None:
    chosen = begin(options(__doc__, "attention", repeats=9))
    cases = []
    for dtype in (torch.bfloat16, torch.float32):
        for length in LENGTHS[:2] if chosen.quick else LENGTHS:
            taken = alternate(sides(length, dtype), chosen.repeats, stopwatch(chosen.threads))
            name, ratio = str(dtype).removeprefix("torch."), ratios(taken, "eager", "sdpa")
            seconds = {side: spread(values) for side, values in taken.items()}
            cases.append({"dtype": name, "tokens": length, "seconds": seconds, "eager_to_sdpa": ratio})
            print(f"{name:<10}{length:>5} tokens: eager ÷ sdpa {ratio['median']:.2f}")
    finish(chosen, {"cases": cases})


if __name__ == "__main__":
    main()
