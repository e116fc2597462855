"""The strength of an adapter, request by request, in vLLM itself: needs vLLM (scripts/vllm_cpu_env.sh)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from test_vllm_gates import TOLERANCE, folders, pytestmark, reference, settings
from vllm_offline import PROMPTS, greedy, lora, start

from loragate.evaluation.agreement import ServedAnswer, compare_logprobs

__all__ = ["folders", "pytestmark", "settings"]  # fixtures, and what all tests of vLLM are marked with

SCALES = [0.0, 1.0, 0.5, -0.5, 2.0, 0.1, 1.5, -1.0, 0.25, 0.75, 1.25, 3.0, 0.6, 0.9, 1.1, -0.25]
STRENGTHS = [(name, scale) for name in ("plain", "wide") for scale in SCALES]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def tight(settings: None, folders: Path) -> Any:
    """Two slots, the prefix cache on, prompts cut into pieces, and fewer blocks than a full batch needs."""
    return start(
        folders / "base",
        max_loras=2,
        enable_prefix_caching=True,
        block_size=32,
        max_num_batched_tokens=48,
        max_num_seqs=48,
        max_model_len=128,
        num_gpu_blocks_override=40,
    )


def adapter(folders: Path, name: str, override: str = "") -> Any:
    """One number for an adapter, whatever is laid over its λ."""
    number = {"base": 0, "plain": 1, "wide": 2}[name]
    return lora(name, number, Path(f"{folders / name}{override and '@'}{override}")) if number else None


def asked(folders: Path, name: str, scale: float) -> Any:
    return adapter(folders, name, f"constant={scale!r}")


def largest(one: list[ServedAnswer], other: list[ServedAnswer]) -> float:
    """The largest difference of a log-prob between two answers to the same prompts; infinite where the tokens differ."""
    if [answer.token_ids for answer in one] != [answer.token_ids for answer in other]:
        return math.inf
    pairs = [pair for a, b in zip(one, other) for pair in zip(a.logprobs, b.logprobs)]
    return max(abs(a - b) for a, b in pairs)


def test_32_strengths_in_one_batch_equal_each_alone(folders: Path, tight: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With prefix cache, chunked prefill and preemption, in the slots of the two adapters."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted: list[str] = []
    preempt = Scheduler._preempt_request

    def count(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", count)
    requests = [asked(folders, *strength) for strength in STRENGTHS]
    # two blocks for the prompt, and a third one in the middle of the answer
    together = greedy(tight, PROMPTS[:2], requests, 40, prompt_logprobs=False)
    assert preempted, "the batch was meant to be too large for the blocks"
    assert tight.llm_engine.list_loras() == {1, 2}
    tight.reset_prefix_cache()
    alone = [greedy(tight, PROMPTS[:2], [one], 40, prompt_logprobs=False)[0] for one in requests]
    for strength, one, other in zip(STRENGTHS, together, alone):
        assert largest(one, other) <= TOLERANCE, strength
    assert len({str(one) for one in alone[: len(SCALES)]}) == len(SCALES)
    for name, scale in (("plain", 0.5), ("wide", 2.0), ("wide", -0.5)):
        found = compare_logprobs(reference(f"{name}@constant={scale}"), together[STRENGTHS.index((name, scale))])
        assert found.generated <= TOLERANCE, (name, scale)


def test_zero_is_the_base_and_one_the_adapter_to_the_bit(folders: Path, tight: Any) -> None:
    def answers(name: str, *scale: float) -> list[ServedAnswer]:
        return greedy(tight, PROMPTS, [asked(folders, name, *scale) if scale else adapter(folders, name)], NEW_TOKENS)[
            0
        ]

    base, plain = answers("base"), answers("plain")
    assert base != plain
    for zero in ("plain", "wide"):
        assert answers(zero, 0.0) == base, zero
    assert answers("plain", 1.0) == plain
    # gates at 1: the adapter of their folder, here in another slot, and so in a product of another size
    own = greedy(tight, PROMPTS, [lora("own", 3, folders / "wide" / "adapter")], NEW_TOKENS)[0]
    assert largest(answers("wide", 1.0), own) <= 1e-5


def test_modules_without_a_gate_are_reached_as_in_transformers(folders: Path, tight: Any) -> None:
    """An override lies over λ where there is one: a module of a gated adapter that has no gate keeps its full strength."""
    request = lora("some", 4, Path(f"{folders / 'some'}@constant=0.5"))
    (answers,) = greedy(tight, PROMPTS, [request], NEW_TOKENS)
    assert compare_logprobs(reference("some@constant=0.5"), answers).generated <= TOLERANCE


@pytest.mark.parametrize("name", ["plain", "wide"])
def test_a_strength_for_a_part_of_the_model_has_a_slot_of_its_own(folders: Path, tight: Any, name: str) -> None:
    part = lora(f"{name}-part", 7 + (name == "wide"), Path(f"{folders / name}@mlp=0.5"))
    answers, whole = greedy(tight, PROMPTS, [part, adapter(folders, name)], NEW_TOKENS)
    assert compare_logprobs(reference(f"{name}@mlp=0.5"), answers).generated <= TOLERANCE
    assert compare_logprobs(reference(name), whole).generated <= TOLERANCE
    # under the number of the whole adapter as well, whose slot is then filled anew
    for override in ("mlp=0.5", ""):
        request, expected = adapter(folders, name, override), f"{name}{override and '@'}{override}"
        (answers,) = greedy(tight, PROMPTS, [request], NEW_TOKENS)
        assert compare_logprobs(reference(expected), answers).generated <= TOLERANCE


@pytest.mark.parametrize("key", ["folder and override", "name alone"])
def test_strengths_share_no_blocks_of_the_prefix_cache(
    folders: Path, tight: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And were the override not in the key, as in the second case, the same check would find it."""
    from vllm.v1.core import kv_cache_utils

    if key == "name alone":
        monkeypatch.setattr(
            kv_cache_utils,
            "_gen_lora_extra_hash_keys",
            lambda request: [("lora", request.lora_request.lora_name, "")] if request.lora_request else [],
        )
    wrong = []
    for scale in (0.25, 2.0):
        tight.reset_prefix_cache()
        (fresh,) = greedy(tight, PROMPTS, [asked(folders, "plain", scale)], NEW_TOKENS, prompt_logprobs=False)
        tight.reset_prefix_cache()
        greedy(tight, PROMPTS, [asked(folders, "plain", 1.0 - scale)], NEW_TOKENS, prompt_logprobs=False)
        (after,) = greedy(tight, PROMPTS, [asked(folders, "plain", scale)], NEW_TOKENS, prompt_logprobs=False)
        wrong.append(largest(fresh, after) > TOLERANCE)
    assert wrong == [key == "name alone"] * 2
    tight.reset_prefix_cache()


def test_fields_of_sampling_parameters(folders: Path, tight: Any) -> None:
    """`extra_args` are what stands behind the folder; each request of a batch has its own."""
    import vllm

    def answers(name: str, *fields: dict[str, Any]) -> list[tuple[int, ...]]:
        sampling = [
            vllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, extra_args=one)
            for one in fields
        ]
        prompts = [{"prompt_token_ids": PROMPTS[0]}] * len(fields)
        found = tight.generate(prompts, sampling, lora_request=adapter(folders, name), use_tqdm=False)
        return [tuple(one.outputs[0].token_ids) for one in found]

    def named(name: str, override: str) -> tuple[int, ...]:
        return greedy(tight, PROMPTS[:1], [adapter(folders, name, override)], 8, False)[0][0].token_ids

    scales = answers("wide", {"lora_scale": 2}, {"lora_scale": -0.5}, {"lora_gates": "unit"}, {})
    assert scales == [named("wide", text) for text in ("constant=2.0", "constant=-0.5", "unit", "")]
    assert len(set(scales)) == 4
    for name, fields, message in (
        ("wide", {"lora_scale": "0.5"}, "finite number, found '0.5'"),
        ("wide", {"lora_scale": math.nan}, "finite number, found nan"),
        ("wide", {"lora_gates": "unti"}, "did you mean 'unit'"),
        ("plain", {"lora_gates": "unit"}, "takes @constant=C alone"),
        ("base", {"lora_scale": 0.5}, "no adapter is asked for"),
        ("wide", {"lora_scael": 0.5}, "did you mean 'lora_scale'"),
    ):
        with pytest.raises(ValueError, match=message):
            answers(name, fields)
