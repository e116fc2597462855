"""GGUF files as bases: llama.cpp's single files with config, tokenizer and mostly quantised weights.

transformers reads them and unpacks the weights to plain ones (`dequantize`), which are then trained on, gated and
fingerprinted as any others. What it cannot read is refused here, from the file's header, before anything is unpacked.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from loragate.errors import ArtifactError, ConfigError, LoragateError
from loragate.hub_names import split_file
from loragate.models.place import ModelRef


def local_file(base: ModelRef) -> Path:
    """The file of a base that is one, downloaded where it is on the hub.

    Raises:
        ArtifactError: for a file that the hub does not have, or that cannot be fetched.
    """
    if not base.on_hub:
        return Path(base.name)
    repository, file = split_file(base.name)
    try:
        return Path(hf_hub_download(repository, file, revision=base.revision or None))
    except (HfHubHTTPError, OSError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise ArtifactError(f"{base}: the file could not be fetched from the hub ({said})") from error


def require_readable(path: Path) -> None:
    """Refuse a file that transformers cannot unpack.

    Raises:
        ConfigError: where the package gguf is not installed.
        ArtifactError: naming the architecture or the storage type, or that the file is damaged or one of several parts.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f'{path} is a GGUF file, which needs the package gguf: pip install "loragate[gguf]"')
    _examine(path, path.stat().st_mtime_ns)


@cache  # a header holds a whole vocabulary; `_changed`, a time, makes a file that was written anew another key
def _examine(path: Path, _changed: int) -> None:
    from gguf import GGML_QUANT_SIZES, GGUFReader
    from gguf.quants import dequantize
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    try:
        reader = GGUFReader(str(path))
        fields: Mapping[str, Any] = reader.fields
        architecture = str(fields["general.architecture"].contents())
        parts = int(fields["split.count"].contents()) if "split.count" in fields else 1
    except (ValueError, KeyError, IndexError, OSError, OverflowError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} is no readable GGUF file ({error}); it may be cut off: fetch it again") from error
    if parts > 1:
        raise ArtifactError(
            f"{path} is one of {parts} parts; join them first (llama.cpp: llama-gguf-split --merge FIRST_PART WHOLE.gguf)"
        )
    # transformers' names have underscores where llama.cpp's have none or a hyphen
    known = {name.replace("_", "").replace("-", "") for name in GGUF_SUPPORTED_ARCHITECTURES}
    if architecture.replace("_", "").replace("-", "") not in known:
        raise ArtifactError(
            f"{path}: transformers cannot read GGUF files of the architecture {architecture!r}; take the model in its original "
            "form, as a folder with config.json"
        )
    unreadable = []
    for kind in {tensor.tensor_type for tensor in reader.tensors}:
        try:  # one block of zeros, [1, bytes of a block]: only a try tells which types the package unpacks
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
        except NotImplementedError:
            unreadable.append(kind.name)
    if unreadable:
        raise ArtifactError(
            f"{path}: weights stored as {', '.join(sorted(unreadable))} cannot be unpacked; take a file with another "
            "quantisation, such as Q8_0 or Q4_K_M"
        )


def folder_of(path: Path) -> Path:
    """The folder to name the file in to transformers: its own, or one with a link to it alone.

    From a folder that holds another form of a model too, transformers takes that one's tokenizer, whatever file is named.
    """
    if not any(other.suffix in (".json", ".jinja", ".model", ".txt") for other in path.parent.iterdir()):
        return path.parent
    return Path(_alone(path.absolute()).name)


@cache
def _alone(path: Path) -> tempfile.TemporaryDirectory[str]:
    """Kept until the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="loragate-gguf-")
    (Path(folder.name) / path.name).symlink_to(path)
    return folder


def refuse(base: ModelRef, what: str) -> None:
    """Refuse a GGUF base where only a plain folder will do.

    Args:
        what: who needs the folder, such as "vLLM".

    Raises:
        LoragateError: with the command that makes the folder.
    """
    if base.gguf:
        raise LoragateError(
            f"{what} needs the base as a plain folder, and {base.name} is a GGUF file; make one with: loragate convert-base "
            f"{base.name} --out FOLDER, and give FOLDER in its place"
        )
