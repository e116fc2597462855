"""The adapter from its files alone: are they whole, do they fit the base's configuration, what delta does each module have.

Nothing that an adapter's folder holds is an exception here: everything is a finding. Weights of the base are not read; its
configuration makes a model without weights, on which PEFT puts the adapter by names and shapes. `tokens.py` compares tokenizers
and chat templates.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from loragate.doctor.record import FILE, OUTPUT_NAMES, Examination, Measures, Module, Static, build_examination
from loragate.doctor.tokens import examine_tokens
from loragate.errors import ArtifactError, ConfigError, GateError, LoragateError
from loragate.files import require_empty_folder, write_json
from loragate.gates import examine_adapter
from loragate.gates.adapter_folder import AdapterFolder, UnusableAdapterError, read_adapter_folder
from loragate.gates.adapter_rules import Finding, config_errors, find_adapted_parameters
from loragate.gates.eligibility import (
    GATEABLE_STORAGE,
    UNGATEABLE_STORAGE,
    Verdict,
    describe_storage,
    no_variant_reason,
    quantization_of_config,
    require_trainable,
)
from loragate.gates.schema import factor_of, lora_scaling, read_adapter, read_tensors
from loragate.gates.strength import kind_of, layer_of
from loragate.models import ModelSource, base_config, explained, is_adapter, is_gated, plain_adapter, resolve
from loragate.models.loading import DEFAULT_LOADING, require_causal
from loragate.models.peft_loading import (
    AdapterMismatchError,
    check_adapter_fits,
    find_unknown_config_keys,
    find_unmatched_patterns,
)
from loragate.models.settings import Loading
from loragate.models.source import ModelRef, require_here
from loragate.training.plan import GIB, estimate

_FETCH = "fetch the folder again, or write it again with what made it"


def examine_files(
    adapter: str,
    base: str = "",
    out: str | Path | None = None,
    loading: Loading = DEFAULT_LOADING,
    system: str = "none",
) -> Examination:
    """The quick examination: `examine_static` as a record, written to `out` where that is given.

    This module imports no engine and no evaluation, as reading files takes less time than importing those.

    Raises:
        ConfigError: as `examine_static`.
    """
    if out is not None:
        require_empty_folder(Path(out), *OUTPUT_NAMES)
    began = time.monotonic()
    measured, found = examine_static(adapter, base, loading, system)
    examination = build_examination(found, Measures(measured), seconds={"static": round(time.monotonic() - began, 3)})
    if out is not None:
        write_json(Path(out) / FILE, examination.to_json())
    return examination


def examine_static(
    adapter: str, base: str = "", loading: Loading = DEFAULT_LOADING, system: str = "none"
) -> tuple[Static, list[Finding]]:
    """See `Static`; in seconds, without weights of the base. `system` is that of `ExamSettings`.

    Raises:
        ConfigError: for a place that holds no adapter, and for a `base` that is none.
    """
    place, contents, found = _read(adapter, base)
    static = _of_files(
        adapter,
        place.base.name if place else base or str(contents.config.get("base_model_name_or_path") or ""),
        contents,
    )
    if place is None:
        return static, found
    if place.kind == "gated":
        stored: Any = place.gates
        static = replace(
            static,
            gates={
                **{key: stored["gate"][key] for key in ("lower", "upper", "granularity")},
                "modules": len(stored["modules"]),
                "off": bool(place.inactive_gates_reason),
                "temperature": place.recommended_temperature,
            },
        )
    try:
        place = _with_base(place, adapter, base)
        with explained("base model", place.base.name):
            config = base_config(place.base, loading.trust_remote_code)
    except LoragateError as error:
        if base:
            raise ConfigError(f"--base {base}: {error}") from error
        said, _, _ = str(error).partition("; say where it is with")
        remedy = "say where it is with --base; without it nothing but the files of the adapter was examined"
        found.append(Finding("base-unreachable", "warning", said, remedy, {"base": place.base.name}))
        return static, found
    static, more, embeddings = _on_base(static, place.as_plain_adapter, config, loading)
    found += more
    measured, more = examine_tokens(place, loading, embeddings, system)
    return replace(static, **measured), [*found, *more]


def prevents_loading(findings: Sequence[Finding]) -> bool:
    """Whether the parts that need the model cannot run."""
    return any(one.forbids("load") or one.code == "base-unreachable" for one in findings)


# ---- the files


def _read(adapter: str, base: str) -> tuple[ModelSource | None, AdapterFolder, list[Finding]]:
    """(the place, None where its files cannot be used; the plain adapter's files; what was found in them)."""
    try:
        place = resolve(adapter, base, base_optional=True)
        if place.kind == "base":
            resolve(adapter, base, expect="adapter")  # says what it holds instead
        if place.kind == "gated":
            read_tensors(place.folder, dict(place.gates or {}))
        return place, place.adapter_contents, list(place.adapter_contents.findings)
    except UnusableAdapterError as error:
        return None, error.folder, list(error.folder.findings)
    except ConfigError:
        # a file of weights, or an adapter of another tool, without adapter_config.json
        contents = read_adapter_folder(ModelRef.parse(adapter).name)
        parts = contents.weights or any(one.code == "other-format" for one in contents.findings)
        if is_adapter(contents.path) or not parts or (contents.path / "config.json").is_file():
            raise
        return None, contents, list(contents.findings)
    except ArtifactError as error:
        folder = Path(ModelRef.parse(adapter).name)
        if not is_gated(folder):
            raise
        contents = read_adapter_folder(plain_adapter(folder))
        broken = Finding("gates-unreadable", "error", str(error), _FETCH)
        return None, contents, [broken, *contents.findings]


def _of_files(adapter: str, base: str, contents: AdapterFolder) -> Static:
    """What needs no base: numbers of the configuration, and the delta of every module whose factors can be read."""
    try:
        config, tensors = read_adapter(contents.path)
    except ArtifactError:
        config, tensors = contents.config, {}
    rank, alpha = (value if isinstance(value, int | float) else None for value in map(config.get, ("r", "lora_alpha")))
    return Static(
        adapter,
        base,
        rank=None if rank is None else int(rank),
        alpha=alpha,
        parameters=sum(value.numel() for value in tensors.values()),
        modules=() if any(config_errors(config)) else _modules(config, tensors),
        beside=contents.non_lora_changes,
    )


def _modules(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> tuple[Module, ...]:
    pairs: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for key, value in tensors.items():
        path, factor = factor_of(key)
        # fused experts share one factor, whose rows are no ranks of one delta
        fused = find_adapted_parameters(config, path)
        if path and not fused and value.dim() == 2 and value.is_floating_point():
            pairs[path][factor[-1]] = value
    found = []
    for path, pair in pairs.items():
        try:
            scale = lora_scaling(config, path)[2] if len(pair) == 2 and len(pair["A"]) == pair["B"].shape[1] else None
        except ArtifactError:
            scale = None
        if scale is None:
            continue
        norm, effective = delta_norm_and_effective_rank(pair["A"], pair["B"])
        if norm == norm:  # NaN is a finding of the files
            found.append(
                Module(path, kind_of(path), layer_of(path), len(pair["A"]), scale, abs(scale) * norm, effective, 0.0)
            )
    whole = sum(one.norm**2 for one in found)
    return tuple(replace(one, share=one.norm**2 / whole) if whole else one for one in found)


def delta_norm_and_effective_rank(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """(Frobenius norm, effective rank) of B·A for A [R, D_in] and B [D_out, R]: the latter is exp of the entropy of the squared
    singular values as shares (Roy and Vetterli 2007), 0 for a delta of zero. Exact, and no D_out × D_in matrix is made."""
    a, b = a.double(), b.double()  # in which squares of fp32 do not overflow
    # the squared singular values of B·A are the eigenvalues of Sᵀ(BᵀB)S for any root S of AAᵀ; both are [R, R]
    if not (bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())):
        return float("nan"), 0.0
    values_R, vectors_RR = torch.linalg.eigh(a @ a.T)
    root_RR = vectors_RR * values_R.clamp(min=0).sqrt()
    squares_R = torch.linalg.eigvalsh(root_RR.T @ (b.T @ b) @ root_RR).clamp(min=0)
    total = float(squares_R.sum())
    if not total > 0:
        return 0.0, 0.0
    shares_R = squares_R / total
    return total**0.5, float(torch.special.entr(shares_R).sum().exp())


# ---- the base


def _with_base(place: ModelSource, adapter: str, base: str) -> ModelSource:
    """The place with its base as a loader takes it; raises ConfigError where there is none."""
    if not place.base.name:
        raise ConfigError(f"{adapter} names no base model")
    try:
        require_here("base model", place.base.name, of_adapter=True)
    except ConfigError as error:
        raise ConfigError(
            f"the base model that {adapter} names is not here: {error}" if not base else str(error)
        ) from error
    return resolve(adapter, base)


def _on_base(
    static: Static, place: ModelSource, config: Any, loading: Loading
) -> tuple[Static, list[Finding], int | None]:
    """(what is known on this base, what was found, how many tokens it has embeddings for)."""
    name = place.base.name
    try:
        require_causal(config, name)
        bare = _build_meta_model(config, name, loading)
    except ConfigError as error:
        return static, [Finding("task-type", "error", str(error), "load it with its own class in Python")], None
    except LoragateError as error:
        return static, [Finding("base-unreachable", "warning", str(error), "say where it is with --base")], None
    rows = int(bare.get_input_embeddings().weight.shape[0])
    try:
        with explained("adapter", str(place.folder)):
            model = check_adapter_fits(_build_meta_model(config, name, loading), place.adapter)
    except AdapterMismatchError as error:
        return static, [error.finding], rows
    except Exception as error:  # PEFT raises anything for a configuration that it cannot follow
        said = (
            str(error)
            if isinstance(error, LoragateError)
            else f"{place.folder}: PEFT cannot put it on {name} ({error!r:.300})"
        )
        return static, [Finding("not-loadable", "error", said, "write it again with the PEFT of its training")], rows
    verdicts, stored = examine_adapter(model, "default"), quantization_of_config(config)
    if stored in UNGATEABLE_STORAGE:
        reason = no_variant_reason(UNGATEABLE_STORAGE[stored])
        verdicts = [replace(one, status="refuse", reason=reason) if one.status == "gate" else one for one in verdicts]
    static = replace(
        static,
        gateable=dict(Counter(verdict.status for verdict in verdicts)),
        reasons=tuple(sorted({verdict.reason for verdict in verdicts if verdict.reason})),
    )
    contents = place.adapter_contents
    found = [*find_unknown_config_keys(contents), *find_unmatched_patterns(model, contents)]
    if stored not in GATEABLE_STORAGE:
        found.append(_of_storage(name, stored))
    told = any(one.forbids("gate") for one in contents.findings)
    if not told and (reason := _not_gateable(verdicts)):
        found.append(
            Finding("not-gateable", "note", f"{place.folder} cannot be given gates: {reason}", "use it without them")
        )
    return _with_cost(static, bare, config, verdicts), found, rows


def _of_storage(name: str, stored: str) -> Finding:
    known = "its layers take none" if stored in UNGATEABLE_STORAGE else "it shows when the base is loaded"
    said = (
        f"{name} is {describe_storage(stored)} and was examined as a plain one of its configuration: whether it loads here, with "
        f"the adapter, depends on the package that unpacks it. On gates: {known}"
    )
    remedy = "loragate doctor ADAPTER --data FILE loads it; or name the same base in plain weights with --base"
    return Finding("base-storage", "note", said, remedy, {"base": name, "storage": stored})


def _build_meta_model(config: Any, name: str, loading: Loading) -> Any:
    """The base on the meta device."""
    with explained("base model", name), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=loading.trust_remote_code)


def _not_gateable(verdicts: Sequence[Verdict]) -> str:
    try:
        require_trainable(list(verdicts))
    except GateError as error:
        return str(error)
    # one refused module is enough, as the adapter would then act there ungated
    refused = [verdict.reason for verdict in verdicts if verdict.status == "refuse"]
    return next(iter(refused), "" if any(one.status == "gate" for one in verdicts) else verdicts[0].reason)


def _with_cost(static: Static, bare: Any, config: Any, verdicts: Sequence[Verdict]) -> Static:
    modules = [(verdict.d_in, verdict.d_out, verdict.rank) for verdict in verdicts if verdict.status == "gate"]
    if not modules:
        return static
    stored_in: Any = str(getattr(config.get_text_config(), "dtype", None) or "float32").removeprefix("torch.")
    asked: dict[str, Any] = {"adapter": modules, "base": stored_in}
    gating, lora = (estimate(bare, stage, **asked) for stage in ("calibrate", "sft"))
    lighter = estimate(bare, gradient_checkpointing=True, **asked)
    cost = {
        "gate_parameters": gating.trainable,
        "lora_parameters": lora.trainable,
        "gate_share": gating.trainable / sum(parameter.numel() for parameter in bare.parameters()),
        "tflop_per_million_tokens": gating.flops / 1e6,
        "ratio_to_lora_step": gating.flops / lora.flops,
        "peak_gib": gating.peak / GIB + 1,
    }
    sentence = f"{gating.sentence()}; with gradient checkpointing {lighter.peak / GIB + 1:.1f}"
    return replace(static, cost=cost, training=sentence)
