"""What the stages of a recipe need on the machine that it names: memory and time from the planner, answers from the tasks.

Nothing is fetched for a backbone whose file holds its architecture.
"""

from __future__ import annotations

import itertools
import shlex
from typing import Any

from loragate.analysis.plan import Plan, Request, make_plan
from loragate.analysis.plan_memory import FP32
from loragate.analysis.plan_model import base_dtype, build_on_meta, count_parameters, read_config
from loragate.evaluation.tasks import Task, load_task, suite
from loragate.evaluation.variants import Kind, variants_for
from loragate.gates.hub import cached_commit, is_hub_id
from loragate.recipes.recipe import Recipe, Stage
from loragate.recipes.show import is_launched
from loragate.training.settings import TrainSettings

STAGE_OF = {"sft": "sft", "calibrate": "calibrate", "sweep": "calibrate"}
KEPT = TrainSettings.keep_checkpoints
RANGES = 42  # of the paper's grid
DIRECT = ("precision", "dtype", "rank", "target_modules", "quantization", "k", "epochs")


def plans(recipe: Recipe) -> dict[str, Plan]:
    """{stage: plan} of the stages that train, exactly as the recipe sets them; `chosen` is None where one does not fit.

    Raises:
        ConfigError: for settings that cannot work at all; LoragateError where a base's configuration cannot be had.
    """
    return {stage.name: _plan(recipe, stage) for stage in recipe.stages if stage.command in STAGE_OF}


def answers(recipe: Recipe) -> dict[str, int]:
    """{stage: answers that it samples} of the evaluations of whole built-in tasks, those of lm-evaluation-harness aside."""
    found: dict[str, int] = {}
    for stage in recipe.stages:
        values = stage.values
        if stage.command != "eval":
            continue
        constants = [float(part) for part in str(values.get("constants", "0.5")).split(",")]
        rows = variants_for(_kind(recipe, stage), values.get("controls", "cheap"), constants)
        tasks = suite(values["suite"]) if values.get("suite") else []
        tasks = [*tasks, *(load_task(name) for name in str(values.get("tasks", "")).split(",") if name)]
        found[stage.name] = sum(
            _questions(task, values.get("limit")) * (1 if row.temperature == 0 else task.generation.samples)
            for task in tasks
            if task.engine == "loragate"
            for row in rows
        )
    return found


def disk(recipe: Recipe) -> tuple[float, float]:
    """(bytes below the run's folder, bytes of what comes from the hub), as far as they can be known before: an estimate.

    Checkpoints hold what trains with AdamW's two moments, an answer at most 4096 tokens of ten bytes; a data set of the hub
    is taken for three GiB.
    """
    model = _base(recipe)
    from_hub = is_hub_id(model) and cached_commit(model) is None
    config = _config(recipe, model)
    size = base_dtype(config).itemsize
    counted = count_parameters(build_on_meta(config, stage="calibrate"), config)
    run = 4096.0 * 10 * sum(answers(recipe).values())
    for stage in recipe.stages:
        trained = counted.trained("sft" if stage.command == "sft" else "calibrate")
        if stage.command in STAGE_OF:
            run += FP32 * (counted.lora + counted.gates + 3 * (KEPT + 1) * trained)
        if stage.command == "sweep":
            run += RANGES * FP32 * (counted.lora + counted.gates)
    sets = {value for stage in recipe.stages if is_hub_id(str(value := stage.values.get("data", "{")))}
    return run, from_hub * size * float(counted.base) + 3.0 * 2**30 * len(sets)


def _plan(recipe: Recipe, stage: Stage) -> Plan:
    model = _base(recipe)
    # what a stage does not set is that of the stage whose adapter it goes on with
    first: dict[str, Any] = next((other.values for other in recipe.stages if other.command == "sft"), {})
    values: dict[str, Any] = {key: first[key] for key in ("rank", "target_modules", "dtype") if key in first}
    values |= stage.values
    words = shlex.split(recipe.launcher) if is_launched(stage) else []
    given = dict(itertools.pairwise(words))
    gpus = int(given.get("--num_processes", 1))
    strategy = next((name for name in ("fsdp2", "zero3") if name in given.get("--config_file", "")), "ddp")
    request = Request(
        model=model,
        stage=STAGE_OF[stage.command],
        gpus=gpus,
        gpu_memory=recipe.machine or Request.gpu_memory,
        strategy=strategy if gpus > 1 else "single",
        seq=values["max_length"],
        batch=values["batch_size"],
        micro_batch=values["micro_batch_size"],
        rows=values.get("max_rows", 0),
        gradient_checkpointing="yes" if values.get("gradient_checkpointing") else "no",
        **{"quantization": "none", **{key: values[key] for key in DIRECT if key in values}},
    )
    return make_plan(request, config=_config(recipe, model))


def _base(recipe: Recipe) -> str:
    return next((str(s.values["model"]) for s in recipe.stages if "{" not in str(s.values.get("model", "{"))), "")


def _config(recipe: Recipe, model: str) -> Any:
    from transformers import AutoConfig

    if model not in recipe.architecture:
        return read_config(model)
    values = dict(recipe.architecture[model])
    return AutoConfig.for_model(values.pop("model_type"), **values)


def _questions(task: Task, limit: int | None) -> int:
    rows = task.dataset.rows or limit or 0
    return min(rows, limit or rows)


def _kind(recipe: Recipe, stage: Stage) -> Kind:
    if "{" not in str(stage.values.get("model", "")):
        return "base"
    before = recipe.stages[: recipe.stages.index(stage)]
    return "gated" if any(done.command in ("calibrate", "sweep") for done in before) else "adapter"
