"""`loragate recipes`: list, show, run, rehearse and check everything the paper trains, by name."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from loragate.cli.arguments import Command, checked_values, comma_list, field_kinds, flag_of
from loragate.cli.display import console, duration, next_evaluation, printable
from loragate.cli.launching import wait_for
from loragate.errors import ConfigError, LoragateError, nearest

VERBS = ("list", "show", "run", "rehearse", "check")
# a table, figure or appendix of the paper, as people write it
PLACE = re.compile(r"(?P<kind>tab|fig|app)[a-z]*[\W_]*(?P<number>\d+|\b[a-z])", re.IGNORECASE)
TRAINING = ("sft", "calibrate", "sweep", "mask")


@dataclass(frozen=True)
class RecipesOptions:
    """Settings of `loragate recipes`.

    Attributes:
        words: list [FILTER], show NAME, run NAME, rehearse NAME, or check [FILTER]; a FILTER of list is part of a name or a place
            in the paper, such as "table 6"; a NAME may be the path of a YAML file of your own.
        set: change a value, as in --set sft.max_rows=2000 for one stage or --set seed=1 for all; may be repeated.
        out: run folder of run [runs/recipes/NAME]; the same command again continues the
            run. rehearse keeps nothing without it.
        local_model: folder of the base model in place of its hub id.
        local_data: file of rows in place of the hub data set, with the same columns.
        recipes_dir: your own recipe folders (domain/, backbone/, method/, variant/), separated by commas.
        stages: run only these stages, separated by commas; earlier stages must have run.
        eval_python: python of another environment, in which stages that answer with vLLM run; LORAGATE_EVAL_PYTHON says the same,
            and the run's folder remembers it.
        launcher: how training stages are started, such as "accelerate launch --num_processes 2 -m loragate".
        dry_run: print the plain commands of run and stop; for rehearse also what is replaced, and what the full run needs.
        variants: list variants (the paper's three seeds) too.
    """

    words: tuple[str, ...] = ()
    set: tuple[str, ...] = ()
    out: str = ""
    local_model: str = ""
    local_data: str = ""
    recipes_dir: str = ""
    stages: str = ""
    eval_python: str = ""
    launcher: str = ""
    dry_run: bool = False
    variants: bool = False


def run(options: RecipesOptions) -> int:
    """Do what the first word says."""
    verb, *rest = options.words or ("list",)
    if verb not in VERBS:
        raise ConfigError(f"loragate recipes {verb}: expected {', '.join(VERBS)}{nearest(verb, VERBS)}")
    if len(rest) > 1:
        raise ConfigError(f"loragate recipes {verb} takes one name, found {' '.join(rest)}")
    _require_effect(options, verb)
    if verb in ("show", "run", "rehearse") and not rest:
        raise ConfigError(f"loragate recipes {verb} needs a name; for example: loragate recipes {verb} {EXAMPLE}")
    from loragate.recipes.library import library

    shelf = library(options.recipes_dir)
    name = rest[0] if rest else ""
    if verb == "list":
        return list_recipes(options, shelf, name)
    if verb == "check":
        from loragate.cli.recipes_rehearse import check

        return check(shelf, name)
    recipe = resolved(options, shelf, name)
    for stage in recipe.placed("out"):
        validate(stage, recipe.name)
    if verb == "show":
        return show(options, recipe)
    if verb == "rehearse":
        from loragate.cli.recipes_rehearse import rehearse

        return rehearse(options, recipe)
    return run_recipe(options, recipe)


def list_recipes(options: RecipesOptions, shelf: Any, wanted: str) -> int:
    """One line per recipe: name, and where in the paper it stands."""
    from loragate.recipes import every_name, read_recipe

    out = console()
    place = PLACE.fullmatch(wanted.strip())
    every = list(every_name(shelf, variants=options.variants or place is not None))
    found = {name: read_recipe(name, shelf).tables for name in every if place or wanted in name}
    if place:
        found = {name: tables for name, tables in found.items() if stands_in(tables, place)}
    if not found:
        raise ConfigError(
            f"no recipe's name contains '{wanted}', nor does one stand in a table or figure of that name (write 'table 6' or "
            "'fig. 3'); loragate recipes list shows all of them"
        )
    wide = max(map(len, found))
    for name, tables in found.items():
        out.print(f"{name:<{wide}}  {tables or 'beyond the paper'}", markup=False)
    out.print(f"{len(found)} recipes; next: loragate recipes show {next(iter(found))}", markup=False)
    return 0


def stands_in(tables: str, place: re.Match[str]) -> bool:
    """Whether a list such as "Tables 1, 5; Fig. 3" names this place."""
    lists = re.findall(r"(Tab|Fig|App)[a-z]*\.? ([\dA-Z, ]+)", tables)
    return any(
        word == place["kind"].capitalize() and place["number"].upper() in re.findall(r"\w+", numbers)
        for word, numbers in lists
    )


def show(options: RecipesOptions, recipe: Any) -> int:
    """The recipe, and how it is run."""
    from loragate.recipes.show import as_yaml, command_lines

    print(printable(as_yaml(recipe)))
    folder = options.out or default_folder(recipe)
    print(f"# all of it, resumable:\n#   {run_line(options, recipe, folder)}\n#\n# or by hand:")
    for line in command_lines(recipe, folder, switches(), options.launcher, options.eval_python):
        print("\n".join(f"#   {printable(part)}" for part in line.splitlines()))
    return 0


def run_recipe(options: RecipesOptions, recipe: Any) -> int:
    """The stages in their order; those that are finished are left alone."""
    from loragate.cli.recipes_ready import EVAL_PYTHON, interpreter, require_earlier, require_parts
    from loragate.files import held
    from loragate.recipes.consent import require_asked, require_known_launcher
    from loragate.recipes.folder import RunFolder
    from loragate.recipes.show import command_lines, is_launched, uses_vllm

    out, path = console(), Path(options.out or default_folder(recipe))
    wanted = comma_list(options.stages)
    for name in wanted:
        recipe.stage(name)
    missing = {key: why for key, why in recipe.missing().items() if not wanted or key.partition(".")[0] in wanted}
    if missing:
        key, why = next(iter(missing.items()))
        raise ConfigError(f"{recipe.name} needs {key}: {why}. Give it with --set {key}=FILE")
    if options.dry_run:
        lines = command_lines(recipe, str(path), switches(), options.launcher, options.eval_python)
        for stage, line in zip(recipe.stages, lines, strict=True):
            if not wanted or stage.name in wanted:
                print(line)
        return 0
    if not options.launcher:
        require_known_launcher(recipe)
    launcher = shlex.split(options.launcher or recipe.launcher)
    stages = recipe.placed(str(path))
    for stage in stages:
        require_asked(recipe.name, stage, validate(stage, recipe.name, deep=True))
    with held(path / "lock", 0.0, f"another run works in {path}; wait for it to end, or stop it"):
        folder = RunFolder.begin(path, recipe)
        require_earlier(stages, wanted, folder)
        ahead = [s for s in stages if (not wanted or s.name in wanted) and not folder.is_finished(s)]
        remembered = folder.record.get("eval_python", "")
        evaluator = interpreter(options.eval_python or os.environ.get(EVAL_PYTHON, "") or remembered)
        if evaluator:
            out.print(f"answers with vLLM: {evaluator}", markup=False)
        if ahead:
            out.print("checking that every stage can run here: data, graders, engine, disk")
            require_parts(recipe, ahead, path, evaluator)
        folder.remember(eval_python=evaluator)
        out.print(f"{recipe.name} in {path}: {', '.join(stage.name for stage in stages)}", markup=False)
        for number, stage in enumerate(stages):
            title = f"[{number + 1}/{len(stages)}] {stage.name}"
            if wanted and stage.name not in wanted:
                out.print(f"{title}: not asked for", markup=False)
                continue
            if folder.is_finished(stage):
                out.print(f"{title}: finished before", markup=False)
                continue
            resume = folder.prepare(stage)
            config = folder.config(stage, number)
            own = [evaluator or sys.executable if uses_vllm(stage) else sys.executable, "-m", "loragate"]
            start = launcher if launcher and is_launched(stage) else own
            command = [*start, stage.command, "--config", str(config), *(["--resume"] if resume else [])]
            out.print(f"{title}{': going on' if resume else ''}", markup=False)
            folder.began(stage, shlex.join(command))
            began = time.monotonic()
            call(command, f"{title} of {recipe.name}", run_line(options, recipe, str(path)))
            seconds = time.monotonic() - began
            folder.note(stage, finished=True, seconds=round(seconds, 1))
            out.print(f"{title}: done in {duration(seconds)}", markup=False)
    out.print(f"finished: {path} (resolved.yaml says what was run, recipe.json when)", markup=False)
    last = [stage for stage in stages if not wanted or stage.name in wanted][-1]
    shown = last.values["out"] if last.command in ("eval", "sweep") else ""
    out.print(f"next: look at {shown}" if shown else next_evaluation(last.values["out"], "runs/e"), markup=False)
    return 0


def call(command: list[str], what: str, again: str) -> None:
    """Run a stage as a process of its own.

    Args:
        again: the command that goes on with the recipe, which is not the stage's own.

    Raises:
        LoragateError: if it fails; KeyboardInterrupt once it has ended after Ctrl-C.
    """
    try:
        process = subprocess.Popen(command)
    except OSError as error:
        raise ConfigError(f"--launcher: {command[0]} cannot be started ({error.strerror})") from error
    try:
        status = wait_for(process)
    except KeyboardInterrupt:
        status = 130
    if status == 130:
        print(f"the stage goes on where it was with the same command:\n  {again}", file=sys.stderr)
        raise KeyboardInterrupt
    if status:
        raise LoragateError(
            f"{what} ended with status {status}; what it said stands above. The same command goes on from there: {again}"
        )


def resolved(options: RecipesOptions, shelf: Any, name: str) -> Any:
    """The recipe with everything that the flags change.

    Raises:
        ConfigError: naming what does not fit.
    """
    from loragate.recipes import read_recipe

    recipe = read_recipe(name, shelf)
    for place, what in ((options.local_model, "--local-model"), (options.local_data, "--local-data")):
        if place and not Path(place).exists():
            raise ConfigError(f"{what} {place}: does not exist")
    recipe = with_local(recipe, options.local_model, options.local_data)
    given = {}
    for text in options.set:
        key, sign, value = text.partition("=")
        if not sign:
            raise ConfigError(f"--set {text}: expected key=value, such as --set sft.max_rows=2000")
        given[key.strip()] = value
    return recipe.with_values(given, lambda command, option: option in field_kinds(command_of(command).options))


def with_local(recipe: Any, model: str, data: str) -> Any:
    """The recipe with a local model and local rows in place of hub ids."""
    stages = []
    for stage in recipe.stages:
        values, marks = dict(stage.values), dict(stage.marks)
        if model and "{" not in str(values.get("model", "{")):
            values["model"], marks["model"] = model, "yours: --local-model"
        if data and stage.command in TRAINING and "{" not in str(values.get("data", "{")):
            values["data"], marks["data"] = data, "yours: --local-data"
            for key in ("revision", "split", "heldout_split"):
                values.pop(key, None)
        stages.append(dataclasses.replace(stage, values=values, marks=marks))
    return dataclasses.replace(recipe, stages=tuple(stages))


def validate(stage: Any, where: str, *, deep: bool = False) -> Any:
    """The options of a stage, as its command would have them.

    Args:
        deep: also what takes the training libraries to see, which the command itself checks first thing.

    Raises:
        ConfigError: naming recipe, stage and key.
    """
    command = command_of(stage.command, where)
    values = checked_values(stage.values, command, f"{where}: stage '{stage.name}'")
    try:
        options = command.options(**values)
        if deep and (further := FURTHER.get(stage.command)):
            further(options)
    except ConfigError as error:
        raise ConfigError(f"{where}: stage '{stage.name}': {error}") from error
    return options


def command_of(name: str, where: str = "") -> Command:
    """A command by name.

    Raises:
        ConfigError: if there is none.
    """
    from loragate.cli.main import COMMANDS

    if name not in COMMANDS:
        raise ConfigError(f"{where}: there is no command '{name}'{nearest(name, COMMANDS)}")
    found: Command = importlib.import_module(f"loragate.cli.{COMMANDS[name][0]}").COMMAND
    return found


def switches() -> Mapping[str, Mapping[str, bool]]:
    """{command: {option: whether it is a switch}}, each made when it is asked for."""

    class Switches(dict[str, Mapping[str, bool]]):
        def __missing__(self, name: str) -> Mapping[str, bool]:
            self[name] = {key: kind is bool for key, kind in field_kinds(command_of(name).options).items()}
            return self[name]

    return Switches()


def default_folder(recipe: Any) -> str:
    """Where a recipe runs when --out does not say."""
    name = Path(recipe.name).stem if recipe.name.endswith((".yaml", ".yml")) else recipe.name
    return f"runs/recipes/{name.replace('/', '-')}"


def run_line(options: RecipesOptions, recipe: Any, folder: str) -> str:
    """The command that runs the recipe, and goes on with it; a rehearsal's run lies in the rehearsal's folder."""
    rehearsed = options.words[:1] == ("rehearse",)
    place = str(Path(folder).parent) if rehearsed else folder
    words = ["loragate", "recipes", "rehearse" if rehearsed else "run", recipe.name, "--out", place]
    for name in ("local_model", "local_data", "recipes_dir", "stages", "launcher", "eval_python"):
        if getattr(options, name):
            words += [flag_of(name), getattr(options, name)]
    for text in options.set:
        words += ["--set", text]
    return shlex.join(words)


def _sft(options: Any) -> None:
    from loragate.training.settings import StageOneSettings
    from loragate.training.stage_one import objective_of

    names = [field.name for field in dataclasses.fields(StageOneSettings)]
    objective_of(StageOneSettings(**{name: getattr(options, name) for name in names}))


def _calibrate(options: Any) -> None:
    from loragate.cli.calibrate import candidates_of

    candidates_of(options)


def _eval(options: Any) -> None:
    _known_tasks(options.suite, options.tasks)


@cache
def _known_tasks(suite: str, tasks: str) -> None:
    from loragate.cli.evaluation_inputs import EvaluationInputs, chosen_tasks

    chosen_tasks(EvaluationInputs(suite=suite, tasks=tasks))


FURTHER: dict[str, Callable[[Any], None]] = {"sft": _sft, "calibrate": _calibrate, "eval": _eval}
READ_BY = {
    "list": ("recipes_dir", "variants"),
    "show": ("recipes_dir", "set", "out", "local_model", "local_data", "launcher", "eval_python"),
    "run": ("recipes_dir", "set", "out", "local_model", "local_data", "launcher", "eval_python", "stages", "dry_run"),
    "rehearse": ("recipes_dir", "set", "out", "launcher", "eval_python", "dry_run"),
    "check": ("recipes_dir",),
}


def _require_effect(options: RecipesOptions, verb: str) -> None:
    for field in dataclasses.fields(RecipesOptions):
        if field.name != "words" and field.name not in READ_BY[verb] and getattr(options, field.name) != field.default:
            readers = " and ".join(name for name, fields in READ_BY.items() if field.name in fields)
            raise ConfigError(f"{flag_of(field.name)} has no effect on loragate recipes {verb}, only on {readers}")


EXAMPLE = "math/qwen2.5-math-1.5b/scale"
COMMAND = Command(
    name="recipes",
    summary="The trainings of the paper, by name: list, show, run (resumable), rehearse and check recipes.",
    options=RecipesOptions,
    run=run,
    examples=(
        "loragate recipes list math/qwen2.5-math-1.5b",
        f"loragate recipes show {EXAMPLE}",
        f"loragate recipes run {EXAMPLE} --out runs/scale",
        f"loragate recipes run {EXAMPLE} --local-model path/to/base --local-data rows.parquet --set sft.max_rows=2000",
        f"loragate recipes rehearse {EXAMPLE}",
    ),
    positional="words",
)
