"""Honest programs, run alone, that raise when something gave way that the tier promises to hold, as data.

`holds` names the tiers that promise it.
"""

from __future__ import annotations

from dataclasses import dataclass

from guard import ALL, TOP


@dataclass(frozen=True)
class Breakout:
    """A program that ends well only where the sandbox held."""

    name: str
    program: str
    holds: tuple[str, ...] = ALL
    slow: bool = False


ATTEMPT = """
def refused(action, *kinds):
    try:
        result = action()
    except (kinds or (OSError, ValueError)) as error:
        return
    raise RuntimeError(f"not refused: {result!r}")
"""

BREAKOUTS = [
    Breakout(
        "limits hold",
        """
import resource
for which in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
    assert resource.getrlimit(which)[1] != resource.RLIM_INFINITY
""",
    ),
    Breakout(
        "file of more than the limit",
        """
f = open('big', 'wb')
refused(lambda: [f.write(b'x' * (1 << 20)) for _ in range(100)])
""",
    ),
    Breakout(
        "no standard input",
        """
import sys
assert sys.stdin.read() == ''
""",
    ),
    Breakout(
        "environment of the host",
        """
import os
assert 'LORAGATE_SECRET' not in os.environ
import glob
assert 'LORAGATE_SECRET' not in open('/proc/self/environ').read()
""",
        ("rlimits",),
    ),
    Breakout(
        "environment by any /proc",
        """
import os, glob
assert 'LORAGATE_SECRET' not in os.environ
for path in glob.glob('/proc/[0-9]*/environ') + ['/proc/self/environ']:
    try: text = open(path).read()
    except OSError: continue
    assert 'LORAGATE_SECRET' not in text, path
""",
        TOP,
    ),
    Breakout(
        "outbound TCP",
        """
import socket
refused(lambda: socket.create_connection(('127.0.0.1', PORT), timeout=2))
refused(lambda: socket.create_connection(('1.1.1.1', 80), timeout=2))
""",
        TOP,
    ),
    Breakout(
        "DNS",
        """
import socket
refused(lambda: socket.getaddrinfo('example.com', 80))
""",
        TOP,
    ),
    Breakout(
        "UDP",
        """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
refused(lambda: s.sendto(b'x', ('1.1.1.1', 53)))
""",
        TOP,
    ),
    Breakout(
        "vsock, netlink and raw packets",
        """
import socket
for family, kind in ((40, 1), (16, 3), (17, 3), (38, 5)):
    refused(lambda: socket.socket(family, kind))
refused(lambda: socket.socket(2, 3))
""",
        TOP,
    ),
    Breakout(
        "processes of the host",
        """
import os
assert all(int(p) < 20 for p in os.listdir('/proc') if p.isdigit())
refused(lambda: os.kill(HOST_PID, 0))
""",
        TOP,
    ),
    Breakout(
        "reading host files",
        """
import os
for path in (HOST_FILE, '/etc/passwd', '/etc/shadow', '/root/.bashrc', '/proc/1/root/etc/passwd'):
    refused(lambda: open(path).read())
for path in ('/home', '/var', '/srv', '/opt'):
    leading = {folder[len(path) + 1:].split('/')[0] for folder in PYTHON if folder.startswith(path + '/')}
    assert not os.path.isdir(path) or set(os.listdir(path)) <= leading, os.listdir(path)
""",
        TOP,
    ),
    Breakout(
        "listing what lies around the interpreter",
        """
import os
assert set(os.listdir('/tmp')) <= {TMP_TOP}
for folder in ('/root', '/home'):
    if os.path.isdir(folder):
        assert len(os.listdir(folder)) <= 1, os.listdir(folder)
""",
        TOP,
    ),
    Breakout(
        "the package's checkout",
        """
refused(lambda: __import__('loragate.version'), ImportError)
import os
assert not os.path.exists(CHECKOUT)
""",
        TOP,
    ),
    Breakout(
        "writing outside /tmp",
        """
import os, pathlib, io, sys
for folder in ('/', '/usr', '/usr/lib', '/dev', '/proc', '/etc', sys.prefix, os.path.dirname(os.__file__)):
    refused(lambda: open(folder + '/x', 'w'))
    refused(lambda: os.open(folder + '/x', os.O_CREAT | os.O_WRONLY))
    refused(lambda: pathlib.Path(folder, 'd').mkdir())
refused(lambda: io.open(HOST_FILE, 'a'))
refused(lambda: os.remove(os.__file__))
open('/tmp/allowed', 'w').write('x')
""",
        TOP,
    ),
    Breakout(
        "writing to /proc",
        """
for path in ('/proc/sys/kernel/hostname', '/proc/sysrq-trigger', '/proc/self/oom_score_adj',
             '/proc/self/uid_map', '/proc/sys/kernel/core_pattern', '/proc/1/mem', '/proc/self/attr/current'):
    refused(lambda: open(path, 'r+b', buffering=0).write(b'-1000'))
""",
        TOP,
    ),
    Breakout(
        "a full /tmp",
        """
def fill():
    for n in range(100):
        open(f'/tmp/{n}', 'wb').write(b'x' * (1 << 20))
refused(fill)
""",
        TOP,
    ),
    Breakout(
        "a full /dev/shm",
        """
def fill():
    for n in range(100):
        open(f'/dev/shm/{n}', 'wb').write(b'x' * (1 << 20))
refused(fill)
""",
        TOP,
    ),
    Breakout(
        "privileges",
        """
status = dict(l.split(':', 1) for l in open('/proc/self/status'))
assert int(status['CapEff'], 16) == int(status['CapPrm'], 16) == int(status['CapAmb'], 16) == 0
assert status['NoNewPrivs'].strip() == '1' and status['Seccomp'].strip() in ('2',)
""",
        TOP,
    ),
    Breakout(
        "setuid",
        """
import os
assert os.getuid() != 0
refused(lambda: os.setuid(0))
refused(lambda: os.setgid(0))
import subprocess
assert subprocess.run(['su', '-c', 'true'], stdin=-3, capture_output=True).returncode
""",
        TOP,
    ),
    Breakout(
        "mount, chroot, namespaces",
        """
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
CLONE = 56 if platform.machine() == 'x86_64' else 220
assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == -1
assert libc.umount2(b'/tmp', 2) == -1
assert libc.unshare(0x10000000) == -1 and libc.unshare(0x20000) == -1
assert libc.setns(0, 0) == -1
refused(lambda: os.chroot('/tmp'))
assert libc.syscall(CLONE, 0x10000011, 0, 0, 0, 0) == -1
""",
        TOP,
    ),
    Breakout(
        "ptrace and the memory of others",
        """
import ctypes, os, glob
libc = ctypes.CDLL(None, use_errno=True)
for pid in (1, 2, os.getppid()):
    assert libc.ptrace(16, pid, 0, 0) == -1
try:
    open('/proc/1/mem', 'rb')
except OSError:
    pass
else:  # bubblewrap's own first process, when both run as one user: it can do no more than the program
    status = dict(l.split(':', 1) for l in open('/proc/1/status'))
    assert status['Seccomp'].strip() == '2' and status['NoNewPrivs'].strip() == '1', status
    assert int(status['CapEff'], 16) == int(status['CapPrm'], 16) == 0, status
""",
        TOP,
    ),
    Breakout(
        "io_uring, bpf, keys, userfaultfd",
        """
import ctypes, errno, platform
libc = ctypes.CDLL(None, use_errno=True)
x86_64, aarch64 = (425, 321, 248, 250, 323, 298), (425, 280, 217, 219, 282, 241)
for number in x86_64 if platform.machine() == 'x86_64' else aarch64:
    ctypes.set_errno(0)
    assert libc.syscall(number, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == errno.EPERM, number
""",
        TOP,
    ),
    Breakout(
        "many threads or processes",
        """
import os, time
children = 0
try:
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        children += 1
except OSError:
    pass
assert children <= 32, children
""",
        TOP,
    ),
    Breakout(
        "shells see no more than Python",
        """
import os, ctypes, subprocess
pid = os.posix_spawn('/bin/sh', ['sh', '-c', f'cat {HOST_FILE} || touch /usr/x || touch {HOST_FILE}.x'], os.environ)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
assert ctypes.CDLL(None).system(f'cat {HOST_FILE}'.encode()) != 0
assert subprocess.run(['/bin/sh', '-c', f'cat {HOST_FILE}'], capture_output=True).returncode
""",
        TOP,
    ),
    Breakout(
        "the disks of the host",
        """
import os, stat
for name in os.listdir('/dev'):
    assert not stat.S_ISBLK(os.lstat('/dev/' + name).st_mode), name
refused(lambda: os.mknod('/tmp/disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0)))
""",
        TOP,
    ),
    Breakout(
        "device nodes cannot be made",
        """
import os, stat
refused(lambda: os.mknod('/tmp/mem', 0o600 | stat.S_IFCHR, os.makedev(1, 1)))
""",
        TOP,
    ),
    Breakout(
        "the terminal",
        """
refused(lambda: open('/dev/tty'))
""",
    ),
]
