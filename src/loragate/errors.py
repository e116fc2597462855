"""Errors that are addressed to a person.

Every failure a user can cause is one of these: the message names what was found (file, line or key), what was
expected and what to do. The command line prints them as one paragraph without a traceback, and ends with the error's exit
status. This is the lowest floor: it imports nothing of the package.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable
from typing import ClassVar

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses: done; a check or a result failed; wrong call or bad input; Ctrl-C or SIGTERM."""


class LoragateError(Exception):
    """Base of all errors that a user can cause and mend."""

    exit_status: ClassVar[int] = FAILED


class ConfigError(LoragateError):
    """A setting, flag or configuration file that cannot be used."""

    exit_status = WRONG


class DataError(LoragateError):
    """A data file or row that cannot be used; the message names the file and line."""

    exit_status = WRONG


class GateError(LoragateError):
    """An adapter or model that cannot be gated, or a gate that would have no effect or be wrong."""

    exit_status = WRONG


class ArtifactError(LoragateError):
    """A gated-adapter folder that is malformed, tampered with or made for another base or adapter."""

    exit_status = WRONG


class TrainingError(LoragateError):
    """A training run that must not continue (parity, frozen weights changed, non-finite loss)."""


class SetupError(TrainingError):
    """A training that cannot begin with these rows, this model or this folder; nothing was begun."""

    exit_status = WRONG


class StoppedError(TrainingError):
    """A training that was asked to stop by Ctrl-C or SIGTERM before its last step."""

    exit_status = INTERRUPTED


class DivergenceError(TrainingError):
    """A loss or gradient that is not finite; nothing of it was applied, and other settings may do."""


def is_disk_full(error: BaseException) -> bool:
    """Whether an error is that of a full disk; libraries have errors of their own for it (safetensors, torch, numpy in turn)."""
    signs = r"No space left|failed writing file|\d requested and \d+ written"
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or bool(re.search(signs, str(error)))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name closest to `name`, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{matches[0]}'?" if matches else ""
