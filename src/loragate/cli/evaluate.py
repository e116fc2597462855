"""`loragate eval`: base, adapter and gated adapter side by side on the same questions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from loragate.cli.arguments import Command
from loragate.cli.options import EvaluationInputs
from loragate.errors import ConfigError
from loragate.evaluation.settings import parse_constants


@dataclass(frozen=True)
class EvalOptions(EvaluationInputs):
    """Settings of `loragate eval`.

    Attributes:
        model: gated folder, PEFT adapter or base model, or its hub id; owner/name@revision for an adapter.
        sweep: folder of `loragate sweep`, in place of model: every finished cell is a row beside the adapter, and heat maps are
            drawn.
        controls: cheap: one λ, and everything at 0.6, 0.3 and greedily as well, or at --temperature alone; full: random gates too;
            alone: nothing beside the model.
        constants: constant λ of the cheap controls, separated by commas; lower=0.5 is one for the lower third of the layers (also
            middle, upper, attention, mlp, q_proj).
    """

    INSTEAD: ClassVar[dict[str, str]] = {"model": "sweep"}
    sweep: str = ""
    controls: Literal["cheap", "full", "none", "alone"] = "cheap"
    constants: str = "0.5"


def run(options: EvalOptions) -> int:
    """Load, prove that adapter and gates act, sample, judge, tabulate."""
    if options.sweep and options.controls == "full":
        raise ConfigError("--controls full has no effect with --sweep, whose rows are the adapter and the cells")
    constants = parse_constants(options.constants)
    from loragate.cli import evaluation_runs

    if options.sweep:
        return evaluation_runs.evaluate_sweep(options, options.sweep)
    return evaluation_runs.evaluate(options, options.controls, constants)


COMMAND = Command(
    name="eval",
    options=EvalOptions,
    run=run,
    required_at_run=("model", "out"),
    examples=(
        "loragate eval --model gated --suite math --out runs/math",
        "loragate eval --model gated --tasks math500 --data math500=test.jsonl --limit 100 --out runs/quick",
        "loragate eval --model gated --suite math --temperature 1,0.6,0.3,0 --out runs/temperatures",
        "loragate eval --sweep runs/grid --suite math --engine vllm --out runs/grid-math",
    ),
    common="suite tasks data limit samples temperature max_new_tokens seed controls sweep engine batch_size base resume",
)
