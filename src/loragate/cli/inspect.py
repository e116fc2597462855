"""`loragate inspect`: an adapter's prospects in seconds, without loading the base model's weights."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loragate.cli.arguments import Command, comma_list
from loragate.cli.display import console, next_evaluation
from loragate.cli.preflight import quiet_logging
from loragate.errors import ConfigError
from loragate.gates.recommended import at


@dataclass(frozen=True)
class InspectOptions:
    """Settings of `loragate inspect`.

    Attributes:
        adapter: PEFT LoRA adapter or gated folder, or owner/name[@revision] of one on the hub.
        base: base model to use instead of the one the adapter names; only its configuration is read.
        target_modules: gate only these modules (names separated by commas).
        json: print the findings as JSON.
        trust_remote_code: run model code from the hub.
    """

    adapter: str
    base: str = ""
    target_modules: str = ""
    json: bool = False
    trust_remote_code: bool = False


def inspect_adapter(options: InspectOptions) -> dict[str, Any]:
    """Findings as plain data: modules with verdicts, parameters, cost, endings, problems."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from loragate.analysis.plan_model import count_parameters
    from loragate.gates import examine_adapter
    from loragate.models import base_config, explained, require_here, resolve

    place = resolve(options.adapter, options.base)
    if place.kind == "base":
        resolve(options.adapter, options.base, expect="adapter")  # says what it holds instead
    require_here("base model", place.base.name)
    gates, place = gates_of(place), place.plain
    with explained("base model", place.base.name):
        config = base_config(place.base, options.trust_remote_code)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=options.trust_remote_code)
    dtype_bytes = 2 if str(getattr(config, "dtype", "")).endswith("16") else 4
    total = sum(parameter.numel() for parameter in model.parameters())
    record = place.peft_config()
    # initialisations that read the base's weights cannot run without them
    initialised, record.init_lora_weights = record.init_lora_weights, True
    with explained("adapter", options.adapter), torch.device("meta"):
        model = get_peft_model(model, record)
    record.init_lora_weights = initialised
    targets = comma_list(options.target_modules) or None
    verdicts = examine_adapter(model, "default", targets)
    gated = [verdict for verdict in verdicts if verdict.status == "gate"]
    trainable = _why_not_trainable(verdicts)
    untrained = _untrained_modules(place.adapter)
    problems = [f"{len(untrained)} modules have B = 0 (never trained): nothing to gate there"] if untrained else []
    problems += [trainable] if trainable else []
    findings: dict[str, Any] = {
        "adapter": options.adapter,
        **({"gates": gates} if gates else {}),
        "base": place.base.name,
        "rank": record.r,
        "alpha": record.lora_alpha,
        "modules": [asdict(verdict) for verdict in verdicts],
        "counts": dict(Counter(verdict.status for verdict in verdicts)),
        "base_parameters": total,
        "whole_copies": sorted(record.modules_to_save or []),
        "trainable": not trainable,
        "problems": problems,
    }
    if gated:
        model.unload()  # a head under LoRA and whole copies of modules are not weights of the base
        modules = [(verdict.d_in, verdict.d_out, verdict.rank) for verdict in gated]
        findings["cost"] = _cost(replace(count_parameters(model, config), base=total, modules=modules), dtype_bytes)
    findings["endings"] = _endings(place, options.trust_remote_code)
    problems.extend(findings["endings"].get("problems", []))
    return findings


def _why_not_trainable(verdicts: list[Any]) -> str:
    """Why gates could be attached but not trained; empty if they can be."""
    from loragate.errors import GateError
    from loragate.gates.eligibility import require_trainable

    try:
        require_trainable(verdicts)
    except GateError as error:
        return str(error)
    return ""


def gates_of(place: Any) -> dict[str, Any]:
    """What a gated folder says of its gates; {} for a plain adapter."""
    if place.kind != "gated":
        return {}
    from loragate.gates.schema import read_tensors

    record = place.gates
    read_tensors(place.folder, record)
    selection = record.get("selection") or {}
    return {
        "source": place.source,
        "lower": record["gate"]["lower"],
        "upper": record["gate"]["upper"],
        "granularity": record["gate"]["granularity"],
        "modules": len(record["modules"]),
        "accepted": selection.get("accepted") if isinstance(selection, dict) else None,
        "temperature": place.recommended_temperature,
    }


def _cost(parameters: Any, dtype_bytes: int) -> dict[str, Any]:
    cost = parameters.cost(sequence=512)
    return {
        "gate_parameters": cost.gate_parameters,
        "gate_share": cost.gate_parameters / parameters.base,
        "lora_parameters": cost.lora_parameters,
        "tflop_per_million_tokens": cost.stage_two / 1e6,
        "ratio_to_lora_step": cost.ratio,
        "base_gib": parameters.base * dtype_bytes / 2**30,
        "optimizer_mib": cost.gate_parameters * 16 / 2**20,
    }


def _endings(place: Any, trust: bool) -> dict[str, Any]:
    from loragate.data import ending_health
    from loragate.errors import LoragateError
    from loragate.models import Loading, generation_config, open_tokenizer

    try:
        tokenizer = open_tokenizer(place, Loading(trust=trust))
    except LoragateError as error:
        return {"problems": [f"the tokenizer could not be read, so endings were not checked: {error}"]}
    report = ending_health(tokenizer, None, generation_config(place.base, trust))
    return {
        "end_tokens": list(report.end_tokens),
        "stop_ids": list(report.stop_ids),
        "stops": report.stops,
        "problems": report.problems,
    }


def _untrained_modules(adapter: Path) -> list[str]:
    """Modules whose B factor is exactly zero, read from the adapter's file where it is local."""
    from safetensors import SafetensorError, safe_open

    path = adapter / "adapter_model.safetensors"
    if not path.is_file():
        return []
    try:
        with safe_open(str(path), framework="pt") as file:
            names = [name for name in file.keys() if ".lora_B." in name]  # noqa: SIM118
            return [name for name in names if not bool(file.get_tensor(name).any())]
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file ({error})") from error


def run(options: InspectOptions) -> int:
    """Print the findings; status 1 if the adapter cannot be gated."""
    quiet_logging()
    found = inspect_adapter(options)
    refused = [module for module in found["modules"] if module["status"] == "refuse"]
    if options.json:
        print(json.dumps(found, indent=2))
        return 1 if refused or not found.get("cost") or not found["trainable"] else 0
    out = console()
    out.print(f"adapter {found['adapter']} (r {found['rank']}, α {found['alpha']:g}) on {found['base']}", markup=False)
    if gates := found.get("gates"):
        off = "; they are off: the folder answers as its plain adapter" if gates["accepted"] is False else ""
        out.print(
            f"gates: {gates['modules']} modules, λ in [{gates['lower']:g}, {gates['upper']:g}], one for each "
            f"{gates['granularity']}{off}",
            markup=False,
        )
        if gates["temperature"] is not None:
            out.print(f"recommended sampling: {at(gates['temperature'])}", markup=False)
    for status, words in (("gate", "can be gated"), ("leave", "left at full strength"), ("refuse", "cannot be gated")):
        chosen = [module for module in found["modules"] if module["status"] == status]
        if not chosen:
            continue
        kinds = Counter(module["path"].rsplit(".", 1)[-1] for module in chosen)
        listed = ", ".join(f"{name} ×{count}" for name, count in kinds.items())
        out.print(f"  {len(chosen):>4} module{'s' if len(chosen) > 1 else ''} {words}: {listed}", markup=False)
        for reason in sorted({module["reason"] for module in chosen if module["reason"]}):
            out.print(f"       because {reason}", markup=False)
    if found["whole_copies"]:
        out.print(
            f"  whole copies of {', '.join(found['whole_copies'])} (modules_to_save) come with the adapter: no gate acts on them",
            markup=False,
        )
    cost = found.get("cost")
    if cost:
        out.print(
            f"gates: {cost['gate_parameters']:,} parameters, {100 * cost['gate_share']:.3f} % of the base "
            f"(the adapter has {cost['lora_parameters']:,})"
        )
        out.print(
            f"cost: {cost['tflop_per_million_tokens']:,.1f} TFLOP per million tokens, {cost['ratio_to_lora_step']:.2f} of a LoRA "
            f"step (512-token sequences, 75 % response); memory: base {cost['base_gib']:.2f} GiB, optimiser "
            f"{cost['optimizer_mib']:.1f} MiB, activations with the batch"
        )
    endings = found["endings"]
    if "stops" in endings:
        ends = " ".join(endings["end_tokens"]) or "nothing"
        out.print(
            f"endings: a turn ends with {ends}; generation {'stops' if endings['stops'] else 'does NOT stop'} there",
            markup=False,
        )
    for problem in found["problems"]:
        out.print(f"problem: {problem}", markup=False)
    if refused or not cost or not found["trainable"]:
        out.print("next: this adapter cannot be gated as it is; see the reasons above")
        return 1
    if gates:
        out.print(next_evaluation(gates["source"], "DIR"), markup=False)
        return 0
    out.print(f"next: loragate calibrate --adapter {found['adapter']} --data FILE --probe FILE --out DIR", markup=False)
    return 0


COMMAND = Command(
    name="inspect",
    summary="Which modules of an adapter can be gated, which not and why; gate parameters, cost, end-of-turn tokens.",
    options=InspectOptions,
    run=run,
    examples=("loragate inspect path/to/adapter", "loragate inspect owner/adapter --json"),
    positional="adapter",
)
