"""`loragate verify`: the runtime, the reference and the checks together; one table and one record."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from loragate.display import Display, console
from loragate.errors import DONE, FAILED, ConfigError, LoragateError
from loragate.evaluation import agreement
from loragate.evaluation.agreement import ServedAnswer
from loragate.evaluation.results import VariantAgreement
from loragate.evaluation.variants import ModelVariant
from loragate.files import require_empty_folder, write_json
from loragate.gates.control import base_unavailable_reason, zero_unavailable_reason
from loragate.models import Loaded, open_model, resolve
from loragate.models.source import ModelSource
from loragate.report.table import Line, Table
from loragate.serving.settings import VerifySettings, named_adapters
from loragate.serving.verify.checks import FAILS, NO_LOGPROBS, PASSES, UNMEASURED, Check, Checks, Prompts
from loragate.serving.verify.endpoint import Endpoint
from loragate.serving.verify.llama_cpp import LlamaCpp
from loragate.serving.verify.served import ADAPTER, BASE, Runtime, Target

RECORD = "verify.json"
UNLIMITED = 1 << 20


class References:
    """The models of transformers that served answers are read again with; one adapter is in memory at a time."""

    def __init__(self, settings: VerifySettings, place: ModelSource, others: Mapping[str, ModelSource]) -> None:
        self.settings, self.others = settings, others
        self.loaded: Loaded = open_model(place, settings)

    def read(self, served: Mapping[Target, Sequence[ServedAnswer]]) -> dict[Target, VariantAgreement]:
        """How far answers lie from transformers, and which model explains them best."""
        own = {target: answers for target, answers in served.items() if target.name in (BASE, ADAPTER)}
        found = self._of(self.loaded, own)
        for target, answers in served.items():
            if target not in own:
                found |= self._of(open_model(self.others[target.name], self.settings), {target: answers})
        return {target: found[target] for target in served}

    def _of(self, loaded: Loaded, served: Mapping[Target, Sequence[ServedAnswer]]) -> dict[Target, VariantAgreement]:
        variants = {_variant(target, loaded): target for target in served}
        answers = {variant: served[target] for variant, target in variants.items()}
        known = int(loaded.model.get_input_embeddings().weight.shape[0])  # an adapter may lie around them
        for variant, target in variants.items():
            for token in (token for answer in answers[variant] for token in answer.token_ids):
                if not 0 <= token < known:
                    raise LoragateError(
                        f"{target.label} answered with token {token}, and the base here has {known} tokens: the server has "
                        "another base, or another vocabulary"
                    )
        found = agreement.check_logprobs(loaded, answers, self.settings.dtype)
        judged = {}
        for variant, target in variants.items():
            one = found[variant.label]
            nearest = target.label if one.nearest == variant.label else one.nearest
            if limit := self.settings.limit:
                agrees = one.mean is not None and one.mean <= limit and nearest == target.label
                one = replace(one, limit=limit, agrees=agrees)
            judged[target] = replace(one, nearest=nearest)
        return judged


def _variant(target: Target, loaded: Loaded) -> ModelVariant:
    if target.name == BASE:
        return ModelVariant(BASE)
    if target.strength is None:
        return ModelVariant(loaded.kind)
    return ModelVariant.scaled(target.strength)


def verify(settings: VerifySettings) -> int:
    """Check a runtime and print what was found; returns the exit status, 1 where a check fails or the adapter was not compared.

    Raises:
        ConfigError: for settings that name no runtime, or a model that is not served.
        LoragateError: for a runtime that does not answer.
    """
    if bool(settings.endpoint) == bool(settings.llama_cpp):
        raise ConfigError("loragate verify needs a runtime: either --endpoint URL or --llama-cpp BASE.gguf")
    other = ("lora",) if settings.endpoint else ("adapters", "served_adapter", "served_base", "strength_by")
    if idle := [
        f"--{name.replace('_', '-')}" for name in other if getattr(settings, name) != getattr(VerifySettings, name)
    ]:
        raise ConfigError(
            f"{idle[0]} has no effect with {'--endpoint' if settings.endpoint else '--llama-cpp'}; leave it out"
        )
    if settings.out:
        require_empty_folder(Path(settings.out))
    place, display = resolve(settings.adapter, settings.base, allow_override=True), Display()
    if place.kind == "base":
        raise ConfigError(
            f"{settings.adapter} is no adapter, plain or gated; a server of a base alone has nothing to check here"
        )
    others = {
        name: replace(other, base=place.base)
        for name, other in named_adapters(settings.adapters, (BASE, ADAPTER)).items()
    }
    with display.job("loading the reference"):
        references = References(settings, place, others)
    loaded = references.loaded
    tokenizer = loaded.tokenizer
    prompts = Prompts(tokenizer, loaded.max_positions or UNLIMITED, settings.tokens)
    runtime: Runtime
    if settings.endpoint:
        runtime = Endpoint(settings, place, [*others], tokenizer, prompts.draw())
    else:
        runtime = LlamaCpp(settings)
    with display.job(f"checking {runtime.label}"):
        checks = Checks(runtime, prompts, references.read, settings)
        has_gates = "the served adapter has gates; parity at 1 compares with the adapter beneath them"
        why_unlike_base = base_unavailable_reason if runtime.scales_all_modules else zero_unavailable_reason
        unlike = {0.0: why_unlike_base(loaded.model), 1.0: has_gates if place.kind == "gated" else ""}
        found = [checks.chat_template(tokenizer), checks.stop_tokens(loaded.endings, tokenizer)]
        found += [*checks.parity(), *checks.batches(), *checks.strengths(unlike), *checks.isolation()]
    if settings.llama_cpp and not place.base.is_gguf:
        found = _explain_other_base(found, settings.llama_cpp, place.base.name)
    record = _record(runtime, settings, place, found)
    if settings.out:
        Path(settings.out).mkdir(parents=True, exist_ok=True)
        write_json(Path(settings.out) / RECORD, record)
    if settings.json:
        print(json.dumps(record, indent=2))
    else:
        _print(runtime, place, found)
        if not record["compared"]:
            console().print(f"the adapter was not compared: {NO_LOGPROBS}", soft_wrap=True)
    return DONE if record["passes"] else FAILED


def _explain_other_base(found: Sequence[Check], file: str, base: str) -> list[Check]:
    """The first failed comparison with transformers gets another cause that it may have: a file in fewer bits than the base."""
    failed = next((one for one in found if one.verdict == FAILS and "with transformers" in one.name), None)
    why = (
        f"{file} was compared with {base}; if it holds that base in fewer bits, this may be its rounding: compare a plain adapter "
        f"on the file itself, with --base {file}"
    )
    return [replace(one, note="; ".join(filter(None, (one.note, why)))) if one is failed else one for one in found]


def _record(runtime: Runtime, settings: VerifySettings, place: ModelSource, found: Sequence[Check]) -> dict[str, Any]:
    compared = any(one.verdict != UNMEASURED and one.of == ADAPTER for one in found if one.name.startswith("parity"))
    rows = [
        {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(one).items()
        }
        for one in found
    ]
    return {
        "runtime": runtime.label,
        "adapter": place.ref.absolute_name,
        "base": place.base.absolute_name,
        "dtype": settings.dtype,
        "compared": compared,
        "passes": compared and all(one.verdict != FAILS for one in found),
        "checks": rows,
    }


def _print(runtime: Runtime, place: ModelSource, found: Sequence[Check]) -> None:
    out = console()
    lines = [
        Line(one.name, [(one.of,), (_shown(one.figure, one.unit),), (_shown(one.limit, one.unit),), (one.verdict,)])
        for one in found
    ]
    out.print(Table(f"{runtime.label} serving {place.ref.name}", ("check", "of", "figure", "limit", "verdict"), lines))
    for one in found:
        if one.note:
            out.print(f"{one.name}, {one.of}: {one.note}", soft_wrap=True)
    failed = [one.name for one in found if one.verdict == FAILS]
    passed = sum(one.verdict == PASSES for one in found)
    if failed:
        out.print(f"FAILS: {', '.join(dict.fromkeys(failed))}")
    else:
        open_ones = [one.name for one in found if one.verdict == UNMEASURED]
        out.print(
            f"{passed} checks pass" + (f"; not measured: {', '.join(dict.fromkeys(open_ones))}" if open_ones else "")
        )


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit != "nats":
        return f"{value:g}"
    return f"{value:.1e} nats" if math.isfinite(value) else "other tokens"
