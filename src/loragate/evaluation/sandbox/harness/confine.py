"""What a process gives up, of itself, before any foreign code runs in it: its user, its limits, its standard input."""

import os
import resource
import signal
import sys

from loragate.evaluation.sandbox.harness.wire import send


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
    _limit(resource.RLIMIT_CPU, int(settings["seconds"]) + 2)
    if settings["processes"] is not None:
        _limit(resource.RLIMIT_NPROC, settings["processes"])
    # A file that grows too long is then an OSError, not a death by signal.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # Without `site`, so that no .pth file of the packages runs or adds a folder.
    sys.path.extend(settings["packages"])


def _limit(which, value):
    hard = resource.getrlimit(which)[1]
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
    send(control, ["failed", reason or reason_of(error), describe(error)])
