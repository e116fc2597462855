"""The paper's hard intervention in free-running generation: the delta is switched off where it changes the entropy.

Three streams run side by side, each with its own key-value cache, on the same tokens: the base, the adapter, and the
suppressed stream that is sampled from. At every new position base and adapter are asked first,
ΔH = H(adapter) − H(base) (eq:rw-delta-entropy); where it has the chosen sign, λ = 0 in all modules of the suppressed
stream at this position, else λ = 1. What was decided stays: later positions read the keys and values that this decision
left in the cache.

The streams hang on the model's own forward, so that `transformers.generate`, and with it our engine, batches, stop rules
and seeds, work as for every other row of an evaluation.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from loragate.analysis.external import supplied_coefficients
from loragate.errors import ConfigError
from loragate.validate import Amount, check

Sign = Literal["negative", "positive"]
SIGNS: tuple[Sign, ...] = ("negative", "positive")


@dataclass(frozen=True)
class Suppression:
    """Where the delta is switched off.

    Attributes:
        sign: "negative" suppresses where ΔH < −threshold (the paper's "Negative"), "positive" where ΔH > threshold.
        threshold: nats; 0 is the paper's.
        prompt: also decide at the positions before the last token of the prompt, which predict no token of the answer.
            The paper does not say; off here, so that the whole prompt but its last token is read with the adapter.
    """

    sign: Sign
    threshold: Amount = 0.0
    prompt: bool = False

    def __post_init__(self) -> None:
        check(self)

    def chosen(self, delta_entropy: Tensor) -> Tensor:
        """bool, where the delta is to be switched off; shaped like ΔH."""
        if self.sign == "negative":
            return delta_entropy < -self.threshold
        return delta_entropy > self.threshold


@dataclass
class Decisions:
    """What was decided in the last call of `generate`.

    Attributes:
        deltas: ΔH of every step, [B] each: first at the prompt's last token, then at each generated one. A row that has
            ended goes on being fed padding, which decides nothing.
    """

    deltas: list[Tensor] = field(default_factory=list)


@contextmanager
def suppressing(model: Any, rule: Suppression) -> Iterator[Decisions]:
    """Generation of the PeftModel is that of the suppressed stream inside the context.

    For generation with a cache only; a forward pass of whole texts has no one moment at which to decide.

    Raises:
        GateError: for an adapter whose delta is not linear in one scale, such as DoRA.
        ConfigError: for a forward pass without a key-value cache.
    """
    causal = model.get_base_model()
    before = causal.__dict__.get("forward")
    original = causal.forward
    streams = _Streams(model, original, rule)

    @functools.wraps(original.__func__ if hasattr(original, "__func__") else original)
    def forward(_self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            kwargs = {"input_ids": args[0], **kwargs}
        return streams.step(kwargs)

    forward.state_per_row = True  # type: ignore[attr-defined]  # the engine then copies and drops no rows

    with supplied_coefficients(model, lambda _path, _layer, _x: streams.coefficients_BS):
        causal.forward = types.MethodType(forward, causal)
        try:
            yield streams.decisions
        finally:
            if before is None:
                del causal.forward
            else:
                causal.forward = before


class _Streams:
    """Caches of base and adapter beside the one that `generate` keeps for the suppressed stream."""

    def __init__(self, model: Any, forward: Any, rule: Suppression) -> None:
        self.model, self.forward, self.rule = model, forward, rule
        self.coefficients_BS: Tensor | None = None
        self.caches: dict[str, Any] = {}
        self.decisions = Decisions()

    def step(self, kwargs: dict[str, Any]) -> Any:
        """One forward pass of the suppressed stream, decided by one of each of the others."""
        cache, input_ids = kwargs.get("past_key_values"), kwargs["input_ids"]
        if cache is None or kwargs.get("use_cache") is False:
            raise ConfigError(
                "suppression by ΔH needs generation with a key-value cache: decisions are taken position by position"
            )
        begins = cache.get_seq_length() == 0
        if begins:
            self.caches = {name: copy.deepcopy(cache) for name in ("base", "adapter")}
            self.decisions.deltas = []
        try:
            self.coefficients_BS = None
            with self.model.disable_adapter():
                base = self._entropies("base", kwargs)
            delta = self._entropies("adapter", kwargs) - base
            self.decisions.deltas.append(delta[:, -1].detach().cpu())
            # where only the last position was asked, those before it keep the delta
            width = delta.shape[1] if self.rule.prompt or not begins else 1
            lam_BS = torch.ones(input_ids.shape, dtype=torch.float32, device=input_ids.device)
            lam_BS[:, -width:] = (~self.rule.chosen(delta[:, -width:])).float().to(lam_BS.device)
            self.coefficients_BS = lam_BS
            return self.forward(**kwargs)
        finally:
            self.coefficients_BS = None

    def _entropies(self, name: str, kwargs: dict[str, Any]) -> Tensor:
        """Full-vocabulary entropy in nats, [B, S], or [B, 1] where the model was asked for its last logits only."""
        given = {**kwargs, "past_key_values": self.caches[name], "labels": None}
        if self.rule.prompt:
            given.pop("logits_to_keep", None)
        logits = self.forward(**{key: value for key, value in given.items() if value is not None}).logits
        return torch.special.entr(logits.float().softmax(-1)).sum(-1)
