"""Reading the artifact's files strictly: every key and number is checked before anything is used.

Malformed input of any kind ends in an `ArtifactError` that names the file and key. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn

import torch
from annotated_types import Len
from safetensors import SafetensorError
from safetensors.torch import load, save

from loragate.errors import ArtifactError
from loragate.files import first_difference
from loragate.gates.adapter_files import ADAPTER_CONFIG, lost_gates
from loragate.gates.gate import GateConfig
from loragate.gates.recommended import SAMPLING, generation_settings, recommended_temperature
from loragate.validate import STRICT, Amount, Size, validate

FORMAT = "loragate"
SCHEMA_VERSION = 1
CONFIG, GATES, ADAPTER, CARD = "gate_config.json", "gates.safetensors", "adapter", "README.md"
EVIDENCE = ("parity", "selection", "training")
GLOBAL_BIAS = "global.bias"
"""The one tensor of gates of global granularity."""
_MAX_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True)
class _Open:
    """Keys that a record holds beside these are passed over: versions of one schema add some."""

    __pydantic_config__: ClassVar = {**STRICT, "extra": "ignore"}


@dataclass(frozen=True)
class _Weights(_Open):
    """Sampled weights of the unquantised base, by parameter."""

    dtype: str
    values: dict[str, Annotated[list[float], Len(1)]]


@dataclass(frozen=True)
class _Base(_Open):
    id: str
    config_sha256: str
    weights: _Weights
    revision: str | None = None
    quantization: str | None = None


@dataclass(frozen=True)
class _Adapter(_Open):
    sha256: str


@dataclass(frozen=True)
class _Sampling(_Open):
    temperature: Amount


@dataclass(frozen=True)
class _Config(_Open):
    """gate_config.json, as far as a reader relies on it; artifacts of earlier versions have no stop_token_ids, no sampling."""

    gate: GateConfig
    k: Size | None
    base: _Base
    adapter: _Adapter
    modules: Annotated[list[str], Len(1)]
    gates_sha256: str
    stop_token_ids: list[Size] | None = None
    sampling: _Sampling | None = None


def read_gate_config(folder: Path) -> dict[str, Any]:
    """gate_config.json as a checked dictionary; generation_config.json beside it says the same or is refused.

    Raises:
        ArtifactError: naming the file, the key, what was found and what was expected.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise ArtifactError(_absent(folder))
    record = _read_json(path)
    if record.get("format") != FORMAT:
        _fail(path, f"key 'format' must be {FORMAT!r}, found {record.get('format')!r}; this is not a gated adapter")
    version = record.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):  # True == 1
        newer = isinstance(version, int) and not isinstance(version, bool) and version > SCHEMA_VERSION
        way_out = (
            "upgrade loragate: pip install -U loragate" if newer else "the file was changed; fetch the artifact again"
        )
        _fail(
            path,
            f"schema version {version!r} is not known to this loragate (it reads version {SCHEMA_VERSION}); {way_out}",
        )
    # what is returned is the record as it stands: keys of other versions, and the free-form evidence, are kept
    config = validate(_Config, record, str(path), ArtifactError)
    # validation takes a default for what is missing: today's, which need not be that of the training
    for field in fields(GateConfig):
        if field.name not in record["gate"]:
            _fail(path, f"the key 'gate.{field.name}' is missing")
    if len(set(config.modules)) != len(config.modules):
        _fail(path, "modules must be distinct names")
    _check_sampling(folder / SAMPLING, recommended_temperature(record))
    return record


def _check_sampling(path: Path, temperature: float | None) -> None:
    """Refuse a generation config that says another thing than the record: programs would sample by one or the other."""
    if temperature is None:
        if path.exists():
            _fail(path, f"{CONFIG} recommends no sampling, so this file would have no effect; delete it")
        return
    if not path.is_file():
        _fail(path, f"is missing, but {CONFIG} recommends temperature {temperature:g}; fetch the artifact again")
    found, expected = _read_json(path), generation_settings(temperature)
    found.pop("transformers_version", None)
    if difference := first_difference(expected, {key: found.get(key) for key in expected}):
        key, wanted, said = difference
        _fail(
            path,
            f"key {key!r} must be {wanted!r}, found {said!r}: {CONFIG} recommends temperature {temperature:g}; one of the "
            "two files was changed, fetch the artifact again",
        )
    if unknown := next((key for key in found if key not in expected), ""):
        _fail(path, f"unknown key {unknown!r} ({found[unknown]!r}); known are {', '.join(expected)}")


def read_tensors(folder: Path, record: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of gates.safetensors: hash, names, dtype, rank and finiteness checked.

    Raises:
        ArtifactError: naming the tensor and what is wrong with it.
    """
    path = folder / GATES
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror}); the folder is incomplete") from error
    # the bytes that are hashed are the bytes that are parsed: the file is read once
    found = hashlib.sha256(data).hexdigest()
    if found != record["gates_sha256"]:
        _fail(
            path,
            f"its sha256 is {found[:12]}…, but {CONFIG} says {record['gates_sha256'][:12]}…; "
            "the file was changed or is damaged, fetch the artifact again",
        )
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise ArtifactError(f"{path}: not a readable safetensors file ({error})") from error
    # eight bytes of length, then the header as JSON; safetensors has just parsed it, but gives no metadata
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    if (header.get("__metadata__") or {}).get("gate") != gate_metadata(record["gate"])["gate"]:
        _fail(
            folder / CONFIG,
            f"key 'gate' is not what {GATES} was trained with; one of the two files was changed, fetch the artifact again",
        )
    granularity = record["gate"]["granularity"]
    kinds = ("weight", "bias") if granularity == "token" else ("bias",)
    expected = {f"{path}.{kind}" for path in record["modules"] for kind in kinds}
    if granularity == "global":
        expected = {GLOBAL_BIAS}
    if missing := sorted(expected - set(tensors)):
        _fail(path, f"tensor {missing[0]} is missing")
    if extra := sorted(set(tensors) - expected):
        _fail(path, f"tensor {extra[0]} belongs to no gate of {CONFIG}")
    for key, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            _fail(path, f"{key} has dtype {str(tensor.dtype).removeprefix('torch.')}, expected float32")
        if tensor.dim() != 1:
            _fail(path, f"{key} has shape {tuple(tensor.shape)}, expected one dimension")
        if not bool(torch.isfinite(tensor).all()):
            _fail(path, f"{key} contains NaN or infinity")
    return tensors


def gate_metadata(gate: dict[str, Any]) -> dict[str, str]:
    """The header that ties gates.safetensors to its settings, so that neither file can be changed alone."""
    return {"format": "pt", "gate": json.dumps(gate, sort_keys=True)}


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], gate: dict[str, Any]) -> None:
    """Equal gates as equal bytes, which safetensors alone does not give: it writes its metadata in a random order."""
    data = save(tensors, gate_metadata(gate))
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
    # sorting changes no length, so that the offsets inside hold; padded with blanks as before
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
    path.write_bytes(data[:8] + text + data[8 + size :])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            _fail(path, "larger than 16 MiB; this is not a configuration")
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant, parse_int=_whole)
    # not UTF-8, not JSON, NaN or a number without end; a list in a list in a list …
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: not valid JSON ({error})") from error
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from error
    if not isinstance(record, dict):
        _fail(path, f"must hold a JSON object, found {type(record).__name__}")
    return record


def _absent(folder: Path) -> str:
    if lost_gates(folder):
        return (
            f"{folder} was written by save_pretrained from a gated model, which loses what makes its gates act: their range "
            "and what they belong to. Write it again from the model in memory with loragate.save_gates(model, folder). "
            "Without that model, load the adapter, attach_gates with the settings the gates were trained with, and give "
            "peft.set_peft_model_state_dict the tensors of adapter_model.safetensors"
        )
    if (folder / ADAPTER_CONFIG).is_file():
        return (
            f"{folder} is a plain PEFT adapter without gates; calibrate it first: "
            f"loragate calibrate --adapter {folder} --data FILE --probe FILE --out DIR"
        )
    if folder.is_dir():
        return f"{folder} holds no {CONFIG}; give the folder that `loragate calibrate --out` wrote"
    return f"{folder} does not exist; give the folder that `loragate calibrate --out` wrote"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")


def _whole(text: str) -> int:
    if abs(number := int(text)) >= 2**63:
        raise ValueError("a whole number of more than 64 bits")
    return number


def _fail(path: Path, message: str) -> NoReturn:
    raise ArtifactError(f"{path}: {message}")
