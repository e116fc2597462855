"""A recipe run on the spot: its counts cut, its materials replaced by stand-ins, every other setting as shipped.

A rehearsal is a recipe of its own; where the two differ (`Recipe.differences`) it does not show what the full run would do.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError, LoragateError
from loragate.evaluation.results import read_record as read_scores
from loragate.evaluation.tasks import load_task, suite
from loragate.files import require_new
from loragate.generation.vllm_engine import require_vllm
from loragate.recipes.recipe import Recipe, Stage
from loragate.recipes.run import Run, interpreter, run_recipe, start
from loragate.recipes.standins import base_folder, rows_file, write_standins

STANDINS = "stand-ins"
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
# share of sampled answers that must end; nine in ten do where an engine stops at the end of a turn, else none
ENDED = 0.5


def rehearsal_of(recipe: Recipe, folder: Path, run: Run | None = None) -> Recipe:
    """The recipe on the stand-ins in `folder`.

    Args:
        folder: what `write_standins` fills.
        run: of the rehearsal, whose interpreter may have vLLM; without vLLM transformers answers. None leaves the engine.
    """
    engine = "" if run is None or _has_vllm(recipe, run) else "transformers"
    stages = []
    for stage in recipe.stages:
        values = {key: value for key, value in _rehearsed(stage, folder, engine).items() if value is not None}
        stages.append(dataclasses.replace(stage, values=values))
    return dataclasses.replace(recipe, stages=tuple(stages))


def rehearse(small: Recipe, run: Run) -> dict[str, float]:
    """Run every stage of a rehearsal, and the report on it, which is written beside the run's folder.

    Args:
        small: of `rehearsal_of`, on stand-ins beside the run's folder.

    Returns:
        {stage: seconds}.

    Raises:
        LoragateError: where a stage fails, or answers do not end.
    """
    folder = run.folder.parent
    if not (folder / STANDINS).is_dir():
        require_new(folder)
    write_standins(folder / STANDINS)
    seconds = run_recipe(small, run)
    report = [sys.executable, "-m", "loragate", "report", str(run.folder), "--out", str(folder / "report.html")]
    start([*report, "--overwrite"], f"the report on {small.name}", f"loragate report {run.folder}")
    require_endings(run.folder)
    return seconds


def require_endings(run: Path) -> None:
    """Refuse sampled answers that run to their limits: the stand-in's end of turn was not stopped at (LoragateError)."""
    found: dict[str, float] = {}
    for path in sorted(run.glob("*/results.json")):
        record = read_scores(path)
        sampled = {task.name for task in record.tasks if task.sampling.temperature > 0}
        for result in record.results:
            if result.task in sampled and result.control is None:
                name = f"{path.parent.name}/{result.task}"
                found[name] = min(found.get(name, 1.0), 1.0 - result.truncated)
    if found and sum(found.values()) / len(found) < ENDED:
        worst = min(found, key=lambda name: found[name])
        raise LoragateError(
            f"{worst}: only {100 * found[worst]:.0f} % of the answers ended before their limit. The stand-in ends nearly all of "
            "them in time, so this engine does not stop at the end of a turn"
        )


def _has_vllm(recipe: Recipe, run: Run) -> bool:
    """Whether this interpreter or the run's other one has vLLM, where a stage names it."""
    if interpreter(run) or not any(stage.vllm for stage in recipe.stages):
        return True
    try:
        require_vllm()
    except ConfigError:
        return False
    return True


def _rehearsed(stage: Stage, folder: Path, engine: str) -> dict[str, Any]:
    """The values of a stage; None where one is left out."""
    values = dict(stage.values)
    for option, most in COUNTS.get(stage.command, {}).items():
        values[option] = min(values.get(option) or most, most)
    if stage.own_base:
        values["model"] = str(folder / base_folder(template=not values.get("chat_template")))
    if stage.command in COUNTS:
        values |= {"strategy": None, "processes": None}
        if "{" not in str(values.get("data", "{")):
            # commits and splits belong to the hub
            data = str(values["data"])
            values |= {"data": str(folder / rows_file(data)), "revision": None, "split": None}
            if values.get("heldout") or values.get("heldout_split"):
                values |= {"heldout": str(folder / rows_file(data, "held-out")), "heldout_split": None}
    if stage.command == "sweep" and values.get("ranges") == "grid":
        values["ranges"] = RANGES
    if values.get("probe"):
        values |= {"probe": str(folder / "probe.jsonl"), "probe_task": None}
    if values.get("suite") or values.get("tasks"):
        values |= {"limit": min(values.get("limit") or QUESTIONS, QUESTIONS), "data": str(folder / "questions")}
        values["revision"] = None
        tasks = list(suite(values["suite"])) if values.get("suite") else []
        tasks += [load_task(name) for name in str(values.get("tasks", "")).split(",") if name]
        if any(task.harness is None for task in tasks):  # those of the harness are answered greedily
            values["samples"] = min(values.get("samples") or SAMPLES, SAMPLES)
        if engine and "engine" in values:
            values["engine"] = engine
    return values
