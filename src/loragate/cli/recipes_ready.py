"""What a run of a recipe asks before its first stage: is the work of earlier stages there, and what do later ones lack?

A recipe trains for hours and evaluates last, so everything that is missing is said at once, before anything starts. Stages
that answer with vLLM may run in an interpreter of their own, as vLLM and the training libraries do not always agree on
versions; what those stages lack is asked there: `python -m loragate.cli.recipes_ready FILE`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError, LoragateError
from loragate.files import write_json
from loragate.recipes.recipe import Recipe, Stage
from loragate.recipes.show import uses_vllm
from loragate.version import __version__

EVAL_PYTHON = "LORAGATE_EVAL_PYTHON"
"""Environment variable that stands for --eval-python."""
Check = Callable[[], Any]
"""Raises a `LoragateError` where something is missing; may give further checks, each of which is made."""


def require_earlier(stages: Sequence[Any], wanted: Sequence[str], folder: Any) -> None:
    """Refuse `--stages` that leave out what a chosen stage reads.

    Args:
        stages: placed in the run's folder.
        wanted: names of the chosen stages; empty for all.
        folder: `RunFolder`, which knows what is finished.

    Raises:
        ConfigError: naming both stages.
    """
    for number, stage in enumerate(stages):
        if wanted and stage.name not in wanted:
            continue
        for done in stages[:number]:
            if not wanted or done.name in wanted or folder.is_finished(done):
                continue
            out = Path(folder.path) / done.output
            read = [str(value) for key, value in stage.values.items() if key != "out"]
            if any(text == str(out) or text.startswith(f"{out}/") for text in read):
                raise ConfigError(
                    f"--stages {','.join(wanted)}: stage '{stage.name}' reads what '{done.name}' leaves in {out}, and that has "
                    f"not been run there; give --stages {done.name},{','.join(wanted)} or leave --stages out"
                )


def interpreter(named: str) -> str:
    """The program behind `--eval-python`, by its whole path; links stay, as an environment is found by them.

    Raises:
        ConfigError: if there is none.
    """
    found = shutil.which(Path(named).expanduser()) if named else ""
    if found is None:
        raise ConfigError(
            f"--eval-python {named}: no program that can be started; give the bin/python of an environment"
        )
    return os.path.abspath(found) if found else ""


def require_parts(recipe: Recipe, stages: Sequence[Stage], folder: Path, evaluator: str = "") -> None:
    """Refuse a run of which any stage could not come to its end here, before anything is trained.

    Args:
        stages: those that are going to run, placed in `folder`.
        evaluator: the interpreter of stages that answer with vLLM; empty for this one.

    Raises:
        ConfigError: with everything that is missing, stage by stage, and what to do instead.
    """
    from loragate.recipes.machine import base_of

    found = lacking([stage for stage in stages if not uses_vllm(stage)], str(folder))
    # the model is not there yet, and has the tokenizer and the layers of its base
    model = {"model": base_of(recipe)}
    answering = [dataclasses.replace(s, values={**s.values, **model}) for s in stages if uses_vllm(s)]
    if answering and not evaluator and importlib.util.find_spec("vllm") is None:
        found += lacking(answering, str(folder))
    elif answering:
        found += _ask(evaluator or sys.executable, answering, str(folder))
    found += _disk(recipe, folder)
    if not found:
        return
    count = f"{len(found)} things are missing" if len(found) > 1 else "one thing is missing"
    rest = ",".join(stage.name for stage in stages if stage.command not in ("eval", "diagnose"))
    ways = [f"--stages {rest} leaves the evaluations for later"] if rest and len(rest.split(",")) < len(stages) else []
    if answering:
        ways.append(f"--set {answering[0].name}.engine=transformers does without vLLM")
        ways += [] if evaluator else ["--eval-python PATH names the python of an environment that has vLLM"]
    if any("--data " in text for text in found):
        ways.append(f"--set {stages[-1].name}.data=FOLDER takes local copies of the questions")
    lines = "".join(f"\n- {text}" for text in found)
    raise ConfigError(f"{recipe.name} was not started, {count}:{lines}" + (f"\n{'; '.join(ways)}" if ways else ""))


def lacking(stages: Sequence[Stage], folder: str) -> list[str]:
    """One sentence for each thing that a stage needs and this interpreter or machine lacks.

    Args:
        stages: placed in `folder`; what lies below it is the work of earlier stages and not looked for.
    """
    from loragate.cli.recipes import validate

    found: dict[str, list[str]] = {}
    for stage in stages:
        here = {key: value for key, value in stage.values.items() if not str(value).startswith(f"{folder}/")}
        options = validate(dataclasses.replace(stage, values=here), stage.name)
        options = dataclasses.replace(options, **({"out": f"{folder}/{stage.out}"} if hasattr(options, "out") else {}))
        for check in CHECKS.get(stage.command, ()):
            for text in _tried(partial(check, options)):
                found.setdefault(text, []).append(stage.name)
    return [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in found.items()]


def _tried(check: Check) -> Iterator[str]:
    """The sentences of a check that fails, and of those that it consists of."""
    try:
        parts = check()
        for part in parts if isinstance(parts, Iterator) else ():
            yield from _tried(part)
    except LoragateError as error:
        yield str(error)


def _data(options: Any) -> Iterator[Check]:
    if options.data:
        yield partial(_first_row, options.data, options.split or None, options.revision or None)
    heldout, split = getattr(options, "heldout", ""), getattr(options, "heldout_split", "")
    if heldout or (split and options.data):
        yield partial(_first_row, heldout or options.data, split or None, None if heldout else options.revision or None)


@cache
def _first_row(data: str, split: str | None, revision: str | None) -> None:
    from loragate.data import detect_format, load_rows

    detect_format(next(iter(load_rows(data, split=split, revision=revision, limit=1))))


def _model(options: Any) -> None:
    from loragate.models import Loading, open_tokenizer

    if (place := _base_of(options.model)) is not None:
        open_tokenizer(place, Loading.of(options))


def _base_of(name: str) -> Any:
    """The place of a model that is a base; None for an adapter with or without gates, here or on the hub."""
    from loragate.models import resolve

    place = resolve(name, base_later=True) if name else None
    return place if place is not None and place.kind == "base" else None


def _libraries(options: Any) -> None:
    from loragate.cli.preflight import check_loading, require_reporters

    check_loading(options)
    require_reporters(getattr(options, "report_to", "none"))
    if getattr(options, "runner", "") == "ray":
        from loragate.generation.sharded import require_ray

        require_ray()


def _evidence(options: Any) -> None:
    from loragate.selection.evidence import require_evidence

    # without a probe a range is chosen on prompts of the training rows, of which there are enough
    spare = range(options.max_rows) if options.range == "auto" else None
    require_evidence(options, options.probe or None, options.retention_probe or None, spare)


def _probe(options: Any) -> None:
    from loragate.selection.sweep import read_labelled

    for file in filter(None, (options.probe, options.test)):
        read_labelled(file, options)


def _engine(options: Any) -> None:
    from loragate.generation.vllm_engine import require_gate_plugin, require_vllm
    from loragate.models import base_config, explained
    from loragate.serving.versions import vllm_version, why_unsupported
    from loragate.serving.vllm_server import require_served

    if getattr(options, "engine", "") == "vllm":
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


def _graders(options: Any) -> Iterator[Check]:
    from loragate.evaluation.judging import JudgeSettings, require_graders

    tasks, settings = _tasks(options), JudgeSettings(sandbox=options.sandbox)
    for task in tasks:
        if task.engine == "loragate":
            yield partial(require_graders, [task], "", settings)
    if any(task.engine != "loragate" for task in tasks) and importlib.util.find_spec("lm_eval") is None:
        raise ConfigError('retention suites need lm-evaluation-harness; pip install "loragate[eval]"')


def _questions(options: Any) -> Iterator[Check]:
    from loragate.cli.evaluation_inputs import commits_of, files_of, local_file
    from loragate.evaluation.retention import describe_suite
    from loragate.evaluation.tasks import load_questions

    tasks = _tasks(options)
    files, commits = files_of(options, tasks), commits_of(options, tasks)
    for task in tasks:
        file, commit = files.get(task.name), commits.get(task.name)
        if task.engine == "loragate":
            yield partial(load_questions, task, file, options.limit, options.seed, commit)
        else:
            where = local_file(file, task.name) if file else None
            yield partial(describe_suite, task.name, where, options.limit, options.max_new_tokens, commit)


def _tasks(options: Any) -> list[Any]:
    from loragate.cli.evaluation_inputs import chosen_tasks

    return chosen_tasks(options) if options.suite or options.tasks else []


ASKING = (_model, _libraries, _graders, _questions)
CHECKS: dict[str, tuple[Callable[[Any], Iterator[Check] | None], ...]] = {
    "sft": (_data, _model, _libraries),
    "mask": (_data, _model),
    "calibrate": (_data, _libraries, _evidence),
    "sweep": (_data, _libraries, _probe),
    "eval": (_engine, *ASKING),
    "diagnose": (_engine, *ASKING),
}


def _ask(python: str, stages: Sequence[Stage], folder: str) -> list[str]:
    """What the stages lack in another interpreter, or that it cannot run them at all."""
    with tempfile.TemporaryDirectory(prefix="loragate-ready-") as place:
        file = Path(place) / "stages.json"
        write_json(file, {"folder": folder, "stages": [dataclasses.asdict(stage) for stage in stages]})
        command = [python, "-m", "loragate.cli.recipes_ready", str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return [f"--eval-python {python}: cannot be started ({error.strerror})"]
        answer = file.with_suffix(".answer.json")
        if not answer.is_file():
            said = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
            return [f"--eval-python {python}: cannot run loragate {__version__} ({said})"]
        told = json.loads(answer.read_text(encoding="utf-8"))
    if told["loragate"] != __version__:
        return [f"--eval-python {python}: has loragate {told['loragate']}, and this is {__version__}; install the same"]
    return [str(text) for text in told["lacking"]]


def _disk(recipe: Recipe, folder: Path) -> Iterator[str]:
    """Too little room for checkpoints and answers, or for what comes from the hub."""
    from huggingface_hub.constants import HF_HOME

    from loragate.recipes.machine import disk

    try:
        run, hub = disk(recipe)
    except LoragateError:
        return  # without the base's configuration, which has been missed above
    needs = {folder: run, Path(HF_HOME): hub}
    disks: dict[int, tuple[Path, float]] = {}
    for path, size in needs.items():
        there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
        number = there.stat().st_dev
        disks[number] = (there, size + disks.get(number, (there, 0.0))[1])
    for there, size in disks.values():
        free = shutil.disk_usage(there).free
        if free < size:
            yield f"disk: {free / 2**30:.1f} GiB are free at {there}, and about {size / 2**30:.1f} are needed"


def main(arguments: Sequence[str]) -> int:
    """Answer `_ask`: read the file of stages, write what is missing beside it."""
    from loragate.cli.preflight import quiet_logging

    file = Path(arguments[0])
    asked = json.loads(file.read_text(encoding="utf-8"))
    quiet_logging()
    found = lacking([Stage(**stage) for stage in asked["stages"]], asked["folder"])
    write_json(file.with_suffix(".answer.json"), {"loragate": __version__, "lacking": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
