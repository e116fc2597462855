"""λ supplied from outside: the paper's intervention coordinates, where every gate value is a control and not a function.

`supplied_coefficients` runs an adapter, gated or not, with a tensor of λ per position that the caller gives: leaves to
differentiate by (eq:rw-causal-jacobian: the logits G_t(λ; θ0, φ*) as a function of λ), or the hard intervention in
free-running generation, `suppressing`, which switches the delta off where it changes the entropy. There three streams run
side by side, each with its own key-value cache, on the same tokens: the base, the adapter, and the suppressed stream that is
sampled from. At every new position base and adapter are asked first, ΔH = H(adapter) − H(base) (eq:rw-delta-entropy); where
it has the chosen sign, λ = 0 in all modules of the suppressed stream at this position, else λ = 1. What was decided stays:
later positions read the keys and values that this decision left in the cache. The streams hang on the model's own forward,
so that `transformers.generate`, and with it our engine, batches, stop rules and seeds, work as for every other row of an
evaluation.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from peft.tuners.lora.layer import LoraVariant
from torch import Tensor

from loragate.errors import ConfigError, GateError
from loragate.gates import active_adapter, examine_adapter, require_gateable
from loragate.gates.eligibility import lora_layers
from loragate.gates.operation import scale_tokens, up_project
from loragate.gates.variant import GatedLora, add_delta
from loragate.validate import Amount, check

Coefficients = Callable[[str, Any, Tensor], Tensor | None]
"""(module path, LoRA layer, module input [..., D]) to λ [...], or None for full strength."""


class SuppliedLora(LoraVariant):
    """A LoRA layer whose delta is scaled by λ from a callable."""

    def __init__(self, path: str, coefficients: Coefficients) -> None:
        self.path, self.coefficients = path, coefficients

    def forward(self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        """`result` plus λ times the adapter's delta; LoRA dropout is left out, as in a gated layer."""
        reduced = torch.nn.functional.linear(x, module.lora_A[active_adapter].weight)
        lam = self.coefficients(self.path, module, x)
        if lam is not None:
            if lam.shape != x.shape[:-1]:
                raise GateError(
                    f"{self.path} was given λ of shape {tuple(lam.shape)} for {tuple(x.shape[:-1])} tokens; modules that see "
                    "routed tokens (experts) have no λ per position"
                )
            reduced = scale_tokens(lam, reduced)
        delta = up_project(reduced, module.lora_B[active_adapter].weight, module.scaling[active_adapter])
        return add_delta(result, delta, module.base_layer)


@contextmanager
def supplied_coefficients(peft_model: Any, coefficients: Coefficients) -> Iterator[list[str]]:
    """Run the active adapter with λ from `coefficients` inside the context; gates that are attached are not consulted.

    Yields:
        The paths of the modules that are scaled: those that could be gated. Other deltas (embeddings, the output head)
        keep full strength.

    Raises:
        GateError: for an adapter whose delta is not linear in one scale, such as DoRA.
    """
    name = active_adapter(peft_model)
    layers = dict(lora_layers(peft_model, name))
    gated = {path: layer for path, layer in layers.items() if isinstance(layer.lora_variant.get(name), GatedLora)}
    held = {path: layer.lora_variant.pop(name) for path, layer in gated.items()}
    paths: list[str] = []
    try:
        paths = [verdict.path for verdict in require_gateable(examine_adapter(peft_model, name))]
        for path in paths:
            layers[path].lora_variant[name] = SuppliedLora(path, coefficients)
        yield paths
    finally:
        for path in paths:
            layers[path].lora_variant.pop(name)
        for path, variant in held.items():
            layers[path].lora_variant[name] = variant


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


@contextmanager
def suppressing(model: Any, rule: Suppression) -> Iterator[list[Tensor]]:
    """Generation of the PeftModel is that of the suppressed stream inside the context.

    For generation with a cache only; a forward pass of whole texts has no one moment at which to decide.

    Yields:
        ΔH of every step of the last call of `generate`, [B] each: first at the prompt's last token, then at each generated
        one. A row that has ended goes on being fed padding, which decides nothing.

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
            yield streams.deltas
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
        self.deltas: list[Tensor] = []

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
            self.deltas.clear()
        try:
            self.coefficients_BS = None
            with self.model.disable_adapter():
                base = self._entropies("base", kwargs)
            delta = self._entropies("adapter", kwargs) - base
            self.deltas.append(delta[:, -1].detach().cpu())
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
