"""What both sides of the sandbox need: how processes that do not trust each other talk, in framed JSON and plain data.

Only built-in values cross as values. Everything else stays where it was made and crosses as a numbered handle, so no
class of one side ever runs on the other: an object that claims to equal everything arrives as a handle that equals
nothing. What is decoded is exactly of the built-in types, whatever the sender did to its own interpreter.

Before any foreign code runs, each of them gives up its user, its rights to resources and its standard input (`confine`).

Forms: None, bool, float, str and small int as in JSON; a list as an array; all else as an object of one key, its tag.
"""

import collections
import datetime
import decimal
import fractions
import json
import os
import resource
import signal
import sys

MAX_FRAME = 32 * 1024 * 1024  # bytes of a message
SMALL = 2**62  # integers below it cross as JSON numbers
# Built-ins that cross by name: types and functions that do nothing but compute.
_PLAIN = (int, float, str, bool, complex, bytes, list, tuple, dict, set, frozenset, object)
NAMED = {value: value.__name__ for value in (*_PLAIN, len, sum, min, max, abs, sorted)}
# {type: (tag, taken apart into values that cross, put together again)}
TYPES: dict = {
    tuple: ("t", list, tuple),
    set: ("s", list, set),
    frozenset: ("z", list, frozenset),
    dict: ("d", lambda value: [list(item) for item in value.items()], dict),
    collections.deque: ("q", lambda value: [list(value), value.maxlen], lambda parts: collections.deque(*parts)),
    # only beyond SMALL; in base 16, as Python refuses to write thousands of decimal digits
    int: ("i", hex, lambda text: int(text, 16)),
    complex: ("c", lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    bytes: ("b", bytes.hex, bytes.fromhex),
    bytearray: ("y", bytearray.hex, bytearray.fromhex),
    range: ("r", lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    type(...): ("e", lambda value: None, lambda parts: ...),
    decimal.Decimal: ("m", str, decimal.Decimal),
    fractions.Fraction: ("f", str, fractions.Fraction),
    datetime.date: ("wd", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: ("wt", datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.datetime: ("w", datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.timedelta: (
        "l",
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
}
# {tag: what puts a value together}
READERS = {tag: read for tag, _, read in TYPES.values()} | {
    "p": {name: value for value, name in NAMED.items()}.__getitem__
}
# By the base class's own methods, so that what a subclass overrides says nothing.
PLAIN: dict = {
    dict: dict.copy,
    list: lambda value: list.__add__(value, []),
    tuple: lambda value: tuple.__add__(value, ()),
    str: lambda value: str.__add__(value, ""),
    int: lambda value: int.__add__(value, 0),
    float: lambda value: float.__add__(value, 0.0),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}


class WireError(Exception):
    """A message that is too long, torn or not of the forms above."""


class Closed(Exception):
    """The other side has gone."""


def send(descriptor, message):
    """Write one frame: four bytes of length, then JSON."""
    data = json.dumps(message).encode("ascii")
    if len(data) > MAX_FRAME:
        raise WireError(f"a message of {len(data)} bytes; the limit is {MAX_FRAME}")
    view = memoryview(len(data).to_bytes(4, "big") + data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except (BrokenPipeError, ConnectionResetError):
        raise Closed from None


def receive(descriptor):
    """Read one frame; raises `Closed` at the end of the stream and `WireError` for anything malformed."""
    size = int.from_bytes(_read(descriptor, 4), "big")
    if size > MAX_FRAME:
        raise WireError(f"a message of {size} bytes; the limit is {MAX_FRAME}")
    try:
        return json.loads(_read(descriptor, size).decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON ({type(error).__name__})") from None


def _read(descriptor, size):
    parts = []
    while size:
        try:
            part = os.read(descriptor, min(size, 1 << 20))
        except ConnectionResetError:
            part = b""
        if not part:
            raise Closed
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def begin(control, given):
    """Read what the host has written to the descriptor `given`, give up all rights (`confine`) and say that work begins."""
    with open(given, encoding="ascii") as file:
        request = json.load(file)
    confine(request["confine"])
    tell(control, "ready")
    return request


def tell(control, *words):
    """Say one line to the host."""
    os.write(control, json.dumps(words).encode("ascii") + b"\n")


def encode(value, handle):
    """Return `value` in JSON's forms; `handle(object)` gives the form of what is no plain value.

    A subclass of a built-in type crosses as the plain value that it holds.
    """
    kind = type(value)
    if value is None or kind in (bool, str, float) or (kind is int and -SMALL < value < SMALL):
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
    for base, plain in PLAIN.items():  # bool before int is not needed: no class can be derived from it
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


def confine(settings):
    """Take the user id, the resource limits and the package folders of `settings`; none of it can be undone."""
    if settings["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[settings["uid"]] * 3)
        os.setresuid(*[settings["uid"]] * 3)
    os.umask(0o077)
    megabyte = 1024 * 1024
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, settings["memory_mb"] * megabyte)
    _limit(resource.RLIMIT_FSIZE, settings["file_mb"] * megabyte)
    _limit(resource.RLIMIT_NOFILE, 256)
    _limit(resource.RLIMIT_CPU, int(settings["seconds"]) + 2)  # a second line: the host ends the program by wall time
    if settings["processes"] is not None:
        _limit(resource.RLIMIT_NPROC, settings["processes"])
    # A file that grows too long is then an OSError, not a death by signal.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # Without `site`, so that no .pth file of the packages runs or adds a folder.
    sys.path.extend(settings["packages"])


def _limit(which, value):
    hard = resource.getrlimit(which)[1]  # which only root may raise
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def describe(error):
    """One line on an exception; an exception that cannot be printed is named by its class."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException:
        text = "(its text cannot be had)"
    return f"{name}: {text}"[:500]


def reason_of(error):
    """The word for a program that ended with `error`."""
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return "exit"
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, AssertionError):
        return "wrong"
    return "error"


def flush_output():
    """Write out what was printed, so far as the program has left the means to."""
    try:
        sys.stdout.flush()
    except BaseException:
        return


def report(control, error, reason=None):
    """Tell the host why the program did not pass."""
    tell(control, "failed", reason or reason_of(error), describe(error))
