"""What the stages of a recipe need on the machine that it names: memory and time from the planner, answers from the tasks.

Nothing is fetched for a backbone whose file holds its architecture.
"""

from __future__ import annotations

import itertools
import shlex
from dataclasses import dataclass
from typing import Any

from loragate.analysis.cost import decoding, find_gpu
from loragate.analysis.plan import FP32, Plan, Request, make_plan
from loragate.analysis.plan_model import base_dtype, build_on_meta, count_parameters, read_config
from loragate.evaluation.harness_rows import load_suite
from loragate.evaluation.tasks import Task, load_task, suite
from loragate.evaluation.variants import Kind, Variant, variants_for
from loragate.gates.range import parse_ranges
from loragate.hub_names import cached_commit, is_hub_id
from loragate.recipes.recipe import Recipe, Stage
from loragate.recipes.show import is_launched, uses_vllm
from loragate.training.settings import TrainSettings

STAGE_OF = {"sft": "sft", "calibrate": "calibrate", "sweep": "calibrate"}
KEPT = TrainSettings.keep_checkpoints
DIRECT = ("precision", "dtype", "rank", "target_modules", "quantization", "k", "epochs")

# rows that a look scores on tasks by default: adapter, base and three overrides beside the gates; two signs beside the adapter
ROWS_OF_LOOK = {"interventions": 6, "entropy": 4}


@dataclass(frozen=True)
class Need:
    """What a stage needs on the machine that the recipe names.

    Attributes:
        gib: of each GPU's memory at the peak.
        hours: estimated, with every row and every answer as long as its limit.
        note: what is counted.
    """

    stage: str
    gib: float
    hours: float
    note: str


def plans(recipe: Recipe) -> dict[str, Plan]:
    """{stage: plan} of the stages that train, exactly as the recipe sets them; `chosen` is None where one does not fit.

    Raises:
        ConfigError: for settings that cannot work at all; LoragateError where a base's configuration cannot be had.
    """
    return {stage.name: _plan(recipe, stage) for stage in recipe.stages if stage.command in STAGE_OF}


def answers(recipe: Recipe) -> dict[str, int]:
    """{stage: answers that it samples} of the evaluations of whole built-in tasks, those of lm-evaluation-harness aside."""
    return {
        stage.name: sum(count for task, count, _ in _asked(recipe, stage) if task.engine == "loragate")
        for stage in recipe.stages
        if stage.command == "eval"
    }


def needs(recipe: Recipe) -> list[Need]:
    """What each stage needs at most, in order: every row and every answer as long as its limit.

    A mask reads every row with two models, which counts as a step of Stage I does; what reads stored answers is left out.
    Answers are drawn as `decoding` has it, on one GPU whatever the engine.

    Raises:
        ConfigError: for settings that cannot work at all; LoragateError where a base's configuration cannot be had.
    """
    trained, found = plans(recipe), []
    for stage in recipe.stages:
        if plan := trained.get(stage.name):
            option = plan.chosen or min(plan.options, key=lambda option: option.gib)
            trials = _trials(stage)
            note = f"{option.gpus} × {plan.gpu.name}" + (f", {trials} trials" if trials > 1 else "")
            note += "" if plan.chosen else ": does not fit"
            found.append(Need(stage.name, option.gib, trials * option.seconds / 3600, note))
        elif stage.command == "mask":
            like = dict(next(other.values for other in recipe.stages if other.command == "sft"))
            like |= {
                key: value
                for key, value in stage.values.items()
                if key in ("max_rows", "max_length", "micro_batch_size")
            }
            option = _plan(recipe, Stage("sft", "sft", like)).options[0]
            found.append(Need(stage.name, option.gib, option.seconds / 3600, "two forward passes"))
        elif asked := [item for item in _asked(recipe, stage) if item[2]]:
            memory, hours = _decoding(recipe, asked)
            count, longest = sum(count for _, count, _ in asked), max(tokens for _, _, tokens in asked)
            note = f"{count:,} answers of at most {longest} tokens"
            note += "" if uses_vllm(stage) else "; more hours with transformers"
            found.append(Need(stage.name, memory, hours, note))
    return found


def disk(recipe: Recipe) -> tuple[float, float]:
    """(bytes below the run's folder, bytes of what comes from the hub), as far as they can be known before: an estimate.

    Checkpoints hold what trains with AdamW's two moments, answers ten bytes a token; a data set of the hub is taken for three
    GiB.
    """
    model = base_of(recipe)
    config = _config(recipe, model)
    counted = count_parameters(build_on_meta(config, stage="calibrate"), config)
    base, run = float(base_dtype(config).itemsize * counted.base), 0.0
    for stage in recipe.stages:
        run += 10.0 * sum(count * tokens for _, count, tokens in _asked(recipe, stage))
        if stage.command in STAGE_OF:
            trained = 3 * (KEPT + 1) * counted.trained(STAGE_OF[stage.command])
            run += FP32 * (_trials(stage) * (counted.lora + counted.gates) + trained)
    if any(stage.values.get("dora") for stage in recipe.stages) and any(map(uses_vllm, recipe.stages)):
        run += base  # merged, as vLLM serves no DoRA
    sets = {value for stage in recipe.stages if is_hub_id(str(value := stage.values.get("data", "{")))}
    fetched = is_hub_id(model) and cached_commit(model) is None
    return run, fetched * base + 3.0 * 2**30 * len(sets)


def _trials(stage: Stage) -> int:
    """Trainings that a stage makes one after another."""
    ranges = str(stage.values.get("ranges", ""))
    if stage.command == "sweep":
        return len(parse_ranges(ranges))
    return len(ranges.split(";")) if str(stage.values.get("range", "")) == "auto" else 1


def _asked(recipe: Recipe, stage: Stage) -> list[tuple[Task, int, int]]:
    """(task, answers, tokens of the longest) of a stage; 0 tokens where options are scored by their likelihood."""
    values, found = stage.values, []
    rows = _rows(recipe, stage)
    for task in _tasks(stage):
        if task.engine == "loragate":
            samples, limit = values.get("samples") or task.generation.samples, task.generation.max_new_tokens
            each = sum(1 if row.temperature == 0 else samples for row in rows)
        else:  # no control is asked these
            each, limit = sum(row.control is None for row in rows), load_suite(task.name).max_new_tokens or 0
        count = each * _questions(task, values.get("limit"))
        found.append((task, count, min(limit, values.get("max_new_tokens") or limit)))
    return found


def _rows(recipe: Recipe, stage: Stage) -> list[Variant]:
    """The rows of a stage that asks questions."""
    if stage.command == "diagnose":
        return [Variant("adapter")] * ROWS_OF_LOOK.get(str(stage.values.get("what", "")), 0)
    if "sweep" in stage.values:  # the adapter, and a row for each cell
        cells = [_trials(done) for done in recipe.stages if stage.values["sweep"] == f"{{{done.name}}}"]
        return [Variant("adapter")] * (1 + sum(cells))
    constants = [float(part) for part in str(stage.values.get("constants", "0.5")).split(",")]
    return variants_for(_kind(recipe, stage), stage.values.get("controls", "cheap"), constants)


def _tasks(stage: Stage) -> list[Task]:
    if stage.command not in ("eval", "diagnose"):
        return []
    tasks = list(suite(stage.values["suite"])) if stage.values.get("suite") else []
    return [*tasks, *(load_task(name) for name in str(stage.values.get("tasks", "")).split(",") if name)]


def _decoding(recipe: Recipe, asked: list[tuple[Task, int, int]]) -> tuple[float, float]:
    """(GiB, hours) of drawing these answers, task after task, as `decoding` estimates them."""
    config = _config(recipe, base_of(recipe))
    dtype = base_dtype(config)
    parameters = count_parameters(build_on_meta(config, stage="sft", dtype=dtype), config)
    gpu = find_gpu(recipe.machine or Request.gpu_memory)
    found = [decoding(parameters, config, gpu, dtype, count, tokens) for _, count, tokens in asked]
    return max(memory for memory, _ in found) / 2**30, sum(seconds for _, seconds in found) / 3600


def _plan(recipe: Recipe, stage: Stage) -> Plan:
    model = base_of(recipe)
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


def base_of(recipe: Recipe) -> str:
    """Hub id or folder of the base that the recipe begins with; empty where none is named."""
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
