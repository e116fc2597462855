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
    confine,
    decode,
    describe,
    encode,
    reason_of,
    receive,
    report,
    send,
)

BATCH = 256


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
        form = [action, *(part if action == "name" else encode(part, self._give) for part in parts)]
        send(self.descriptor, form)
        answer = receive(self.descriptor)
        if not isinstance(answer, list) or not answer:
            raise WireError("an answer of no known form")
        if answer[0] == "missing":
            raise LookupError(parts[0])
        if answer[0] == "raised" and len(answer) == 4 and isinstance(answer[1], list):
            error = self._exception(answer[1], str(answer[2]))
            known = answer[3] in ("exit", "memory", "output")
            self.last_error = (error, answer[3] if known else "error", str(answer[2])[:500])
            raise error
        if answer[0] != "value" or len(answer) != 2:
            raise WireError("an answer of no known form")
        return decode(answer[1], self._take)

    @staticmethod
    def _exception(names, text):
        for name in names:
            kind = getattr(builtins, name, None) if isinstance(name, str) else None
            if isinstance(kind, type) and issubclass(kind, Exception):
                try:
                    return kind(text)
                except TypeError:
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
        if number not in self.handles:
            classes = {"iterator": IteratorHandle, "callable": CallableHandle, "object": Handle}
            self.handles[number] = classes[kind](self, number, str(name))
        return self.handles[number]


class Handle:
    """An object of the other process. It has no `==` of its own, so it equals nothing but itself."""

    def __init__(self, channel, number, name):
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _ask(self, "get", name)

    def __setattr__(self, name, value):
        _ask(self, "set", name, value)

    def __getitem__(self, key):
        return _ask(self, "item", key)

    def __setitem__(self, key, value):
        _ask(self, "set item", key, value)

    def __len__(self):
        return _ask(self, "length")

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

    def __bool__(self):
        return _ask(self, "bool")

    def __str__(self):
        return _ask(self, "str")

    def __repr__(self):
        return _ask(self, "repr")


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


def _ask(handle, action, *parts):
    return object.__getattribute__(handle, "_channel").ask(action, handle, *parts)


def main(control, channel):
    """Run the tests that the host sends on `control` against the program behind `channel`."""
    request = receive(control)
    confine(request["confine"])
    send(control, ["ready"])
    talk = Channel(channel)
    try:
        if receive(channel) != ["loaded"]:
            raise WireError("a greeting of no known form")
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(request["before"], "<before>", "exec", dont_inherit=True), module.__dict__)
        for name in request["names"]:
            try:
                module.__dict__[name] = talk.ask("name", name)
            except LookupError:
                # A name of the reference that this program lacks is no builtin by accident.
                if name in request["required"]:
                    send(control, ["failed", "error", f"the program does not define {name}"])
                    return
        exec(compile(request["tests"], "<tests>", "exec", dont_inherit=True), module.__dict__)
    except Closed:
        send(control, ["failed", "exit", "the program's process ended before the tests did"])
    except WireError as error:
        send(control, ["failed", "protocol", describe(error)])
    except BaseException as error:
        last = talk.last_error
        if last is not None and last[0] is error:
            send(control, ["failed", last[1], last[2]])
        elif reason_of(error) == "exit":
            send(control, ["failed", "error", f"the tests ended by {describe(error)}"])
        else:
            report(control, error)
    else:
        send(control, ["passed"])
