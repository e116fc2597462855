"""Sending a gated folder to the hub: checked first, only the artifact's own files, in one commit.

The folder itself is never changed. What only this machine understands is replaced in the uploaded copies: a local base by a
hub id, absolute paths in evidence and configurations by their last part. Files that are on the hub already are not sent
again, so a broken upload is taken up by repeating it.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from safetensors import SafetensorError, safe_open

from loragate.errors import ArtifactError, ConfigError
from loragate.gates.card import plain, render_card, with_base
from loragate.gates.schema import ADAPTER, CARD, CONFIG, EVIDENCE, GATES, read_gate_config, read_tensors
from loragate.hub_names import is_hub_id
from loragate.version import __version__

_ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TOKENIZER: tuple[str, ...] = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
_TOKENIZER += (
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
)
# where tokenizers of earlier libraries keep what they were loaded from
_PLACES = ("name_or_path", "tokenizer_file", "special_tokens_map_file", "vocab_file", "merges_file")
_WORD = r"[^\s/\\\"'`,;:()\[\]{}<>|]+"
# an absolute path of two parts or more inside a sentence, in quotes also with blanks; what follows a letter or a colon belongs
# to a ratio or an address, and what follows a bracket or a star to a markup or a pattern
_INSIDE = re.compile(
    rf"(?<=['\"])/[^'\"\n]+/[^'\"\n]*(?=['\"])|"
    rf"(?:(?<=file://)|(?<![\w.:/\\~>*}}=?-]))(?:(?:~|[A-Za-z]:)?/(?:{_WORD}/)+(?:{_WORD})?|[A-Za-z]:\\(?:{_WORD}\\)+{_WORD})"
)


@dataclass(frozen=True)
class Pushed:
    """What an upload left behind.

    Attributes:
        repository: "owner/name".
        url: page of the repository.
        commit: full hash of the commit that holds the artifact.
        files: paths in the repository.
        size: bytes of these files.
        base: hub id of the base, as the uploaded files name it.
    """

    repository: str
    url: str
    commit: str
    files: tuple[str, ...]
    size: int
    base: str


def files_to_push(folder: str | Path, name: str, base_id: str = "", card: bool = True) -> tuple[dict[str, Any], str]:
    """({path in the repository: local path or bytes}, hub id of the base) of a gated folder.

    Args:
        folder: what `loragate calibrate --out` wrote; checked with the strict reader.
        name: title of a model card, where the folder has none.
        base_id: hub id that replaces the recorded base.
        card: send the model card too.

    Raises:
        ArtifactError: for a folder that could not be loaded again.
        ConfigError: for a base that is no hub id.
    """
    folder = Path(folder)
    record = read_gate_config(folder)
    _check_adapter(folder, record, read_tensors(folder, record))
    recorded = record["base"]["id"]
    base = base_id or recorded
    if not is_hub_id(base):
        what = f"--base-id {base}" if base_id else f"the base of {folder}, {base or 'which has no name'},"
        raise ConfigError(f"{what} is no hub id; say where others find the same base with --base-id OWNER/NAME")
    public, paths = _without_folders({key: record.get(key) for key in EVIDENCE})
    shown = {**record, **public, "base": {**record["base"], "id": base}}
    if base != recorded:
        shown["base"]["revision"] = None  # a commit of the other base means nothing here
    sent: dict[str, Any] = {GATES: folder / GATES, f"{ADAPTER}/{_ADAPTER_WEIGHTS}": folder / ADAPTER / _ADAPTER_WEIGHTS}
    sent[CONFIG] = folder / CONFIG if shown == record else _json(shown)
    sent[f"{ADAPTER}/{_ADAPTER_CONFIG}"] = _adapter_config(folder / ADAPTER / _ADAPTER_CONFIG, base)
    if card:
        sent[CARD] = _card(folder / CARD, name, shown, recorded, base, paths)
    for part in ("", "tokenizer/"):
        for file in _TOKENIZER:
            path = folder / ADAPTER / part / file
            if path.is_file():
                sent[f"{ADAPTER}/{part}{file}"] = _tokenizer_file(path)
    return dict(sorted(sent.items())), base


def push_gated(
    folder: str | Path,
    repository: str,
    *,
    base_id: str = "",
    private: bool | None = None,
    revision: str | None = None,
    message: str = "",
    card: bool = True,
) -> Pushed:
    """Upload a gated folder as one commit; the repository and the branch are made where they are missing.

    Args:
        folder: what `loragate calibrate --out` wrote.
        repository: "owner/name", or "name" for the account that is logged in.
        base_id: hub id of the base, where the folder names a local one.
        private: make a new repository private; an existing one stays as it is.
        revision: branch to write to; the default branch otherwise.
        message: of the commit.
        card: send the model card too; without it the one on the hub stays.

    Raises:
        ArtifactError, ConfigError: as `files_to_push`, or if the hub refuses.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    files, base = files_to_push(folder, repository.rpartition("/")[2], base_id, card)
    api = HfApi(library_name="loragate", library_version=__version__)
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        name = url.repo_id
        if revision:
            api.create_branch(name, branch=revision, exist_ok=True)
        present = api.list_repo_files(name, revision=revision)
        # an adapter/ of an earlier artifact must not mix with this one
        stale = [path for path in present if path.startswith(f"{ADAPTER}/") and path not in files]
        operations: list[Any] = [CommitOperationAdd(path, content) for path, content in files.items()]
        operations += [CommitOperationDelete(path) for path in stale]
        text = message or f"Upload gated adapter (loragate {__version__})"
        done = api.create_commit(name, operations, commit_message=text, revision=revision)
    except HFValidationError as error:
        raise ConfigError(f"{repository} cannot be the name of a repository: {error}") from None
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError, ValueError, RuntimeError) as error:
        raise _explained(repository, error) from error
    size = sum(len(content) if isinstance(content, bytes) else content.stat().st_size for content in files.values())
    return Pushed(name, str(url), done.oid, tuple(files), size, base)


def _check_adapter(folder: Path, record: dict[str, Any], gates: dict[str, Any]) -> None:
    """The Stage-I adapter is there, readable, and has the widths that the gates read."""
    place = folder / ADAPTER
    for file in (_ADAPTER_CONFIG, _ADAPTER_WEIGHTS):
        if not (place / file).is_file():
            raise ArtifactError(f"{place / file} is missing; the folder is incomplete")
    try:
        with safe_open(str(place / _ADAPTER_WEIGHTS), framework="pt") as stored:
            shapes = {key: stored.get_slice(key).get_shape() for key in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"{place / _ADAPTER_WEIGHTS}: not a readable safetensors file ({error})") from error
    widths = {
        key.split(".lora_A.")[0].removeprefix("base_model.model."): s[1]
        for key, s in shapes.items()
        if ".lora_A." in key
    }
    if not widths:
        raise ArtifactError(f"{place / _ADAPTER_WEIGHTS} holds no LoRA factors; it is not the adapter of these gates")
    for module in record["modules"]:
        gate = gates.get(f"{module}.weight")
        if gate is not None and widths.get(module, gate.shape[0]) != gate.shape[0]:
            raise ArtifactError(
                f"{folder / GATES}: the gate of {module} reads {gate.shape[0]} values, but its adapter has {widths[module]}"
            )


def _adapter_config(path: Path, base: str) -> Path | bytes:
    """The adapter's own file, or a copy that names a base others can find."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        named = record.get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise ArtifactError(f"{path}: not valid JSON ({error})") from error
    public = {key: _cut(value, {}) for key, value in record.items()}
    if isinstance(named, str) and is_hub_id(named):
        return path if public == record else _json(public)
    return _json({**public, "base_model_name_or_path": base})


def _tokenizer_file(path: Path) -> Path | bytes:
    """A file of the tokenizer, or a copy without the folders that it was loaded from."""
    try:
        record = json.loads(path.read_text(encoding="utf-8")) if path.name == "tokenizer_config.json" else None
    except ValueError as error:
        raise ArtifactError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(record, dict):
        return path
    public = {key: _cut(value, {}) if key in _PLACES else value for key, value in record.items()}
    return path if public == record else _json(public)


def _card(
    path: Path, name: str, record: dict[str, Any], recorded: str, base: str, paths: dict[str, str]
) -> Path | bytes:
    """The folder's card, which its author may have edited, with this machine's names replaced."""
    if not path.is_file():
        return render_card(name, record).encode()
    before = path.read_text(encoding="utf-8")
    after = before if base == recorded else with_base(before, base)
    # longest first: one path may begin another
    for private in sorted([recorded, *paths] if base != recorded and recorded else paths, key=len, reverse=True):
        for written in dict.fromkeys((private, plain(private))):
            after = after.replace(written, base if private == recorded else paths[private])
    return path if after == before else after.encode()


def _without_folders(value: Any) -> tuple[Any, dict[str, str]]:
    """A JSON value with every absolute path in it, alone or in a sentence, cut to its last part, and {path: part} of those."""
    found: dict[str, str] = {}

    def inside(match: re.Match[str]) -> str:
        return found.setdefault(match[0], PureWindowsPath(match[0]).name or os.sep)

    def clean(part: Any) -> Any:
        if isinstance(part, dict):
            return {clean(key): clean(inner) for key, inner in part.items()}
        if isinstance(part, list):
            return [clean(inner) for inner in part]
        return _INSIDE.sub(inside, part) if isinstance(part, str) else part

    return clean(_cut(value, found)), found


def _cut(value: Any, found: dict[str, str]) -> Any:
    """A JSON value with every text that is an absolute path cut to its last part; {path: part} is added to `found`."""
    if isinstance(value, dict):
        return {key: _cut(inner, found) for key, inner in value.items()}
    if isinstance(value, list):
        return [_cut(inner, found) for inner in value]
    if not isinstance(value, str) or "\n" in value:
        return value
    for kind in (PurePosixPath, PureWindowsPath):
        if re.match(r"/[^/\s]|~/|[A-Za-z]:[\\/]", value) and (kind(value).is_absolute() or value.startswith("~/")):
            found[value] = kind(value).name or os.sep
            return found[value]
    return value


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _explained(repository: str, error: Any) -> Exception:
    """The hub's refusal as one sentence; never with a token in it."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ArtifactError("the hub cannot be written to while HF_HUB_OFFLINE is set; unset it and run again")
    if isinstance(error, errors.LocalTokenNotFoundError) or status == 401:
        return ArtifactError(f"the hub does not know who you are; log in with `hf auth login` to write to {repository}")
    if status == 403:
        return ArtifactError(
            f"the hub refuses to let you write to {repository}; check the owner's name, and that your token may write"
        )
    first = next(iter(str(error).splitlines()), "")
    more = " ".join(str(error).split()) if isinstance(error, ValueError) and status is None else first
    return ArtifactError(
        f"{repository} was not written ({type(error).__name__}: {more}); run the command again: files that "
        "arrived are not sent twice"
    )
