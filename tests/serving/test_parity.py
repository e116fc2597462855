"""The comparison behind `--verify`: it sees a shifted log-prob, another choice, and what is no number."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from loragate.serving.parity import Served, compare
from tiny import tiny_base

PROMPT = (5, 9, 20, 31)


@pytest.fixture(scope="module")
def answer() -> Served:
    """What a server without a fault gives."""
    model, ids = tiny_base(), list(PROMPT)
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    told = tuple(float(logprobs[at, token]) for at, token in enumerate(ids[1:]))
    return Served(PROMPT, tuple(ids[4:]), told[:3], told[3:])


def test_a_server_without_a_fault_agrees(answer: Served) -> None:
    found = compare(tiny_base(), [answer])
    assert max(found.prompt, found.generated) < 1e-5
    assert (found.tokens, found.mismatches) == (6, 0)


def test_a_shift_is_measured(answer: Served) -> None:
    prompt = (answer.prompt_logprobs[0] + 0.25, *answer.prompt_logprobs[1:])
    assert compare(tiny_base(), [replace(answer, prompt_logprobs=prompt)]).prompt == pytest.approx(0.25, abs=1e-5)


def test_what_is_no_number_does_not_pass(answer: Served) -> None:
    """Served, or in the reference: an adapter that diverged gives NaN in both, and both then choose the same token."""
    logprobs = (math.nan, *answer.logprobs[1:])
    assert compare(tiny_base(), [replace(answer, logprobs=logprobs)]).generated == math.inf
    model = tiny_base()
    model.model.norm.weight.data.fill_(math.nan)
    found = compare(model, [answer])
    assert found.prompt == found.generated == math.inf
