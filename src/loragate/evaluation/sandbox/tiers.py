"""The two tiers as command lines, and what a program may use in them.

A tier is never exchanged for a lower one silently: what is asked for works, or there is an error which says what to
install and which flag lowers the tier.
"""

from __future__ import annotations

import errno
import functools
import os
import platform
import secrets
import shutil
import struct
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from loragate.errors import ConfigError, nearest
from loragate.validate import Count, Positive, check

TIERS = {
    "bubblewrap": "no network, read-only system, private /tmp, no privileges, own processes, limits",
    "rlimits": "limits only, NOT isolated; for containers that are a sandbox themselves",
}
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    # Verdicts must not depend on the order of sets, nor on how many cores compute a sum.
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


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
        seconds: wall time that it ran.
        detail: one line on the failure, at most 500 characters; written by the program where it raised.
        output: the last 2,000 characters of its output and error stream.
    """

    passed: bool
    reason: str
    tier: str
    seconds: float = 0.0
    detail: str = ""
    output: str = ""


@dataclass(frozen=True)
class Launch:
    """How to start one confined interpreter.

    Attributes:
        command: the words before the interpreter's.
        uid: user id that the harness changes to, or None to keep its own.
        filter: a filter over system calls, for `--seccomp`; None where nothing isolates the program: then it shares the host's
            files and /tmp, and the kernel's limit on processes would count those of others.
    """

    command: tuple[str, ...] = ()
    uid: int | None = None
    filter: bytes | None = None


def interpreter() -> list[str]:
    """The words that start this Python with nothing but its standard library."""
    return [os.path.realpath(sys.executable), "-s", "-P", "-S", "-B"]


@functools.cache
def package_folders() -> tuple[str, ...]:
    """The folders of installed packages, without those that .pth files add (a checkout, say)."""
    folders = (sysconfig.get_path(name) for name in ("purelib", "platlib"))
    return tuple(dict.fromkeys(folder for folder in folders if folder and os.path.isdir(folder)))


def launch(tier: str, limits: Limits, root_style: str) -> Launch:
    """Return how to start one program in `tier`.

    `root_style` matters for root under bubblewrap: "drop" starts with full rights and changes to a user id that
    nobody else has, fresh per program; "namespace" is for containers whose root may not, and is how other users run.
    """
    if tier == "rlimits":
        return Launch()
    drop = os.geteuid() == 0 and root_style == "drop"
    return Launch(_bubblewrap(limits, drop), _unused_uid() if drop else None, filter_program())


def missing(tier: str) -> str | None:
    """Return why `tier` cannot even be tried here, or None; raises `ConfigError` for a name that is not one of `TIERS`."""
    if tier not in TIERS:
        raise ConfigError(f"There is no sandbox tier {tier!r}{nearest(tier, TIERS)}; known: {', '.join(TIERS)}")
    if sys.platform != "linux" and tier != "rlimits":
        return f"the {tier} tier needs Linux and this is {sys.platform}"
    if os.name != "posix":
        return f"the {tier} tier needs a POSIX system and this is {sys.platform}"
    if tier == "bubblewrap" and not shutil.which("bwrap"):
        return "there is no `bwrap` here; install it with `apt install bubblewrap`"
    if tier == "bubblewrap" and filter_program() is None:
        return f"the filter over system calls is written for {' and '.join(ARCHITECTURES)}, and this is {platform.machine()}"
    return None


def _bubblewrap(limits: Limits, drop: bool) -> tuple[str, ...]:
    size = str(limits.file_mb * 1024 * 1024)
    words = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if drop:
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    words += ["--ro-bind", "/usr", "/usr"]
    for folder in ("/bin", "/lib", "/lib64", "/lib32", "/libx32"):
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            words += ["--ro-bind", folder, folder]
    words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    words += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives", "--ro-bind-try", "/nix/store", "/nix/store"]
    words += ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp"):
        words += ["--perms", "1777", "--size", size, "--tmpfs", folder]
    words += _read_only_folders()
    # The root of the new tree is a tmpfs too, without a limit of its own.
    return (*words, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--")


def _read_only_folders() -> list[str]:
    """Bind the interpreter and its packages, and nothing that lies beside them."""
    folders = [os.path.realpath(folder) for folder in (sys.base_prefix, sys.base_exec_prefix)]
    folders += [str(Path(interpreter()[0]).parent), *package_folders()]
    words: list[str] = []
    bound: list[Path] = [Path("/usr")]
    for folder in map(Path, dict.fromkeys(folders)):
        if any(folder == outer or outer in folder.parents for outer in bound):
            continue
        if folder in (Path("/"), Path.home()):
            raise SandboxError(f"Python is installed in {folder} itself, which a sandbox must not show to programs")
        for parent in reversed(folder.parents[:-1]):
            # Made by hand: those that bubblewrap makes cannot be passed by other users.
            if parent not in (Path("/tmp"), *bound):
                words += ["--perms", "0755", "--dir", str(parent)]
        words += ["--ro-bind", str(folder), str(folder)]
        bound.append(folder)
    return words


def _unused_uid() -> int:
    """A user id in the upper half of the widest stretch there is: it owns no file, and its processes are counted apart."""
    lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    first, _, count = max((tuple(map(int, line.split())) for line in lines), key=lambda stretch: stretch[2])
    half = min(count, 2**31 - 2) // 2
    return first + half + secrets.randbelow(max(half, 1))


# A filter over system calls for the top tier, written as the kernel's own instructions. Namespaces do not cover everything:
# virtual machines answer on AF_VSOCK whatever the network namespace, and a process may make a user namespace of its own and be
# powerful there. The filter refuses these calls, and others that a program under test has no use for and that past holes of the
# kernel went through. Numbers of the calls, x86_64 and aarch64.
REFUSED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "unshare": (272, 97), "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "settimeofday": (164, 170), "clock_settime": (227, 112), "quotactl": (179, 60),
    "syslog": (103, 116),
}  # fmt: skip
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
SOCKET, CLONE, CLONE3 = (41, 198), (56, 220), (435, 435)
NEW_NAMESPACES = 0x7E020000 | 0x00000080
FAMILIES = (1, 2, 10)  # unix, inet, inet6; the network namespace takes care of the last two

# Instructions (linux/bpf_common.h, linux/seccomp.h): load a word, jump if equal, jump if any bit set, return.
LOAD, EQUAL, BITS, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16


def filter_program() -> bytes | None:
    """Return the filter for this machine, or None where the numbers of its calls are not known."""
    known = ARCHITECTURES.get(platform.machine())
    if known is None:
        return None
    column, audit = known
    code = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, audit),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    if column == 0:  # the x32 numbering of x86_64 would name the same calls otherwise
        code += [(BITS, 0, 1, 0x40000000), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    for numbers in REFUSED.values():
        code += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, REFUSE | errno.EPERM)]
    # clone3 keeps its flags in memory, where a filter cannot look; the C library then falls back to clone.
    code += [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    code += [
        (EQUAL, 0, 4, CLONE[column]),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (BITS, 0, 1, NEW_NAMESPACES),
        (RETURN, 0, 0, REFUSE | errno.EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    code += [(EQUAL, 0, len(FAMILIES) + 2, SOCKET[column]), (LOAD, 0, 0, FIRST_ARGUMENT)]
    code += [(EQUAL, len(FAMILIES) - position, 0, family) for position, family in enumerate(FAMILIES)]
    code += [(RETURN, 0, 0, REFUSE | errno.EAFNOSUPPORT), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
