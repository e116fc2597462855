"""From a place to a loaded model: base, adapter or gated, in one way; the tokenizer; and errors a person can act on.

`base_weights`, `base_config` and `generation_config` are the only readers of a base. Quantised storage is bitsandbytes' (NF4 with
double quantisation for 4 bits); gates and LoRA factors stay fp32 whatever the base is. A base may be one GGUF file, llama.cpp's
form with configuration and tokenizer inside: transformers reads it and unpacks the weights to plain ones, which are then trained
on, gated and fingerprinted as any others.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import re
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError, safe_open
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    GgufConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import find_adapter_config_file

from loragate.data import find_endings
from loragate.errors import ArtifactError, ConfigError, LoragateError
from loragate.files import read_json
from loragate.gates import GateConfig, GatedPeftModel, attach_gates, detach_gates, keep_unpacked, load_gates
from loragate.gates.attach import gate_modules
from loragate.gates.eligibility import (
    EIGHT_BIT,
    FOUR_BIT,
    NONE,
    describe_storage,
    quantization_of,
    quantization_of_config,
)
from loragate.gates.strength import overrides_by_module
from loragate.hub_names import hub_errors, hub_source, split_file
from loragate.models.peft_loading import TARGETS_HINT, load_peft, resize_hint
from loragate.models.settings import Loading
from loragate.models.source import Kind, ModelRef, ModelSource, is_adapter, refuse_gguf_adapter, resolve

DEFAULT_LOADING = Loading()
_MODEL_FILES = ("model*.safetensors", "pytorch_model*.bin")  # as transformers calls the weights of a whole model
logger = logging.getLogger("loragate")
# how the names of classes end whose models read a whole text, or judge it
_NON_CAUSAL_SUFFIXES = (
    "ForMaskedLM",
    "Classification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "SentencePrediction",
)


def torch_device(how: Loading) -> str:
    """The device; "auto" is CUDA, then MPS, then the CPU. Each of several processes on a machine has its own GPU."""
    if how.device != "auto":
        try:
            torch.empty(0, device=how.device)
        except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
            raise ConfigError(
                f"--device {how.device}: not usable here ({str(error).splitlines()[0]}); try --device cpu"
            ) from error
        return how.device
    if torch.cuda.is_available():
        # as torchrun and accelerate tell a process which of the machine's GPUs is its own
        several = int(os.environ.get("WORLD_SIZE") or 1) > 1
        return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if several else "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def torch_dtype(how: Loading, autocast: bool = False) -> Any:
    """The dtype of the base, or of what stays unquantised, which is also what 4-bit layers compute in.

    "auto" is the checkpoint's own on a GPU, and on the CPU under autocast, where float32 would take twice the memory and be
    cast anew in every product; else float32 on the CPU. With quantised weights it is bfloat16, or float16 on GPUs without
    it; float32 for 4 bits on a CPU.
    """
    how.check_supported()
    if how.dtype != "auto":
        return getattr(torch, how.dtype)
    device = torch_device(how)
    if how.quantization == NONE:
        return torch.float32 if device == "cpu" and not autocast else "auto"
    if device == "cpu":  # where 4 bits are unpacked for a product in any dtype, and 8 bits are not multiplied in fp32
        return torch.float32 if how.quantization == FOUR_BIT else torch.bfloat16
    return torch.bfloat16 if not device.startswith("cuda") or torch.cuda.is_bf16_supported() else torch.float16


def _from_pretrained_arguments(base: ModelRef) -> tuple[str, dict[str, Any]]:
    """What `from_pretrained` of transformers is given for a base: its name, and what stands beside it.

    A ConfigError without the package gguf and for an adapter alone, an ArtifactError for a GGUF file that the hub does not give.
    """
    if not base.is_gguf:
        folder = Path(base.name)
        if is_adapter(folder):
            if not any(path for pattern in _MODEL_FILES for path in folder.glob(pattern)):
                raise ConfigError(
                    f"the base {folder} is itself an adapter; merge it into its own base first, loragate export {folder} --to "
                    "merged --out FOLDER, and name that with --base FOLDER"
                )
            # transformers would put the adapter on the base by itself
            return _linked(
                *(path for path in folder.absolute().iterdir() if not path.name.startswith("adapter_"))
            ).name, {}
        if base.on_hub:
            _refuse_adapter_on_hub(base)
        return base.name, {"revision": base.revision} if base.revision else {}
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f'{base.name} is a GGUF file, which needs the package gguf: pip install ".[gguf]" in a checkout'
        )
    path = Path(base.name)
    if base.on_hub:
        repository, file = split_file(base.name)
        try:
            path = Path(hf_hub_download(repository, file, revision=base.revision or None))
        except hub_errors() as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise ArtifactError(f"{base}: the file could not be fetched from the hub ({said})") from error
    # from a folder that holds another form of a model too, transformers takes that one's tokenizer, whatever file is named
    beside = any(other.suffix in (".json", ".jinja", ".model", ".txt") for other in path.parent.iterdir())
    return _linked(path.absolute()).name if beside else str(path.parent), {"gguf_file": path.name}


@cache  # and kept until the process ends
def _linked(*paths: Path) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="loragate-base-")
    for path in paths:
        (Path(folder.name) / path.name).symlink_to(path)
    return folder


@cache  # asked once of the hub
def _refuse_adapter_on_hub(base: ModelRef) -> None:
    """transformers would put the adapter on the base that it names, whatever model lies beside it."""
    if find_adapter_config_file(base.name, revision=base.revision or None) is not None:
        raise ConfigError(
            f"the base {base} holds an adapter (adapter_config.json), with which transformers would load another model. Give the "
            f"base of that adapter, or merge the two first: loragate export {base.name} --to merged --out FOLDER. Where a whole "
            f"model lies beside it: hf download {base.name} --exclude 'adapter_*' --local-dir FOLDER"
        )


def base_config(base: ModelRef, trust: bool = False) -> Any:
    """The transformers configuration of a base."""
    name, beside = _from_pretrained_arguments(base)
    if base.is_gguf:
        changed = Path(name, beside["gguf_file"]).stat().st_mtime_ns
        # a copy: loading a model writes into its configuration
        return copy.deepcopy(_gguf_config(name, beside["gguf_file"], trust, changed))
    return AutoConfig.from_pretrained(name, trust_remote_code=trust, **beside)


@cache
def _gguf_config(name: str, file: str, trust: bool, _changed: int) -> Any:
    """Kept, as transformers reads all of a GGUF file's header for it, which takes seconds."""
    from gguf import GGUFReader

    try:
        refuse_gguf_adapter(Path(name, file))
        reader = GGUFReader(Path(name, file))
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust, gguf_file=file)
        scaled = _scaled_positions(reader)
    except (struct.error, OSError, ValueError, LookupError) as error:
        raise ArtifactError(f"{file} cannot be read ({error}); if it was cut off, fetch it again") from error
    kind = (getattr(config.get_text_config(), "rope_parameters", None) or {}).get("rope_type", "default")
    if scaled and kind == "default":
        raise ArtifactError(
            f"{file} scales its rotary positions ({scaled}), as Llama 3.1 and later do, and transformers reads that from no GGUF "
            "file: it would be another model. Take the base as a plain folder of safetensors"
        )
    return config


def _scaled_positions(reader: Any) -> str:
    """What of a GGUF file says that its rotary positions are scaled; empty where nothing does."""
    found = [tensor.name for tensor in reader.tensors if tensor.name.startswith(("rope_freqs", "rope_factors"))]
    for key, field in reader.fields.items():
        if key.endswith(".rope.scaling.type") and (kind := field.contents()) != "none":
            found.append(f"{key} = {kind}")
    return ", ".join(found)


_SPLIT_AS_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4")
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Names in a GGUF file, as llama.cpp reads them, of GPT-2's rule of splitting a text, and of it after each digit is split off."""


def _split_as_named(tokenizer: Any, name: str, path: Path) -> None:
    """Where transformers took GPT-2's rule of splitting a text into words, take what the GGUF file names, or warn."""
    from gguf import GGUFReader

    split = tokenizer.backend_tokenizer.pre_tokenizer
    if not (isinstance(split, ByteLevel) and split.use_regex):
        return
    field = GGUFReader(path).fields.get("tokenizer.ggml.pre")
    rule = "default" if field is None else field.contents()
    if rule in _DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), split])
    elif rule not in _SPLIT_AS_GPT2:
        _warn_of_split(name, rule)


@cache  # once
def _warn_of_split(name: str, rule: str) -> None:
    said = "does not say by which rule its tokenizer splits a text"
    logger.warning(
        "%s %s (tokenizer.ggml.pre), and transformers takes GPT-2's: ids can differ from the model's own, as of numbers and line "
        "ends. Write the base as a plain folder, with the tokenizer files of the original model in it",
        name,
        said if rule == "default" else f"splits a text by the rule {rule!r}",
    )


def generation_config(base: ModelRef, trust: bool = False) -> Any:
    """The base's generation settings or, where it has no such file, what transformers derives from its configuration."""
    try:
        if not base.is_gguf:  # whose folder may hold other models
            name, beside = _from_pretrained_arguments(base)
            return GenerationConfig.from_pretrained(name, **beside)
    except OSError:  # how transformers says that there is no such file
        pass
    return GenerationConfig.from_model_config(base_config(base, trust))


def base_weights(base: ModelRef, **arguments: Any) -> Any:
    """A causal LM with its weights; `arguments` are those of `AutoModelForCausalLM.from_pretrained`.

    An ArtifactError for a base that lacks weights of a causal language model, a LoragateError naming a weight file that was cut
    off, or for a GGUF file that is to be quantised anew.
    """
    name, beside = _from_pretrained_arguments(base)
    arguments["output_loading_info"] = True
    if not base.is_gguf:
        try:
            model, loaded = AutoModelForCausalLM.from_pretrained(name, **arguments, **beside)
        except SafetensorError as error:
            torn = _unreadable_weights(Path(name)) or f"a weight file of {base.name}"
            raise LoragateError(
                f"{torn} cannot be read ({error}): it was cut off, or stands for a large file that was not fetched "
                "(git lfs pull). Fetch it again"
            ) from error
        own = {key for key, _ in model.named_parameters()}
        if missing := sorted(own & {*loaded["missing_keys"]}):  # which transformers fills with random numbers
            raise ArtifactError(
                f"{name} does not hold {missing[0]} ({len(missing)} of {len(own)} weights are missing): it is no causal language "
                "model, or its files are incomplete"
            )
        model.name_or_path = model.config._name_or_path = base.name  # and not a folder of links
        return model
    from gguf import GGUFReader

    if arguments.get("quantization_config") is not None:
        refuse_gguf(base, "another quantisation")
    if arguments.get("dtype") == "auto":
        arguments["dtype"] = torch.bfloat16  # the file names none, and transformers would take fp32
    # weights that stayed in GGUF's blocks could not be fingerprinted as those of another file of the same model
    arguments["quantization_config"] = GgufConfig(dequantize=True)
    arguments.setdefault("config", base_config(base, bool(arguments.get("trust_remote_code"))))
    model, loaded = AutoModelForCausalLM.from_pretrained(name, **beside, **arguments)
    if missing := sorted(loaded["missing_keys"]):  # which transformers fills with random numbers
        raise ArtifactError(
            f"{base.name} does not hold {missing[0]} ({len(missing)} weights are missing); it may be one of several parts, which "
            "llama.cpp joins: llama-gguf-split --merge FIRST_PART WHOLE.gguf"
        )
    # transformers passes over what its model has no place for, as the biases of a Llama's attention
    names = [tensor.name for tensor in GGUFReader(Path(name, beside["gguf_file"])).tensors]
    held = sum(key.endswith("bias") and "_exps." not in key for key in names)  # experts' are put together on the way
    taken = sum(key.endswith("bias") for key in model.state_dict())
    if held > taken:
        raise ArtifactError(
            f"{base.name} holds {held} biases, and the model that transformers makes of it has {taken}: it would be another "
            "model. Take the base as a plain folder of safetensors"
        )
    # transformers would record the folder of the file, or a temporary one
    model.name_or_path = model.config._name_or_path = base.absolute_name
    return model


def _unreadable_weights(folder: Path) -> Path | None:
    """The first safetensors file of a folder that cannot be opened."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(path), framework="pt"):
                pass
        except (SafetensorError, OSError):
            return path
    return None


def require_causal(config: Any, name: str) -> None:
    """Refuse (ConfigError) a base whose checkpoint is of an encoder or a classifier, which transformers would load as causal."""
    kinds = [str(kind) for kind in getattr(config, "architectures", None) or ()]
    if kinds and all(kind.endswith(_NON_CAUSAL_SUFFIXES) for kind in kinds):
        raise ConfigError(
            f"base model {name} is a {kinds[0]}: gates act on causal language models (AutoModelForCausalLM); take an adapter of a "
            "model that writes text"
        )


def refuse_gguf(base: ModelRef, what: str) -> None:
    """Refuse a GGUF base where only a plain folder will do; `what` needs it."""
    if base.is_gguf:
        raise LoragateError(
            f"{what} needs the base as a plain folder, and {base.name} is a GGUF file. Make one in Python: found = "
            f'loragate.models.open_model(loragate.models.resolve("{base.name}")), found.model.save_pretrained("FOLDER"), '
            'found.tokenizer.save_pretrained("FOLDER"); and give FOLDER in its place'
        )


def open_base(base: ModelRef, how: Loading, host_memory: bool = False, autocast: bool = False) -> Any:
    """A causal LM on its device, in eval mode, its errors those of transformers; in 8 or 4 bits where that is asked for.

    Quantised weights are put on their device while they are loaded and are not moved afterwards; a ConfigError where a
    checkpoint is quantised already. `host_memory` loads the base there, from where its shards go to the devices; `autocast` says
    that a training in 16 bits follows.
    """
    arguments: dict[str, Any] = {"dtype": torch_dtype(how, autocast), "trust_remote_code": how.trust_remote_code}
    device = "cpu" if host_memory else torch_device(how)
    config = base_config(base, how.trust_remote_code)
    require_causal(config, base.name)
    stored = quantization_of_config(config)
    if stored != NONE and how.quantization != NONE:
        raise ConfigError(f"{base.name} is {describe_storage(stored)} already; leave --quantization out")
    if stored == EIGHT_BIT:
        if how.dtype == "float32":
            raise ConfigError(
                f"{base.name} is stored in 8 bits, whose layers multiply in float16: --dtype float32 would be a false promise; "
                "leave it out"
            )
        arguments["dtype"] = torch_dtype(replace(how, quantization="8bit"))
    if how.quantization != NONE:
        arguments["quantization_config"] = _bitsandbytes(how)
    is_quantized = stored != NONE or how.quantization != NONE  # packed weights cannot be moved once they are loaded
    if is_quantized:
        # "cuda" means the process's own GPU, as it does elsewhere in torch; a device map would read it as the first
        arguments["device_map"] = {"": torch.cuda.current_device() if device == "cuda" else device}
    model = base_weights(base, **arguments)
    keep_unpacked(model)
    return model.eval() if is_quantized else model.to(device).eval()


def _bitsandbytes(how: Loading) -> Any:
    if how.quantization == EIGHT_BIT:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch_dtype(how),
    )


@dataclass
class Loaded:
    """A model with its tokenizer."""

    model_source: ModelSource  # where it came from; its kind is what the model is
    loading: Loading
    tokenizer: Any  # with its chat template
    config: Any  # of the base
    model: Any = None  # in memory; None where vLLM loads the weights itself
    note: str = ""  # what a person must know about what was loaded; empty mostly
    stop_token_ids: tuple[int, ...] = ()  # tokens that end an answer beside those that tokenizer and base declare

    @property
    def kind(self) -> Kind:
        """ "base", "adapter" or "gated"."""
        return self.model_source.kind

    @property
    def max_positions(self) -> int | None:
        """Positions of the model; None where it has no limit."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    @property
    def dtype(self) -> str:
        """Of the base, with its quantised storage if it has one; as asked for where vLLM loads it."""
        if self.model is None:
            return self.loading.dtype
        dtype, stored = str(self.model.dtype).removeprefix("torch."), quantization_of(self.model)
        return dtype if stored == "none" else f"{dtype}, {stored}"

    @property
    def commit(self) -> str:
        """Of the base on the hub; empty for a folder, and where the hub cache does not tell."""
        return self.model_source.base.commit()

    @property
    def names(self) -> dict[str, str]:
        """{"base": …, "adapter": …, "gated": …}, as far as there are such, each by its folder or hub id."""
        place, found = self.model_source, {"base": self.model_source.base.name}
        if place.kind != "base":
            found["adapter"] = str(place.adapter)
        return {**found, "gated": str(place.folder)} if place.kind == "gated" else found

    @property
    def sources(self) -> dict[str, str]:
        """`names`, with the commit of what came from the hub."""
        found = {kind: hub_source(name) for kind, name in self.names.items()}
        return {**found, "base": f"{found['base']}@{self.commit}"} if self.commit else found

    @property
    def endings(self) -> Any:
        """What ends an answer, whichever row gives it."""
        settings = (
            generation_config(self.model_source.base, self.loading.trust_remote_code)
            if self.model is None
            else self.model.generation_config
        )
        return find_endings(self.tokenizer, settings, self.stop_token_ids)

    def detach_inactive_gates(self) -> Loaded:
        """The same as its plain adapter, with a note, where the gates are off; otherwise itself."""
        if self.model_source.inactive_gates_reason:
            self.note, self.model_source = self.model_source.inactive_gates_reason, self.model_source.as_plain_adapter
            self.model = None if self.model is None else detach_gates(self.model)
        return self


def open_model(place: ModelSource, how: Loading = DEFAULT_LOADING) -> Loaded:
    """The model of a place with its tokenizer, frozen and in eval mode, an override of λ laid over it for good.

    Raises:
        LoragateError: in one sentence, for what transformers and PEFT cannot load.
        ArtifactError: for gates of another base or adapter.
    """
    model = open_weights(place, how)
    tokenizer = open_tokenizer(place, how)
    return Loaded(place, how, tokenizer, model.config, model, stop_token_ids=place.stop_token_ids)


def open_without_weights(place: ModelSource, how: Loading = DEFAULT_LOADING) -> Loaded:
    """Tokenizer and configuration alone, for an engine that loads the weights itself."""
    refuse_gguf(place.base, "vLLM")
    if place.kind != "base" and not place.is_dora:  # which is merged into its base first
        place.adapter_contents.require_usable("serve")
    with explained("base model", place.base.name):
        config = base_config(place.base, how.trust_remote_code)
    return Loaded(place, how, open_tokenizer(place, how), config, stop_token_ids=place.stop_token_ids)


def open_weights(place: ModelSource, how: Loading, host_memory: bool = False) -> Any:
    """The model of `open_model` without its tokenizer; `host_memory` as in `open_base`."""
    with explained("base model", place.base.name):
        base = open_base(place.base, how, host_memory)
    return base if place.kind == "base" else load_adapter(base, place)


def load_adapter(base: Any, place: ModelSource) -> Any:
    """Adapter, gates and override of a place on a base in memory, as a frozen PeftModel in eval mode.

    A LoragateError for an adapter of another base, an ArtifactError for one that the base takes in part only.
    """
    with explained("adapter", place.ref.name):
        model = load_peft(base, place.adapter)
    if place.kind == "gated":
        load_gates(model, str(place.folder))
    if place.override is not None:
        if place.kind != "gated":
            if place.override.constant is None:
                raise ConfigError(
                    f"{place.ref}: a plain adapter has no gates whose λ could be clipped; use @constant=C or @lower=C"
                )
            attach_gates(model, GateConfig(-1.0, 2.0))  # whose λ the constant replaces
        gates = gate_modules(model)
        for path, override in overrides_by_module(place.override, gates).items():
            gates[path].override = override  # for good, where `gate_override` would take it off again
    return model.eval()


def load_gated(
    folder: str | Path,
    *,
    base: str | Path | nn.Module | None = None,
    revision: str | None = None,
    base_revision: str | None = None,
    **from_pretrained_kwargs: Any,
) -> Any:
    """Load base, adapter and gates of an artifact.

    Args:
        folder: what `loragate calibrate --out` or `loragate.save_gates` wrote, or its hub id ("owner/name", also
            "owner/name@revision"), which is downloaded; with "@unit" or another override of λ behind it.
        base: where to find the base instead of the id recorded in the artifact: a folder, "owner/name" or
            "owner/name@revision"; or the base itself, in memory.
        revision: branch, tag or commit of the artifact's repository on the hub.
        base_revision: the same of the base; the recorded one where `base` is not given.
        **from_pretrained_kwargs: passed to `AutoModelForCausalLM.from_pretrained` (dtype, device_map,
            quantization_config, attn_implementation, ...). `trust_remote_code` stays off unless given.

    Returns:
        A `GatedPeftModel` in eval mode with every parameter frozen; `generate`, KV cache, batches and padding work as
        with any PeftModel. `generate` ends and samples as the artifact records, where it does (`model.generation_config`).
        `loragate.gates.train_gates_only(model)` has the gates train again.

    Raises:
        ArtifactError: if the artifact is malformed, belongs to another base or adapter, or is not to be had.
        LoragateError: for a base that cannot be loaded.
        ConfigError: for arguments that have no effect on a base in memory.
    """
    if isinstance(base, nn.Module):
        if without_effect := [*from_pretrained_kwargs, *["base_revision"] * bool(base_revision)]:
            raise ConfigError(f"{without_effect[0]} has no effect on a base that is in memory; leave it out")
        there = resolve(folder, expect="gated", revision=revision, allow_override=True, base_optional=True)
        return load_adapter(base, there)
    place = resolve(
        folder, base or "", expect="gated", revision=revision, base_revision=base_revision, allow_override=True
    )
    with explained("base model", place.base.name):
        weights = base_weights(place.base, **from_pretrained_kwargs)
    return load_adapter(weights, place)


GatedPeftModel._load_gated = staticmethod(load_gated)


def open_tokenizer(place: ModelSource, how: Loading = DEFAULT_LOADING) -> Any:
    """The tokenizer of an adapter where it has its own, else of the base."""
    chosen = place.tokenizer
    with explained("tokenizer", chosen):
        folder = Path(chosen)
        named = read_json(folder / "tokenizer_config.json").get("tokenizer_class")
        # classes that say nothing of a model family: the first is written by transformers 5, the second by earlier ones
        plain = named in ("TokenizersBackend", "PreTrainedTokenizerFast") and (folder / "tokenizer.json").is_file()
        if plain and read_json(folder / "config.json").get("model_type") not in CONFIG_MAPPING:
            # AutoTokenizer fails on these beside no model, or one it does not know; elsewhere its class is that of vLLM and TRL
            tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(chosen)
            tokenizer.init_kwargs.pop("auto_map", None)
        else:
            name, beside = _from_pretrained_arguments(place.base) if chosen == place.base.name else (chosen, {})
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=how.trust_remote_code, **beside)
            if "gguf_file" in beside:
                _split_as_named(tokenizer, place.base.name, Path(name, beside["gguf_file"]))
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        # transformers makes an empty one of a folder that has no file of it
        raise ConfigError(f"tokenizer {chosen}: there is no tokenizer in this folder")
    if how.chat_template:
        try:
            tokenizer.chat_template = Path(how.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--chat-template {how.chat_template}: cannot be read ({error.strerror})") from error
    elif place.kind != "base" and chosen == place.base.name:
        lone = place.adapter / "chat_template.jinja"
        if lone.is_file() and lone.read_text(encoding="utf-8", errors="replace") != tokenizer.chat_template:
            logger.warning(
                "%s is not used, as no tokenizer lies beside it: give it with --chat-template, or copy the tokenizer of %s there",
                lone,
                chosen,
            )
    if tokenizer.pad_token_id is None:  # padding is masked wherever it stands
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextmanager
def explained(what: str, name: str) -> Iterator[None]:
    """Turns the loading errors of transformers and PEFT into one sentence about `what`."""
    try:
        yield
    except LoragateError:
        raise
    # PEFT and transformers raise anything for a record that they cannot follow
    except (OSError, ValueError, RuntimeError, LookupError, AttributeError, TypeError, ImportError) as error:
        raise _translate_loading_error(what, name, error) from error


_NO_CLASS = "Unrecognized configuration class "
"""How transformers says that AutoModelForCausalLM has no class for a base."""


def _translate_loading_error(what: str, name: str, error: Exception) -> LoragateError:
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    if "Target modules" in text:
        return ArtifactError(f"{what} {name} does not fit this base model ({first[:300]}): {TARGETS_HINT}")
    if "size mismatch" in text:
        detail = next(line.strip() for line in text.splitlines() if "size mismatch" in line)
        sizes = [size.split(", ") for size in re.findall(r"torch\.Size\(\[([\d, ]+)\]\)", detail)]
        # of embeddings and heads the first number counts tokens
        tokens = len(sizes) == 2 and sizes[0][1:] == sizes[1][1:] and "lora_" not in detail
        hint = (
            f"tokens were added to its base, {sizes[0][0]} in all: {resize_hint(int(sizes[0][0]))}"
            if tokens
            else "it was made for another one; name that with --base"
        )
        return ArtifactError(f"{what} {name} does not fit this base model ({detail[:300].rstrip('.')}): {hint}")
    if isinstance(error, OSError) and not Path(name).exists():
        elsewhere = (
            "; say where it is with --base if it is here under another name"
            if what in ("base model", "tokenizer")
            else ""
        )
        why = (
            "the hub's cache does not hold it (HF_HUB_OFFLINE is set, so nothing is fetched)"
            if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
            else "it could not be fetched from the hub. Check the spelling, the network and access rights "
            f"({first[:200]})"
        )
        return ArtifactError(f"{what} {name}: no such folder, and {why}{elsewhere}")
    if first.startswith(_NO_CLASS):
        found = first.split(" for this kind", 1)[0].removeprefix(_NO_CLASS)
        return ConfigError(
            f"{what} {name}: causal language models are loaded here (AutoModelForCausalLM), and it has the configuration {found}. "
            "In Python load it with its own class, then PeftModel.from_pretrained(base, ADAPTER) and, for gates, "
            "loragate.load_gates(model, FOLDER)"
        )
    return LoragateError(f"{what} {name} cannot be loaded: {type(error).__name__}: {first[:400]}")
