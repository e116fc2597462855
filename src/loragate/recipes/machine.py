"""What the trainings of a recipe need on the machine that it names: memory and time, from the planner.

Nothing is fetched for a backbone whose file holds its architecture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from loragate.analysis.plan import Plan, make_plan
from loragate.analysis.settings import Request
from loragate.gates.range import parse_ranges
from loragate.models import read_config
from loragate.recipes.recipe import Recipe

STAGE_OF = {"sft": "sft", "mask": "sft", "calibrate": "calibrate", "sweep": "calibrate"}
"""{command: stage of the training that it is counted as}; a mask reads every row with two models, about a step of Stage I."""
ALIKE = ("precision", "dtype", "rank", "target_modules", "quantization", "k", "epochs", "strategy")
PLANNED = {
    **dict(zip(ALIKE, ALIKE, strict=True)),
    "seq": "max_length",
    "batch": "batch_size",
    "micro_batch": "micro_batch_size",
    "rows": "max_rows",
    "gpus": "processes",
}
"""{setting of the planner: option of a stage}; what a stage leaves to its command, the planner takes as its own default."""


@dataclass(frozen=True)
class Need:
    """What a training needs on the machine that the recipe names, with every row as long as its limit.

    Attributes:
        stage: its name.
        plan: of one training, exactly as the recipe sets it; `chosen` is None where it does not fit.
        trials: trainings that the stage makes one after another.
    """

    stage: str
    plan: Plan
    trials: int = 1

    @property
    def gib(self) -> float:
        """Of each GPU's memory at the peak."""
        return self.plan.least.gib

    @property
    def hours(self) -> float:
        """Of all trainings of the stage, estimated."""
        return self.trials * self.plan.least.seconds / 3600

    @property
    def note(self) -> str:
        """What is counted."""
        fits = "" if self.plan.chosen else ": does not fit"
        many = f", {self.trials} trials" if self.trials > 1 else ""
        return f"{self.plan.least.way.gpus} × {self.plan.gpu.name}{fits}{many}"


def needs(recipe: Recipe) -> list[Need]:
    """What each stage that trains needs at most, in order; a ConfigError for settings that cannot work at all."""
    # what a stage does not set is that of the stage whose adapter it goes on with, or of the training that a mask is for
    first = next((stage.values for stage in recipe.stages if stage.command == "sft"), {})
    found = []
    for stage in recipe.stages:
        if stage.command not in STAGE_OF:
            continue
        keys = first if stage.command == "mask" else ("rank", "target_modules", "dtype")
        values = {**{key: first[key] for key in keys if key in first}, **stage.values}
        settled: dict[str, Any] = {"strategy": "single", "quantization": "none", "stage": STAGE_OF[stage.command]}
        settled |= {name: values[key] for name, key in PLANNED.items() if key in values}
        request = Request(
            model=recipe.base,
            gpu_memory=recipe.machine or Request.gpu_memory,
            gradient_checkpointing="yes" if values.get("gradient_checkpointing") else "no",
            **settled,
        )
        ranges, trials = str(stage.values.get("ranges", "")), 1
        if stage.command == "sweep":
            trials = len(parse_ranges(ranges))
        elif str(stage.values.get("range", "")) == "auto":
            trials = len(ranges.split(";"))
        found.append(Need(stage.name, make_plan(request, config=_config(recipe)), trials))
    return found


def _config(recipe: Recipe) -> Any:
    """The configuration of the base."""
    if recipe.base not in recipe.architecture:
        return read_config(recipe.base)
    values = dict(recipe.architecture[recipe.base])
    return AutoConfig.for_model(values.pop("model_type"), **values)
