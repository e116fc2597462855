"""From files to a recipe: what every recipe shares, a domain, a backbone and a method, merged key by key; the later file wins.

    common.yaml                       what every recipe shares
    domain/NAME.yaml                  data and suites
    backbone/NAME.yaml                the model, and settings of memory
    places.yaml: domain/backbone      what holds for one backbone in one domain
    method/NAME.yaml                  the stages, and what the method sets
    places.yaml: domain/backbone/method
    a file of the user's

A file holds fields of `RecipeFile` and blocks of options. The block of a command, such as `sft:`, is for all stages of that
command; a stage with a name of its own also has the block of that name, which wins. An option of null is left to the
command. The comment behind a value says where the value comes from.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from loragate.errors import ConfigError, nearest
from loragate.recipes.recipe import REFERENCE, Recipe, Stage, filled
from loragate.strict_yaml import read_mapping
from loragate.validate import validate

HERE = Path(__file__).parent
KINDS = ("domain", "backbone", "method")
SUFFIXES = (".yaml", ".yml")
SOURCES = ("paper", "ours", "unstated", "yours")
COMMANDS = ("sft", "extract", "mask", "calibrate", "sweep", "eval", "diagnose")
"""What a recipe may start, and nothing else."""
GUARDED = {"trust_remote_code": False, "sandbox": "bubblewrap", "probe_sandbox": "bubblewrap"}
"""Options that let code of others run with less protection, with the value that asks for nothing. Recipes are passed on like
data, so that a file may not set them: --set may."""


@dataclass(frozen=True)
class RecipeFile:
    """What may stand at the top of a recipe file, beside the blocks of options.

    Attributes:
        title, about: for people.
        stages: in their order: a command, or {name: command}.
        evaluations: the stages after those; a domain's, unless the method has its own.
        tables: domain or domain/backbone to the tables and figures of the paper.
        paper: of a backbone: whether the paper trained it.
        machine: the GPU that the settings are made for.
        architecture: {hub id of a base: its configuration}, so that nothing is fetched to plan.
        model, data, revision, chat_template: put in for {model} and so on in options.
        domain, backbone, method: of a user's file: the recipe that it changes.
    """

    title: str = ""
    about: str = ""
    stages: tuple[str | dict[str, str], ...] = ()
    evaluations: tuple[str | dict[str, str], ...] = ()
    tables: dict[str, str] = field(default_factory=dict)
    paper: bool = False
    machine: str = ""
    architecture: dict[str, dict[str, Any]] = field(default_factory=dict)
    model: str = ""
    data: str = ""
    revision: str = ""
    chat_template: str = ""
    domain: str = ""
    backbone: str = ""
    method: str = ""


UNSET = RecipeFile()
FIELDS = tuple(vars(UNSET))
FILLED = ("model", "data", "revision", "chat_template")


class Marked(NamedTuple):
    """A value of a file, and the sentence that says where it comes from: the comment behind it."""

    value: Any
    source: str


@dataclass(frozen=True)
class Layer:
    """What one file gives: fields of `RecipeFile`, and blocks of options."""

    fields: dict[str, Marked] = field(default_factory=dict)
    blocks: dict[str, dict[str, Marked]] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """The value of a field, or what holds where none is given."""
        return self.fields[key].value if key in self.fields else getattr(UNSET, key)


def files(kind: str) -> dict[str, Path]:
    """{name: shipped file} of one kind."""
    return {path.stem: path for path in sorted((HERE / kind).glob("*.yaml"))}


def every_name() -> Iterator[str]:
    """The names of all recipes that can be composed."""
    for parts in itertools.product(*map(files, KINDS)):
        yield "/".join(parts)


def find_recipes(wanted: str) -> dict[str, str]:
    """{name: its tables and figures} of the recipes whose name contains `wanted`, or that stand there in the paper.

    Args:
        wanted: part of a name, or a place as people write it: "table 6", "fig. 3", "app. C"; a ConfigError where there is none.
    """
    place = re.fullmatch(r"(tab|fig|app)[a-z]*[\W_]*(\w+)", wanted.strip().lower())
    found = {name: read_recipe(name).tables for name in every_name() if place or wanted in name}
    if place:
        # "Tables 1, 5; Fig. 3": a list of numbers behind each word
        there = re.compile(rf"{place[1]}[a-z]*\.? ([\da-z]+, )*{place[2]}\b")
        found = {name: tables for name, tables in found.items() if there.search(tables.lower())}
    if not found:
        raise ConfigError(
            f"no recipe's name contains '{wanted}', nor does one stand in a table or figure of that name (write 'table 6' or "
            "'fig. 3'); loragate recipes list shows all of them"
        )
    return found


def read_recipe(name: str) -> Recipe:
    """A recipe by name, or by the path of a YAML file.

    Raises:
        ConfigError: for an unknown name, or a file with a mistake.
    """
    if name.endswith(SUFFIXES):
        return _read_own(Path(name).expanduser())
    parts = name.strip("/").split("/")
    if len(parts) != len(KINDS):
        raise ConfigError(
            f"'{name}' is no recipe: expected domain/backbone/method such as math/qwen2.5-math-1.5b/scale, or the path of a "
            "YAML file (loragate recipes list shows all names)"
        )
    shipped = [_shipped(kind, part) for kind, part in zip(KINDS, parts, strict=True)]
    (domain, backbone, _), (_, model, method) = parts, shipped
    # a method names its tables for a domain, where the paper's own backbones are meant, or for one of them
    tables = method.get("tables")
    found = tables.get(f"{domain}/{backbone}") or (tables.get(domain, "") if model.get("paper") else "")
    title = ", ".join(layer.get("title") for layer in shipped)
    return dataclasses.replace(_merged("/".join(parts), _layers(*parts)), title=title, tables=found)


def _read_own(path: Path) -> Recipe:
    """A recipe of the user's: it changes a shipped one, or stands alone."""
    if not path.is_file():
        raise ConfigError(f"there is no recipe file {path}")
    own = _layer(read_mapping(path), _comments(path), str(path), f"yours: {path.name}")
    named = [own.get(kind) for kind in KINDS if own.get(kind)]
    if len(named) not in (0, len(KINDS)):
        raise ConfigError(f"{path}: give domain, backbone and method together, or none of them and stages instead")
    if not named and "stages" not in own.fields:
        raise ConfigError(f"{path}: expected domain, backbone and method, or stages (see loragate recipes show NAME)")
    recipe = _merged(str(path), [*(_layers(*named) if named else ()), own])
    commands = {word for stage in recipe.stages for word in (stage.name, stage.command)}
    for block in own.blocks.keys() - commands:
        raise ConfigError(f"{path}: there is no stage '{block}'{nearest(block, [*commands, *FIELDS])}")
    return dataclasses.replace(recipe, title=own.get("title") or path.stem)


@cache
def read_file(path: Path) -> Layer:
    """A shipped file, which is read once; a ConfigError names file and key of what cannot be read."""
    return _layer(read_mapping(path), _comments(path), str(path))


@cache
def _places() -> dict[str, Layer]:
    """{place: what places.yaml has for it}."""
    path = HERE / "places.yaml"
    comments = _comments(path)
    return {
        place: _layer(block, {at[1:]: text for at, text in comments.items() if at[0] == place}, f"{path}: {place}")
        for place, block in read_mapping(path).items()
    }


def _shipped(kind: str, name: str) -> Layer:
    """One shipped file; a ConfigError names the known ones."""
    known = files(kind)
    if name not in known:
        raise ConfigError(f"there is no {kind} '{name}'{nearest(name, known) or '.'} Known: {', '.join(known)}")
    return read_file(known[name])


def _comments(path: Path) -> dict[tuple[str, ...], str]:
    """{keys down to a value: the comment behind it} of a file of mappings."""
    text, found = path.read_text(encoding="utf-8"), {}

    def walk(node: yaml.Node, above: tuple[str, ...]) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            here = (*above, str(key.value).replace("-", "_") if above else str(key.value))
            # yaml drops comments, but knows where a value ends: what follows on its line is the comment
            behind = text[value.end_mark.index :].partition("\n")[0].strip()
            if behind.startswith("#"):
                found[here] = behind[1:].strip()
            walk(value, here)

    # the node tree keeps places in the text; `read_mapping` has refused what is no mapping, or has a key twice
    walk(yaml.compose(text, Loader=yaml.SafeLoader) or yaml.ScalarNode("", ""), ())
    return found


def _layer(content: dict[Any, Any], comments: dict[tuple[str, ...], str], where: str, unmarked: str = "") -> Layer:
    """What a file or a part of one holds.

    Args:
        comments: what stands behind each value, see `_comments`.
        unmarked: the source of values whose comment names none; a shipped file marks all of them.
    """

    def marked(value: Any, *at: str) -> Marked:
        comment = comments.get(at, "")
        return Marked(value, comment if comment.startswith(SOURCES) or not unmarked else unmarked)

    given = {key: value for key, value in content.items() if key in FIELDS}
    checked = validate(RecipeFile, given, where)
    blocks = {}
    for name, block in content.items():
        if name in given:
            continue
        if not isinstance(block, dict):
            raise ConfigError(
                f"{where}: '{name}' is {block!r}, expected a block of options{nearest(str(name), FIELDS)}"
            )
        options = {str(key).replace("-", "_"): value for key, value in block.items()}
        blocks[str(name)] = {key: marked(value, str(name), key) for key, value in options.items()}
    return Layer({key: marked(getattr(checked, key), key) for key in given}, blocks)


def _layers(domain: str, backbone: str, method: str) -> list[Layer]:
    """Domain, backbone and method with what holds for the places they make, in the order in which they win."""
    one, two, three = map(_shipped, KINDS, (domain, backbone, method))
    place = f"{domain}/{backbone}"
    found = [read_file(HERE / "common.yaml"), one, two, _places().get(place), three, _places().get(f"{place}/{method}")]
    return [layer for layer in found if layer is not None]


def _merged(name: str, layers: Sequence[Layer]) -> Recipe:
    """The recipe of these layers, all resolved but references to stages."""
    merged = Layer()
    for layer in layers:
        merged.fields.update(layer.fields)
        for block, options in layer.blocks.items():
            merged.blocks.setdefault(block, {}).update(options)
    texts = {"templates": str(HERE / "templates")}  # words that are no stage: they are put in at once

    def put_in(value: Any) -> Any:
        return filled(value, lambda word: texts.get(word, f"{{{word}}}"))  # a reference to a stage stays

    # a chat template names a file below {templates}
    texts |= {key: put_in(merged.get(key)) for key in FILLED}
    stages = []
    for stage, command in _order(name, merged).items():
        values: dict[str, Any] = {}
        marks: dict[str, str] = {}
        # the block of the stage's own name wins over that of its command
        for option, (value, source) in {**merged.blocks.get(command, {}), **merged.blocks.get(stage, {})}.items():
            if option == "out":
                raise ConfigError(f"{name}: stage '{stage}' sets out; the folder of a stage follows from --out")
            if option in GUARDED and value not in (GUARDED[option], None, ""):
                text = str(value).lower() if isinstance(value, bool) else value
                raise ConfigError(
                    f"{name}: stage '{stage}' sets {option} to {text}, which lets code of others run with less or no protection, "
                    "and a file may not. Where you trust it, leave it out of the file and ask for it: --set "
                    f"{stage}.{option}={text}"
                )
            if put_in(value) not in ("", None):
                values[option] = put_in(value)
                # what is nothing but {model} comes from where the model was named
                whole = REFERENCE.fullmatch(value) if isinstance(value, str) else None
                field_of = merged.fields.get(whole[1]) if whole and whole[1] in FILLED else None
                marks[option] = (field_of and field_of.source) or source
        stages.append(Stage(stage, command, values, marks))
    top = {key: merged.get(key) for key in ("title", "about", "machine", "architecture")}
    return Recipe(name=name, stages=tuple(stages), **top)


def _order(name: str, merged: Layer) -> dict[str, str]:
    """{stage: command} in order."""
    order: dict[str, str] = {}
    for entry in (*merged.get("stages"), *merged.get("evaluations")):
        ((stage, command),) = entry.items() if isinstance(entry, dict) and len(entry) == 1 else ((entry, entry),)
        if command not in COMMANDS:
            raise ConfigError(
                f"{name}: '{command}' is no stage{nearest(str(command), COMMANDS) or ';'} a stage is one of "
                f"{', '.join(COMMANDS)}, or {{name: one of these}}"
            )
        if not REFERENCE.fullmatch(f"{{{stage}}}") or stage in (*FIELDS, "last", "templates"):
            raise ConfigError(
                f"{name}: a stage is called {stage!r}; folders are called by it: a letter, then letters, digits, '_', '-', "
                "'.', and none of a file's own words"
            )
        if stage in order:
            raise ConfigError(f"{name}: the stage '{stage}' stands there twice; give one of them a name of its own")
        order[stage] = command
    if not order:
        raise ConfigError(f"{name}: there are no stages")
    return order
