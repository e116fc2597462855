"""A plain LoRA adapter in the files of other runtimes, llama.cpp's GGUF and MLX's folder: written, and read back as they read it.

Each runtime is a pair: one function writes its files from a PEFT folder, the other makes a PEFT folder again of what was
written, by the runtime's own rules for scale, names and orientation and without a look at the source. Whether both agree,
outputs show (`export.py`). Either has one scale for all modules: so must the source.

The rules are those of llama.cpp's src/llama-adapter.cpp and convert_lora_to_gguf.py, and of mlx-lm's mlx_lm/tuner.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from loragate.errors import ArtifactError, ConfigError, nearest
from loragate.files import write_atomically, write_json
from loragate.gates.adapter_rules import find_variants
from loragate.gates.schema import ADAPTER_CONFIG, PREFIX, factor_of, lora_scaling, read_adapter, write_factors
from loragate.gates.strength import kind_of

GGUF_FILE, MLX_WEIGHTS = "adapter.gguf", "adapters.safetensors"
INSTEAD = "merge it into its base instead, which takes all of it: --to merged"

Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""{module path: (A [R, D], B [O, R])}"""


@dataclass(frozen=True)
class Family:
    """A dense family whose linear layers llama.cpp and MLX keep one to one."""

    gguf: str  # llama.cpp's name of the architecture
    reordered: bool = False  # whether llama.cpp has the rows of q and k in another order, that of its rotary embedding


FAMILIES = {
    "llama": Family("llama", reordered=True),
    "mistral": Family("llama", reordered=True),
    "smollm3": Family("smollm3", reordered=True),
    "granite": Family("granite", reordered=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma": Family("gemma"),
    "gemma2": Family("gemma2"),
    "gemma3_text": Family("gemma3"),
    "phi3": Family("phi3"),
}
"""By transformers' model_type. In MLX their modules are called as in transformers."""


@dataclass(frozen=True)
class AdapterFormat:
    """Another runtime's files."""

    title: str  # as in sentences
    write: Callable[
        [Path, Path, Any], None
    ]  # (a plain adapter of one scale, folder to write to, the base's configuration)
    read: Callable[[Path, Path, Any], None]  # (folder that was written, folder for the PEFT adapter, the configuration)
    usage: str  # how the written folder is used, with {folder}


def write_gguf(adapter: Path, folder: Path, base: Any) -> None:
    """llama.cpp's adapter in one file, in fp32; errors as of `write_mlx`, and a ConfigError without the package gguf."""
    gguf, family = _gguf(), require_known_family(base, "gguf")
    names = _gguf_names(gguf, family, base)
    factors, scale = _read_factors(adapter, names, "llama.cpp")

    def write(path: Path) -> None:
        writer = gguf.GGUFWriter(path, family.gguf)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        # llama.cpp divides by each module's rank
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, scale * _rank(factors))
        for module, (a_RD, b_OR) in factors.items():
            pair = {"lora_a": a_RD, "lora_b": _permute_rotary_rows(b_OR, _heads(module, family, base))}
            for suffix, tensor in pair.items():
                writer.add_tensor(f"{names[module]}.weight.{suffix}", tensor.float().contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        # a full disk that only its last flush meets is passed over in silence
        if path.stat().st_size < sum(a_RD.numel() + b_OR.numel() for a_RD, b_OR in factors.values()) * 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_atomically(folder / GGUF_FILE, write)


def read_gguf(folder: Path, into: Path, base: Any) -> None:
    """The PEFT adapter that llama.cpp makes of the file: each module's scale is adapter.lora.alpha ÷ its rank.

    An ArtifactError for a file that llama.cpp would not take, naming key or tensor.
    """
    gguf, family, path = _gguf(), require_known_family(base, "gguf"), folder / GGUF_FILE
    try:
        reader = gguf.GGUFReader(path)
        found = {key: field.contents() for key, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ArtifactError(f"{path}: cannot be read ({error})") from error
    keys = gguf.Keys
    wanted = {keys.General.TYPE: "adapter", keys.Adapter.TYPE: "lora", keys.General.ARCHITECTURE: family.gguf}
    for key, value in wanted.items():
        if found.get(key) != value:
            raise ArtifactError(f"{path}: key {key!r} must be {value!r}, found {found.get(key)!r}")
    modules = {f"{name}.weight": module for module, name in _gguf_names(gguf, family, base).items()}
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for tensor in reader.tensors:
        name, _, suffix = tensor.name.rpartition(".")
        if name not in modules or suffix not in ("lora_a", "lora_b"):
            raise ArtifactError(f"{path}: {tensor.name} is no factor of a matrix of {family.gguf}")
        halves.setdefault(modules[name], {})[suffix] = torch.from_numpy(np.array(tensor.data))
    factors = {
        module: (pair["lora_a"], _permute_rotary_rows(pair["lora_b"], _heads(module, family, base), back=True))
        for module, pair in halves.items()
    }
    _write_peft(into, factors, float(found[keys.Adapter.LORA_ALPHA]) / _rank(factors))


def write_mlx(adapter: Path, folder: Path, base: Any) -> None:
    """mlx-lm's adapter: adapters.safetensors, and adapter_config.json with rank, scale and the layers that it adapts.

    A ConfigError for a base of another family, an ArtifactError for an adapter that the files cannot hold.
    """
    require_known_family(base, "mlx")
    names = {path: path for path in linear_sizes(base) if path.startswith("model.layers.")}
    factors, scale = _read_factors(adapter, names, "MLX")
    tensors: dict[str, torch.Tensor] = {}
    for module, (a_RD, b_OR) in factors.items():  # x @ lora_a @ lora_b, [D, R] and [R, O]
        tensors |= {f"{module}.lora_a": a_RD.float().T.contiguous(), f"{module}.lora_b": b_OR.float().T.contiguous()}
    write_atomically(folder / MLX_WEIGHTS, lambda path: save_file(tensors, str(path)))
    parameters = {"rank": _rank(factors), "scale": scale, "dropout": 0.0, "keys": sorted(set(map(_in_layer, factors)))}
    # the last layers are counted, and -1 is all of them; a module without factors in the file adds zero there
    write_json(folder / ADAPTER_CONFIG, {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters})


def read_mlx(folder: Path, into: Path, base: Any) -> None:
    """The PEFT adapter that mlx-lm makes of the folder: factors of the modules named by `keys`, times `scale`.

    An ArtifactError for files that mlx-lm would not take, or of which it would leave something out.
    """
    path, sizes = folder / MLX_WEIGHTS, linear_sizes(base)
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        kind, count, given = config["fine_tune_type"], config["num_layers"], config["lora_parameters"]
        rank, scale, keys = given["rank"], given["scale"], given["keys"]
        tensors = load_file(str(path))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ArtifactError(f"{folder}: not a readable adapter of MLX ({error!r})") from error
    layers = sorted({name.split(".")[2] for name in sizes if name.startswith("model.layers.")}, key=int)
    adapted = layers[-max(count, 0) :]
    taken = {f"model.layers.{layer}.{key}" for layer in adapted for key in keys} & set(sizes)
    factors = {}
    for module in dict.fromkeys(name.rpartition(".")[0] for name in tensors):
        if kind != "lora" or module not in taken:
            raise ArtifactError(f"{path}: mlx-lm would leave {module} out: fine_tune_type {kind!r}, keys {keys}")
        factors[module] = (tensors[f"{module}.lora_a"].T, tensors[f"{module}.lora_b"].T)
        if len(factors[module][0]) != rank:
            raise ArtifactError(f"{path}: {module} has rank {len(factors[module][0])}, adapter_config.json {rank}")
    _write_peft(into, factors, float(scale))


RUNTIMES = {
    "gguf": AdapterFormat("llama.cpp", write_gguf, read_gguf, f"llama-cli -m BASE.gguf --lora {{folder}}/{GGUF_FILE}"),
    "mlx": AdapterFormat("MLX", write_mlx, read_mlx, "mlx_lm.generate --model BASE --adapter-path {folder}"),
}


def require_known_family(base: Any, runtime: str) -> Family:
    """The family of a base by its configuration; a ConfigError for one that is not known."""
    kind = base.get_text_config().model_type
    if base.model_type != kind or kind not in FAMILIES:
        raise ConfigError(
            f"--to {runtime}: a base of type {base.model_type!r} is not among those whose layers are known to be the same there"
            f"{nearest(kind, FAMILIES)} ({', '.join(FAMILIES)}); merge the adapter into it (--to merged) and convert that model"
        )
    return FAMILIES[kind]


def linear_sizes(base: Any) -> dict[str, tuple[int, int]]:
    """{path: (inputs, outputs)} of the linear layers of a base, from its configuration alone."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(base)
    return {
        path: (module.in_features, module.out_features)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }


def _read_factors(adapter: Path, names: Mapping[str, str], runtime: str) -> tuple[Factors, float]:
    """(factors, their one scale) of a plain adapter, all of it; an ArtifactError names what the runtime has no place for."""
    config, state = read_adapter(adapter)
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        module, group = factor_of(key)
        if key.endswith(".lm_head.base_layer.weight"):  # the base's own, which PEFT saves beside an adapter on it
            continue
        if group not in ("lora_A", "lora_B"):
            why = "DoRA's magnitudes" if "magnitude" in key else "a tensor beside A and B of linear layers"
            raise ArtifactError(f"{key} ({why}) has no place in an adapter of {runtime}; {INSTEAD}")
        if module not in names:
            raise ArtifactError(f"{module} is no matrix that an adapter of {runtime} can change; {INSTEAD}")
        halves.setdefault(module, {})[group] = tensor
    if variants := find_variants(config):
        raise ArtifactError(f"{variants[0]}, and {runtime} would run it as plain LoRA; load it with PEFT")
    factors = {module: (pair["lora_A"], pair["lora_B"]) for module, pair in halves.items()}
    return factors, lora_scaling(config, "")[2]


def _write_peft(folder: Path, factors: Factors, scale: float) -> None:
    """A plain adapter of these factors, the rank of which is one."""
    rank = _rank(factors)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": scale * rank, "lora_dropout": 0.0}
    config |= {"target_modules": sorted(factors), "bias": "none", "base_model_name_or_path": ""}
    tensors: dict[str, torch.Tensor] = {}
    for module, (a_RD, b_OR) in factors.items():
        tensors |= {f"{PREFIX}{module}.lora_A.weight": a_RD, f"{PREFIX}{module}.lora_B.weight": b_OR}
    write_factors(folder, tensors)
    write_json(folder / ADAPTER_CONFIG, config)


def _rank(factors: Factors) -> int:
    return next(len(a_RD) for a_RD, _ in factors.values())


def _in_layer(path: str) -> str:
    """The part of a module's path below its layer."""
    return re.sub(r"model\.layers\.\d+\.", "", path)


def _gguf() -> Any:
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            '--to gguf needs the package gguf, which is not installed: pip install ".[gguf]" in a checkout'
        )
    return importlib.import_module("gguf")


def _gguf_names(gguf: Any, family: Family, base: Any) -> dict[str, str]:
    """{module path: llama.cpp's name of its matrix}; a tied head is none of its own."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[family.gguf], base.num_hidden_layers)
    paths = [path for path in linear_sizes(base) if path != "lm_head" or not base.tie_word_embeddings]
    return {path: name for path in paths if (name := names.get_name(path)) is not None}


def _heads(module: str, family: Family, base: Any) -> int:
    """Heads whose rows llama.cpp has in another order; 0 for a module that keeps its rows."""
    heads = {"q_proj": base.num_attention_heads, "k_proj": base.num_key_value_heads}
    return heads.get(kind_of(module), 0) if family.reordered else 0


def _permute_rotary_rows(b_OR: torch.Tensor, heads: int, back: bool = False) -> torch.Tensor:
    """The rows of each head: transformers has one half after the other, llama.cpp the pairs of its rotary embedding."""
    if heads == 0:
        return b_OR
    rows, rank = b_OR.shape
    pairs = (heads, rows // heads // 2, 2, rank) if back else (heads, 2, rows // heads // 2, rank)
    return b_OR.reshape(pairs).swapaxes(1, 2).reshape(rows, rank)
