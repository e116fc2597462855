"""The gated adapter on disk: written whole or not at all, read closed.

    my-gated-adapter/
      gate_config.json     what the gates are, which base and adapter they belong to, how the range was chosen
      gates.safetensors    "<module path>.weight" [d_in] and ".bias" [1], fp32
      adapter/             the PEFT adapter, without gates, with its tokenizer where it has its own
      generation_config.json  the recommended sampling, where there is one
      README.md            model card

The split keeps a program that does not know gates from taking the folder for a plain adapter. The reader refuses the
folder when a hash, module, shape, dtype, number or the schema is wrong; it never loads a part.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft.utils.save_and_load import get_peft_model_state_dict
from torch import nn
from transformers import GenerationConfig

from loragate.errors import ArtifactError, ConfigError, GateError, nearest
from loragate.files import file_sha256, write_atomically, write_json, write_text
from loragate.gates.adapter_folder import read_adapter_folder
from loragate.gates.attach import (
    attach_gates,
    attached_config,
    detach_gates,
    gate_modules,
    gate_parameters,
    is_gated,
    loaded_artifacts,
)
from loragate.gates.card import LIBRARY, render_card
from loragate.gates.eligibility import (
    active_adapter,
    base_module_name,
    examine_adapter,
    lora_layers,
    output_head,
    quantization_of,
    storage_warning,
    strip_wrapper_names,
)
from loragate.gates.gate import GateConfig
from loragate.gates.identity import (
    adapter_fingerprint,
    base_weight_samples,
    compare_base_samples,
    config_fingerprint,
    factor_widths_and_sha256,
    require_same_adapter,
    rope_settings,
    rope_warning,
)
from loragate.gates.recommended import (
    SAMPLING,
    apply_sampling,
    dict_or_empty,
    generation_settings,
    recommended_temperature,
)
from loragate.gates.recorded_base import compare_recorded_base
from loragate.gates.schema import (
    ADAPTER,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CARD,
    CONFIG,
    EVIDENCE,
    FORMAT,
    GATES,
    KEYS_NEEDING_MODEL,
    PICKLED_WEIGHTS,
    PREFIX,
    SCHEMA_VERSION,
    copy_adapter,
    is_bitwise_equal,
    lora_scaling,
    read_adapter,
    read_gate_config,
    read_tensors,
    tensor_bytes,
    write_factors,
)
from loragate.hub_names import cached_commit, cached_file, split_revision
from loragate.validate import NonNegativeFloat, validate
from loragate.version import __version__

logger = logging.getLogger("loragate")


def save_gates(
    peft_model: nn.Module,
    folder: str | Path,
    adapter_name: str | None = None,
    adapter_source: str | Path | None = None,
    *,
    k: int | None = None,
    base_id: str | None = None,
    base_revision: str | None = None,
    adapter_id: str | None = None,
    stop_token_ids: Collection[int] | None = None,
    evidence: dict[str, Any] | None = None,
    temperature: float | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the artifact of a gated adapter.

    Of gates that `load_gates` put on, and that did not change since, what is not given here is taken from the folder they
    came from; where the gates changed, only what says which base and adapter they belong to.

    Args:
        peft_model: model with gates on `adapter_name`.
        folder: target; it is created, and may exist only if it holds no artifact yet, or with `overwrite`.
        adapter_name: None for the active adapter.
        adapter_source: folder of the plain adapter; its files, with those of its tokenizer, are copied byte for byte.
            Without it the adapter is written anew by PEFT, gate keys left out, and readers take the base's tokenizer.
        k: support size of the entropy objective the gates were trained with, 0 for the whole vocabulary, where `evidence`
            holds no training that says it; unknown (null in the record) where neither does.
        base_id, base_revision: how to find the base again; defaults to the adapter's own record, and where that names none,
            to what the model was loaded from. The id may carry the revision, as in "owner/name@revision". A model does not
            say which revision it was loaded at: name it where that was not the default one.
        adapter_id: hub id of the plain adapter, where it has one, with "@revision" where that is known; named in the card.
        stop_token_ids: tokens that end an answer, recorded so that `load_gates` can set them; take those of
            `loragate.data.find_endings`, which knows where the chat template ends a turn. None records nothing.
        evidence: JSON-able record under the keys "parity", "selection" and "training"; other keys are refused.
        temperature: the recommended sampling, 0 for greedy decoding: at which the gates were shown to help. It is written as
            `generation_config.json`, too, and is what every reader of the folder samples at unless told otherwise. None
            recommends nothing.
        overwrite: replace an artifact in the folder, or what an interrupted write left of one; an `adapter` folder of anybody
            else's is never removed. A README.md that is no card of ours stays as it is.

    Returns:
        The folder. `gate_config.json` is written last, so an interrupted write leaves no readable artifact.

    Raises:
        GateError: if the adapter carries no gates or a gate is not finite.
        ArtifactError: if the folder already holds an artifact, another README.md, or a generation config of its own;
            with `overwrite`, too, if it holds a plain adapter at its top, or an `adapter` folder (or link) that no artifact wrote.
        ConfigError: for a `k` that is no support size or not that of the training, evidence under another key or not
            JSON-able, or a temperature that is none. Nothing is written then.
    """
    folder = Path(folder)
    name = active_adapter(peft_model, adapter_name)
    # trainers cast what trains on a quantised base to bf16; the reader takes fp32 alone
    tensors = {
        key: value.detach().to("cpu", torch.float32).contiguous()
        for key, value in gate_parameters(peft_model, name).items()
    }
    broken = [key for key, value in tensors.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise GateError(f"gate {broken[0]} is not finite; nothing was written")
    gate = asdict(attached_config(peft_model, name))
    data, sha256 = tensor_bytes(tensors, gate), adapter_fingerprint(peft_model, name)

    source_folder, known = loaded_artifacts(peft_model).get(name, (None, {}))
    if source_folder is None or known["adapter"]["sha256"] != sha256:
        source_folder, known = None, {}
    if source_folder is not None and adapter_source is None and (source_folder / ADAPTER).is_dir():
        adapter_source = source_folder / ADAPTER
    if not base_id and known:
        base_id, base_revision = known["base"]["id"], base_revision or known["base"].get("revision")
    adapter, adapter_revision = split_revision(adapter_id or "")
    adapter = adapter or known.get("adapter", {}).get("id", "")
    adapter_revision = adapter_revision or known.get("adapter", {}).get("revision", "")
    if stop_token_ids is None:
        stop_token_ids = known.get("stop_token_ids")
    gates_sha256 = hashlib.sha256(data).hexdigest()
    if known.get("gates_sha256") == gates_sha256:
        evidence = evidence or {key: known[key] for key in EVIDENCE if known.get(key) is not None}
        temperature = recommended_temperature(known) if temperature is None else temperature
        k = known["k"] if k is None else k

    # all that can refuse comes before the first file
    if temperature is not None:
        temperature = validate(NonNegativeFloat, temperature, "temperature")
    k = _resolve_entropy_k(peft_model, k, evidence or {})
    if not overwrite:
        require_no_artifact(folder, adapter_source)
    replaced = _require_own_files(folder, adapter_source)
    # with a temperature, an interrupted write may have left it
    own = (folder / CONFIG).exists() or (temperature is not None and _holds_artifact(folder))
    if (folder / SAMPLING).exists() and not own:
        raise ArtifactError(f"{folder / SAMPLING} would not be that of these gates; choose another folder or remove it")
    # somebody's own adapter folder, which is left as it is
    if (folder / ADAPTER).exists() and _is_adapter_of(folder, adapter_source) and not _holds_artifact(folder):
        state = _adapter_state(peft_model, name)
        if not _load_if_same_adapter(folder / ADAPTER, peft_model, name, state):
            raise ArtifactError(
                f"{folder / ADAPTER} does not hold the adapter as it is loaded, so it would be overwritten; choose another folder"
            )
    peft_config: Any = getattr(peft_model, "peft_config", {}).get(name)
    record = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "loragate_version": __version__,
        "gate": gate,
        "k": k,
        "base": _base_record(peft_model, peft_config, base_id, base_revision),
        "adapter": {
            "sha256": sha256,
            "rank": getattr(peft_config, "r", None),
            "alpha": getattr(peft_config, "lora_alpha", None),
            **({"id": adapter} if adapter else {}),
            **({"revision": adapter_revision} if adapter_revision else {}),
        },
        "modules": list(gate_modules(peft_model, name)),
        **({} if stop_token_ids is None else {"stop_token_ids": sorted(stop_token_ids)}),
        **dict.fromkeys(EVIDENCE),
        **(evidence or {}),
    }
    (folder / CONFIG).unlink(missing_ok=True)  # of the artifact that is replaced: from here on it is none
    # first: by them an interrupted write is known again, and with it the adapter's folder as ours
    write_atomically(folder / GATES, lambda path: path.write_bytes(data))
    if replaced:  # perhaps with another tokenizer
        shutil.rmtree(folder / ADAPTER, ignore_errors=True)
    base = record["base"]
    write_adapter(peft_model, name, folder / ADAPTER, adapter_source, base=base["id"], revision=base["revision"] or "")
    record |= write_generation_config(folder, temperature)
    record["gates_sha256"] = gates_sha256
    if not _foreign_card(folder):
        write_text(folder / CARD, render_card(folder.resolve().name, record))
    write_json(folder / CONFIG, record)  # last: without it the folder is no artifact
    require_readable(folder)
    return folder


_CHANGED = (
    "adapter_config.json does not record a rank or a strength that was changed in memory (set_scale, preparation for hot "
    "swapping): set it back before saving; for another strength lay a constant λ over the gates"
)


def require_readable(folder: Path) -> None:
    """Read a written artifact back: the record, the gates, and the adapter beside them by its hash.

    Its record is removed where it is refused, with the ArtifactError of a reader.
    """
    try:
        record = read_gate_config(folder)
        gates, (config, state) = read_tensors(folder, record), read_adapter(folder / ADAPTER)
        widths, sha256 = factor_widths_and_sha256(config, state)
        partly = any(config.get(key) for key in KEYS_NEEDING_MODEL)
        require_same_adapter(folder, record, gates, widths, None if partly else sha256, _CHANGED)
    except ArtifactError:
        (folder / CONFIG).unlink(missing_ok=True)
        raise


def require_no_artifact(folder: Path, adapter_source: str | Path | None = None) -> None:
    """Refuse (ArtifactError) a folder that no artifact can be written to without a loss.

    `adapter_source` is the plain adapter's folder; it may be the folder's own `adapter`.
    """
    if (folder / CONFIG).exists():
        raise ArtifactError(f"{folder} already holds a gated adapter; choose another folder or remove it first")
    if _foreign_card(folder):
        raise ArtifactError(
            f"{folder / CARD} would be overwritten by the model card; choose another folder or move it away"
        )
    _require_own_files(folder, adapter_source)


def _require_own_files(folder: Path, adapter_source: str | Path | None) -> bool:
    """Whether the folder's `adapter` is to be removed before another is written; an ArtifactError where it is somebody else's."""
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, PICKLED_WEIGHTS):
        if (folder / file).exists():
            raise ArtifactError(
                f"{folder / file} is of a plain adapter, which every other program would load there in place of the gated one; "
                "choose another folder, or move the plain adapter's files out of this one"
            )
    place = folder / ADAPTER
    if place.is_symlink():
        raise ArtifactError(
            f"{place} is a link to {place.resolve()}, which would be overwritten; remove the link or choose another folder"
        )
    if not place.exists() or _is_adapter_of(folder, adapter_source):
        return False
    if not _holds_artifact(folder):
        raise ArtifactError(
            f"{place} exists, and no gated adapter wrote it, so it is not overwritten; choose another folder, move it away, or "
            "give it as the adapter's source where it is that"
        )
    if adapter_source is not None and place.resolve() in Path(adapter_source).resolve().parents:
        raise ArtifactError(
            f"{adapter_source}, the adapter's source, lies in {place}, which is replaced; choose another folder"
        )
    return True


def _is_adapter_of(folder: Path, adapter_source: str | Path | None) -> bool:
    """Whether an adapter's source is the folder's own `adapter`."""
    return adapter_source is not None and Path(adapter_source).resolve() == (folder / ADAPTER).resolve()


def _holds_artifact(folder: Path) -> bool:
    """Whether a folder holds an artifact, or what an interrupted write left of one, which begins with the gates."""
    return any((folder / name).is_file() for name in (CONFIG, GATES))


def _foreign_card(folder: Path) -> bool:
    """Whether a folder holds a README.md of somebody else; one of ours is what an interrupted write left."""
    card = folder / CARD
    return card.exists() and LIBRARY not in card.read_text(encoding="utf-8", errors="replace")


def _base_record(model: Any, peft_config: Any, base_id: str | None, base_revision: str | None) -> dict[str, Any]:
    """How to find the base again, and by what to know it; warns where nothing names it."""
    # empty where it was made in memory
    loaded_from = getattr(getattr(model, "config", None), "_name_or_path", None)
    own = str(getattr(peft_config, "base_model_name_or_path", None) or loaded_from or "")
    if not base_id and not own:
        logger.warning(
            "the base of this adapter has no name, so loragate.load_gated will find it only with base=…; record one with "
            "save_gates(…, base_id=…)"
        )
    name, revision = split_revision(base_id or own, base_revision)
    if name == own:  # the adapter's pin means nothing on another base
        revision = revision or getattr(peft_config, "revision", None) or ""
    # the commit that the revision meant when the base was loaded, as the hub cache knows it
    commit = cached_commit(name, revision) if loaded_from == name else None
    # a base that is one GGUF file is known by it, where the file is at hand
    file = Path(name) if Path(name).is_file() else cached_file(name, revision)
    return {
        "id": name,
        "revision": commit or revision or None,
        **({"file": {"name": file.name, "bytes": file.stat().st_size, "sha256": file_sha256(file)}} if file else {}),
        "config_sha256": config_fingerprint(model),
        "rope": rope_settings(model),
        "quantization": quantization_of(model),
        "weights": base_weight_samples(model),
    }


def write_generation_config(folder: Path, temperature: float | None) -> dict[str, Any]:
    """generation_config.json of a folder, as transformers writes it; returns what gate_config.json says of it.

    Temperature 0 is greedy decoding; None recommends nothing, and a file that is there is taken away.
    """
    if temperature is None:
        (folder / SAMPLING).unlink(missing_ok=True)
        return {}
    write_text(folder / SAMPLING, GenerationConfig(**generation_settings(temperature)).to_json_string())
    return {"sampling": {"temperature": temperature}}


def _resolve_entropy_k(model: nn.Module, k: int | None, evidence: dict[str, Any]) -> int | None:
    """The support of the entropy objective: what the training recorded, at most the vocabulary, else `k` as given.

    A ConfigError for a `k` that is no support or another one, and for evidence that cannot be recorded.
    """
    if unknown := [key for key in evidence if key not in EVIDENCE]:
        raise ConfigError(
            f"evidence holds the key {unknown[0]!r}{nearest(str(unknown[0]), EVIDENCE)} (the keys are {', '.join(EVIDENCE)})"
        )
    try:
        json.dumps(evidence, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"evidence cannot be written as JSON ({error}); give numbers, text, lists and dictionaries, no tensors, NaN or "
            "infinity"
        ) from error
    if k is not None and not _is_support(k):
        raise ConfigError(f"k must be an integer of at least 2, or 0 for the whole vocabulary, found {k!r}")
    training = dict_or_empty(evidence.get("training"))
    # an objective of one's own has a support of its own, or none; the settings' is that of the measured entropy
    trained: Any = training.get("k", dict_or_empty(training.get("settings")).get("k"))
    if not _is_support(trained):
        return k
    head: Any = output_head(model)
    vocabulary = trained if head is None else int(head.weight.shape[0])  # [V, D]
    # 0 says the whole vocabulary, as does any k above its size
    if k is not None and min(k or vocabulary, vocabulary) != min(trained or vocabulary, vocabulary):
        raise ConfigError(f"k is {k}, but the training in the evidence records k = {trained}; leave k out")
    return int(min(trained or vocabulary, vocabulary))


def _is_support(k: Any) -> bool:
    """Whether k can be the support of the entropy objective: at least 2, or 0 for the whole vocabulary."""
    return isinstance(k, int) and not isinstance(k, bool) and (k == 0 or k > 1)


def write_adapter(
    model: nn.Module,
    adapter_name: str,
    folder: Path,
    source: str | Path | None = None,
    *,
    base: str = "",
    revision: str = "",
) -> None:
    """The plain adapter with all that it changes: copied from `source` where that holds it, else written as PEFT does.

    PEFT writes what it knows to be the adapter's. Embeddings, head, norms and biases that lie in the base's own tensors, because
    they were trained or saved along, are written too: those that differ from the files of the base, where these are at hand.
    All tensors are read back (ArtifactError where the folder does not hold them). `base` is the folder or hub id that a reader
    will load, at `revision`; without it the adapter's own record.
    """
    state = _adapter_state(model, adapter_name)
    stored = {} if source is None else _load_if_same_adapter(Path(source), model, adapter_name, state)
    if source is not None and stored:
        if Path(source).resolve() != folder.resolve():
            there = read_adapter(Path(source))[1]
            named = read_adapter_folder(source).tensors.keys()  # as the file has them
            as_it_is = named == stored.keys() and all(is_bitwise_equal(there[key], stored[key]) for key in there)
            pickled = not (Path(source) / ADAPTER_WEIGHTS).is_file()
            copy_adapter(Path(source), folder, stored if pickled or not as_it_is else None)
        return
    if source is not None:
        what = "does not hold the adapter as it is loaded" if Path(source).is_dir() else "does not exist"
        logger.warning(
            "%s %s; the loaded adapter is written instead of a copy of the folder and its tokenizer", source, what
        )
    peft_config: Any = model.peft_config[adapter_name]  # type: ignore[index]
    if not base:
        base, revision = str(peft_config.base_model_name_or_path or ""), str(peft_config.revision or "")
    write_factors(folder, {**state, **_find_changed_base_weights(model, base, revision)})
    # as PEFT's own save_pretrained does, or whoever loads the folder would get factors that train
    before, peft_config.inference_mode = peft_config.inference_mode, True
    try:
        type(peft_config).save_pretrained(peft_config, str(folder))  # its own, which does not warn of lost gates
    finally:
        peft_config.inference_mode = before


def _adapter_state(model: nn.Module, adapter_name: str) -> dict[str, torch.Tensor]:
    """{PEFT's name: tensor on the CPU} of what PEFT knows to be the adapter's, gates left out."""
    # a wrapper around single layers may take its name out of state_dict, where PEFT then finds no factors
    wrapped = any(strip_wrapper_names(name) != name for name, _ in model.named_modules())
    given = dict(model.named_parameters(remove_duplicate=False)) if wrapped else None
    state = get_peft_model_state_dict(model, state_dict=given, adapter_name=adapter_name)
    # a natively loaded adapter has the base model's own names; PEFT reads them under its wrapper's prefix
    return {
        PREFIX + strip_wrapper_names(key).removeprefix(PREFIX): value.detach().cpu()
        for key, value in state.items()
        if ".lora_gate." not in key
    }


def _find_changed_base_weights(model: nn.Module, base: str, revision: str) -> dict[str, torch.Tensor]:
    """{PEFT's name: tensor} of what of the base in memory its files do not hold; warns of what no adapter can bring along."""
    difference = compare_recorded_base(model, base, revision)
    if difference.other or difference.resized:
        what = (
            f"has a vocabulary of another size ({difference.resized[0]})"
            if not difference.other
            else f"differs from it in {len(difference.other)} weights ({difference.other[0]} is the first)"
        )
        logger.warning(
            "the base in memory is not %s: it %s. loragate.load_gated will refuse this folder on that base. Save the base in "
            'memory once, base.save_pretrained("FOLDER"), and name it: base_id="FOLDER"',
            base,
            what,
        )
    if difference.other:
        return {}
    # the original of a module that is saved whole has no such name: its copy is used in its place
    names = {base_module_name(name): name for name, _ in model.named_parameters(remove_duplicate=False)}
    found = {names[name]: value for name, value in difference.beside.items() if name in names}
    return {PREFIX + strip_wrapper_names(name).removeprefix(PREFIX): value for name, value in found.items()}


def _load_if_same_adapter(
    folder: Path, model: Any, adapter_name: str, state: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of a folder, by PEFT's names, where it holds exactly the adapter that is loaded; empty where it does not.

    That is: rank, alpha and scaling of each module, and every tensor, of what PEFT loads as the adapter's and of what lies in
    the base (embeddings, head, norms or biases saved along), as the model holds it, in the model's dtype.
    """
    if not (folder / ADAPTER_CONFIG).is_file() or not any(
        (folder / file).is_file() for file in (ADAPTER_WEIGHTS, PICKLED_WEIGHTS)
    ):
        return {}
    config, tensors = read_adapter(folder)
    loaded_config = vars(model.peft_config[adapter_name])  # which PEFT would write
    if any(
        lora_scaling(config, path) != lora_scaling(loaded_config, path) for path, _ in lora_layers(model, adapter_name)
    ):
        return {}
    stored = {PREFIX + key.removeprefix(PREFIX): value for key, value in tensors.items()}  # some programs leave it out
    of_base = {
        PREFIX + strip_wrapper_names(name).removeprefix(PREFIX): value
        for name, value in model.named_parameters(remove_duplicate=False)
    }
    rounded = {}
    for key, value in stored.items():
        found = state[key] if key in state else of_base.get(key)
        if found is None:
            return {}
        held = found.detach().cpu()
        if held.shape != value.shape or not torch.equal(held, value.to(held.dtype)):
            return {}
        # by its hash in fp32 the adapter is known again, so what was rounded in loading is written as it is loaded
        if key in state and not torch.equal(held.float(), value.float()):
            rounded[key] = held
    if rounded:
        logger.warning(
            "%s holds %d tensors in finer precision than they are loaded in (%s is the first); they are written as loaded",
            folder,
            len(rounded),
            next(iter(rounded)),
        )
    return {**stored, **rounded} if state.keys() <= stored.keys() else {}


def load_gates(peft_model: nn.Module, folder: str | Path, adapter_name: str | None = None) -> nn.Module:
    """Put the gates of an artifact onto a model whose adapter is loaded.

    Args:
        peft_model: model carrying the adapter the gates were trained for, on the same base.
        folder: the artifact.
        adapter_name: None for the active adapter.

    Returns:
        The model, gated. The gates are frozen; `loragate.gates.train_gates_only(model)` has them train again. Its generation
        config stops at the tokens that the artifact records, too, and samples as the artifact recommends, if it does, until
        the next one is loaded or `detach_gates` puts back what it was.

    Raises:
        GateError: if the model has no such adapter, or it carries gates already.
        ArtifactError: naming the file and what is wrong: unknown schema, tampered hash, missing or extra module, wrong
            shape or dtype, non-finite numbers, another adapter or another base. The model is left ungated.
    """
    folder = Path(folder)
    name = active_adapter(peft_model, adapter_name)
    if is_gated(peft_model, name):
        raise GateError(
            f"adapter {name!r} carries gates already; take them off first: loragate.detach_gates(model, {name!r})"
        )
    record = read_gate_config(folder)
    config = GateConfig(**record["gate"])
    tensors = read_tensors(folder, record)
    _check_identity(peft_model, name, folder, record)
    _check_modules(peft_model, name, folder, record, config)
    attach_gates(peft_model, config, name)
    # shapes are known only now; a wrong one takes all gates off again
    for key, parameter in gate_parameters(peft_model, name).items():
        found, expected = tuple(tensors[key].shape), tuple(parameter.shape)
        if found != expected:
            detach_gates(peft_model, name)
            raise ArtifactError(f"{folder / GATES}: {key} has shape {found}, expected {expected}")
        parameter.requires_grad_(False).copy_(tensors[key])
    loaded_artifacts(peft_model)[name] = (folder.resolve(), record)
    _apply_generation_settings(peft_model, record)
    stored = storage_warning(record["base"].get("quantization"), quantization_of(peft_model))
    for warning in filter(None, [stored, rope_warning(record["base"].get("rope"), rope_settings(peft_model))]):
        logger.warning(warning)
    return peft_model


def _apply_generation_settings(model: Any, record: dict[str, Any]) -> None:
    """Recorded stop tokens and sampling into the model's generation config; a PeftModel and its base share the object."""
    settings = getattr(model, "generation_config", None)
    if settings is None:
        return
    known = settings.eos_token_id
    before = [] if known is None else [known] if isinstance(known, int) else list(known)
    if more := sorted(set(record.get("stop_token_ids") or []) - set(before)):
        settings.eos_token_id = [*before, *more]
    apply_sampling(model, [one for _, one in loaded_artifacts(model).values()])


def _check_identity(model: nn.Module, adapter_name: str, folder: Path, record: dict[str, Any]) -> None:
    where = folder / CONFIG
    found = adapter_fingerprint(model, adapter_name)
    if found != record["adapter"]["sha256"]:
        raise ArtifactError(
            f"{where}: these gates belong to another adapter (sha256 {record['adapter']['sha256'][:12]}…, the loaded "
            f"adapter {adapter_name!r} has {found[:12]}…). Load the adapter from {folder / ADAPTER}, with its factors in fp32 as "
            "PeftModel.from_pretrained does it (autocast_adapter_dtype=True); the model may be cast after that"
        )
    if config_fingerprint(model) != record["base"]["config_sha256"]:
        raise ArtifactError(
            f"{where}: these gates were made on a base of another architecture ({record['base']['id'] or 'unnamed'})"
        )
    difference = compare_base_samples(model, record["base"]["weights"])
    if difference is not None:
        raise ArtifactError(
            f"{where}: these gates were made on another base ({record['base']['id'] or 'unnamed'}): {difference}"
        )


def _check_modules(
    model: nn.Module, adapter_name: str, folder: Path, record: dict[str, Any], config: GateConfig
) -> None:
    verdicts = examine_adapter(model, adapter_name, config.target_modules)
    present = {verdict.path for verdict in verdicts if verdict.status == "gate"}
    stored = set(record["modules"])
    if missing := sorted(present - stored):
        raise ArtifactError(f"{folder / CONFIG}: no gate for module {missing[0]}, which the adapter adapts")
    if extra := sorted(stored - present):
        refusal = next((verdict.reason for verdict in verdicts if verdict.path == extra[0]), "")
        raise ArtifactError(
            f"{folder / CONFIG}: a gate for {extra[0]}, which cannot be gated in the loaded adapter"
            + (f" ({refusal})" if refusal else "")
        )
