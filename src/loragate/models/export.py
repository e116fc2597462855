"""Gates whose λ is one number per module, folded into a plain LoRA adapter, and that in the files of the runtime that serves it.

λ·(α/r)·B(Ax) is (α/r)·(λB)(Ax): where a gate has a bias only, or one λ is laid over all, B takes it up and nothing of the
gates is left. A gate that reads the token cannot be folded: no single B equals it. Folding works on files; where the base is
here, it is loaded to compare what was written: what a reader makes of the files, with the model that they stand for.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from loragate.data import find_endings
from loragate.display import format_temperature
from loragate.errors import ArtifactError, ConfigError, GateError, LoragateError
from loragate.files import atomic_folder, read_json, require_empty_folder, write_json, write_text
from loragate.gates import GateConfig
from loragate.gates.adapter_rules import base_change_reason
from loragate.gates.artifact import write_generation_config
from loragate.gates.override import Override, constant_name
from loragate.gates.recommended import SAMPLING, exported_sampling, with_recommended
from loragate.gates.schema import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CARD,
    KEYS_NEEDING_MODEL,
    LICENSES,
    PREFIX,
    TOKENIZER,
    adapter_files,
    copy_file,
    factor_of,
    given_away,
    is_named,
    lora_scaling,
    own_tokenizer,
    read_adapter,
    read_adapter_config,
    write_factors,
)
from loragate.gates.strength import overrides_by_module
from loragate.models.folder_gates import read_gates, unreached_note
from loragate.models.loading import (
    DEFAULT_LOADING,
    base_config,
    explained,
    generation_config,
    open_tokenizer,
    open_weights,
)
from loragate.models.merge import merge_and_save
from loragate.models.output_difference import (
    OutputDifference,
    compare,
    compute_log_probs,
    is_base_available_offline,
    make_probe_prompts,
    require_agreement,
    write_tokenizer,
)
from loragate.models.runtimes import RUNTIMES
from loragate.models.settings import Loading
from loragate.models.source import ModelSource, find_gguf_in_folder, resolve


@dataclass(frozen=True)
class ExportResult:
    """What `export_adapter` wrote."""

    title: str  # what the folder holds, in a few words
    usage: str  # a command that uses it
    config: dict[str, Any]  # adapter_config.json
    coefficients: dict[str, float]  # λ of every folded module; empty for an adapter as it is
    base: str  # the base by which it was compared, or would be
    unreached: str  # what of the adapter the folded λ does not reach, in a sentence; empty for nothing
    agreement: OutputDifference | None  # with the model that it stands for; None where it was not compared
    left: tuple[str, ...] = ()  # files of the adapter's folder that are not for others and stay there


FORMS = ("peft", "merged", *RUNTIMES)
"""What an adapter can be written as."""


def export_adapter(
    model: str,
    out: str | Path,
    *,
    to: str = "peft",
    constant: float | None = None,
    uniform: bool = False,
    base: str = "",
    compare_outputs: bool = True,
    loading: Loading = DEFAULT_LOADING,
) -> ExportResult:
    """Fold the gates of a folder and write the plain adapter in one of `FORMS`, with its card.

    Where the base is here, the written folder is read by that form's reader and its log-probabilities are compared with those of
    the model that it stands for, before it gets its name.

    Args:
        model: gated folder or hub id, with @OVERRIDE behind it; with `constant` or an override, and in another form than PEFT's,
            also a plain adapter.
        to, constant, uniform, base: as `loragate export` has them.
        compare_outputs: False compares nothing and loads no model.
        loading: how the models of the comparison are loaded; its dtype is that of a merged model, its quantization that of
            the base on which a merged model's adapter is run beside it.

    Raises:
        ConfigError: for a setting without effect on this form, or a place or base that the form cannot be made of.
        GateError: for gates that read the token.
        ArtifactError: for files that cannot be read, or that compute something else.
    """
    require_empty_folder(Path(out))
    if uniform and to != "peft":
        raise ConfigError(f"--uniform has no effect with --to {to}; leave it out")
    if to == "merged" and not compare_outputs:
        raise ConfigError(
            "--skip-comparison has no effect with --to merged, which is compared while both are in memory"
        )
    if to != "merged" and loading.dtype != DEFAULT_LOADING.dtype:
        raise ConfigError(f"--dtype is that of a merged model and has no effect with --to {to}; leave it out")
    if to != "merged" and loading.quantization != DEFAULT_LOADING.quantization:
        raise ConfigError(f"--quantization measures a merged model and has no effect with --to {to}; leave it out")
    place = resolve(model, base, allow_override=True, base_optional=not base)
    override = place.override
    if constant is not None:
        if override is not None:
            raise ConfigError(f"--constant {constant:g}: {model} has an override already; give one of the two")
        override = Override(constant=constant)
        place = replace(place, ref=replace(place.ref, override=constant_name(constant)))
    temperature = place.recommended_temperature if override is None else None  # shown of the gates as they are
    as_it_is = place.kind == "adapter" and override is None and to != "peft"
    if place.kind == "base" or (override is None and not as_it_is):
        resolve(model, expect="gated", allow_override=True, base_optional=True)  # says what the folder is instead
    here = bool(base) or is_base_available_offline(place.base)
    if to != "peft" and not here:
        named = f"the base {place.base.name} is not here" if place.base.name else "the adapter names no base"
        raise ConfigError(f"--to {to} needs the base, and {named}; say where it is with --base")
    compared = compare_outputs and here
    if compared or to != "peft":
        place = replace(place, base=find_gguf_in_folder(place.base))
    adapter, coefficients, recorded = place.adapter, dict[str, float](), ""
    # every other form loads the adapter with PEFT, which changes the base as its training did, or is refused by `read_gates`
    if to in RUNTIMES and (why := base_change_reason(read_adapter_config(adapter).get("init_lora_weights"))):
        raise ArtifactError(
            f"{adapter}: {RUNTIMES[to].title} would put the adapter on another base than its own. {why}"
        )
    if not as_it_is:
        gates = read_gates(place.folder, override, allow_extra_tensors=True)
        adapter, recorded = gates.adapter, str(gates.base.get("id") or "")
        coefficients = constant_coefficients(gates.config, gates.weights, gates.biases, override)
    # a name that means something elsewhere: of the folder, or the hub id with its commit
    source = "@".join(filter(None, (place.hub_id or place.folder.name, place.ref.override)))
    with atomic_folder(Path(out)) as folder, tempfile.TemporaryDirectory(prefix="loragate-export-") as scratch:
        plain = folder if to == "peft" else Path(scratch) / "plain"
        plain.mkdir(exist_ok=True)
        one_scale = uniform or (to in RUNTIMES and bool(find_non_uniform_keys(read_adapter_config(adapter))))
        config = fold_adapter(adapter, coefficients, plain, uniform=one_scale)
        if not compared and (unknown := next((key for key in KEYS_NEEDING_MODEL if config.get(key)), "")):
            raise ArtifactError(
                f"{adapter / ADAPTER_CONFIG}: {unknown} is set, so that the adapter is known again only on its base, "
                f"{place.base.name or 'which has no name'}; say where it is with --base"
            )
        agreement, left = None, tuple[str, ...]()
        if to == "merged":
            trust = loading.trust_remote_code
            tokenizer = open_tokenizer(place, loading)  # before the weights, which may take an hour
            agreement = merge_and_save(place.base, plain, folder, loading, called=str(place.ref))
            if otherwise := write_tokenizer(tokenizer, folder):
                raise ArtifactError(
                    f"{otherwise}. Nothing was kept; export the adapter in another form, or serve it unmerged"
                )
            settings = read_json(folder / SAMPLING)
            with suppress(ConfigError):  # of a tokenizer that names no end, as the base's own settings do not either
                ends = find_endings(tokenizer, generation_config(place.base, trust), place.stop_token_ids).token_ids
                settings["eos_token_id"] = sorted(ends)  # which nothing else says of a whole model: it would never stop
            if temperature is not None:
                settings = with_recommended(settings, temperature)
            write_json(folder / SAMPLING, settings)
        elif to in RUNTIMES:
            with explained("base model", place.base.name):
                of_base = base_config(place.base, loading.trust_remote_code)
            try:
                RUNTIMES[to].write(plain, folder, of_base)
            except ArtifactError as error:
                raise ArtifactError(f"{adapter}: {error}") from error
            plain = Path(scratch) / "read"
            plain.mkdir()
            RUNTIMES[to].read(folder, plain, of_base)
        else:
            _copy_files(adapter, folder, keep_sampling=override is None)
            left = tuple(sorted({*adapter_files(adapter)} - {*given_away(adapter)}))
            if temperature is not None:
                write_generation_config(folder, temperature)
        # a merged model was compared with the folded adapter, which is compared here if anything was folded
        if compared and (to != "merged" or coefficients):
            own = replace(loading, dtype=DEFAULT_LOADING.dtype, quantization=DEFAULT_LOADING.quantization)
            folded = _compare(place, plain, own)
            agreement = agreement or folded
        named = str(place.base.name or config.get("base_model_name_or_path") or "")
        recorded = recorded or str(config.get("base_model_name_or_path") or "")
        unreached = unreached_note(place) if any(value != 1 for value in coefficients.values()) else ""
        receipt = [f"{unreached[0].upper()}{unreached[1:]}."] if unreached else []
        receipt += [f"Compared with `{source}` after it was written: {agreement}."] if agreement is not None else []
        card = _card(to, source, recorded, coefficients, override or Override(), one_scale, temperature, receipt)
        write_text(folder / CARD, card)
    title = {"peft": "a plain LoRA adapter", "merged": "the base with the adapter merged into it"}.get(to)
    usage = f"loragate generate --model {out} --prompt TEXT"
    if to == "merged" and temperature is not None:  # which nothing reads from the folder of a whole model
        usage += f" --temperature {temperature:g}"
    if to in RUNTIMES:
        title, usage = f"a LoRA adapter for {RUNTIMES[to].title}", RUNTIMES[to].usage.format(folder=out)
    return ExportResult(title or to, usage, config, coefficients, named, unreached, agreement, left)


def _copy_files(adapter: Path, folder: Path, keep_sampling: bool) -> None:
    """What is for others beside factors and configuration; a tokenizer in a folder of its own lies beside the factors then."""
    kept = [name for name in given_away(adapter) if name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, CARD)]
    # else files that the own folder does not have, of another tokenizer, would be read with it
    if own_tokenizer(adapter) == adapter / TOKENIZER:
        others = (SAMPLING, *LICENSES, "*processor_config.json")
        kept = [name for name in kept if name.startswith(f"{TOKENIZER}/") or is_named(name, others)]
    if not keep_sampling and exported_sampling(read_json(adapter / SAMPLING)):
        kept.remove(SAMPLING)  # that of other λ, which an earlier export folded
    for name in kept:
        copy_file(adapter / name, folder / name.removeprefix(f"{TOKENIZER}/"))


def _compare(place: ModelSource, folder: Path, loading: Loading) -> OutputDifference:
    """The written adapter against the model of a place, each on a base of its own: an adapter may change the base's tensors."""
    try:
        model = open_weights(place, loading)
    except GateError:  # the constant has no meaning for this adapter, compared or not
        raise
    except LoragateError as error:
        raise type(error)(
            f"{str(error).rstrip('.')}. Name another copy of the base with --base, the unquantised one where a package for this "
            "one is missing; or --skip-comparison exports without loading it"
        ) from error
    prompts, dtype = make_probe_prompts(model.config, place.adapter_config or {}), model.dtype
    expected = compute_log_probs(model, prompts)
    del model
    gc.collect()
    plain = replace(resolve(folder, expect="adapter", base_optional=True), base=place.base)
    found = compare(expected, compute_log_probs(open_weights(plain, loading), prompts), dtype)
    require_agreement(found, "the exported adapter", str(place.ref))
    return found


def describe_folded(coefficients: Mapping[str, float]) -> str:
    """The folded λ in a few words."""
    if not coefficients:
        return "as it is"
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
    laid = overrides_by_module(override or Override(), biases)
    return {path: float(laid[path](config.signed_map(bias.float()))) for path, bias in biases.items()}


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
        ArtifactError: for a file that cannot be read, a module that the adapter does not have, or one whose delta is more than
            B·A·x, and with `uniform` for adapted parameters (fused experts).
    """
    config, state = read_adapter(Path(adapter))
    if unknown := sorted(set(coefficients) - {factor_of(key)[0] for key in state}):
        raise ArtifactError(f"{adapter}: there is no factor of {unknown[0]} into which its λ could be folded")
    # a bias of B, or DoRA's magnitudes
    if more := next((key for key in state if (at := _find_module_of_extra_tensor(key)) and at in coefficients), ""):
        raise ArtifactError(
            f"{adapter}: {more} is part of a delta that no λ can be folded into: λ·B would leave it as it is"
        )
    folded = {}
    for key, tensor in state.items():
        path, group = factor_of(key)
        lam = coefficients.get(path, 1.0) if group == "lora_B" else 1.0
        # a product in 16 bits would be rounded anew; what λ = 1 leaves alone keeps bits and dtype
        folded[key] = tensor if lam == 1.0 else tensor.float() * lam
    if uniform:
        if config.get("target_parameters"):  # A has the rows of all experts, from which no rank can be read
            raise ArtifactError(
                f"{Path(adapter) / ADAPTER_CONFIG}: target_parameters is set; the factors of fused experts cannot be "
                "brought to one rank and one scale. Export it without --uniform, or as a merged model (--to merged)"
            )
        config, folded = _unify_rank_and_scale(config, folded)
    out = Path(out)
    write_factors(out, folded)
    # how Megatron laid out its layers, without which plain PEFT cannot load a configuration that names it
    config.pop("megatron_config", None)
    write_json(out / ADAPTER_CONFIG, config)
    return config


def _find_module_of_extra_tensor(key: str) -> str:
    """The module of a LoRA layer's tensor that is none of its factors; empty for any other tensor."""
    path, sign, _ = key.removeprefix(PREFIX).rpartition(".lora_")
    return path if sign and not factor_of(key)[1] else ""


def find_non_uniform_keys(config: Mapping[str, Any]) -> list[str]:
    """The keys of an adapter's configuration that say more than one rank and one α/r; empty for the plainest adapters."""
    return [key for key in ("rank_pattern", "alpha_pattern", "use_rslora") if config.get(key)]


def _unify_rank_and_scale(
    config: dict[str, Any], state: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
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
            found[key] = _padded(tensor.float() * lora_scaling(config, path)[2], 1, largest)
    plain = {"r": largest, "lora_alpha": largest, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}
    return {**config, **plain}, found


def _padded(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    shape = list(tensor.shape)  # of a convolution it has more than two dimensions
    shape[dim] = size - shape[dim]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim).contiguous()


def _card(
    to: str,
    source: str,
    base: str,
    coefficients: Mapping[str, float],
    override: Override,
    uniform: bool,
    temperature: float | None,
    receipt: list[str],
) -> str:
    base = f"`{base}`" if base else "the base named in adapter_config.json"
    made = f"written by `loragate export` from `{source}`: {describe_folded(coefficients)}"
    if to == "merged":
        lines = ["# A model with a LoRA adapter merged into it", "", f"{base} and an adapter as one model, {made}."]
    elif to in RUNTIMES:
        runtime = RUNTIMES[to]
        lines = [f"# LoRA adapter for {runtime.title}", "", f"A LoRA adapter for {base}, {made}.", ""]
        lines += ["```sh", runtime.usage.format(folder="THIS_FOLDER"), "```"]
    else:
        lines = ["# LoRA adapter with folded gates", "", f"A plain PEFT LoRA adapter for {base}, {made}."]
        lines[-1] += " Any program that reads PEFT LoRA adapters serves it; no loragate is needed."
    if override.constant is not None:
        where = "every gated module" if override.part is None else f"{override.part}; it is 1 elsewhere"
        lines += [
            "",
            f"λ is one constant, {override.constant:g}, laid over {where}. Learned gates, if the source had any, are ",
        ]
        lines[-1] += "not in here."
    elif coefficients:
        lines += ["", "It computes what the gated adapter computes, up to rounding in fp32: λ·B replaces B."]
    for text in receipt:
        lines += ["", text]
    if uniform:
        lines += ["", "All modules share one rank (padded with zeros) and lora_alpha / r = 1."]
    if temperature is not None:
        lines += [
            "",
            f"Recommended sampling: {format_temperature(temperature)}" + (f" (`{SAMPLING}`)." if to == "peft" else "."),
        ]
    if coefficients:
        rows = [f"| {path} | {value:.6g} |" for path, value in coefficients.items()]
        lines += ["", "| module | λ |", "|---|---:|", *rows]
    return "\n".join([*lines, ""])
