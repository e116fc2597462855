"""Downloading adapters and checkpoints from the hub: all files of one commit, which the folder in the hub cache is named after."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import errors, hf_hub_download, snapshot_download

from loragate.errors import ArtifactError
from loragate.gates.adapter_files import ADAPTER_CONFIG
from loragate.gates.recommended import SAMPLING
from loragate.gates.schema import ADAPTER, CARD, CONFIG, GATES

BASE_CONFIG = "config.json"
# what is downloaded, by the file that tells what is in a repository
FILES: dict[str, tuple[str, ...]] = {
    CONFIG: (CONFIG, GATES, SAMPLING, CARD, f"{ADAPTER}/*"),
    ADAPTER_CONFIG: ("adapter_*", SAMPLING, "*token*.json", "tokenizer*", "vocab.*", "merges.txt", "*.jinja"),
    BASE_CONFIG: ("*.json", "model*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt"),
}


class NotThere(ArtifactError):
    """There is no adapter of that name on the hub, as far as can be seen from here."""


def download(name: str, revision: str, *kinds: str, code: bool = False) -> Path:
    """The folder of one commit in the hub cache; nothing is asked of the network where it is offline.

    Args:
        name, revision: of the repository.
        kinds: keys of `FILES`; the first that the repository holds decides what is downloaded.
        code: the model's own Python files, too.

    Raises:
        NotThere: if the repository, or each of `kinds` in it, is not there.
        ArtifactError: if the revision is not there, or the download failed.
    """
    failed: Exception | None = None
    for first in kinds:
        try:
            # the cache's layout is …/snapshots/COMMIT/FILE: what follows is of one commit, whatever the branch does meanwhile
            commit = Path(hf_hub_download(name, first, revision=revision or None)).parent.name
            return Path(snapshot_download(name, revision=commit, allow_patterns=[*FILES[first], *["*.py"] * code]))
        except errors.EntryNotFoundError as error:  # the repository is there, perhaps with the next kind
            failed = failed or error
        except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
            failed = error
            break
    raise _explained(name, revision, kinds, failed) from failed


def _explained(name: str, revision: str, kinds: tuple[str, ...], error: Exception | None) -> ArtifactError:
    """The error of huggingface_hub as one sentence with the way out; kinds of errors before those that they belong to."""
    called = f"{name}@{revision}" if revision else name
    match error:
        case errors.HFValidationError():
            return NotThere(f"{called} is neither a folder here nor a hub id ({error})")
        case errors.LocalEntryNotFoundError():
            return NotThere(
                f"{called} is no folder here, and the hub cache does not hold it while the hub cannot be reached; check the "
                "connection (and HF_HUB_OFFLINE), or give a local folder"
            )
        case errors.GatedRepoError():
            return ArtifactError(
                f"{called}: access must be asked for on its page on the hub, then log in with `hf auth login`"
            )
        case errors.RepositoryNotFoundError():
            return NotThere(
                f"{called} is no folder here, and the hub has no repository of that name that you can read; where it is "
                "private, log in with `hf auth login`"
            )
        case errors.RevisionNotFoundError():
            return ArtifactError(f"{name} has no revision {revision!r}; its page lists branches, tags and commits")
        case errors.EntryNotFoundError():
            what = f"{called} on the hub holds no {' and no '.join(kinds)}"
            if kinds != (CONFIG,):
                return NotThere(what)
            return NotThere(
                f"{what}, so it is no gated adapter; a plain adapter is gated with `loragate calibrate --adapter {name} "
                "--data FILE --out DIR`"
            )
    said = (str(error).splitlines() or [""])[0]
    return ArtifactError(f"{called} could not be downloaded ({type(error).__name__}: {said}); try again")
