"""The one process that the host starts in the sandbox: it forks the model's program, then reads the tests and runs them.

The fork comes first, so that the program's process never held a test, an expected value or the line to the host; it waits until
the tests have been read. The harness cannot be dumped, so that the kernel shows its memory and descriptors to no other process.
The program can kill it, which is no verdict.

Between the two goes framed JSON. Only built-in values cross as values. Everything else stays where it was made and crosses as a
numbered handle, so no class of the program ever takes part in a comparison: an object that claims to equal everything arrives as
a handle that equals nothing. What is decoded is exactly of the built-in types, whatever the sender did to its own interpreter.

The host passes this file as text, so it imports the standard library only, and is ASCII, as the host's locale may be.
"""

import builtins
import collections
import contextlib
import ctypes
import datetime
import decimal
import fractions
import itertools
import json
import operator
import os
import resource
import signal
import socket
import sys
import time
import types

MAX_FRAME = 32 * 1024 * 1024  # bytes of a message
MAX_JSON_INT = 2**62  # integers below it cross as JSON numbers
FAILURES = ("wrong", "error", "syntax", "memory", "exit", "output")  # what a program may say of itself


class WireError(Exception):
    """A message that is too long, torn or not of the known forms."""


class ChannelClosedError(Exception):
    """The other side has gone."""


class CandidateError(Exception):
    """An exception of the model's program for which there is no built-in class of that name."""


# Messages. A value is None, bool, float, str or small int as in JSON; a list as an array; all else an object of one key, its tag.


def send(descriptor, message):
    """Write one frame: four bytes of length, then JSON; raises `ChannelClosedError` where nobody reads it."""
    data = json.dumps(message).encode("ascii")
    if len(data) > MAX_FRAME:
        raise WireError(f"a message of {len(data)} bytes; the limit is {MAX_FRAME}")
    view = memoryview(len(data).to_bytes(4, "big") + data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except (BrokenPipeError, ConnectionResetError):
        raise ChannelClosedError from None


def receive(descriptor):
    """Read one frame; raises `ChannelClosedError` at the end of the stream and `WireError` for anything malformed."""
    size = int.from_bytes(_read(descriptor, 4), "big")
    if size > MAX_FRAME:
        raise WireError(f"a message of {size} bytes; the limit is {MAX_FRAME}")
    try:
        return json.loads(_read(descriptor, size).decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON ({type(error).__name__})") from None


def _read(descriptor, size):
    data = bytearray()
    while len(data) < size:
        try:
            part = os.read(descriptor, min(size - len(data), 1 << 20))
        except ConnectionResetError:
            part = b""
        if not part:
            raise ChannelClosedError
        data += part
    return bytes(data)


# Built-ins that cross by name: types and functions that do nothing but compute.
_NAMED = "int float str bool complex bytes list tuple dict set frozenset object len sum min max abs sorted"
NAMED = {getattr(builtins, name): name for name in _NAMED.split()}
_DATES: tuple = (datetime.date, datetime.time, datetime.datetime)
# {type: (tag, taken apart into values that cross, put together again)}
TYPES: dict = {
    tuple: ("t", list, tuple),
    set: ("s", list, set),
    frozenset: ("z", list, frozenset),
    dict: ("d", lambda value: [list(item) for item in value.items()], dict),
    collections.deque: ("q", lambda value: [list(value), value.maxlen], lambda parts: collections.deque(*parts)),
    # only beyond MAX_JSON_INT; in base 16, as Python refuses to write thousands of decimal digits
    int: ("i", hex, lambda text: int(text, 16)),
    complex: ("c", lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    bytes: ("b", bytes.hex, bytes.fromhex),
    bytearray: ("y", bytearray.hex, bytearray.fromhex),
    range: ("r", lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    type(...): ("e", lambda value: None, lambda parts: ...),
    decimal.Decimal: ("m", str, decimal.Decimal),
    fractions.Fraction: ("f", str, fractions.Fraction),
    datetime.timedelta: ("l", lambda v: [v.days, v.seconds, v.microseconds], lambda parts: datetime.timedelta(*parts)),
    **{kind: (kind.__name__, kind.isoformat, kind.fromisoformat) for kind in _DATES},
}
# {tag: what puts a value together}
READERS = {tag: read for tag, _, read in TYPES.values()} | {"p": {name: one for one, name in NAMED.items()}.__getitem__}
# By the base class's own methods, so that what a subclass overrides says nothing.
TO_BUILTIN: dict = {
    dict: dict.copy,
    list: list.copy,
    tuple: lambda value: tuple.__add__(value, ()),
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}


def encode(value, handle):
    """Return `value` in JSON's forms; `handle(object)` gives the form of what is no plain value.

    A subclass of a built-in type crosses as the plain value that it holds.
    """
    kind = type(value)
    if value is None or kind in (bool, str, float) or (kind is int and -MAX_JSON_INT < value < MAX_JSON_INT):
        return value
    if kind is list:
        return [encode(item, handle) for item in value]
    if kind in TYPES:
        tag, apart, _ = TYPES[kind]
        return {tag: encode(apart(value), handle)}
    # a number of numpy's, told without importing numpy
    if kind.__module__ == "numpy" and hasattr(kind, "item") and getattr(value, "shape", None) == ():
        return encode(value.item(), handle)
    if kind in (type, type(len)) and value in NAMED:
        return {"p": NAMED[value]}
    for base, plain in TO_BUILTIN.items():  # bool before int is not needed: no class can be derived from it
        if isinstance(value, base):
            return encode(plain(value), handle)
    return handle(value)


def decode(form, handle):
    """Return the value of a form; `handle(content)` makes what stands for an object of the other side.

    Raises `WireError` for a form that `encode` does not make.
    """
    try:
        return _decode(form, handle)
    except (ValueError, TypeError, KeyError, OverflowError, ArithmeticError, RecursionError) as error:
        raise WireError(f"a malformed value ({type(error).__name__})") from None


def _decode(form, handle):
    kind = type(form)
    if kind is list:
        return [_decode(item, handle) for item in form]
    if kind is not dict:
        return form
    ((tag, content),) = form.items()  # a ValueError where there are more keys or none
    if tag == "h":
        return handle(content)
    if type(content) is dict:  # no form holds another bare in its tag: {"t": {"s": ...}} would make a tuple of a set
        raise ValueError(tag)
    return READERS[tag](_decode(content, handle))


def format_exception(error):
    """One line on an exception; an exception that cannot be printed is named by its class."""
    try:
        text = str(error)
    except BaseException:
        text = "(its text cannot be had)"
    return f"{type(error).__name__}: {text}"[:500]


def classify_exception(error):
    """The word for code that ended with `error`."""
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return "exit"
    if isinstance(error, MemoryError):
        return "memory"
    return "wrong" if isinstance(error, AssertionError) else "error"


# The program's process. It answers calls that arrive one by one, and nothing it says is believed beyond the values it returns.


# What can be done to an object that lives here. "next" gives a list of one item, or of none at the end.
ACTIONS: dict = {
    "call": lambda function, positional, named: function(*positional, **named),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "set item": operator.setitem,
    "length": len,
    "iter": iter,
    "next": lambda items: list(itertools.islice(items, 1)),
    "bool": bool,
    "str": str,
    "repr": repr,
}


class Server:
    """Answers the requests about one module, the program's."""

    def __init__(self, module):
        self.module = module
        self.objects = []
        self.numbers = {}

    def handle(self, value):
        """The form of an object that stays here; the same object always has the same number."""
        number = self.numbers.get(id(value))  # an id is not used again, as `objects` keeps what it named alive
        if number is None:
            number = self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        kind = "iterator" if hasattr(type(value), "__next__") else "callable" if callable(value) else "object"
        return {"h": [number, kind]}

    def answer(self, request):
        """Return ["value", form], ["missing"] or ["raised", class names, text, reason]."""
        try:
            action, *parts = request
            if action == "name":
                (name,) = parts
                if name not in self.module.__dict__:
                    return ["missing"]
                value = self.module.__dict__[name]  # not getattr: a `__getattr__` of the module would claim every name
            else:
                value = ACTIONS[action](*(decode(part, lambda content: self.objects[content[0]]) for part in parts))
            return ["value", encode(value, self.handle)]
        except BaseException as error:
            # built-in classes only; one of the program's own that borrows such a name is not the same object
            names = [kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind]
            return ["raised", names, format_exception(error), classify_exception(error)]


def serve(line, source, name, limits):
    """Run the program as module `name` under `limits`, then answer requests on the descriptor `line` until it closes."""
    apply_rlimits(limits)
    module = sys.modules[name] = types.ModuleType(name)
    server, answer = Server(module), ["loaded"]
    try:
        code = compile(source, "<program>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        answer = ["failed", "memory" if isinstance(error, MemoryError) else "syntax", format_exception(error)]
    else:
        try:
            exec(code, module.__dict__)
        except BaseException as error:
            reason = classify_exception(error)
            if reason == "wrong" and name != "__main__":
                reason = "error"  # asserts of its own are tests of a program alone, and no more than code in one that has tests
            answer = ["failed", reason, format_exception(error)]
    with contextlib.suppress(BaseException):  # so far as the program has left the means to
        sys.stdout.flush()
    while True:
        try:
            send(line, answer)
        except ChannelClosedError:
            return
        except Exception as error:
            send(line, ["raised", ["ValueError"], f"a result that cannot be sent: {format_exception(error)}", "output"])
        try:
            answer = server.answer(receive(line))
        except ChannelClosedError:
            return


# The process of the tests. No code of the model ever runs here.


class Channel:
    """Requests to the process that runs the model's program."""

    def __init__(self, descriptor):
        self.descriptor = descriptor
        self.handles = {}
        # Kept apart from the exception itself, which a test may catch and replace.
        self.last_error = None

    def call_remote(self, action, *parts):
        """Do `action` there; returns its value, or raises the exception that it raised there."""
        self.last_error = None
        # a name is asked for as it is; all else is a value, and the handle first among them
        send(
            self.descriptor,
            [action, *(part if action == "name" else encode(part, self._encode_handle) for part in parts)],
        )
        match receive(self.descriptor):
            case ["missing"]:
                raise LookupError(parts[0])
            case ["raised", list(names), text, reason]:
                error = self._exception(names, str(text))
                known = reason in ("exit", "memory", "output")
                self.last_error = (error, reason if known else "error", str(text)[:500])
                raise error
            case ["value", value]:
                return decode(value, self._decode_handle)
        raise WireError("an answer of no known form")

    @staticmethod
    def _exception(names, text):
        # the most special class first, as they stand in the __mro__ there
        for name in names:
            kind = getattr(builtins, name, None) if isinstance(name, str) else None
            if isinstance(kind, type) and issubclass(kind, Exception):
                try:
                    return kind(text)
                except TypeError:  # UnicodeDecodeError, say, is not made from one text
                    continue
        return CandidateError(text)

    @staticmethod
    def _encode_handle(value):
        if isinstance(value, Handle):
            return {"h": [object.__getattribute__(value, "_number")]}
        raise TypeError(f"the tests pass a {type(value).__name__}, which cannot cross to the program's process")

    def _decode_handle(self, content):
        number, kind = content
        if type(number) is not int or kind not in ("iterator", "callable", "object"):
            raise ValueError(number)
        # one handle for each object, so that `is` holds here where it holds there
        if number not in self.handles:
            classes = {"iterator": IteratorHandle, "callable": CallableHandle, "object": Handle}
            self.handles[number] = classes[kind](self, number)
        return self.handles[number]


def _remote_method(action):
    """A method that does `action` there."""
    return lambda handle, *parts: object.__getattribute__(handle, "_channel").call_remote(action, handle, *parts)


class Handle:
    """An object of the other process. It has no `==` of its own, so it equals nothing but itself."""

    def __init__(self, channel, number):
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name):
        # Python and its library look for these on any object (`__array__`, `__index__`, ...); the program must not answer them
        if name.startswith("__"):
            raise AttributeError(name)
        return _remote_method("get")(self, name)

    __setattr__, __getitem__, __setitem__ = _remote_method("set"), _remote_method("item"), _remote_method("set item")
    __len__, __bool__ = _remote_method("length"), _remote_method("bool")
    __str__, __repr__ = _remote_method("str"), _remote_method("repr")

    def __iter__(self):
        return _remote_method("iter")(self)

    # `in` must compare here: the default over `__iter__` does.
    def __contains__(self, value):
        return any(item is value or item == value for item in self)


class CallableHandle(Handle):
    """A function or class of the other process."""

    def __call__(self, *positional, **named):
        return _remote_method("call")(self, list(positional), named)


class IteratorHandle(Handle):
    """An iterator of the other process; each step is taken there."""

    def __iter__(self):
        return self

    def __next__(self):
        match _remote_method("next")(self):
            case [item]:
                return item
            case []:
                raise StopIteration
        raise WireError("items of no known form")


class ProgramBuiltins(dict):
    """Python's built-ins, and behind them the names of the program, asked for when a test first uses them.

    As the module's `__builtins__` it is where CPython looks last; for a subclass of dict it looks by `[]`, which calls
    `__missing__`, and takes a KeyError for a NameError.
    """

    def __init__(self, channel):
        super().__init__(vars(builtins))
        self.channel = channel

    def __missing__(self, name):
        try:
            self[name] = self.channel.call_remote("name", name)
        except LookupError:
            raise KeyError(name) from None
        return self[name]


def run_checks(channel, child, checks):
    """Run the tests of `checks` against the program behind `channel`; returns the verdict in one word, and one line on it."""
    try:
        match receive(channel.descriptor):
            case ["loaded"]:
                pass
            case ["failed", str(reason), str(detail)] if reason in FAILURES:
                return reason, detail[:500]
            case _:
                raise WireError("a greeting of no known form")
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = ProgramBuiltins(channel)
        exec(compile(checks["before"], "<before>", "exec", dont_inherit=True), module.__dict__)
        for name in checks["required"]:
            # A name of the reference that this program lacks is no builtin by accident.
            try:
                module.__dict__[name] = channel.call_remote("name", name)
            except LookupError:
                return "error", f"the program does not define {name}"
        exec(compile(checks["source"], "<tests>", "exec", dont_inherit=True), module.__dict__)
    except ChannelClosedError:
        return explain_exit(child)
    except WireError as error:
        return "protocol", format_exception(error)
    except BaseException as error:
        if channel.last_error is not None and channel.last_error[0] is error:
            return channel.last_error[1:]
        reason = classify_exception(error)
        if reason == "exit":
            return "error", f"the tests ended by {format_exception(error)}"
        return reason, format_exception(error)
    return "ok", ""


def explain_exit(child):
    """Why the program's process, which no longer answers, has ended."""
    for _ in range(100):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.02)
    else:
        return "exit", "the program closed its line to the tests"
    number = -os.waitstatus_to_exitcode(status)
    if number > 0:
        reason = "timeout" if number == signal.SIGXCPU else "killed"
        return reason, f"ended by signal {number} ({signal.strsignal(number)})"
    return "exit", "the program ended before its end"


def apply_rlimits(limits):
    """Take resource limits, {"AS": bytes, ...}, which cannot be raised again."""
    for name, value in limits.items():
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]  # which only root may raise
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def main(control, uid, packages):
    """Serve one request of the host, which comes on standard input once this process has said that it is up.

    Args:
        control: descriptor of the line to the host: "ready", then a verdict.
        uid: user id to change to, or None.
        packages: folders of installed packages, without `site`, so that no .pth file runs or adds a folder.
    """
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    os.umask(0o077)
    if sys.platform == "linux":  # PR_SET_DUMPABLE: no process without privileges may look into this one
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    # The program may signal this process. It may end it so, but not raise KeyboardInterrupt in a test that expects an error.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A file that grows too long is then an OSError, not a death by signal.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.path.extend(packages)
    os.write(control, b"ready")
    program = receive(0)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            os.close(control)
            ours.close()
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.close(nothing)
            receive(theirs.fileno())
            serve(theirs.fileno(), **program)
        finally:
            os._exit(0)
    theirs.close()
    checks = receive(0)
    # Only now may the program run: bubblewrap's first process has this standard input too, where it could have read them.
    send(ours.fileno(), "go")
    apply_rlimits(checks.pop("limits"))
    # /tmp is the program's too: nothing that it left there may be found by a test
    os.chdir("/")
    os.environ["HOME"] = "/"
    verdict = run_checks(Channel(ours.fileno()), child, checks)
    os.write(control, json.dumps(verdict).encode("ascii"))
