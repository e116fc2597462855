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

from loragate.errors import ConfigError
from loragate.hub_names import split_revision

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_FETCHED = ["*.json", "model*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Checkpoint:
    """The tensors of one model.

    Attributes:
        name: as it was asked for.
        folder: where the files are.
        files: {tensor name: shard}.
    """

    name: str
    folder: Path
    files: dict[str, Path]
    _open: tuple[Path, Any] | None = field(default=None, repr=False)

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor, from its shard's header."""
        return tuple(self._shard(tensor).get_slice(tensor).get_shape())

    def read(self, tensor: str, device: str = "cpu") -> torch.Tensor:
        """A tensor in fp32 (fp64 stays), on `device`; not to be written to, it may be the file itself.

        Raises:
            ConfigError: if its numbers are not plain floats (a quantised checkpoint).
        """
        return self._as_floats(tensor, self._shard(tensor).get_tensor(tensor), device)

    def read_rows(self, tensor: str, begin: int, end: int, device: str = "cpu") -> torch.Tensor:
        """The rows [begin, end) that are there, as `read` gives them; a single number is one row."""
        shape = self.shape(tensor)
        if not shape:
            return self.read(tensor, device).reshape(1)
        if begin >= shape[0]:
            return torch.empty(0, *shape[1:], device=device)
        return self._as_floats(tensor, self._shard(tensor).get_slice(tensor)[begin : min(end, shape[0])], device)

    def _as_floats(self, tensor: str, values: torch.Tensor, device: str) -> torch.Tensor:
        if values.dtype not in _FLOATS:
            raise ConfigError(
                f"{self.name}: tensor {tensor} is stored as {str(values.dtype).removeprefix('torch.')}, so this checkpoint is "
                "quantised; a difference of quantised weights is mostly rounding. Give the unquantised checkpoint"
            )
        values = values.to(device)
        return values if values.dtype == torch.float64 else values.float()

    def _shard(self, tensor: str) -> Any:
        path = self.files[tensor]
        if self._open is None or self._open[0] != path:
            self._open = path, _opened(path)
        return self._open[1]


def open_checkpoint(name: str, revision: str = "", code: bool = False) -> Checkpoint:
    """The checkpoint in a folder or of a hub id; the model's own Python files are fetched too where `code` is set.

    Raises:
        ConfigError: if the place holds no safetensors weights, with what to do; if a shard is missing or unreadable.
    """
    folder = Path(name) if Path(name).is_dir() else _fetched(name, revision, code)
    if (folder / INDEX).is_file():
        files = _indexed(folder)
    elif (folder / WEIGHTS).is_file():
        files = dict.fromkeys(_opened(folder / WEIGHTS).keys(), folder / WEIGHTS)
    else:
        raise ConfigError(_no_weights(name, folder))
    if not files:
        raise ConfigError(f"{name}: its safetensors files hold no tensor")
    return Checkpoint(name, folder, files)


def _fetched(name: str, revision: str, code: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    asked = name
    name, at = split_revision(name, revision)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ConfigError(f"{name} does not exist (a hub id is written owner/name)")
    try:
        return Path(
            snapshot_download(name, revision=at or None, allow_patterns=[*_FETCHED, *(["*.py"] if code else [])])
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{asked}: no such folder, and it could not be fetched from the hub. Check the spelling, the network "
            f"(HF_HUB_OFFLINE) and access rights ({first[:200]})"
        ) from error


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


def _no_weights(name: str, folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return f"{name} is an adapter already; give it to loragate calibrate --adapter"
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{name} holds {pickles[0]}, a pickle, which can run code when it is read and is not read here. If you trust it, "
            "write it anew as safetensors: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    return (
        f"{name} holds neither {WEIGHTS} nor {INDEX}. If its weights are .bin files, write them anew as safetensors: "
        "AutoModelForCausalLM.from_pretrained(name).save_pretrained(new_folder)"
    )
