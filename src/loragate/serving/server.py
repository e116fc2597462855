"""The server of `loragate serve`: base, gated and plain adapters over the OpenAI protocol, by vLLM's server or by our own."""

from __future__ import annotations

import errno
import importlib.util
import json
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from loragate.display import console
from loragate.errors import ConfigError
from loragate.gates.override import parse_override
from loragate.gates.recommended import sampling_note
from loragate.models import Loading, ModelSource, open_model, open_tokenizer, require_here, resolve
from loragate.serving.backend import Row, add_adapters, transformers_backend
from loragate.serving.http_app import make_server
from loragate.serving.parity import verify
from loragate.serving.settings import ServerSettings
from loragate.serving.vllm_server import (
    prepare_vllm,
    server_command,
    start,
    stop,
    vllm_arguments,
    wait_until_healthy,
    without_secrets,
)
from loragate.validate import comma_list


def serve(settings: ServerSettings, how: Loading, system: str = "none") -> int:
    """Serve until Ctrl-C, or compare vLLM with transformers where `settings.verify` says so; returns the exit status.

    Args:
        how: base and tokenizer are loaded.
        system: "none" leaves out a default system message of the template.
    """
    if settings.engine != "transformers" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            'vLLM is not installed; give it an environment of its own (pip install "loragate[vllm]"), or use --engine transformers'
        )
    if settings.verify and settings.engine != "transformers":
        return verify(settings, how, *served_places(settings))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # the signal of `kill` and of service managers is as Ctrl-C, so that no child is left behind
    signal.signal(signal.SIGTERM, interrupt)
    try:
        return (serve_transformers if settings.engine == "transformers" else serve_vllm)(settings, how, system)
    except KeyboardInterrupt:
        console().print("stopped", markup=False)
        return 0


def served_places(settings: ServerSettings) -> tuple[ModelSource, dict[str, ModelSource]]:
    """The place of --model, whose base is served, and that of each adapter by its served name.

    Raises:
        ConfigError: for a place that holds no adapter, a name that is taken, or an override that is not known.
    """
    place = resolve(settings.model, settings.base)
    if place.kind == "base":
        raise ConfigError(f"{settings.model} is no gated or plain adapter, which is what these settings serve")
    require_here("base model", place.base.name)
    # the recommended sampling is that of the gates
    adapters = (
        {"gated": place, "adapter": replace(place.plain, gates=None)} if place.kind == "gated" else {"adapter": place}
    )
    for part in comma_list(settings.adapters):
        name, _, text = part.partition("=")
        more = resolve(text, overrides=True, base_later=True) if name and text else None
        if more is None or more.kind == "base":
            raise ConfigError(
                f"--adapters {part}: expected NAME=FOLDER with the folder or hub id of a gated or plain adapter, or "
                "NAME=FOLDER@OVERRIDE"
            )
        if name in (*adapters, "base"):
            raise ConfigError(f"--adapters {part}: the name {name} is taken; choose another")
        adapters[name] = more
    # a name with an override of its own takes no second one
    gated = {name: one for name, one in adapters.items() if one.kind == "gated" and not one.ref.override}
    for text in comma_list(settings.overrides):
        parse_override(text)
        if not gated:
            raise ConfigError(f"--overrides {text} has no effect: none of the adapters carries gates")
        adapters |= {f"{name}@{text}": replace(one, ref=replace(one.ref, override=text)) for name, one in gated.items()}
    return place, adapters


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `port`, or on any free one for 0.

    Raises:
        ConfigError: where something else listens; its answers would be taken for ours.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(512)
    except OSError as error:
        found.close()
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        flag = f"--port {port}: {host}" if taken else f"--host {host}: it"
        raise ConfigError(f"{flag} cannot be served from ({error.strerror}); give another") from error
    return found


def serve_vllm(settings: ServerSettings, how: Loading, system: str) -> int:
    """vLLM's own server as a child, until Ctrl-C."""
    place, adapters = served_places(settings)
    rank = prepare_vllm(place, adapters, how.trust_remote_code)
    texts = {name: adapter.text for name, adapter in adapters.items()}
    with listen(settings.host, settings.port) as free:  # closed again: vLLM binds the port itself
        port = int(free.getsockname()[1])
    tokenizer = open_tokenizer(place, how)
    out = console()
    with tempfile.TemporaryDirectory(prefix="loragate-serve-") as scratch:
        command = server_command(
            place.base.name,
            texts,
            host=settings.host,
            port=port,
            max_lora_rank=rank,
            extra=[
                *vllm_arguments(settings, how, system, place, adapters, tokenizer, Path(scratch)),
                *shlex.split(settings.vllm_args),
            ],
        )
        out.print("starting vLLM: " + shlex.join(without_secrets(command)), markup=False)
        print_sampling(adapters)
        began, process = time.monotonic(), start(command, texts, settings.dynamic)
        try:
            wait_until_healthy(process, address(settings.host, port))
            out.print(f"ready after {time.monotonic() - began:.0f} s", markup=False)
            chat = tokenizer.chat_template is not None
            print_clients(settings.host, port, ["base", *adapters], chat=chat)
            status = process.wait()
        finally:
            stop(process)
    if status:
        print(f"loragate: vLLM ended with status {status}; its log above says why", file=sys.stderr)
    return 1 if status else 0


def serve_transformers(settings: ServerSettings, how: Loading, system: str) -> int:
    """Our own small server over the model in memory, until Ctrl-C."""
    more = served_places(settings)[1] if settings.adapters else {}
    # before the model is loaded, which may take minutes
    with listen(settings.host, settings.port) as listening:
        loaded = open_model(resolve(settings.model, settings.base), how).without_idle_gates()
        if loaded.note:
            console().print(loaded.note, markup=False)
        gated = loaded.place.gates is not None
        own = ("gated", "adapter") if gated else ("adapter",)
        further = {name: more[name] for name in more if name not in own}
        rows, sampling = add_adapters(loaded.model, further), loaded.place.sampling
        print_sampling({own[0]: loaded.place, **further})
        if gated and loaded.kind == "adapter":
            # its gates are off: it answers to its name all the same, as in vLLM
            rows, sampling = {"gated": Row("adapter", "adapter", sampling=sampling), **rows}, None
        backend = transformers_backend(
            loaded.model, loaded.tokenizer, loaded.kind, system=system, more=rows, sampling=sampling
        )
        chat = loaded.tokenizer.chat_template is not None
        print_clients(settings.host, listening.getsockname()[1], list(backend.models), chat=chat)
        make_server(backend, settings.host).run(sockets=[listening])
    return 0


def print_sampling(places: Mapping[str, ModelSource]) -> None:
    """How a request that names no temperature is sampled, for each served folder that recommends something."""
    for name, place in places.items():
        if note := sampling_note(name, place.sampling):
            console().print(f"{note}; a request may say otherwise", markup=False)


def address(host: str, port: int) -> str:
    """The URL at which a client on this machine finds the server."""
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"http://{local}:{port}"


def print_clients(host: str, port: int, names: list[str], *, chat: bool) -> None:
    """Lines to paste: curl, and Python's openai client; plain completions where conversations cannot be rendered."""
    url = address(host, port)
    request: dict[str, object] = {"model": "gated" if "gated" in names else names[-1], "max_tokens": 64}
    if chat:
        path, answer = "chat/completions", "chat.completions.create(**{}).choices[0].message.content"
        request["messages"] = [{"role": "user", "content": "Hello"}]
    else:
        path, answer = "completions", "completions.create(**{}).choices[0].text"
        request["prompt"] = "Hello"
    body = json.dumps(request)
    lines = [
        f"serving {', '.join(names)} at {url}/v1 (Ctrl-C stops)",
        "",
        f"curl {url}/v1/{path} -H 'Content-Type: application/json' -d '{body}'",
        "",
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{url}/v1", api_key="none")',
        f"print(client.{answer.format(repr(request))})",
    ]
    print("\n".join(lines), flush=True)
