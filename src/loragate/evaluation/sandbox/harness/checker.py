"""The side of a code task that holds the tests. No code of the model ever runs here.

The functions under test are handles on objects of the other process. What they return arrives as plain data and is
compared here, by the built-in types' own `==`; a handle equals nothing but itself.
"""

import builtins
import sys
import types

from loragate.evaluation.sandbox.harness.wire import (
    Closed,
    WireError,
    begin,
    decode,
    describe,
    encode,
    reason_of,
    receive,
    report,
    send,
    tell,
)

BATCH = 256  # items of an iteration that are asked for at a time; a round trip for each would be slow


class CandidateError(Exception):
    """An exception of the model's program for which there is no built-in class of that name."""


class Channel:
    """Requests to the process that runs the model's program."""

    def __init__(self, descriptor):
        self.descriptor = descriptor
        self.handles = {}
        # Kept apart from the exception itself, which a test may catch and replace.
        self.last_error = None

    def ask(self, action, *parts):
        """Do `action` there; returns its value, or raises the exception that it raised there."""
        self.last_error = None
        # a name is asked for as it is; all else is a value, and the handle first among them
        form = [action, *(part if action == "name" else encode(part, self._give) for part in parts)]
        send(self.descriptor, form)
        match receive(self.descriptor):
            case ["missing"]:
                raise LookupError(parts[0])
            case ["raised", list(names), text, reason]:
                error = self._exception(names, str(text))
                known = reason in ("exit", "memory", "output")
                self.last_error = (error, reason if known else "error", str(text)[:500])
                raise error
            case ["value", value]:
                return decode(value, self._take)
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

    def _give(self, value):
        if isinstance(value, Handle):
            return {"h": [object.__getattribute__(value, "_number")]}
        raise TypeError(f"the tests pass a {type(value).__name__}, which cannot cross to the program's process")

    def _take(self, content):
        number, kind, name = content
        if type(number) is not int or kind not in ("iterator", "callable", "object"):
            raise ValueError(number)
        # one handle for each object, so that `is` holds here where it holds there
        if number not in self.handles:
            classes = {"iterator": IteratorHandle, "callable": CallableHandle, "object": Handle}
            self.handles[number] = classes[kind](self, number, str(name))
        return self.handles[number]


def _ask(handle, action, *parts):
    return object.__getattribute__(handle, "_channel").ask(action, handle, *parts)


def _asking(action):
    """A method that does `action` there."""
    return lambda handle, *parts: _ask(handle, action, *parts)


class Handle:
    """An object of the other process. It has no `==` of its own, so it equals nothing but itself."""

    def __init__(self, channel, number, name):
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name):
        # Python and its library look for these on any object (`__array__`, `__index__`, ...); the program must not answer them
        if name.startswith("__"):
            raise AttributeError(name)
        return _ask(self, "get", name)

    __setattr__, __getitem__, __setitem__ = _asking("set"), _asking("item"), _asking("set item")
    __len__, __bool__, __str__, __repr__ = _asking("length"), _asking("bool"), _asking("str"), _asking("repr")

    def __iter__(self):
        iteration = _ask(self, "iter")
        while True:
            items = _ask(iteration, "next", BATCH)
            if not isinstance(items, list):
                raise WireError("items of no known form")
            yield from items
            if len(items) < BATCH:
                return

    # `in` must compare here: the default over `__iter__` does.
    def __contains__(self, value):
        return any(item is value or item == value for item in self)


class CallableHandle(Handle):
    """A function or class of the other process."""

    def __call__(self, *positional, **named):
        return _ask(self, "call", list(positional), named)


class IteratorHandle(Handle):
    """An iterator of the other process; each step is taken there."""

    def __iter__(self):
        return self

    def __next__(self):
        items = _ask(self, "next", 1)
        if not isinstance(items, list) or len(items) > 1:
            raise WireError("items of no known form")
        if not items:
            raise StopIteration
        return items[0]


class Names(dict):
    """Python's built-ins, and behind them the names of the program, asked for when a test first uses them.

    As the module's `__builtins__` it is where CPython looks last; for a subclass of dict it looks by `[]`, which calls
    `__missing__`, and takes a KeyError for a NameError.
    """

    def __init__(self, channel):
        super().__init__(vars(builtins))
        self.channel = channel

    def __missing__(self, name):
        try:
            self[name] = self.channel.ask("name", name)
        except LookupError:
            raise KeyError(name) from None
        return self[name]


def main(control, given, channel):
    """Run the tests that the host has written to `given` against the program behind `channel`."""
    request = begin(control, given)
    talk = Channel(channel)
    try:
        if receive(channel) != ["loaded"]:
            raise WireError("a greeting of no known form")
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        module.__dict__["__builtins__"] = Names(talk)
        exec(compile(request["before"], "<before>", "exec", dont_inherit=True), module.__dict__)
        for name in request["required"]:
            # A name of the reference that this program lacks is no builtin by accident.
            try:
                module.__dict__[name] = talk.ask("name", name)
            except LookupError:
                tell(control, "failed", "error", f"the program does not define {name}")
                return
        exec(compile(request["tests"], "<tests>", "exec", dont_inherit=True), module.__dict__)
    except Closed:
        tell(control, "failed", "exit", "the program's process ended before the tests did")
    except WireError as error:
        tell(control, "failed", "protocol", describe(error))
    except BaseException as error:
        last = talk.last_error
        if last is not None and last[0] is error:
            tell(control, "failed", last[1], last[2])
        elif reason_of(error) == "exit":
            tell(control, "failed", "error", f"the tests ended by {describe(error)}")
        else:
            report(control, error)
    else:
        tell(control, "passed")
