"""What is scored side by side: base, adapter, gated adapter, and the controls that need no training.

All of them are one model in memory under different context managers, so they share prompts, random streams and weights.
A variant is independent of tasks: a label, a temperature and what must be done to the model. The canary proves, on the
evaluation's own prompts, that adapter and gates act: a comparison of models that are secretly one is the cheapest way to be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from loragate.display import temperature_label
from loragate.errors import ConfigError, GateError, LoragateError, nearest
from loragate.gates import (
    constant_gate,
    detach_gates,
    draw_gates,
    gate_override,
    gate_parameters,
    gates_disabled,
    load_gates,
    measure_parity,
    sizes_of,
)
from loragate.gates.control import as_base, base_unavailable_reason
from loragate.gates.override import Override, parse_override
from loragate.generation import SamplingConfig
from loragate.generation.transformers_engine import pad_rows
from loragate.models.source import Kind

CONTROLS = ("alone", "none", "cheap", "full")
LOWER_TEMPERATURES = (0.6, 0.3, 0.0)  # temperatures of the controls that only sample more sharply
PROMPTS, TOKENS = 4, 256  # of the canary


@dataclass(frozen=True)
class ModelVariant:
    """Which weights act, which λ, at which temperature: what is scored, chosen, served and tabulated, in the whole package.

    Attributes:
        weights: "base", "adapter" or "gated".
        control: what sets it apart from the weights as they are, as printed ("T=0.6", "λ=0.5", "[-3,1]"); None for these.
        temperature: sampling temperature in place of the task's; 0 is greedy; None keeps the task's.
        scale: one λ for all tokens and modules; None leaves them.
        part: where the scale holds, as of `Override`; None for all modules.
        random: seed of random gates, as large as the trained ones module by module, in their place; None leaves them.
        override: override of λ by name ("unit", "clip=-1:2") laid over the gates; None leaves them.
        gates: folder of a gated adapter whose gates act on the plain adapter that is loaded; None for the model's own.
    """

    weights: Kind
    control: str | None = None
    temperature: float | None = None
    scale: float | None = None
    random: int | None = None
    override: str | None = None
    gates: str | None = None
    part: str | None = None

    @classmethod
    def scaled(cls, scale: float, part: str | None = None) -> ModelVariant:
        """The adapter under one λ, in a part of it or everywhere: "adapter λ=0.5", "adapter lower λ=0.5"."""
        return cls("adapter", " ".join(filter(None, (part, f"λ={scale:g}"))), scale=scale, part=part)

    @property
    def label(self) -> str:
        """As printed: "gated", "adapter greedy", "adapter λ=0.5 T=0.3"."""
        return self.weights if self.control is None else f"{self.weights} {self.control}"

    @property
    def slug(self) -> str:
        """The label in a form that a file name can hold."""
        # "gated [-6,3], seed 0" is gated--6_3-seed-0
        name = re.sub(r"[\[\]]|,(?= )", "", self.label).replace(",", "_")
        return name.replace(" ", "-").replace("=", "").replace("λ", "lambda")

    @property
    def reference_label(self) -> str:
        """Label of the adapter's variant that this one is compared with, empty for that variant itself.

        What is more than the adapter at another temperature is compared with the adapter that is sampled as sharply.
        """
        if self == ModelVariant("adapter"):
            return ""
        if self.temperature is None or self == ModelVariant("adapter").with_temperature(self.temperature):
            return "adapter"
        return ModelVariant("adapter").with_temperature(self.temperature).label

    def with_temperature(self, temperature: float) -> ModelVariant:
        """The same at another temperature than the task's, 0 for greedy."""
        suffix = temperature_label(temperature)
        return replace(
            self, control=suffix if self.control is None else f"{self.control} {suffix}", temperature=temperature
        )

    def sampling(self, config: SamplingConfig) -> SamplingConfig:
        """The task's sampling at this variant's temperature; greedy decoding draws one sample."""
        if self.temperature is None:
            return config
        samples = 1 if self.temperature == 0 else config.samples
        return replace(config, temperature=self.temperature, samples=samples)


def variants_for(
    kind: Kind,
    controls: str = "cheap",
    constants: Sequence[float | str] = (0.5,),
    unreached: str = "",
) -> list[ModelVariant]:
    """The variants of a base model, a plain adapter or a gated adapter; the adapter comes first, as others refer to it.

    All are at the temperature of the tasks; `at_temperatures` adds others.

    Args:
        kind: what was loaded.
        controls: "cheap" adds the adapter with one constant λ, "full" also random gates of the trained ones' size; "none" leaves
            them out, "alone" also what lies beneath the model. Controls that must be trained are models of their own.
        constants: the constant λ of the cheap controls, each a number or, for a part of the model, "lower=0.5".
        unreached: what no λ reaches of the adapter, in a sentence; empty where λ = 0 is the base.

    Raises:
        ConfigError: for an unknown set of controls, or a constant that is the base or the adapter.
    """
    if controls not in CONTROLS:
        raise ConfigError(f"--controls {controls}: expected one of {', '.join(CONTROLS)}{nearest(controls, CONTROLS)}")
    if kind == "base" or controls == "alone":
        return [ModelVariant(kind)]
    variants = [ModelVariant("adapter"), ModelVariant("base")]
    if kind == "gated":
        variants.append(ModelVariant("gated"))
    if controls == "full" and kind == "gated":
        variants.append(ModelVariant("gated", "random gates", random=0))
    if controls != "none":
        for value in dict.fromkeys(constants):  # each once, in order: a variant is known by its label
            try:
                one = parse_override(value) if isinstance(value, str) else Override(constant=value)
            except LoragateError as error:
                raise ConfigError(f"--constants {value}: {error}") from error
            if one.constant is None or one.constant == 1 or (one.constant == 0 and one.part is None):
                same: dict[float | None, str] = {None: "it is no constant", 1: "λ = 1 is the adapter"}
                zero = unreached or "λ = 0 is the base"
                raise ConfigError(f"--constants {value}: {same.get(one.constant, zero)}; give other numbers")
            variants.append(ModelVariant.scaled(one.constant, one.part))
    return variants


def control_temperatures(kind: Kind, controls: str) -> tuple[float, ...]:
    """The temperatures at which a set of controls scores every variant beside that of the tasks; none of a base."""
    return LOWER_TEMPERATURES if kind != "base" and controls in ("cheap", "full") else ()


def at_temperatures(variants: Sequence[ModelVariant], temperatures: Sequence[float]) -> list[ModelVariant]:
    """The variants, and each of them at every other temperature, temperature by temperature."""
    return [*variants, *(one.with_temperature(temperature) for temperature in temperatures for one in variants)]


@contextmanager
def activate_variant(model: Any, variant: ModelVariant, kind: Kind) -> Iterator[None]:
    """A context inside which the loaded model is this variant; the model is left as it was found.

    Raises:
        ConfigError: for a variant that the loaded model cannot be.
    """
    if kind == "base" and variant.weights != "base":
        raise ConfigError(f"{variant.label} cannot be scored: the model has no adapter")
    if variant.weights == "gated" and kind != "gated" and variant.gates is None:
        raise ConfigError(f"{variant.label} cannot be scored: the adapter carries no gates")
    with ExitStack() as stack:
        if variant.weights == "base":
            stack.enter_context(nullcontext() if kind == "base" else as_base(model))
        elif variant.scale is not None:
            stack.enter_context(constant_gate(model, variant.scale, part=variant.part))
        elif variant.weights == "adapter":
            stack.enter_context(gates_disabled(model) if kind == "gated" else nullcontext())
        else:
            if variant.gates is not None:  # on an adapter that carries no gates of its own
                load_gates(model, variant.gates)
                stack.callback(detach_gates, model)
            if variant.random is not None:
                stack.enter_context(_random(model, variant.random))
            if variant.override is not None:
                stack.enter_context(gate_override(model, variant.override))
        yield


@contextmanager
def _random(model: Any, seed: int) -> Iterator[None]:
    trained = {name: value.detach().clone() for name, value in gate_parameters(model).items()}
    try:
        draw_gates(model, seed, sizes_of(trained))
        yield
    finally:
        for name, parameter in gate_parameters(model).items():
            parameter.data.copy_(trained[name])


@torch.no_grad()
def canary(model: Any, tokenizer: Any, prompts: Sequence[str], kind: Kind, *, base: bool = True) -> dict[str, float]:
    """Largest absolute differences in logits on the first prompts (at most 4, their last 256 tokens).

    Args:
        base: whether the base is among what is scored, so that switching the adapter off must give it.

    Returns:
        {} for a base model; "adapter_from_base" for an adapter; for gates also "gates_from_adapter", "zero_from_base"
        (λ = 0 against the model without the gated deltas) and "one_from_adapter" (λ = 1 against the plain adapter).

    Raises:
        GateError: if the model without the adapter is not its base, if the adapter changes no logit, if the gates change none,
            or if λ = 0 is not the model without the gated deltas or λ = 1 not the adapter, up to rounding.
    """
    if kind == "base":
        return {}
    if base and (reason := base_unavailable_reason(model)):
        raise GateError(f"canary: the variant of the base would not be the base. {reason}")
    # [prompts, longest], padded on the right, where causal attention does not see the padding
    rows = [ids[-TOKENS:] for ids in tokenizer(list(prompts[:PROMPTS]), add_special_tokens=False)["input_ids"]]
    device = next(model.parameters()).device
    ids, mask = (one.to(device) for one in pad_rows(rows, 0, "right"))
    if kind == "adapter":
        adapter = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()].float()
        with as_base(model) if base else model.disable_adapter():
            without = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()].float()
        figures = {"adapter_from_base": float((adapter - without).abs().max())}
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


def describe_canary(figures: Mapping[str, float]) -> str:
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
