"""`loragate eval`: base, adapter and gated adapter side by side on the same questions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from loragate.cli.arguments import Command, require_given
from loragate.cli.options import ModelOptions, OutputOptions
from loragate.evaluation.settings import EngineSettings, GradingSettings, TaskSettings


@dataclass(frozen=True)
class EvaluationInputs(ModelOptions, EngineSettings, TaskSettings, GradingSettings, OutputOptions):
    """Settings shared by commands that evaluate.

    Attributes:
        base: where the base model is, instead of the recorded one.
    """

    base: str = ""


@dataclass(frozen=True)
class EvalOptions(EvaluationInputs):
    """Settings of `loragate eval`.

    Attributes:
        model: gated folder, PEFT adapter or base model, or its hub id; owner/name@revision for an adapter.
        sweep: folder of `loragate sweep`, in place of model: every finished cell is a row beside the adapter, and heat maps are
            drawn.
        controls: cheap: adapter and gates at lower temperatures and greedy, and one λ; full: random gates too; alone: nothing
            beside the model.
        constants: constant λ of the cheap controls, separated by commas.
    """

    model: str = ""
    sweep: str = ""
    controls: Literal["cheap", "full", "none", "alone"] = "cheap"
    constants: str = "0.5"


def run(options: EvalOptions) -> int:
    """Load, prove that adapter and gates act, sample, judge, tabulate."""
    require_given(COMMAND, replace(options, model=options.model or options.sweep))
    from loragate.cli import evaluating

    return evaluating.evaluate_sweep(options) if options.sweep else evaluating.evaluate(options)


COMMAND = Command(
    name="eval",
    options=EvalOptions,
    run=run,
    needs=("model", "out"),
    examples=(
        "loragate eval --model gated --suite math --out runs/math",
        "loragate eval --model gated --tasks math500 --data math500=test.jsonl --limit 100 --samples 4 --out runs/quick",
        "loragate eval --model gated --suite math --out runs/math --resume",
        "loragate eval --sweep runs/grid --suite math --engine vllm --out runs/grid-math",
    ),
    common=(
        "suite tasks data limit samples temperature max_new_tokens "
        "seed controls sweep engine batch_size base device resume"
    ),
)
