"""A recipe run in a folder: each stage is a process of its own, and a run that was stopped goes on at the stage it was at.

recipe.json            which recipe it is; one process at a time works here
stages.json            {finished stage: seconds}
config/1-sft.yaml      what a stage was started with, for loragate sft --config; later stages may still change
sft/  calibrate/  …    the stages' own folders, each with its own run.json and checkpoints
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from loragate.data import detect_format, load_rows
from loragate.errors import ConfigError, LoragateError, nearest
from loragate.evaluation.judging import require_graders
from loragate.evaluation.prepared import questions_of, select_tasks
from loragate.files import RunFolder, read_json, require_empty_folder, require_same_identity, write_json, write_text
from loragate.generation.vllm_engine import require_vllm
from loragate.models import resolve
from loragate.recipes.costs import memory_warnings
from loragate.recipes.recipe import Recipe, Stage, options_of
from loragate.strict_yaml import read_mapping
from loragate.training.preflight import wait_for_child

TINY_BASE = "tiny-base"
"""Where the base of a tiny recipe lies, beside the stages."""
AS_IT_WAS = "run the recipe as it was, or choose another --out"


class RecipeFolder(RunFolder):
    """The folder of a recipe's run."""

    RECORD = "recipe.json"


def run_recipe(
    recipe: Recipe,
    out: str | Path,
    *,
    only: Sequence[str] = (),
    launcher: str = "",
    resume: bool = False,
    offline: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Run the stages of a recipe in their order.

    Args:
        out: folder of the run.
        only: names of the stages to run, all by default. What they read of others must be there.
        launcher: command line that starts trainings in place of a plain process, such as "accelerate launch -m loragate".
        resume: go on with the run that was begun in `out`; finished stages are left alone.
        offline: nothing is asked of the hub.
        say: told what happens.

    Raises:
        ConfigError: before the first stage, with all that is missing; LoragateError where a stage fails.
    """
    folder, stages = RecipeFolder(Path(out)), recipe.resolve_stages(out)
    names = [stage.name for stage in stages]
    for name in only:
        if name not in names:
            raise ConfigError(f"{recipe.name} has no stage '{name}'{nearest(name, names)}; stages: {', '.join(names)}")
    new = not resume and not folder.record_path.exists()
    if new:
        require_empty_folder(folder.path, "lock", TINY_BASE)
    with folder.locked():
        if not new:
            folder.begin({"recipe": recipe.name}, resume=resume)
        seconds = read_json(folder.path / "stages.json")
        pending = [stage for stage in stages if stage.name not in seconds and stage.name in (only or names)]
        if found := [*find_missing_inputs(stages, pending, seconds), *find_missing_requirements(pending, folder.path)]:
            told = "\n- ".join([f"{recipe.name} was not started; this is missing:", *found])
            ways = (
                "--stages runs some stages now; --set eval.data=FOLDER takes questions from files; --set eval.engine=transformers "
                "does without vLLM"
            )
            raise ConfigError(f"{told}\n{ways}")
        if new:
            folder.begin({"recipe": recipe.name})
        for text in memory_warnings(recipe, [stage.name for stage in pending]) if pending else ():
            say(text)
        for number, stage in enumerate(stages, 1):
            title, config = f"[{number}/{len(stages)}] {stage.name}", folder.path / f"config/{number}-{stage.name}.yaml"
            begin, options = [sys.executable, "-m", "loragate"], stage.options
            if launcher and stage.uses_launcher:  # it says itself how many processes there are
                begin = shlex.split(launcher)
                options = {key: value for key, value in options.items() if key not in ("strategy", "processes")}
            if stage.name in seconds:
                require_same_identity(config, read_mapping(config), options, AS_IT_WAS)
            if stage not in pending:
                say(f"{title}: {'finished before' if stage.name in seconds else 'not asked for'}")
                continue
            go_on = prepare(stage, config, options)
            write_text(
                config, f"# loragate {stage.command} --config {config}\n{yaml.safe_dump(options, sort_keys=False)}"
            )
            say(f"{title}{': going on' if go_on else ''}")
            began = time.monotonic()
            try:
                run_command([*begin, stage.command, "--config", str(config), *["--resume"] * go_on], title, offline)
            except KeyboardInterrupt:
                say("stopped; the same command with --resume goes on")
                raise
            seconds[stage.name] = round(time.monotonic() - began, 1)
            write_json(folder.path / "stages.json", seconds)
            say(f"{title}: done in {seconds[stage.name]:.0f} s")


def find_missing_inputs(stages: Sequence[Stage], ahead: Sequence[Stage], finished: dict[str, Any]) -> Iterator[str]:
    """What stages that are `pending` read of others that are neither ahead nor finished."""
    for number, stage in enumerate(stages):
        for before in stages[:number] if stage in ahead else ():
            out = str(before.options["out"])
            reads = any(f"{value}/".startswith(f"{out}/") for key, value in stage.options.items() if key != "out")
            if reads and before not in ahead and before.name not in finished:
                yield f"{stage.name}: {out}, which stage '{before.name}' leaves: give --stages {before.name},{stage.name}"


def find_missing_requirements(stages: Sequence[Stage], folder: Path) -> Iterator[str]:
    """What stages would lack hours later: rows, dev questions, models, graders, the questions of tasks, vLLM.

    Args:
        stages: placed in `folder`; what lies below it is the work of earlier stages and not looked for.
    """
    for stage in stages:
        options = options_of(stage, stage.name)
        given = {key: str(value) for key, value in stage.options.items() if not str(value).startswith(f"{folder}/")}
        checks: list[Callable[[], Any]] = [
            partial(resolve, given[key], base_optional=True) for key in ("model", "adapter") if key in given
        ]
        if stage.command in ("eval", "diagnose"):
            tasks = select_tasks(options) if options.suite or options.tasks else []
            checks += [require_vllm] if options.engine == "vllm" else []
            checks += [partial(require_graders, tasks, options)] if tasks else []
            checks += [partial(questions_of, options, task, tasks) for task in tasks]
        elif "data" in given:
            checks.append(partial(first_row, given["data"], options.split, options.revision))
        for check in checks:
            try:
                check()
            except LoragateError as error:
                yield f"{stage.name}: {error}"
        for key in ("dev_data", "retention_data"):
            if key in given and not Path(given[key]).is_file():
                yield f"{stage.name}: found no file {given[key]} ({key})"
        if stage.command == "calibrate" and not (options.skip_selection or options.dev_data):
            yield f"{stage.name}: a dev set to choose on: --set {stage.name}.dev_data=FILE --set {stage.name}.dev_task=NAME"


def first_row(data: str, split: str, revision: str) -> None:
    """Read one row and recognise its format; a LoragateError if either fails."""
    detect_format(next(iter(load_rows(data, split=split or None, revision=revision or None, limit=1))))


def prepare(stage: Stage, config: Path, options: dict[str, Any]) -> bool:
    """Clear what a killed command may have left half-written; whether the command is to resume.

    Args:
        config: file that the stage was started with, if it was started before.
        options: what it is to be started with now.

    Raises:
        ConfigError: for something in the way that this run did not make, or a stage that has got somewhere with other options.
    """
    out = Path(str(options["out"]))
    if out.exists() and not config.is_file():
        raise ConfigError(f"{out} is in the way: this run did not make it. Remove it, or choose another --out")
    part = out.with_name(f"{out.name}.partial")  # of a mask
    go_on = part.is_dir() or next(out.rglob(RunFolder.RECORD), None) is not None  # what a command writes first
    if go_on:
        remove = (
            f"repeat it with the same options, or remove {part if part.is_dir() else out} to begin this stage again"
        )
        require_same_identity(config, read_mapping(config), options, f"{remove}; earlier stages stay")
    if out.is_file():
        out.unlink()
    for item in out.iterdir() if out.is_dir() else ():
        # a training keeps its state in run/, and its result beside that is written again; the others have one folder for all
        if not go_on or (stage.command in ("sft", "calibrate") and item.name != "run"):
            shutil.rmtree(item) if item.is_dir() else item.unlink()
    return go_on


def run_command(command: list[str], title: str, offline: bool) -> None:
    """Run a command line to its end; a KeyboardInterrupt after Ctrl-C or SIGTERM, a LoragateError where it fails."""
    hub = {"HF_HUB_OFFLINE": "1"} if offline else {}
    try:
        status = wait_for_child(subprocess.Popen(command, env=os.environ | hub))
    except OSError as error:
        raise ConfigError(f"--launcher: {command[0]} cannot be started ({error.strerror})") from error
    if status == 130:
        raise KeyboardInterrupt
    if status:
        raise LoragateError(f"{title} ended with status {status}, see above; the same command with --resume goes on")
