"""What of a base in memory is not in the base that a reader of the artifact will load.

LoRA's A and B are mostly all that an adapter changes. Embeddings, head, norms and biases that were trained or saved along
lie in the base's own tensors once they are loaded, where PEFT does not look for them when it writes an adapter. They are found
by comparison with the files of the recorded base, where these are at hand: a folder, or the hub's cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from loragate.files import read_json
from loragate.gates.eligibility import base_module_name, output_head
from loragate.gates.identity import base_parameters
from loragate.hub_names import cached_folder

_SAMPLED_ROWS = 4
"""Rows that are compared of a weight that nobody trains along; a merged adapter or another training changes them all."""


@dataclass
class BaseDifference:
    """How a base in memory differs from its files, by the base's own names."""

    # embeddings, head, norms and biases with other values; an adapter can bring them along
    beside: dict[str, Tensor] = field(default_factory=dict)
    resized: list[str] = field(
        default_factory=list
    )  # as `resize_token_embeddings` leaves them; no adapter brings these
    other: list[str] = field(default_factory=list)  # further weights with other values: it is another base


def compare_recorded_base(model: nn.Module, base: str, revision: str = "") -> BaseDifference:
    """The base under an adapter, in memory, against its safetensors files; empty where they are not at hand.

    Tensors with one dimension, embeddings and the head are compared whole, of any other a few rows. Values are compared in the
    dtype of the memory; quantised weights, and those whose name in the files is another, are passed over. `base` is a folder or
    hub id, of which nothing is downloaded.
    """
    found = BaseDifference()
    folder = Path(base) if Path(base).is_dir() else cached_folder(base, revision)
    files = {} if folder is None else _tensor_files(folder)
    vocabulary = set(_vocabulary_names(model))
    for name, parameter in base_parameters(model):
        # what is offloaded or sharded is not in this process
        if name not in files or parameter.device.type == "meta" or hasattr(parameter, "full_tensor"):
            continue
        full = parameter.dim() < 2 or name in vocabulary
        with safe_open(str(files[name]), framework="pt") as file:
            stored = file.get_slice(name)
            if tuple(stored.get_shape()) != tuple(parameter.shape):
                found.resized.append(name)
                continue
            rows = slice(None) if full else slice(0, None, max(1, parameter.shape[0] // _SAMPLED_ROWS))
            expected = stored[:] if full else torch.stack([stored[at] for at in range(parameter.shape[0])[rows]])
        held = parameter.detach()[rows].cpu()
        if torch.equal(expected.to(held.dtype), held):
            continue
        if full:
            found.beside[name] = parameter.detach().cpu()
        else:
            found.other.append(name)
    return found


def _vocabulary_names(model: nn.Module) -> Iterator[str]:
    """Names of the weights of input embeddings and head, tied ones under both names."""
    getter: Any = getattr(model, "get_input_embeddings", None)
    layers = [output_head(model), getter() if callable(getter) else None]
    weights = [weight for layer in layers if (weight := getattr(layer, "weight", None)) is not None]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(parameter is weight for weight in weights):
            yield base_module_name(name).replace(".original_module.", ".")


def _tensor_files(folder: Path) -> dict[str, Path]:
    """{tensor: file} of a model's folder in safetensors, in one file or in shards; empty for any other form."""
    shards = read_json(folder / "model.safetensors.index.json").get("weight_map")
    if isinstance(shards, dict):
        return {name: folder / str(file) for name, file in shards.items() if (folder / str(file)).is_file()}
    path = folder / "model.safetensors"
    try:
        with safe_open(str(path), framework="pt") as file:
            return dict.fromkeys(file.keys(), path)
    except (SafetensorError, OSError, json.JSONDecodeError):
        return {}
