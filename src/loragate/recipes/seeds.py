"""A recipe run once for each training seed, and what its scores vary by: mean and sample deviation, as the paper's table has them.

seed-42/  seed-3407/  …    a run of the recipe each
seeds.json, seeds.md       the scores of every seed, their mean and deviation
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError, DataError
from loragate.evaluation.results import EvaluationRecord, read_record
from loragate.files import write_json, write_text
from loragate.recipes.recipe import TRAINS, Recipe
from loragate.report.table import ABSENT, Line, Table


@dataclass(frozen=True)
class SeedScore:
    """A variant's scores on one task, in the order of the seeds; shares of 1.

    Attributes:
        stage: that evaluated it.
        task: its name, or "mean of math" for the mean over the tasks of the suite math.
        deviation: of the sample, over n − 1; it says nothing of the questions, whose intervals stand in each seed's results.
    """

    stage: str
    variant: str
    task: str
    scores: tuple[float, ...]
    mean: float
    deviation: float


def read_seeds(text: str) -> list[int]:
    """Seeds separated by commas; raises ConfigError for fewer than two, for one given twice and for what is no whole number."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(parts) < 2 or len({*map(int, parts)}) < len(parts):
        raise ConfigError(f"--seeds {text}: expected two or more different whole numbers, such as 42,3407,2025")
    return list(map(int, parts))


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """The recipe whose trainings have this seed; sampling keeps its own, so that only the training differs."""
    if not any(stage.command in TRAINS for stage in recipe.stages):
        raise ConfigError(f"--seeds has no effect on {recipe.name}, which trains nothing")
    own: dict[str, dict[str, Any]] = {"sft": {"seed": seed}, "calibrate": {"seed": seed}, "sweep": {"seeds": str(seed)}}
    stages = (replace(one, options=one.options | own.get(one.command, {})) for one in recipe.stages)
    return replace(recipe, stages=tuple(stages))


def folder_of(out: Path, seed: int) -> Path:
    """Where the run of a seed lies."""
    return out / f"seed-{seed}"


def compare_seeds(recipe: Recipe, out: Path, seeds: Sequence[int]) -> list[Table]:
    """Read the evaluations of all seeds, write seeds.json and seeds.md, and return the tables; empty without an evaluation.

    Raises:
        DataError: for a seed whose evaluation is not finished, or has other tasks or variants.
    """
    found: list[SeedScore] = []
    for stage in (one.name for one in recipe.stages if one.command in ("eval", "diagnose")):
        paths = [folder_of(out, seed) / stage / "results.json" for seed in seeds]
        if not any(path.is_file() for path in paths):
            continue  # another look than at scores
        tables = [_scores(read_record(path)) for path in paths]
        for path, table in zip(paths, tables):
            if list(table) != list(tables[0]):
                raise DataError(
                    f"{path} has other tasks or variants than {paths[0]}; run both seeds with the same options"
                )
        for variant, task in tables[0]:
            scores = tuple(table[variant, task] for table in tables)
            mean, deviation = statistics.fmean(scores), statistics.stdev(scores)
            found.append(SeedScore(stage, variant, task, scores, mean, deviation))
    if not found:
        return []
    shown = [_table(stage, list(own), seeds) for stage, own in itertools.groupby(found, lambda one: one.stage)]
    record = {"recipe": recipe.name, "seeds": list(seeds), "scores": [asdict(one) for one in found]}
    write_json(out / "seeds.json", record)
    write_text(out / "seeds.md", "\n\n".join(table.markdown() for table in shown) + "\n")
    return shown


def _scores(record: EvaluationRecord) -> dict[tuple[str, str], float]:
    """{(variant, task): score}, and the averages of the suites that the record has."""
    found = {(one.label, one.task): one.avg_at_k.mean for one in record.results}
    suites = [one for one in record.suites if "/" not in one.suite]  # others are the averages over a task's subsets
    averages: dict[tuple[str, str], float] = {}
    for one in suites:
        label = one.variant if one.control is None else f"{one.variant} {one.control}"
        averages[label, f"mean of {one.suite}"] = one.average.mean
    return found | averages


def _table(stage: str, found: Sequence[SeedScore], seeds: Sequence[int]) -> Table:
    tasks = list(dict.fromkeys(one.task for one in found))
    by: dict[tuple[str, str], Any] = {(one.variant, one.task): one for one in found}
    lines = []
    for variant in dict.fromkeys(one.variant for one in found):
        row = [by.get((variant, task)) for task in tasks]
        cells = [(ABSENT,) if one is None else (f"{100 * one.mean:.2f} ± {100 * one.deviation:.2f}",) for one in row]
        lines.append(Line(variant, cells))
    title = f"{stage}: mean ± sample deviation over the seeds {', '.join(map(str, seeds))}"
    return Table(title, ("Model", *(f"{task} %" for task in tasks)), lines)
