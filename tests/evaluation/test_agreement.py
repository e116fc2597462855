"""Log-probs of another engine against transformers: what `loragate verify` and every evaluation on vLLM rest upon."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loragate.evaluation.agreement import LOGPROB_TOLERANCES, ServedAnswer, check_logprobs, compare_logprobs
from loragate.evaluation.results import VariantAgreement
from loragate.evaluation.variants import ModelVariant
from loragate.models import Loaded, Loading, ModelRef, ModelSource
from tiny import tiny_adapter, tiny_base, tiny_tokenizer

PROMPT = (5, 9, 20, 31)


@pytest.fixture(scope="module")
def answer() -> ServedAnswer:
    """What a server without a fault gives."""
    model, ids = tiny_base(), list(PROMPT)
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    told = tuple(float(logprobs[at, token]) for at, token in enumerate(ids[1:]))
    return ServedAnswer(PROMPT, tuple(ids[4:]), told[:3], told[3:])


def test_a_server_without_a_fault_agrees(answer: ServedAnswer) -> None:
    found = compare_logprobs(tiny_base(), [answer])
    assert max(found.prompt, found.generated) < 1e-5
    assert found.tokens == 6


def test_a_shift_is_measured(answer: ServedAnswer) -> None:
    prompt = (answer.prompt_logprobs[0] + 0.25, *answer.prompt_logprobs[1:])
    assert compare_logprobs(tiny_base(), [replace(answer, prompt_logprobs=prompt)]).prompt == pytest.approx(
        0.25, abs=1e-5
    )


def test_what_is_no_number_does_not_pass(answer: ServedAnswer) -> None:
    """Served, or in the reference: an adapter that diverged gives NaN in both, and both then choose the same token."""
    logprobs = (math.nan, *answer.logprobs[1:])
    assert compare_logprobs(tiny_base(), [replace(answer, logprobs=logprobs)]).generated == math.inf
    model = tiny_base()
    model.model.norm.weight.data.fill_(math.nan)
    found = compare_logprobs(model, [answer])
    assert found.prompt == found.generated == math.inf


def test_rounding_passes_and_another_model_within_the_limit_does_not(answer: ServedAnswer) -> None:
    """In 16 bits, where the limit is wide: the one is a little off, the other is nearer to another model."""
    adapter, tokenizer = tiny_adapter(), tiny_tokenizer()
    loaded = Loaded(
        ModelSource(ModelRef("x"), "adapter", Path("x"), ModelRef("base")), Loading(), tokenizer, None, model=adapter
    )
    base = check_logprobs(loaded, {ModelVariant("base"): [answer]}, "bfloat16")["base"]
    assert base.agrees
    rounded = replace(answer, logprobs=tuple(one + 0.02 for one in answer.logprobs))
    assert check_logprobs(loaded, {ModelVariant("base"): [rounded]}, "bfloat16")["base"].agrees
    assert not check_logprobs(loaded, {ModelVariant("base"): [rounded]}, "float32")["base"].agrees
    other = check_logprobs(loaded, {ModelVariant("adapter"): [answer]}, "bfloat16")["adapter"]
    assert (other.agrees, other.nearest) == (False, "base")
    nothing = replace(answer, logprobs=(math.nan, *answer.logprobs[1:]))
    found = check_logprobs(loaded, {ModelVariant("base"): [nothing]}, "bfloat16")["base"]
    assert (found.mean, found.largest, found.agrees) == (None, None, False)


def test_the_limit_follows_a_model_that_amplifies_rounding(answer: ServedAnswer) -> None:
    """In 16 bits, and where the difference is above the usual limit: how far transformers is from itself in float32."""

    def verified(model: Any, served: ServedAnswer, dtype: str) -> VariantAgreement:
        loaded = Loaded(
            ModelSource(ModelRef("x"), "base", Path("x"), ModelRef("x")), Loading(), None, None, model=model
        )
        return check_logprobs(loaded, {ModelVariant("base"): [served]}, dtype)["base"]

    off = replace(answer, logprobs=tuple(one + 5 for one in answer.logprobs))
    mild = verified(tiny_base().to(torch.bfloat16), off, "auto")
    assert (mild.limit, mild.agrees) == (LOGPROB_TOLERANCES["16 bits"], False)
    rough = tiny_base().to(torch.bfloat16)
    rough.lm_head.weight.data *= 3000  # logits that bf16 cannot tell apart
    assert verified(rough, off, "bfloat16").limit > LOGPROB_TOLERANCES["16 bits"]
    assert verified(tiny_base(), off, "float32").limit == LOGPROB_TOLERANCES["float32"]
