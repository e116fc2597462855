"""A recipe run in a folder: what is missing is said before the first stage, what is finished is left alone.

Each stage is a process of its own. Stages that answer with vLLM may run in another interpreter, as vLLM and the training
libraries do not always agree on versions; what they lack is asked there.

resolved.yaml          the recipe with the source of every value; a recipe file itself
recipe.json            the same as data, with the state of every stage
config/1-sft.yaml      what each stage was given, for loragate sft --config
sft/  calibrate/  …    the stages' own folders, each with its own run.json and checkpoints
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from loragate.errors import ConfigError, LoragateError
from loragate.files import held, require_new, require_same, write_json, write_text
from loragate.recipes.ready import ask, lacking, needs, settled
from loragate.recipes.recipe import Recipe, Stage
from loragate.training.preflight import wait_for
from loragate.version import __version__

EVAL_PYTHON = "LORAGATE_EVAL_PYTHON"
"""Environment variable that stands for --eval-python."""
RECORD = "recipe.json"
# written last by each command, so their presence says that it came to its end
FINISHED = {
    "sft": ("adapter_model.safetensors", "adapter_config.json", "tokenizer_config.json"),
    "calibrate": ("gate_config.json",),
}
# what a command resumes from, below its folder
BEGUN = {
    "sft": ("run/run.json",),
    "calibrate": ("run/run.json", "run/candidates/**/run.json"),
    "sweep": ("sweep.json",),
    "eval": ("eval.json",),
    "diagnose": ("eval.json",),
}
KEPT = ("run",)  # of a training that was cut off while it wrote its result; the rest is written again


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
    evaluator = interpreter(run)
    planned = list(steps(recipe, run, evaluator))
    stages = [stage for stage, _, _ in planned]
    for stage in stages:  # all of them, whichever are run: what is wrong with a later one is better known now
        settled(stage, recipe.name)
    # no waiting: a second run would wait for hours
    with held(run.folder / "lock", 0.0, f"another run works in {run.folder}; wait for it to end, or stop it"):
        folder = RunFolder.begin(run.folder, recipe)
        wanted = [stage for stage in stages if not run.stages or stage.name in run.stages]
        ahead = [stage for stage in wanted if not folder.is_finished(stage)]
        _require_earlier(stages, wanted, folder)
        if evaluator:
            run.say(f"answers with vLLM: {evaluator}")
        if ahead:
            run.say("checking that every stage can run here: data, graders, engine")
            require_parts(recipe, ahead, run, evaluator)
            if torch.cuda.is_available():
                _say_what_may_not_fit(recipe, ahead, run, torch.cuda.get_device_properties(0).total_memory / 2**30)
        # not before the interpreter has answered for itself: later runs in this folder go by it
        if evaluator:
            folder.note(eval_python=evaluator)
        run.say(f"{recipe.name} in {run.folder}: {', '.join(stage.name for stage in stages)}")
        for number, (stage, command, config) in enumerate(planned, 1):
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
    """Run a command line of loragate as a process of its own; `again` is the command that goes on with the recipe.

    A process that fails is a LoragateError, one that ended after Ctrl-C a KeyboardInterrupt.
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

    Links stay, as an environment is found by them. Empty where none is named; no such program is a ConfigError.
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
            if any(text == out or text.startswith(f"{out}/") for text in read):  # a path in it, such as sweep/best
                chosen = ",".join(stage.name for stage in wanted)
                raise ConfigError(
                    f"--stages {chosen}: stage '{stage.name}' reads what '{done.name}' leaves in {out}, and that has not been "
                    f"run there; give --stages {done.name},{chosen} or leave --stages out"
                )


def _say_what_may_not_fit(recipe: Recipe, stages: Sequence[Stage], run: Run, gib: float) -> None:
    """Name trainings that a GPU of `gib` GiB does not hold with rows as long as their limit, which refuses nothing."""
    with contextlib.suppress(LoragateError):  # no configuration of the base, which has been missed above
        for name, need in needs(recipe).items():
            if need.peak / 2**30 > gib and name in {stage.name for stage in stages}:
                run.say(
                    f"{name}: with rows as long as their limit it takes {need.sentence()}, and there are {gib:.0f}; where it "
                    f"runs out of memory, halve --set {name}.per_device_train_batch_size"
                )


@dataclass
class RunFolder:
    """The folder of a run: what is finished, and what a repeated command does with what lies there.

    `record` is the content of recipe.json.
    """

    path: Path
    record: dict[str, Any]

    @classmethod
    def begin(cls, path: Path, recipe: Recipe) -> RunFolder:
        """The folder of this recipe, new or to be continued; evaluations that have answered nothing yet may have changed.

        Raises:
            ConfigError: if the folder holds another recipe's run, naming the first difference, or something else.
        """
        stages, file = json.loads(json.dumps(recipe.as_record())), path / RECORD
        if file.is_file():
            record = read_record(path)
            # the settings of evaluations that have left nothing are not bound to what lies in the folder
            old, new = ({stage["stage"]: stage for stage in both} for both in (record["stages"], stages))
            for name in [name for name in old if name in new]:
                unfinished = not record["state"].get(name, {}).get("finished")
                answers = new[name]["command"] in ("eval", "diagnose")
                if answers and unfinished and not (path / name / "eval.json").is_file():
                    del old[name], new[name]
            require_same(file, old, new, "run the recipe as it was, or choose another --out")
        else:
            require_new(path, "lock")
            record = {"recipe": recipe.name, "loragate": __version__, "state": {}}
        folder = cls(path, record)
        if record.get("stages") != stages:
            write_text(path / "resolved.yaml", recipe.as_yaml())
            folder.note(stages=stages)
        return folder

    def is_finished(self, stage: Stage) -> bool:
        """Whether the stage came to its end, also where only its record is missing."""
        if self.record["state"].get(stage.name, {}).get("finished"):
            return True
        out = Path(str(stage.values["out"]))
        if stage.command == "mask":
            return out.is_file()
        marks = FINISHED.get(stage.command, ())
        return bool(marks) and all((out / name).is_file() for name in marks)

    def prepare(self, stage: Stage) -> bool:
        """Clear what a killed command may have left half-written; whether the command is to resume. A ConfigError if
        something lies there that this run did not make."""
        out = Path(str(stage.values["out"]))
        if stage.command == "mask":
            return out.with_name(out.name + ".partial").is_dir()  # the mask itself is written last, in one step
        if not out.is_dir():
            return False
        if stage.name not in self.record["state"]:
            raise ConfigError(f"{out} is in the way: this run did not make it. Remove it, or choose another --out")
        begun = any(next(out.glob(pattern), None) is not None for pattern in BEGUN.get(stage.command, ()))
        if stage.command in FINISHED:
            for item in out.iterdir():
                if item.name not in KEPT:
                    shutil.rmtree(item) if item.is_dir() else item.unlink()
        elif not begun:  # nothing to resume from, and the command would refuse a folder that is not empty
            shutil.rmtree(out)
        return begun

    def note(self, **values: Any) -> None:
        """Keep these values."""
        self.record |= values
        write_json(self.path / RECORD, self.record)

    def note_stage(self, stage: Stage, **state: Any) -> None:
        """Keep the state of a stage."""
        before = self.record["state"].get(stage.name, {})
        self.note(state={**self.record["state"], stage.name: {**before, **state}})


def read_record(folder: Path) -> dict[str, Any]:
    """recipe.json of a run; a LoragateError if it cannot be read or is none."""
    file = folder / RECORD
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(record["stages"], list) or not isinstance(record["state"], dict):
            raise ValueError("not a record of a run")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoragateError(f"{file}: cannot be read ({error}); choose another --out") from None
    return dict(record)
