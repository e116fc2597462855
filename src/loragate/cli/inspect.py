"""`loragate inspect`: an adapter's prospects in seconds, without loading the base model's weights."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from loragate.cli.arguments import Command
from loragate.display import console, next_evaluation
from loragate.gates.recommended import at
from loragate.validate import comma_list


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


def run(options: InspectOptions) -> int:
    """Print the findings; status 1 if the adapter cannot be gated."""
    from loragate.analysis.inspection import inspect_adapter

    found = inspect_adapter(
        options.adapter,
        options.base,
        target_modules=comma_list(options.target_modules),
        trust_remote_code=options.trust_remote_code,
    )
    # one refused module is enough, as the adapter would then act there ungated; without a cost nothing at all can be gated
    hopeless = "cost" not in found or "refuse" in found["counts"] or not found["trainable"]
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found, hopeless)
    return int(hopeless)


def _print(found: dict[str, Any], hopeless: bool) -> None:
    out, gates, cost = console(), found.get("gates"), found.get("cost")
    if "modules" not in found:
        out.print(f"adapter {found['adapter']} cannot be used")
        _print_findings(found)
        return
    out.print(f"adapter {found['adapter']} (r {found['rank']}, α {found['alpha']:g}) on {found['base']}")
    if gates:
        off = "; they are off: the folder answers as its plain adapter" if gates["off"] else ""
        out.print(
            f"gates: {gates['modules']} modules, λ in [{gates['lower']:g}, {gates['upper']:g}], one for each "
            f"{gates['granularity']}{off}"
        )
        if gates["temperature"] is not None:
            out.print(f"recommended sampling: {at(gates['temperature'])}")
    for status, words in (("gate", "can be gated"), ("leave", "left at full strength"), ("refuse", "cannot be gated")):
        chosen = [module for module in found["modules"] if module["status"] == status]
        if not chosen:
            continue
        # the last part of a path is what people call a kind of module: q_proj, up_proj
        kinds = Counter(module["path"].rsplit(".", 1)[-1] for module in chosen)
        listed = ", ".join(f"{name} ×{count}" for name, count in kinds.items())
        out.print(f"  {len(chosen):>4} module{'s' if len(chosen) > 1 else ''} {words}: {listed}")
        for reason in sorted({module["reason"] for module in chosen if module["reason"]}):
            out.print(f"       because {reason}")
    if cost:
        out.print(
            f"gates: {cost['gate_parameters']:,} parameters, {100 * cost['gate_share']:.3f} % of the base "
            f"(the adapter has {cost['lora_parameters']:,})"
        )
        out.print(
            f"a step of training them: {cost['tflop_per_million_tokens']:,.1f} TFLOP per million tokens, "
            f"{cost['ratio_to_lora_step']:.2f} of a LoRA step; one row of 2,048 tokens takes {cost['training']}"
        )
    endings = found["endings"]
    if "stops" in endings:
        ends = " ".join(endings["end_tokens"]) or "nothing"
        out.print(
            f"endings: a turn ends with {ends}; generation {'stops' if endings['stops'] else 'does NOT stop'} there"
        )
    _print_findings(found)
    for problem in found["problems"]:
        out.print(f"problem: {problem}")
    if hopeless:
        out.print("next: this adapter cannot be gated as it is; see the reasons above")
    elif gates:
        out.print(next_evaluation(gates["source"], "DIR"))
    else:
        adapter = found["adapter"]
        out.print(f"next: loragate calibrate --adapter {adapter} --data FILE --dev-data FILE --out DIR")


def _print_findings(found: dict[str, Any]) -> None:
    for one in found["findings"]:
        console().print(f"{one['severity']}: {one['text']}")


COMMAND = Command(
    name="inspect",
    options=InspectOptions,
    run=run,
    examples=("loragate inspect path/to/adapter", "loragate inspect owner/adapter --json"),
    positional="adapter",
)
