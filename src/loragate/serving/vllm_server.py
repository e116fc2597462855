"""vLLM's own OpenAI-compatible server as a child process: its command line, its start, its end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from loragate.errors import ConfigError, LoragateError
from loragate.serving.plugin import ADAPTERS
from loragate.serving.versions import vllm_version

USUAL_SHARE = 0.9
"""Share of an accelerator's memory that vLLM may fill."""
SECRETS = ("--api-key", "--hf-token")
START_S, STOP_S = 1800.0, 30.0  # patience with a server that starts, and with one that ends


def on_cpu() -> bool:
    """Whether vLLM is a build for the CPU, by the mark in its version that it goes by itself; it is not imported."""
    return "cpu" in vllm_version()


def usual_share() -> float:
    """The share of memory that vLLM is given unless told: `USUAL_SHARE`, or on a CPU half of what is free.

    On a CPU it is a share of the machine's whole memory, and vLLM does not start where less than that is free.
    """
    if not on_cpu():
        return USUAL_SHARE
    try:
        from vllm.utils.cpu_resource_utils import get_memory_node_info

        node = get_memory_node_info()
        return max(0.01, math.floor(50 * node.available_memory / node.total_memory) / 100)
    except (ImportError, OSError, AttributeError):
        return USUAL_SHARE


def unserved_heads(config: Any) -> str | None:
    """Why vLLM's attention on a CPU cannot serve a base of this configuration, which it would say at the first request only."""
    try:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        sizes = CPUAttentionBackend.get_supported_head_sizes()
    except (ImportError, AttributeError):
        return None
    text = config.get_text_config()
    width, heads = getattr(text, "hidden_size", None), getattr(text, "num_attention_heads", None)
    size = getattr(text, "head_dim", None) or (width // heads if width and heads else None)
    if size is None or size in sizes:
        return None
    return f"its attention heads have {size} features, and vLLM's attention on a CPU takes {', '.join(map(str, sizes))}"


def require_served(base: str, config: Any) -> None:
    """Refuse a base, called so, that vLLM would start with here and then end at the first request. Raises ConfigError."""
    if on_cpu() and (why := unserved_heads(config)) is not None:
        raise ConfigError(f"{base}: {why}; use --engine transformers")


def server_command(
    base: str, adapters: Mapping[str, str], *, host: str, port: int, max_lora_rank: int, extra: Sequence[str] = ()
) -> list[str]:
    """Command line of the server: the base as "base", each adapter folder (gated or plain) under its name.

    The module is started rather than the program `vllm`, which the CPU builds of other publishers do not bring.
    """
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", base, "--served-model-name", "base", "--host", host, "--port", str(port)),
        *("--enable-lora", "--max-lora-rank", str(max_lora_rank), "--max-loras", str(len(adapters))),
        *("--lora-modules", *(_module(name, folder) for name, folder in adapters.items())),
        *extra,
    ]


def without_secrets(command: Sequence[str]) -> list[str]:
    """The command line as it may be shown and logged: keys and tokens in it are written as "…"."""
    shown: list[str] = []
    hidden = False
    for word in command:
        flag, sign, _ = word.partition("=")
        if word.startswith("--"):
            # argparse takes a flag's underscores for hyphens, and --api-key more words than one
            hidden = flag.replace("_", "-") in SECRETS
            shown.append(f"{flag}=…" if hidden and sign else word)
        else:
            shown.append("…" if hidden else word)
    return shown


def _module(name: str, folder: str) -> str:
    """NAME=FOLDER, or JSON where vLLM would cut that at the wrong place: it takes the first "=", and a comma for JSON."""
    if "=" in name or "," in f"{name}{folder}":
        return json.dumps({"name": name, "path": folder})
    return f"{name}={folder}"


def start(
    command: Sequence[str], adapters: Mapping[str, str] | None = None, *, dynamic: bool = False
) -> subprocess.Popen[bytes]:
    """Start the server in a group of its own, so that Ctrl-C reaches it through us alone and it can end in order.

    With `dynamic`, clients may load adapters, and ask for any of `adapters` with an override of λ behind its name.
    """
    environment = dict(os.environ)
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    if dynamic:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        environment[ADAPTERS] = json.dumps(
            {name: folder for name, folder in (adapters or {}).items() if "@" not in name}
        )
    return subprocess.Popen(list(command), env=environment, start_new_session=True)


def wait_until_healthy(process: subprocess.Popen[bytes], url: str) -> None:
    """Return when `url`/health answers.

    Raises:
        LoragateError: if the process ends, or nothing answers in time.
    """
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise LoragateError(
                f"vLLM ended with status {process.returncode} before it was ready; its log above says why"
            )
        try:
            # a proxy of the environment is for the outside, not for this machine
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"{url}/health", timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.5)
    raise LoragateError(f"vLLM did not answer at {url}/health within {START_S:g} seconds")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers: politely first."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    # workers that outlived their parent
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
