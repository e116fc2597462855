"""Answers for `serving.http_app` from a model in memory: base, plain adapter, gated adapter and further adapters by name.

A name may carry an override of λ (`gated@unit`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from loragate.errors import ConfigError, DataError
from loragate.evaluation.variants import ModelVariant, acting
from loragate.gates import constant_gate, gate_override, load_gates
from loragate.gates.override import split_name
from loragate.gates.recommended import chosen_temperature, warn_elsewhere
from loragate.generation import SamplingConfig, TransformersEngine
from loragate.generation.requests import begun, rendered, tokenize_prompts
from loragate.models import ModelSource, explained
from loragate.serving.http_app import Answer, Backend, ChatRequest, CompletionRequest

logger = logging.getLogger("loragate")
NEW_TOKENS = 512  # of an answer to a request that names no limit
NAMES = {"base": ("base",), "adapter": ("base", "adapter"), "gated": ("base", "adapter", "gated")}


@dataclass(frozen=True)
class Row:
    """A served name: what acts, on which of the model's adapters, of which kind, an override that it always has, and
    `ModelSource.sampling` of its folder."""

    acts: Any
    kind: Any
    adapter: str = "default"
    override: Any = None
    sampling: Mapping[str, Any] | None = None


def add_adapters(model: Any, places: Mapping[str, ModelSource]) -> dict[str, Row]:
    """Load more adapters, gated or plain, beside the one that a PeftModel has; places and rows by served name."""
    rows: dict[str, Row] = {}
    loaded: dict[str, str] = {}
    for name, place in places.items():
        folder = str(place.folder)
        if folder not in loaded:
            loaded[folder] = f"served{len(loaded)}"
            with explained("adapter", str(place.adapter)):
                model.load_adapter(str(place.adapter), adapter_name=loaded[folder])
            if place.kind == "gated":
                load_gates(model, folder, loaded[folder])
        rows[name] = Row(place.kind, place.kind, loaded[folder], place.override, place.sampling)
    return rows


def transformers_backend(
    model: Any,
    tokenizer: Any,
    kind: str,
    *,
    system: str = "none",
    more: Mapping[str, Row] | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> Backend:
    """The answers of a loaded model.

    A request without a temperature is sampled as the folder that it names recommends. The base, the plain adapter beside gates
    and a name with an override of λ were not asked when that was found; they keep temperature 1.

    Args:
        model, tokenizer: base, PeftModel or gated PeftModel.
        kind: "base", "adapter" or "gated"; decides the names that can be asked for.
        system: "none" leaves out a default system message that the template injects, "keep" keeps it.
        more: rows of further adapters, from `add_adapters`.
        sampling: `ModelSource.sampling` of the model's folder.
    """
    engine = TransformersEngine(model, tokenizer, batch_size=16)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    rows = {name: Row(name, kind, sampling=sampling if name == kind else None) for name in NAMES[kind]} | dict(
        more or {}
    )

    def answer(asked: CompletionRequest | ChatRequest) -> tuple[int, list[Answer]]:
        if isinstance(asked, CompletionRequest):
            prompts = [begun(text, tokenizer) for text in asked.prompt]
        else:
            prompts = [rendered([message.model_dump() for message in asked.messages], tokenizer, system)]
        limit = asked.limit or NEW_TOKENS
        prompt_ids, limits = tokenize_prompts(tokenizer, prompts, limit, positions)
        if asked.limit and min(limits) < limit:
            raise DataError(
                f"max_tokens={limit} would pass the model's {positions} positions: set max_tokens to {min(limits)} or less"
            )
        row = rows.get(asked.model)
        # a name with an override behind it is no key of `rows`, and recommends nothing
        shown = row.sampling if row is not None and row.override is None else None
        temperature = chosen_temperature(shown, asked.temperature)
        warn_elsewhere(asked.model, shown, temperature, logger)
        config = SamplingConfig(temperature, asked.top_p, limit, asked.n, asked.seed, tuple(asked.stop))
        with answering(model, rows, asked.model):
            samples = engine.generate(prompts, config)
        # the protocol knows two reasons, the engine a third one, "stop_text"
        reasons = ["length" if one.finish_reason == "length" else "stop" for one in samples]
        answers = [Answer(one.text, why, len(one.token_ids)) for one, why in zip(samples, reasons, strict=True)]
        return sum(map(len, prompt_ids)), answers

    return Backend(tuple(rows), answer)


@contextmanager
def answering(model: Any, rows: Mapping[str, Row], name: str) -> Iterator[None]:
    """The model as the served name, with the override behind it, inside the context.

    Raises:
        ConfigError: for an override on the base or on an adapter without gates, which takes a constant alone.
    """
    override = None
    if name not in rows:
        name, override = split_name(name)
    row = rows[name]
    if override is not None and row.override is not None:
        raise ConfigError(f"{name} has an override already; ask for one of the two")
    override = override or row.override
    if override is not None and row.acts != "gated" and (row.acts == "base" or override.constant is None):
        raise ConfigError(f"{name} has no gates: only an adapter takes an override, and a plain one @constant=C alone")
    with ExitStack() as stack:
        # adapters that were loaded beside the first one act only while they are the active one
        if row.kind != "base" and model.active_adapter != row.adapter:
            stack.callback(model.set_adapter, model.active_adapter)
            model.set_adapter(row.adapter)
        if override is None:
            stack.enter_context(acting(model, ModelVariant(row.acts), row.kind))
        elif override.constant is not None:
            stack.enter_context(constant_gate(model, override.constant, row.adapter))
        else:
            stack.enter_context(gate_override(model, override.minimum, override.maximum, adapter_name=row.adapter))
        yield
