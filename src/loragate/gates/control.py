"""Looking at λ and laying something over it: five context managers, after which all acts and trains as before.

`gate_override` makes the paper's inference interventions (max(λ,0), min(λ,1), clip) and the constant-λ control, which
`constant_gate` lays over a plain adapter too; `record_gates` collects λ statistics, `trace_gates` every single λ;
`gates_disabled` runs the plain Stage-I adapter through PEFT's own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from loragate.errors import GateError
from loragate.gates.attach import attach_gates, detach_gates, gate_modules, is_gated
from loragate.gates.eligibility import active_adapter, lora_layers
from loragate.gates.gate import GateConfig, SignedGate
from loragate.gates.override import Override
from loragate.gates.recording import SATURATED, Recorder, Recording, Trace
from loragate.gates.variant import GatedLora


@contextmanager
def gate_override(
    peft_model: nn.Module,
    minimum: float | None = None,
    maximum: float | None = None,
    constant: float | None = None,
    adapter_name: str | None = None,
) -> Iterator[None]:
    """λ clipped to [minimum, maximum] or replaced by `constant` inside the context; nests, the innermost rules.

    Raises:
        GateError: if nothing or something contradictory is asked for, or the adapter carries no gates.
    """
    override = Override(minimum, maximum, constant)
    if override == Override():
        raise GateError("gate_override needs minimum, maximum or constant; with none of them it would have no effect")
    gates = gate_modules(peft_model, adapter_name)
    # one object for all: the innermost override replaces the outer one, it is not laid over it
    with _set_on(gates, "override", dict.fromkeys(gates, override)):
        yield


@contextmanager
def constant_gate(peft_model: nn.Module, constant: float, adapter_name: str | None = None) -> Iterator[None]:
    """One λ for a whole adapter inside the context; an adapter without gates gets neutral ones, and freezes, for as long.

    Raises:
        GateError: as `gate_override`, or as `attach_gates` where gates cannot be put on.
    """
    name = active_adapter(peft_model, adapter_name)
    plain = not is_gated(peft_model, name)
    trains = [(parameter, parameter.requires_grad) for parameter in peft_model.parameters()]
    if plain:  # in a range that holds the constant, though an override is laid over the map and not bound by it
        attach_gates(peft_model, GateConfig(min(constant, -1.0), max(constant, 2.0)), name)
    try:
        with gate_override(peft_model, constant=constant, adapter_name=name):
            yield
    finally:
        if plain:
            detach_gates(peft_model, name)
            for parameter, flag in trains:
                parameter.requires_grad_(flag)


@contextmanager
def record_gates(
    peft_model: nn.Module, adapter_name: str | None = None, margin: float = SATURATED
) -> Iterator[Recording]:
    """Collect λ statistics of all forward passes inside the context (as applied, overrides included).

    Args:
        margin: share of the way from 1 to a bound within which λ counts as at the bound.

    Yields:
        A `Recording`: `statistics()` per module and `total()` over all modules give the number of values, mean and standard
        deviation of λ and the shares below 0, in [0, 1], above 1 and at a bound ("saturated"). Set its `token_mask` (bool
        [batch, sequence]) before a forward pass to count only some tokens.

    Raises:
        GateError: if the adapter carries no gates; in a forward pass, for a `token_mask` of another shape.
    """
    gates = gate_modules(peft_model, adapter_name)
    recording = Recording({path: Recorder(gate.config.range, margin) for path, gate in gates.items()})
    with _set_on(gates, "recorder", recording.recorders):
        yield recording


@contextmanager
def trace_gates(peft_model: nn.Module, adapter_name: str | None = None) -> Iterator[dict[str, list[Tensor]]]:
    """Keep every λ of the forward passes inside the context (as applied, overrides included).

    Yields:
        {module path: one tensor per forward pass}, each [batch, sequence], fp32 on the CPU. For a few short texts: it
        holds modules × tokens numbers. A recording that runs outside is suspended meanwhile.
    """
    gates = gate_modules(peft_model, adapter_name)
    traces = {path: Trace() for path in gates}
    with _set_on(gates, "recorder", traces):
        yield {path: trace.values for path, trace in traces.items()}


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
    """The plain Stage-I adapter inside the context: PEFT runs its own LoRA code, the gates are not consulted."""
    name = active_adapter(peft_model, adapter_name)
    gate_modules(peft_model, name)
    with variants_replaced(peft_model, name, None):
        yield


@contextmanager
def variants_replaced(model: nn.Module, adapter_name: str, other: Any) -> Iterator[None]:
    """The gated layers run by another variant of PEFT inside the context, or by its plain LoRA code for None."""
    # PEFT looks into `lora_variant` at each forward, so that an entry taken out is plain LoRA from then on
    gated = [(layer, layer.lora_variant.get(adapter_name)) for _, layer in lora_layers(model, adapter_name)]
    gated = [(layer, variant) for layer, variant in gated if isinstance(variant, GatedLora)]
    try:
        for layer, _ in gated:
            del layer.lora_variant[adapter_name]
            if other is not None:
                layer.lora_variant[adapter_name] = other
        yield
    finally:
        for layer, variant in gated:
            layer.lora_variant[adapter_name] = variant
