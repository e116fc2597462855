"""A recipe run in a folder: what is missing is said before the first stage, what is finished is left alone.

Each stage is a process of its own. Stages that answer with vLLM may run in another interpreter, as vLLM and the training
libraries do not always agree on versions; what they lack is asked there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from loragate.errors import ConfigError, LoragateError
from loragate.files import held, write_text
from loragate.recipes.folder import RECORD, RunFolder, read_record
from loragate.recipes.machine import needs
from loragate.recipes.ready import ask, lacking, settled
from loragate.recipes.recipe import Recipe, Stage
from loragate.training.launching import wait_for

EVAL_PYTHON = "LORAGATE_EVAL_PYTHON"
"""Environment variable that stands for --eval-python."""


@dataclass(frozen=True)
class Run:
    """How a recipe is run.

    Attributes:
        folder: of the run; the same recipe goes on in it.
        stages: names of the stages to run; empty for all.
        launcher: how training stages are started, in place of a plain process.
        eval_python: interpreter of the stages that answer with vLLM; the environment and the folder may name one too.
        again: the command that goes on with the run, for messages; that of the command line where none is given.
        say: told what happens.
    """

    folder: Path
    stages: Sequence[str] = ()
    launcher: str = ""
    eval_python: str = ""
    again: str = ""
    say: Callable[[str], None] = print


def run_recipe(recipe: Recipe, run: Run) -> dict[str, float]:
    """Run the stages in their order; those that are finished are left alone.

    Returns:
        {stage: seconds} of all stages that have ever been finished in this folder.

    Raises:
        ConfigError: before the first stage, with everything that is missing; LoragateError where a stage fails.
    """
    for name in run.stages:
        recipe.stage(name)
    again = run.again or shlex.join(["loragate", "recipes", "run", recipe.name, "--out", str(run.folder)])
    stages = [stage for stage, _, _ in steps(recipe, run)]
    for stage in stages:
        settled(stage, recipe.name)
    with held(run.folder / "lock", 0.0, f"another run works in {run.folder}; wait for it to end, or stop it"):
        folder = RunFolder.begin(run.folder, recipe)
        wanted = [stage for stage in stages if not run.stages or stage.name in run.stages]
        ahead = [stage for stage in wanted if not folder.is_finished(stage)]
        _require_earlier(stages, wanted, folder)
        evaluator = interpreter(run)
        if evaluator:
            run.say(f"answers with vLLM: {evaluator}")
        if ahead:
            run.say("checking that every stage can run here: data, graders, engine")
            require_parts(recipe, ahead, run, evaluator)
            if torch.cuda.is_available():
                _say_what_may_not_fit(recipe, ahead, run, torch.cuda.get_device_properties(0).total_memory / 2**30)
        if evaluator:  # later runs in this folder go by it
            folder.note(eval_python=evaluator)
        run.say(f"{recipe.name} in {run.folder}: {', '.join(stage.name for stage in stages)}")
        for number, (stage, command, config) in enumerate(steps(recipe, run, evaluator), 1):
            title = f"[{number}/{len(stages)}] {stage.name}"
            if stage not in ahead:
                run.say(f"{title}: {'finished before' if stage in wanted else 'not asked for'}")
                continue
            resume = folder.prepare(stage)
            write_text(config, config_text(stage, command))
            run.say(f"{title}{': going on' if resume else ''}")
            runs = folder.record["state"].get(stage.name, {}).get("started", [])
            folder.note_stage(stage, command=shlex.join(command), started=[*runs, time.strftime("%Y-%m-%dT%H:%M:%S%z")])
            began = time.monotonic()
            start([*command, *(["--resume"] if resume else [])], f"{title} of {recipe.name}", again)
            folder.note_stage(stage, finished=True, seconds=round(time.monotonic() - began, 1))
            run.say(f"{title}: done in {time.monotonic() - began:.0f} s")
    return {name: state["seconds"] for name, state in folder.record["state"].items() if "seconds" in state}


def steps(recipe: Recipe, run: Run, evaluator: str = "") -> Iterator[tuple[Stage, list[str], Path]]:
    """(stage in the run's folder, command line, the file that it reads) of every stage."""
    for number, stage in enumerate(recipe.placed(run.folder), 1):
        config = run.folder / "config" / f"{number}-{stage.name}.yaml"
        begin = [evaluator if evaluator and stage.vllm else sys.executable, "-m", "loragate"]
        if run.launcher and stage.launched:  # it says itself how many processes there are
            begin = shlex.split(run.launcher)
            values = {key: value for key, value in stage.values.items() if key not in ("strategy", "processes")}
            stage = dataclasses.replace(stage, values=values)
        yield stage, [*begin, stage.command, "--config", str(config)], config


def config_text(stage: Stage, command: list[str]) -> str:
    """The file that a stage's command line reads, its values as they are; what starts it stands in the first line."""
    begin = command[2:] if command[0] == sys.executable else command
    return f"# {shlex.join(begin)}\n{yaml.safe_dump(stage.values, sort_keys=False, allow_unicode=True)}"


def start(command: list[str], what: str, again: str) -> None:
    """Run a command line of loragate as a process of its own.

    Args:
        again: the command that goes on with the recipe, which is not the stage's own.

    Raises:
        LoragateError: if it fails; KeyboardInterrupt once it has ended after Ctrl-C.
    """
    try:
        status = wait_for(subprocess.Popen(command))
    except OSError as error:
        raise ConfigError(f"--launcher: {command[0]} cannot be started ({error.strerror})") from error
    except KeyboardInterrupt:
        status = 130
    if status == 130:
        print(f"the stage goes on where it was with the same command:\n  {again}", file=sys.stderr)
        raise KeyboardInterrupt
    if status:
        raise LoragateError(
            f"{what} ended with status {status}; what it said stands above. The same command goes on from there: {again}"
        )


def interpreter(run: Run) -> str:
    """The program that starts stages with vLLM, by its whole path, as `--eval-python`, the environment or the folder names it.

    Links stay, as an environment is found by them. Empty where none is named.

    Raises:
        ConfigError: if there is no such program.
    """
    named = run.eval_python or os.environ.get(EVAL_PYTHON, "")
    if not named and (run.folder / RECORD).is_file():
        named = read_record(run.folder).get("eval_python", "")
    found = shutil.which(Path(named).expanduser()) if named else ""
    if found is None:
        raise ConfigError(
            f"--eval-python {named}: no program that can be started; give the bin/python of an environment"
        )
    return os.path.abspath(found) if found else ""


def require_parts(recipe: Recipe, stages: Sequence[Stage], run: Run, evaluator: str = "") -> None:
    """Refuse a run of which any stage could not come to its end here, before anything is trained.

    Args:
        stages: those that are going to run, placed in the run's folder.
        evaluator: the interpreter of stages that answer with vLLM; empty for this one.

    Raises:
        ConfigError: with everything that is missing, stage by stage, and what to do instead.
    """
    place = str(run.folder)
    found = lacking([stage for stage in stages if not stage.vllm], place)
    # the model is not there yet, and has the tokenizer and the layers of its base
    model = {"model": recipe.base}
    answering = [dataclasses.replace(stage, values={**stage.values, **model}) for stage in stages if stage.vllm]
    if answering and not evaluator and importlib.util.find_spec("vllm") is None:
        found += lacking(answering, place)
    elif answering:
        found += ask(evaluator or sys.executable, answering, place)
    if not found:
        return
    count = f"{len(found)} things are missing" if len(found) > 1 else "one thing is missing"
    rest = [stage.name for stage in stages if stage.command not in ("eval", "diagnose")]
    ways = []
    if 0 < len(rest) < len(stages):
        ways.append(f"--stages {','.join(rest)} leaves the evaluations for later")
    if answering:
        ways.append(f"--set {answering[0].name}.engine=transformers does without vLLM")
        ways += [] if evaluator else ["--eval-python PATH names the python of an environment that has vLLM"]
    if any("--data " in text for text in found):
        ways.append(f"--set {stages[-1].name}.data=FOLDER takes local copies of the questions")
    lines = "".join(f"\n- {text}" for text in found)
    raise ConfigError(f"{recipe.name} was not started, {count}:{lines}" + (f"\n{'; '.join(ways)}" if ways else ""))


def _require_earlier(stages: Sequence[Stage], wanted: Sequence[Stage], folder: RunFolder) -> None:
    """Refuse to leave out what a chosen stage reads."""
    for number, stage in enumerate(stages):
        for done in stages[:number] if stage in wanted else ():
            if done in wanted or folder.is_finished(done):
                continue
            out = str(done.values["out"])
            read = [str(value) for key, value in stage.values.items() if key != "out"]
            if any(text == out or text.startswith(f"{out}/") for text in read):
                chosen = ",".join(stage.name for stage in wanted)
                raise ConfigError(
                    f"--stages {chosen}: stage '{stage.name}' reads what '{done.name}' leaves in {out}, and that has not been "
                    f"run there; give --stages {done.name},{chosen} or leave --stages out"
                )


def _say_what_may_not_fit(recipe: Recipe, stages: Sequence[Stage], run: Run, gib: float) -> None:
    """Name trainings that a GPU of `gib` GiB does not hold with rows as long as their limit, which refuses nothing."""
    with contextlib.suppress(LoragateError):  # no configuration of the base, which has been missed above
        for need in needs(recipe):
            if need.gib > gib and need.stage in {stage.name for stage in stages}:
                run.say(
                    f"{need.stage}: with rows as long as their limit it takes {need.gib:.0f} GiB of a GPU, and there are "
                    f"{gib:.0f}; where it runs out of memory, halve --set {need.stage}.micro_batch_size"
                )
