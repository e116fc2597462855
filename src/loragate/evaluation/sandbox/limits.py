"""What a program may use, and what is said of it afterwards. Plain data; nothing here runs anything."""

from __future__ import annotations

from dataclasses import dataclass

from loragate.errors import ConfigError
from loragate.validate import Count, Positive, check


class SandboxError(ConfigError):
    """A sandbox that was asked for and cannot be had here; the message says what to install or which flag to give."""


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        seconds: wall time from the moment the interpreter is up, so that a busy machine's start-up does not count.
        memory_mb: address space of each process, and resident memory of all of them together, MiB.
        processes: processes and threads at one time.
        output_kb: bytes on standard output and error together, KiB; a program that writes more is stopped.
        file_mb: size of one file, and of the private /tmp as a whole, MiB.

    Raises `ConfigError` for a limit that is not positive and finite.
    """

    seconds: Positive = 10.0
    memory_mb: Count = 1024
    processes: Count = 32
    output_kb: Count = 1024
    file_mb: Count = 64

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class ProgramResult:
    """What became of one program.

    Attributes:
        passed: whether it ran to its end, all asserts included.
        reason: "ok", "wrong" (an assertion failed), "error" (another exception), "syntax", "timeout", "memory",
            "output" (too much of it), "exit" (it ended before its end), "killed" (by a signal), "processes" (too many),
            "protocol" (it tried to speak for the harness), or "cancelled".
        tier: the tier it ran in.
        mode: "one process", or "two processes" with the tests out of the program's reach.
        seconds: wall time that it ran.
        detail: one line on the failure, at most 500 characters; written by the program where it raised.
        output: the last 2,000 characters of its output and error stream.
    """

    passed: bool
    reason: str
    tier: str
    mode: str = "one process"
    seconds: float = 0.0
    detail: str = ""
    output: str = ""
