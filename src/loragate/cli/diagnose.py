"""`loragate diagnose`: look at what an adapter and its gates do. Five looks, one set of settings, one record each.

`loragate.effects` says which look uses which setting; `loragate.cli.evaluation_runs` has the looks, calls of `loragate.analysis`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loragate.analysis.settings import DiagnoseSettings
from loragate.cli.arguments import Command
from loragate.cli.options import EvaluationInputs
from loragate.display import console

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


def run(options: DiagnoseOptions) -> int:
    """Check what was asked for, take the look, and say what to run next."""
    from loragate.cli.evaluation_runs import diagnose

    diagnose(str(options.what), options, options)
    with_answers = f"{options.run} " if options.run else ""
    console().print(f"next: loragate report {with_answers}{options.out}")
    return 0


COMMAND = Command(
    name="diagnose",
    options=DiagnoseOptions,
    run=run,
    examples=(
        "loragate diagnose entropy --model gated --rows held-out.jsonl --suite math --limit 100 --out entropy",
        "loragate diagnose gates --model gated --run runs/math --out gates",
        "loragate diagnose interventions --model gated --suite math --engine vllm --out interventions",
        "loragate diagnose alignment --model gated --rows held-out.jsonl --reference base --out alignment",
        "loragate diagnose tokens --model gated --run runs/math --limit 8 --out tokens",
    ),
    positional="what",
    required_at_run=("what", "model", "out"),
    common="run rows suite tasks limit samples max_rows interventions engine value resume",
)
