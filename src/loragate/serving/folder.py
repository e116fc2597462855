"""The gates of an artifact as a server needs them: read from files alone, checked before anything is activated.

`loragate.gates` ties gates to the adapter and base of a model in memory. A server holds the base in shards and packs
modules, so the same identity is checked here against the adapter's files: its hash, its modules and its sizes. A place may
carry an override of λ, as in `DIR@unit`: a virtual adapter with the tensors of DIR.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from loragate.errors import ArtifactError
from loragate.gates.config import GateConfig
from loragate.gates.eligibility import changed_base
from loragate.gates.gate import Override
from loragate.gates.override_names import split_folder
from loragate.gates.schema import ADAPTER, CONFIG, GATES, read_gate_config, read_tensors

_PREFIX = "base_model.model."
_NOT_LINEAR = ("lm_head", "embed_tokens", "wte", "experts")


@dataclass(frozen=True)
class FolderGates:
    """The checked gates of one folder.

    Attributes:
        folder: the artifact.
        adapter: the plain PEFT adapter inside.
        config: range, τ and granularity.
        weights: {module path: [d_in] fp32}; empty for module and global granularity.
        biases: {module path: [1] fp32}, one for every gated module.
        base: the record's identity of the base; empty for a plain adapter.
        digest: changes whenever gates or adapter do.
        override: what is laid over λ; None for the gates as they are.
    """

    folder: Path
    adapter: Path
    config: GateConfig
    weights: dict[str, torch.Tensor]
    biases: dict[str, torch.Tensor]
    base: dict[str, Any]
    digest: str
    override: Override | None = None


def is_gated(folder: str | Path) -> bool:
    """Whether a folder holds gates (right or wrong ones)."""
    return (Path(folder) / CONFIG).is_file()


def stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Size and time of change of every file that is served, to notice that a folder was written anew."""
    adapter = folder / ADAPTER if is_gated(folder) else folder
    files = [folder / CONFIG, folder / GATES, *sorted(adapter.glob("adapter_*"))]
    found = []
    for file in files:
        try:
            status = file.stat()
        except OSError:
            continue
        found.append((file.name, status.st_size, status.st_mtime_ns))
    return tuple(found)


def has_lambda(place: str) -> bool:
    """Whether λ has to be computed for a place: a gated folder, or a folder with an override behind it.

    Raises:
        ConfigError: for an override that is not known.
    """
    folder, override = split_folder(place)
    return override is not None or is_gated(folder)


def read_place(place: str, folder: str | Path | None = None) -> FolderGates:
    """Read and check what `has_lambda` says yes to: a gated folder, `DIR@override`, or `PLAIN@constant=C`.

    Args:
        place: as it was named.
        folder: where its files are, if they are not at the name (a hub id).

    Raises:
        ArtifactError, ConfigError: as `read_folder`, and for an override that a plain adapter cannot have.
    """
    named, override = split_folder(place)
    found = Path(folder if folder is not None else named)
    if is_gated(found) or override is None:
        return replace(read_folder(found), override=override)
    return _plain_with_constant(found, override)


def _plain_with_constant(folder: Path, override: Override) -> FolderGates:
    """A plain adapter under one λ: gates that say 1 everywhere, and the constant over them."""
    if override.constant is None:
        _fail(folder, "a plain adapter has no gates whose λ could be clipped; it takes @constant=C alone")
    adapter = _read_adapter(folder)
    return FolderGates(
        folder=folder,
        adapter=folder,
        config=GateConfig(lower=-1.0, upper=2.0, granularity="module"),
        weights={},
        biases={path: torch.zeros(1) for path in adapter.widths if path.rsplit(".", 1)[-1] not in _NOT_LINEAR},
        base={},
        digest=adapter.sha256,
        override=override,
    )


def read_folder(folder: str | Path) -> FolderGates:
    """Read and check a gated folder.

    Raises:
        ArtifactError: naming the file and what is wrong with it: schema, hash, module, shape, dtype, a number that is not
            finite, or gates of another adapter.
    """
    folder = Path(folder)
    record = read_gate_config(folder)
    config = GateConfig(**record["gate"])
    tensors = read_tensors(folder, record)
    adapter = _read_adapter(folder / ADAPTER)
    if adapter.sha256 != record["adapter"]["sha256"]:
        _fail(
            folder / CONFIG,
            f"these gates belong to another adapter (sha256 {record['adapter']['sha256'][:12]}…, {folder / ADAPTER} has "
            f"{adapter.sha256[:12]}…); fetch the artifact again",
        )
    modules = record["modules"]
    if config.target_modules is None:
        left = [path for path in adapter.widths if path not in modules and path.rsplit(".", 1)[-1] not in _NOT_LINEAR]
        if left:
            _fail(folder / CONFIG, f"no gate for module {left[0]}, which the adapter adapts")
    expected = _expected_tensors(config, modules)
    if missing := sorted(set(expected) - set(tensors)):
        _fail(folder / GATES, f"tensor {missing[0]} is missing")
    if extra := sorted(set(tensors) - set(expected)):
        _fail(folder / GATES, f"tensor {extra[0]} belongs to no gate of this adapter")
    for path in modules:
        if path not in adapter.widths:
            _fail(folder / CONFIG, f"a gate for {path}, which the adapter does not adapt")
    for name, tensor in tensors.items():
        size = adapter.widths[name.removesuffix(".weight")] if name.endswith(".weight") else 1
        if tensor.shape != (size,):
            _fail(folder / GATES, f"{name} has shape {tuple(tensor.shape)}, expected ({size},)")
    identity = [record["gates_sha256"], adapter.sha256, record["gate"]]
    return FolderGates(
        folder=folder,
        adapter=folder / ADAPTER,
        config=config,
        weights={name.removesuffix(".weight"): t for name, t in tensors.items() if name.endswith(".weight")},
        biases={path: tensors["global.bias" if config.granularity == "global" else f"{path}.bias"] for path in modules},
        base=record["base"],
        digest=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
    )


def _expected_tensors(config: GateConfig, modules: list[str]) -> list[str]:
    if config.granularity == "global":
        return ["global.bias"]
    names = [f"{path}.bias" for path in modules]
    return names + [f"{path}.weight" for path in modules] if config.granularity == "token" else names


@dataclass(frozen=True)
class _Adapter:
    widths: dict[str, int]
    sha256: str


def _read_adapter(folder: Path) -> _Adapter:
    """Input width of every module, and the same hash that `adapter_fingerprint` takes of the adapter in memory."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config_path, weights_path = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    try:
        record = json.loads(config_path.read_text(encoding="utf-8"))
        rank, alpha = record["r"], record["lora_alpha"]
        ranks, alphas = record.get("rank_pattern") or {}, record.get("alpha_pattern") or {}
        unserved = [
            key for key in ("modules_to_save", "target_parameters", "trainable_token_indices") if record.get(key)
        ]
        rooted = bool(record.get("use_rslora"))
        changed = changed_base(record.get("init_lora_weights"))
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{config_path}: not a readable configuration of a LoRA adapter ({error!r})") from error
    if unserved:
        _fail(config_path, f"{unserved[0]} is set; such adapters are neither served with gates nor exported")
    if changed:
        _fail(config_path, changed)
    try:
        state = load_file(str(weights_path))
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ArtifactError(f"{weights_path}: not a readable safetensors file ({error})") from error
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        if key.endswith((".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")):
            continue  # PEFT saves the base's own embedding beside an adapter on it, and vLLM skips it
        found = re.fullmatch(r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)(\.weight)?", key)
        if found is None:
            _fail(weights_path, f"{key} is not a tensor of a plain LoRA adapter")
        factors.setdefault(found[1].removeprefix(_PREFIX), {})[found[2]] = tensor
    digest = hashlib.sha256()
    widths: dict[str, int] = {}
    for path in sorted(factors):
        own_rank, own_alpha = _by_pattern(ranks, path, rank), _by_pattern(alphas, path, alpha)
        try:
            scaling = float(own_alpha / (math.sqrt(own_rank) if rooted else own_rank))
        except (TypeError, ZeroDivisionError) as error:
            raise ArtifactError(f"{config_path}: rank or alpha of {path} is not a number ({error})") from error
        digest.update(json.dumps([path, own_rank, own_alpha, scaling]).encode())
        for name in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
            if name in factors[path]:
                values = factors[path][name].to(torch.float32).contiguous()
                digest.update(json.dumps(list(values.shape)).encode())
                digest.update(values.numpy().tobytes())
        if "lora_A" in factors[path] and factors[path]["lora_A"].dim() == 2:
            widths[path] = factors[path]["lora_A"].shape[1]
    return _Adapter(widths, digest.hexdigest())


def _by_pattern(pattern: dict[str, Any], path: str, default: Any) -> Any:
    """PEFT's rule: the first key that matches the end of the path, from a dot on, as a regular expression."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", path):
            return value
    return default


def _fail(path: Path, message: str) -> NoReturn:
    raise ArtifactError(f"{path}: {message}")
