"""vLLM's own OpenAI-compatible server as a child process: what it is told, its start, its end.

It is told what makes it hold the model, render and stop as training and our own engines do. Some templates slip in a default
system message when a conversation has none; rendering here leaves it out (`data.chat`). vLLM renders with the template alone,
so the same must be said in the template's own language. And vLLM does not read off a template where it ends a turn.
"""

from __future__ import annotations

import contextlib
import copy
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
from pathlib import Path
from typing import Any

from loragate.data import Chat, find_endings
from loragate.display import console
from loragate.errors import ConfigError, DataError, LoragateError
from loragate.files import write_json, write_text
from loragate.generation.vllm_engine import lora_rank, require_gate_plugin
from loragate.models import Loading, ModelSource, base_config, explained, generation_config, read_gates, refuse_gguf
from loragate.serving.hooks import ADAPTERS
from loragate.serving.plugin import vllm_version
from loragate.serving.settings import ServerSettings

USUAL_SHARE = 0.9
"""Share of an accelerator's memory that vLLM may fill."""
SECRETS = ("--api-key", "--hf-token")
START_S, STOP_S = 1800.0, 30.0  # patience with a server that starts, and with one that ends
_PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Qprobeuser"}],
    [
        {"role": "user", "content": "Qprobeone"},
        {"role": "assistant", "content": "Qprobereply"},
        {"role": "user", "content": "Qprobetwo"},
    ],
    [{"role": "system", "content": "Qprobesystem"}, {"role": "user", "content": "Qprobeuser"}],
)


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


def prepare_vllm(place: ModelSource, adapters: Mapping[str, ModelSource], trust: bool) -> int:
    """Check plugin, version, folders and base before vLLM starts; returns the rank to make room for."""
    refuse_gguf(place.base, "vLLM")
    rank = 1
    for adapter in adapters.values():
        if adapter.needs_lambda:
            require_gate_plugin(adapter.text)
            read_gates(adapter.folder, adapter.override)
        rank = max(rank, lora_rank(adapter.adapter))
    if on_cpu():
        with explained("base model", place.base.name):
            config = base_config(place.base, trust)
        require_served(place.base.name, config)
    return rank


def vllm_arguments(
    settings: ServerSettings,
    how: Loading,
    system: str,
    place: ModelSource,
    adapters: Mapping[str, ModelSource],
    tokenizer: Any,
    scratch: Path,
) -> list[str]:
    """What vLLM's server is told beside base, adapters and address; files that it names are written into `scratch`."""
    found = ["--dtype", how.dtype, "--tensor-parallel-size", str(settings.tensor_parallel)]
    found += ["--gpu-memory-utilization", f"{settings.vllm_memory or usual_share():g}"]
    found += ["--max-model-len", str(settings.max_model_len)] if settings.max_model_len else []
    found += ["--trust-remote-code"] if how.trust_remote_code else []
    found += ["--revision", place.base.revision] if place.base.revision else []
    # the base's own is read anyway
    found += ["--tokenizer", place.tokenizer] if place.tokenizer != place.base.name else []
    template = how.chat_template
    if system == "none" and (wrapped := template_for_vllm(tokenizer)) is not None:
        template = str(scratch / "chat_template.jinja")
        write_text(Path(template), wrapped)
    found += ["--chat-template", template] if template else []
    return [*found, *stopping_arguments(tokenizer, place, adapters, scratch, how.trust_remote_code)]


def template_for_vllm(tokenizer: Any) -> str | None:
    """The tokenizer's template wrapped so that nothing is slipped in; None where it slips nothing in, or there is none.

    Raises:
        LoragateError: where the wrapped template does not render as training does.
    """
    ours, theirs = Chat(tokenizer, "none"), Chat(tokenizer, "keep")
    if ours.template is None:
        return None
    plain = [_render(ours, probe) for probe in _PROBES]
    kept = [_render(theirs, probe) for probe in _PROBES]
    if plain == kept:
        return None
    if plain[0] is None or kept[0] is None:
        raise LoragateError("the chat template refuses a plain question; give another with --chat-template FILE")
    # what is slipped in stands at the beginning: behind it the two renderings are the same, counted from the end
    same = next(
        (place for place, (one, other) in enumerate(zip(plain[0][::-1], kept[0][::-1])) if one != other),
        min(len(plain[0]), len(kept[0])),
    )
    injected, instead = kept[0][: len(kept[0]) - same], plain[0][: len(plain[0]) - same]
    # jinja drops the newline behind a block tag and the last one of a template
    body = ("\n" if ours.template.startswith("\n") else "") + ours.template.removesuffix("\n")
    # the template runs as it is into a variable, whose beginning is then exchanged
    rest = f"{json.dumps(instead)} + loragate_text[{len(injected)}:]"
    wrapped = (
        "{% set loragate_text %}" + body + "{% endset %}"
        "{% if (tools is defined and tools) or messages[0]['role'] in ['system', 'developer'] %}{{ loragate_text }}"
        "{% elif loragate_text.startswith(" + json.dumps(injected) + ") %}{{ " + rest + " }}"
        "{% else %}{{ raise_exception('the chat template changed its own system message') }}{% endif %}"
    )
    trial = copy.deepcopy(tokenizer)
    trial.chat_template = wrapped
    if [_render(Chat(trial, "keep"), probe) for probe in _PROBES] != plain:
        raise LoragateError(
            "the chat template's own system message cannot be left out for vLLM; use --system keep, or give a template without "
            "one with --chat-template FILE"
        )
    return wrapped


def _render(chat: Any, messages: list[dict[str, str]]) -> str | None:
    try:
        return str(chat.render(messages, generation_prompt=True))
    except DataError:
        return None


def stopping_arguments(
    tokenizer: Any, place: ModelSource, adapters: Mapping[str, ModelSource], scratch: Path, trust: bool = False
) -> list[str]:
    """Arguments that have vLLM's server stop where our engines do; none where it does so by itself.

    It knows the tokenizer's EOS and a generation config's. `--override-generation-config` sets the defaults of sampling
    alone, so the base's generation config is copied into `scratch` with all stop tokens, those that gated folders record too.
    """
    recorded = {token for adapter in adapters.values() for token in adapter.stop_token_ids}
    settings = generation_config(place.base, trust)
    endings = find_endings(tokenizer, settings, recorded)
    if endings.texts:
        console().print(
            f"note: the chat template ends a turn with the plain text {endings.texts[0]!r}, at which vLLM's server does not "
            "stop by itself; clients give it as stop, or use --engine transformers",
            markup=False,
        )
    if endings.token_ids <= endings.declared:
        return []
    told = {**settings.to_diff_dict(), "eos_token_id": sorted(endings.token_ids)}
    write_json(scratch / "generation_config.json", told)
    return ["--generation-config", str(scratch)]


def start(command: Sequence[str], adapters: Mapping[str, str], dynamic: bool) -> subprocess.Popen[bytes]:
    """Start the server in a group of its own, so that Ctrl-C reaches it through us alone and it can end in order.

    With `dynamic`, clients may load adapters, and ask for any of `adapters` with an override of λ behind its name.
    """
    environment = dict(os.environ)
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    if dynamic:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        # the plugin reads it in every process of vLLM's
        environment[ADAPTERS] = json.dumps({name: folder for name, folder in adapters.items() if "@" not in name})
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
