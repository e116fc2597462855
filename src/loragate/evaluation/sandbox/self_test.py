"""Whether a tier works here, found out by attacking it once.

The self-test runs a program that reaches for the network, for the host's files and for privileges, and leaves a daemon
behind; the tier works when everything that it promises held. The answer is kept for the life of this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from pathlib import Path

from loragate.evaluation.sandbox.child import Child
from loragate.evaluation.sandbox.limits import Limits
from loragate.evaluation.sandbox.supervise import Watch
from loragate.evaluation.sandbox.tiers import TIERS, known_tier, launch, missing, namespaces_forbidden, refusal

# What is tried is printed as one JSON list of what succeeded.
ATTACK = """
import json, os, socket, subprocess, sys, time
done = []
def attempt(name, action):
    try:
        action()
    except Exception:
        return
    done.append(name)
attempt("network", lambda: socket.create_connection(("127.0.0.1", PORT), timeout=2))
attempt("read", lambda: open(HOST_FILE).read())
attempt("write", lambda: open(HOST_FILE + ".written", "w"))
attempt("system", lambda: open("/usr/loragate-probe", "w"))
attempt("root", lambda: os.setuid(0))
attempt("namespace", lambda: subprocess.run(["unshare", "-Ur", "true"], check=True, capture_output=True))
if DAEMON and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(20)", MARK])
    os._exit(0)
DAEMON and os.wait()
assert len(os.listdir("/")) and sum(range(10)) == 45
print(json.dumps(done), flush=True)
"""
PROMISES = {
    "bubblewrap": ("network", "read", "write", "system", "root", "namespace", "daemon"),
    "namespaces": ("network", "daemon"),
    "rlimits": (),
}
MEANING = {
    "network": "it could open a connection",
    "read": "it could read a file of the host",
    "write": "it could write beside a file of the host",
    "system": "it could write to /usr",
    "root": "it could become root",
    "namespace": "it could make a user namespace of its own",
    "daemon": "a process that it started lived on",
}

_lock = threading.Lock()
_answers: dict[str, tuple[str | None, str]] = {}


def probe(tier: str) -> str | None:
    """Return None where `tier` holds what it promises, otherwise one line on why not.

    The first call for a tier takes about a second, later ones nothing. Raises `ConfigError` for an unknown tier.
    """
    known_tier(tier)
    with _lock:
        if tier not in _answers:
            _answers[tier] = _probe(tier)
        return _answers[tier][0]


def available_tiers() -> list[str]:
    """The tiers that work here, the strongest first."""
    return [tier for tier in TIERS if probe(tier) is None]


def root_style_of(tier: str) -> str:
    """How root enters `tier` here (see `tiers.launch`); raises `SandboxError` when the tier does not work."""
    reason = probe(tier)
    if reason is not None:
        raise refusal(tier, reason)
    return _answers[tier][1]


def _probe(tier: str) -> tuple[str | None, str]:
    reason = missing(tier)
    if reason is not None:
        return reason, ""
    styles = ["drop", "namespace"] if tier == "bubblewrap" and os.geteuid() == 0 else ["namespace"]
    reasons = []
    for style in styles:
        reason = _self_test(tier, style)
        if reason is None:
            return None, style
        reasons.append(reason)
    forbidden = namespaces_forbidden() if tier != "rlimits" else None
    if forbidden is not None:
        reasons.append(f'{forbidden}; docs/sandbox.md, "Where it does not start", has the ways out')
    return "; ".join(dict.fromkeys(reasons)), ""


def _self_test(tier: str, style: str) -> str | None:
    mark = f"loragate-probe-{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        host_file = Path(folder) / "host"
        host_file.write_text("secret", encoding="utf-8")
        names: dict[str, object] = {"PORT": server.getsockname()[1], "HOST_FILE": str(host_file), "MARK": mark}
        names["DAEMON"] = "daemon" in PROMISES[tier]
        source = "".join(f"{name} = {value!r}\n" for name, value in names.items()) + ATTACK
        limits = Limits(seconds=20)
        nonce = secrets.token_hex(16)
        try:
            child = Child("program", launch(tier, limits, root_style=style), limits, {"source": source})
        except OSError as error:
            return f"it could not be started ({error.strerror or error})"
        try:
            verdict = Watch([child], child, nonce, True, None).verdict()
        finally:
            child.kill()
        if verdict.reason != "ok":
            return f"the self-test failed ({verdict.reason}: {verdict.detail})"
        with contextlib.suppress(ValueError, IndexError):
            done = json.loads(child.tail.decode("utf-8", "replace").strip().splitlines()[-1])
            if names["DAEMON"] and _lives(mark):
                done.append("daemon")
            broken = [MEANING[name] for name in PROMISES[tier] if name in done]
            return f"it does not hold what it promises here: {', '.join(broken)}" if broken else None
        return "the self-test gave no answer"


def _lives(mark: str) -> bool:
    """Whether a process with `mark` among its words is still there a moment later."""
    for _ in range(10):
        found = False
        for entry in os.scandir("/proc") if os.path.isdir("/proc") else ():
            if entry.name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{entry.name}/cmdline", "rb") as file:
                    found = found or mark.encode() in file.read()
        if not found:
            return False
        time.sleep(0.05)
    return True
