"""The side of a code task that runs the model's program, and nothing else.

It holds no test and no expected value; it answers calls that arrive one by one from the process that holds
them, and nothing it says is believed beyond the plain values it returns.
"""

import builtins
import itertools
import operator
import sys
import types

from loragate.evaluation.sandbox.harness.wire import (
    Closed,
    begin,
    decode,
    describe,
    encode,
    flush_output,
    reason_of,
    receive,
    report,
    send,
)


class Iteration:
    """An iterator that crosses as an object, so that asking for it takes nothing from it."""

    def __init__(self, items):
        self.items = iter(items)


# What can be done to an object that lives here. "next" takes a batch for a list's worth of values, one for what may be
# endless or have effects.
ACTIONS: dict = {
    "call": lambda function, positional, named: function(*positional, **named),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "set item": operator.setitem,
    "length": len,
    "iter": Iteration,
    "next": lambda items, most: list(itertools.islice(items.items if isinstance(items, Iteration) else items, most)),
    "bool": bool,
    "str": str,
    "repr": repr,
}


class Server:
    """Answers the checker's requests about one module."""

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
        return {"h": [number, kind, type(value).__name__]}

    def object(self, content):
        """The object of a handle that has come back."""
        return self.objects[content[0]]

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
                value = ACTIONS[action](*(decode(part, self.object) for part in parts))
            return ["value", encode(value, self.handle)]
        except BaseException as error:
            # built-in classes only; one of the program's own that borrows such a name is not the same object
            names = [kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind]
            return ["raised", names, describe(error), reason_of(error)]


def main(control, given, channel):
    """Run the program that the host has written to `given`, then answer the checker on `channel`."""
    request = begin(control, given)
    module = types.ModuleType(request["name"])
    sys.modules[request["name"]] = module
    try:
        code = compile(request["source"], "<program>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        report(control, error, "memory" if isinstance(error, MemoryError) else "syntax")
        return
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        reason = reason_of(error)
        flush_output()
        # asserts of its own are the tests of a program alone, and no more than code in one that has tests
        report(control, error, "error" if reason == "wrong" and request["name"] != "__main__" else reason)
        return
    flush_output()
    server, answer = Server(module), ["loaded"]
    while True:
        try:
            send(channel, answer)
        except Closed:
            return
        except Exception as error:
            send(channel, ["raised", ["ValueError"], f"a result that cannot be sent: {describe(error)}", "output"])
        try:
            answer = server.answer(receive(channel))
        except Closed:
            return
