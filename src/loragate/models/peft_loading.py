"""From an adapter's folder to a PeftModel whose every tensor is accounted for.

PEFT drops keys of the file that match nothing without a word, and leaves factors that the file lacks at their random start. Here
what went into the model is compared with what the file holds, after PEFT's own conversions (adapter names, renamed modules, fused
experts), and a difference is refused with counts, examples and the likely reason.

What an adapter's file puts in place of the base's own weights (embeddings, norms, heads, biases saved along) is not switched off
with the adapter; the weights that it displaces are kept, so that `gates.control.as_base` is the base.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from dataclasses import fields
from functools import cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict

from loragate.errors import ArtifactError
from loragate.gates.adapter_folder import AdapterFolder, read_adapter_folder
from loragate.gates.adapter_rules import Finding, base_change_reason, read_name_list, split_factor_key, tensor_kind
from loragate.gates.control import store_displaced_weights
from loragate.gates.eligibility import base_module_name, lora_layers
from loragate.gates.schema import ADAPTER_CONFIG, PREFIX

# what of a model's state belongs to an adapter that is called "default", and comes from its file
_ADAPTER_STATE_KEY = re.compile(r"\.(?:lora_\w+|modules_to_save|trainable_tokens_delta)\.default(?:\.|$)")
# findings of an adapter that runs, and answers as its base in part or whole, or against its training, or has no base
_WARNED_CODES = ("weights-zero", "weights-partly-zero", "scale-unusual", "base-changing-init")
# what other trainers and PEFT itself write into a configuration that no loader needs
_IGNORED_CONFIG_KEYS = re.compile(
    r"unsloth|swift|axolotl|lora_dtype|lorap_|merge_weights$|peft_version$|runtime_config$"
)
_LAYER = re.compile(r"\.(\d+)\.")
TARGETS_HINT = (
    "name its own base with --base; or, where transformers has since renamed the modules of this base (language_model.model of a "
    "vision-language model is model.language_model now), correct target_modules in adapter_config.json, to a list of the last "
    "parts of the names (q_proj, v_proj) for instance"
)
"""What to do with an adapter whose target_modules match nothing."""

logger = logging.getLogger("loragate")


def resize_hint(size: int | None = None) -> str:
    """What to do with an adapter of a base to which tokens were added; `size` is how many it had then, where that is known."""
    length = size or "len(tokenizer)"
    return (
        f"make that base once, base.resize_token_embeddings({length}), save it and the adapter's tokenizer in "
        'a folder, base.save_pretrained("FOLDER") and tokenizer.save_pretrained("FOLDER"), and name it with --base FOLDER; or '
        "resize it in memory, then PeftModel.from_pretrained and, for gates, loragate.load_gates"
    )


class AdapterMismatchError(ArtifactError):
    """An adapter that does not fit a base; `finding` says how."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


@cache  # once for each adapter of a process
def _warn(message: str) -> None:
    logger.warning(message)


def _require_token_rows(base: Any, folder: AdapterFolder) -> None:
    """Refuse a base without embeddings for the tokens that the adapter trained, which PEFT would look up."""
    trained = folder.config.get("trainable_token_indices") or []
    lists = trained.values() if isinstance(trained, dict) else [trained]
    highest = max((int(index) for one in lists for index in one), default=-1)
    rows = int(base.get_input_embeddings().weight.shape[0])
    if highest >= rows:
        message = (
            f"{folder.path} was not trained on {_name_of(base)}: trainable_token_indices has the token {highest}, and this base "
            f"has embeddings for {rows} tokens"
        )
        remedy = f"tokens were added to its base: {resize_hint()}"
        evidence = {"token": highest, "rows": rows}
        raise AdapterMismatchError(Finding("shape-mismatch", "error", message, remedy, evidence))


def _name_of(base: Any) -> str:
    return getattr(base.config, "_name_or_path", "") or "this base"


def load_peft(base: Any, path: str | Path, *, trainable: bool = False) -> Any:
    """A base in memory under the adapter of a folder, called "default": a PeftModel, frozen and in eval mode unless `trainable`.

    The base is a causal language model whatever task the adapter's label names. A frozen adapter has no dropout, which would
    never act, and which PEFT refuses on fused experts. An ArtifactError for a folder that cannot be used, and for tensors that
    the base has no place for, or places without one.
    """
    folder = read_adapter_folder(path)
    folder.require_usable()
    _require_token_rows(base, folder)
    for finding in folder.findings:
        if finding.code in _WARNED_CODES and finding.severity == "warning":
            _warn(str(finding))
    for finding in find_unknown_config_keys(folder):
        _warn(str(finding))
    names = {base_module_name(PREFIX + key.removeprefix(PREFIX)) for key in folder.base_weight_keys}
    own = dict(chain(base.named_parameters(remove_duplicate=False), base.named_buffers(remove_duplicate=False)))
    before = {name: own[name].detach().clone() for name in sorted(names & own.keys())}
    mapping = _key_mapping(base)
    with warnings.catch_warnings():
        # what it says of missing keys, and more, `require_fully_loaded` says below
        warnings.filterwarnings("ignore", "Found missing adapter keys")
        model: Any = PeftModel.from_pretrained(
            base, str(folder.path), config=peft_config(folder, trainable), is_trainable=trainable, key_mapping=mapping
        )
    # loads the same values again, as PEFT tells only here what it left out
    told = set_peft_model_state_dict(model, load_peft_weights(str(folder.path), device="cpu", key_mapping=mapping))
    require_fully_loaded(model, folder, told.unexpected_keys, told.missing_keys)
    for finding in find_unmatched_patterns(model, folder):
        _warn(str(finding))
    store_displaced_weights(
        model, {name: old for name, old in before.items() if not torch.equal(old, own[name].to(old.device))}
    )
    return model


def check_adapter_fits(base: Any, path: str | Path) -> Any:
    """`load_peft` on a base without weights (meta device): whether every key has its place is known from names and shapes.

    An `AdapterMismatchError` for modules that this base lacks, tensors of another shape, and as `require_fully_loaded`; an
    ArtifactError for a folder that cannot be used.
    """
    folder = read_adapter_folder(path)
    folder.require_usable()
    _require_token_rows(base, folder)
    config, mapping = peft_config(folder), _key_mapping(base)
    start, config.init_lora_weights = config.init_lora_weights, True  # others read the weights of the base
    named = _name_of(base)
    with torch.device("meta"):
        try:
            model: Any = get_peft_model(base, config)
        except ValueError as error:
            if "Target modules" not in str(error):
                raise
            message = f"{folder.path} was not trained on {named}: {str(error).splitlines()[0]:.300}"
            raise AdapterMismatchError(Finding("keys-unknown", "error", message, TARGETS_HINT)) from error
        state = {key: torch.empty(shape, dtype=getattr(torch, dtype)) for key, (dtype, shape) in folder.tensors.items()}
    config.init_lora_weights = start
    own = {name.replace(".default.", "."): list(value.shape) for name, value in model.named_parameters()}
    for key, value in state.items():
        if own.get(key, list(value.shape)) != list(value.shape):
            found, here = list(value.shape), own[key]
            rows = (
                tensor_kind(key, read_name_list(folder.config, "modules_to_save")) != "factor" and here[1:] == found[1:]
            )
            message = (
                f"{folder.path} was trained with {found[0]} tokens ({key}), and {named} has {here[0]}"
                if rows
                else f"{folder.path} was not trained on {named}: its {key} has the shape {found}, and here it would be {here}"
            )
            remedy = resize_hint(found[0]) if rows else "name its own base with --base"
            raise AdapterMismatchError(
                Finding("shape-mismatch", "error", message, remedy, {"key": key, "here": own[key]})
            )
    told = set_peft_model_state_dict(model, {_mapped(key, mapping): value for key, value in state.items()})
    require_fully_loaded(model, folder, told.unexpected_keys, told.missing_keys)
    return model


def peft_config(folder: AdapterFolder, trainable: bool = False) -> Any:
    """PEFT's configuration of an adapter, without what only its making, or layers of another library, used."""
    # whatever the label says (`adapter_rules` tells whose model it is not): without one, an aLoRA would do nothing
    given = {**copy.deepcopy(folder.config), "task_type": "CAUSAL_LM", "megatron_config": None}
    for key in ("rank_pattern", "alpha_pattern"):  # null, as other programs write them
        given[key] = given.get(key) or {}
    given["trainable_token_indices"] = given.get("trainable_token_indices") or None  # an empty list trains nothing
    given.pop("runtime_config", None)
    config: Any = PeftConfig.from_peft_type(**given)
    config.inference_mode = not trainable
    start = config.init_lora_weights
    # mica is a variant of LoRA
    if isinstance(start, str) and not base_change_reason(start) and start.lower() != "mica":
        config.init_lora_weights = True
    if not trainable:
        config.lora_dropout = 0.0
    return config


def find_unknown_config_keys(folder: AdapterFolder) -> list[Finding]:
    """A finding where the configuration has keys that this PEFT does not know, and drops: a later one may compute by them."""
    known = {field.name for field in fields(LoraConfig)}
    unknown = [
        key
        for key, value in folder.config.items()
        if value and key not in known and not _IGNORED_CONFIG_KEYS.match(key)
    ]
    if not unknown:
        return []
    shown = ", ".join(f"{key}={folder.config[key]!r:.80}" for key in unknown[:4])
    message = (
        f"{folder.path / ADAPTER_CONFIG}: PEFT {version('peft')} does not know {shown}, and loads the adapter without"
    )
    remedy = "upgrade peft, as it may be another function there; delete the key where it is of another program"
    return [Finding("config-invalid", "warning", message, remedy, {"keys": unknown[:8]})]


def find_unmatched_patterns(model: Any, folder: AdapterFolder) -> list[Finding]:
    """A finding where rank_pattern or alpha_pattern of a loaded adapter, "default", has a key that no adapted module matches."""
    names = [
        f"{path}.{layer.parameter_name}" if hasattr(layer, "parameter_name") else path
        for path, layer in lora_layers(model, "default")
    ]
    # as the file has them: PEFT adds some of its own for fused experts
    found = [
        f"{key}: {pattern!r}"
        for key in ("rank_pattern", "alpha_pattern")
        for pattern in folder.config.get(key) or {}
        if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in names)
    ]
    if not found:
        return []
    message = (
        f"{folder.path / ADAPTER_CONFIG}: no adapted module of this base is called as in {', '.join(found[:4])}, so that r and "
        "lora_alpha hold there"
    )
    remedy = "correct the pattern where transformers has renamed the modules since the training, or delete it"
    return [Finding("config-invalid", "warning", message, remedy, {"patterns": found[:8]})]


def require_fully_loaded(model: Any, folder: AdapterFolder, unexpected: list[str], missing: list[str]) -> None:
    """Refuse (`AdapterMismatchError`) a model that took a part of its adapter, "default", only, with the likely reason.

    `unexpected` keys of the file have no place, `missing` ones of the model, the base's own among them, are not in the file.
    """
    state = model.state_dict(keep_vars=True)
    taken = {id(value) for key, value in state.items() if key not in set(missing)}  # a tied weight has several names
    biases = {"none": None, "lora_only": ".base_layer.bias"}.get(str(folder.config.get("bias") or "none"), ".bias")
    absent = [
        key
        for key in missing
        if (_ADAPTER_STATE_KEY.search(key) or (biases and key.endswith(biases))) and id(state.get(key)) not in taken
    ]
    if not unexpected and not absent:
        return
    said = []
    if unexpected:
        said.append(
            f"{len(unexpected)} of its {len(folder.tensors)} tensors have no place in this base (such as {unexpected[0]})"
        )
    if absent:
        said.append(
            f"{len(absent)} that this base needs are not in the file (such as {absent[0].replace('.default', '')})"
        )
    message = f"the keys of {folder.weights} do not fit: {'; '.join(said)}"
    evidence = {
        "unknown": unexpected[:8],
        "unknown_count": len(unexpected),
        "missing": absent[:8],
        "missing_count": len(absent),
    }
    code = "keys-unknown" if unexpected else "keys-missing"
    raise AdapterMismatchError(
        Finding(code, "error", message, _explain_mismatch(model, folder, unexpected, absent), evidence)
    )


def _key_mapping(base: Any) -> dict[str, str]:
    """What PEFT's loader replaces in keys: patterns of names without its prefix, the first that matches."""
    return getattr(base, "_checkpoint_conversion_mapping", None) or {}


def _mapped(key: str, mapping: dict[str, str]) -> str:
    """A key as PEFT's loader renames it."""
    name = key.removeprefix(PREFIX)
    pattern = next((pattern for pattern in mapping if re.search(pattern, name)), None)
    return key if pattern is None else PREFIX + re.sub(pattern, mapping[pattern], name)


def _explain_mismatch(model: Any, folder: AdapterFolder, unexpected: list[str], absent: list[str]) -> str:
    """What most likely happened, and what to do."""
    layers, found = (
        _highest(key for key in model.state_dict() if not _ADAPTER_STATE_KEY.search(key)),
        _highest(unexpected),
    )
    modules = {base_module_name(name) for name, _ in model.named_modules()}
    paths = [path for key in unexpected if (path := split_factor_key(key.replace(".default", ""))[0])]
    if found > layers >= 0:
        return (
            f"The adapter has a layer {found}, and this base ends with layer {layers}: it was trained on a deeper base; name that "
            "with --base"
        )
    if not unexpected:
        present = {int(number) for key in absent for number in _LAYER.findall(key)[:1]}
        if present == set(range(min(present, default=0), layers + 1)) and 0 not in present:
            return (
                f"Layers {min(present)} to {layers} are missing: it was trained on a shallower base (name that with --base), or "
                "the file is cut short"
            )
        return (
            "The file was written in part, or adapter_config.json is of another training: take both files of one folder, with the "
            "target_modules of the weights"
        )
    if all(not key.startswith(PREFIX) for key in unexpected):
        return f"Its keys do not begin with {PREFIX!r}, as PEFT's do: rename the prefix of its keys"
    if outside := next((path for path in paths if path in modules), ""):
        if any(re.search(r"\.experts\.\d+\.", key) for key in folder.tensors):
            return (
                "It has factors of single experts, as transformers 4 had them. PEFT fuses these when it loads the adapter, and "
                "takes all that target_modules names for experts: dense layers and shared experts of the same names are not "
                f"covered (here {outside}). Merge it with transformers 4 and the PEFT of its training"
            )
        return (
            f"{outside} is a module of this base that target_modules does not name: adapter_config.json and the weights are of "
            "two trainings, or the list was changed; take both files of one folder"
        )
    ends = {_end(name): name for name in modules}
    if other := next((path for path in paths if _end(path) in ends), ""):
        return (
            f"The file says {other} where this base has {ends[_end(other)]}: the adapter was saved from a model inside another; "
            "rename the prefix of its keys"
        )
    if any(key.endswith(".bias") for key in unexpected):
        return (
            "It has trained biases for which this base has no place: name the base that it was trained on with --base"
        )
    return (
        "Its modules have other names than those of this base: it was trained on another base (name that with --base), or with "
        "model code of its own, whose names must be converted to those of transformers"
    )


def _end(path: str) -> str:
    """The end of a module's path from its layer number on; the whole path where it has none."""
    found = re.search(r"\d+\.[^0-9]*$", path)
    return found[0] if found else path


def _highest(keys: Any) -> int:
    """The highest layer number in keys; -1 where there is none."""
    return max((int(found[1]) for found in map(_LAYER.search, keys) if found), default=-1)
