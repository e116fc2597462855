"""Samples from vLLM, for a base model, a plain LoRA adapter or, with the serving plugin, a gated adapter.

`VllmEngine` gives each (question, sample) a request of its own with a seed of its own, so that what is drawn does not
depend on the order of the requests or on what was resumed, as far as vLLM's own numbers do not. It accepts the same
prompts, stops at the same tokens and decodes with the same tokenizer as `TransformersEngine`, but its random streams
are vLLM's: equal seeds give equal samples within an engine, not across the two. It reports no entropy. Texts that end an
answer are looked for when it is done, as vLLM, given token ids, decodes none: such an answer costs what an unending one does.

`with_adapter` answers with another adapter of the same base, or with none, from the same loaded weights: variants of an evaluation
that share a base load it once. vLLM is imported here and nowhere else in generation. The facts relied upon are those of vLLM 0.32.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import os
from collections.abc import Collection, Generator, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from loragate.data import find_endings
from loragate.errors import ConfigError, LoragateError
from loragate.generation.engine import (
    Continuation,
    Engine,
    OnProgress,
    Prompts,
    Sample,
    finish_answers,
    split_by_question,
    stop_tokens,
    tokenize_prompts,
)
from loragate.generation.sampling import SamplingConfig, request_seed
from loragate.models import (
    LORA_RANKS,
    ModelRef,
    generation_config,
    is_gated,
    parse_slot_override,
    plain_adapter,
    read_adapter_config,
)
from loragate.records import package_versions

NOT_INSTALLED = (
    'vLLM is not installed; it needs an environment of its own: pip install ".[vllm]" there, in a checkout and without '
    "-c constraints.txt, as vLLM wants an older transformers. Without it use transformers: "
    "loragate generate, --engine transformers of an evaluation, or loragate.load_gated in Python"
)
LOWEST_TEMPERATURE = 0.01
"""vLLM raises every positive temperature below this to it."""
USUAL_SHARE = 0.9
"""Share of an accelerator's memory that vLLM may fill."""


class VllmEngine(Engine):
    """Sample with vLLM from a base model, with or without a plain or gated LoRA adapter.

    Args:
        base: folder or hub id of the base model.
        adapter: folder of a PEFT LoRA adapter for this base, or of a gated adapter.
        revision: commit of the base on the hub; None takes its newest.
        override: what the serving plugin lays over λ, such as "unit" or "constant=0.5"; a plain adapter takes a constant.
        tokenizer: tokenizer of the prompts; None loads the base's.
        dtype: "auto", "float32", "bfloat16" or "float16".
        max_model_len: positions to plan for, prompt and answer together; None takes those of the model.
        tensor_parallel: number of devices that share one copy of the model.
        gpu_memory_utilization: share of each device's memory that vLLM may fill; 0 takes `default_memory_utilization`.
        batch_size: prompts whose samples are drawn and handed to `on_samples` together.
        stop_token_ids: tokens that end an answer beside those of `loragate.data.find_endings`.
        trust_remote_code: run the base's own code from the hub.

    Raises `ConfigError` when vLLM is not installed, for an adapter that cannot be read, and for a gated folder where
    the serving plugin is absent or does not support this vLLM.
    """

    def __init__(
        self,
        base: str,
        adapter: str | None = None,
        *,
        revision: str | None = None,
        override: str | None = None,
        tokenizer: Any = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        tensor_parallel: int = 1,
        gpu_memory_utilization: float = 0.0,
        batch_size: int = 256,
        stop_token_ids: Collection[int] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if is_gated(base):
            raise ConfigError(f"{base} is a gated adapter, not a base model; give it as the adapter of its base.")
        if override is not None and adapter is None:
            raise ConfigError(f"override {override!r} has no effect on a base model; give the adapter that it is for.")
        self.rank = 0 if adapter is None else lora_rank(plain_adapter(adapter))
        vllm = _import_vllm()
        self._request_class = vllm.lora.request.LoRARequest
        self._numbers: dict[str, int] = {}  # folder to its number, one for all overrides: they share a slot
        self._lora_request = self._request(adapter, override)
        self.batch_size = batch_size
        trusted = {"trust_remote_code": trust_remote_code}
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(base, revision=revision, **trusted)
        self.tokenizer = tokenizer
        settings = generation_config(ModelRef(base, revision or ""), trust_remote_code)
        self.endings = find_endings(self.tokenizer, settings, stop_token_ids or ())
        lora: dict[str, Any] = {}
        if adapter is not None:
            # vLLM 0.32 on a CPU gives rows without an adapter the last slot's: one slot has to stay empty.
            slots = 2 if vllm.platforms.current_platform.is_cpu() else 1
            lora = {"enable_lora": True, "max_lora_rank": self.rank, "max_loras": slots}
        self._sampling_params = vllm.SamplingParams
        share = gpu_memory_utilization or default_memory_utilization()
        try:
            self._llm = vllm.LLM(
                model=base,
                revision=revision,
                skip_tokenizer_init=True,  # token ids go in and come out; the tokenizer above does the rest
                dtype=dtype,
                max_model_len=max_model_len,
                tensor_parallel_size=tensor_parallel,
                gpu_memory_utilization=share,
                seed=0,
                **trusted,
                **lora,
            )
        except (RuntimeError, ValueError) as error:
            raise LoragateError(
                f"vLLM could not start with {base} ({error}). What it printed above says why. {_memory_advice(share)}"
            ) from error

    def draw(
        self, prompts: Prompts, config: SamplingConfig, rows: list[tuple[int, int]]
    ) -> Generator[list[Sample], None, None]:
        """See `Engine.draw`; their entropy is None. Raises `ConfigError` for a positive temperature below 0.01."""
        if 0 < config.temperature < LOWEST_TEMPERATURE:
            raise ConfigError(
                f"temperature is {config.temperature}, but vLLM draws nothing between 0 and {LOWEST_TEMPERATURE}; give 0 "
                f"for greedy decoding or at least {LOWEST_TEMPERATURE}."
            )
        positions = self._llm.llm_engine.model_config.max_model_len
        prompt_ids, limits = tokenize_prompts(self.tokenizer, prompts, config.max_new_tokens, positions)
        stop_ids = sorted(stop_tokens(self.tokenizer, config.stop, self.endings))
        for chunk in split_by_question(rows, self.batch_size):
            # a chunk ends with a question: vLLM's prefix cache then reads each prompt once for its samples
            outputs = self._llm.generate(
                [{"prompt_token_ids": prompt_ids[question]} for question, _ in chunk],
                # one request per sample: vLLM gives the n samples of a joint request seeds that cannot be resumed one by one
                [
                    self._sampling_params(
                        temperature=config.temperature,
                        top_p=config.top_p,
                        max_tokens=limits[question],
                        seed=request_seed(config.seed, question, sample) if config.temperature > 0 else None,
                        stop_token_ids=stop_ids,
                        ignore_eos=True,  # the stop tokens above are the whole list
                        detokenize=False,
                    )
                    for question, sample in chunk
                ],
                use_tqdm=False,
                lora_request=self._lora_request,
            )
            completions = [output.outputs[0] for output in outputs]
            for (question, sample), completion in zip(chunk, completions):
                if completion.finish_reason not in ("stop", "length"):
                    raise LoragateError(
                        f"vLLM ended sample {sample} of question {question} with {completion.finish_reason!r} instead of an "
                        "answer; its log says why. Samples that were written before stay valid: run again to draw the rest."
                    )
            token_ids = [completion.token_ids for completion in completions]
            stopped = [completion.finish_reason == "stop" for completion in completions]
            answers = finish_answers(self.tokenizer, token_ids, stopped, config.stop, self.endings)
            yield [
                Sample(question, sample, text, ids, reason, None)
                for (question, sample), (ids, text, reason) in zip(chunk, answers)
            ]

    def log_likelihoods(
        self, pairs: Sequence[Continuation], on_progress: OnProgress | None = None
    ) -> list[tuple[float, bool]]:
        """See `Engine.log_likelihoods`.

        Every token of a continuation is a request of its own that may draw this token alone and reports its log-probability
        before anything is forbidden. vLLM's log-probabilities of prompts would need one request, but with LoRA on a CPU vLLM
        0.32 dies of them where it wraps the model's head (Llama, Mistral, Qwen3), and this engine serves plain adapters
        without the plugin, which mends that.
        """
        found: list[tuple[float, bool]] = []
        for start in range(0, len(pairs), self.batch_size):
            batch = pairs[start : start + self.batch_size]
            outputs = self._llm.generate(
                [
                    {"prompt_token_ids": [*before, *after[:index]]}
                    for before, after in batch
                    for index in range(len(after))
                ],
                [
                    self._sampling_params(
                        temperature=0,
                        max_tokens=1,
                        allowed_token_ids=[token],
                        logprobs=0,
                        ignore_eos=True,
                        detokenize=False,
                    )
                    for _, after in batch
                    for token in after
                ],
                use_tqdm=False,
                lora_request=self._lora_request,
            )
            # with logprobs=0 a step reports the drawn token alone, {its id: log-probability and rank before anything is forbidden}
            steps = (next(iter(output.outputs[0].logprobs[0].values())) for output in outputs)
            for _, after in batch:
                own = [next(steps) for _ in after]
                found.append((sum(step.logprob for step in own), all(step.rank == 1 for step in own)))
            if on_progress is not None:
                on_progress(len(found), len(pairs))
        return found

    def with_adapter(self, adapter: str | None, override: str | None = None) -> VllmEngine:
        """This engine with another plain or gated adapter of the same base, or with none; nothing is loaded again.

        Raises `ConfigError` as the constructor, and for an adapter of a higher rank than this engine has room for.
        """
        if adapter is not None and (rank := lora_rank(plain_adapter(adapter))) > self.rank:
            raise ConfigError(f"{adapter} has rank {rank}, and this engine was made for {self.rank}; make one for it.")
        other = copy.copy(self)  # a shallow copy: the same vLLM, the same numbers of adapters
        other._lora_request = self._request(adapter, override)
        return other

    def _request(self, adapter: str | None, override: str | None) -> Any:
        if adapter is None:
            return None
        if override is not None or is_gated(adapter):
            require_gate_plugin(adapter)
        folder = str(adapter) if override is None else f"{adapter}@{override}"
        # all strengths of an adapter have one slot; one for a part of the model has its own
        number = self._numbers.setdefault(parse_slot_override(folder)[0], len(self._numbers) + 1)
        return self._request_class(f"adapter-{number}", number, folder)

    def close(self) -> None:
        """End vLLM's processes and free the devices, which dropping the engine does only some time later."""
        shutdown = getattr(self._llm.llm_engine.engine_core, "shutdown", None)
        if shutdown is not None:
            shutdown()


def _memory_advice(share: float) -> str:
    """What helps where vLLM's `share` of the memory is too much for a device, or too little for the model and its cache."""
    return (
        f"It was given {share:g} of the memory: less where others hold some (--vllm-memory {share / 2:.2g}), more where weights "
        "or cache find no room; --tensor-parallel shares them among several devices, and --engine transformers does without vLLM. "
        "In Python these are gpu_memory_utilization, tensor_parallel and max_model_len, which plans for fewer positions"
    )


def require_gate_plugin(folder: str | Path) -> None:
    """Raise `ConfigError` unless vLLM has loaded loragate's serving plugin, and the plugin supports this vLLM.

    The plugin leaves its verdict on vLLM's own class, so that generation need not import it.
    """
    _import_vllm()
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    verdict = getattr(WorkerLoRAManager, "loragate_gates", None)
    if verdict is None:
        raise ConfigError(
            f"{folder} needs λ, and vLLM has not loaded loragate's plugin: install loragate into vLLM's "
            'environment (pip install ".[vllm]" in a checkout) and let VLLM_PLUGINS name loragate or be unset. Or use '
            "transformers: loragate generate, or --engine transformers of an evaluation."
        )
    if verdict:
        raise ConfigError(f"{folder} needs λ. {verdict}.")


def lora_rank(adapter: str | Path) -> int:
    """Return the smallest `max_lora_rank` of vLLM that holds every rank of the adapter.

    Raises `ArtifactError` when the folder has no readable `adapter_config.json`, `ConfigError` when it is not LoRA or its rank
    is too high.
    """
    path, record = Path(adapter) / "adapter_config.json", read_adapter_config(Path(adapter))
    kind = record["peft_type"]
    try:
        # a text among the ranks is a TypeError
        needed = max(int(record["r"]), *(record.get("rank_pattern") or {}).values(), 1)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is not the configuration of a LoRA adapter ({error!r}).") from None
    if record.get("use_dora"):
        raise ConfigError(f"{path} describes a DoRA adapter, which vLLM cannot serve; merge it into its base.")
    if kind != "LORA":
        raise ConfigError(f"{path} describes an adapter of type {kind!r}; vLLM serves LORA adapters.")
    for rank in LORA_RANKS:
        if needed <= rank:
            return rank
    raise ConfigError(f"{path}: rank {needed} is above {LORA_RANKS[-1]}, the highest that vLLM serves.")


def require_vllm() -> None:
    """Raise `ConfigError` when vLLM is not installed; it is not imported for that."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(NOT_INSTALLED)


def _import_vllm() -> Any:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its start alone is some hundred lines
    try:
        import vllm.lora.request
        import vllm.platforms
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "vllm":
            raise
        raise ConfigError(NOT_INSTALLED) from None
    return vllm


def on_cpu() -> bool:
    """Whether vLLM is a build for the CPU, by the mark in its version that it goes by itself; it is not imported."""
    return "cpu" in package_versions(("vllm",))["vllm"]


def default_memory_utilization() -> float:
    """The share of memory that vLLM is given unless told: `USUAL_SHARE`, or on a CPU half of what is free.

    On a CPU it is a share of the machine's whole memory, and vLLM does not start where less than that is free.
    """
    if not on_cpu():
        return USUAL_SHARE
    try:
        from vllm.utils.cpu_resource_utils import get_memory_node_info

        node = get_memory_node_info()
        return max(0.01, math.floor(50 * node.available_memory / node.total_memory) / 100)
    except (ImportError, OSError, AttributeError):
        return USUAL_SHARE
