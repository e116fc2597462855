"""λ supplied from outside: the paper's intervention coordinates, where every gate value is a control and not a function.

`supplied_coefficients` runs an adapter, gated or not, with a tensor of λ per position that the caller gives: leaves to
differentiate by (eq:rw-causal-jacobian: the logits G_t(λ; θ0, φ*) as a function of λ), or the hard intervention in
free-running generation, `suppress_by_delta_entropy`, which switches the delta off where it changes the entropy. There three
streams run side by side, each with its own key-value cache, on the same tokens: the base, the adapter, and the suppressed stream
that is sampled from. At every new position base and adapter are asked first, ΔH = H(adapter) − H(base) (eq:rw-delta-entropy);
where it has the chosen sign, λ = 0 in all modules of the suppressed stream at this position, else λ = 1. What was decided stays:
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
from typing import Any, Literal

import torch
from peft.tuners.lora.layer import LoraVariant
from torch import Tensor

from loragate.errors import ConfigError, GateError
from loragate.gates import active_adapter, examine_adapter, require_gateable
from loragate.gates.attach import GatedLora, add_delta
from loragate.gates.control import as_base
from loragate.gates.eligibility import lora_layers
from loragate.gates.operation import scale_tokens, up_project

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
        keep full strength. An adapter whose delta is not linear in one scale, such as DoRA, is a GateError.
    """
    name = active_adapter(peft_model)
    layers = dict(lora_layers(peft_model, name))
    # the gates' variants step aside first: `examine_adapter` refuses a layer that has a variant already
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


def suppression_mask(sign: Sign, delta_entropy: Tensor) -> Tensor:
    """bool, where the delta is off: where ΔH is below 0 (the paper's "Negative") or above; shaped like ΔH."""
    return delta_entropy < 0 if sign == "negative" else delta_entropy > 0


@contextmanager
def suppress_by_delta_entropy(model: Any, sign: Sign) -> Iterator[None]:
    """Generation of the PeftModel is that of the suppressed stream inside the context: off at generated tokens and the last of
    the prompt, which predicts the first of them, where ΔH has this sign.

    For generation with a cache only (ConfigError); a forward pass of whole texts has no one moment at which to decide. Adapters
    are those of `supplied_coefficients`.
    """
    causal = model.get_base_model()
    before, original = causal.__dict__.get("forward"), causal.forward
    # of base and adapter, beside the cache that `generate` keeps for the suppressed stream
    caches: dict[str, Any] = {}
    lam_BS: Tensor | None = None

    def entropies(name: str, kwargs: dict[str, Any]) -> Tensor:
        """Full-vocabulary entropy in nats, [B, S], or [B, 1] where the model was asked for its last logits only."""
        given = {**kwargs, "past_key_values": caches[name], "labels": None}
        logits = original(**{key: value for key, value in given.items() if value is not None}).logits
        return torch.special.entr(logits.float().softmax(-1)).sum(-1)

    @functools.wraps(original.__func__ if hasattr(original, "__func__") else original)
    def forward(_self: Any, *args: Any, **kwargs: Any) -> Any:
        """One forward pass of the suppressed stream, decided by one of each of the others."""
        nonlocal lam_BS
        if args:
            kwargs = {"input_ids": args[0], **kwargs}
        cache, input_ids = kwargs.get("past_key_values"), kwargs["input_ids"]
        if cache is None or kwargs.get("use_cache") is False:
            raise ConfigError(
                "suppression by ΔH needs generation with a key-value cache: decisions are taken position by position"
            )
        begins = cache.get_seq_length() == 0
        if begins:  # a new batch: empty caches of the same kind for the two that are only asked
            caches.update({name: copy.deepcopy(cache) for name in ("base", "adapter")})
        try:
            # λ is None in these two passes: full strength
            with as_base(model):
                base = entropies("base", kwargs)
            delta = entropies("adapter", kwargs) - base
            # the prompt but its last token is read with the adapter (the paper does not say)
            width = 1 if begins else delta.shape[1]
            lam_BS = torch.ones(input_ids.shape, dtype=torch.float32, device=input_ids.device)
            lam_BS[:, -width:] = (~suppression_mask(sign, delta[:, -width:])).float().to(lam_BS.device)
            return original(**kwargs)
        finally:
            lam_BS = None

    forward.state_per_row = True  # type: ignore[attr-defined]  # the engine then copies and drops no rows
    with supplied_coefficients(model, lambda _path, _layer, _x: lam_BS):
        causal.forward = types.MethodType(forward, causal)
        try:
            yield
        finally:
            if before is None:
                del causal.forward
            else:
                causal.forward = before
