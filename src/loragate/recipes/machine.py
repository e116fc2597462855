"""What the stages of a recipe need on the machine that it names: memory and time from the planner, answers from the tasks.

Nothing is fetched for a backbone whose file holds its architecture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from transformers import AutoConfig

from loragate.analysis.counts import base_dtype, build_on_meta, count_parameters
from loragate.analysis.plan import FP32, Plan, make_plan
from loragate.analysis.settings import Request
from loragate.evaluation.tasks import Task, load_task, suite
from loragate.evaluation.variants import Kind, Variant, variants_for
from loragate.gates.range import parse_ranges
from loragate.hub_names import cached_commit, is_hub_id
from loragate.models import read_config
from loragate.recipes.recipe import Recipe, Stage
from loragate.training.settings import TrainSettings

STAGE_OF: dict[str, Literal["sft", "calibrate"]] = {"sft": "sft", "calibrate": "calibrate", "sweep": "calibrate"}
DIRECT = ("precision", "dtype", "rank", "target_modules", "quantization", "k", "epochs")

# rows that a look scores on tasks by default: adapter, base and three overrides beside the gates; two signs beside the adapter
ROWS_OF_LOOK = {"interventions": 6, "entropy": 4}


@dataclass(frozen=True)
class Need:
    """What a stage needs on the machine that the recipe names.

    Attributes:
        gib: of each GPU's memory at the peak of a training; None for a stage that asks questions.
        hours: of a training, estimated, with every row as long as its limit; None likewise.
        note: what is counted.
    """

    stage: str
    gib: float | None
    hours: float | None
    note: str


def plans(recipe: Recipe) -> dict[str, Plan]:
    """{stage: plan} of the stages that train, exactly as the recipe sets them; `chosen` is None where one does not fit.

    Raises:
        ConfigError: for settings that cannot work at all; LoragateError where a base's configuration cannot be had.
    """
    return {
        stage.name: _plan(recipe, STAGE_OF[stage.command], stage.values)
        for stage in recipe.stages
        if stage.command in STAGE_OF
    }


def needs(recipe: Recipe) -> list[Need]:
    """What each stage needs at most, in order: every row of a training as long as its limit, and how many answers are drawn.

    A mask reads every row with two models, which counts as a step of Stage I does; what reads stored answers is left out.

    Raises:
        ConfigError: for settings that cannot work at all; LoragateError where a base's configuration cannot be had.
    """
    trained, found = plans(recipe), []
    for stage in recipe.stages:
        if stage.command == "mask":
            like = next(other.values for other in recipe.stages if other.command == "sft")
            given: dict[str, Any] = {
                key: stage.values[key] for key in ("max_rows", "max_length", "micro_batch_size") if key in stage.values
            }
            gib, hours, _ = _training(_plan(recipe, "sft", {**like, **given}))
            found.append(Need(stage.name, gib, hours, "two forward passes"))
        elif stage.name in trained:
            trials = _trials(stage)
            gib, hours, note = _training(trained[stage.name])
            note += f", {trials} trials" if trials > 1 else ""
            found.append(Need(stage.name, gib, trials * hours, note))
        elif asked := [item for item in _asked(recipe, stage) if item[2]]:
            count, longest = sum(count for _, count, _ in asked), max(tokens for _, _, tokens in asked)
            engine = "" if stage.vllm else ", with transformers"
            found.append(Need(stage.name, None, None, f"{count:,} answers of at most {longest} tokens{engine}"))
    return found


def tight(recipe: Recipe, gib: float) -> dict[str, str]:
    """{stage: a sentence} for each training that a GPU of `gib` GiB does not hold with rows as long as their limit.

    Raises:
        LoragateError: where a base's configuration cannot be had.
    """
    found = {}
    for stage, plan in plans(dataclasses.replace(recipe, machine=f"{gib:.1f}")).items():
        if plan.chosen is None:
            found[stage] = (
                f"{stage}: with rows as long as their limit it takes {_training(plan)[0]:.0f} GiB of a GPU, and there are "
                f"{gib:.0f}; where it runs out of memory, halve --set {stage}.micro_batch_size"
            )
    return found


def disk(recipe: Recipe) -> tuple[float, float]:
    """(bytes below the run's folder, bytes of what comes from the hub), as far as they can be known before: an estimate.

    Checkpoints hold what trains with AdamW's two moments, answers ten bytes a token; a data set of the hub is taken for three
    GiB.
    """
    config = _config(recipe)
    counted = count_parameters(build_on_meta(config, stage="calibrate"), config)
    base, run = float(base_dtype(config).itemsize * counted.base), 0.0
    for stage in recipe.stages:
        run += 10.0 * sum(count * tokens for _, count, tokens in _asked(recipe, stage))
        if stage.command in STAGE_OF:
            trained = 3 * (TrainSettings.keep_checkpoints + 1) * counted.trained(STAGE_OF[stage.command])
            run += FP32 * (_trials(stage) * (counted.lora + counted.gates) + trained)
    if any(stage.values.get("dora") for stage in recipe.stages) and any(stage.vllm for stage in recipe.stages):
        run += base  # merged, as vLLM serves no DoRA
    sets = {value for stage in recipe.stages if is_hub_id(str(value := stage.values.get("data", "{")))}
    fetched = is_hub_id(recipe.base) and cached_commit(recipe.base) is None
    return run, fetched * base + 3.0 * 2**30 * len(sets)


def _plan(recipe: Recipe, kind: Literal["sft", "calibrate"], values: Mapping[str, Any]) -> Plan:
    """The plan of a training; the one place that asks the planner."""
    # what a stage does not set is that of the stage whose adapter it goes on with
    first = next((stage.values for stage in recipe.stages if stage.command == "sft"), {})
    values = {**{key: first[key] for key in ("rank", "target_modules", "dtype") if key in first}, **values}
    request = Request(
        model=recipe.base,
        stage=kind,
        gpus=values.get("processes", 1),
        gpu_memory=recipe.machine or Request.gpu_memory,
        strategy=values.get("strategy", "single"),
        seq=values["max_length"],
        batch=values["batch_size"],
        micro_batch=values["micro_batch_size"],
        rows=values.get("max_rows", 0),
        gradient_checkpointing="yes" if values.get("gradient_checkpointing") else "no",
        **{"quantization": "none", **{key: values[key] for key in DIRECT if key in values}},
    )
    return make_plan(request, config=_config(recipe))


def _training(plan: Plan) -> tuple[float, float, str]:
    """(GiB, hours, note) of one training."""
    option = plan.least
    note = f"{option.way.gpus} × {plan.gpu.name}" + ("" if plan.chosen else ": does not fit")
    return option.gib, option.seconds / 3600, note


def _trials(stage: Stage) -> int:
    """Trainings that a stage makes one after another."""
    ranges = str(stage.values.get("ranges", ""))
    if stage.command == "sweep":
        return len(parse_ranges(ranges))
    return len(ranges.split(";")) if str(stage.values.get("range", "")) == "auto" else 1


def _asked(recipe: Recipe, stage: Stage) -> list[tuple[Task, int, int]]:
    """(task, answers, tokens of the longest) of a stage; 0 tokens where options are scored by their likelihood."""
    if stage.command not in ("eval", "diagnose"):
        return []
    values, found = stage.values, []
    tasks = list(suite(values["suite"])) if values.get("suite") else []
    tasks += [load_task(name) for name in str(values.get("tasks", "")).split(",") if name]
    rows = _rows(recipe, stage)
    for task in tasks:
        if task.engine == "loragate":
            samples, limit = values.get("samples") or task.generation.samples, task.generation.max_new_tokens
            each = sum(1 if row.temperature == 0 else samples for row in rows)
        else:  # no control is asked these
            each = sum(row.control is None for row in rows)
            limit = (task.harness.max_new_tokens if task.harness else None) or 0
        most = values.get("limit")
        questions = min(task.dataset.rows or most or 0, most or task.dataset.rows or 0)
        found.append((task, each * questions, min(limit, values.get("max_new_tokens") or limit)))
    return found


def _rows(recipe: Recipe, stage: Stage) -> list[Variant]:
    """The rows of a stage that asks questions."""
    if stage.command == "diagnose":
        return [Variant("adapter")] * ROWS_OF_LOOK.get(str(stage.values.get("what", "")), 0)
    if "sweep" in stage.values:  # the adapter, and a row for each cell
        cells = [_trials(done) for done in recipe.stages if stage.values["sweep"] == f"{{{done.name}}}"]
        return [Variant("adapter")] * (1 + sum(cells))
    before = recipe.stages[: recipe.stages.index(stage)]
    kind: Kind = "gated" if any(done.command in ("calibrate", "sweep") for done in before) else "adapter"
    constants = [float(part) for part in str(stage.values.get("constants", "0.5")).split(",")]
    return variants_for("base" if stage.own_base else kind, stage.values.get("controls", "cheap"), constants)


def _config(recipe: Recipe) -> Any:
    """The configuration of the base."""
    if recipe.base not in recipe.architecture:
        return read_config(recipe.base)
    values = dict(recipe.architecture[recipe.base])
    return AutoConfig.for_model(values.pop("model_type"), **values)
