"""`loragate serve --verify`: does vLLM compute what transformers computes, for the base, the adapter and the gates?"""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

from loragate.cli.display import Display, console
from loragate.cli.places import is_gated
from loragate.errors import ConfigError, LoragateError

TOLERANCE = 1e-4
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, SEED = 4, 40, 32, 0


def verify(options: Any, base: str, adapters: dict[str, str]) -> int:
    """Decode greedily in vLLM, all rows in one batch, and compare every log-prob; 0 if all agree, 1 if not.

    In float32 a log-prob may differ by 1e-4 and no greedy choice may, unless the reference's two best are within 1e-3. In
    16 bits the figures are printed and not judged: both programs round, in different places.
    """
    from loragate.cli.models import dtype_argument, pick_device, quiet_logging
    from loragate.cli.serve import prepare_vllm
    from loragate.cli.serve_folders import base_revision
    from loragate.serving.parity import compare, greedy, open_llm
    from loragate.serving.vllm_server import usual_share

    quiet_logging()
    device = pick_device(options.device)
    dtype = options.dtype if options.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    rank, display = prepare_vllm(options, base, adapters), Display()
    revision = base_revision(options) or None
    prompts = random_prompts(base, options.trust_remote_code, revision)
    try:
        with display.job("starting vLLM"):
            llm, requests = open_llm(
                base,
                adapters,
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
    names = ["base", *adapters]
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
        place = f"{base}@{revision}" if revision else base
        with display.job(f"reference: {name}"):
            model = _reference(options, place, adapters.get(name), dtype_argument(dtype, device), device)
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


def random_prompts(base: str, trust: bool = False, revision: str | None = None) -> list[list[int]]:
    """Token ids that any model has, the same on every machine."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(base, revision=revision, trust_remote_code=trust).get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or 1 << 20
    if positions < PROMPT_TOKENS + NEW_TOKENS:
        raise ConfigError(f"{base} has {positions} positions; --verify needs {PROMPT_TOKENS + NEW_TOKENS}")
    draw = random.Random(SEED)
    return [[draw.randrange(config.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


def _reference(options: Any, base: str, place: str | None, dtype: Any, device: str) -> Any:
    from loragate.cli.models import load_adapter, load_base
    from loragate.gates import load_gated
    from loragate.gates.override_names import split_folder

    folder, override = split_folder(place) if place is not None else (None, None)
    if folder is not None and is_gated(Path(folder)):
        model = load_gated(folder, base=base, dtype=dtype, trust_remote_code=options.trust_remote_code).to(device)
    else:
        model = load_base(base, dtype=dtype, device=device, trust=options.trust_remote_code)
        model = model if folder is None else load_adapter(model, folder)
    return model if override is None else _overridden(model, override)


def _overridden(model: Any, override: Any) -> Any:
    """The model with an override laid over λ for good; a plain adapter gets gates to lay it over."""
    from loragate.gates import GateConfig, attach_gates
    from loragate.gates.attach import gate_modules

    if not any(hasattr(layer, "lora_gate") for layer in model.modules()):
        attach_gates(model, GateConfig(-1.0, 2.0))
    for gate in gate_modules(model).values():
        gate.override = override
    return model
