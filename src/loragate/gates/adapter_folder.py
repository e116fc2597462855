"""What a folder of a PEFT adapter holds, told from its files alone: before a model is loaded, and whatever state it is in.

`read_adapter_folder` never raises for what it finds: everything that is missing, damaged, of another tool or out of the ordinary
becomes a `Finding`, and `AdapterFolder.require_usable` refuses the folder by the first of them that forbids its use. It also lists
what the adapter changes beside LoRA's factors A and B: λ does not reach that, so λ = 0 is not the base then.

Knows no PEFT and no model, so that it costs one pass over the factors; whether they fit a base, `models.peft_loading` tells.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from loragate.errors import ArtifactError
from loragate.gates.adapter_rules import (
    Finding,
    Purpose,
    TensorSpecs,
    apply_rules,
    read_name_list,
    split_factor_key,
    tensor_kind,
)
from loragate.gates.schema import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PICKLED_WEIGHTS, load_pickled

_LFS = b"version https://git-lfs"
_FETCH = "fetch the files themselves: git lfs pull, or `hf download`"
_FOREIGN_KEYS = {
    r"\.lora_[ab]$|\.lora_[ab]\.weight$": "MLX or torchtune",
    r"\.lora_(?:up|down)\.weight$|^lora_(?:unet|te)": "kohya's or diffusers' tools",
    r"^(?:module\.|_fsdp_wrapped_module\.|_orig_mod\.)": "a checkpoint of a wrapped model",
    r"^blk\.\d+\.": "llama.cpp",
}
_MLX = (
    "fuse it with mlx_lm.fuse, or write its lora_a and lora_b transposed as lora_A.weight and lora_B.weight into "
    "adapter_model.safetensors, with lora_alpha = scale · rank"
)
# files that other tools leave where PEFT's weights would be: {patterns: (what they are, what to do)}
_FOREIGN_FILES: dict[tuple[str, ...], tuple[str, str]] = {
    ("adapter_model*-of-*", "adapter_model*.index.json"): (
        "weights in shards, which PEFT does not read",
        "join them: load every shard with safetensors.torch.load_file and write one adapter_model.safetensors",
    ),
    ("adapters.safetensors", "adapters.npz"): ("an adapter in MLX's form, which PEFT does not read", _MLX),
    ("*.gguf", "ggml-adapter-model.bin"): (
        "an adapter for llama.cpp, which PEFT does not read",
        "take the PEFT adapter that it was converted from",
    ),
    ("adapter_*.pt",): (
        "an adapter in torchtune's own form, which PEFT does not read",
        "have torchtune write it in PEFT's form (save_adapter_weights_only with the HF checkpointer)",
    ),
    ("pytorch_lora_weights.*",): (
        "an adapter of diffusers, which is no language model's",
        "give a PEFT adapter of a causal language model",
    ),
    ("pytorch_model_fsdp*",): (
        "a checkpoint in FSDP's shards",
        "merge it with `accelerate merge-weights`, then save the adapter with save_pretrained",
    ),
    ("global_step*",): ("a checkpoint of DeepSpeed", "collect its weights with the zero_to_fp32.py beside them"),
    ("model*.safetensors",): (
        "the weights of a whole model",
        "give the folder of the adapter, or make one of a fine-tune with mergekit-extract-lora",
    ),
}

_ZERO3 = (
    "DeepSpeed ZeRO-3 writes such files where weights are not gathered: save with stage3_gather_16bit_weights_on_model_save, or "
    "collect the checkpoint with zero_to_fp32.py"
)
_PLAIN = "take the factors in fp32, bf16 or fp16 from the tool that quantised them"
_DIVERGED = "the training diverged; take an earlier checkpoint, or train again with a lower learning rate"


class UnusableAdapterError(ArtifactError):
    """An adapter's folder that cannot be used; `folder` has all findings."""

    def __init__(self, message: str, folder: AdapterFolder) -> None:
        super().__init__(message)
        self.folder = folder


@dataclass(frozen=True)
class AdapterFolder:
    """The files of an adapter, as far as they can be read."""

    path: Path
    config: dict[str, Any]  # adapter_config.json; empty where it cannot be read
    files: tuple[str, ...]  # names of those directly in the folder
    weights: Path | None  # the file that holds the tensors
    tensors: TensorSpecs  # empty where they cannot be read
    non_lora_changes: tuple[str, ...]  # beside LoRA's factors, in words; where it is not empty, λ = 0 is not the base
    findings: tuple[Finding, ...]  # errors first

    def require_usable(self, purpose: Purpose = "load") -> None:
        """Refuse the folder for a purpose ("load", "gate" or "serve"): UnusableAdapterError with the first finding that does."""
        found = [one for one in self.findings if one.forbids(purpose)]
        if found:
            more = f" ({len(found) - 1} more faults: loragate doctor --quick lists them)" if len(found) > 1 else ""
            raise UnusableAdapterError(f"{found[0]}{more}", self)

    @property
    def base_weight_keys(self) -> list[str]:
        """Keys of tensors that go into the base's own weights when the adapter is loaded, where nothing can switch them off."""
        copies = read_name_list(self.config, "modules_to_save")
        return [key for key in self.tensors if tensor_kind(key, copies) not in ("factor", "copy", "token")]


def read_adapter_folder(path: str | Path) -> AdapterFolder:
    """Everything that an adapter's files tell; no fault of theirs is an exception."""
    folder = Path(path)
    try:
        entries = sorted(one for one in folder.iterdir() if one.exists())  # a link may lead nowhere
        stamps = tuple((one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in entries)
    except (OSError, ValueError) as error:
        absent = Finding(
            "weights-absent", "error", f"{folder} cannot be read ({error})", "give the folder of an adapter"
        )
        return AdapterFolder(folder, {}, (), None, {}, (), (absent,))
    return _inspect_folder(folder, stamps)


@lru_cache(maxsize=16)
def _inspect_folder(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> AdapterFolder:
    """Of one state of a folder; a command asks several times."""
    names = tuple(name for name, _, _ in stamps)
    config, found = _read_config(folder, names)
    weights, tensors, more = _read_weights(folder, names)
    found += more
    beside: tuple[str, ...] = ()
    if config:
        beside, judged = apply_rules(folder, config, tensors)
        found += judged
    order = {"error": 0, "warning": 1, "note": 2}
    found = sorted(found, key=lambda one: order[one.severity])
    return AdapterFolder(folder, config, names, weights, tensors, beside, tuple(found))


# ---- the configuration


def _error(code: str, message: str, remedy: str) -> list[Finding]:
    return [Finding(code, "error", message, remedy)]


def _read_config(folder: Path, names: tuple[str, ...]) -> tuple[dict[str, Any], list[Finding]]:
    path = folder / ADAPTER_CONFIG
    if ADAPTER_CONFIG not in names:
        return {}, _error(
            "config-unreadable",
            f"{folder} holds no {ADAPTER_CONFIG}",
            "give the folder that PEFT's save_pretrained wrote",
        )
    again = "fetch the adapter again, or write it with PEFT's save_pretrained"
    try:
        data = path.read_bytes()
        if data.startswith(_LFS):
            return {}, _error("other-format", f"{path} is a Git LFS pointer, not the file itself", _FETCH)
        record = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        return {}, _error(
            "config-unreadable", f"{path}: not a readable configuration of an adapter ({error!r:.200})", again
        )
    if not isinstance(record, dict):
        what = f"expected a JSON object, found a {type(record).__name__}"
        return {}, _error("config-unreadable", f"{path}: not a readable configuration of an adapter ({what})", again)
    if "peft_type" not in record:
        if {"fine_tune_type", "lora_parameters", "lora_layers"} & record.keys():
            return {}, _error("other-format", f"{path} is the configuration of an MLX adapter", _MLX)
        found = f"no key 'peft_type' (it has {', '.join(list(record)[:4]) or 'none at all'})"
        return {}, _error("config-unreadable", f"{path}: not a readable configuration of an adapter ({found})", again)
    kind = record["peft_type"]
    if kind != "LORA":
        spelling = isinstance(kind, str) and kind.upper() == "LORA"
        remedy = "write it as 'LORA'" if spelling else "gates need a LoRA adapter"
        return {}, _error("other-format", f"{path}: peft_type is {kind}", remedy)
    return record, []


# ---- the weights


def _read_weights(folder: Path, names: tuple[str, ...]) -> tuple[Path | None, TensorSpecs, list[Finding]]:
    """(the file, {key: (dtype, shape)}, what is wrong with them); one pass over the values."""
    name = next((one for one in (ADAPTER_WEIGHTS, PICKLED_WEIGHTS) if one in names), None)
    if name is None:
        return None, {}, [_weights_absent_finding(folder, names)]
    path = folder / name
    again = "fetch the adapter again, or have its training write it again"
    try:
        with path.open("rb") as file:
            if file.read(len(_LFS)) == _LFS:
                return path, {}, _error("other-format", f"{path} is a Git LFS pointer, not the file itself", _FETCH)
        if name == ADAPTER_WEIGHTS:
            with safe_open(str(path), framework="pt") as stored:
                keys = list(stored.keys())
                return path, *_inspect_tensors(path, ((key, stored.get_tensor(key)) for key in keys))
        state = load_pickled(path)
    except (SafetensorError, OSError) as error:
        return path, {}, _error("weights-absent", f"{path}: not a readable safetensors file ({error})", again)
    except ArtifactError as error:
        remedy = "have the tool that wrote it save the adapter with PEFT's save_pretrained"
        return path, {}, _error("other-format", str(error), remedy)
    if not (isinstance(state, dict) and state and all(isinstance(one, torch.Tensor) for one in state.values())):
        held = ", ".join(map(str, list(state)[:3])) if isinstance(state, dict) else type(state).__name__
        message = f"{path}: expected tensors by their names, found {held or 'nothing'}"
        remedy = "save the adapter alone, with PEFT's save_pretrained"
        return path, {}, _error("other-format", message, remedy)
    return path, *_inspect_tensors(path, ((str(key), value) for key, value in state.items()))


def _weights_absent_finding(folder: Path, names: tuple[str, ...]) -> Finding:
    """The finding where neither of PEFT's files of weights is there."""
    for patterns, (what, remedy) in _FOREIGN_FILES.items():
        if found := sorted(one.name for pattern in patterns for one in folder.glob(pattern)):
            message = f"{folder} holds {what} ({found[0]}{f' and {len(found) - 1} more' if len(found) > 1 else ''})"
            return Finding("other-format", "error", message, remedy, {"files": found[:8]})
    return Finding(
        "weights-absent",
        "error",
        f"{folder} holds no weights: neither {ADAPTER_WEIGHTS} nor {PICKLED_WEIGHTS}",
        "copy or download the whole folder; a training that was cut short has its weights in a checkpoint",
        {"files": list(names)},
    )


def _inspect_tensors(path: Path, stored: Iterable[tuple[str, torch.Tensor]]) -> tuple[TensorSpecs, list[Finding]]:
    """Dtypes and shapes of the tensors, and what their values tell."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    broken, empty, integers, zero, factors = [], [], [], [], 0
    for key, value in stored:
        tensors[key] = (str(value.dtype).removeprefix("torch."), tuple(value.shape))
        last = split_factor_key(key)[1]
        factors += last in ("lora_B", "lora_embedding_B")
        if value.numel() == 0:
            empty.append(key)
        elif value.is_floating_point():
            value = value if value.element_size() > 1 else value.float()
            if not bool(torch.isfinite(value).all()):
                broken.append(key)
            elif last in ("lora_B", "lora_embedding_B") and not bool(value.any()):
                zero.append(key)
        elif last:
            integers.append(key)
    found = []
    if not tensors:
        found.append(Finding("weights-absent", "error", f"{path} holds no tensor", "have its training write it again"))
    for keys, code, what, remedy in (
        (empty, "weights-absent", "are empty", _ZERO3),
        (integers, "other-format", "hold whole numbers, a quantised form that PEFT would read as plain ones", _PLAIN),
        (broken, "weights-not-finite", "hold values that are not finite (NaN or infinity)", _DIVERGED),
    ):
        if keys:
            evidence = {"keys": keys[:8], "count": len(keys), "dtype": tensors[keys[0]][0]}
            message = f"{path}: {len(keys)} of its {len(tensors)} tensors {what}, such as {keys[0]}"
            found.append(Finding(code, "error", message, remedy, evidence))
    if zero:
        code, remedy = "weights-partly-zero", "where these modules were to be trained, look for what froze them"
        if len(zero) == factors:
            code, remedy = "weights-zero", "take the adapter after its training"
        message = (
            f"{path}: {len(zero)} modules have B = 0 (of {factors}; such as {zero[0]}) and add nothing: they were never trained, "
            "or exported at λ = 0"
        )
        found.append(Finding(code, "warning", message, remedy, {"keys": zero[:8], "count": len(zero), "of": factors}))
    if tensors and not any(split_factor_key(key)[1] for key in tensors):
        found.append(_foreign_keys_finding(path, tensors))
    return tensors, found


def _foreign_keys_finding(path: Path, tensors: Mapping[str, Any]) -> Finding:
    first = next(iter(tensors))
    tool = next(
        (name for pattern, name in _FOREIGN_KEYS.items() if any(re.search(pattern, key) for key in tensors)),
        "another tool",
    )
    return Finding(
        "other-format",
        "error",
        f"{path}: none of its {len(tensors)} keys is a factor under PEFT's names (…lora_A.weight, …lora_B.weight); the first, "
        f"{first}, looks like one of {tool}",
        "convert the adapter to PEFT's form, or have PEFT's save_pretrained write it",
        {"keys": list(tensors)[:8]},
    )
