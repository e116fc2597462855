"""From the text that names a model to the place where it is: what kind of model, in which folder, on which base.

A local folder wins over a hub id of the same name. An adapter on the hub is downloaded, pinned to one commit. The records of
adapter and gates are read once, here; nothing below looks at a path again.
"""

from __future__ import annotations

import difflib
import logging
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import errors, hf_hub_download, snapshot_download

from loragate.errors import ArtifactError, ConfigError
from loragate.files import folder_sha256, read_json
from loragate.gates.adapter_folder import AdapterFolder, read_adapter_folder
from loragate.gates.adapter_rules import LORA_RANKS as LORA_RANKS
from loragate.gates.override import Override, parse_override, split_folder
from loragate.gates.override import parse_slot_override as parse_slot_override
from loragate.gates.recommended import SAMPLING, exported_sampling, recommended_temperature
from loragate.gates.schema import (
    ADAPTER,
    ADAPTER_CONFIG,
    CARD,
    CONFIG,
    GATES,
    lost_gates,
    own_tokenizer,
    read_gate_config,
    read_tensors,
)
from loragate.gates.schema import (
    read_adapter_config as read_adapter_config,
)
from loragate.hub_names import cached_commit, hub_errors, hub_source, is_hub_id, parse_hub_name, split_revision

Kind = Literal["base", "adapter", "gated"]
_WHAT = {"any": "model", "base": "base model", "adapter": "adapter", "gated": "gated adapter"}

# what is downloaded, by the file that tells what is in a repository
_FILES: dict[str, tuple[str, ...]] = {
    CONFIG: (CONFIG, GATES, SAMPLING, CARD, f"{ADAPTER}/*"),
    # tokenizers and templates have many files, of which tokenization_*.py is kept as data alone
    ADAPTER_CONFIG: (
        *("adapter_*", SAMPLING, CARD, "*token*.json", "tokeniz*", "*.tiktoken", "tekken.json", "vocab.*"),
        *("merges.txt", "*.model", "*.jinja", "additional_chat_templates/*"),
    ),
}

logger = logging.getLogger("loragate")


@dataclass(frozen=True)
class ModelRef:
    """What a user typed: a folder or a hub id, with a revision and an override of λ behind it."""

    name: str  # folder, or hub id without revision
    revision: str = ""  # branch, tag or commit on the hub; empty for a folder, and for the default branch
    override: str = ""  # of λ, such as "unit" or "constant=0.5"; empty for none

    @classmethod
    def parse(cls, text: str | Path, revision: str | None = None) -> ModelRef:
        """`owner/name@v1` is a revision, `owner/name@unit` an override, `owner/name@v1@unit` both; a folder that is there under
        the whole text is just that. A revision that is called like an override is named by its commit.

        `revision` is that of a hub id, from elsewhere. A ConfigError for an override that is not known, an ArtifactError for two
        revisions that differ.
        """
        head, _ = split_folder(text)
        # what split_folder took off is "@" and the override as typed, or nothing
        return cls(*split_revision(head, revision), str(text)[len(head) + 1 :])

    def __str__(self) -> str:
        return "@".join(filter(None, (self.name, self.revision, self.override)))

    @property
    def on_hub(self) -> bool:
        """Whether the name has the form owner/name, and no folder here is called so."""
        return parse_hub_name(self.name) is not None

    @property
    def absolute_name(self) -> str:
        """The name for a record: a folder as its absolute path, which still works from another folder; a hub id as it is."""
        return str(Path(self.name).resolve()) if Path(self.name).exists() else self.name

    @property
    def is_gguf(self) -> bool:
        """Whether the name is that of one GGUF file, with everything in it; see `models.loading`."""
        return self.name.lower().endswith(".gguf")

    def commit(self) -> str:
        """The commit that was last loaded from the hub, from its cache; empty for a folder."""
        return (cached_commit(self.name, self.revision) or self.revision) if is_hub_id(self.name) else ""


@dataclass(frozen=True)
class ModelSource:
    """Where a model is."""

    ref: ModelRef  # what was asked for
    kind: Kind
    folder: Path  # of the adapter, or of the base, which may be a GGUF file; of a base on the hub its id, and not there
    base: ModelRef  # with its revision; its name is empty where neither --base nor a record names one
    gates: Mapping[str, Any] | None = None  # gate_config.json; None where there are no gates
    adapter_config: Mapping[str, Any] | None = None  # adapter_config.json of the plain adapter; None for a base

    @property
    def adapter(self) -> Path:
        """The folder of the plain PEFT adapter."""
        return self.folder / ADAPTER if self.kind == "gated" else self.folder

    @property
    def record_name(self) -> str:
        """For records: "owner/name@commit" of an adapter from the hub, another folder as it was named; a base as it was named."""
        if self.kind == "base":
            return str(self.ref)
        return hub_source(self.folder) if self.ref.on_hub else str(self.folder)

    @property
    def hub_id(self) -> str | None:
        """`record_name` of an adapter that was named by its hub id, for the card; None for a folder, whose path means nothing to
        others."""
        return self.record_name if self.ref.on_hub else None

    @property
    def fingerprint(self) -> str:
        """What tells this model from another of the same name: `folder_sha256`, or name and commit on the hub."""
        return self.record_name if self.ref.on_hub else folder_sha256(self.folder)

    @property
    def override(self) -> Override | None:
        """What is laid over λ; None for nothing."""
        return parse_override(self.ref.override) if self.ref.override else None

    @property
    def range(self) -> tuple[float, float] | None:
        """[L, U] of the gates; None where there are none, and where something is laid over λ."""
        if self.kind != "gated" or self.gates is None or self.ref.override:
            return None
        return self.gates["gate"]["lower"], self.gates["gate"]["upper"]

    @property
    def needs_lambda(self) -> bool:
        """Whether λ has to be computed: gates, or an override on a plain adapter."""
        return self.kind == "gated" or bool(self.ref.override)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, as the gated folder records them."""
        return tuple((self.gates or {}).get("stop_token_ids") or ())

    @cached_property
    def sampling(self) -> Mapping[str, Any] | None:
        """The record that may recommend a temperature: gate_config.json, or what `read_sampling_record` finds beside a plain
        adapter.

        None with an override, which was not asked when that was found.
        """
        if self.ref.override:
            return None
        return read_sampling_record(self.folder) if self.gates is None and self.kind == "adapter" else self.gates

    @property
    def recommended_temperature(self) -> float | None:
        """At which an adapter's folder is to be sampled; 0 is greedy, None for nothing."""
        return recommended_temperature(self.sampling)

    @property
    def is_dora(self) -> bool:
        """Whether the adapter is DoRA: it takes no gates, and vLLM serves it merged into its base."""
        return bool((self.adapter_config or {}).get("use_dora"))

    @property
    def adapter_contents(self) -> AdapterFolder:
        """What the files of the plain adapter hold."""
        return read_adapter_folder(self.adapter)

    @property
    def tokenizer(self) -> str:
        """Where the tokenizer is: the adapter's own folder of it, or the base, which may be on the hub."""
        own = None if self.kind == "base" else own_tokenizer(self.adapter)
        return self.base.name if own is None else str(own)

    @property
    def path_with_override(self) -> str:
        """The place for another process or for vLLM: its absolute folder, with the override behind it."""
        return "@".join(filter(None, (str(self.folder.resolve()), self.ref.override)))

    @property
    def as_plain_adapter(self) -> ModelSource:
        """The plain adapter of a gated place, on the same base; any other place as it is."""
        return self if self.kind != "gated" else replace(self, kind="adapter", folder=self.adapter)

    @cached_property
    def inactive_gates_reason(self) -> str:
        """Why a gated folder holds the plain adapter, as one sentence; empty for anything else.

        Where calibration kept the adapter, the folder's gates are zero. Scoring them as a row
        of their own would compare the adapter with itself.
        """
        if self.kind != "gated":
            return ""
        if any(bool(values.any()) for values in read_tensors(self.folder, dict(self.gates or {})).values()):
            return ""
        why = "nothing beat the adapter on the dev set when the range was chosen"
        return f"the gates of {self.ref.name} are off: {why}. It answers as the plain adapter that it is"


def resolve(
    text: str | Path,
    base: str | Path = "",
    *,
    expect: Literal["any", "base", "adapter", "gated"] = "any",
    what: str = "",
    revision: str | None = None,
    base_revision: str | None = None,
    allow_override: bool = False,
    base_optional: bool = False,
) -> ModelSource:
    """The place that a text names; an adapter on the hub is downloaded.

    Args:
        text: folder, "owner/name" or "owner/name@revision", with "@override" behind it where `allow_override` says so.
        base: of --base: folder, "owner/name" or "owner/name@revision" in place of the recorded one.
        expect: the kind that is needed; "any" takes all three.
        what: the kind in words, for errors, such as "reference model".
        revision, base_revision: what could also stand behind the @ of `text` and `base`.
        allow_override: whether an override of λ has an effect here.
        base_optional: the base is not needed, or checked by the caller.

    Raises:
        ConfigError: for a name that leads nowhere, another kind than `expect`, or a base that is not named or not here, with
            the folder that was probably meant.
        ArtifactError: for records that cannot be read, and for a revision or file that is not on the hub.
    """
    text, what = str(text), what or _WHAT[expect]
    ref = ModelRef.parse(text, revision)
    if revision and not ref.on_hub:
        raise ArtifactError(
            f"{text} is no hub id (owner/name), so the revision {revision!r} has no effect; leave it out"
        )
    if not allow_override:
        _refuse_override(ref, what)
    given = ModelRef.parse(base, base_revision) if base else None
    if given is not None:
        _refuse_override(given, "base model")
    if expect == "base":
        return _resolve_base(ref, what)
    folder = _folder_of(ref, what, expect, base_given=given is not None)
    # here only "any" may still be a base
    if folder is None or not is_adapter(folder):
        if folder is not None and not (folder / "config.json").is_file() and _suggest_contents(folder):
            raise _no_adapter_error(ref, folder)  # the folder of a training's checkpoints, or of several adapters
        return _resolve_base(ref, what)
    if is_gated(folder) and expect != "adapter":  # refused as an adapter, with the way to the plain one inside
        return _gated_place(ref, folder, given, base_revision, base_optional)
    return _adapter_place(ref, folder, given, base_optional)


def is_gated(folder: str | Path) -> bool:
    """Whether a folder is a gated adapter, right or wrong in what it holds."""
    return (Path(folder) / CONFIG).is_file()


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder is an adapter, gated or plain."""
    return is_gated(folder) or (Path(folder) / ADAPTER_CONFIG).is_file()


def plain_adapter(folder: str | Path) -> Path:
    """The plain PEFT adapter of a folder that is one, or that holds it beside gates."""
    return Path(folder) / ADAPTER if is_gated(folder) else Path(folder)


def read_sampling_record(folder: Path) -> dict[str, Any]:
    """The record that may recommend a temperature: gate_config.json, or what `loragate export` wrote beside a plain adapter.

    Raises:
        ArtifactError: for a gated folder that cannot be read.
    """
    if is_gated(folder):
        return read_gate_config(folder)
    return exported_sampling(read_json(folder / SAMPLING))


def require_here(what: str, name: str, *, of_adapter: bool = False) -> None:
    """Refuse (ConfigError) a name that is neither a folder here nor a hub id, before anything is asked of the network.

    The base of an adapter (`of_adapter`) may have one of the hub's old names without an owner (gpt2).
    """
    if Path(name).is_file() and not name.lower().endswith(".gguf"):
        raise ConfigError(f"{what} {name} is a file, expected the folder that holds it ({Path(name).parent})")
    on_hub = is_hub_id(name) if of_adapter else parse_hub_name(name) is not None
    if not Path(name).exists() and not on_hub:
        raise ConfigError(f"{what} {name} does not exist (a hub id is written owner/name){_suggest_sibling(name)}")


def _folder_of(ref: ModelRef, what: str, expect: str, *, base_given: bool) -> Path | None:
    """The folder that must or may hold an adapter, downloaded where it is on the hub; None for a base on the hub."""
    if not ref.on_hub:
        folder = Path(ref.name)
        if expect != "gated":  # whose reader says best what a folder is instead
            require_here(what, ref.name)
            if folder.suffix.lower() == ".gguf" and folder.is_file() and (expect == "adapter" or base_given):
                raise ConfigError(
                    f"{ref.name} is a GGUF file: a base, or an adapter for llama.cpp, which PEFT does not read. Give the folder "
                    "of the PEFT adapter that it was converted from"
                )
            if not is_adapter(folder) and (expect == "adapter" or base_given):
                raise _no_adapter_error(ref, folder)
        elif not is_gated(folder):
            read_gate_config(folder)  # says what the folder is instead
        return folder
    try:
        folder = _download(ref.name, ref.revision, CONFIG, *[ADAPTER_CONFIG] * (expect != "gated"))
    except _HubNotFoundError:
        if expect == "any" and not base_given:
            return None  # perhaps a base, which has its own loader, and errors
        raise
    if hub_source(folder) != f"{ref.name}@{ref.revision}":  # the name already says the commit
        logger.warning("using %s", hub_source(folder))
    return folder


class _HubNotFoundError(ArtifactError):
    """There is no adapter of that name on the hub, as far as can be seen from here."""


def _download(name: str, revision: str, *kinds: str) -> Path:
    """The folder of one commit in the hub cache; nothing is asked of the network where it is offline.

    The first of `kinds`, keys of `_FILES`, that the repository holds decides what is downloaded. A `_HubNotFoundError` where the
    repository, or each of `kinds` in it, is not there; an ArtifactError for a revision that is not, and a failed download.
    """
    failed: Exception | None = None
    unreachable: tuple[type[Exception], ...] = (errors.HFValidationError, *hub_errors())
    for first in kinds:
        try:
            # the cache's layout is …/snapshots/COMMIT/FILE: what follows is of one commit, whatever the branch does meanwhile
            commit = Path(hf_hub_download(name, first, revision=revision or None)).parent.name
            return Path(snapshot_download(name, revision=commit, allow_patterns=[*_FILES[first]]))
        except errors.EntryNotFoundError as error:  # the repository is there, perhaps with the next kind
            failed = failed or error
        except unreachable as error:
            failed = error
            break
    raise _translate_hub_error(name, revision, kinds, failed) from failed


def _translate_hub_error(name: str, revision: str, kinds: tuple[str, ...], error: Exception | None) -> ArtifactError:
    """The error of huggingface_hub as one sentence with the way out; kinds of errors before those that they belong to."""
    called = f"{name}@{revision}" if revision else name
    log_in = "where it is private or gated, ask for access on its page and log in with `hf auth login`"
    match error:
        case errors.LocalEntryNotFoundError():
            return _HubNotFoundError(
                f"{called} is no folder here, and the hub cache does not hold it while the hub cannot be reached; check the "
                "connection (and HF_HUB_OFFLINE), or give a local folder"
            )
        case errors.EntryNotFoundError():
            plain = f"; a plain adapter is gated with `loragate calibrate --adapter {name} --data FILE --out DIR`"
            return _HubNotFoundError(
                f"{called} on the hub holds no {' and no '.join(kinds)}{plain if kinds == (CONFIG,) else ''}"
            )
        case errors.RevisionNotFoundError():
            return ArtifactError(f"{name} has no revision {revision!r}; its page lists branches, tags and commits")
        case errors.RepositoryNotFoundError() if not isinstance(error, errors.GatedRepoError):
            return _HubNotFoundError(
                f"{called} is no folder here, and the hub has no repository of that name that you can read; {log_in}"
            )
    said = (str(error).splitlines() or [""])[0]
    kind = _HubNotFoundError if isinstance(error, errors.HFValidationError) else ArtifactError
    return kind(f"{called} could not be downloaded ({type(error).__name__}: {said}); {log_in}")


def _resolve_base(ref: ModelRef, what: str) -> ModelSource:
    """A base model; refuses an adapter folder, or an unfinished run, where one is expected."""
    require_here(what, ref.name)
    folder = Path(ref.name)
    if is_adapter(folder):
        raise ConfigError(f"{ref.name} is an adapter, not a base model; give the base that it was trained on")
    if (folder / "run" / "run.json").is_file() and not (folder / "config.json").is_file():
        raise ConfigError(f"{ref.name} holds an unfinished run; finish it by repeating its command with --resume")
    _refuse_override(ref, what)
    ref = find_gguf_in_folder(ref)
    return ModelSource(ref, "base", Path(ref.name), ref)


def _refuse_override(ref: ModelRef, what: str) -> None:
    if ref.override:
        raise ConfigError(f"{what} {ref.name}: an override of λ (@{ref.override}) has no effect here; leave it out")


def find_gguf_in_folder(base: ModelRef) -> ModelRef:
    """The GGUF file where the base is a folder with no other form of a model; any other base as it is.

    A ConfigError if there are several such files, or the one is an adapter.
    """
    folder = Path(base.name)
    found = [] if (folder / "config.json").is_file() else sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"{folder} holds several GGUF files ({names}); name one, as in {found[0]}")
    base = replace(base, name=str(found[0])) if found else base
    if base.is_gguf and Path(base.name).is_file():
        refuse_gguf_adapter(Path(base.name))
    return base


def refuse_gguf_adapter(path: Path) -> None:
    """Raise ConfigError where a GGUF file says, among the first keys of its header, that it holds an adapter."""
    with path.open("rb") as file:
        head = file.read(1 << 16)
    # the key, the type of its value (8: a text), the text's length and the text
    if b"general.type" + struct.pack("<IQ", 8, 7) + b"adapter" in head:
        raise ConfigError(
            f"{path} is an adapter for llama.cpp, not a base model, and PEFT does not read it: give the folder of the PEFT "
            "adapter that it was converted from"
        )


def _gated_place(
    ref: ModelRef, folder: Path, given: ModelRef | None, base_revision: str | None, base_optional: bool
) -> ModelSource:
    record = read_gate_config(folder)
    if not (folder / ADAPTER / ADAPTER_CONFIG).is_file():
        raise ArtifactError(f"{folder / ADAPTER}: the plain adapter is missing; the folder is incomplete")
    recorded = str(record["base"]["id"])
    at = base_revision or str(record["base"].get("revision") or "")
    base = given or ModelRef(*split_revision(recorded, at))
    if not base_optional and not base.name:
        raise ArtifactError(f"{folder / CONFIG}: key 'base.id' is empty; say which base with base=… (--base)")
    # a path that is not absolute may still be meant from another folder; the loader tells
    if not base_optional and given is None and Path(recorded).is_absolute() and not Path(recorded).exists():
        raise ArtifactError(f"{folder / CONFIG}: the base {recorded} is not here; say where it is with base=… (--base)")
    if not base_optional:
        base = find_gguf_in_folder(base)
    return ModelSource(ref, "gated", folder, base, record, _usable(folder / ADAPTER))


def _adapter_place(ref: ModelRef, folder: Path, given: ModelRef | None, base_optional: bool) -> ModelSource:
    if is_gated(folder):
        raise ConfigError(f"{ref.name} is already a gated adapter; its plain adapter is {folder / ADAPTER}")
    config = _usable(folder)
    if lost_gates(folder):
        logger.warning(
            "%s holds gates that were lost when PEFT saved it (loragate.save_gates keeps them); it is read as the plain "
            "adapter",
            ref.name,
        )
    recorded = str(config.get("base_model_name_or_path") or "")
    base = given or ModelRef(*split_revision(recorded))
    if not base.revision and str(given or recorded) == recorded and not Path(recorded).exists():
        base = replace(base, revision=str(config.get("revision") or ""))  # which the record pins
    if not base_optional:
        if not base.name:
            raise ConfigError(f"{ref.name} does not name its base model; say which with --base")
        try:
            require_here("base model", base.name, of_adapter=True)
        except ConfigError as error:
            if given is not None:
                raise
            raise ConfigError(
                f"the adapter {ref.name} names as its base model {base.name}, which does not exist here; say where it is with "
                "--base"
            ) from error
        base = find_gguf_in_folder(base)
    return ModelSource(ref, "adapter", folder, base, None, config)


def _usable(folder: Path) -> dict[str, Any]:
    """The configuration of a plain adapter, refused where its files tell that it cannot be used."""
    contents = read_adapter_folder(folder)
    contents.require_usable()
    return contents.config


def _no_adapter_error(ref: ModelRef, folder: Path) -> ConfigError:
    return ConfigError(
        f"{ref.name} holds no {ADAPTER_CONFIG}, so it is not a PEFT adapter folder{_suggest_contents(folder)}"
    )


def _suggest_sibling(name: str) -> str:
    """The folder next to `name` whose name is most like it, or that their common folder is not there; empty if neither is so."""
    path = Path(name)
    try:
        folders = [item.name for item in path.parent.iterdir() if item.is_dir()]
    except OSError:
        return f"; its folder {path.parent} does not exist either"
    like = difflib.get_close_matches(path.name, folders, n=1, cutoff=0.6)
    return f"; did you mean '{path.parent / like[0]}'?" if like else ""


def _suggest_contents(folder: Path) -> str:
    """What a folder without an adapter holds in its place: adapters one level below (checkpoints), or a whole model."""
    below = sorted(file.parent for file in folder.glob(f"*/{ADAPTER_CONFIG}"))
    # a preference training writes the adapter that it compares with beside the one that it trains
    trained = [place for place in below if place.name != "reference"] or below
    if trained:
        newest = max(trained, key=lambda place: (place / ADAPTER_CONFIG).stat().st_mtime)
        more = f" (the newest of {len(trained)} there)" if len(trained) > 1 else ""
        more += " (reference/ beside it is what it was compared with)" if len(trained) < len(below) else ""
        return f"; give the adapter in it, {newest}{more}"
    if (folder / "config.json").is_file():
        return (
            "; it holds a whole model, not an adapter (mergekit makes an adapter of a fine-tune: mergekit-extract-lora)"
        )
    return ""
