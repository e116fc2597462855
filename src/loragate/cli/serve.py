"""`loragate serve`: an OpenAI-compatible server for a gated adapter, its plain adapter and its base."""

from __future__ import annotations

import errno
import importlib.util
import json
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le

from loragate.cli.arguments import Command
from loragate.cli.display import console
from loragate.cli.options import EngineOptions, ModelOptions
from loragate.cli.serve_folders import served_places
from loragate.effects import require_effect
from loragate.errors import ConfigError, LoragateError
from loragate.gates.recommended import generation_settings, sampling_note

if TYPE_CHECKING:
    from loragate.models import Place


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ModelOptions, EngineOptions):
    """Settings of `loragate serve`.

    Attributes:
        model: gated folder, owner/name[@revision] of one on the hub, or PEFT adapter; with --engine transformers also a base
            model.
        base: where the base model is, instead of the recorded one.
        host: address to listen on; 127.0.0.1 accepts this machine only.
        port: port to listen on.
        engine: auto takes vllm if it is installed.
        adapters: more adapters to serve, gated or plain: NAME=FOLDER separated by commas, or NAME=owner/name[@revision]
            on the hub; a suffix such as @unit overrides λ.
        overrides: overrides of λ to serve for every gated adapter, separated by commas: unit is served as NAME@unit.
            Known: off, unit, noreverse, noextrapolate, constant=0.5, clip=-1:2. With --dynamic, or on transformers,
            clients can use any.
        dynamic: let clients load and unload adapters while the server runs (vllm); for trusted clients only.
        verify: compare log-probs of vLLM with transformers, print the differences and stop; the exit status is 1 if
            they are too large.
        max_model_len: positions to plan for, prompt and answer together; 0 takes the model's (vllm).
        vllm_args: further arguments of vLLM's server, as one text.
    """

    model: str
    base: str = ""
    host: str = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65535)] = 8000
    engine: Literal["auto", "vllm", "transformers"] = "auto"
    adapters: str = ""
    overrides: str = ""
    dynamic: bool = False
    verify: bool = False
    max_model_len: int = 0
    vllm_args: str = ""


def run(options: ServeOptions) -> int:
    """Serve until Ctrl-C."""
    from loragate.models import resolve

    asked = resolve(options.model, options.base)
    options = replace(options, model=asked.source)  # the commit that it is now
    installed = importlib.util.find_spec("vllm") is not None
    fits = installed and asked.kind != "base"
    with_vllm = options.engine == "vllm" or options.verify or (options.engine == "auto" and fits)
    require_effect("serve", options, flags=True, engine="vllm" if with_vllm else "transformers")
    if with_vllm:
        if not installed:
            raise ConfigError("vLLM is not installed; run: pip install loragate[vllm], or use --engine transformers")
        if options.verify:
            from loragate.cli.serve_verify import verify

            return verify(options, *served_places(options))
        return serve_vllm(options)
    return serve_transformers(options)


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


def prepare_vllm(options: ServeOptions, place: Place, adapters: dict[str, Place]) -> int:
    """Check plugin, version, folders and base before vLLM starts; returns the rank to make room for."""
    from loragate.generation.vllm_engine import lora_rank, require_gate_plugin
    from loragate.models import base_config, explained, read_gates
    from loragate.models.gguf import refuse
    from loragate.serving.vllm_server import on_cpu, require_served

    refuse(place.base, "vLLM")
    rank = 1
    for adapter in adapters.values():
        if adapter.needs_lambda:
            require_gate_plugin(adapter.text)
            read_gates(adapter.folder, adapter.override)
        rank = max(rank, lora_rank(adapter.adapter))
    if on_cpu():
        with explained("base model", place.base.name):
            config = base_config(place.base, options.trust_remote_code)
        require_served(place.base.name, config)
    return rank


def serve_vllm(options: ServeOptions) -> int:
    """vLLM's own server as a child, until Ctrl-C."""
    import shlex
    import tempfile

    from loragate.serving.vllm_server import server_command, start, stop, wait_until_healthy, without_secrets

    place, adapters = served_places(options)
    rank = prepare_vllm(options, place, adapters)
    texts = {name: adapter.text for name, adapter in adapters.items()}
    with listen(options.host, options.port) as free:
        port = int(free.getsockname()[1])
    out = console()
    with tempfile.TemporaryDirectory(prefix="loragate-serve-") as scratch:
        command = server_command(
            place.base.name,
            texts,
            host=options.host,
            port=port,
            max_lora_rank=rank,
            extra=[*vllm_arguments(options, place, adapters, Path(scratch)), *shlex.split(options.vllm_args)],
        )
        out.print("starting vLLM: " + shlex.join(without_secrets(command)), markup=False)
        print_sampling({"gated": place})
        end_on_terminate()
        began, process = time.monotonic(), start(command, texts, dynamic=options.dynamic)
        try:
            wait_until_healthy(process, address(options.host, port))
            out.print(f"ready after {time.monotonic() - began:.0f} s", markup=False)
            print_clients(options.host, port, ["base", *adapters], chat=renders_chats(options, place))
            status = process.wait()
        except KeyboardInterrupt:
            stop(process)
            out.print("stopped", markup=False)
            return 0
        finally:
            stop(process)
    if status:
        print(f"loragate: vLLM ended with status {status}; its log above says why", file=sys.stderr)
    return 1 if status else 0


def vllm_arguments(options: ServeOptions, place: Place, adapters: dict[str, Place], scratch: Path) -> list[str]:
    """What vLLM's server is told beside base, adapters and address; files that it names are written into `scratch`."""
    from loragate.cli.serve_template import stopping_arguments, template_for_vllm
    from loragate.files import write_text
    from loragate.models import Loading, open_tokenizer
    from loragate.serving.vllm_server import usual_share

    found = ["--dtype", options.dtype, "--tensor-parallel-size", str(options.tensor_parallel)]
    found += ["--gpu-memory-utilization", f"{options.vllm_memory or usual_share():g}"]
    found += ["--max-model-len", str(options.max_model_len)] if options.max_model_len else []
    found += ["--trust-remote-code"] if options.trust_remote_code else []
    found += ["--revision", place.base.revision] if place.base.revision else []
    own = next((one for one in place.tokenizers[:-1] if (Path(one) / "tokenizer_config.json").is_file()), None)
    found += ["--tokenizer", own] if own else []
    template, tokenizer = options.chat_template, open_tokenizer(place, Loading.of(options))
    if options.system == "none" and (wrapped := template_for_vllm(tokenizer)) is not None:
        template = str(scratch / "chat_template.jinja")
        write_text(Path(template), wrapped)
    found += ["--chat-template", template] if template else []
    if (temperature := place.recommended_temperature) is not None:
        # vLLM reads no do_sample: greedy decoding is a temperature of 0 there
        told = {**generation_settings(temperature), "temperature": temperature}
        found += ["--override-generation-config", json.dumps(told)]
    return [*found, *stopping_arguments(tokenizer, place, adapters, scratch, options.trust_remote_code)]


def renders_chats(options: ServeOptions, place: Place) -> bool:
    """Whether there is a template, without which conversations are refused."""
    from loragate.models import Loading, open_tokenizer

    try:
        tokenizer = open_tokenizer(place, Loading.of(options))
    except LoragateError:
        return True  # vLLM, which is serving by now, reads formats that transformers does not
    return tokenizer.chat_template is not None


def serve_transformers(options: ServeOptions) -> int:
    """Our own small server over the model in memory, until Ctrl-C."""
    from loragate.cli.evaluation_inputs import load_inputs
    from loragate.cli.serve_transformers import Row, add_adapters, transformers_backend
    from loragate.serving.http_app import make_server

    more = served_places(options)[1] if options.adapters else {}
    # before the model is loaded, which may take minutes
    with listen(options.host, options.port) as listening:
        loaded = load_inputs(options, options.model)
        if loaded.note:
            console().print(loaded.note, markup=False)
        gated = loaded.place.gates is not None
        own = ("gated", "adapter") if gated else ("adapter",)
        further = {name: more[name] for name in more if name not in own}
        rows = add_adapters(loaded.model, further)
        if gated and loaded.kind == "adapter":
            # its gates are off: it answers to its name all the same, as in vLLM
            rows = {"gated": Row("adapter", "adapter"), **rows}
        print_sampling({"gated": loaded.place, **further})
        backend = transformers_backend(
            loaded.model, loaded.tokenizer, loaded.kind, system=options.system, more=rows, gates=loaded.place.gates
        )
        chat = loaded.tokenizer.chat_template is not None
        print_clients(options.host, listening.getsockname()[1], list(backend.models), chat=chat)
        end_on_terminate()
        try:
            make_server(backend, options.host).run(sockets=[listening])
        except KeyboardInterrupt:
            console().print("stopped", markup=False)
    return 0


def print_sampling(places: Mapping[str, Place]) -> None:
    """How a request that names no temperature is sampled, for each served folder that recommends something."""
    for name, place in places.items():
        if note := sampling_note(name, place.gates):
            console().print(f"{note}; a request may say otherwise", markup=False)


def end_on_terminate() -> None:
    """Treat the signal of `kill` and of service managers as Ctrl-C, so that no child is left behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


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


COMMAND = Command(
    name="serve",
    summary="Serve a gated adapter, its plain adapter and its base over the OpenAI protocol.",
    options=ServeOptions,
    run=run,
    positional="model",
    examples=(
        "loragate serve gated",
        "loragate serve gated --port 8080 --adapters math=other-gated,style=plain-adapter",
        "loragate serve gated --overrides unit,constant=0.5",
        "loragate serve gated --engine transformers",
        "loragate serve gated --verify",
    ),
    common="base host port engine adapters overrides dynamic verify max_model_len vllm_args dtype quantization device",
)
