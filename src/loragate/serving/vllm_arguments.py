"""What vLLM's server is told, so that it holds the model, renders and stops as training and our own engines do.

Some templates slip in a default system message when a conversation has none; rendering here leaves it out
(`data.chat`). vLLM renders with the template alone, so the same must be said in the template's own language. And vLLM does
not read off a template where it ends a turn.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loragate.data import Chat, find_endings
from loragate.display import console
from loragate.errors import DataError, LoragateError
from loragate.files import write_json, write_text
from loragate.generation.vllm_engine import lora_rank, require_gate_plugin
from loragate.models import Loading, Place, base_config, explained, generation_config, gguf, open_tokenizer, read_gates
from loragate.serving.settings import ServerSettings
from loragate.serving.vllm_server import on_cpu, require_served, usual_share

_PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Qprobeuser"}],
    [
        {"role": "user", "content": "Qprobeone"},
        {"role": "assistant", "content": "Qprobereply"},
        {"role": "user", "content": "Qprobetwo"},
    ],
    [{"role": "system", "content": "Qprobesystem"}, {"role": "user", "content": "Qprobeuser"}],
)


def prepare_vllm(place: Place, adapters: Mapping[str, Place], trust: bool) -> int:
    """Check plugin, version, folders and base before vLLM starts; returns the rank to make room for."""
    gguf.refuse(place.base, "vLLM")
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
    settings: ServerSettings, how: Loading, system: str, place: Place, adapters: Mapping[str, Place], scratch: Path
) -> list[str]:
    """What vLLM's server is told beside base, adapters and address; files that it names are written into `scratch`."""
    found = ["--dtype", how.dtype, "--tensor-parallel-size", str(settings.tensor_parallel)]
    found += ["--gpu-memory-utilization", f"{settings.vllm_memory or usual_share():g}"]
    found += ["--max-model-len", str(settings.max_model_len)] if settings.max_model_len else []
    found += ["--trust-remote-code"] if how.trust_remote_code else []
    found += ["--revision", place.base.revision] if place.base.revision else []
    own = next((one for one in place.tokenizers[:-1] if (Path(one) / "tokenizer_config.json").is_file()), None)
    found += ["--tokenizer", own] if own else []
    template, tokenizer = how.chat_template, open_tokenizer(place, how)
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
    same = next(
        (place for place, (one, other) in enumerate(zip(plain[0][::-1], kept[0][::-1])) if one != other),
        min(len(plain[0]), len(kept[0])),
    )
    injected, instead = kept[0][: len(kept[0]) - same], plain[0][: len(plain[0]) - same]
    # jinja drops the newline behind a block tag and the last one of a template
    body = ("\n" if ours.template.startswith("\n") else "") + ours.template.removesuffix("\n")
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
    tokenizer: Any, place: Place, adapters: Mapping[str, Place], scratch: Path, trust: bool = False
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
