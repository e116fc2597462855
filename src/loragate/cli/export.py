"""`loragate export`: gates that are one λ per module, folded into a plain LoRA adapter for any runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate.cli.arguments import Command
from loragate.cli.preflight import require_free_out
from loragate.errors import ConfigError
from loragate.gates.recommended import at


@dataclass(frozen=True)
class ExportOptions:
    """Settings of `loragate export`.

    Attributes:
        model: gated folder, or FOLDER@OVERRIDE such as gated@unit; with --constant also a plain adapter. On the hub:
            owner/name or owner/name@revision, then @OVERRIDE.
        out: folder for the plain adapter.
        constant: one λ for all gated modules in place of the gates; gates that read the token can be exported only so.
        uniform: one rank and one scale for all modules, for runtimes that read r and lora_alpha alone (llama.cpp, SGLang).
    """

    model: str
    out: str
    constant: float | None = None
    uniform: bool = False


def run(options: ExportOptions) -> int:
    """Fold, write the adapter and its card, and say what was written."""
    from loragate.conversion.fold import constant_coefficients, fold_adapter, needs_uniform
    from loragate.files import write_text
    from loragate.gates.artifact import write_sampling
    from loragate.gates.gate import Override
    from loragate.models import read_gates, resolve

    out = Path(options.out)
    require_free_out(out, resume=None)
    place = resolve(options.model, overrides=True, base_later=True)
    override = place.override
    if options.constant is not None:
        if override is not None:
            raise ConfigError(
                f"--constant {options.constant:g}: {options.model} has an override already; give one of the two"
            )
        override = Override(constant=options.constant)
    temperature = (
        place.recommended_temperature if override is None else None
    )  # which was shown of the gates as they are
    if override is None or place.kind == "base":
        resolve(options.model, expect="gated", overrides=True, base_later=True)  # says what the folder is instead
    gates = read_gates(place.folder, override)
    coefficients = constant_coefficients(gates.config, gates.weights, gates.biases, override)
    config = fold_adapter(gates.adapter, coefficients, out, uniform=options.uniform)
    base = gates.base.get("id") or config.get("base_model_name_or_path") or ""
    write_text(
        out / "README.md",
        card(
            _source(place, options.constant),
            str(base),
            coefficients,
            override or Override(),
            options.uniform,
            temperature,
        ),
    )
    write_sampling(out, temperature)
    print(f"{out}: a plain LoRA adapter, {summary(coefficients)}")
    if temperature is not None:
        print(f"recommended sampling: {at(temperature)} (generation_config.json)")
    if more := needs_uniform(config):
        print(f"its adapter_config.json has {', '.join(more)}, which llama.cpp does not read: add --uniform for it")
    print(f"next: loragate generate --model {out} --prompt TEXT")
    return 0


def _source(place: Any, constant: float | None) -> str:
    """What was folded, in words that mean something elsewhere: a folder's name, or the hub id with its commit."""
    laid = place.ref.override or ("" if constant is None else f"constant={constant!r}")
    return "@".join(filter(None, (place.hub_id or place.folder.name, laid)))


def summary(coefficients: Mapping[str, float]) -> str:
    """The folded λ in a few words."""
    values = sorted(coefficients.values())
    if values[0] == values[-1]:
        return f"λ = {values[0]:.6g} folded into each of {len(values)} modules"
    below = sum(value < 0 for value in values)
    return f"λ from {values[0]:.4g} to {values[-1]:.4g} folded into {len(values)} modules ({below} of them reversed)"


def card(
    source: str,
    base: str,
    coefficients: Mapping[str, float],
    override: Any,
    uniform: bool,
    temperature: float | None = None,
) -> str:
    """README.md of the export."""
    lines = [
        "# LoRA adapter with folded gates",
        "",
        f"A plain PEFT LoRA adapter for `{base or 'the base named in adapter_config.json'}`, written by `loragate export` from "
        f"`{source}`: {summary(coefficients)}. Any program that reads PEFT LoRA adapters serves it; no loragate is needed.",
        "",
    ]
    if override.constant is not None:
        lines += [
            f"λ is one constant, {override.constant:g}, laid over every gated module. Learned gates, if the source had any, are "
            "not in here.",
            "",
        ]
    else:
        lines += ["It computes what the gated adapter computes, up to rounding in fp32: λ·B replaces B.", ""]
    if temperature is not None:
        lines += [f"Recommended sampling: {at(temperature)} (`generation_config.json`).", ""]
    if uniform:
        lines += ["All modules share one rank (padded with zeros) and lora_alpha / r = 1.", ""]
    lines += [
        "| module | λ |",
        "|---|---:|",
        *(f"| {path} | {value:.6g} |" for path, value in coefficients.items()),
        "",
    ]
    return "\n".join(lines)


COMMAND = Command(
    name="export",
    summary="Fold gates that are one λ per module (or one constant λ) into a plain LoRA adapter.",
    options=ExportOptions,
    run=run,
    positional="model",
    examples=(
        "loragate export gated-by-module --out plain",
        "loragate export gated --constant 0.5 --out plain",
        "loragate export gated-by-module --uniform --out for-llama-cpp",
    ),
)
