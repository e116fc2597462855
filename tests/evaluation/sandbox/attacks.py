"""What a program may try, as data.

CHEATS are programs that must not pass the checks `CHECKS` in two-process mode, whatever they do; the reason is
given where it is certain. BREAKOUTS are honest programs, run alone, which raise when something gave way that the tier promises
to hold; `holds` names the tiers that promise it.
"""

from __future__ import annotations

from dataclasses import dataclass

ALL = ("bubblewrap", "namespaces", "rlimits")
NETWORK = ("bubblewrap", "namespaces")
TOP = ("bubblewrap",)

CHECKS = "assert f(3) == 9\nassert f(-7) == 49\nassert f(12) == 144\n"


@dataclass(frozen=True)
class Cheat:
    """A wrong program that wants to pass; `reasons` are the words it may end with."""

    name: str
    program: str
    reasons: tuple[str, ...]
    slow: bool = False
    # Tiers that do not hold these would let them at the machine that runs the tests.
    holds: tuple[str, ...] = ALL


@dataclass(frozen=True)
class Breakout:
    """A program that ends well only where the sandbox held."""

    name: str
    program: str
    holds: tuple[str, ...] = ALL
    slow: bool = False


CHEATS = [
    Cheat(
        "os._exit(0) at once",
        """
import os
os._exit(0)
""",
        ("exit",),
    ),
    Cheat(
        "os._exit(0) when called",
        """
import os
def f(x): os._exit(0)
""",
        ("exit",),
    ),
    Cheat(
        "sys.exit(0) at once",
        """
import sys
sys.exit(0)
""",
        ("exit",),
    ),
    Cheat(
        "sys.exit(0) when called",
        """
import sys
def f(x): sys.exit(0)
""",
        ("exit",),
    ),
    Cheat(
        "quit in another thread",
        """
import threading, os
threading.Timer(.01, os._exit, [0]).start()
def f(x):
    while True: pass
""",
        ("exit",),
    ),
    Cheat(
        "exec of a program that succeeds",
        """
import os
def f(x): os.execv('/bin/true', ['true'])
""",
        ("exit",),
    ),
    Cheat(
        "equal to everything",
        """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def f(x): return Equal()
""",
        ("wrong",),
    ),
    Cheat(
        "equal to everything, as int",
        """
class Equal(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return Equal(1)
""",
        ("wrong",),
    ),
    Cheat(
        "equal to everything, as str and list",
        """
class L(list):
    def __eq__(self, other): return True
class S(str):
    def __eq__(self, other): return True
    def __str__(self): return self
def f(x): return L([S('9')])
""",
        ("wrong",),
    ),
    Cheat(
        "equal to everything, as the type of int",
        """
class Meta(type):
    def __eq__(cls, other): return True
    __hash__ = type.__hash__
class Equal(metaclass=Meta): pass
def f(x): return Equal
""",
        ("wrong",),
    ),
    Cheat(
        "pretends to be int by __class__",
        """
class Fake:
    __class__ = int
    def __eq__(self, other): return True
def f(x): return Fake()
""",
        ("wrong", "error"),
    ),
    Cheat(
        "reads the expected values from frames",
        """
import sys
def f(x):
    frame = sys._getframe()
    seen = []
    while frame:
        seen += list(frame.f_locals.values()) + list(frame.f_code.co_consts)
        frame = frame.f_back
    assert not any(v in (9, 49, 144) for v in seen if type(v) is int)
    return next(v for v in seen if type(v) is int and v == x * x)
""",
        ("error",),
    ),
    Cheat(
        "looks for the checks in its memory",
        """
import gc
def f(x):
    assert not [v for v in gc.get_objects() if type(v) is dict and 'nonce' in v]
    assert not [v for v in gc.get_objects() if type(v) is str and 'f(-7) ==' in v]
    return 0
""",
        ("wrong",),
    ),
    Cheat(
        "reads its standard input and words",
        """
import sys
assert sys.stdin.read() == ''
words = open('/proc/self/cmdline').read()
assert 'assert f(' not in words
def f(x): return words
""",
        ("wrong",),
    ),
    Cheat(
        "prints marks of success",
        r"""
import sys
for word in ('ok', 'passed', 'OK', '["nonce", "0"]', '\x00\x00\x00\x04true'):
    print(word)
    print(word, file=sys.stderr)
def f(x): return 0
""",
        ("wrong",),
    ),
    Cheat(
        "replaces print, builtins and asserts",
        """
import builtins
builtins.print = lambda *a, **k: None
builtins.AssertionError = type('Quiet', (Exception,), {})
builtins.isinstance = lambda *a: True
builtins.__debug__x = False
def f(x): return 0
""",
        ("wrong", "error", "protocol", "exit"),
    ),
    Cheat(
        "replaces json",
        """
import json
json.dumps = lambda *a, **k: '["value", 9]'
def f(x): return 0
""",
        ("protocol",),
    ),
    Cheat(
        "replaces the harness",
        """
import sys
for name, module in list(sys.modules.items()):
    if 'harness' in name:
        for key in list(vars(module)):
            if callable(vars(module)[key]):
                vars(module)[key] = lambda *a, **k: None
def f(x): return 0
""",
        ("exit", "protocol", "error", "wrong", "timeout"),
    ),
    Cheat(
        "deletes the modules",
        """
import sys
sys.modules.clear()
def f(x): return 0
""",
        ("wrong", "error", "exit"),
    ),
    Cheat(
        "speaks for the checker to the host",
        """
import os, json
def say(fd, message):
    data = json.dumps(message).encode()
    os.write(fd, len(data).to_bytes(4, 'big') + data)
for fd in range(3, 20):
    try:
        say(fd, ['nonce', '0' * 32]); say(fd, ['ended']); say(fd, ['ok'])
    except OSError: pass
def f(x): return 0
""",
        ("protocol",),
    ),
    Cheat(
        "speaks malformed frames",
        r"""
import os
for fd in range(3, 20):
    try: os.write(fd, b'\xff' * 64)
    except OSError: pass
def f(x): return 0
""",
        ("protocol",),
    ),
    Cheat(
        "asks the host for the nonce",
        """
import os, json
def say(fd, message):
    data = json.dumps(message).encode()
    os.write(fd, len(data).to_bytes(4, 'big') + data)
for fd in range(3, 20):
    try: say(fd, ['ended'])
    except OSError: pass
def f(x): return 0
""",
        ("protocol",),
    ),
    Cheat(
        "answers with handles that are not its own",
        """
import sys
def patch():
    wire = sys.modules['loragate.evaluation.sandbox.harness.candidate']
    wire.encode = lambda value, handle: {'h': ['x', 'object', 'int']}
patch()
def f(x): return 0
""",
        ("protocol",),
    ),
    Cheat(
        "answers with a tag of no known form",
        """
import sys
sys.modules['loragate.evaluation.sandbox.harness.candidate'].encode = lambda value, handle: {'?': 1}
def f(x): return 0
""",
        ("protocol",),
    ),
    Cheat(
        "answers nested beyond depth",
        """
def f(x):
    deep = []
    for _ in range(100000): deep = [deep]
    return deep
""",
        ("error", "output", "protocol"),
    ),
    Cheat(
        "returns 50 MB",
        """
def f(x): return 'x' * 50_000_000
""",
        ("output",),
    ),
    Cheat(
        "returns nan",
        """
def f(x): return float('nan')
""",
        ("wrong",),
    ),
    Cheat(
        "returns a generator",
        """
def f(x): yield x * x
""",
        ("wrong",),
    ),
    Cheat(
        "result with a broken repr",
        """
class R:
    def __repr__(self): raise ValueError('no')
def f(x): return R()
""",
        ("wrong",),
    ),
    Cheat(
        "exception with a broken str",
        """
class E(Exception):
    def __str__(self): raise ValueError('no')
def f(x): raise E
""",
        ("error",),
    ),
    Cheat(
        "exception named like success",
        """
class SystemExit(Exception): pass
def f(x): raise SystemExit('ok')
""",
        ("error",),
    ),
    Cheat(
        "raises BaseException",
        """
def f(x): raise BaseException
""",
        ("error",),
    ),
    Cheat(
        "an assertion of its own is an error",
        """
def f(x): assert False
""",
        ("error",),
    ),
    Cheat(
        "deep recursion",
        """
def f(x): return f(x)
""",
        ("error",),
    ),
    Cheat(
        "recursion until the stack ends",
        """
import sys
sys.setrecursionlimit(10**9)
class A:
    def __getattr__(self, n): return getattr(self, n + 'x')
def f(x): return sum(iter(lambda: repr(g(x)), 0))
def g(x): return max([x], key=g) if x else g(x)
""",
        ("killed", "error", "memory", "exit", "timeout"),
        slow=True,
    ),
    Cheat(
        "kills itself",
        """
import os, signal
def f(x): os.kill(os.getpid(), signal.SIGKILL)
""",
        ("killed", "wrong"),
    ),
    Cheat(
        "segmentation fault",
        """
import ctypes
def f(x): ctypes.string_at(0)
""",
        ("killed",),
    ),
    Cheat(
        "kills its parent and its group",
        """
import os, signal
def f(x):
    signal.signal(15, signal.SIG_IGN)
    for pid in (os.getppid(), 1):
        try: os.kill(pid, 15)
        except OSError: pass
    return 0
""",
        ("wrong", "exit", "killed"),
        holds=TOP,
    ),
    Cheat(
        "exits by atexit",
        """
import atexit, os
atexit.register(os._exit, 0)
def f(x): return 0
""",
        ("wrong",),
    ),
    Cheat(
        "no such function",
        """
def g(x): return x * x
""",
        ("error",),
    ),
    Cheat(
        "syntax error",
        """
def f(x) return x * x
""",
        ("syntax",),
    ),
    Cheat("NUL in the text", "def f(x): return 0\n\x00", ("syntax",)),
    Cheat(
        "endless loop",
        """
def f(x):
    while True: pass
""",
        ("timeout",),
    ),
    Cheat(
        "sleeps",
        """
import time
def f(x): time.sleep(60)
""",
        ("timeout",),
        slow=True,
    ),
    Cheat(
        "ignores signals",
        """
import signal, time
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
def f(x): time.sleep(60)
""",
        ("timeout",),
        slow=True,
    ),
    Cheat(
        "stops itself",
        """
import os, signal
def f(x): os.kill(os.getpid(), signal.SIGSTOP)
""",
        ("timeout", "wrong"),
        slow=True,
    ),
    Cheat(
        "endless iterator",
        """
import itertools
def f(x): return itertools.count()
""",
        ("wrong",),
    ),
    Cheat(
        "memory",
        """
def f(x): return len([bytearray(1 << 24) for _ in range(1 << 12)])
""",
        ("memory",),
    ),
    Cheat(
        "memory in many processes",
        """
import os, time
for _ in range(8):
    if os.fork() == 0:
        kept = bytearray(b'x') * (200 << 20)
        time.sleep(60)
def f(x): time.sleep(60)
""",
        ("memory",),
        slow=True,
    ),
    Cheat(
        "fork bomb",
        """
import os
def f(x):
    while True:
        try: os.fork()
        except OSError: pass
""",
        ("timeout", "processes", "memory"),
        slow=True,
        holds=TOP,
    ),
    Cheat(
        "output of 1.5 GB",
        """
import sys
block = 'x' * (1 << 20)
for _ in range(1500): sys.stdout.write(block)
def f(x): return 0
""",
        ("output",),
    ),
]

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
        ("namespaces", "rlimits"),
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
        NETWORK,
    ),
    Breakout(
        "outbound TCP",
        """
import socket
refused(lambda: socket.create_connection(('127.0.0.1', PORT), timeout=2))
refused(lambda: socket.create_connection(('1.1.1.1', 80), timeout=2))
""",
        NETWORK,
    ),
    Breakout(
        "DNS",
        """
import socket
refused(lambda: socket.getaddrinfo('example.com', 80))
""",
        NETWORK,
    ),
    Breakout(
        "UDP",
        """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
refused(lambda: s.sendto(b'x', ('1.1.1.1', 53)))
""",
        NETWORK,
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
        NETWORK,
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
