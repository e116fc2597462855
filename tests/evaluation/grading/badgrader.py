"""A judge that misbehaves on demand; workers import it by name."""

import ctypes
import os
import time


def judge(gold, text, tolerance):
    """Hang, die, or fill the memory as `text` says; otherwise compare as text."""
    if text == "hang":
        time.sleep(60)
    if text == "hang in native code":
        ctypes.PyDLL(None).sleep(60)  # holds the interpreter's lock
    if text == "die":
        os._exit(3)
    if text == "segfault":
        ctypes.string_at(0)
    if text == "memory":
        _ = [bytearray(10**8) for _ in range(1000)]
    if text == "print":
        print("noise")
    if text == "recurse":
        return judge_forever()
    return gold == text, "ok" if gold == text else "wrong", text


def judge_forever():
    return judge_forever()


def modules(gold, text, tolerance):
    """Report which of the named modules are loaded."""
    import sys

    return True, ",".join(name for name in text.split() if name in sys.modules), None
