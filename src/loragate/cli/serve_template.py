"""What vLLM's server must be told so that it renders and stops as training and our own engines do.

Some templates slip in a default system message when a conversation has none; rendering here leaves it out
(`data.chat`). vLLM renders with the template alone, so the same must be said in the template's own language. And vLLM does
not read off a template where it ends a turn.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loragate.errors import LoragateError

if TYPE_CHECKING:
    from loragate.models import Place

_PROBES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Qprobeuser"}],
    [
        {"role": "user", "content": "Qprobeone"},
        {"role": "assistant", "content": "Qprobereply"},
        {"role": "user", "content": "Qprobetwo"},
    ],
    [{"role": "system", "content": "Qprobesystem"}, {"role": "user", "content": "Qprobeuser"}],
)


def template_for_vllm(tokenizer: Any) -> str | None:
    """The tokenizer's template wrapped so that nothing is slipped in; None where it slips nothing in, or there is none.

    Raises:
        LoragateError: where the wrapped template does not render as training does.
    """
    from loragate.data import Chat

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
    wrapped = _wrap(ours.template, injected, instead)
    trial = copy.deepcopy(tokenizer)
    trial.chat_template = wrapped
    if [_render(Chat(trial, "keep"), probe) for probe in _PROBES] != plain:
        raise LoragateError(
            "the chat template's own system message cannot be left out for vLLM; use --system keep, or give a template without "
            "one with --chat-template FILE"
        )
    return wrapped


def _wrap(template: str, injected: str, instead: str) -> str:
    # jinja drops the newline behind a block tag and the last one of a template
    body = ("\n" if template.startswith("\n") else "") + template.removesuffix("\n")
    start, other = json.dumps(injected), json.dumps(instead)
    return (
        "{% set loragate_text %}" + body + "{% endset %}"
        "{% if (tools is defined and tools) or messages[0]['role'] in ['system', 'developer'] %}{{ loragate_text }}"
        "{% elif loragate_text.startswith("
        + start
        + ") %}{{ "
        + other
        + " + loragate_text["
        + str(len(injected))
        + ":] }}"
        "{% else %}{{ raise_exception('the chat template changed its own system message') }}{% endif %}"
    )


def _render(chat: Any, messages: list[dict[str, str]]) -> str | None:
    from loragate.errors import DataError

    try:
        return str(chat.render(messages, generation_prompt=True))
    except DataError:
        return None


def stopping_arguments(
    tokenizer: Any, place: Place, adapters: Mapping[str, Place], scratch: Path, trust: bool = False
) -> list[str]:
    """Arguments that have vLLM's server stop where our engines do; none where it does so by itself.

    It knows the tokenizer's EOS and a generation config's. `--override-generation-config` sets the defaults of sampling
    alone, so the base's generation config is copied into `scratch` with all stop tokens.

    Args:
        place: whose base is served.
        adapters: by served name; gated folders record stop tokens.
        scratch: a folder for the copy.
        trust: run model code from the hub.
    """
    from loragate.cli.display import console
    from loragate.data import find_endings
    from loragate.files import write_json
    from loragate.models import generation_config

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
