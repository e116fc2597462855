"""`loragate recipes`: list, show, run, rehearse and check everything the paper trains, by name."""

from __future__ import annotations

import dataclasses
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from loragate import recipes
from loragate.cli.arguments import Command, flag_of
from loragate.display import console, duration, next_evaluation
from loragate.errors import ConfigError, nearest
from loragate.printable import printable
from loragate.validate import comma_list

if TYPE_CHECKING:
    from loragate.recipes import Recipe, Run

EXAMPLE = "math/qwen2.5-math-1.5b/scale"


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
        stages: run only these stages, separated by commas; earlier stages must have run.
        eval_python: python of another environment, in which stages that answer with vLLM run; LORAGATE_EVAL_PYTHON says the same,
            and the run's folder remembers it.
        launcher: how training stages are started, such as "accelerate launch --num_processes 2 -m loragate".
        dry_run: print the plain commands of run and stop; for rehearse also what is replaced, and what the full run needs.
    """

    words: tuple[str, ...] = ()
    set: tuple[str, ...] = ()
    out: str = ""
    local_model: str = ""
    local_data: str = ""
    stages: str = ""
    eval_python: str = ""
    launcher: str = ""
    dry_run: bool = False


def run(options: RecipesOptions) -> int:
    """Do what the first word says."""
    verb, *rest = options.words or ("list",)
    if verb == recipes.ANSWER and rest:
        recipes.answer(Path(rest[0]))
        return 0
    if verb not in VERBS:
        raise ConfigError(f"loragate recipes {verb}: expected {', '.join(VERBS)}{nearest(verb, VERBS)}")
    if len(rest) > 1:
        raise ConfigError(f"loragate recipes {verb} takes one name, found {' '.join(rest)}")
    for field in dataclasses.fields(RecipesOptions):
        given = field.name != "words" and getattr(options, field.name) != field.default
        if given and field.name not in VERBS[verb][1]:
            readers = " and ".join(name for name, (_, read) in VERBS.items() if field.name in read)
            raise ConfigError(f"{flag_of(field.name)} has no effect on loragate recipes {verb}, only on {readers}")
    if verb in ("list", "check"):
        return VERBS[verb][0](*(rest or [""]))
    if not rest:
        raise ConfigError(f"loragate recipes {verb} needs a name; for example: loragate recipes {verb} {EXAMPLE}")
    given = {}
    for text in options.set:
        key, sign, value = text.partition("=")
        if not sign:
            raise ConfigError(f"--set {text}: expected key=value, such as --set sft.max_rows=2000")
        given[key.strip()] = value
    recipe = recipes.read_recipe(rest[0]).with_local(options.local_model, options.local_data)
    recipe = recipe.with_values(given)
    # in any folder: what is wrong with a reference or an option is said before a verb begins
    for stage in recipe.placed("out"):
        recipes.options_of(stage, recipe.name)
    return VERBS[verb][0](options, recipe)


def list_recipes(wanted: str) -> int:
    """One line per recipe: name, and where in the paper it stands."""
    out = console()
    found = recipes.find_recipes(wanted)
    wide = max(map(len, found))
    for name, tables in found.items():
        out.print(f"{name:<{wide}}  {tables or 'beyond the paper'}", markup=False)
    out.print(f"{len(found)} recipes; next: loragate recipes show {next(iter(found))}", markup=False)
    return 0


def show(options: RecipesOptions, recipe: Recipe) -> int:
    """The recipe, and how it is run."""
    print(printable(recipe.as_yaml()))
    line = run_line(options, recipe)
    print(f"# all of it, resumable:\n#   {line}\n# every stage by hand:\n#   {line} --dry-run")
    return 0


def run_it(options: RecipesOptions, recipe: Recipe) -> int:
    """The stages in their order; those that are finished are left alone."""
    wanted = comma_list(options.stages)
    for name in wanted:
        recipe.stage(name)
    how = _how(options, recipe, _folder(options, recipe))
    if options.dry_run:
        _print_configs(recipe, how)
        return 0
    recipes.run_recipe(recipe, how)
    how.say(f"finished: {how.folder} (resolved.yaml says what was run, recipe.json when)")
    last = [stage for stage in recipe.placed(how.folder) if not wanted or stage.name in wanted][-1]
    left = last.values["out"]
    how.say(f"next: look at {left}" if last.command in ("eval", "sweep") else next_evaluation(left, "runs/e"))
    return 0


def rehearse_it(options: RecipesOptions, recipe: Recipe) -> int:
    """Run every stage of the recipe on stand-ins, and say what the full run needs."""
    with tempfile.TemporaryDirectory(prefix="loragate-rehearsal-") as temporary:
        folder = Path(options.out or temporary)
        how = _how(options, recipe, folder / "run")
        small = recipes.rehearsal_of(recipe, folder / "stand-ins", how)
        how.say(f"{recipe.name} on stand-ins in {folder}")
        shown = [
            # paths of a temporary folder say nothing to a reader
            tuple("not set" if part is None else str(part).replace(f"{folder}/", "") for part in row)
            for row in recipe.differences(small)
        ]
        _table("replaced; everything else is as shipped", ("stage", "setting", "shipped", "here"), shown)
        for name, need in recipes.needs(recipe).items():
            how.say(f"the full run, {name}: {need.sentence()} with every row as long as its limit")
        if options.dry_run:
            _print_configs(small, how)
            return 0
        seconds = recipes.rehearse(small, how)
        each = ", ".join(f"{name} {duration(took)}" for name, took in seconds.items())
        how.say(f"rehearsed: these stages of {recipe.name} ran: {each}")
        if options.out:
            how.say(f"next: look at {folder / 'report.html'}")
    return 0


def check(wanted: str) -> int:
    """Hold all recipes (or one of the user's own) and their rehearsals against the commands' options, and run none."""
    began = time.monotonic()
    own = wanted.endswith((".yaml", ".yml"))
    names = [wanted] if own else [name for name in recipes.every_name() if wanted in name]
    if not names:
        raise ConfigError(f"no recipe's name contains '{wanted}'; loragate recipes list shows all of them")
    for name in names:
        recipe = recipes.read_recipe(name)
        small = recipes.rehearsal_of(recipe, Path("stand-ins"))
        for stage in (*recipe.placed("out"), *small.placed("out")):
            recipes.settled(stage, name)
    took = duration(time.monotonic() - began)
    console().print(f"{len(names)} of {len(names)} recipes fit the commands' options ({took})", markup=False)
    return 0


def run_line(options: RecipesOptions, recipe: Recipe) -> str:
    """The command that runs the recipe, or rehearses it, and goes on with it."""
    verb = "rehearse" if options.words[:1] == ("rehearse",) else "run"
    words = ["loragate", "recipes", verb, recipe.name]
    out = options.out if verb == "rehearse" else _folder(options, recipe)
    words += ["--out", out] if out else []
    for name in ("local_model", "local_data", "stages", "launcher", "eval_python"):
        if getattr(options, name):
            words += [flag_of(name), getattr(options, name)]
    for text in options.set:
        words += ["--set", text]
    return shlex.join(words)


def _folder(options: RecipesOptions, recipe: Recipe) -> str:
    """--out, or where a recipe runs without it."""
    name = Path(recipe.name).stem if recipe.name.endswith((".yaml", ".yml")) else recipe.name
    return options.out or f"runs/recipes/{name.replace('/', '-')}"


def _how(options: RecipesOptions, recipe: Recipe, folder: str | Path) -> Run:
    again, stages, out = run_line(options, recipe), comma_list(options.stages), console()
    how = recipes.Run(Path(folder), stages, options.launcher, options.eval_python, again)
    return dataclasses.replace(how, say=lambda text: out.print(text, markup=False))


def _print_configs(recipe: Recipe, how: Run) -> None:
    """What each stage's command reads, as it can be pasted into a file."""
    for stage, command, _ in recipes.steps(recipe, how, how.eval_python):
        if not how.stages or stage.name in how.stages:
            print(printable(recipes.config_text(stage, command)))


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold", justify="right" if name in ("GiB", "hours") else "left")
    for row in rows:
        table.add_row(*row)
    console().print(table)


SHOWN = ("set", "out", "launcher", "eval_python")
VERBS: dict[str, tuple[Callable[..., int], tuple[str, ...]]] = {
    "list": (list_recipes, ()),
    "show": (show, (*SHOWN, "local_model", "local_data")),
    "run": (run_it, (*SHOWN, "local_model", "local_data", "stages", "dry_run")),
    "rehearse": (rehearse_it, (*SHOWN, "stages", "dry_run")),
    "check": (check, ()),
}
"""What each verb does, and the options that it reads."""
COMMAND = Command(
    name="recipes",
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
