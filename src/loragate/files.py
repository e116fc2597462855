"""Writing files so that a reader never sees half of one (temporary file, fsync, rename), the run folder of a resumable job, and
what a file or a folder is known by."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from loragate.errors import ConfigError, LoragateError, is_disk_full
from loragate.records import read_object
from loragate.version import __version__

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]

_HASHED = (".json", ".safetensors", ".gguf", ".jinja", ".bin", ".model", ".txt")
_PIECE, _PIECES = 1 << 20, 16


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_sha256(folder: str | Path) -> str:
    """SHA-256 (hex) over settings, tokenizer and weights of a model's or adapter's folder, or of a GGUF file, to know it again.

    A folder keeps its name when it is trained into again. Of a large file `_PIECES` samples are read, as training changes a
    weight file everywhere. Folders inside are left out.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()) if Path(folder).is_dir() else [Path(folder)]:
        if path.is_file() and not path.name.startswith(".") and path.suffix in _HASHED:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                # pieces of 1 MiB: all of a file up to 16 of them, beyond that one in each sixteenth
                for place in range(0, size, max(_PIECE, size // _PIECES)):
                    file.seek(place)
                    digest.update(file.read(_PIECE))
    return digest.hexdigest()


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary file beside `path`, sync it to disk and rename it into place.

    Where that fails (LoragateError), nothing is left behind.
    """
    handle, name = -1, ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
        os.close(handle)
        temporary = Path(name)  # in the same folder: a rename does not go from one disk to another
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
        if os.name == "posix":  # the rename itself is durable once the folder is
            descriptor = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            except OSError as error:
                # the file is in its place; some network file systems cannot sync a folder
                if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
                    raise
            finally:
                os.close(descriptor)
    except Exception as error:
        if isinstance(error, OSError) or is_disk_full(error):
            raise LoragateError(describe_os_error(path, error)) from error
        raise
    finally:
        if name and os.path.exists(name):
            os.unlink(name)


def write_text(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to `path` atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as readable JSON to `path` atomically; NaN and infinity are refused."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A small JSON object; empty where the file is absent or holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def require_empty_folder(folder: Path, *besides: str) -> None:
    """Refuse a folder that holds anything else than `besides`, as nothing is ever overwritten, or where nothing can be written.

    Raises:
        ConfigError: for a folder that is in use, or a file.
        LoragateError: for one that cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is a file; give a folder")
    if folder.is_dir() and (present := sorted({path.name for path in folder.iterdir()} - set(besides))):
        raise ConfigError(f"--out {folder} is not empty (it holds {', '.join(present[:3])}); choose another folder")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=there, prefix=".loragate-").close()
    except OSError as error:  # permissions say too little: of root, a read-only mount, /proc
        raise LoragateError(describe_os_error(folder, error)) from error


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder`, which is new or empty, where the context ends without an error.

    Where that fails (LoragateError), nothing is left behind.
    """
    require_empty_folder(folder)
    partial = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".partial"))
        yield partial
        partial.chmod(0o777 & ~_umask())
        try:
            if folder.is_dir():
                folder.rmdir()
            partial.rename(folder)
        except OSError:  # ".", a link or a mount cannot be replaced, only filled
            folder.mkdir(exist_ok=True)
            for path in partial.iterdir():
                path.rename(folder / path.name)
    except LoragateError as error:  # of the caller, by a name that nobody asked for
        if str(partial) in str(error):
            raise type(error)(str(error).replace(str(partial), str(folder))) from error
        raise
    except Exception as error:  # also of what the caller writes inside the context
        if isinstance(error, OSError) or is_disk_full(error):
            raise LoragateError(describe_os_error(folder, error)) from error
        raise
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _umask() -> int:
    """The process's mask: what `tempfile` makes is its owner's alone. It can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def describe_os_error(path: Path, error: Exception) -> str:
    """One sentence on a failed write, with the way out."""
    if is_disk_full(error):
        return f"{path} was not written: the disk is full. Free some space and run again; nothing was left half-written"
    reason = getattr(error, "strerror", None) or error
    if getattr(error, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{path} was not written: the folder cannot be written to ({reason}). Choose another --out"
    return f"{path} was not written: {reason}"


@contextmanager
def file_lock(path: Path, wait_s: float, busy_message: str) -> Iterator[None]:
    """Hold a lock file; LoragateError `busy_message` if another process still holds it after `wait_s` seconds.

    The system releases it however the process ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    until = time.monotonic() + wait_s
    # never deleted: another process may wait for this very file
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise LoragateError(busy_message) from None
                time.sleep(0.2)
            except OSError:
                break  # a file system without locks
        yield


@dataclass(frozen=True)
class RunFolder:
    """The folder of a job that can be killed at any moment and resumed to the same result.

    `run.json` says what was begun: its identity, JSON-able, of which equal values give equal results, the version of the
    package, and notes, which a resumed job need not share. One process at a time writes to the folder. What the job keeps
    there is its own affair: it writes whole files (`write_atomically`) or appends whole lines, and on resume does what is
    missing.

    Attributes:
        path: of the folder; made when the job begins.
        error: what a refusal is raised as.
    """

    path: Path
    error: type[LoragateError] = ConfigError

    RECORD: ClassVar[str] = "run.json"
    VERSION: ClassVar[str] = "loragate"
    NOTES: ClassVar[str] = "notes"

    @property
    def record_path(self) -> Path:
        """The file that says what was begun."""
        return self.path / self.RECORD

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder against other processes; raises LoragateError where another one writes to it."""
        with file_lock(
            self.path / "lock", 0.0, f"another run is writing to {self.path}; wait for it to end, or stop it"
        ):
            yield

    def begin(
        self,
        identity: Mapping[str, Any],
        *,
        resume: bool = False,
        existing_work: str = "",
        notes: Mapping[str, Any] | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> None:
        """Write down what is begun, or on resume check that it is the same job.

        Args:
            identity: JSON-able; everything that a result depends on.
            existing_work: in words, the work in the folder that a new job must not be mixed with; by default a record is such
                work.
            notes: JSON-able; for readers of the folder.
            hints: {dotted key: why it may differ though the job is the same, and what to do}, for the refusal.

        Raises `error` for work that would be overwritten, nothing to resume, another version, or the first key that differs.
        """
        if not resume:
            if existing_work := existing_work or ("an earlier run" if self.record_path.exists() else ""):
                raise self.error(
                    f"{self.path} holds {existing_work}, which is not overwritten; continue it with --resume (resume=True), or "
                    "choose another --out"
                )
            write_json(self.record_path, {**identity, self.VERSION: __version__, self.NOTES: dict(notes or {})})
            return
        stored = self.read()
        before = stored.pop(self.VERSION, None)
        stored.pop(self.NOTES, None)
        if before != __version__:
            raise self.error(
                f"{self.record_path}: this run was begun with loragate {before or 'of an unknown version'}, and this is "
                f"{__version__}, "
                f"which may compute something else. Go on with that version (pip install 'loragate=={before or 'VERSION'}'), or "
                "begin again in another --out"
            )
        remedy = "repeat the command with the same settings, weights and data, or choose another --out"
        require_same_identity(self.record_path, stored, dict(identity), remedy, self.error, hints)

    def read(self) -> dict[str, Any]:
        """The record of what was begun; raises `error` where there is none, or none that can be read."""
        if not self.record_path.exists():
            raise self.error(
                f"{self.record_path} is missing: there is no run to resume in {self.path}; leave out --resume"
            )
        return read_object(self.record_path, "choose another --out", self.error)


def require_same_identity(
    record: Path,
    old: Any,
    new: Any,
    remedy: str,
    error: type[LoragateError] = ConfigError,
    hints: Mapping[str, str] | None = None,
) -> None:
    """Refuse to go on with another work than was begun: `record_path` is the file of what was begun, `old`, and `new` is asked for
    now, both JSON-able. Raises `error` with the first key that differs, the `remedy`, and its hint where there is one.
    """
    # through JSON, as what was begun has been: tuples are lists by then, and keys texts
    if (found := first_difference(old, json.loads(json.dumps(new)))) is not None:
        key, before, now = (found[0], *("none" if value is None else f"{value!r:.160}" for value in found[1:]))
        hint = f". {hints[key]}" if hints and key in hints else ""
        raise error(f"{record} was begun with {key} = {before}, now it is {now}; {remedy}{hint}")


def first_difference(old: Any, new: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """(dotted key, old, new) of the first place where two JSON-able values differ; None where they are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        inside = [(f"{key}.{name}" if key else name, old.get(name), new.get(name)) for name in {**old, **new}]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        inside = [(f"{key}[{index}]", *pair) for index, pair in enumerate(zip(old, new, strict=True))]
    else:
        return None if old == new else (key, old, new)
    return next(filter(None, (first_difference(left, right, place) for place, left, right in inside)), None)
