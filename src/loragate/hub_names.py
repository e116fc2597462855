"""Names of models on the hub: what a text such as `owner/name@v1` says, and what the hub's cache on this machine tells of it.

A local folder always wins over a hub id of the same name. Nothing is downloaded here and nothing is asked of the network.
"""

from __future__ import annotations

import re
from pathlib import Path

from loragate.errors import ArtifactError

_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_FILE = rf"(?:/(?:{_PART}/)*{_PART}\.gguf)?"  # a base may be one file of a repository
_NAME = re.compile(rf"({_PART}/{_PART}{_FILE})(?:@(\S+))?")
# …/models--OWNER--NAME/snapshots/COMMIT/FILE, the layout of the hub's cache
_SNAPSHOT = re.compile(rf"models--({_PART})--({_PART})/snapshots/([0-9a-f]{{40}})(/.*)?")


def parse_hub_name(text: str | Path) -> tuple[str, str] | None:
    """(owner/name, revision or "") of a text; None for anything that exists here or has not the form owner/name[@revision].

    A base may be a file, owner/name/FILE.gguf.
    """
    found = _NAME.fullmatch(str(text))
    return None if found is None or Path(text).exists() else (found[1], found[2] or "")


def split_revision(text: str | Path, revision: str | None = None) -> tuple[str, str]:
    """(name, revision or "") of a model: "owner/name@revision" is taken apart, any other text is a name as it is.

    `revision` is one from elsewhere; two that differ are refused (ArtifactError).
    """
    name, named = parse_hub_name(text) or (str(text), "")
    if named and revision and revision != named:
        raise ArtifactError(f"{text} names a revision already; leave revision={revision!r} out")
    return name, named or revision or ""


def is_hub_id(text: str) -> bool:
    """Whether a text can be the hub id of a base: owner/name, or one of the hub's old names without an owner."""
    return re.fullmatch(rf"({_PART}/)?{_PART}|{_PART}/{_PART}{_FILE}", text) is not None and not Path(text).exists()


def split_file(text: str) -> tuple[str, str]:
    """(owner/name, file or "") of a hub id that may name a GGUF file."""
    owner, _, rest = text.partition("/")
    name, _, file = rest.partition("/")
    return (f"{owner}/{name}" if rest else owner), file


def cached_commit(repository: str, revision: str | None = None) -> str | None:
    """The commit that a revision of a model on the hub meant when it was last loaded; None where the hub cache lacks it."""
    found = _cached(repository, revision, "config.json")
    snapshot = None if found is None else _SNAPSHOT.search(found.as_posix())
    return None if snapshot is None else snapshot[3]


def cached_folder(repository: str, revision: str | None = None) -> Path | None:
    """The hub cache's copy of a model's repository; None where the cache lacks it."""
    found = _cached(repository, revision, "config.json")
    return None if found is None else found.parent


def cached_file(base: str, revision: str | None = None) -> Path | None:
    """The hub cache's copy of a base that is one file, owner/name/FILE.gguf; None for any other, or where the cache lacks it."""
    return _cached(base, revision, "")


def _cached(repository: str, revision: str | None, usual: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    name, file = split_file(repository)
    # a path is no id, and without a file there is nothing to look for
    if not is_hub_id(repository) or not (file or usual):
        return None
    found = try_to_load_from_cache(name, file or usual, revision=revision or None)
    return Path(found) if isinstance(found, str) else None  # an object of its own says "known not to exist"


def hub_errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises where the hub refuses or cannot be reached: OSError, and what its HTTP client raises."""
    from huggingface_hub.errors import HfHubHTTPError

    # the client is another package in each of its versions; the error of its own is one of the client's too
    return tuple(kind for kind in HfHubHTTPError.__mro__ if issubclass(kind, Exception) and kind is not Exception)


def hub_source(folder: str | Path) -> str:
    """ "owner/name@commit" for a folder in the hub cache, with what lies inside it; any other path as it is."""
    found = _SNAPSHOT.search(Path(folder).as_posix())
    return f"{found[1]}/{found[2]}@{found[3]}{found[4] or ''}" if found else str(folder)
