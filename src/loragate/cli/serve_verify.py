"""`loragate serve --verify`: does vLLM compute what transformers computes, for the base, the adapter and the gates?"""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loragate.cli.display import Display, console
from loragate.errors import ConfigError, LoragateError

if TYPE_CHECKING:
    from loragate.models import ModelRef, Place

TOLERANCE = 1e-4
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, SEED = 4, 40, 32, 0


def verify(options: Any, place: Place, adapters: dict[str, Place]) -> int:
    """Decode greedily in vLLM, all rows in one batch, and compare every log-prob; 0 if all agree, 1 if not.

    In float32 a log-prob may differ by 1e-4 and no greedy choice may, unless the reference's two best are within 1e-3. In
    16 bits the figures are printed and not judged: both programs round, in different places.
    """
    from loragate.cli.preflight import quiet_logging
    from loragate.cli.serve import prepare_vllm
    from loragate.models import Loading, open_weights
    from loragate.serving.parity import compare, greedy, open_llm
    from loragate.serving.vllm_server import usual_share

    quiet_logging()
    how = Loading.of(options)
    base, revision, device = place.base.name, place.base.revision or None, how.torch_device
    dtype = options.dtype if options.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    rank, display = prepare_vllm(options, place, adapters), Display()
    how = replace(how, dtype=dtype)
    prompts = random_prompts(place.base, options.trust_remote_code)
    try:
        with display.job("starting vLLM"):
            llm, requests = open_llm(
                base,
                {name: adapter.text for name, adapter in adapters.items()},
                max_lora_rank=rank,
                dtype=dtype,
                max_model_len=options.max_model_len or None,
                tensor_parallel_size=options.tensor_parallel,
                gpu_memory_utilization=options.vllm_memory or usual_share(),
                trust_remote_code=options.trust_remote_code,
                revision=revision,
            )
    except (RuntimeError, ValueError) as error:
        raise LoragateError(f"vLLM could not start with {base} ({error}). What it printed above says why") from error
    names, base_alone = ["base", *adapters], replace(place, kind="base")
    try:
        with display.job("decoding in vLLM"):
            owners = [None, *requests]
            cold = greedy(llm, prompts, owners, NEW_TOKENS)
            # the same again, its prompts from the prefix cache
            warm = greedy(llm, prompts, owners, NEW_TOKENS, prompt_logprobs=False)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    out, good = console(), True
    out.print(
        f"{PROMPTS} prompts of {PROMPT_TOKENS} random tokens, {NEW_TOKENS} greedy tokens each, all {len(names)} rows in one "
        f"batch, {dtype}; largest difference of a log-prob (nats)",
        markup=False,
    )
    width = max(len(name) for name in names)
    out.print(f"{'':{width}}  prompt   generated  from cache  other greedy choices", markup=False)
    for name, first, again in zip(names, cold, warm):
        row = replace(adapters[name], base=place.base) if name in adapters else base_alone
        with display.job(f"reference: {name}"):
            model = open_weights(row, how)
            one, two = compare(model, first), compare(model, again)
            del model
        other, close = one.mismatches + two.mismatches, one.close_calls + two.close_calls
        good &= max(one.prompt, one.generated, two.generated) <= TOLERANCE and other == close
        out.print(
            f"{name:{width}}  {one.prompt:.1e}  {one.generated:.1e}    {two.generated:.1e}     {other} of "
            f"{one.tokens + two.tokens}" + (f" ({close} of them ties)" if close else ""),
            markup=False,
        )
    if dtype != "float32":
        out.print(
            f"{dtype} rounds in both programs, so nothing is judged; --dtype float32 does, on a CPU", markup=False
        )
        return 0
    out.print(f"{'agrees' if good else 'DIFFERS'}: the bound is {TOLERANCE:g}", markup=False)
    return 0 if good else 1


def random_prompts(base: ModelRef, trust: bool = False) -> list[list[int]]:
    """Token ids that any model has, the same on every machine."""
    from loragate.models import base_config

    config = base_config(base, trust).get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or 1 << 20
    if positions < PROMPT_TOKENS + NEW_TOKENS:
        raise ConfigError(f"{base.name} has {positions} positions; --verify needs {PROMPT_TOKENS + NEW_TOKENS}")
    draw = random.Random(SEED)
    return [[draw.randrange(config.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
