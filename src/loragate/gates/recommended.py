"""The sampling that a gated folder recommends: the temperature at which its setting was shown to be best.

Gates that help at one temperature may harm at another. `gate_config.json` holds the temperature, and `generation_config.json`
beside it says the same to programs that know transformers' own file. Whoever samples from the folder takes this temperature
unless told another one, and says which. Records go in; numbers, sentences and the settings of a model in memory come out; nothing
here reads a file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loragate.display import format_temperature

SAMPLING = "generation_config.json"
DEFAULT_TEMPERATURE = 1.0
"""The temperature where nobody asks for one and no folder recommends one."""

# what a generation config may draw by, beside the settings that a folder recommends
_DRAWS = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")

_warned: set[str] = set()


def generation_settings(temperature: float) -> dict[str, Any]:
    """Settings of `transformers.GenerationConfig` that draw from all tokens, with no penalty, as gates are chosen; 0 is greedy."""
    settings: dict[str, Any] = {"do_sample": temperature > 0, "repetition_penalty": 1.0}
    return {**settings, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else settings


def with_recommended(settings: Mapping[str, Any], temperature: float) -> dict[str, Any]:
    """A base's generation_config.json that draws as a folder recommends: without the base's own temperature, top-p and so on."""
    return {key: value for key, value in settings.items() if key not in _DRAWS} | generation_settings(temperature)


def apply_sampling(model: Any, records: Sequence[Mapping[str, Any]]) -> None:
    """Have `model.generate` sample as the last record recommends; as the model did before, where it recommends nothing.

    What is replaced in the generation config is kept on the model, and put back by the next call, except where somebody changed
    it meanwhile. `records` are the gate_config.json of all gates on the model.
    """
    settings = getattr(model, "generation_config", None)
    if settings is None:
        return
    replaced: dict[str, tuple[Any, Any]] = vars(model).setdefault("_replaced_sampling", {})
    for key, (own, recommended) in replaced.items():
        if getattr(settings, key) == recommended:
            setattr(settings, key, own)
    replaced.clear()
    temperature = recommended_temperature(records[-1]) if records else None
    if temperature is not None:
        # update() leaves what it is not told; the base's own top-k, top-p or penalties are no part of what was measured
        told = {**dict.fromkeys(_DRAWS), **generation_settings(temperature)}
        replaced.update({key: (getattr(settings, key), value) for key, value in told.items() if hasattr(settings, key)})
        settings.update(**told)


def recommended_temperature(record: Mapping[str, Any] | None) -> float | None:
    """What the checked gate_config.json of a folder recommends; None for nothing, 0 for greedy decoding."""
    sampling = (record or {}).get("sampling")
    return None if sampling is None else float(sampling["temperature"])


def exported_sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a plain adapter whose generation_config.json recommends a temperature as `loragate export` writes it; else {}.

    Any other file of that name asks for more than a temperature, or is a base's own.
    """
    temperature = settings.get("temperature", 0.0) if settings.get("do_sample") else 0.0
    # transformers adds its version when it writes the file anew
    found = {key: value for key, value in settings.items() if key != "transformers_version"}
    if not is_number(temperature) or found != generation_settings(temperature):
        return {}
    return {"sampling": {"temperature": temperature}}


def chosen_temperature(record: Mapping[str, Any] | None, asked: float | None) -> float:
    """What was asked for, else what the folder recommends, else what is usual."""
    if asked is not None:
        return asked
    recommended = recommended_temperature(record)
    return DEFAULT_TEMPERATURE if recommended is None else recommended


def sampling_note(name: str, record: Mapping[str, Any] | None, asked: float | None = None) -> str:
    """One sentence on the sampling of a folder, `asked` for or recommended; empty where nothing is recommended."""
    recommended = recommended_temperature(record)
    if recommended is None:
        return ""
    if asked is None or asked == recommended:
        return f"sampling {format_temperature(recommended)}, as {name} recommends"
    return (
        f"sampling {format_temperature(asked)}, but {name} is recommended {format_temperature(recommended)}, where its setting "
        "was shown to be best"
    )


def form_note(name: str, record: Mapping[str, Any] | None, now: str, is_same: Callable[[str, str], bool]) -> str:
    """One sentence where prompts are put to a folder's model in another form (`now`) than the questions by which it was chosen.

    Empty where the two are alike, `is_same(recorded, now)`, and where the record says nothing of a form.
    """
    selection = dict_or_empty((record or {}).get("selection"))
    recorded = dict_or_empty(selection.get("dev")).get("form")
    if not isinstance(recorded, str) or not recorded or is_same(recorded, now):
        return ""
    return (
        f"{name} was chosen on questions asked {recorded}, and here prompts are put {now}: asked in another way, other gates, "
        "strengths and temperatures may be better"
    )


def warn_other_temperature(name: str, record: Mapping[str, Any] | None, asked: float, logger: logging.Logger) -> None:
    """Warn where a folder is sampled at another temperature than it recommends; once in this process for each name."""
    if name not in _warned and recommended_temperature(record) not in (None, asked):
        _warned.add(name)
        logger.warning("%s", sampling_note(name, record, asked))


def is_number(value: Any) -> bool:
    """Whether a value of a free-form record is a figure."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def dict_or_empty(value: Any) -> dict[str, Any]:
    """A value of a free-form record where it is a mapping, else {}."""
    return value if isinstance(value, dict) else {}
