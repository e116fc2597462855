"""Sending a gated folder to the hub: checked first, only the artifact's own files, in one commit.

The folder itself is never changed. A copy is staged in which what only this machine understands is replaced: a local base by a
hub id, absolute paths in evidence, configurations and the card by their last part. Files that are on the hub already are not
sent again, so a broken upload is taken up by repeating it.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

from loragate.errors import ArtifactError, ConfigError
from loragate.files import write_json, write_text
from loragate.gates.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, TOKENIZER, read_adapter
from loragate.gates.card import plain, render_card
from loragate.gates.recommended import SAMPLING
from loragate.gates.schema import ADAPTER, CARD, CONFIG, EVIDENCE, GATES, read_gate_config, read_tensors
from loragate.hub_names import is_hub_id
from loragate.models.folder_gates import NEED_MODEL, known_factors, require_same_adapter
from loragate.records import read_value
from loragate.version import __version__

# where tokenizers of earlier libraries keep what they were loaded from; other values of theirs may look like paths
_PLACES = ("name_or_path", "tokenizer_file", "special_tokens_map_file", "vocab_file", "merges_file")
_WORD = r"[^\s/\\\"'`,;:()\[\]{}<>|]+"
# a text that is an absolute path as a whole, blanks and all; or one of two parts or more inside a sentence, in quotes also with
# blanks: what follows a letter or a colon belongs to a ratio or an address, what follows a bracket or a star to a markup
_PATH = re.compile(
    rf"\A(?:/[^/\s][^\n]*|~/[^\n]*|[A-Za-z]:[\\/][^\n]*)\Z|"
    rf"(?<=['\"])/[^'\"\n]+/[^'\"\n]*(?=['\"])|"
    rf"(?:(?<=file://)|(?<![\w.:/\\~>*}}=?-]))(?:(?:~|[A-Za-z]:)?/(?:{_WORD}/)+(?:{_WORD})?|[A-Za-z]:\\(?:{_WORD}\\)+{_WORD})"
)


@dataclass(frozen=True)
class Pushed:
    """What an upload left behind."""

    repository: str  # "owner/name"
    url: str  # its page
    commit: str  # full hash of the commit that holds the artifact; empty where nothing was sent
    files: dict[str, int]  # bytes of each path in the repository
    base: str  # hub id of the base, as the uploaded files name it


def stage(folder: str | Path, into: str | Path, *, name: str, base_id: str = "", card: bool = True) -> str:
    """Write what others get of a gated folder into an empty one; returns the hub id of the base.

    Args:
        folder: what `loragate calibrate --out` wrote; checked with the strict reader.
        name: title of a model card, where the folder has none.
        base_id: hub id that replaces the recorded base.
        card: with the model card.

    Raises:
        ArtifactError: for a folder that could not be loaded again.
        ConfigError: for a base that is no hub id.
    """
    folder, into = Path(folder), Path(into)
    record = read_gate_config(folder)
    gates, (adapter, state) = read_tensors(folder, record), read_adapter(folder / ADAPTER)
    widths, sha256 = known_factors(adapter, state)
    if not widths:
        raise ArtifactError(f"{folder / ADAPTER}: {ADAPTER_WEIGHTS} holds no LoRA factors, so it is not of these gates")
    partly = any(adapter.get(key) for key in NEED_MODEL)
    require_same_adapter(folder, record, gates, widths, None if partly else sha256)
    recorded = record["base"]["id"]
    base = base_id or recorded
    if not is_hub_id(base):
        what = f"--base-id {base}" if base_id else f"the base of {folder}, {base or 'which has no name'},"
        raise ConfigError(f"{what} is no hub id; say where others find the same base with --base-id OWNER/NAME")
    paths: dict[str, str] = {}
    shown = {**record, **without_paths({key: record.get(key) for key in EVIDENCE}, paths)}
    if base != recorded:
        shown["base"] = {
            **record["base"],
            "id": base,
            "revision": None,
        }  # a commit of the other base means nothing here
        paths |= {recorded: base} if recorded else {}
    # a list of what is sent, so that run folders and checkpoints beside it stay here
    for path in (GATES, f"{ADAPTER}/{ADAPTER_WEIGHTS}", *([SAMPLING] if record.get("sampling") else [])):
        _copy(folder, into, path)
    _copy(folder, into, CONFIG, shown)
    named = adapter.get("base_model_name_or_path")  # by which plain PEFT looks for the base
    findable = named if isinstance(named, str) and is_hub_id(named) else base
    _copy(folder, into, f"{ADAPTER}/{ADAPTER_CONFIG}", {**without_paths(adapter), "base_model_name_or_path": findable})
    for part in (ADAPTER, f"{ADAPTER}/tokenizer"):
        for file in TOKENIZER:
            if file == "tokenizer_config.json" and (folder / part / file).is_file():
                words = read_value(folder / part / file, "fetch the artifact again")
                _copy(folder, into, f"{part}/{file}", words | without_paths(words, only=_PLACES))
            elif (folder / part / file).is_file():
                _copy(folder, into, f"{part}/{file}")
    if card:
        text = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else render_card(name, shown)
        for private in sorted(paths, key=len, reverse=True):  # longest first: one path may begin another
            for written in dict.fromkeys((private, plain(private))):
                text = text.replace(written, paths[private])
        if base != recorded:  # an author's words stay, in the lines at the top too
            edited = ModelCard(text, ignore_metadata_errors=True)
            edited.data["base_model"] = base
            text = str(edited)
        write_text(into / CARD, text)
    return base


def push_gated(
    folder: str | Path,
    repository: str,
    *,
    base_id: str = "",
    private: bool | None = None,
    revision: str | None = None,
    message: str = "",
    card: bool = True,
    dry_run: bool = False,
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
        dry_run: check all that can be checked here, and send nothing.

    Raises:
        ArtifactError, ConfigError: as `stage`, or if the hub refuses.
    """
    api = HfApi(library_name="loragate", library_version=__version__)
    with tempfile.TemporaryDirectory(prefix="loragate-push-") as staged:
        base = stage(folder, staged, name=repository.rpartition("/")[2], base_id=base_id, card=card)
        sent = sorted(path for path in Path(staged).rglob("*") if path.is_file())
        files = {path.relative_to(staged).as_posix(): path.stat().st_size for path in sent}
        if dry_run:
            return Pushed(repository, "", "", files, base)
        try:
            url = api.create_repo(repository, private=private, exist_ok=True)
            if revision:
                api.create_branch(url.repo_id, branch=revision, exist_ok=True)
            done = api.upload_folder(
                repo_id=url.repo_id,
                folder_path=staged,
                commit_message=message or f"Upload gated adapter (loragate {__version__})",
                revision=revision,
                delete_patterns=[f"{ADAPTER}/*", SAMPLING],  # those of an earlier artifact must not mix with this one
            )
        except HFValidationError as error:
            raise ConfigError(f"{repository} cannot be the name of a repository: {error}") from None
        except (HfHubHTTPError, OfflineModeIsEnabled, OSError, ValueError, RuntimeError) as error:
            raise ArtifactError(_explained(repository, error)) from error
        return Pushed(url.repo_id, str(url), done.oid, files, base)


def without_paths(value: Any, found: dict[str, str] | None = None, only: Collection[str] = ()) -> Any:
    """A JSON value with every absolute path in its texts cut to its last part; {path: part} is added to `found`.

    Args:
        only: keys of a mapping to look at; by default all.
    """
    if isinstance(value, dict):
        return {
            without_paths(key, found): without_paths(inner, found)
            for key, inner in value.items()
            if not only or key in only
        }
    if isinstance(value, list):
        return [without_paths(inner, found) for inner in value]
    if not isinstance(value, str):
        return value

    def last(match: re.Match[str]) -> str:
        part = PureWindowsPath(match[0]).name or os.sep
        if found is not None:
            found[match[0]] = part
        return part

    return _PATH.sub(last, value)


def _copy(folder: Path, into: Path, path: str, public: dict[str, Any] | None = None) -> None:
    """Copy one file, byte for byte unless `public` says something else than it."""
    (into / path).parent.mkdir(parents=True, exist_ok=True)
    if public is None or public == read_value(folder / path, "fetch the artifact again"):
        shutil.copyfile(folder / path, into / path)
    else:
        write_json(into / path, public)


def _explained(repository: str, error: Exception) -> str:
    """The hub's refusal as one sentence; never with a token in it."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, OfflineModeIsEnabled):
        return "the hub cannot be written to while HF_HUB_OFFLINE is set; unset it and run again"
    if isinstance(error, LocalTokenNotFoundError) or status == 401:
        return f"the hub does not know who you are; log in with `hf auth login` to write to {repository}"
    if status == 403:
        return (
            f"the hub refuses to let you write to {repository}; check the owner's name, and that your token may write"
        )
    first = next(iter(str(error).splitlines()), "")
    return (
        f"{repository} was not written ({type(error).__name__}: {first}); run the command again: files that arrived are not "
        "sent twice"
    )
