"""Is the gated model the adapter it came from? Measured on real token batches before and after training.

Three figures: the step-zero difference to the plain adapter run by PEFT's own code, whether λ ≡ 1 gives the adapter bit
for bit, and whether λ ≡ 0 gives the model without the gated deltas bit for bit. The last two are the canary that the
gates act at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import LoraVariant
from torch import nn

from loragate.errors import GateError
from loragate.gates.control import gate_override, gates_disabled, record_gates, variants_replaced
from loragate.gates.eligibility import active_adapter
from loragate.modes import evaluation_mode


@dataclass(frozen=True)
class Parity:
    """Largest absolute differences in logits over the measured batch.

    "Without" is the model without the gated deltas, which is the base where every module is gated.
    """

    initial: float  # gated model as it stands against the plain adapter
    at_one: float  # λ ≡ 1 against the plain adapter (0.0 in fp32 eager mode)
    at_zero: float  # λ ≡ 0 against the model without (0.0 in fp32 eager mode)
    delta: float  # plain adapter against the model without: the size of what is being gated
    logit_scale: float  # largest absolute logit of the plain adapter
    tokens: int  # number of positions measured
    apart: float  # root mean square of λ − 1 over tokens and modules, of the gates as they stand

    def rounding(self, dtype: torch.dtype, share: float = 1e-6) -> float:
        """How far logits may be apart by rounding; `share` of their size in fp32, 2⁻⁶ of it in half precision."""
        return (2.0**-6 if dtype in (torch.bfloat16, torch.float16) else share) * max(self.logit_scale, 1.0)

    def require_acting(self, rounding: float) -> None:
        """Refuse gates under which λ ≡ 1 is not the adapter, or λ ≡ 0 not the model without the gated deltas.

        Raises:
            GateError: with the measured figures.
        """
        # so that NaN is refused, too
        if not (self.at_one <= rounding and self.at_zero <= rounding):
            raise GateError(
                f"the gates do not act as they must: λ = 1 differs from the adapter by {self.at_one:.2g} and λ = 0 from the model "
                f"without the gated deltas by {self.at_zero:.2g} in logits (rounding explains {rounding:.2g}). Another library "
                "may run LoRA layers through its own kernels; load the model without them"
            )


@torch.no_grad()
def measure_parity(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    adapter_name: str | None = None,
) -> Parity:
    """Compare gated, plain-adapter and base logits on one batch, [batch, sequence] token ids; each module's mode is restored.

    Raises:
        GateError: if the adapter's delta is exactly zero on this batch (an untrained adapter leaves nothing to gate).
    """
    name = active_adapter(model, adapter_name)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    kept = mask.bool()

    def logits() -> torch.Tensor:
        # [B, T, V] to [kept, V]: what padding computes may differ and nobody reads it
        return model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits[kept].float()

    with evaluation_mode(model):
        with record_gates(model, name) as recording:
            recording.token_mask = kept
            gated = logits()
        with gates_disabled(model, name):
            adapter = logits()
        with gate_override(model, constant=1.0, adapter_name=name):
            at_one = logits()
        with gate_override(model, constant=0.0, adapter_name=name):
            at_zero = logits()
        # ungated deltas and other adapters stay, as they do at λ ≡ 0
        with variants_replaced(model, name, _NoDelta()):
            base = logits()
    lam = {"mean": 1.0, "std": 0.0} | recording.total()  # nothing is recorded of experts alone
    parity = Parity(
        initial=_gap(gated, adapter),
        at_one=_gap(at_one, adapter),
        at_zero=_gap(at_zero, base),
        delta=_gap(adapter, base),
        logit_scale=float(adapter.abs().max()),
        tokens=int(kept.sum()),
        apart=math.hypot(lam["mean"] - 1.0, lam["std"]),  # E(λ−1)² = (E λ − 1)² + Var λ
    )
    if parity.delta == 0.0:
        raise GateError(
            f"adapter {name!r} changes no logit on the measured batch: it is not active (set_adapter), its B factors are "
            "still zero (an untrained adapter), or it sits on modules that are not used; there is nothing to gate"
        )
    return parity


def _gap(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().max())


class _NoDelta(LoraVariant):
    """Stands in for a gated layer's variant: the module without this adapter's delta."""

    @staticmethod
    def forward(module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return result
