"""Programs that want to pass without being right, as data: none passes the checks `CHECKS` in two-process mode.

`reasons` are given where they are certain; `holds` names the tiers that promise it.
"""

from __future__ import annotations

from dataclasses import dataclass

from guard import ALL, TOP

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
for fd in range(3, 256):
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
for fd in range(3, 256):
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
for fd in range(3, 256):
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
