"""How two processes that do not trust each other talk: framed JSON, and values as plain data.

Only built-in values cross as values. Everything else stays where it was made and crosses as a numbered handle, so no
class of one side ever runs on the other: an object that claims to equal everything arrives as a handle that equals
nothing. What is decoded is exactly of the built-in types, whatever the sender did to its own interpreter.

Forms: None, bool, float, str and small int as in JSON; a list as an array; all else as an object of one key, its tag.
"""

import json
import os

MAX_FRAME = 32 * 1024 * 1024
SMALL = 2**62
# Built-ins that cross by name: types and functions that do nothing but compute.
_PLAIN = (int, float, str, bool, complex, bytes, list, tuple, dict, set, frozenset, object)
NAMED = {value: value.__name__ for value in (*_PLAIN, len, sum, min, max, abs, sorted)}


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


def encode(value, handle):
    """Return `value` in JSON's forms; `handle(object)` gives the form of what is no plain value.

    A subclass of a built-in type crosses as the plain value that it holds.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if kind is int:
        return value if -SMALL < value < SMALL else {"i": hex(value)}
    if kind is list:
        return [encode(item, handle) for item in value]
    if kind is tuple:
        return {"t": [encode(item, handle) for item in value]}
    if kind is dict:
        return {"d": [[encode(key, handle), encode(item, handle)] for key, item in value.items()]}
    if kind is set or kind is frozenset:
        return {"s" if kind is set else "z": [encode(item, handle) for item in value]}
    return _encode_rare(value, kind, handle)


def _encode_rare(value, kind, handle):
    if kind is complex:
        return {"c": [value.real, value.imag]}
    if kind is bytes or kind is bytearray:
        return {"b" if kind is bytes else "y": bytes(value).hex()}
    if kind is range:
        return {"r": [encode(part, handle) for part in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"e": 0}
    if kind.__module__ == "numpy" and hasattr(kind, "item") and getattr(value, "shape", None) == ():
        return encode(value.item(), handle)
    if kind in (type, type(len)) and value in NAMED:
        return {"p": NAMED[value]}
    module, name = kind.__module__, kind.__qualname__
    if module in ("decimal", "fractions") and name in ("Decimal", "Fraction"):
        return {"n": [name, str(value)]}
    if module == "datetime" and name in ("date", "datetime", "time") and getattr(value, "tzinfo", None) is None:
        return {"w": [name, value.isoformat()]}
    if module == "datetime" and name == "timedelta":
        return {"w": [name, [value.days, value.seconds, value.microseconds]]}
    if module == "collections" and name == "deque":
        return {"q": [[encode(item, handle) for item in value], value.maxlen]}
    # By the base class's own methods, so that what a subclass overrides says nothing.
    for base, plain in (
        (dict, lambda: dict(dict.items(value))),
        (list, lambda: list(list.__iter__(value))),
        (tuple, lambda: tuple(tuple.__iter__(value))),
        (str, lambda: str.__str__(value) if type(value).__str__ is str.__str__ else str.__add__(value, "")),
        (int, lambda: int.__add__(value, 0)),
        (float, lambda: float.__add__(value, 0.0)),
        (set, lambda: set(set.__iter__(value))),
        (frozenset, lambda: frozenset(frozenset.__iter__(value))),
    ):
        if isinstance(value, base):
            return encode(plain(), handle)
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
    ((tag, content),) = form.items()
    if tag == "t":
        return tuple([_decode(item, handle) for item in content])
    if tag == "d":
        return {_decode(key, handle): _decode(item, handle) for key, item in content}
    if tag == "s":
        return {_decode(item, handle) for item in content}
    if tag == "z":
        return frozenset([_decode(item, handle) for item in content])
    return _decode_rare(tag, content, handle)


def _decode_rare(tag, content, handle):
    if tag == "h":
        return handle(content)
    if tag == "i":
        return int(content, 16)
    if tag == "c":
        return complex(float(content[0]), float(content[1]))
    if tag == "b":
        return bytes.fromhex(content)
    if tag == "y":
        return bytearray.fromhex(content)
    if tag == "r":
        return range(*[_decode(part, handle) for part in content])
    if tag == "e":
        return Ellipsis
    if tag == "p":
        return {name: value for value, name in NAMED.items()}[content]
    if tag == "q":
        from collections import deque

        return deque([_decode(item, handle) for item in content[0]], content[1])
    if tag == "n":
        from decimal import Decimal
        from fractions import Fraction

        return {"Decimal": Decimal, "Fraction": Fraction}[content[0]](content[1])
    if tag == "w":
        import datetime

        name, text = content
        if name == "timedelta":
            return datetime.timedelta(*text)
        if name == "date":
            return datetime.date.fromisoformat(text)
        if name == "time":
            return datetime.time.fromisoformat(text)
        return datetime.datetime.fromisoformat(text)
    raise ValueError(tag)
