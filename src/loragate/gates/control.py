"""Looking at λ while a model runs, and laying something over it: context managers, after which all acts and trains as before.

`gate_override` makes the paper's inference interventions (max(λ,0), min(λ,1), clip) and the constant-λ control, which
`constant_gate` lays over a plain adapter too; `record_gates` collects λ statistics, `trace_gates` every single λ;
`gates_disabled` runs the plain adapter through PEFT's own code, and `as_base` the base itself.

One definition of the regions of λ serves the log lines of a training, its guard and the analysis of generated answers: λ < 0
reverses the delta, 0 ≤ λ ≤ 1 suppresses or keeps it, λ > 1 extrapolates it, and near an end of the range tanh has all but no
slope left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from loragate.errors import GateError
from loragate.gates.attach import GatedLora, gate_modules, is_gated
from loragate.gates.eligibility import (
    active_adapter,
    adapter_configs,
    base_module_name,
    changed_base_of,
    examine_adapter,
    lora_layers,
    require_gateable,
)
from loragate.gates.gate import SignedGate
from loragate.gates.override import Override, parse_override
from loragate.gates.range import Range
from loragate.gates.strength import describe_unreached, overrides_by_module, scale_adapter

SUM_NAMES = ("count", "below", "above", "at_lower", "at_upper", "sum", "squares")
SATURATION_MARGIN = 1e-3  # λ this near to an end, as a share of the way there from 1, is at it


@dataclass(frozen=True)
class Shares:
    """λ over some coefficients; shares of 1."""

    count: int  # number of coefficients (one per module and token)
    mean: float
    std: float
    below_zero: float
    zero_to_one: float  # both ends among them
    above_one: float
    at_lower: float  # within a thousandth of the way from 1 to the end
    at_upper: float  # 0 where U = 1

    @classmethod
    def from_sums(cls, sums: Sequence[float]) -> Shares:
        """From the sums of `SUM_NAMES`, of at least one coefficient."""
        count, below, above, lower, upper, total, squares = map(float, sums)
        mean = total / count
        return cls(
            count=int(count),
            mean=mean,
            std=max(squares / count - mean * mean, 0.0) ** 0.5,  # rounding may bring the difference below 0
            below_zero=below / count,
            zero_to_one=1.0 - (below + above) / count,
            above_one=above / count,
            at_lower=lower / count,
            at_upper=upper / count,
        )


def regions(lam: Tensor, bounds: Range) -> list[Tensor]:
    """What each λ adds to the sums of `SUM_NAMES`, in their order: tensors of the shape of `lam`, fp64.

    λ is at a bound when it has gone at least 1 − `SATURATION_MARGIN` of the way there from 1; to an upper bound of 1 there is no
    way.
    """
    at_lower = lam <= bounds.lower + SATURATION_MARGIN * (1.0 - bounds.lower)
    at_upper = (lam >= bounds.upper - SATURATION_MARGIN * (bounds.upper - 1.0)) & (bounds.upper > 1.0)
    doubles = lam.double()
    shares = (torch.ones_like(lam, dtype=torch.bool), lam < 0, lam > 1, at_lower, at_upper)
    return [*(share.double() for share in shares), doubles, doubles * doubles]  # seven, as `SUM_NAMES` says


class _OtherPassError(GateError):
    """A token mask of another shape than the forward pass."""


class Recorder:
    """Sums over the λ of one module: counts per region, moments and extremes; no per-token tensor is kept."""

    def __init__(self, bounds: Range) -> None:
        self.bounds = bounds
        self.owner: Recording | None = None
        self.sums: Tensor | None = None

    def update(self, lam_T: Tensor) -> None:
        """Add the λ of one forward pass, [...]; positions outside the owner's token mask are left out.

        A module whose tokens are laid out in another way, as an expert's routed tokens [tokens] are, records nothing under a mask
        unless their number is that of the mask. A GateError for a mask that is not bool, or of another shape than the pass.
        """
        values = lam_T.reshape(-1)
        mask = None if self.owner is None else self.owner.token_mask
        if mask is not None:
            if mask.dtype != torch.bool:  # whole numbers would choose tokens by their index
                raise GateError(f"token_mask must be a bool tensor (attention_mask.bool(), say), found {mask.dtype}")
            if lam_T.dim() == 2 and lam_T.shape != mask.shape:
                raise _OtherPassError(
                    f"token_mask has shape {list(mask.shape)}, but the forward pass has {list(lam_T.shape)} tokens; set a mask "
                    "of the batch's own shape before each forward pass, or None to count every token"
                )
            if mask.numel() != values.numel():
                return  # an expert's routed tokens, of which nothing says where they stand
            mask = mask.reshape(-1)
            values = values[mask.to(values.device)]
        if values.device.type == "mps":
            values = values.cpu()  # Apple's GPUs have no float64
        # [7], left on its device: a copy to the host at every layer would stall a GPU
        added = torch.stack([part.sum() for part in regions(values, self.bounds)])
        self.sums = added if self.sums is None else self.sums + added


class Trace:
    """Every λ of one module, one tensor per forward pass."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def update(self, lam_T: Tensor) -> None:
        """Keep the λ of one forward pass, [...]."""
        self.values.append(lam_T.detach().float().cpu())


@dataclass(frozen=True)
class Chain:
    """What took note of λ before, and what was opened inside it: both do."""

    outer: Recorder | Trace | Chain
    inner: Recorder | Trace

    def update(self, lam_T: Tensor) -> None:
        """Hand on the λ of one forward pass, [...]; a token mask outside that is of other passes counts none of this one."""
        with suppress(_OtherPassError):
            self.outer.update(lam_T)
        self.inner.update(lam_T)


class Recording:
    """What `record_gates` yields: λ statistics of all forward passes made inside the context so far.

    `statistics()` is {module path: summary}, without the modules that recorded nothing; `total()` is one summary of all of them,
    empty when nothing was recorded. A summary holds

    - "tokens": number of tokens counted; where it is 0 nothing else stands there. In `total()` these are the tokens of the
      forward passes, however many modules are gated, and "modules" is the number of modules that recorded any;
    - "mean", "std": of λ over the tokens; in `total()` over the tokens of all modules;
    - "below_zero", "zero_to_one", "above_one": shares of the tokens with λ < 0, 0 ≤ λ ≤ 1 and λ > 1, which sum to 1; in `total()`
      their averages over the modules, weighed by the tokens each has seen;
    - "saturated": the same share of λ that have gone at least 99.9 % of the way from 1 to a bound, where
      the gate has all but no slope left; there is no way to go to an upper bound of 1, which is not counted.

    `token_mask` says which tokens the next forward passes count: bool [batch, sequence] in the shape of the pass, True for the
    tokens to count; None counts all. λ at a position acts on the prediction of the token after it: where a response is chosen
    is the mask of its tokens, moved one to the left. It stays until it is set again. Another shape or dtype is refused in the
    forward pass. A module that sees routed tokens (an expert) records nothing under a mask.
    """

    __slots__ = ("recorders", "token_mask")  # a misspelt token_mask is an error

    def __init__(self, recorders: dict[str, Recorder]) -> None:
        self.token_mask: Tensor | None = None
        self.recorders = recorders
        for recorder in recorders.values():
            recorder.owner = self

    def statistics(self) -> dict[str, dict[str, float]]:
        """{module path: {tokens, mean, std, below_zero, zero_to_one, above_one, saturated}}; the three shares sum to 1."""
        return {path: _summary(recorder.sums) for path, recorder in self.recorders.items() if recorder.sums is not None}

    def total(self) -> dict[str, float]:
        """The same summary of all modules, with their number as "modules"; empty when nothing was recorded."""
        recorded = [recorder.sums.cpu() for recorder in self.recorders.values() if recorder.sums is not None]
        if not recorded:
            return {}
        sums_MS = torch.stack(recorded)
        summary = _summary(sums_MS.sum(0))
        counts_M = sums_MS[:, 0]  # of tokens, in each module
        return summary | {"tokens": float(counts_M.max()), "modules": float((counts_M > 0).sum())}


def _summary(sums: Tensor) -> dict[str, float]:
    values = sums.tolist()
    if values[0] == 0:
        return {"tokens": 0.0}
    shares = Shares.from_sums(values)
    kept = {name: getattr(shares, name) for name in ("mean", "std", "below_zero", "zero_to_one", "above_one")}
    # a λ is at one end at most, so that the two counts add up
    return {"tokens": values[0], **kept, "saturated": shares.at_lower + shares.at_upper}


@contextmanager
def gate_override(
    peft_model: nn.Module,
    override: str | Override | None = None,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    constant: float | None = None,
    part: str | None = None,
    adapter_name: str | None = None,
) -> Iterator[None]:
    """λ clipped to [minimum, maximum] or replaced by `constant` inside the context; nests, the innermost rules.

    `gate_override(model, "unit")`, as behind the @ of a name, is `gate_override(model, minimum=0, maximum=1)`.

    Args:
        peft_model: with gates.
        override: the text form: "unit", "noreverse", "noextrapolate", "off", "constant=0.5", "clip=-1:2", "lower=0.5". Instead
            of the numbers.
        minimum, maximum, constant: of λ.
        part: where the constant holds: a third of the layers ("lower", "middle", "upper"), "attention", "mlp", or a kind of
            module such as "q_proj"; elsewhere λ is 1 then. None for all modules.
        adapter_name: None for the active one.

    Raises:
        GateError: if nothing or something contradictory is asked for, the adapter carries no gates, or has no such part.
        ConfigError: for a text that is no known override.
    """
    numbers = Override(minimum, maximum, constant, part)
    if override is None and numbers == Override():
        raise GateError(
            'gate_override needs an override such as "unit", or minimum, maximum or constant; with none it would have no effect'
        )
    if override is not None and numbers != Override():
        raise GateError(f"gate_override takes either an override ({override!r}) or numbers by name, not both")
    if override is None:
        override = numbers
    elif isinstance(override, str):
        override = parse_override(override.removeprefix("@"))
    elif not isinstance(override, Override) or override == Override():
        raise GateError(f"gate_override takes numbers by name, as in constant={override!r:.20}; found {override!r:.60}")
    gates = gate_modules(peft_model, adapter_name)
    # the innermost override replaces the outer one, it is not laid over it
    with _set_on(gates, "override", overrides_by_module(override, gates)):
        yield


@contextmanager
def constant_gate(
    peft_model: nn.Module, constant: float, adapter_name: str | None = None, *, part: str | None = None
) -> Iterator[None]:
    """One λ for a whole adapter or a part of it inside the context: laid over its gates, or as a scale of the plain adapter.

    `part` as of `gate_override`, and errors too, or those of `attach_gates` where gates could not be put on.
    """
    name = active_adapter(peft_model, adapter_name)
    if is_gated(peft_model, name):
        with gate_override(peft_model, constant=constant, adapter_name=name, part=part):
            yield
        return
    # what no gate reaches keeps its strength here, too
    paths = [verdict.path for verdict in require_gateable(examine_adapter(peft_model, name))]
    laid = overrides_by_module(Override(constant=constant, part=part), paths)
    with scale_adapter(peft_model, {path: one.limits[0] for path, one in laid.items()}, name):
        yield


def find_ungated_modules(peft_model: nn.Module, adapter_name: str | None = None) -> list[str]:
    """The modules of an adapter that `constant_gate` leaves at full strength, or for which it is refused."""
    name = active_adapter(peft_model, adapter_name)
    if is_gated(peft_model, name):
        reached = set(gate_modules(peft_model, name))
    else:
        reached = {verdict.path for verdict in examine_adapter(peft_model, name) if verdict.status == "gate"}
    return [path for path, _ in lora_layers(peft_model, name) if path not in reached]


@contextmanager
def _preserve_requires_grad(model: nn.Module) -> Iterator[None]:
    """Which parameters are frozen is the same after the context as before; PEFT and gates change it as they are switched."""
    trains = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, flag in trains:
            parameter.requires_grad_(flag)


@contextmanager
def record_gates(peft_model: nn.Module, adapter_name: str | None = None) -> Iterator[Recording]:
    """Collect λ statistics of all forward passes inside the context (as applied, overrides included); nests, and all count.

    Yields:
        A `Recording`: `statistics()` for each module and `total()` for all give the number of tokens, mean and standard deviation
        of λ and the shares of tokens below 0, in [0, 1], above 1 and at a bound ("saturated"). Set its `token_mask` (bool [batch,
        sequence]) before a forward pass to count only some tokens.

    Raises:
        GateError: if the adapter carries no gates; in a forward pass, for a `token_mask` of another shape.
    """
    gates = gate_modules(peft_model, adapter_name)
    recording = Recording({path: Recorder(gate.config.range) for path, gate in gates.items()})
    with _noting(gates, recording.recorders):
        yield recording


@contextmanager
def trace_gates(peft_model: nn.Module, adapter_name: str | None = None) -> Iterator[dict[str, list[Tensor]]]:
    """Keep every λ of the forward passes inside the context (as applied, overrides included); a recording outside counts on.

    Yields:
        {module path: one tensor per forward pass}, each [batch, sequence], fp32 on the CPU. For a few short texts: it
        holds modules × tokens numbers.
    """
    gates = gate_modules(peft_model, adapter_name)
    traces = {path: Trace() for path in gates}
    with _noting(gates, traces):
        yield {path: trace.values for path, trace in traces.items()}


def _noting(
    gates: Mapping[str, SignedGate], recorders: Mapping[str, Recorder] | Mapping[str, Trace]
) -> AbstractContextManager[None]:
    """Inside the context each gate's λ go to the recorder of its path, and still to what took note of them before."""
    chained = {
        path: inner if (outer := gates[path].recorder) is None else Chain(outer, inner)
        for path, inner in recorders.items()
    }
    return _set_on(gates, "recorder", chained)


@contextmanager
def _set_on(gates: Mapping[str, SignedGate], name: str, values: Mapping[str, Any]) -> Iterator[None]:
    """An attribute of each gate is that of its path in `values` inside the context, and then what it was before."""
    previous = {path: getattr(gate, name) for path, gate in gates.items()}
    try:
        for path, gate in gates.items():
            setattr(gate, name, values[path])
        yield
    finally:
        for path, gate in gates.items():
            setattr(gate, name, previous[path])


@contextmanager
def gates_disabled(peft_model: nn.Module, adapter_name: str | None = None) -> Iterator[None]:
    """The plain adapter inside the context: PEFT runs its own LoRA code, the gates are not consulted."""
    name = active_adapter(peft_model, adapter_name)
    gate_modules(peft_model, name)
    # PEFT looks into `lora_variant` at each forward, so that an entry taken out is plain LoRA from then on
    gated = [(layer, layer.lora_variant.get(name)) for _, layer in lora_layers(peft_model, name)]
    gated = [(layer, variant) for layer, variant in gated if isinstance(variant, GatedLora)]
    try:
        for layer, _ in gated:
            del layer.lora_variant[name]
        yield
    finally:
        for layer, variant in gated:
            layer.lora_variant[name] = variant


def store_displaced_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Tell a PeftModel which of the base's own weights its adapter's file displaced; none is an answer, too.

    Args:
        weights: {path of a parameter or buffer in the base's own names: the value that it had}.
    """
    vars(model)["_displaced_weights"] = dict(weights)


def base_unavailable_reason(model: nn.Module, adapter_name: str | None = None) -> str:
    """Why `as_base` would not be the base; empty where it is.

    Of a model that `load_adapter` or `load_gated` did not load, weights that were saved along are not known.
    """
    name = active_adapter(model, adapter_name)
    if why := changed_base_of(model, name):
        return why
    biased = any(getattr(config, "bias", "none") != "none" for config in adapter_configs(model, name))
    if biased and "_displaced_weights" not in vars(model):
        return (
            "the adapter trained biases along, which PEFT leaves in the model when it switches the adapter off; a model that "
            "loragate.models.load_adapter puts together keeps the base's own"
        )
    return ""


def zero_unavailable_reason(model: nn.Module, adapter_name: str | None = None) -> str:
    """Why λ = 0 in all modules would not be the base, and so no folder that says so either; empty where it is."""
    name = active_adapter(model, adapter_name)
    if reason := base_unavailable_reason(model, name):
        return reason
    whole = [
        base_module_name(path)
        for path, module in model.named_modules()
        if isinstance(module, AuxiliaryTrainingWrapper) and name in module._adapters
    ]
    return describe_unreached([*find_ungated_modules(model, name), *whole, *vars(model).get("_displaced_weights", {})])


@contextmanager
def as_base(model: Any) -> Iterator[None]:
    """The base itself inside the context: the adapter off, and what its file displaced of the base's own weights put back.

    λ = 0 is less: it leaves trained tokens, whole copies of modules, embeddings, norms and biases of the adapter. A GateError
    where `base_unavailable_reason` says so, or the displaced weights are spread over several devices.
    """
    if reason := base_unavailable_reason(model):
        raise GateError(f"the model without the adapter would not be its base. {reason}")
    displaced: dict[str, Tensor] = vars(model).get("_displaced_weights", {})
    held: dict[str, Tensor] = {}
    own = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, value in chain(*own) if displaced else ():
        if ".lora_" not in name and ".modules_to_save." not in name and base_module_name(name) in displaced:
            held[base_module_name(name)] = value
    for name, old in displaced.items():
        if name not in held or held[name].shape != old.shape:
            raise GateError(
                f"the adapter displaced {name} of the base, which is sharded now, so that the base cannot be had"
            )
    before = {name: value.detach().clone() for name, value in held.items()}
    with _preserve_requires_grad(model), model.disable_adapter():
        try:
            for name, value in held.items():
                value.data.copy_(displaced[name])
            yield
        finally:
            for name, value in held.items():
                value.data.copy_(before[name])
