"""`loragate serve`: vLLM's own OpenAI-compatible server as a child process, with the plugin in it.

The child is told what makes it hold the model, render and stop as training and our own engines do. Some templates slip in a
default system message when a conversation has none; rendering here leaves it out (`data.chat`). vLLM renders with the template
alone, so the same must be said in the template's own language. And vLLM does not read off a template where it ends a turn.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from loragate.data import Chat, describe_form, find_endings, is_same_form
from loragate.display import console
from loragate.errors import ConfigError, DataError, LoragateError
from loragate.files import write_json, write_text
from loragate.gates.override import parse_slot_override
from loragate.gates.recommended import form_note, sampling_note
from loragate.generation.vllm_engine import default_memory_utilization, lora_rank, on_cpu, require_gate_plugin
from loragate.models import (
    ModelSource,
    base_config,
    explained,
    generation_config,
    open_tokenizer,
    read_gates,
    refuse_gguf,
    require_here,
    resolve,
    unreached_note,
)
from loragate.serving.settings import ServerSettings, named_adapters

START_S, STOP_S = 1800.0, 3.0  # patience with a server that starts, and with one that ends: docker kills after 10 s
_PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Qprobeuser"}],
    [
        {"role": "user", "content": "Qprobeone"},
        {"role": "assistant", "content": "Qprobereply"},
        {"role": "user", "content": "Qprobetwo"},
    ],
    [{"role": "system", "content": "Qprobesystem"}, {"role": "user", "content": "Qprobeuser"}],
)


def serve(settings: ServerSettings, system: str = "none") -> int:
    """Run vLLM's server until it ends or a KeyboardInterrupt, so that no child is left behind; returns the exit status.

    Args:
        system: "none" leaves out a default system message of the template.
    """
    out = console()
    try:
        source, adapters = served_adapters(settings)
        rank = check_servable(source, adapters, settings.trust_remote_code)
        folders = {name: adapter.path_with_override for name, adapter in adapters.items()}
        port = free_port(settings.host, settings.port)
        url = address(settings.host, port)
        tokenizer = open_tokenizer(source, settings)
        with tempfile.TemporaryDirectory(prefix="loragate-serve-") as scratch:
            command = server_command(source.base.name, folders, host=settings.host, port=port, max_lora_rank=rank)
            command += vllm_arguments(settings, system, source, adapters, tokenizer, Path(scratch))
            # without --vllm-args, which may hold keys
            out.print("starting vLLM: " + shlex.join(command) + " …" * bool(settings.vllm_args))
            print_sampling(adapters)
            print_forms(adapters, tokenizer, system)
            for name, adapter in adapters.items():
                if adapter.needs_lambda and (note := unreached_note(adapter)):
                    out.print(f"{name}: {note}")
            command += shlex.split(settings.vllm_args)
            environment = {"VLLM_NO_USAGE_STATS": "1", **os.environ}
            if settings.dynamic:
                environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
            # in a group of its own, so that Ctrl-C reaches it through us alone and it can end in order
            began, process = time.monotonic(), subprocess.Popen(command, env=environment, start_new_session=True)
            try:
                wait_until_healthy(process, url)
                out.print(f"ready after {time.monotonic() - began:.0f} s")
                print(f"to check it: loragate verify {shlex.quote(settings.model)} --endpoint {url}/v1\n")
                print_clients(url, ["base", *adapters], chat=tokenizer.chat_template is not None)
                status = process.wait()
            finally:
                stop(process)
    except KeyboardInterrupt:
        out.print("stopped")
        return 0
    # nobody asked it to: vLLM ends with status 0 when one of its processes was killed
    print(f"loragate: vLLM ended by itself, with status {status}; its log above says why", file=sys.stderr)
    return 1


def served_adapters(settings: ServerSettings) -> tuple[ModelSource, dict[str, ModelSource]]:
    """Where the model is, whose base is served as "base", and each adapter by its served name.

    Warns of an adapter that was made for another base, where --base does not say which one is meant.

    Raises:
        ConfigError: for a folder that holds no adapter, a name that is taken, or an override that is not known.
    """
    source = resolve(settings.model, settings.base)
    if source.kind == "base":
        raise ConfigError(
            f"{settings.model} is no gated or plain adapter, which is what loragate serve is for; vLLM serves a base by itself: "
            f"vllm serve {settings.model}"
        )
    require_here("base model", source.base.name, of_adapter=True)
    # the recommended sampling is that of the gates
    adapters = (
        {"gated": source, "adapter": replace(source.as_plain_adapter, gates=None)}
        if source.kind == "gated"
        else {"adapter": source}
    )
    further = named_adapters(settings.adapters, ("base", *adapters))
    if not settings.base:
        for name, adapter in further.items():
            warn_other_base(name, adapter, source)
    return source, adapters | further


def warn_other_base(name: str, adapter: ModelSource, source: ModelSource) -> None:
    """Warn where a further adapter records another base than the one that is served."""
    own, served = adapter.base, source.base
    samples = [(one.gates or {}).get("base", {}).get("weights") for one in (adapter, source)]
    other_commit = own.revision and served.revision and own.revision != served.revision
    same = own.absolute_name == served.absolute_name and not other_commit
    # a base may have moved; two gated folders hold samples of its weights
    if own.name and not same and (samples[0] is None or samples[0] != samples[1]):
        console().print(
            f"warning: --adapters {name}: {adapter.ref.name} was made for the base {own}, and is served on {served}; serve it by "
            "itself, or say with --base which base all of them are for",
        )


def check_servable(source: ModelSource, adapters: Mapping[str, ModelSource], trust: bool) -> int:
    """Check plugin, version, folders and base before vLLM starts; returns the rank to make room for."""
    refuse_gguf(source.base, "vLLM")
    rank = 1
    for adapter in adapters.values():
        if adapter.needs_lambda:
            require_gate_plugin(adapter.path_with_override)
            read_gates(adapter.folder, adapter.override)
        rank = max(rank, lora_rank(adapter.adapter))
        adapter.adapter_contents.require_usable("serve")
    with explained("base model", source.base.name):
        config = base_config(source.base, trust)
    require_served(source.base.name, config)
    return rank


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
        raise ConfigError(f"{base}: {why}; use --engine transformers of an evaluation, or loragate generate")


def server_command(base: str, adapters: Mapping[str, str], *, host: str, port: int, max_lora_rank: int) -> list[str]:
    """Command line of the server: the base as "base", each adapter folder (gated or plain) under its name."""
    # one for all overrides of a whole adapter
    slots = len({parse_slot_override(folder)[0] for folder in adapters.values()})
    return [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", base),
        *("--served-model-name", "base", "--host", host, "--port", str(port)),
        *("--enable-lora", "--max-lora-rank", str(max_lora_rank), "--max-loras", str(slots)),
        # as JSON, because vLLM cuts NAME=FOLDER at the first "=", and an override may have one
        *("--lora-modules", *(json.dumps({"name": name, "path": folder}) for name, folder in adapters.items())),
    ]


def vllm_arguments(
    settings: ServerSettings,
    system: str,
    source: ModelSource,
    adapters: Mapping[str, ModelSource],
    tokenizer: Any,
    scratch: Path,
) -> list[str]:
    """What vLLM's server is told beside base, adapters and address; files that it names are written into `scratch`."""
    found = ["--dtype", settings.dtype, "--tensor-parallel-size", str(settings.tensor_parallel)]
    found += ["--gpu-memory-utilization", f"{settings.vllm_memory or default_memory_utilization():g}"]
    found += ["--max-model-len", str(settings.max_model_len)] if settings.max_model_len else []
    found += ["--trust-remote-code"] if settings.trust_remote_code else []
    found += ["--revision", source.base.revision] if source.base.revision else []
    # the base's own is read anyway
    found += ["--tokenizer", source.tokenizer] if source.tokenizer != source.base.name else []
    template = settings.chat_template
    if system == "none" and (wrapped := template_for_vllm(tokenizer)) is not None:
        template = str(scratch / "chat_template.jinja")
        write_text(Path(template), wrapped)
    found += ["--chat-template", template] if template else []
    tokenizers = further_tokenizers(settings, source, adapters)
    if not settings.chat_template:
        for name, own in tokenizers.items():
            if own.chat_template != tokenizer.chat_template:
                console().print(
                    f"warning: --adapters {name}: its chat template is not the one of {source.tokenizer}, by which the server "
                    "renders the conversations of all adapters; send it rendered prompts (/v1/completions), or serve it by itself",
                )
    return [*found, *stopping_arguments(tokenizer, source, adapters, scratch, settings.trust_remote_code, tokenizers)]


def further_tokenizers(
    settings: ServerSettings, source: ModelSource, adapters: Mapping[str, ModelSource]
) -> dict[str, Any]:
    """{served name: its own tokenizer} of adapters that have another one than is served; one name for each tokenizer."""
    found: dict[str, tuple[str, Any]] = {}
    for name, adapter in adapters.items():
        place = replace(
            adapter, base=source.base
        )  # one without a tokenizer of its own was trained with that of the base
        if place.tokenizer not in {source.tokenizer, *(where for where, _ in found.values())}:
            found[name] = (place.tokenizer, open_tokenizer(place, replace(settings, chat_template="")))
    return {name: tokenizer for name, (_, tokenizer) in found.items()}


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
    tokenizer: Any,
    source: ModelSource,
    adapters: Mapping[str, ModelSource],
    scratch: Path,
    trust: bool = False,
    further: Mapping[str, Any] | None = None,
) -> list[str]:
    """Arguments that have vLLM's server stop where our engines do; none where it does so by itself.

    It knows the tokenizer's EOS and a generation config's. `--override-generation-config` sets the defaults of sampling
    alone, so the base's generation config is copied into `scratch` with all stop tokens, those that gated folders record too.

    Args:
        further: {served name: tokenizer} of adapters with another one than is served, whose ends of a turn are added.
    """
    recorded = {token for adapter in adapters.values() for token in adapter.stop_token_ids}
    defaults = generation_config(source.base, trust)
    for name, own in (further or {}).items():
        recorded |= further_endings(name, own, tokenizer, defaults)
    endings = find_endings(tokenizer, defaults, recorded)
    if endings.texts:
        console().print(
            f"note: the chat template ends a turn with the plain text {endings.texts[0]!r}, at which vLLM's server does not "
            "stop by itself; clients give it as stop",
        )
    if endings.token_ids <= endings.declared:
        return []
    told = {**defaults.to_diff_dict(), "eos_token_id": sorted(endings.token_ids)}
    write_json(scratch / "generation_config.json", told)
    return ["--generation-config", str(scratch)]


def further_endings(name: str, own: Any, served: Any, defaults: Any) -> set[int]:
    """Tokens that end the answers of an adapter with a tokenizer of its own; warns of what the server cannot stop at."""
    known = find_endings(served, defaults)
    ends = find_endings(own, defaults, known.token_ids)
    new = ends.token_ids - known.token_ids
    same = {token for token in new if own.convert_ids_to_tokens(token) == served.convert_ids_to_tokens(token)}
    lost = [str(own.convert_ids_to_tokens(token)) for token in sorted(new - same)]
    if lost := [*lost, *(text for text in ends.texts if text not in known.texts)]:
        console().print(
            f"warning: --adapters {name}: its answers end with {lost[0]!r}, at which vLLM's server does not stop by itself; "
            "clients give it as stop",
        )
    return same


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
        except OSError:
            pass
        time.sleep(0.5)
    raise LoragateError(f"vLLM did not answer at {url}/health within {START_S:g} seconds")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers: politely first, but streams that are still being answered are not waited for."""
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


def free_port(host: str, port: int) -> int:
    """The port, or any free one for 0, after a socket has listened on it and closed again: vLLM binds the port itself.

    Raises:
        ConfigError: where something else listens; its answers would be taken for ours.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, port))
            found.listen()
        except OSError as error:
            taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
            flag = f"--port {port}: {host}" if taken else f"--host {host}: it"
            raise ConfigError(f"{flag} cannot be served from ({error.strerror}); give another") from error
        return int(found.getsockname()[1])


def print_sampling(adapters: Mapping[str, ModelSource]) -> None:
    """How a request that names no temperature is sampled, for each served folder that recommends something."""
    for name, adapter in adapters.items():
        if note := sampling_note(name, adapter.sampling):
            console().print(f"{note}; a request may say otherwise")


def print_forms(adapters: Mapping[str, ModelSource], tokenizer: Any, system: str) -> None:
    """A warning for each served folder that was chosen on questions in another form than conversations are rendered in."""
    if tokenizer.chat_template is None:  # then prompts come rendered
        return
    now, same = describe_form(False, system=system), partial(is_same_form, tokenizer=tokenizer)
    for name, adapter in adapters.items():
        if note := form_note(name, adapter.sampling, now, same):
            console().print(f"warning: {note}; /v1/completions takes prompts as they are")


def address(host: str, port: int) -> str:
    """The URL at which a client on this machine finds the server."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{local}]:{port}" if ":" in local else f"http://{local}:{port}"


def print_clients(url: str, names: list[str], *, chat: bool) -> None:
    """Lines to paste: curl, and Python's openai client; plain completions where conversations cannot be rendered."""
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
