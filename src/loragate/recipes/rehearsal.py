"""A recipe with its counts cut and its materials replaced by stand-ins; every other setting is as shipped.

What is replaced is a list that can be printed, so that a person sees what a rehearsal does not show.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate.evaluation.tasks import load_task, suite
from loragate.recipes.recipe import Recipe, Stage
from loragate.recipes.standins import rows_file

ROWS = 320  # two steps of 128, and 32 questions of the rows set aside where a range is chosen
TRAINING = {"max_rows": ROWS, "max_steps": 2, "save_steps": 1}
COUNTS: dict[str, dict[str, Any]] = {
    "sft": TRAINING,
    "calibrate": TRAINING,
    "sweep": TRAINING,
    "mask": {"max_rows": ROWS},
}
RANGES = "-6,1;-6,6;0,1;0,6"  # the corners of the grid
QUESTIONS, SAMPLES = 2, 2


@dataclass(frozen=True)
class Replaced:
    """One value of a stage, as shipped and in the rehearsal; None for what is not set."""

    stage: str
    option: str
    shipped: Any
    here: Any


def rehearsal(recipe: Recipe, folder: Path, engine: str = "") -> tuple[Recipe, list[Replaced]]:
    """The recipe on the stand-ins in `folder`, and what was replaced.

    Args:
        folder: what `write_standins` filled.
        engine: in place of one that a stage names and that is not here; empty where it is.
    """
    replaced: list[Replaced] = []
    stages = []
    for stage in recipe.stages:
        now = {key: value for key, value in _rehearsed(recipe, stage, folder, engine).items() if value is not None}
        for option in sorted({*stage.values, *now}):
            if stage.values.get(option) != now.get(option):
                replaced.append(Replaced(stage.name, option, stage.values.get(option), now.get(option)))
        stages.append(dataclasses.replace(stage, values=now))
    if recipe.launcher:
        replaced.append(Replaced("", "launcher", recipe.launcher, "one process"))
    return dataclasses.replace(recipe, stages=tuple(stages), launcher="", needs={}), replaced


def _rehearsed(recipe: Recipe, stage: Stage, folder: Path, engine: str) -> dict[str, Any]:
    """The values of a stage; None where one is left out."""
    values = dict(stage.values)
    for option, most in COUNTS.get(stage.command, {}).items():
        values[option] = min(values.get(option) or most, most)
    if "{" not in str(values.get("model", "{")):
        values["model"] = str(folder / "base")
    if stage.command in COUNTS and "{" not in str(values.get("data", "{")):
        # commits and splits belong to the hub
        data = str(values["data"])
        values |= {"data": str(folder / rows_file(data)), "revision": None, "split": None}
        if values.get("heldout") or values.get("heldout_split"):
            values |= {"heldout": str(folder / rows_file(data, "held-out")), "heldout_split": None}
    if stage.command == "sweep" and values.get("ranges") == "grid":
        values["ranges"] = RANGES
    for option in ("probe", "test"):
        if values.get(option) or f"{stage.name}.{option}" in recipe.needs:
            values[option] = str(folder / "probe.jsonl")
            values["probe_task"] = None
    if values.get("suite") or values.get("tasks"):
        values |= {"limit": min(values.get("limit") or QUESTIONS, QUESTIONS), "data": str(folder / "questions")}
        values["revision"] = None
        if _samples(values):
            values["samples"] = min(values.get("samples") or SAMPLES, SAMPLES)
        if engine and "engine" in values:
            values["engine"] = engine
    return values


def _samples(values: dict[str, Any]) -> bool:
    """Whether a task of the stage is sampled; those of the harness are answered greedily."""
    tasks = list(suite(values["suite"])) if values.get("suite") else []
    tasks += [load_task(name) for name in str(values.get("tasks", "")).split(",") if name]
    return any(task.engine == "loragate" for task in tasks)
