"""`loragate diagnose`: look at what an adapter and its gates do. Five looks, one set of settings, one record each.

This file holds the settings; `loragate.effects` says which look uses which, and the looks have a file each.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from loragate.cli.arguments import Command, require_given
from loragate.cli.evaluate import EvaluationInputs
from loragate.effects import require_effect
from loragate.validate import Count

Look = Literal["entropy", "gates", "interventions", "alignment", "tokens"]


@dataclass(frozen=True)
class DiagnoseOptions(EvaluationInputs):
    """Settings of `loragate diagnose`.

    Attributes:
        what: which look to take.
        model: gated folder, or owner/name[@revision] of one on the hub; for entropy also a plain adapter.
        rows: (entropy, alignment) prompts and responses to read, in the formats of calibrate's --data.
        max_rows: (entropy, alignment) first rows, or answers, to read; 256 for entropy, 48 for alignment.
        max_length: (entropy, alignment, tokens) longest row, or answer, in tokens; `tokens` takes at most 512.
        run: (gates, alignment, tokens) folder of `loragate eval` whose stored answers are read: all tasks, or those of --tasks.
        of: (gates, alignment) model whose answers are read; by default gated for gates,
            adapter for alignment.
        answers: (gates, alignment) answers to read per question.
        limit: first questions of each task only; all of them by default, 8 for tokens.
        suppress: (entropy) signs of ΔH at which the delta is switched off: negative and/or positive.
        threshold: (entropy) nats that ΔH must exceed.
        prompt_too: (entropy) switch the delta off inside the prompt too, not only where tokens of the answer are
            predicted.
        position: (gates) "written" counts λ where a token is predicted, "read" where it is read.
        interventions: (interventions) overrides of λ, separated by commas: noreverse, noextrapolate, unit, off,
            constant=0.5, clip=-1:2; the first four if empty.
        value: (alignment) source of the task value.
        reference: (alignment) with --value reference: base, adapter, or a model with the same vocabulary.
        positions: (alignment) with --value rollouts: positions per answer.
        actions: (alignment) with --value rollouts: likeliest tokens tried at each position.
        rollouts: (alignment) with --value rollouts: completions of each token tried, by the plain adapter.
        k: (alignment) support of the entropy objective, 0 for the whole vocabulary; by default the one that the gates were trained
            with.
        checkpoints: (alignment) run folder of a calibration, whose checkpoints are measured too.
    """

    what: Look | None = None
    model: str = ""
    rows: str = ""
    max_rows: Annotated[int, Ge(2)] | None = None  # intervals are over rows
    max_length: Count = 4096
    run: str = ""
    of: Literal["gated", "adapter", "base"] | None = None
    answers: Count = 4
    suppress: str = "negative,positive"
    threshold: float = 0.0
    prompt_too: bool = False
    position: Literal["written", "read"] = "written"
    interventions: str = ""
    value: Literal["reference", "reward", "rollouts"] = "reference"
    reference: str = "base"
    positions: Count = 4
    actions: Count = 8
    rollouts: Count = 4
    k: int | None = None
    checkpoints: str = ""


def run(options: DiagnoseOptions) -> int:
    """Check what was asked for, then hand over to the look."""
    require_given(COMMAND, options)
    require_effect("diagnose", options, flags=True)
    return importlib.import_module(f"loragate.cli.diagnose_{options.what}").run(options)


EXAMPLES = (
    "loragate diagnose entropy --model gated --rows held-out.jsonl --suite math --limit 100 --out runs/entropy",
    "loragate diagnose gates --model gated --run runs/math --out runs/gates",
    "loragate diagnose interventions --model gated --suite math --out runs/interventions",
    "loragate diagnose interventions --model gated --suite math --engine vllm --out runs/interventions",
    "loragate diagnose alignment --model gated --rows held-out.jsonl --reference base --out runs/alignment",
    "loragate diagnose tokens --model gated --run runs/math --limit 8 --out runs/tokens",
    "loragate diagnose alignment --model gated --value rollouts --run runs/math --checkpoints gated --out runs/rollouts",
)

COMMAND = Command(
    name="diagnose",
    summary="Measure what adapter and gates do: entropy (ΔH), gates (realised λ), interventions, alignment, tokens.",
    options=DiagnoseOptions,
    run=run,
    examples=EXAMPLES,
    positional="what",
    needs=("what", "model", "out"),
    common="run rows suite tasks limit samples max_rows of interventions engine value batch_size device resume",
)
