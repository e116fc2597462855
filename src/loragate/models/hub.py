"""Downloading adapters and checkpoints from the hub: all files of one commit, which the folder in the hub cache is named after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loragate.errors import ArtifactError
from loragate.gates.recommended import SAMPLING
from loragate.gates.schema import ADAPTER, CARD, CONFIG, GATES
from loragate.models.adapter_files import ADAPTER_CONFIG

GATED = (CONFIG, GATES, SAMPLING, CARD, f"{ADAPTER}/*")
BASE = ("*.json", "model*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt")
PLAIN = ("adapter_*", SAMPLING, "*token*.json", "tokenizer*", "vocab.*", "merges.txt", "*.jinja")


class NotThere(ArtifactError):
    """There is no adapter of that name on the hub, as far as can be seen from here."""


def download_gated(name: str, revision: str = "") -> Path:
    """A gated adapter's files in the hub cache; nothing is asked of the network where it is offline.

    Raises:
        NotThere: if the repository, or gate_config.json in it, is not there.
        ArtifactError: if the revision is not there, or the download failed.
    """
    return download(name, revision, CONFIG, GATED)


def download_adapter(name: str, revision: str = "") -> Path:
    """The files of a gated or plain adapter in the hub cache; of a plain one configuration, weights and tokenizer.

    Raises:
        NotThere: if the repository is not there, or holds no adapter.
        ArtifactError: if the revision is not there, or the download failed.
    """
    try:
        return download_gated(name, revision)
    except NotThere as no_gates:
        try:
            return download(name, revision, ADAPTER_CONFIG, PLAIN)
        except NotThere as no_adapter:
            if not _lacks_the_file(no_adapter):
                raise no_gates from None
            raise NotThere(
                f"{_called(name, revision)} on the hub holds neither {CONFIG} nor {ADAPTER_CONFIG}, so it is no adapter"
            ) from None


def download_base(name: str, revision: str = "", code: bool = False) -> Path:
    """Configuration, tokenizer and safetensors of a model in the hub cache; its own Python files too where `code` is set.

    Raises:
        NotThere, ArtifactError: as `download_gated`.
    """
    return download(name, revision, "config.json", [*BASE, *["*.py"] * code])


def download(name: str, revision: str, first: str, patterns: Sequence[str]) -> Path:
    """The folder of the commit that holds the file `first`, with all files of `patterns`.

    Raises:
        NotThere, ArtifactError: as `download_gated`.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        commit = Path(hf_hub_download(name, first, revision=revision or None)).parent.name
        return Path(snapshot_download(name, revision=commit, allow_patterns=list(patterns)))
    except HFValidationError as error:
        raise NotThere(f"{_called(name, revision)} is neither a folder here nor a hub id ({error})") from None
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        raise _explained(name, revision, first, error) from error


def _called(name: str, revision: str) -> str:
    return f"{name}@{revision}" if revision else name


def _lacks_the_file(error: NotThere) -> bool:
    """Whether a repository is there without the file that was looked for."""
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    return isinstance(error.__cause__, EntryNotFoundError) and not isinstance(error.__cause__, LocalEntryNotFoundError)


def _explained(name: str, revision: str, first: str, error: Any) -> ArtifactError:
    """The error of huggingface_hub as one sentence with the way out."""
    from huggingface_hub import errors

    called = _called(name, revision)
    if isinstance(error, errors.LocalEntryNotFoundError):
        return NotThere(
            f"{called} is no folder here, and the hub cache does not hold it while the hub cannot be reached; check the "
            "connection (and HF_HUB_OFFLINE), or give a local folder"
        )
    if isinstance(error, errors.GatedRepoError):
        return ArtifactError(
            f"{called}: access must be asked for on its page on the hub, then log in with `hf auth login`"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return NotThere(
            f"{called} is no folder here, and the hub has no repository of that name that you can read; where it is "
            "private, log in with `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ArtifactError(f"{name} has no revision {revision!r}; its page lists branches, tags and commits")
    if isinstance(error, errors.EntryNotFoundError):
        if first != CONFIG:
            return NotThere(f"{called} on the hub holds no {first}")
        return NotThere(
            f"{called} on the hub holds no {CONFIG}, so it is no gated adapter; a plain adapter is gated with "
            f"`loragate calibrate --adapter {name} --data FILE --out DIR`"
        )
    return ArtifactError(
        f"{called} could not be downloaded ({type(error).__name__}: {str(error).splitlines()[0]}); try again"
    )
