"""Model checkpoints as safetensors on disk, one tensor at a time: finding the files, reading names, shapes and values.

Nothing is loaded until it is asked for, and only the shard that was read last stays open. Weights in pickle files are
never read. Knows no architecture: names are the ones in the files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from loragate.errors import ConfigError
from loragate.models import Place, gguf
from loragate.models.hub import BASE_CONFIG, download

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Checkpoint:
    """The tensors of one model."""

    place: Place  # what was asked for
    config: Any  # of the whole model; what is compared is the text part
    files: dict[str, Path]  # {tensor name: shard}
    _open: tuple[Path, Any] | None = field(default=None, repr=False)

    @property
    def text(self) -> Any:
        """The configuration of the language model."""
        return self.config.get_text_config()

    def __str__(self) -> str:
        return str(self.place.ref)

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor, from its shard's header."""
        return tuple(self._shard(tensor).get_slice(tensor).get_shape())

    def read(self, tensor: str, device: str = "cpu", rows: slice | None = None) -> torch.Tensor:
        """A tensor, or those of its `rows` that are there, in fp32 (fp64 stays); not to be written to, it may be the file itself.

        Raises:
            ConfigError: if its numbers are not plain floats (a quantised checkpoint).
        """
        if rows is None or not self.shape(tensor):
            values = self._shard(tensor).get_tensor(tensor)
        else:
            count = self.shape(tensor)[0]
            values = self._shard(tensor).get_slice(tensor)[min(rows.start, count) : min(rows.stop, count)]
        if values.dtype not in _FLOATS:
            raise ConfigError(
                f"{self}: tensor {tensor} is stored as {str(values.dtype).removeprefix('torch.')}, so this checkpoint is "
                "quantised; a difference of quantised weights is mostly rounding. Give the unquantised checkpoint"
            )
        values = values.to(device)
        return values if values.dtype == torch.float64 else values.float()

    def _shard(self, tensor: str) -> Any:
        path = self.files[tensor]
        if self._open is None or self._open[0] != path:
            self._open = path, _opened(path)
        return self._open[1]


def open_checkpoint(place: Place, code: bool = False) -> Checkpoint:
    """The checkpoint of a base; the model's own Python files are fetched too where `code` is set.

    Raises:
        ConfigError: if the place holds no unquantised safetensors weights, with what to do; if a shard is missing or unreadable.
        ArtifactError: if it cannot be downloaded.
    """
    gguf.refuse(place.base, "the comparison of weights")
    folder = place.folder
    if not folder.is_dir():
        folder = download(place.base.name, place.base.revision, BASE_CONFIG, code=code)
    if (folder / INDEX).is_file():
        files = _indexed(folder)
    elif (folder / WEIGHTS).is_file():
        files = dict.fromkeys(_opened(folder / WEIGHTS).keys(), folder / WEIGHTS)
    else:
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        found = f"{pickles[0]}, a pickle, which can run code and is not read here," if pickles else "none of them"
        raise ConfigError(
            f"{place.ref}: weights are read from {WEIGHTS} or {INDEX}, and it holds {found}. If you trust it, write it anew "
            "as safetensors: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    if not files:
        raise ConfigError(f"{place.ref}: its safetensors files hold no tensor")
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=code)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{place.ref} is a quantised checkpoint; a difference of quantised weights is mostly rounding. Give the "
            "unquantised one"
        )
    return Checkpoint(place, config, files)


def _indexed(folder: Path) -> dict[str, Path]:
    where = folder / INDEX
    try:
        listed = json.loads(where.read_text(encoding="utf-8"))["weight_map"]
        files = {str(tensor): folder / str(file) for tensor, file in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: not a readable index of shards ({error}); fetch the checkpoint again") from error
    for path in sorted(set(files.values())):
        if path.parent != folder:
            raise ConfigError(f"{where}: it names {path.name} outside its own folder; such an index is not followed")
        if not path.is_file():
            raise ConfigError(f"{path} is missing, though {INDEX} names it; the download is incomplete")
        held = set(_opened(path).keys())
        if lost := sorted(tensor for tensor, file in files.items() if file == path and tensor not in held):
            raise ConfigError(f"{path}: tensor {lost[0]} is not in it, though {INDEX} says so; fetch the file again")
    return files


def _opened(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file ({error}); fetch it again") from error
