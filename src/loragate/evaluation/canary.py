"""Before an evaluation: proof that the adapter and its gates act, on the evaluation's own prompts.

A comparison of three models that are secretly one is the cheapest way to be wrong. The figures go into the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from loragate.errors import GateError
from loragate.evaluation.variants import Kind
from loragate.gates import measure_parity
from loragate.gates.eligibility import changed_base_of

PROMPTS, TOKENS = 4, 256


@torch.no_grad()
def canary(model: Any, tokenizer: Any, prompts: Sequence[str], kind: Kind) -> dict[str, float]:
    """Largest absolute differences in logits on the first prompts (at most 4, their last 256 tokens).

    Returns:
        {} for a base model; "adapter_from_base" for an adapter; for gates also "gates_from_adapter", "zero_from_base"
        (λ = 0 against the model without the gated deltas) and "one_from_adapter" (λ = 1 against the plain adapter).

    Raises:
        GateError: if the model without the adapter is not its base, if the adapter changes no logit, if the gates change none,
            or if λ = 0 is not the model without the gated deltas or λ = 1 not the adapter, up to rounding.
    """
    if kind == "base":
        return {}
    for name in model.peft_config:
        if reason := changed_base_of(model, name):
            raise GateError(f"canary: the row of the base would not be the base. {reason}")
    # padded on the right, where causal attention does not see the padding
    rows = [ids[-TOKENS:] for ids in tokenizer(list(prompts[:PROMPTS]), add_special_tokens=False)["input_ids"]]
    width, device = max(map(len, rows)), next(model.parameters()).device
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    if kind == "adapter":
        adapter = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()].float()
        with model.disable_adapter():
            base = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()].float()
        figures = {"adapter_from_base": float((adapter - base).abs().max())}
    else:
        parity = measure_parity(model, ids, mask)
        figures = {
            "adapter_from_base": parity.delta,
            "gates_from_adapter": parity.initial,
            "zero_from_base": parity.at_zero,
            "one_from_adapter": parity.at_one,
        }
        try:
            parity.require_acting(parity.rounding(model.dtype, 1e-5))
        except GateError as error:
            raise GateError(f"canary: {error}; nothing was scored") from None
        if figures["gates_from_adapter"] == 0.0:
            raise GateError(
                "canary: the gates change no logit on the first prompts, so the gated model would be scored as the "
                "adapter; check that the folder holds trained gates"
            )
    if figures["adapter_from_base"] == 0.0:
        raise GateError(
            "canary: the adapter changes no logit on the first prompts, so it would be scored as the base; check that it "
            "was trained and that it belongs to this base"
        )
    return figures


def describe(figures: Mapping[str, float]) -> str:
    """One line on the figures of `canary`."""
    if not figures:
        return "canary: no adapter in memory to test"
    text = f"canary: the adapter moves logits by {figures['adapter_from_base']:.2g}"
    if "gates_from_adapter" in figures:
        text += (
            f", the gates by {figures['gates_from_adapter']:.2g} more; λ = 0 takes every gated delta away, up to "
            f"{figures['zero_from_base']:.1g}, and λ = 1 is the adapter up to {figures['one_from_adapter']:.1g}"
        )
    return text
