"""One free-form program with its own asserts, in one process.

The nonce is not in this process while the program runs: the host hands it out only when the program has ended, and
takes it back as the sign that it did. A program that sets out to play this part itself can; a program that exits,
prints or looks around in frames cannot.
"""

import sys
import types

from loragate.evaluation.sandbox.harness.wire import confine, flush_output, receive, report, send


def main(control):
    """Serve one request of the host on the descriptor `control`."""
    request = receive(control)
    confine(request["confine"])
    send(control, ["ready"])
    try:
        code = compile(request["source"], "<program>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        report(control, error, "memory" if isinstance(error, MemoryError) else "syntax")
        return
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    # Bound before the program runs: it may replace what the modules hold.
    tell, ask, explain, flush = send, receive, report, flush_output
    del request
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        flush()
        explain(control, error)
        return
    flush()
    tell(control, ["ended"])
    tell(control, ["nonce", ask(control)["nonce"]])
