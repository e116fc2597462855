"""What isolates a program: bubblewrap's command line, and the filter over system calls that it is given.

No network, a read-only system without the host's files, a private /tmp, no privileges, a process tree of its own.
"""

from __future__ import annotations

import errno
import functools
import os
import platform
import secrets
import struct
import sys
import sysconfig
from pathlib import Path

from loragate.errors import ConfigError


class SandboxError(ConfigError):
    """A sandbox that was asked for and cannot be had here; the message says what to install or which flag to give."""


def python_command() -> list[str]:
    """The words that start this Python with nothing but its standard library."""
    return [os.path.realpath(sys.executable), "-s", "-P", "-S", "-B"]


@functools.cache
def package_folders() -> tuple[str, ...]:
    """The folders of installed packages, without those that .pth files add (a checkout, say)."""
    folders = (sysconfig.get_path(name) for name in ("purelib", "platlib"))
    return tuple(dict.fromkeys(folder for folder in folders if folder and os.path.isdir(folder)))


def bubblewrap_command(file_mb: int, drop_root: bool) -> list[str]:
    """The words before the interpreter's, but for `--seccomp` and the final `--`.

    Args:
        file_mb: size of the private /tmp, MiB.
        drop_root: for root: begin with the right to change to another user, which the process inside then does; otherwise a user
            namespace takes all rights.
    """
    words = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if drop_root:
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    words += ["--ro-bind", "/usr", "/usr"]
    for path in ("/bin", "/lib", "/lib64", "/lib32", "/libx32"):
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, path]
    for path in ("/etc/ld.so.cache", "/etc/alternatives", "/nix/store"):
        words += ["--ro-bind-try", path, path]
    words += ["--proc", "/proc", "--dev", "/dev"]
    # Where a user namespace stands for root's rights, the kernel still takes the program for the owner of these: kernel settings.
    for path in ("/proc/sys", "/proc/fs", "/proc/irq", "/proc/bus", "/proc/acpi", "/proc/scsi", "/proc/asound"):
        if os.path.isdir(path):
            words += ["--tmpfs", path, "--remount-ro", path]
    for path in ("/dev/shm", "/tmp"):
        words += ["--perms", "1777", "--size", str(file_mb * 1024 * 1024), "--tmpfs", path]
    # the interpreter and its packages, and nothing that lies beside them
    folders = [os.path.realpath(folder) for folder in (sys.base_prefix, sys.base_exec_prefix)]
    folders += [str(Path(python_command()[0]).parent), *package_folders()]
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
    # The root of the new tree is a tmpfs too, without a limit of its own.
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]


def unused_uid() -> int:
    """A user id in the upper half of the widest stretch there is: it owns no file, and its processes are counted apart."""
    lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    first, _, count = max((tuple(map(int, line.split())) for line in lines), key=lambda stretch: stretch[2])
    half = min(count, 2**31 - 2) // 2
    return first + half + secrets.randbelow(max(half, 1))


# The filter, written as the kernel's own instructions. Namespaces do not cover everything: virtual machines answer on AF_VSOCK
# whatever the network namespace, and a process may make a user namespace of its own and be powerful there. The filter refuses
# these calls, and others that a program under test has no use for and that past holes of the kernel went through. Numbers of the
# calls, x86_64 and aarch64.
REFUSED_SYSCALLS = {
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
SOCKET, CLONE, CLONE3, PRLIMIT = (41, 198), (56, 220), (435, 435), (302, 261)
NEW_NAMESPACES = 0x7E020000 | 0x00000080
FAMILIES = (1, 2, 10)  # unix, inet, inet6; the network namespace takes care of the last two

# Instructions (linux/bpf_common.h, linux/seccomp.h): load a word, jump if equal, jump if any bit set, return.
LOAD, EQUAL, BITS, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16


def build_seccomp_filter() -> bytes | None:
    """Return the filter for this machine, or None where the numbers of its calls are not known."""
    known = ARCHITECTURES.get(platform.machine())
    if known is None:
        return None
    column, audit = known
    code = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if column == 0:  # the x32 numbering of x86_64 would name the same calls otherwise
        code += [(BITS, 0, 1, 0x40000000), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    for numbers in REFUSED_SYSCALLS.values():
        code += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, REFUSE | errno.EPERM)]
    # clone3 keeps its flags in memory, where a filter cannot look; the C library then falls back to clone.
    code += [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    code += [(EQUAL, 0, 4, CLONE[column]), (LOAD, 0, 0, FIRST_ARGUMENT), (BITS, 0, 1, NEW_NAMESPACES)]
    code += [(RETURN, 0, 0, REFUSE | errno.EPERM), (RETURN, 0, 0, ALLOW)]
    # limits of one's own (0) only: the process of the tests has the program's user id
    code += [(EQUAL, 0, 4, PRLIMIT[column]), (LOAD, 0, 0, FIRST_ARGUMENT), (EQUAL, 1, 0, 0)]
    code += [(RETURN, 0, 0, REFUSE | errno.EPERM), (RETURN, 0, 0, ALLOW)]
    code += [(EQUAL, 0, len(FAMILIES) + 2, SOCKET[column]), (LOAD, 0, 0, FIRST_ARGUMENT)]
    code += [(EQUAL, len(FAMILIES) - position, 0, family) for position, family in enumerate(FAMILIES)]
    code += [(RETURN, 0, 0, REFUSE | errno.EAFNOSUPPORT), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
