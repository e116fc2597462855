"""`loragate recipes`: list, show and run everything the paper trains, by name."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate import recipes
from loragate.cli.arguments import Command, flag_of
from loragate.display import console
from loragate.errors import ConfigError, nearest
from loragate.printable import escape_for_terminal
from loragate.validate import comma_list

EXAMPLE = "math/qwen2.5-math-1.5b/scale"
READ = {"list": (), "show": ("set", "out"), "run": ("set", "out", "stages", "launcher", "seeds", "tiny", "resume")}
"""The options that each verb reads."""


@dataclass(frozen=True)
class RecipesOptions:
    """Settings of `loragate recipes`.

    Attributes:
        words: list [TEXT], show NAME or run NAME; TEXT is part of a name or a place in the paper, such as "table 6"; without
            it the parts of names are listed; a NAME may be the path of a YAML file of your own.
        set: change a value of a stage, as in --set sft.max_rows=2000, or model, data, revision or chat_template of all; may be
            repeated.
        out: folder of the run [runs/recipes/NAME].
        stages: run only these stages, separated by commas; earlier stages must have run.
        launcher: how training stages are started, such as "accelerate launch --num_processes 2 -m loragate".
        seeds: run it once for each of these training seeds, separated by commas, in OUT/seed-N, and show mean and deviation.
        tiny: rehearse it: every stage on a tiny random model and a few rows, on the CPU, offline, in minutes.
        resume: go on with the run in the out folder.
    """

    words: tuple[str, ...] = ()
    set: tuple[str, ...] = ()
    out: str = ""
    stages: str = ""
    launcher: str = ""
    seeds: str = ""
    tiny: bool = False
    resume: bool = False


def run(options: RecipesOptions) -> int:
    """Do what the first word says."""
    verb, *rest = options.words or ("list",)
    if verb not in READ:
        raise ConfigError(f"loragate recipes {verb}: expected {', '.join(READ)}{nearest(verb, READ)}")
    for name in READ["run"]:
        if getattr(options, name) and name not in READ[verb]:
            raise ConfigError(f"{flag_of(name)} has no effect on loragate recipes {verb}")
    if len(rest) != 1 and not (verb == "list" and not rest):
        raise ConfigError(f"loragate recipes {verb} takes one name, such as loragate recipes {verb} {EXAMPLE}")
    out = console()
    if verb == "list":
        found = recipes.find_recipes(*rest)
        for text in listed(found) if rest else parts(found):
            out.print(text, markup=False)
        return 0
    changes = parse_overrides(options.set)
    recipe = recipes.read_recipe(rest[0], changes)
    stem = recipe.name.removesuffix(".yaml").removesuffix(".yml").strip("/").replace("/", "-")
    folder = Path(options.out or f"runs/recipes/{stem}{'-tiny' * options.tiny}")
    if verb == "show":
        recipe.resolve_stages(folder)  # which refuses what is wrong with it
        line = ["loragate", "recipes", "run", recipe.name, "--out", str(folder)]
        line += [word for text in options.set for word in ("--set", text)]
        needed = recipes.costs(recipe)
        lines = [f"{stage}: {cost.sentence()}" for stage, cost in needed.items()] + [recipes.summary(recipe, needed)]
        lines += recipes.memory_warnings(recipe)
        needs = "".join(f"# {text}\n" for text in lines if text)
        print(f"# {shlex.join(line)}\n{needs}{escape_for_terminal(recipe.as_yaml())}", end="")
        return 0
    seeds = recipes.read_seeds(options.seeds) if options.seeds else []
    runs = {recipes.folder_of(folder, seed): recipes.with_seed(recipe, seed) for seed in seeds} or {folder: recipe}
    for place, one in runs.items():
        if seeds:
            out.print(f"{place}", markup=False)
        started = recipes.tiny_recipe(one, place) if options.tiny else one
        for text in recipes.describe_overruled(one, started, changes) if options.tiny else ():
            out.print(text, markup=False)
        recipes.run_recipe(
            started,
            place,
            only=comma_list(options.stages),
            launcher=options.launcher,
            # of several runs the later ones may not have been begun
            resume=options.resume and (not seeds or recipes.RecipeFolder(place).record_path.exists()),
            offline=options.tiny,
            say=lambda text: out.print(text, markup=False),
        )
    for table in recipes.compare_seeds(recipe, folder, seeds) if seeds else ():
        out.print(table)
    out.print(f"finished; next: loragate report {folder}", markup=False)
    return 0


def listed(found: dict[str, str]) -> list[str]:
    """A line for each recipe with its tables, and what to do next."""
    lines = [f"{name:<{max(map(len, found))}}  {tables or 'beyond the paper'}" for name, tables in found.items()]
    shown = next((name for name, tables in found.items() if tables), next(iter(found)))
    return [*lines, f"{len(found)} recipes; next: loragate recipes show {shown}"]


def parts(found: dict[str, str]) -> list[str]:
    """What the names of all recipes are made of, with titles: some hundred names would scroll by."""
    in_paper = {part for name, tables in found.items() if tables for part in name.split("/")}
    lines = []
    for kind, titles in recipes.name_parts().items():
        width = max(map(len, titles))
        lines.append(kind)
        lines += [
            f"  {part:<{width}}  {title}{'' if part in in_paper else ', beyond the paper'}"
            for part, title in titles.items()
        ]
    return [
        *lines,
        f"{len(found)} recipes, named domain/backbone/method. Those of a part or a table: loragate recipes list 'table 6'; "
        f"next: loragate recipes show {EXAMPLE}",
    ]


def parse_overrides(texts: tuple[str, ...]) -> dict[str, Any]:
    """{key: value} of --set key=value; the value is read as YAML, and an empty one leaves the option to the command."""
    import yaml  # not at the top: `--help` does without it

    found = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign:
            raise ConfigError(f"--set {text}: expected key=value, such as --set sft.max_rows=2000")
        try:
            found[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {text}: not valid YAML ({getattr(error, 'problem', error)})") from None
    return found


COMMAND = Command(
    name="recipes",
    options=RecipesOptions,
    run=run,
    examples=(
        "loragate recipes list math/qwen2.5-math-1.5b",
        f"loragate recipes show {EXAMPLE}",
        f"loragate recipes run {EXAMPLE} --out runs/scale",
        f"loragate recipes run {EXAMPLE} --set model=path/to/base --set data=rows.parquet --set sft.max_rows=2000",
        f"loragate recipes run {EXAMPLE} --seeds 42,3407,2025 --out runs/seeds",
        f"loragate recipes run {EXAMPLE} --tiny",
    ),
    positional="words",
)
