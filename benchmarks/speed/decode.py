"""Sampling with transformers: what reading each prompt once saves, and what gates cost a decoding step.

    python benchmarks/speed/decode.py [--quick] [--repeats 5] [--threads 1] [--out FILE]

Sampling: the engine's own loop against the same engine left to `transformers.generate` (`reuse_prompts=False`), which
reads a prompt for every sample and feeds ended rows to the end. Two cases: the tiny world's base, 30 questions × 16
samples of at most 72 tokens; and a random model of hidden 512 × 8 layers, 512 prompt tokens × 16 samples × 64 new tokens,
none of which ends early. Tokens read (rows × positions of every forward pass) and FLOPs are counted and repeat exactly.

Gates: greedy `generate` of the same LoRA adapter (rank 16, all linear layers, unmerged) with and without gates, at batch
1 and 16, on the tiny base, on hidden 512 × 8 layers, and on four layers as wide as those of Qwen2.5-1.5B; the ratio is
tokens per second, gated ÷ plain. Gates add a few small operators per module: the smaller the model, the more they weigh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import MORE, alternate, begin, finish, options, ratios, spread, stopwatch, target
from contestants import Shape, adapter
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedTokenizerFast

import loragate as lg
from loragate.data import render_prompt
from loragate.generation import Sample, SamplingConfig, TransformersEngine
from loragate.world.base import load_base
from loragate.world.problems import draw_problems

LOOPS = {"own_loop": True, "generate": False}
BATCHES = (1, 16)
DECODERS = {
    "hidden 512 × 8": Shape(),
    "hidden 1536 × 4": Shape(hidden=1536, intermediate=8960, layers=4, heads=12, kv_heads=2),
}
NEW_TOKENS = {"tiny": 64, "hidden 512 × 8": 32, "hidden 1536 × 4": 12}


def counted(model: Any, run: Callable[[], Any]) -> dict[str, int]:
    """FLOPs and tokens read in a run: exact."""
    read = []
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    hook = causal.register_forward_pre_hook(
        lambda _module, _args, given: read.append(given["input_ids"].shape), with_kwargs=True
    )
    try:
        with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=MORE) as counter:
            run()
    finally:
        hook.remove()
    prompts = sum(shape.numel() for shape in read if shape[1] > 1)
    return {
        "flops": counter.get_total_flops(),
        "prompt_tokens_read": prompts,
        "answer_tokens_read": sum(shape.numel() for shape in read) - prompts,
    }


def words(count: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose words are numbers; its end token is never drawn by a model that knows fewer tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    core = Tokenizer(models.WordLevel({**{str(at): at for at in range(count)}, "<end>": count}, unk_token="<end>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")


def sampling_cases(quick: bool) -> dict[str, tuple[Any, Any, list[str], SamplingConfig, int]]:
    """{name: (model, tokenizer, prompts, sampling settings, batch size)}."""
    base, tokenizer = load_base()
    items = draw_problems("test", 4 if quick else 30, (4, 4), seed=0)
    prompts = [render_prompt([{"role": "user", "content": item.prompt}], tokenizer) for item in items]
    shape = Shape(rows=1)
    random = adapter(shape).eval()
    long = [" ".join(str((7 * at + 13) % shape.vocabulary) for at in range(64 if quick else 512))]
    return {
        "tiny world": (base, tokenizer, prompts, SamplingConfig(max_new_tokens=72, samples=16, seed=2), 480),
        "hidden 512 × 8": (
            random,
            words(shape.vocabulary),
            long,
            SamplingConfig(max_new_tokens=4 if quick else 64, samples=16),
            16,
        ),
    }


def measure_sampling(model: Any, tokenizer: Any, prompts: Any, config: Any, batch: int, rounds: int, clock: Any) -> Any:
    """Counts and times of both loops, and whether they drew the same tokens."""
    drawn: dict[str, list[Sample]] = {}

    def run(name: str) -> Callable[[], None]:
        engine = TransformersEngine(model, tokenizer, batch_size=batch, reuse_prompts=LOOPS[name])

        def draw() -> None:
            drawn[name] = engine.generate(prompts, config)

        return draw

    sides = {name: run(name) for name in LOOPS}
    rows: dict[str, Any] = {name: counted(model, side) for name, side in sides.items()}
    seconds = alternate(sides, rounds, clock)
    own, generate = rows["own_loop"], rows["generate"]
    for name, row in rows.items():
        row["seconds"] = spread(seconds[name])
    same = [a.token_ids == b.token_ids for a, b in zip(drawn["own_loop"], drawn["generate"], strict=True)]
    return {
        "prompts": len(prompts),
        "samples": config.samples,
        "batch": batch,
        "rows": rows,
        "own_to_generate": {
            **{key: round(own[key] / generate[key], 4) for key in own if key != "seconds"},
            "time": ratios(seconds, "own_loop", "generate"),
        },
        "samples_drawn": len(same),
        "samples_equal": sum(same),
    }


def decoders(kind: str) -> dict[str, Any]:
    """The same adapter twice: plain, and with gates whose weights are not zero."""
    found = {}
    for name in ("plain", "gated"):
        if kind == "tiny":
            torch.manual_seed(0)
            lora = LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
            found[name] = get_peft_model(load_base()[0], lora).eval()
        else:
            found[name] = adapter(DECODERS[kind]).eval()
    lg.attach_gates(found["gated"], lg.GateConfig(-3, 1))
    with torch.no_grad():
        for parameter in lg.gate_parameters(found["gated"]).values():
            parameter.normal_(0, 0.02)
    return found


def measure_gates(kind: str, batch: int, tokens: int, rounds: int, clock: Any) -> dict[str, Any]:
    """Tokens per second of greedy decoding from eight-token prompts."""
    models = decoders(kind)
    ids = torch.randint(3, 40, (batch, 8), generator=torch.Generator().manual_seed(0))

    def run(name: str) -> Callable[[], None]:
        def draw() -> None:
            made = models[name].generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert made.shape == (batch, 8 + tokens)

        return draw

    sides = {name: run(name) for name in models}
    flops = {name: counted(models[name], side)["flops"] for name, side in sides.items()}
    seconds = alternate(sides, rounds, clock)
    return {
        "model": kind,
        "batch": batch,
        "new_tokens": tokens,
        "flops_gated_to_plain": round(flops["gated"] / flops["plain"], 5),
        "tokens_per_second": {
            name: spread([batch * tokens / value for value in values]) for name, values in seconds.items()
        },
        "gated_to_plain": ratios(seconds, "plain", "gated"),
    }


def main() -> None:
    parser = options(__doc__, "decode")
    chosen = begin(parser)
    clock = stopwatch(chosen.threads)
    sampling = {}
    for name, case in sampling_cases(chosen.quick).items():
        sampling[name] = found = measure_sampling(*case, min(chosen.repeats, 3), clock)
        to = found["own_to_generate"]
        print(
            f"{name}: own loop ÷ generate: prompt tokens {to['prompt_tokens_read']:.3f}, answer tokens "
            f"{to['answer_tokens_read']:.3f}, FLOPs {to['flops']:.3f}, time {to['time']['median']:.3f}; "
            f"{found['samples_equal']} of {found['samples_drawn']} samples equal",
            flush=True,
        )
    gates = []
    for kind, tokens in NEW_TOKENS.items():
        for batch in BATCHES:
            row = measure_gates(kind, batch, 8 if chosen.quick else tokens, chosen.repeats, clock)
            gates.append(row)
            print(
                f"{kind}, batch {batch}: gated ÷ plain {row['gated_to_plain']['median']:.3f} tokens/s "
                f"(quartiles {row['gated_to_plain']['quartiles']}), FLOPs {row['flops_gated_to_plain']:.4f}",
                flush=True,
            )
    targets = [
        target(
            f"gated ÷ plain LoRA decode, {row['model']}, batch {row['batch']}",
            row["gated_to_plain"]["median"],
            at_least=0.95,
        )
        for row in gates
    ]
    finish(chosen, {"sampling": sampling, "gates": gates, "targets": targets})


if __name__ == "__main__":
    main()
