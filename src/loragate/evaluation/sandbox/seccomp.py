"""A filter over system calls for the top tier, written as the kernel's own instructions.

Namespaces do not cover everything: virtual machines answer on AF_VSOCK whatever the network namespace, and a process
may make a user namespace of its own and be powerful there. The filter refuses these calls, and others that a
program under test has no use for and that past holes of the kernel went through.
"""

from __future__ import annotations

import errno
import platform
import struct

# Numbers of the calls that are refused, x86_64 and aarch64.
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


def filter_program(machine: str | None = None) -> bytes | None:
    """Return the filter for `machine` (default: this one), or None where the numbers of its calls are not known."""
    known = ARCHITECTURES.get(machine or platform.machine())
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
