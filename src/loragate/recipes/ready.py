"""Whether the stages of a recipe can run: what their commands would refuse first thing, what this machine, or another
interpreter on it, lacks, and the memory that the trainings need.

A recipe trains for hours and evaluates last, so each check here is one that a command itself would make late. Nothing is fetched
for a backbone whose file holds its architecture.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from loragate.analysis.plan import Estimate, estimate
from loragate.cli.calibrate import CalibrateOptions, candidates_of
from loragate.cli.diagnose import DiagnoseOptions
from loragate.cli.evaluate import EvalOptions
from loragate.cli.mask import MaskOptions
from loragate.cli.sft import SftOptions
from loragate.cli.sweep import SweepOptions
from loragate.data import detect_format, load_rows
from loragate.errors import ConfigError, LoragateError
from loragate.evaluation.judging import require_graders
from loragate.evaluation.prepared import chosen_tasks, questions_of
from loragate.evaluation.settings import GradingSettings, TaskSettings
from loragate.evaluation.tasks import Task
from loragate.files import write_json
from loragate.generation.sharded import require_ray
from loragate.generation.vllm_engine import require_gate_plugin, require_vllm
from loragate.losses.objectives import objective_of
from loragate.models import ModelSource, base_config, explained, open_tokenizer, read_config, resolve
from loragate.recipes.recipe import Recipe, Stage, options_of
from loragate.selection.evidence import require_evidence
from loragate.selection.questions import read_probe
from loragate.serving.plugin import vllm_version, why_unsupported
from loragate.serving.vllm_server import require_served
from loragate.training.preflight import check_loading, require_reporters
from loragate.version import __version__

ANSWER = "lacking"
"""The verb of `loragate recipes` that answers another interpreter; not for people."""
Asking = EvalOptions | DiagnoseOptions
Check = Callable[[], Any]
"""Raises a `LoragateError` where something is missing."""


def settled(stage: Stage, where: str) -> None:
    """Refuse a stage that its command would refuse first thing, whatever the machine; names recipe, stage and key."""
    options = options_of(stage, where)
    try:
        if isinstance(options, SftOptions):
            objective_of(options.objective, options.objective_options)
        elif isinstance(options, CalibrateOptions):
            candidates_of(options)
        elif isinstance(options, EvalOptions):
            tasks_of(options.suite, options.tasks)
    except ConfigError as error:
        raise ConfigError(f"{where}: stage '{stage.name}': {error}") from error


@cache
def tasks_of(suite: str, tasks: str) -> tuple[Task, ...]:
    """What an evaluation asks; hundreds of recipes ask the same, and to read all task files takes a tenth of a second."""
    return tuple(chosen_tasks(TaskSettings(suite=suite, tasks=tasks)))


def lacking(stages: Sequence[Stage], folder: str) -> list[str]:
    """One sentence for each thing that a stage needs and this interpreter or machine lacks.

    Args:
        stages: placed in `folder`; what lies below it is the work of earlier stages and not looked for.
    """
    found: dict[str, list[str]] = {}
    programs = any(stage.values.get("suite") == "code" for stage in stages)
    for stage in stages:
        # a path that does not exist yet would be missed
        earlier = [key for key, value in stage.values.items() if str(value).startswith(f"{folder}/") and key != "out"]
        here = {key: value for key, value in stage.values.items() if key not in earlier}
        options = options_of(dataclasses.replace(stage, values=here), stage.name)
        if stage.command != "extract":  # which trains nothing: what it refuses is known in minutes
            for text in _missing(_checks(options, stage.name, programs)):
                found.setdefault(text, []).append(stage.name)
    return [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in found.items()]


def ask(python: str, stages: Sequence[Stage], folder: str) -> list[str]:
    """`lacking` in another interpreter, or why it cannot run the stages at all."""
    with tempfile.TemporaryDirectory(prefix="loragate-ready-") as place:
        file = Path(place) / "stages.json"
        write_json(file, {"folder": folder, "stages": [dataclasses.asdict(stage) for stage in stages]})
        # answered in a file, as libraries print to either stream while they are imported
        command = [python, "-m", "loragate", "recipes", ANSWER, str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return [f"--eval-python {python}: cannot be started ({error.strerror})"]
        told_in = file.with_suffix(".answer.json")
        if not told_in.is_file():
            said = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
            return [f"--eval-python {python}: cannot run loragate {__version__} ({said})"]
        told = json.loads(told_in.read_text(encoding="utf-8"))
    if told["loragate"] != __version__:
        return [f"--eval-python {python}: has loragate {told['loragate']}, and this is {__version__}; install the same"]
    return [str(text) for text in told["lacking"]]


def answer(file: Path) -> None:
    """The other side of `ask`: read a file of stages, write what this interpreter lacks for them beside it."""
    asked = json.loads(file.read_text(encoding="utf-8"))
    found = lacking([Stage(**stage) for stage in asked["stages"]], asked["folder"])
    write_json(file.with_suffix(".answer.json"), {"loragate": __version__, "lacking": found})


def _missing(checks: Iterator[Check]) -> Iterator[str]:
    """The sentences of the checks that fail, and of one that cannot even be named, after which there are no others."""
    try:
        for check in checks:
            try:
                check()
            except LoragateError as error:
                yield str(error)
    except LoragateError as error:
        yield str(error)


def _checks(options: Any, stage: str, programs: bool) -> Iterator[Check]:
    """What the command of these options would refuse late, in its own order.

    Args:
        programs: whether the recipe is judged by programs, which have no answer that could agree.
    """
    if isinstance(options, Asking):
        yield partial(_engine, options)
    else:
        if options.data:
            yield partial(_first_row, options.data, options.split or None, options.revision or None)
        if isinstance(options, CalibrateOptions) and options.heldout:
            yield partial(_first_row, options.heldout, options.heldout_split or None, None)
        elif isinstance(options, CalibrateOptions) and options.heldout_split and options.data:
            yield partial(_first_row, options.data, options.heldout_split, options.revision or None)
    if isinstance(options, SftOptions | CalibrateOptions | SweepOptions):
        yield partial(check_loading, options)
        yield partial(require_reporters, options.report_to)
    # calibrate and sweep take an adapter, which is an earlier stage's work
    if isinstance(options, SftOptions | MaskOptions | Asking):
        yield partial(_model, options)
    if isinstance(options, CalibrateOptions):
        alone = options.range == "auto"  # prompts of the training rows stand in for a probe
        yield partial(require_evidence, options, options.probe, options.retention_probe, set_aside=alone)
        if programs and alone and not options.probe:
            raise ConfigError(
                "programs have no answer that could agree, so a range is chosen by labelled questions alone: "
                f"--set {stage}.probe=FILE --set {stage}.probe_task=NAME"
            )
    elif isinstance(options, SweepOptions):
        if options.runner == "ray":
            yield require_ray
        if options.probe:
            yield partial(read_probe, options.probe, options.probe_task, options, need_answers=True)
    elif isinstance(options, Asking) and (options.suite or options.tasks):
        tasks, settings = tasks_of(options.suite, options.tasks), GradingSettings(sandbox=options.sandbox)
        yield from (partial(require_graders, [task], settings) for task in tasks)
        yield from (partial(questions_of, options, task, tasks) for task in tasks)


@cache
def _first_row(data: str, split: str | None, revision: str | None) -> None:
    detect_format(next(iter(load_rows(data, split=split, revision=revision, limit=1))))


def _model(options: SftOptions | MaskOptions | Asking) -> None:
    if (place := _base_of(options.model)) is not None:
        open_tokenizer(place, options)


def _base_of(name: str) -> ModelSource | None:
    """The place of a model that is a base; None for an adapter with or without gates, here or on the hub."""
    place = resolve(name, base_later=True) if name else None
    return place if place is not None and place.kind == "base" else None


def _engine(options: Asking) -> None:
    check_loading(options, options.engine)
    if options.engine != "vllm":
        return
    require_vllm()
    if reason := why_unsupported(vllm_version()):
        raise ConfigError(reason)
    try:
        require_gate_plugin("this run")
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise ConfigError(f"vLLM cannot be imported: {type(error).__name__}: {error}") from error
    if (place := _base_of(options.model)) is not None:
        with explained("base model", place.base.name):
            config = base_config(place.base, options.trust_remote_code)
        require_served(place.base.name, config)


def needs(recipe: Recipe) -> dict[str, Estimate]:
    """{stage: what its training needs of a GPU with every row as long as its limit}, for stages that train one model at a time."""
    # what a stage does not set is that of the stage whose adapter it goes on with
    first = next((stage.values for stage in recipe.stages if stage.command == "sft"), {})
    found = {}
    for stage in recipe.stages:
        if stage.command not in ("sft", "calibrate", "sweep"):
            continue
        values = {**first, **stage.values}
        quantised = values.get("quantization", "none") != "none"
        dtype = values.get("dtype", "auto")
        asked: dict[str, Any] = {"stage": "sft" if stage.command == "sft" else "calibrate"}
        asked |= {"base": values["quantization"] if quantised else "bfloat16" if dtype == "auto" else dtype}
        asked |= {"adapter": int(values.get("rank", 16)), "autocast": values.get("precision") in ("bf16", "fp16")}
        asked |= {
            "sequence": int(values.get("max_length", 2048)),
            "rows": int(values.get("per_device_train_batch_size", 1)),
        }
        checkpointing = bool(stage.values.get("gradient_checkpointing"))
        found[stage.name] = estimate(_config(recipe), gradient_checkpointing=checkpointing, **asked)
    return found


def _config(recipe: Recipe) -> Any:
    """The configuration of the base."""
    if recipe.base not in recipe.architecture:
        return read_config(recipe.base)
    values = dict(recipe.architecture[recipe.base])
    return AutoConfig.for_model(values.pop("model_type"), **values)
