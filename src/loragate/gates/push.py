"""Sending a gated folder to the hub: checked as a reader checks it, only files that a reader needs, in one commit.

The folder itself is never changed. In the copy that is sent a local base is named by its hub id, and a value that is an absolute
path of this machine, in the evidence and the adapter's configuration, is cut to its last part. Files that are on
the hub already are not sent again, so a broken upload is taken up by repeating it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import HFValidationError

from loragate.errors import ArtifactError, ConfigError
from loragate.files import write_json, write_text
from loragate.gates.card import escape_markdown, render_card
from loragate.gates.identity import factor_widths_and_sha256, require_same_adapter
from loragate.gates.recommended import SAMPLING
from loragate.gates.schema import (
    ADAPTER,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CARD,
    CONFIG,
    EVIDENCE,
    GATES,
    KEYS_NEEDING_MODEL,
    LICENSES,
    copy_file,
    given_away,
    is_named,
    read_adapter,
    read_gate_config,
    read_tensors,
)
from loragate.hub_names import hub_errors, is_hub_id
from loragate.version import __version__

# what the hub's own page puts into a new repository
_OF_A_NEW_REPOSITORY = (".gitattributes", ".gitignore", CARD, *LICENSES)


@dataclass(frozen=True)
class Pushed:
    """What an upload left behind."""

    repository: str  # "owner/name"
    url: str  # its page
    commit: str  # full hash of the commit that holds the artifact; empty where nothing was sent
    files: dict[str, int]  # bytes of each path in the repository
    base: str  # hub id of the base, as the uploaded files name it
    left: tuple[str, ...]  # paths in the folder that are not sent; a whole folder is one
    private: bool | None  # whether the repository is; None where it was not asked


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
    token: str | bool | None = None,
) -> Pushed:
    """Upload a gated folder as one commit; the repository and the branch are made where they are missing.

    Args:
        folder: what `loragate calibrate --out` or `save_pretrained` of a gated model wrote.
        repository: "owner/name", or "name" for the account that is logged in.
        base_id: hub id of the base, where the folder names a local one.
        private: make a new repository private; an existing one stays as it is, and one that is public is then refused.
        revision: branch to write to; the default branch otherwise, unless that holds another model.
        message: of the commit.
        card: send the model card too; without it the one on the hub stays.
        dry_run: check all that can be checked here, and send nothing.
        token: of the hub; by default the one that is logged in.

    Raises:
        ArtifactError: for a folder that could not be loaded again, or if the hub refuses.
        ConfigError: for a base that is no hub id, a repository that cannot be called so, is public against `private`, or holds
            another model.
    """
    with tempfile.TemporaryDirectory(prefix="loragate-push-") as staged:
        source, into = Path(folder), Path(staged)
        base = prepare_upload(source, into, name=repository.rpartition("/")[2], base_id=base_id, card=card)
        inside = [path.relative_to(source) for path in sorted(source.rglob("*"))]
        left = tuple(path.as_posix() for path in inside if (into / path.parent).exists() and not (into / path).exists())
        sent = sorted(path for path in Path(staged).rglob("*") if path.is_file())
        files = {path.relative_to(staged).as_posix(): path.stat().st_size for path in sent}
        if dry_run:
            return Pushed(repository, "", "", files, base, left, None)
        refused: tuple[type[Exception], ...] = (*hub_errors(), ValueError, RuntimeError)
        api = HfApi(token=token, library_name="loragate", library_version=__version__)
        try:
            url = api.create_repo(repository, private=private, exist_ok=True)
            found = api.model_info(url.repo_id)
            _require_fit(
                url.repo_id, {file.rfilename for file in found.siblings or ()}, found.private, private, revision
            )
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
        except refused as error:
            said = next(iter(str(error).splitlines()), "")
            raise ArtifactError(
                f"{repository} was not written ({type(error).__name__}: {said}). Check the owner's name, that you are logged in "
                "with a token that may write (`hf auth login`) and HF_HUB_OFFLINE; then run again: files that arrived are not "
                "sent twice"
            ) from error
        return Pushed(url.repo_id, str(url), done.oid, files, base, left, found.private)


def _require_fit(
    repository: str, files: set[str], is_private: bool | None, private: bool | None, revision: str | None
) -> None:
    """Refuse (ConfigError) a public repository where a private one was asked for, and one whose main branch is another model."""
    if private and not is_private:
        raise ConfigError(
            f"{repository} exists and is public, but was to be private (--private), so nothing was sent; make it private on its "
            "page (Settings), name another repository, or leave --private out to publish there"
        )
    others = sorted(file for file in files if not is_named(file, _OF_A_NEW_REPOSITORY))
    if others and CONFIG not in files and not revision:  # a branch that is named is asked for
        few = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise ConfigError(
            f"{repository} holds something else ({few}, no {CONFIG}), so nothing was sent; name another repository, which is "
            "created where it is missing, or a branch of this one with --revision"
        )


def prepare_upload(folder: Path, into: Path, *, name: str, base_id: str = "", card: bool = True) -> str:
    """Write what others get of a gated folder into an empty one; returns the hub id of the base.

    `name` is the title of a model card where the folder has none; other arguments and errors as of `push_gated`.
    """
    record = read_gate_config(folder)
    gates, (adapter, state) = read_tensors(folder, record), read_adapter(folder / ADAPTER)
    widths, sha256 = factor_widths_and_sha256(adapter, state)
    if not widths:
        raise ArtifactError(f"{folder / ADAPTER}: {ADAPTER_WEIGHTS} holds no LoRA factors, so it is not of these gates")
    partly = any(adapter.get(key) for key in KEYS_NEEDING_MODEL)
    require_same_adapter(folder, record, gates, widths, None if partly else sha256)
    recorded = record["base"]["id"]
    base = base_id or recorded
    if not is_hub_id(base):
        what = f"--base-id {base}" if base_id else f"the base of {folder}, {base or 'which has no name'},"
        raise ConfigError(f"{what} is no hub id; say where others find the same base with --base-id OWNER/NAME")

    private: dict[str, str] = {}
    shown = {**record, **_without_paths({key: record.get(key) for key in EVIDENCE}, private)}
    if base != recorded:  # a commit of the other base means nothing here
        shown["base"] = {**record["base"], "id": base, "revision": None}
    # a list of what is sent, so that run folders and checkpoints beside it stay here
    kept = [f"{ADAPTER}/{file}" for file in given_away(folder / ADAPTER)]
    kept += [path.name for path in folder.iterdir() if path.is_file() and is_named(path.name, LICENSES)]
    for file in [GATES, *([SAMPLING] if record.get("sampling") else []), *kept]:
        copy_file(folder / file, into / file)
    write_json(into / CONFIG, shown)
    named = adapter.get("base_model_name_or_path")  # by which plain PEFT looks for the base
    # a name of its own stays, such as that of the same base in four bits; `--base-id` replaces the recorded one
    findable = named if isinstance(named, str) and is_hub_id(named) and named != recorded else base
    write_json(
        into / ADAPTER / ADAPTER_CONFIG,
        {**_without_paths(adapter, private), "base_model_name_or_path": findable},
    )
    if base != recorded and recorded:
        private[recorded] = base
    for notes in (into / ADAPTER).rglob("*.md"):  # such as the card that PEFT writes
        write_text(notes, _shortened(notes.read_text(encoding="utf-8", errors="replace"), private))
    if card:
        text = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else render_card(name, shown)
        text = _shortened(text, private)
        if base != recorded:  # an author's words stay, in the lines at the top too
            edited = ModelCard(text, ignore_metadata_errors=True)
            edited.data["base_model"] = base
            text = str(edited)
        write_text(into / CARD, text)
    read_tensors(into, read_gate_config(into))  # what is sent is what a reader takes
    return base


def _shortened(text: str, private: dict[str, str]) -> str:
    for path in sorted(private, key=len, reverse=True):  # longest first: one path may begin another
        for written in (path, escape_markdown(path)):
            text = text.replace(written, private[path])
    return text


def _without_paths(value: Any, found: dict[str, str]) -> Any:
    """A JSON value in which texts that are absolute paths are cut to their last part; {path: part} is added to `found`."""
    if isinstance(value, dict):
        return {key: _without_paths(inner, found) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner, found) for inner in value]
    if isinstance(value, str):
        for kind in (PurePosixPath, PureWindowsPath):
            if kind(value).is_absolute() and kind(value).name and "\n" not in value:
                found[value] = kind(value).name
                return found[value]
    return value
