"""A recipe run on the spot: its counts cut, its materials replaced by stand-ins, every other setting as shipped.

What is replaced is a list that can be printed, so that a person sees what a rehearsal does not show.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError, LoragateError
from loragate.evaluation.results import read_record as read_scores
from loragate.evaluation.tasks import load_task, suite
from loragate.files import write_json
from loragate.generation.vllm_engine import require_vllm
from loragate.recipes.machine import Need
from loragate.recipes.recipe import Recipe, Stage
from loragate.recipes.run import Run, interpreter, run_recipe, start
from loragate.recipes.standins import base_folder, rows_file, write_standins

REHEARSAL = "rehearsal.json"
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


@dataclass(frozen=True)
class Replaced:
    """One value of a stage, as shipped and in the rehearsal; None for what is not set."""

    stage: str
    option: str
    shipped: Any
    here: Any


def rehearsal_of(recipe: Recipe, folder: Path, engine: str = "") -> tuple[Recipe, list[Replaced]]:
    """The recipe on the stand-ins in `folder`, and what was replaced.

    Args:
        folder: what `write_standins` filled.
        engine: in place of one that a stage names and that is not here; empty where it is.
    """
    replaced: list[Replaced] = []
    stages = []
    for stage in recipe.stages:
        now = {key: value for key, value in _rehearsed(stage, folder, engine).items() if value is not None}
        for option in sorted({*stage.values, *now}):
            if stage.values.get(option) != now.get(option):
                replaced.append(Replaced(stage.name, option, stage.values.get(option), now.get(option)))
        stages.append(dataclasses.replace(stage, values=now))
    return dataclasses.replace(recipe, stages=tuple(stages)), replaced


def rehearse(small: Recipe, replaced: Sequence[Replaced], needs: Sequence[Need], run: Run) -> dict[str, Any]:
    """Run every stage of a rehearsal, and the report on it.

    Args:
        small: of `rehearsal_of`, on stand-ins beside the run's folder.
        needs: what the shipped recipe needs, to be kept.

    Returns:
        What `rehearsal.json` beside the run's folder keeps: recipe, replaced, needs, {stage: seconds}, {stage/task: share of
        the sampled answers that ended}, total seconds.

    Raises:
        LoragateError: where a stage fails, or answers do not end.
    """
    began, folder = time.monotonic(), run.folder.parent
    write_standins(folder / "stand-ins")
    seconds = run_recipe(small, run)
    report = [sys.executable, "-m", "loragate", "report", str(run.folder), "--out", str(folder / "report.html")]
    start([*report, "--overwrite"], f"the report on {small.name}", f"loragate report {run.folder}")
    found: dict[str, Any] = {
        "recipe": small.name,
        "replaced": [dataclasses.asdict(item) for item in replaced],
        "needs": [dataclasses.asdict(need) for need in needs],
        "seconds": seconds,
        "ended": endings(run.folder),
        "total": round(time.monotonic() - began, 1),
    }
    write_json(folder / REHEARSAL, found)
    require_endings(found["ended"])
    return found


def engine_here(recipe: Recipe, run: Run) -> str:
    """The engine in place of vLLM where neither this interpreter nor the run's other one has it; else empty."""
    if interpreter(run) or not any(stage.vllm for stage in recipe.stages):
        return ""
    try:
        require_vllm()
    except ConfigError:
        return "transformers"
    return ""


@contextlib.contextmanager
def rehearsal_folder(out: str) -> Iterator[Path]:
    """The folder of a rehearsal, new or to be continued; a temporary one where none is named.

    Raises:
        ConfigError: if it holds something else.
    """
    if not out:
        with tempfile.TemporaryDirectory(prefix="loragate-rehearsal-") as name:
            yield Path(name)
        return
    folder = Path(out)
    if folder.exists() and not (folder / "stand-ins").is_dir() and (folder.is_file() or any(folder.iterdir())):
        raise ConfigError(f"--out {folder} is not empty and holds no rehearsal; choose another folder")
    yield folder


def endings(run: Path) -> dict[str, float]:
    """{stage/task: share of the sampled answers that ended before their limit}, over every record of scores in a run."""
    found: dict[str, float] = {}
    for path in sorted(run.glob("*/results.json")):
        record = read_scores(path)
        sampled = {task.name for task in record.tasks if task.sampling.temperature > 0}
        for result in record.results:
            if result.task in sampled and result.control is None:
                name = f"{path.parent.name}/{result.task}"
                found[name] = min(found.get(name, 1.0), 1.0 - result.truncated)
    return found


def require_endings(found: dict[str, float]) -> None:
    """Refuse answers that run to their limits: the stand-in's end of turn was not stopped at.

    Raises:
        LoragateError: naming stage and task.
    """
    if found and sum(found.values()) / len(found) < ENDED:
        worst = min(found, key=lambda name: found[name])
        raise LoragateError(
            f"{worst}: only {100 * found[worst]:.0f} % of the answers ended before their limit. The stand-in ends nearly all of "
            "them in time, so this engine does not stop at the end of a turn"
        )


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
        if any(task.engine == "loragate" for task in tasks):  # those of the harness are answered greedily
            values["samples"] = min(values.get("samples") or SAMPLES, SAMPLES)
        if engine and "engine" in values:
            values["engine"] = engine
    return values
