"""Model checkpoints as safetensors on disk, one tensor at a time: finding the files, reading names, shapes and values.

Nothing is loaded until it is asked for, and only the shard that was read last stays open. Weights in pickle files are
never read. Which tensor is which weight of the model, and which of them a LoRA can hold, is decided by the model itself, built
on the meta device, with PEFT's module names and transformers' own renamings at loading, and not by a list of families kept
here. Linear layers (and GPT-2's Conv1D) can be held; everything else is named by its kind.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from loragate.errors import ConfigError
from loragate.models import ModelSource, gguf
from loragate.models.hub import BASE_CONFIG, download

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LINEAR, TRANSPOSED = "linear layers", "transposed linear layers"
EMBEDDINGS, HEAD, BIASES, VECTORS = "embeddings", "output head", "biases", "norms and other vectors"
EXPERTS, CONVOLUTIONS, OTHER = "fused experts", "convolutions", "other weights"
# settings of the function that no weight holds
_FUNCTION_KEYS = (
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "sliding_window", "layer_types"),
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "hidden_act", "activation_function"),
    *("num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier"),
)


@dataclass
class Checkpoint:
    """The tensors of one model."""

    place: ModelSource  # what was asked for
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


def open_checkpoint(place: ModelSource, code: bool = False) -> Checkpoint:
    """The checkpoint of a base, with the model's own Python files where `code` is set.

    A place without unquantised safetensors weights, or with unreadable ones, is a ConfigError that says what to do.
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
        if path.parent != folder:  # an index comes with a download, and could name any file of this machine
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


@dataclass(frozen=True)
class Layout:
    """A model's parameters."""

    model: Any  # on the meta device
    kinds: dict[str, str]  # {parameter name: kind}, in model order; the head is listed even where it is tied
    embedding: str  # parameter name of the input embedding
    head: str  # and of the output head


def read_layout(config: Any, trust: bool = False) -> Layout:
    """The layout of the model that a configuration describes."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    paths = {id(module): path for path, module in model.named_modules()}
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    embedding, head = (f"{paths[id(module)]}.weight" for module in (inputs, outputs))
    kinds = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            kinds[full] = HEAD if module is outputs and name == "weight" else _kind(module, name, parameter)
    return Layout(model, kinds, embedding, head)


def _kind(module: nn.Module, name: str, parameter: torch.Tensor) -> str:
    if name == "weight" and isinstance(module, nn.Linear):
        return LINEAR
    if name == "weight" and isinstance(module, Conv1D):
        return TRANSPOSED
    if isinstance(module, nn.Embedding):
        return EMBEDDINGS
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return CONVOLUTIONS
    if name == "bias" or name.endswith("_bias"):
        return BIASES
    if parameter.dim() == 3:
        return EXPERTS
    return VECTORS if parameter.dim() <= 1 else OTHER


@dataclass(frozen=True)
class Sources:
    """Where a checkpoint keeps each parameter."""

    # {parameter: the tensors it is loaded from}: several, or a rearranged one, where transformers converts
    of: dict[str, tuple[str, ...]]
    converted: frozenset[
        str
    ]  # parameters that are not stored as they are used, such as experts that are fused at loading
    foreign: tuple[str, ...]  # tensors that belong to no parameter of the language model
    tied: bool  # whether the head is the embedding in this checkpoint


def find_sources(checkpoint: Checkpoint, layout: Layout) -> Sources:
    """Match a checkpoint's tensors with all parameters of a layout (ConfigError), by transformers' own loading rules."""
    rules = get_model_conversion_mapping(layout.model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    # the renaming asks which names there are, and reads no value
    known = {**layout.model.state_dict(), **dict.fromkeys(layout.kinds, True)}
    of: dict[str, list[str]] = defaultdict(list)
    converted, foreign = set(), []
    for tensor in sorted(checkpoint.files):
        name, converter = rename_source_key(tensor, renamings, converters, layout.model.base_model_prefix, known)
        if name not in layout.kinds:
            foreign.append(tensor)
            continue
        of[name].append(tensor)
        if converter is not None or len(of[name]) > 1:  # rearranged or put together from several when it is loaded
            converted.add(name)
    tied = bool(checkpoint.text.tie_word_embeddings) or layout.head not in of
    if tied:
        of[layout.head] = list(of.get(layout.embedding, ()))
    if missing := [name for name in layout.kinds if not of.get(name)]:
        raise ConfigError(
            f"{checkpoint} has no weights for {missing[0]}"
            + (f" and {len(missing) - 1} more parameters" if len(missing) > 1 else "")
            + ": it is incomplete or of another architecture than the base"
        )
    return Sources({name: tuple(of[name]) for name in layout.kinds}, frozenset(converted), tuple(foreign), tied)


def require_same_architecture(tuned: Checkpoint, base: Checkpoint) -> None:
    """Refuse two checkpoints that cannot be of one model; the ConfigError names the first difference."""
    keys = ["model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"]
    keys += ["num_key_value_heads", "head_dim", "num_experts", "num_local_experts"]
    for key in keys:
        found, expected = getattr(tuned.text, key, None), getattr(base.text, key, None)
        if found != expected:
            raise ConfigError(
                f"{tuned} is another architecture than its base {base}: {key} is {found}, not {expected}. Name the "
                "model it was fine-tuned from with --base"
            )


def changed_settings(tuned: Checkpoint, base: Checkpoint) -> list[str]:
    """Settings of the function that differ between two configurations, as sentences; no adapter can hold them."""
    pairs = {key: (getattr(base.text, key, None), getattr(tuned.text, key, None)) for key in _FUNCTION_KEYS}
    return [
        f"{key} is {now} in the fine-tuned model and {was} in the base, which the adapter will run with"
        for key, (was, now) in pairs.items()
        if was != now
    ]
