"""`loragate diagnose`: look at what an adapter and its gates do. Five looks, one set of settings, one record each.

`loragate.effects` says which look uses which setting; the looks are calls of `loragate.analysis`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loragate.analysis.settings import DiagnoseSettings
from loragate.cli.arguments import Command, require_given
from loragate.cli.evaluate import EvaluationInputs
from loragate.effects import require_effect

Look = Literal["entropy", "gates", "interventions", "alignment", "tokens"]


@dataclass(frozen=True)
class DiagnoseOptions(EvaluationInputs, DiagnoseSettings):
    """Settings of `loragate diagnose`.

    Attributes:
        what: which look to take.
        model: gated folder, or owner/name[@revision] of one on the hub; for entropy also a plain adapter.
        limit: first questions of each task only; all of them by default, 8 for tokens.
    """

    what: Look | None = None
    model: str = ""


def run(options: DiagnoseOptions) -> int:
    """Check what was asked for, then hand over to the look."""
    require_given(COMMAND, options)
    require_effect("diagnose", options, flags=True)
    from loragate.cli.diagnosing import diagnose

    return diagnose(options)


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
    options=DiagnoseOptions,
    run=run,
    examples=EXAMPLES,
    positional="what",
    needs=("what", "model", "out"),
    common="run rows suite tasks limit samples max_rows of interventions engine value batch_size device resume",
)
