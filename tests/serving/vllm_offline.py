"""vLLM in this process, asked for greedy answers with the log-probs of every token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loragate.evaluation.agreement import ServedAnswer

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, which starts in seconds
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
PROMPTS = [[5 + (7 * row + 11 * place) % 150 for place in range(36 + row)] for row in range(4)]


def start(base: Path, **options: Any) -> Any:
    """A `vllm.LLM` of this base in float32, with room for adapters of rank 8."""
    import vllm

    return vllm.LLM(
        model=str(base), skip_tokenizer_init=True, dtype="float32", enable_lora=True, max_lora_rank=8, **options
    )


def lora(name: str, number: int, folder: Path) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, str(folder))


def greedy(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    adapters: Sequence[Any],
    max_new_tokens: int,
    prompt_logprobs: bool = True,
) -> list[list[ServedAnswer]]:
    """For each adapter (a `LoRARequest`, or None for the base) its answers to all prompts (token ids), all in one batch.

    Stop tokens are ignored. With `prompt_logprobs` vLLM computes a whole prompt anew, past its prefix cache.
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
        prompt, answer = tuple(output.prompt_token_ids), output.outputs[0]
        before = tuple(at[token].logprob for at, token in zip((output.prompt_logprobs or [])[1:], prompt[1:]))
        after = tuple(at[token].logprob for at, token in zip(answer.logprobs, answer.token_ids))
        served.append(ServedAnswer(prompt, tuple(answer.token_ids), before, after))
    return [served[first : first + len(prompts)] for first in range(0, len(served), len(prompts))]
