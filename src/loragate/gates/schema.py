"""The files of a gated folder and of a plain adapter, read strictly: every key and number is checked before it is used.

Malformed input of any kind ends in an `ArtifactError` that names the file and key. Knows no PEFT and no model.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import math
import pickle
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, NoReturn

import torch
from annotated_types import Len
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save, save_file

from loragate.errors import ArtifactError
from loragate.files import first_difference, write_atomically
from loragate.gates.gate import GateConfig
from loragate.gates.recommended import SAMPLING, generation_settings, recommended_temperature
from loragate.validate import STRICT, NonNegativeFloat, NonNegativeInt, validate

FORMAT = "loragate"
SCHEMA_VERSION = 1
CONFIG, GATES, ADAPTER, CARD = "gate_config.json", "gates.safetensors", "adapter", "README.md"
EVIDENCE = ("parity", "selection", "training")
GLOBAL_BIAS = "global.bias"
"""The one tensor of gates of global granularity."""
_MAX_CONFIG_BYTES = 16 << 20
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLED_WEIGHTS = "adapter_model.bin"
"""The weights as PEFT wrote them before safetensors; read without running what a pickle may hold, never written."""
TOKENIZER = "tokenizer"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")  # a folder with one of them has a tokenizer
_KEPT_FOLDERS = (TOKENIZER, "additional_chat_templates")
# what a program could run when it reads them, and the weights of something else
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npz")
_OTHER_WEIGHTS = (".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".npy", ".distcp")
# what is given away, by the file's own name; all else that lies there stays: data, logs and settings of a training among it
LICENSES = ("LICEN[CS]E*", "NOTICE*")
_GIVEN_AWAY = (
    *(ADAPTER_CONFIG, ADAPTER_WEIGHTS, CARD, SAMPLING, *LICENSES, "*.jinja", "chat_template.json"),
    *("tokenizer*.json", "tokenizer.model*", "*.model", "*.spm", "*.tiktoken", "tekken.json", "tokenization_*.py"),
    *("vocab*.json", "vocab*.txt", "vocab.bpe", "merges*.txt", "special_tokens_map.json", "added_tokens.json"),
    *("normalizer.json", "processor_config.json", "preprocessor_config.json"),
)
PREFIX = "base_model.model."
"""What PEFT puts before the base's own module names in its files."""
KEYS_NEEDING_MODEL = ("modules_to_save", "target_parameters", "trainable_token_indices")
"""Keys of adapter_config.json with which an adapter is known again in memory alone."""
FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
"""What PEFT calls the factors of a LoRA layer."""
# an adapter's name among its factors, which PEFT leaves out of its files and takes from those of others
_NAMED = re.compile(r"(?<=\.)(lora_[A-Za-z_]+)\.(?!(?:weight|bias)$)[A-Za-z0-9_-]+(?=\.weight$|$)")
_FAULTY = "the disk or its file system may be faulty: write to another one"


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
    rope: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Adapter(_Open):
    sha256: str


@dataclass(frozen=True)
class _Sampling(_Open):
    temperature: NonNegativeFloat


@dataclass(frozen=True)
class _Config(_Open):
    """gate_config.json, as far as a reader relies on it; earlier versions wrote no stop_token_ids, sampling or rope."""

    gate: GateConfig
    k: NonNegativeInt | None
    base: _Base
    adapter: _Adapter
    modules: Annotated[list[str], Len(1)]
    gates_sha256: str
    stop_token_ids: list[NonNegativeInt] | None = None
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


def tensor_bytes(tensors: dict[str, torch.Tensor], gate: dict[str, Any]) -> bytes:
    """gates.safetensors: equal gates as equal bytes, which safetensors alone does not give: its metadata have a random order."""
    data = save(tensors, gate_metadata(gate))
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
    # sorting changes no length, so that the offsets inside hold; padded with blanks as before
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
    return data[:8] + text + data[8 + size :]


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
            f"{folder} holds a gated adapter as PEFT writes it into a trainer's checkpoint, without what makes its gates act: "
            "their range and what they belong to. Write it again from the model in memory with loragate.save_gates(model, "
            "folder). Without that model, load the adapter, attach_gates with the settings the gates were trained with, and "
            "give peft.set_peft_model_state_dict the tensors of adapter_model.safetensors"
        )
    if (folder / ADAPTER_CONFIG).is_file():
        return (
            f"{folder} is a plain PEFT adapter without gates; calibrate it first: "
            f"loragate calibrate --adapter {folder} --data FILE --dev-data FILE --out DIR. Without gates it can be exported under "
            "one λ (--constant 0.5), or in another form (--to merged, gguf or mlx)"
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


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of an adapter of any kind.

    Raises:
        ArtifactError: for a file that is no adapter's configuration.
    """
    path = folder / ADAPTER_CONFIG
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        record["peft_type"]  # which every adapter of PEFT has; a list or a text raises here, too
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{path}: not a readable configuration of an adapter ({error!r})") from error
    return dict(record)


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(configuration, tensors by PEFT's names, as of `without_adapter_name`) of a LoRA adapter.

    Raises:
        ArtifactError: for a file that cannot be read, or a configuration without rank or alpha.
    """
    config = read_adapter_config(folder)
    for key in ("r", "lora_alpha"):
        if key not in config:
            raise ArtifactError(
                f"{folder / ADAPTER_CONFIG}: not a readable configuration of a LoRA adapter (no key {key!r})"
            )
    path = folder / ADAPTER_WEIGHTS
    if (folder / PICKLED_WEIGHTS).is_file() and not path.is_file():  # PEFT's own order
        state = _read_pickled(folder / PICKLED_WEIGHTS)
        return config, {without_adapter_name(key): tensor for key, tensor in state.items()}
    try:
        return config, {without_adapter_name(key): tensor for key, tensor in load_file(str(path)).items()}
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ArtifactError(f"{path}: not a readable safetensors file ({error})") from error


def load_pickled(path: Path) -> Any:
    """What a file of `torch.save` holds, without running anything that stands in it.

    Raises:
        ArtifactError: for a damaged file, and one that holds more than tensors and plain values.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises anything
        said = f": {(str(error).splitlines() or [type(error).__name__])[0]:.200}"
        if isinstance(error, pickle.UnpicklingError):  # torch's text is advice to load it all the same
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            said = f", which can run code: it names {named[1]}" if named else ", which can run code"
        raise ArtifactError(
            f"{path}: not a readable file of tensors (damaged, or a pickle of more than tensors{said})"
        ) from error


def _read_pickled(path: Path) -> dict[str, torch.Tensor]:
    found = load_pickled(path)
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        _fail(path, "must hold tensors by their names; convert it with the program that wrote it")
    return {str(key): value for key, value in found.items()}


def lost_gates(folder: Path) -> bool:
    """Whether a folder holds an adapter that PEFT wrote while it was gated."""
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        return False
    try:
        with safe_open(str(path), framework="pt") as file:
            return any(".lora_gate." in key for key in file.keys())  # noqa: SIM118
    except (SafetensorError, OSError):
        return False


def own_tokenizer(folder: Path) -> Path | None:
    """Where an adapter's folder keeps its tokenizer: in tokenizer/, else beside the factors; None where it has none."""
    places = (folder / TOKENIZER, folder)
    return next((place for place in places if any((place / file).is_file() for file in _TOKENIZER_FILES)), None)


def adapter_files(folder: Path) -> list[str]:
    """Every file of an adapter's folder that its reader may need, known here or not, as paths inside it.

    These are configuration, weights, card, the files of any tokenizer, chat templates. Left out are pickles (a trainer's states
    among them), weights of something else, hidden files, and folders beside those of the tokenizer: checkpoints, records of runs.
    """
    kept = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.name in _KEPT_FOLDERS else []
            kept += [file.relative_to(folder).as_posix() for file in inside if not _is_left(file.name)]
        elif path.is_file() and (path.name == ADAPTER_WEIGHTS or not _is_left(path.name)):  # a link may lead nowhere
            kept.append(path.name)
    return kept


def given_away(folder: Path) -> list[str]:
    """Those of `adapter_files` that are for others: what is known to be read, and nothing of a training."""
    return [file for file in adapter_files(folder) if is_named(file, _GIVEN_AWAY)]


def is_named(file: str, patterns: Iterable[str]) -> bool:
    """Whether the last part of a path is one of the patterns."""
    return any(fnmatchcase(PurePosixPath(file).name, pattern) for pattern in patterns)


def _is_left(name: str) -> bool:
    return name.startswith(".") or name.lower().endswith((*_PICKLES, *_OTHER_WEIGHTS))


def copy_adapter(source: Path, into: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Copy an adapter's folder byte for byte and read the copy back; `adapter_files` says what is left out.

    Args:
        source: folder of a plain adapter.
        into: folder of the copy.
        weights: tensors to write in place of the weights file, such as those of a pickle.

    Raises:
        ArtifactError: where the copy is not what it was made of.
    """
    kept = adapter_files(source)
    if weights is not None:
        write_factors(into, weights)
        kept = [name for name in kept if name != ADAPTER_WEIGHTS]
    for name in kept:
        copy_file(source / name, into / name)


def copy_file(source: str | Path, target: str | Path) -> None:
    """Copy a file byte for byte, whole or not at all, and read the copy back; raises ArtifactError where it differs."""
    write_atomically(Path(target), partial(shutil.copyfile, source))
    if not filecmp.cmp(source, target, shallow=False):
        _fail(Path(target), f"is not what {source} holds; {_FAULTY}")


def without_adapter_name(key: str) -> str:
    """A tensor's name as PEFT writes it: without an adapter's own name, as in lora_A.default.weight of other programs."""
    return _NAMED.sub(r"\1", key)


def factor_of(key: str) -> tuple[str, str]:
    """(module path, "lora_A", "lora_B" or one of their kin for embeddings) of a tensor's name; two empty texts for any other."""
    # an embedding's factors are bare parameters, without .weight; PEFT leaves the adapter's name out of its files
    found = re.fullmatch(r"(.+)\.(lora_(?:embedding_)?[AB])(?:\.weight)?", key)
    return ("", "") if found is None else (found[1].removeprefix(PREFIX), found[2])


def write_factors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """adapter_model.safetensors of a folder, written whole or not at all, and read back; tensors by PEFT's names.

    Raises:
        ArtifactError: where the file does not hold the tensors to the bit.
    """
    path = folder / ADAPTER_WEIGHTS
    # each with memory of its own: safetensors refuses tied weights, one tensor under several names
    own = {key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
    write_atomically(path, lambda temporary: save_file(own, str(temporary), metadata={"format": "pt"}))
    try:
        found = load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"{path}: cannot be read back ({error}); {_FAULTY}") from error
    wrong = next((key for key in own if key not in found or not is_bitwise_equal(own[key], found[key])), None)
    if wrong is not None or len(found) != len(own):
        _fail(path, f"{wrong or 'a tensor'} is not what was to be written; {_FAULTY}")


def is_bitwise_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors on the CPU have one dtype, one shape and the same bits; NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    raw = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*raw)


def lora_scaling(config: Mapping[str, Any], path: str) -> tuple[Any, Any, float]:
    """(rank, alpha, scaling) of a module by PEFT's rules: α/r, or α/√r with rsLoRA.

    Raises:
        ArtifactError: for a rank or alpha that is not a number.
    """
    rank = _by_pattern(config.get("rank_pattern") or {}, path, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern") or {}, path, config["lora_alpha"])
    try:
        return rank, alpha, float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ArtifactError(f"{ADAPTER_CONFIG}: rank or alpha of {path} is not a number ({error})") from error


def _by_pattern(pattern: Mapping[str, Any], path: str, default: Any) -> Any:
    """PEFT's rule: the first key that matches the end of the path, from a dot on, as a regular expression."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", path):
            return value
    return default
