"""FLOPs of a Stage-II step at the shapes of the paper's models, counted on tensors without data, against the floor.

    python benchmarks/speed/true_shapes.py [--quick] [--sequence 512 2048 4096] [--out FILE]

One row of so many tokens, 75 % of them response, LoRA rank 16 on all linear layers, k = 100. The shapes are those of
Qwen2.5-1.5B and 7B (the Math models have the same) and Qwen3-4B, written down below. The step itself runs, on fake
tensors: every operator of forward and backward is met with the shapes it will have, in models of two and of three
layers; all layers between the first and the last cost the same, which gives the rest exactly.

The arithmetic floor is counted by running it, not by a formula: the adapted model with everything frozen, forward; the gradient
of the activations from the last hidden state back to the first place where a gate can act, the outputs of the first layer's
queries, keys and values; and one projection of the response positions through the output head. What a gate step adds: gate
logits and their gradients, and the sparse backward of the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from common import Counts, begin, count, finish, options, target
from contestants import Shape, adapter, batch, gates_loragate, lora
from fake import without_data

SHAPES = {
    "Qwen2.5-1.5B": Shape(1536, 8960, 28, 12, 2, vocabulary=151936, rows=1, sequence=2048),
    "Qwen2.5-7B": Shape(3584, 18944, 28, 28, 4, vocabulary=152064, tied=False, rows=1, sequence=2048),
    "Qwen3-4B": Shape(2560, 9728, 36, 32, 8, head_size=128, vocabulary=151936, family="qwen3", rows=1, sequence=2048),
}
TO_FLOOR = 1.02
TO_LORA = {"Qwen2.5-1.5B": 0.92, "Qwen2.5-7B": 0.96, "Qwen3-4B": 0.95}
JUDGED = 2048  # tokens of the row that the targets are read at


def floor(shape: Shape) -> Counts:
    """The counted floor of a Stage-II step; `saved` has no meaning here."""
    model, data = adapter(shape).requires_grad_(False), batch(shape)
    causal = model.get_base_model()
    first = causal.model.layers[0].self_attn
    for module in (first.q_proj, first.k_proj, first.v_proj):
        module.register_forward_hook(lambda _module, _inputs, out: out.detach().requires_grad_())

    def loss() -> torch.Tensor:
        hidden = causal.model(input_ids=data["input_ids"], use_cache=False).last_hidden_state
        causal.lm_head(hidden.detach().flatten(0, 1)[: shape.labelled])
        return hidden.sum()

    return count(model, loss)


def counts(shape: Shape, make: Callable[[Shape], Counts]) -> Counts:
    """Exact counts of a step through all layers, from models of two and of three."""
    with without_data(shape.labelled):
        two, three = (make(replace(shape, layers=layers)) for layers in (2, 3))
    more = shape.layers - 2

    def line(name: str) -> int:
        return getattr(two, name) + more * (getattr(three, name) - getattr(two, name))

    return Counts(line("flops"), line("attention"), line("saved"))


def measure(shape: Shape) -> dict[str, Any]:
    """Counts of the three, per step, and the ratios."""
    found = {
        "floor": counts(shape, floor),
        "lora": counts(shape, lambda changed: count(*lora(changed))),
        "gates_loragate": counts(shape, lambda changed: count(*gates_loragate(changed))),
    }
    ours = found["gates_loragate"]
    return {
        "flops": {name: counted.flops for name, counted in found.items()},
        "flops_attention": {name: counted.attention for name, counted in found.items()},
        "to_floor": round(ours.flops / found["floor"].flops, 4),
        "to_lora": round(ours.flops / found["lora"].flops, 4),
        "to_floor_without_attention": round(ours.weights / found["floor"].weights, 4),
        "to_lora_without_attention": round(ours.weights / found["lora"].weights, 4),
    }


def main() -> None:
    parser = options(__doc__, "true_shapes")
    parser.add_argument("--sequence", type=int, nargs="+", default=[JUDGED])
    chosen = begin(parser)
    cases, judged = [], []
    print(f"{'':<16}{'tokens':>7}{'TFLOP':>9}{'to floor':>10}{'to LoRA':>9}")
    for name, shape in list(SHAPES.items())[: 1 if chosen.quick else None]:
        for sequence in chosen.sequence:
            row = measure(replace(shape, sequence=sequence))
            cases.append({"model": name, "sequence": sequence, **row})
            step = row["flops"]["gates_loragate"] / 1e12
            print(f"{name:<16}{sequence:>7}{step:>9.2f}{row['to_floor']:>10.4f}{row['to_lora']:>9.4f}")
            if sequence == JUDGED:
                words = f"FLOPs of a Stage-II step, {name}, 1 × {sequence} tokens"
                judged.append(target(f"{words}, to the floor", row["to_floor"], at_most=TO_FLOOR))
                judged.append(target(f"{words}, to a LoRA step", row["to_lora"], at_most=TO_LORA[name]))
    finish(chosen, {"response": 0.75, "rank": 16, "k": 100, "cases": cases, "targets": judged})


if __name__ == "__main__":
    main()
