"""`loragate recipes rehearse` and `check`: a recipe run on the spot with its own settings, and all of them composed.

A rehearsal is a run of the recipe in every respect (`recipes.run_recipe`), on stand-ins and with counts cut; a check
composes all recipes and their rehearsals and runs none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from loragate.cli.display import console, duration
from loragate.cli.recipes import call, run_recipe, validate
from loragate.cli.recipes_ready import EVAL_PYTHON
from loragate.errors import ConfigError, LoragateError
from loragate.files import write_json
from loragate.recipes.show import uses_vllm

RECORD = "rehearsal.json"
ENDED = (
    0.5  # share of sampled answers that must end; nine in ten do where an engine stops at the end of a turn, else none
)


def check(shelf: Any, wanted: str) -> int:
    """Hold all recipes (or one of the user's own) and their rehearsals against the commands' options.

    Raises:
        ConfigError: for the first that does not fit, naming recipe, stage and key.
    """
    from loragate.recipes import every_name, read_recipe
    from loragate.recipes.rehearsal import rehearsal

    began = time.monotonic()
    own = wanted.endswith((".yaml", ".yml"))
    names = [wanted] if own else [name for name in every_name(shelf) if wanted in name]
    if not names:
        raise ConfigError(f"no recipe's name contains '{wanted}'; loragate recipes list shows all of them")
    for name in names:
        recipe = read_recipe(name, shelf)
        small, _ = rehearsal(recipe, Path("stand-ins"))
        for stage in (*recipe.placed("out"), *small.placed("out")):
            validate(stage, name, deep=True)
    took = duration(time.monotonic() - began)
    console().print(f"{len(names)} of {len(names)} recipes fit the commands' options ({took})", markup=False)
    return 0


def rehearse(options: Any, recipe: Any) -> int:
    """Run every stage of the recipe on stand-ins, report, and say what the full run needs; returns 0.

    Raises:
        LoragateError: where a stage fails, or answers do not end.
    """
    from loragate.recipes.rehearsal import rehearsal
    from loragate.recipes.standins import write_standins

    out, began = console(), time.monotonic()
    with place(options.out) as folder:
        evaluator = options.eval_python or os.environ.get(EVAL_PYTHON, "") or remembered(folder / "run")
        small, replaced = rehearsal(recipe, folder / "stand-ins", engine_here(recipe, evaluator))
        if options.launcher:
            replaced = [item for item in replaced if item.option != "launcher"]
        for stage in small.placed("out"):
            validate(stage, recipe.name, deep=True)
        out.print(f"{recipe.name} on stand-ins in {folder}", markup=False)
        show_replaced(replaced, folder)
        again = dataclasses.replace(options, out=str(folder / "run"))
        if options.dry_run:
            run_recipe(again, small)
        else:
            write_standins(folder / "stand-ins")
            run_recipe(again, small)
            ends = endings(folder / "run")
            call(report_command(folder), f"the report on {recipe.name}", f"loragate report {folder / 'run'}")
        needs = show_needs(recipe)
        if options.dry_run:
            return 0
        seconds = {name: state["seconds"] for name, state in _states(folder / "run").items()}
        total = time.monotonic() - began
        record = {"recipe": recipe.name, "replaced": [dataclasses.asdict(item) for item in replaced]}
        write_json(
            folder / RECORD, {**record, "seconds": seconds, "ended": ends, "needs": needs, "total": round(total, 1)}
        )
        require_endings(ends)
        each = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
        out.print(f"rehearsed: every stage of {recipe.name} ran in {duration(total)} ({each})", markup=False)
        if options.out:
            out.print(f"next: look at {folder / 'report.html'}; {folder / RECORD} says what was replaced", markup=False)
    return 0


def engine_here(recipe: Any, evaluator: str = "") -> str:
    """The engine in place of vLLM where that is not here; empty where nothing has to be replaced, or `evaluator` has it."""
    from loragate.generation.vllm_engine import require_vllm

    if evaluator or not any(uses_vllm(stage) for stage in recipe.stages):
        return ""
    try:
        require_vllm()
    except ConfigError:
        return "transformers"
    return ""


def show_replaced(replaced: Sequence[Any], folder: Path) -> None:
    """What the rehearsal does not show, value by value; paths below its folder."""
    from rich.table import Table

    table = Table(title="replaced; everything else is as shipped", box=None, pad_edge=False, title_justify="left")
    for name in ("stage", "setting", "shipped", "here"):
        table.add_column(name, overflow="fold")
    for item in replaced:
        table.add_row(
            item.stage or "all", item.option, _shown(item.shipped), _shown(item.here).replace(f"{folder}/", "")
        )
    console().print(table)


def show_needs(recipe: Any) -> list[dict[str, Any]]:
    """Print what the shipped recipe needs on the machine that it names; returns the same as data."""
    from rich.table import Table

    from loragate.cli.preflight import quiet_logging
    from loragate.recipes.machine import needs

    quiet_logging()
    found = needs(recipe)
    table = Table(title=f"the full run on {recipe.machine}, at most", box=None, pad_edge=False, title_justify="left")
    for name in ("stage", "GiB", "hours", "counted"):
        table.add_column(name, justify="right" if name in ("GiB", "hours") else "left")
    for need in found:
        table.add_row(need.stage, f"{need.gib:.0f}", f"{need.hours:.1f}", need.note)
    console().print(table)
    console().print("estimates of loragate plan, every row and answer as long as its limit", markup=False)
    return [dataclasses.asdict(need) for need in found]


def endings(run: Path) -> dict[str, float]:
    """{stage/task: share of the sampled answers that ended before their limit}, over every record of scores in a run."""
    from loragate.evaluation.results import read_record

    found: dict[str, float] = {}
    for path in sorted(run.glob("*/results.json")):
        record = read_record(path)
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
            "them with <|im_end|>, so this engine does not stop at the end of a turn"
        )


@contextlib.contextmanager
def place(out: str) -> Iterator[Path]:
    """--out, new or to be continued; or a temporary folder."""
    if out:
        folder = Path(out)
        if folder.exists() and not (folder / "stand-ins").is_dir() and (folder.is_file() or any(folder.iterdir())):
            raise ConfigError(f"--out {folder} is not empty and holds no rehearsal; choose another folder")
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="loragate-rehearsal-") as name:
        yield Path(name)


def report_command(folder: Path) -> list[str]:
    """The command that writes report.html of what the stages left."""
    import sys

    return [
        sys.executable,
        "-m",
        "loragate",
        "report",
        str(folder / "run"),
        "--out",
        str(folder / "report.html"),
        "--overwrite",
    ]


def remembered(run: Path) -> str:
    """The interpreter of stages with vLLM that a run began with; empty where it named none."""
    return str(_record(run).get("eval_python", "")) if (run / "recipe.json").is_file() else ""


def _states(run: Path) -> dict[str, Any]:
    states: dict[str, Any] = _record(run)["state"]
    return states


def _record(run: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run / "recipe.json").read_text(encoding="utf-8"))
    return record


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
