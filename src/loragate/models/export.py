"""Gates whose λ is one number per module, folded into a plain LoRA adapter that any PEFT-reading runtime serves.

λ·(α/r)·B(Ax) is (α/r)·(λB)(Ax): where a gate has a bias only, or one λ is laid over all, B takes it up and nothing of the
gates is left. A gate that reads the token cannot be folded: no single B equals it. Works on files; no base is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from loragate.errors import ArtifactError, ConfigError, GateError
from loragate.files import new_folder, require_new, write_json, write_text
from loragate.gates import GateConfig
from loragate.gates.artifact import write_sampling
from loragate.gates.override import Override
from loragate.gates.recommended import SAMPLING, at
from loragate.gates.schema import (
    ADAPTER_CONFIG,
    adapter_files,
    copy_file,
    factor_of,
    read_adapter,
    strength_of,
    write_factors,
)
from loragate.models.folder_gates import read_gates
from loragate.models.source import resolve


def export_adapter(
    model: str, out: str | Path, *, constant: float | None = None, uniform: bool = False
) -> tuple[dict[str, Any], dict[str, float]]:
    """Fold the gates of a folder and write the plain adapter with its card, and with its tokenizer where it has its own.

    Args:
        model: gated folder or hub id, with @OVERRIDE behind it; with `constant` or an override also a plain adapter.
        out: folder for the plain adapter; new or empty.
        constant: one λ for all gated modules in place of the gates.
        uniform: as in `fold_adapter`.

    Returns:
        (the configuration that was written, λ of every folded module).

    Raises:
        ConfigError: for a `constant` beside an override, a place that holds no adapter, or a folder that holds anything.
        GateError: for gates that read the token.
        ArtifactError: for a file that cannot be read.
    """
    require_new(Path(out))
    place = resolve(model, overrides=True, base_later=True)
    override = place.override
    if constant is not None:
        if override is not None:
            raise ConfigError(f"--constant {constant:g}: {model} has an override already; give one of the two")
        override = Override(constant=constant)
    temperature = place.recommended_temperature if override is None else None  # shown of the gates as they are
    if override is None or place.kind == "base":
        resolve(model, expect="gated", overrides=True, base_later=True)  # says what the folder is instead
    gates = read_gates(place.folder, override)
    coefficients = constant_coefficients(gates.config, gates.weights, gates.biases, override)
    # a name that means something elsewhere: of the folder, or the hub id with its commit
    laid = place.ref.override or ("" if constant is None else f"constant={constant!r}")
    source = "@".join(filter(None, (place.hub_id or place.folder.name, laid)))
    with new_folder(Path(out)) as folder:
        config = fold_adapter(gates.adapter, coefficients, folder, uniform=uniform)
        base = str(gates.base.get("id") or config.get("base_model_name_or_path") or "")
        card = _card(source, base, coefficients, override or Override(), uniform, temperature)
        write_text(folder / "README.md", card)
        write_sampling(folder, temperature)
        for name in adapter_files(gates.adapter)[0]:
            if not (folder / name).exists():  # the configuration, the weights and the card are those of the export
                copy_file(gates.adapter / name, folder / name)
    return config, coefficients


def folded_in_words(coefficients: Mapping[str, float]) -> str:
    """The folded λ in a few words."""
    values = sorted(coefficients.values())
    if values[0] == values[-1]:
        return f"λ = {values[0]:.6g} folded into each of {len(values)} modules"
    below = sum(value < 0 for value in values)
    return f"λ from {values[0]:.4g} to {values[-1]:.4g} folded into {len(values)} modules ({below} of them reversed)"


def constant_coefficients(
    config: GateConfig,
    weights: Mapping[str, torch.Tensor],
    biases: Mapping[str, torch.Tensor],
    override: Override | None = None,
) -> dict[str, float]:
    """λ of every gated module, where it is the same for all tokens.

    Args:
        config: range, τ and granularity.
        weights: {module path: [d_in]}; empty for module and global granularity.
        biases: {module path: [1]}.
        override: λ replaced by a constant, which folds any gates, or clipped.

    Raises:
        GateError: for gates that read the token.
    """
    moving = [path for path, weight in weights.items() if bool(weight.any())]
    if moving and (override is None or override.constant is None):
        raise GateError(
            f"λ differs from token to token in {len(moving)} of {len(biases)} modules ({moving[0]} is the first), so no plain "
            "adapter equals these gates. Serve the folder as it is (loragate serve, or vLLM with loragate's plugin), load it "
            "with loragate.load_gated, or fold one λ for all modules instead of the gates: --constant 0.5. Gates that can be "
            "folded are trained with loragate calibrate --granularity module"
        )
    laid = override or Override()
    return {path: float(laid(config.signed_map(bias.float()))) for path, bias in biases.items()}


def fold_adapter(
    adapter: str | Path, coefficients: Mapping[str, float], out: str | Path, *, uniform: bool = False
) -> dict[str, Any]:
    """Write the adapter with λ folded into its B factors.

    Args:
        adapter: folder of a plain PEFT LoRA adapter.
        coefficients: {module path: λ}; a module that is not named keeps its strength.
        out: folder for adapter_config.json and adapter_model.safetensors.
        uniform: write one rank and one scale of 1 for all modules (smaller ranks are padded with zeros), for runtimes that
            read `r` and `lora_alpha` alone and neither rank_pattern, alpha_pattern nor use_rslora.

    Returns:
        The configuration that was written. Factors that λ does not touch keep bits and dtype; B is fp32 where it does.

    Raises:
        ArtifactError: for a file that cannot be read, or a module that the adapter does not have.
    """
    config, state = read_adapter(Path(adapter))
    if unknown := sorted(set(coefficients) - {factor_of(key)[0] for key in state}):
        raise ArtifactError(f"{adapter}: there is no factor of {unknown[0]} into which its λ could be folded")
    folded = {}
    for key, tensor in state.items():
        path, group = factor_of(key)
        lam = coefficients.get(path, 1.0) if group == "lora_B" else 1.0
        # a product in 16 bits would be rounded anew; what λ = 1 leaves alone keeps bits and dtype
        folded[key] = (tensor if lam == 1.0 else tensor.float() * lam).contiguous()
    if uniform:
        config, folded = _uniform(config, folded)
    out = Path(out)
    write_factors(out, folded)
    write_json(out / ADAPTER_CONFIG, config)
    return config


def needs_uniform(config: Mapping[str, Any]) -> list[str]:
    """The keys of an adapter's configuration that say more than one rank and one α/r; empty for the plainest adapters."""
    return [key for key in ("rank_pattern", "alpha_pattern", "use_rslora") if config.get(key)]


def _uniform(config: dict[str, Any], state: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """One rank R and α = R, so that α/r is 1: each module's own scale goes into its B."""
    largest = max(tensor.shape[0] for key, tensor in state.items() if factor_of(key)[1].endswith("_A"))
    found = {}
    for key, tensor in state.items():
        path, group = factor_of(key)
        if not group:  # no factor of a LoRA (a whole copy of a module, say)
            found[key] = tensor
        elif group.endswith("_A"):
            found[key] = _padded(tensor, 0, largest)
        else:
            found[key] = _padded(tensor.float() * strength_of(config, path)[2], 1, largest)
    plain = {"r": largest, "lora_alpha": largest, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}
    return {**config, **plain}, found


def _padded(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    shape = list(tensor.shape)  # of a convolution it has more than two dimensions
    shape[dim] = size - shape[dim]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim).contiguous()


def _card(
    source: str,
    base: str,
    coefficients: Mapping[str, float],
    override: Override,
    uniform: bool,
    temperature: float | None,
) -> str:
    lines = [
        "# LoRA adapter with folded gates",
        "",
        f"A plain PEFT LoRA adapter for `{base or 'the base named in adapter_config.json'}`, written by `loragate export` from "
        f"`{source}`: {folded_in_words(coefficients)}. Any program that reads PEFT LoRA adapters serves it; no loragate is "
        "needed.",
        "",
        f"λ is one constant, {override.constant:g}, laid over every gated module. Learned gates, if the source had any, are not "
        "in here."
        if override.constant is not None
        else "It computes what the gated adapter computes, up to rounding in fp32: λ·B replaces B.",
        "",
    ]
    if uniform:
        lines += ["All modules share one rank (padded with zeros) and lora_alpha / r = 1.", ""]
    if temperature is not None:
        lines += [f"Recommended sampling: {at(temperature)} (`{SAMPLING}`).", ""]
    rows = [f"| {path} | {value:.6g} |" for path, value in coefficients.items()]
    return "\n".join([*lines, "| module | λ |", "|---|---:|", *rows, ""])
