"""A plain LoRA adapter as its files: configuration, tensors, the strength of each module, tokenizer. No PEFT, no model."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from loragate.errors import ArtifactError
from loragate.files import write_atomically

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
"""Files of a tokenizer; a folder with one of the first two has one."""
PREFIX = "base_model.model."
"""What PEFT puts before the base's own module names in its files."""


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of an adapter of any kind.

    Raises:
        ArtifactError: for a file that is no adapter's configuration.
    """
    path = folder / ADAPTER_CONFIG
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        record["peft_type"]  # which every adapter of PEFT has; a list or a text raises here, too
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: not a readable configuration of an adapter ({error!r})") from error
    return dict(record)


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(configuration, tensors by their names in the file) of a LoRA adapter.

    Raises:
        ArtifactError: for a file that cannot be read, or a configuration without rank or alpha.
    """
    config, path = read_adapter_config(folder), folder / ADAPTER_WEIGHTS
    for key in ("r", "lora_alpha"):
        if key not in config:
            raise ArtifactError(
                f"{folder / ADAPTER_CONFIG}: not a readable configuration of a LoRA adapter (no key {key!r})"
            )
    try:
        return config, load_file(str(path))
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ArtifactError(f"{path}: not a readable safetensors file ({error})") from error


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
    places = (folder / "tokenizer", folder)
    return next((place for place in places if any((place / file).is_file() for file in TOKENIZER[:2])), None)


def copy_tokenizer(folder: Path, into: Path) -> None:
    """Copy an adapter's own tokenizer, where it has one, beside the factors of another folder."""
    if own := own_tokenizer(folder):
        copy_files(own, TOKENIZER, into)


def copy_files(source: Path, files: Iterable[str], into: Path) -> None:
    """Copy those of the named files that a folder has, byte for byte."""
    for origin in (source / file for file in files):
        if origin.is_file():
            write_atomically(into / origin.name, partial(shutil.copyfile, origin))


def factor_of(key: str) -> tuple[str, str]:
    """(module path, "lora_A", "lora_B" or one of their kin for embeddings) of a tensor's name; two empty texts for any other."""
    # an embedding's factors are bare parameters, without .weight; PEFT leaves the adapter's name out of its files
    found = re.fullmatch(r"(.+)\.(lora_(?:embedding_)?[AB])(?:\.weight)?", key)
    return ("", "") if found is None else (found[1].removeprefix(PREFIX), found[2])


def write_factors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """adapter_model.safetensors of a folder, written whole or not at all; tensors by PEFT's names, contiguous."""
    write_atomically(
        folder / ADAPTER_WEIGHTS, lambda path: save_file(dict(tensors), str(path), metadata={"format": "pt"})
    )


def strength_of(config: Mapping[str, Any], path: str) -> tuple[Any, Any, float]:
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
