"""Whether the stages of a recipe can run: what their commands would refuse first thing, and what this machine, or another
interpreter on it, lacks.

A recipe trains for hours and evaluates last, so each check here is one that a command itself would make late.
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

from loragate.cli.calibrate import CalibrateOptions, candidates_of
from loragate.cli.diagnose import DiagnoseOptions
from loragate.cli.evaluate import EvalOptions
from loragate.cli.mask import MaskOptions
from loragate.cli.sft import SftOptions
from loragate.cli.sweep import SweepOptions
from loragate.data import detect_format, load_rows
from loragate.errors import ConfigError, LoragateError
from loragate.evaluation.judging import JudgeSettings, require_graders
from loragate.evaluation.prepared import chosen_tasks, questions_of
from loragate.evaluation.tasks import Task
from loragate.files import write_json
from loragate.generation.sharded import require_ray
from loragate.generation.vllm_engine import require_gate_plugin, require_vllm
from loragate.losses.objectives import objective_of
from loragate.models import Place, base_config, explained, open_tokenizer, resolve
from loragate.recipes.recipe import Stage, options_of
from loragate.selection.evidence import require_evidence
from loragate.selection.questions import read_labelled
from loragate.serving.versions import vllm_version, why_unsupported
from loragate.serving.vllm_server import require_served
from loragate.training.preflight import check_loading, require_reporters
from loragate.version import __version__

ANSWER = "lacking"
"""The verb of `loragate recipes` that answers another interpreter; not for people."""
Training = SftOptions | CalibrateOptions | SweepOptions
Asking = EvalOptions | DiagnoseOptions
Check = Callable[[], Any]
"""Raises a `LoragateError` where something is missing; may give further checks, each of which is made."""


def settled(stage: Stage, where: str) -> None:
    """Refuse a stage that its command would refuse first thing, whatever the machine.

    Raises:
        ConfigError: naming recipe, stage and key.
    """
    options = options_of(stage, where)
    try:
        if isinstance(options, SftOptions):
            objective_of(options.objective, options.objective_options)
        elif isinstance(options, CalibrateOptions):
            candidates_of(options)
        elif isinstance(options, EvalOptions):
            _known_tasks(options.suite, options.tasks)
    except ConfigError as error:
        raise ConfigError(f"{where}: stage '{stage.name}': {error}") from error


@cache
def _known_tasks(suite: str, tasks: str) -> None:
    chosen_tasks(EvalOptions(suite=suite, tasks=tasks))


def lacking(stages: Sequence[Stage], folder: str) -> list[str]:
    """One sentence for each thing that a stage needs and this interpreter or machine lacks.

    Args:
        stages: placed in `folder`; what lies below it is the work of earlier stages and not looked for.
    """
    found: dict[str, list[str]] = {}
    programs = any(stage.values.get("suite") == "code" for stage in stages)
    for stage in stages:
        here = {key: value for key, value in stage.values.items() if not str(value).startswith(f"{folder}/")}
        options = options_of(dataclasses.replace(stage, values=here), stage.name)
        options = dataclasses.replace(
            options, **({"out": f"{folder}/{stage.output}"} if hasattr(options, "out") else {})
        )
        checks = [partial(check, options) for check in CHECKS.get(stage.command, ())]
        if programs and isinstance(options, CalibrateOptions):
            checks.append(partial(_evidence_on_programs, options, stage.name))
        for check in checks:
            for text in _tried(check):
                found.setdefault(text, []).append(stage.name)
    return [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in found.items()]


def ask(python: str, stages: Sequence[Stage], folder: str) -> list[str]:
    """`lacking` in another interpreter, or why it cannot run the stages at all."""
    with tempfile.TemporaryDirectory(prefix="loragate-ready-") as place:
        file = Path(place) / "stages.json"
        write_json(file, {"folder": folder, "stages": [dataclasses.asdict(stage) for stage in stages]})
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


def _tried(check: Check) -> Iterator[str]:
    """The sentences of a check that fails, and of those that it consists of."""
    try:
        parts = check()
        for part in parts if isinstance(parts, Iterator) else ():
            yield from _tried(part)
    except LoragateError as error:
        yield str(error)


def _data(options: Training | MaskOptions) -> Iterator[Check]:
    if options.data:
        yield partial(_first_row, options.data, options.split or None, options.revision or None)
    if not isinstance(options, CalibrateOptions):
        return
    if options.heldout:
        yield partial(_first_row, options.heldout, options.heldout_split or None, None)
    elif options.heldout_split and options.data:
        yield partial(_first_row, options.data, options.heldout_split, options.revision or None)


@cache
def _first_row(data: str, split: str | None, revision: str | None) -> None:
    detect_format(next(iter(load_rows(data, split=split, revision=revision, limit=1))))


def _model(options: SftOptions | MaskOptions | Asking) -> None:
    if (place := _base_of(options.model)) is not None:
        open_tokenizer(place, options)


def _base_of(name: str) -> Place | None:
    """The place of a model that is a base; None for an adapter with or without gates, here or on the hub."""
    place = resolve(name, base_later=True) if name else None
    return place if place is not None and place.kind == "base" else None


def _training(options: Training) -> Iterator[Check]:
    yield from _data(options)
    yield partial(check_loading, options)
    yield partial(require_reporters, options.report_to)


def _calibrating(options: CalibrateOptions) -> Iterator[Check]:
    yield from _training(options)
    alone = options.range == "auto"  # prompts of the training rows stand in for a probe
    yield partial(require_evidence, options, options.probe, options.retention_probe, set_aside=alone)


def _evidence_on_programs(options: CalibrateOptions, stage: str) -> None:
    """Refuse a choice among programs without labels, which their command meets after the adapter's training."""
    if options.range == "auto" and not options.probe:
        raise ConfigError(
            "programs have no answer that could agree, so a range is chosen by labelled questions alone: "
            f"--set {stage}.probe=FILE --set {stage}.probe_task=NAME"
        )


def _sweeping(options: SweepOptions) -> Iterator[Check]:
    yield from _training(options)
    if options.runner == "ray":
        yield require_ray
    if options.probe:
        yield partial(read_labelled, options.probe, options.probe_task, options)


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


def _graders(options: Asking) -> Iterator[Check]:
    tasks, settings = _tasks(options), JudgeSettings(sandbox=options.sandbox)
    for task in tasks:
        yield partial(require_graders, [task], "", settings)


def _questions(options: Asking) -> Iterator[Check]:
    tasks = _tasks(options)
    for task in tasks:
        yield partial(questions_of, options, task, tasks)


def _tasks(options: Asking) -> list[Task]:
    return chosen_tasks(options) if options.suite or options.tasks else []


ASKING = (_engine, _model, _graders, _questions)
# checks of the options of each command
CHECKS: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "sft": (_training, _model),
    "mask": (_data, _model),
    "calibrate": (_calibrating,),
    "sweep": (_sweeping,),
    "eval": ASKING,
    "diagnose": ASKING,
}
