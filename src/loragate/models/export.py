"""Gates whose λ is one number per module, folded into a plain LoRA adapter that any PEFT-reading runtime serves.

λ·(α/r)·B(Ax) is (α/r)·(λB)(Ax): where a gate has a bias only, or one λ is laid over all, B takes it up and nothing of the
gates is left. A gate that reads the token cannot be folded: no single B equals it. Folding works on files; where the base is
here, it is loaded to compare what was written.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from loragate.errors import ArtifactError, ConfigError, GateError, LoragateError
from loragate.files import first_difference, new_folder, read_json, require_new, write_json, write_text
from loragate.gates import GateConfig
from loragate.gates.artifact import write_sampling
from loragate.gates.override import Override
from loragate.gates.recommended import SAMPLING, at, exported_sampling
from loragate.gates.schema import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CARD,
    NEED_MODEL,
    TOKENIZER,
    adapter_files,
    copy_file,
    factor_of,
    read_adapter,
    read_adapter_config,
    strength_of,
    write_factors,
)
from loragate.models.agreement import (
    Agreement,
    compare,
    is_here,
    log_probs,
    probing_prompts,
    require_agreement,
)
from loragate.models.folder_gates import read_gates
from loragate.models.loading import USUAL, open_weights
from loragate.models.settings import Loading
from loragate.models.source import ModelSource, resolve


@dataclass(frozen=True)
class Exported:
    """What `export_adapter` wrote."""

    config: dict[str, Any]  # adapter_config.json
    coefficients: dict[str, float]  # λ of every folded module
    base: str  # the base by which it was compared, or would be
    agreement: Agreement | None  # with the model that it stands for; None where it was not compared


def export_adapter(
    model: str,
    out: str | Path,
    *,
    constant: float | None = None,
    uniform: bool = False,
    base: str = "",
    compare_outputs: bool = True,
    loading: Loading = USUAL,
) -> Exported:
    """Fold the gates of a folder and write the plain adapter with its card and every file that the source held.

    Where the base is here, the written folder is loaded and its log-probabilities are compared with those of the model that it
    stands for, before it gets its name.

    Args:
        model: gated folder or hub id, with @OVERRIDE behind it; with `constant` or an override also a plain adapter.
        out: folder for the plain adapter; new or empty.
        constant: one λ for all gated modules in place of the gates.
        uniform: as in `fold_adapter`.
        base: folder or hub id of the base, in place of the recorded one; it is compared on it.
        compare_outputs: False compares nothing and loads no model.
        loading: how the models of the comparison are loaded.

    Raises:
        ConfigError: for a `constant` beside an override, a place that holds no adapter, or a folder that holds anything.
        GateError: for gates that read the token.
        ArtifactError: for a file that cannot be read, an adapter that is known again only on its base where that is not here,
            or a written adapter that computes something else.
    """
    require_new(Path(out))
    place = resolve(model, base, overrides=True, base_later=not base)
    override = place.override
    if constant is not None:
        if override is not None:
            raise ConfigError(f"--constant {constant:g}: {model} has an override already; give one of the two")
        override = Override(constant=constant)
        place = replace(place, ref=replace(place.ref, override=f"constant={constant!r}"))
    temperature = place.recommended_temperature if override is None else None  # shown of the gates as they are
    if override is None or place.kind == "base":
        resolve(model, expect="gated", overrides=True, base_later=True)  # says what the folder is instead
    compared = compare_outputs and (bool(base) or is_here(place.base))
    gates = read_gates(place.folder, override, beside=True)
    coefficients = constant_coefficients(gates.config, gates.weights, gates.biases, override)
    # a name that means something elsewhere: of the folder, or the hub id with its commit
    source = "@".join(filter(None, (place.hub_id or place.folder.name, place.ref.override)))
    with new_folder(Path(out)) as folder:
        config = fold_adapter(gates.adapter, coefficients, folder, uniform=uniform)
        if not compared and (unknown := next((key for key in NEED_MODEL if config.get(key)), "")):
            raise ArtifactError(
                f"{gates.adapter / ADAPTER_CONFIG}: {unknown} is set, so that the adapter is known again only on its base, "
                f"{place.base.name or 'which has no name'}; say where it is with --base"
            )
        _copy_files(gates.adapter, folder, keep_sampling=override is None)
        if temperature is not None:
            write_sampling(folder, temperature)
        agreement = _compare(place, folder, loading) if compared else None
        named = str(place.base.name or config.get("base_model_name_or_path") or "")
        recorded = str(gates.base.get("id") or config.get("base_model_name_or_path") or "")
        card = _card(source, recorded, coefficients, override or Override(), uniform, temperature, agreement)
        write_text(folder / CARD, card)
    return Exported(config, coefficients, named, agreement)


def _copy_files(adapter: Path, folder: Path, keep_sampling: bool) -> None:
    """The files beside the factors and the configuration; a tokenizer in a folder of its own lies beside the factors then."""
    kept = [name for name in adapter_files(adapter)[0] if name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, CARD)]
    if not keep_sampling and exported_sampling(read_json(adapter / SAMPLING)):
        kept.remove(SAMPLING)  # that of other λ, which an earlier export folded
    # the own folder last: its tokenizer is the one that is used
    for name in sorted(kept, key=lambda name: name.startswith(f"{TOKENIZER}/")):
        copy_file(adapter / name, folder / name.removeprefix(f"{TOKENIZER}/"))


def _compare(place: ModelSource, folder: Path, loading: Loading) -> Agreement:
    """The written adapter against the model of a place, each on a base of its own: an adapter may change the base's tensors."""
    try:
        model = open_weights(place, loading)
    except LoragateError as error:
        raise type(error)(f"{error}. --skip-comparison exports without loading the base") from error
    prompts, dtype = probing_prompts(model.config, place.adapter_config or {}), model.dtype
    expected = log_probs(model, prompts)
    del model
    gc.collect()
    plain = replace(resolve(folder, expect="adapter", base_later=True), base=place.base)
    found = compare(expected, log_probs(open_weights(plain, loading), prompts), dtype)
    require_agreement(found, "the exported adapter", str(place.ref))
    return found


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
        folded[key] = tensor if lam == 1.0 else tensor.float() * lam
    if uniform:
        config, folded = _uniform(config, folded)
    out = Path(out)
    write_factors(out, folded)
    # how Megatron laid out its layers, without which plain PEFT cannot load a configuration that names it
    config.pop("megatron_config", None)
    write_json(out / ADAPTER_CONFIG, config)
    if wrong := first_difference(config, read_adapter_config(out)):
        raise ArtifactError(f"{out / ADAPTER_CONFIG}: key {wrong[0]!r} must be {wrong[1]!r}, read back as {wrong[2]!r}")
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
    agreement: Agreement | None,
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
    if agreement is not None:
        lines += [f"Compared with `{source}` after it was written: {agreement}.", ""]
    if uniform:
        lines += ["All modules share one rank (padded with zeros) and lora_alpha / r = 1.", ""]
    if temperature is not None:
        lines += [f"Recommended sampling: {at(temperature)} (`{SAMPLING}`).", ""]
    rows = [f"| {path} | {value:.6g} |" for path, value in coefficients.items()]
    return "\n".join([*lines, "| module | λ |", "|---|---:|", *rows, ""])
