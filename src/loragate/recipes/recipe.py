"""What the paper trains, by name: a recipe is a list of stages, each a command of loragate with its options.

A name is `domain/backbone/method`. Four files beside this one make the recipe: common.yaml, then those of the domain, the backbone
and the method. They are merged by dictionary update, block by block and key by key, so that the later file wins. What holds in one
domain only, or for one backbone in one domain, stands under `for`. A user's own file names the three and is merged last.

In options `{model}`, `{data}`, `{revision}` and `{chat_template}` stand for the value of that name at the top of the files,
`{sft}` for what the stage called sft left, and `{last}` for what the last training before left.
"""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from loragate.cli.arguments import checked_values, field_types
from loragate.cli.main import load_command
from loragate.errors import ConfigError, nearest
from loragate.strict_yaml import read_mapping

HERE = Path(__file__).parent
KINDS = ("domain", "backbone", "method")
PLACEHOLDERS = ("model", "data", "revision", "chat_template")
TOP: dict[str, type] = {
    **dict.fromkeys((*KINDS, *PLACEHOLDERS, "title", "about", "machine"), str),
    **dict.fromkeys(("stages", "evaluations"), list),
    **dict.fromkeys(("tables", "architecture", "for"), dict),
    "paper": bool,
}
"""Keys at the top of a file that are no blocks of options, and so no names of stages, and what their values are."""
MAY_BE_EMPTY = ("revision", "chat_template", "title")
_EXPECTED = {
    str: "text (in quotes where it looks like a number)",
    list: "a list",
    dict: "a block of keys",
    bool: "true or false",
}
COMMANDS = ("sft", "mask", "calibrate", "sweep", "eval", "diagnose")
"""What a recipe may start, and nothing else."""
TRAINS = ("sft", "calibrate", "sweep")
GUARDED = {"trust_remote_code": False, "sandbox": "bubblewrap"}
"""Options that let code of others run with less protection, with the safe value. Recipe files are passed on like data, so that a
file may not set them; --set may."""
REFERENCE = re.compile(r"\{([A-Za-z][\w.-]*)\}")


@dataclass(frozen=True)
class Gpu:
    """A card: FLOP/s of 16-bit products and bytes/s of its memory, both at most, and the bytes that a program finds there."""

    flops: float
    bandwidth: float
    memory: float


GPUS = {
    "a100": Gpu(312e12, 2.04e12, 79 * 2**30),
    "h100": Gpu(989e12, 3.35e12, 79 * 2**30),
    "h200": Gpu(989e12, 4.8e12, 139 * 2**30),
}
"""By the `machine` of a recipe; NVIDIA's data sheets of the SXM cards (A100 with 80 GB), without sparsity."""


@dataclass(frozen=True)
class Stage:
    """One command of loragate and its options by name; what is not set is left to the command."""

    name: str
    command: str
    options: dict[str, Any]

    @property
    def output(self) -> str:
        """What the command writes, below the folder of the run."""
        return f"{self.name}.jsonl" if self.command == "mask" else self.name

    @property
    def uses_launcher(self) -> bool:
        """Whether --launcher starts it: a single training. Ranges are compared in one process."""
        return self.command == "sft" or bool(self.command == "calibrate" and self.options.get("skip_selection"))


@dataclass(frozen=True)
class Recipe:
    """Stages in their order, with references to earlier ones still in their options.

    Attributes:
        name: `domain/backbone/method`, or the path of a user's file.
        stages: at least one.
        title, about: for people.
        tables: the paper's tables and figures that it belongs to; empty for what the paper does not have.
        domain: whose rows and questions it takes.
        machine: the GPU that its settings are made for.
        architecture: the backbone's configuration, in the words of transformers.
        files: what it was merged from; a comment there says where each number comes from.
    """

    name: str
    stages: tuple[Stage, ...]
    title: str = ""
    about: str = ""
    tables: str = ""
    domain: str = ""
    machine: str = ""
    architecture: dict[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    def resolve_stages(self, folder: str | Path) -> tuple[Stage, ...]:
        """The stages as they run in `folder`: references are paths, and `out` is set.

        Raises:
            ConfigError: for a reference to what is no earlier stage, or an option that the command does not have or take.
        """
        placed: list[Stage] = []
        outputs: dict[str, str] = {}
        for stage in self.stages:
            out, where = f"{folder}/{stage.output}", f"{self.name}: stage '{stage.name}'"
            if "out" in stage.options:
                raise ConfigError(f"{where} sets out, and the folder of a stage follows from --out")
            options = {key: _fill_placeholders(value, outputs) for key, value in stage.options.items()} | {"out": out}
            for name in REFERENCE.findall(" ".join(map(str, options.values()))):
                before = ", ".join(outputs) or "nothing"
                raise ConfigError(f"{where} refers to {{{name}}}, before it there is {before}{nearest(name, outputs)}")
            placed.append(replace(stage, options=options))
            options_of(placed[-1], where)
            outputs[stage.name] = out
            if stage.command in TRAINS:
                outputs["last"] = f"{out}/best" if stage.command == "sweep" else out  # the cell that a sweep chose
        return tuple(placed)

    def as_yaml(self) -> str:
        """The merged recipe: what it is in comments, then a block of options for each stage."""
        about = [f"{self.name}: {self.title}", *textwrap.wrap(self.about, 110)]
        about += [f"in the paper: {self.tables}" if self.tables else "beyond the paper"]
        about += ["where each number comes from is said beside it in", *(f"  {file}" for file in self.files)]
        order = [stage.name if stage.name == stage.command else {stage.name: stage.command} for stage in self.stages]
        blocks: list[dict[str, Any]] = [{"stages": order}, *({stage.name: stage.options} for stage in self.stages)]
        texts = [yaml.safe_dump(block, sort_keys=False, allow_unicode=True, width=1000) for block in blocks]
        return "\n".join(["".join(f"# {line}\n" for line in about), *texts])


def options_of(stage: Stage, where: str) -> Any:
    """The options of a stage as its command has them; the ConfigError begins with `where` and names the key."""
    owner = load_command(stage.command)
    try:
        return owner.options(**checked_values(stage.options, owner, where))
    except ConfigError as error:
        raise ConfigError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from error


def every_name() -> Iterator[str]:
    """The names of all shipped recipes."""
    for parts in itertools.product(*map(_names, KINDS)):
        yield "/".join(parts)


def name_parts() -> dict[str, dict[str, str]]:
    """{domain, backbone or method: {what a recipe's name may have there: its title}}."""
    return {kind: {name: _shipped(HERE / kind / f"{name}.yaml")["title"] for name in _names(kind)} for kind in KINDS}


def find_recipes(wanted: str = "") -> dict[str, str]:
    """{name: tables and figures} of the shipped recipes that have `wanted` in either, such as "table 6".

    Raises:
        ConfigError: where none has.
    """
    there = re.compile(re.escape(wanted.strip()) + r"(?!\d)", re.IGNORECASE)  # table 1 is not table 10
    found = {name: read_recipe(name).tables for name in every_name()}
    found = {name: tables for name, tables in found.items() if there.search(f"{name} {tables}")}
    if not found:
        raise ConfigError(
            f"no recipe has '{wanted}' in its name or among its tables (write 'Table 6', 'Fig. 3', 'App. C')"
            f"{nearest(wanted, [*every_name(), *itertools.chain(*map(_names, KINDS))])}; "
            "loragate recipes list shows what names are made of"
        )
    return found


def read_recipe(name: str, changes: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe by name, or by the path of a YAML file.

    Args:
        changes: key to value, over what the files say: `stage.option`, or model, data, revision or chat_template for all options
            that take theirs from there. None leaves an option to the command.

    Raises:
        ConfigError: for an unknown name or key, with the nearest known one, or a file with a mistake.
    """
    own: dict[Any, Any] = {}
    parts = name.strip("/").split("/")
    if name.endswith((".yaml", ".yml")):
        own = read_mapping(Path(name))
        if missing := [kind for kind in KINDS if kind not in own]:
            raise ConfigError(f"{name}: needs {', '.join(missing)}, the parts of the recipe that it changes")
        parts = [str(own[kind]) for kind in KINDS]
    elif len(parts) != len(KINDS):
        raise ConfigError(
            f"'{name}' is no recipe{nearest(name, every_name())}; expected domain/backbone/method such as "
            "math/qwen2.5-math-1.5b/scale, or a YAML file (loragate recipes list shows what names are made of)"
        )
    for kind, part in zip(KINDS, parts, strict=True):
        if part not in _names(kind):
            raise ConfigError(f"there is no {kind} '{part}'{nearest(part, _names(kind))} ({', '.join(_names(kind))})")
    files = [HERE / "common.yaml", *(HERE / kind / f"{part}.yaml" for kind, part in zip(KINDS, parts, strict=True))]
    layers = [_shipped(file) for file in files]
    domain, place = parts[0], "/".join(parts[:2])
    merged: dict[str, Any] = {}
    given = dict(changes or {})
    placed = {word: given.pop(word) for word in PLACEHOLDERS if word in given}
    for where, layer in ((f"{name}: ", own), ("--set ", placed)):
        for key, value in layer.items():
            if key in TOP and not isinstance(value, TOP[key]) and not (value is None and key in MAY_BE_EMPTY):
                raise ConfigError(
                    f"{where}{key} is {'empty' if value is None else repr(value)}, expected {_EXPECTED[TOP[key]]}"
                )
    for layer in (*layers, own, placed):
        for part in (layer, *(layer.get("for", {}).get(key, {}) for key in (domain, place))):
            if "data" in part and merged.get("data", part["data"]) != part["data"]:  # these are of the data set before
                merged = {key: _without_eval_split(value) for key, value in merged.items() if key != "revision"}
            if "model" in part and merged.get("model", part["model"]) != part["model"]:  # these of the model before
                merged |= {"chat_template": "", "architecture": {}}
            for key, value in part.items():  # blocks are merged key by key, everything else is replaced
                before = merged.get(key)
                merged[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    if (machine := merged["machine"]) not in GPUS:
        raise ConfigError(f"{name}: machine is {machine!r}{nearest(machine, GPUS)}; known: {', '.join(GPUS)}")
    stages = _stages(name, merged)
    known = (*stages, *COMMANDS, *TOP)
    for key, value in own.items():
        if key not in known:
            raise ConfigError(f"{name}: '{key}' is no stage and no key of a recipe{nearest(str(key), known)}")
        if key not in TOP and not isinstance(value, dict):
            raise ConfigError(f"{name}: '{key}' is {value!r}, expected a block of options")
    changed = _apply_overrides(dict(stages), given, name)
    for one in changed.values():
        takes_base = one.command in ("sft", "mask") or stages[one.name].options.get("model") == merged["model"]
        if takes_base and (found := one.options.get("model")) != merged["model"]:
            raise ConfigError(
                f"{name}: stage '{one.name}' has the model {found}, and the recipe {merged['model']}: chat template, estimate and "
                f"other stages would stay with that. Change it for all: --set model={found}, or `model:` at the top of a file"
            )
    # a method names its tables for a domain, where the paper's own backbones are meant, or for one of them
    tables = {} if own else merged.get("tables", {})
    return Recipe(
        name,
        tuple(changed.values()),
        title=own.get("title") or ", ".join(layer["title"] for layer in layers[1:]),
        about=merged.get("about", ""),
        tables=tables.get(place) or (tables.get(domain, "") if merged["paper"] else ""),
        domain=domain,
        machine=merged["machine"],
        architecture=merged.get("architecture", {}),
        files=(*files, *([Path(name)] if own else [])),
    )


@cache
def _names(kind: str) -> tuple[str, ...]:
    """The shipped files of a kind, by name."""
    return tuple(path.stem for path in sorted((HERE / kind).glob("*.yaml")))


_shipped = cache(read_mapping)  # hundreds of recipes are made of a few dozen files


def _stages(name: str, merged: dict[str, Any]) -> dict[str, Stage]:
    """The stages of the merged files by name: of each the block of its command, then that of its own name."""
    words = {"templates": str(HERE / "templates")}
    words |= {word: _fill_placeholders(merged.get(word) or "", words) for word in PLACEHOLDERS}
    entries = [*merged["stages"], *merged["evaluations"]]
    pairs = [pair for one in entries for pair in (one.items() if isinstance(one, dict) else [(one, one)])]
    stages: dict[str, Stage] = {}
    for stage, kind in pairs:
        if kind not in COMMANDS:
            raise ConfigError(
                f"{name}: '{kind}' is no stage{nearest(str(kind), COMMANDS)}; known: {', '.join(COMMANDS)}"
            )
        if stage in (*stages, *TOP, "last", "templates") or not REFERENCE.fullmatch(f"{{{stage}}}"):
            raise ConfigError(f"{name}: '{stage}' cannot be the name of a stage: a word of its own, as folders have")
        options: dict[str, Any] = {}
        for block in (merged.get(kind) or {}, merged.get(stage) or {}):
            if isinstance(block, dict):
                options |= {
                    str(key).replace("-", "_"): _fill_placeholders(value, words) for key, value in block.items()
                }
        for option, safe in GUARDED.items():
            if options.get(option) not in (safe, None, ""):
                raise ConfigError(
                    f"{name}: stage '{stage}' sets {option}, with which code of others runs with less protection, and a file may "
                    f"not. Where you trust it, leave it out and give --set {stage}.{option}={json.dumps(options[option])}"
                )
        if Path(words["data"]).exists() and options.get("data") == words["data"]:
            options |= dict.fromkeys(("revision", "split", "eval_split"))  # they are the hub's
        stages[stage] = Stage(stage, kind, drop_unset(options))
    return stages


def _apply_overrides(stages: dict[str, Stage], changes: Mapping[str, Any], name: str) -> dict[str, Stage]:
    """The stages with the values of --set."""
    for key, value in changes.items():
        stage, _, option = key.rpartition(".")
        option = option.replace("-", "_")
        if stage not in stages or option not in field_types(load_command(stages[stage].command).options):
            kinds = {one.name: field_types(load_command(one.command).options) for one in stages.values()}
            known = [*PLACEHOLDERS, *(f"{one}.{other}" for one, options in kinds.items() for other in options)]
            raise ConfigError(
                f"--set {key}: no stage of {name} has it{nearest(key, known)} (stages: {', '.join(stages)})"
            )
        stages[stage] = replace(stages[stage], options=drop_unset({**stages[stage].options, option: value}))
    return stages


def _without_eval_split(block: Any) -> Any:
    """A block of options without the held-out split of the hub's data set; anything else as it is."""
    return {key: value for key, value in block.items() if key != "eval_split"} if isinstance(block, dict) else block


def drop_unset(options: dict[str, Any]) -> dict[str, Any]:
    """Without what is left to the command."""
    return {key: value for key, value in options.items() if value not in ("", None)}


def _fill_placeholders(value: Any, words: Mapping[str, str]) -> Any:
    """`value` with each known `{word}` in it replaced; others are references to stages."""
    return REFERENCE.sub(lambda found: words.get(found[1], found[0]), value) if isinstance(value, str) else value
