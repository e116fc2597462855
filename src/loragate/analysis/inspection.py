"""An adapter's prospects in seconds, without the base model's weights: what can be gated, what it costs, where answers end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from loragate.analysis.plan import GIB, estimate
from loragate.data import ending_health
from loragate.errors import GateError, LoragateError
from loragate.gates import examine_adapter
from loragate.gates.adapter_folder import AdapterFolder, UnusableAdapterError
from loragate.gates.eligibility import require_trainable
from loragate.gates.schema import read_tensors
from loragate.models import Loading, base_config, explained, generation_config, open_tokenizer, require_here, resolve
from loragate.models.loading import require_causal
from loragate.models.peft_loading import plan_peft


def _told(contents: AdapterFolder) -> dict[str, Any]:
    return {
        "findings": [{**asdict(one), "text": str(one)} for one in contents.findings],
        "beside": list(contents.beside),
    }


def inspect_adapter(
    adapter: str, base: str = "", *, target_modules: Sequence[str] = (), trust_remote_code: bool = False
) -> dict[str, Any]:
    """Findings as plain data: modules with verdicts, parameters, cost, endings, problems.

    Args:
        adapter: PEFT LoRA adapter or gated folder, or owner/name[@revision] of one on the hub.
        base: base model instead of the one that the adapter names; only its configuration is read.
        target_modules: gate only these; all that can be gated where there are none.

    Returns:
        "findings" on the adapter's files ({code, severity, message, remedy, evidence, text} each) and "beside", what it changes
        beside LoRA's factors. Unless one of them is an error: "modules" ({path, status, reason, …} each), "counts" by status,
        "trainable", "problems", "endings"; "cost" where something can be gated; "gates" for a gated folder.

    Raises:
        ConfigError: for a place that holds no adapter.
        ArtifactError: for gates that cannot be read, and an adapter that does not fit the base.
    """
    try:
        place = resolve(adapter, base)
    except UnusableAdapterError as error:
        return {"adapter": adapter, **_told(error.folder)}
    if place.kind == "base":
        resolve(adapter, base, expect="adapter")  # says what it holds instead
    require_here("base model", place.base.name)
    gates: dict[str, Any] = {}
    if place.kind == "gated":
        stored: Any = place.gates
        read_tensors(place.folder, stored)
        gates = {
            "source": place.source,
            **{key: stored["gate"][key] for key in ("lower", "upper", "granularity")},
            "modules": len(stored["modules"]),
            "off": bool(place.gates_off),
            "temperature": place.recommended_temperature,
        }
    place = place.plain
    with explained("base model", place.base.name):
        config = base_config(place.base, trust_remote_code)
        require_causal(config, place.base.name)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    total = sum(parameter.numel() for parameter in model.parameters())
    with explained("adapter", adapter):
        model = plan_peft(model, place.adapter)
    record, contents = model.peft_config["default"], place.contents
    verdicts = examine_adapter(model, "default", list(target_modules) or None)
    problems: list[str] = []
    trainable = True
    try:
        require_trainable(verdicts)
    except GateError as error:
        trainable = False
        problems.append(str(error))
    findings: dict[str, Any] = {
        "adapter": adapter,
        **({"gates": gates} if gates else {}),
        "base": place.base.name,
        "rank": record.r,
        "alpha": record.lora_alpha,
        "modules": [asdict(verdict) for verdict in verdicts],
        "counts": dict(Counter(verdict.status for verdict in verdicts)),
        "base_parameters": total,
        **_told(contents),
        "trainable": trainable,
        "problems": problems,
    }
    modules = [(verdict.d_in, verdict.d_out, verdict.rank) for verdict in verdicts if verdict.status == "gate"]
    if modules:
        with torch.device("meta"):  # anew: a head under LoRA and whole copies of modules are not weights of the base
            bare = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        stored_in: Any = str(getattr(config.get_text_config(), "dtype", None) or "float32").removeprefix("torch.")
        asked: dict[str, Any] = {"adapter": modules, "base": stored_in}
        gating, lora = (estimate(bare, stage, **asked) for stage in ("calibrate", "sft"))
        lighter = estimate(bare, gradient_checkpointing=True, **asked)
        findings["cost"] = {
            "gate_parameters": gating.trainable,
            "gate_share": gating.trainable / total,
            "lora_parameters": lora.trainable,
            "tflop_per_million_tokens": gating.flops / 1e6,
            "ratio_to_lora_step": gating.flops / lora.flops,
            "peak_gib": gating.peak / GIB + 1,
            "training": f"{gating.sentence()}; with gradient checkpointing {lighter.peak / GIB + 1:.1f}",
        }
    try:
        tokenizer = open_tokenizer(place, Loading(trust_remote_code=trust_remote_code))
    except LoragateError as error:
        problems.append(f"the tokenizer could not be read, so endings were not checked: {error}")
        return findings | {"endings": {"problems": problems[-1:]}}
    report = ending_health(tokenizer, None, generation_config(place.base, trust_remote_code))
    problems.extend(report.problems)
    findings["endings"] = {
        "end_tokens": list(report.end_tokens),
        "stop_ids": list(report.stop_ids),
        "stops": report.stops,
        "problems": report.problems,
    }
    return findings
