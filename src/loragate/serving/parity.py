"""Does the server compute what transformers computes? Log-probs of every prompt and generated token, side by side.

The served side decodes greedily, all adapters in one batch; the reference model is then run over the very same tokens,
so that one early difference does not hide the rest.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from loragate.display import Display, console
from loragate.errors import ConfigError, LoragateError
from loragate.evaluation.agreement import Served, compare
from loragate.models import ModelRef, base_config, open_weights, torch_device
from loragate.serving.settings import ServerSettings
from loragate.serving.vllm_server import prepare_vllm, served_adapters, usual_share

TOLERANCE = 1e-4
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, SEED = 4, 40, 32, 0


def open_llm(base: str, adapters: Mapping[str, str], *, max_lora_rank: int, **settings: Any) -> tuple[Any, list[Any]]:
    """An offline `vllm.LLM` with room for all adapters, {name: folder}, at once, and a `LoRARequest` for each.

    `max_lora_rank` is one that vLLM takes; `settings` are further arguments of `vllm.LLM`.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import vllm
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        settings.setdefault("block_size", 32)  # its own 128 would leave short prompts out of the prefix cache
    llm = vllm.LLM(
        model=base,
        skip_tokenizer_init=True,
        enable_lora=True,
        max_loras=max(1, len(adapters)),
        max_lora_rank=max_lora_rank,
        enable_prefix_caching=True,
        **settings,
    )
    return llm, [LoRARequest(name, number, folder) for number, (name, folder) in enumerate(adapters.items(), 1)]


def greedy(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    adapters: Sequence[Any],
    max_new_tokens: int,
    prompt_logprobs: bool = True,
) -> list[list[Served]]:
    """Every prompt (token ids) under every adapter (a `LoRARequest`, or None for the base), all in one batch, greedily.

    Stop tokens are ignored. With `prompt_logprobs` vLLM computes a whole prompt anew, past its prefix cache.

    Returns:
        One list per adapter, with one `Served` per prompt.
    """
    import vllm

    sampling = vllm.SamplingParams(
        temperature=0,
        max_tokens=max_new_tokens,
        logprobs=0,
        prompt_logprobs=0 if prompt_logprobs else None,
        ignore_eos=True,
        detokenize=False,
    )
    requests = [{"prompt_token_ids": list(ids)} for _ in adapters for ids in prompts]
    own_adapters = [adapter for adapter in adapters for _ in prompts]
    served = []
    for output in llm.generate(requests, sampling, lora_request=own_adapters, use_tqdm=False):
        prompt, completion = tuple(output.prompt_token_ids), output.outputs[0]
        served.append(
            Served(
                prompt,
                tuple(completion.token_ids),
                tuple(at[token].logprob for at, token in zip((output.prompt_logprobs or [])[1:], prompt[1:])),
                tuple(at[token].logprob for at, token in zip(completion.logprobs, completion.token_ids)),
            )
        )
    return [served[start : start + len(prompts)] for start in range(0, len(served), len(prompts))]


def verify(settings: ServerSettings) -> int:
    """Decode greedily in vLLM, all served models in one batch, and compare every log-prob; 0 if all agree, 1 if not.

    In float32 a log-prob may differ by 1e-4 and no greedy choice may, unless the reference's two best are within 1e-3. In
    16 bits the figures are printed and not judged: both programs round, in different places.
    """
    source, adapters = served_adapters(settings)
    rank, display = prepare_vllm(source, adapters, settings.trust_remote_code), Display()
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "float32" if torch_device(settings) == "cpu" else "bfloat16"
    settings = replace(settings, dtype=dtype)
    prompts = random_prompts(source.base, settings.trust_remote_code)
    try:
        with display.job("starting vLLM"):
            llm, requests = open_llm(
                source.base.name,
                {name: adapter.text for name, adapter in adapters.items()},
                max_lora_rank=rank,
                dtype=dtype,
                max_model_len=settings.max_model_len or None,
                tensor_parallel_size=settings.tensor_parallel,
                gpu_memory_utilization=settings.vllm_memory or usual_share(),
                trust_remote_code=settings.trust_remote_code,
                revision=source.base.revision or None,
            )
    except (RuntimeError, ValueError) as error:
        raise LoragateError(
            f"vLLM could not start with {source.base.name} ({error}). What it printed above says why"
        ) from error
    references = {"base": replace(source, kind="base")}
    references |= {name: replace(adapter, base=source.base) for name, adapter in adapters.items()}
    try:
        with display.job("decoding in vLLM"):
            answers = greedy(llm, prompts, [None, *requests], NEW_TOKENS)
            # the same again, its prompts from the prefix cache
            cached_answers = greedy(llm, prompts, [None, *requests], NEW_TOKENS, prompt_logprobs=False)
    finally:
        llm.llm_engine.engine_core.shutdown()
        # its memory is needed for the reference
        del llm
        gc.collect()
    out, agrees = console(), True
    out.print(
        f"{PROMPTS} prompts of {PROMPT_TOKENS} random tokens, {NEW_TOKENS} greedy tokens each, all {len(references)} models in "
        f"one batch, {dtype}; largest difference of a log-prob (nats)",
        markup=False,
    )
    width = max(map(len, references))
    out.print(f"{'':{width}}  prompt   generated  from cache  other greedy choices", markup=False)
    for (name, reference), computed, cached in zip(references.items(), answers, cached_answers):
        with display.job(f"reference: {name}"):
            model = open_weights(reference, settings)
            fresh, hit = compare(model, computed), compare(model, cached)
            del model
        mismatches, ties = fresh.mismatches + hit.mismatches, fresh.close_calls + hit.close_calls
        agrees &= max(fresh.prompt, fresh.generated, hit.generated) <= TOLERANCE and mismatches == ties
        out.print(
            f"{name:{width}}  {fresh.prompt:.1e}  {fresh.generated:.1e}    {hit.generated:.1e}     {mismatches} of "
            f"{fresh.tokens + hit.tokens}" + (f" ({ties} of them ties)" if ties else ""),
            markup=False,
        )
    if dtype != "float32":
        out.print(
            f"{dtype} rounds in both programs, so nothing is judged; --dtype float32 does, on a CPU", markup=False
        )
        return 0
    out.print(f"{'agrees' if agrees else 'DIFFERS'}: the bound is {TOLERANCE:g}", markup=False)
    return 0 if agrees else 1


def random_prompts(base: ModelRef, trust: bool = False) -> list[list[int]]:
    """Token ids that any model has, the same on every machine."""
    config = base_config(base, trust).get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or 1 << 20
    if positions < PROMPT_TOKENS + NEW_TOKENS:
        raise ConfigError(f"{base.name} has {positions} positions; --verify needs {PROMPT_TOKENS + NEW_TOKENS}")
    draw = random.Random(SEED)
    return [[draw.randrange(config.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
