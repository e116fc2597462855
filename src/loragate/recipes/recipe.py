"""A recipe: stages in their order, the values of each, and where every value comes from.

A value may refer to what an earlier stage left: `{sft}` is the output of the stage called sft, `{last}` that of the stage
before which trained something. References stay in the recipe until it is given a folder to run in.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from loragate.cli.arguments import checked_values, field_kinds
from loragate.cli.main import command
from loragate.errors import ConfigError, nearest

REFERENCE = re.compile(r"\{([A-Za-z][\w.-]*)\}")
TRAINS = ("sft", "calibrate", "sweep", "extract")
ROWS = ("sft", "calibrate", "sweep", "mask")  # commands that read training rows
WIDTH = 120


@dataclass(frozen=True)
class Stage:
    """One command with its options.

    Attributes:
        name: within the recipe; the name of its folder.
        command: of loragate.
        values: option to value; no option stands here that the recipe leaves to the command's default.
        marks: option to the sentence that says where the value comes from; it begins with paper, ours, unstated or yours.
    """

    name: str
    command: str
    values: dict[str, Any]
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def output(self) -> str:
        """What the command writes and later stages read, below the folder of the run."""
        return f"{self.name}.jsonl" if self.command == "mask" else self.name

    @property
    def own_base(self) -> bool:
        """Whether the stage's model is a base, and not what an earlier stage left."""
        return self._names("model")

    @property
    def own_rows(self) -> bool:
        """Whether the stage reads training rows of a file or the hub, and not what an earlier stage left."""
        return self.command in ROWS and self._names("data")

    def _names(self, option: str) -> bool:
        # where the option is not set there is nothing to name either
        return "{" not in str(self.values.get(option, "{"))

    @property
    def vllm(self) -> bool:
        """Whether the stage's answers come from vLLM, which may need an environment of its own."""
        return self.values.get("engine") == "vllm"

    @property
    def launched(self) -> bool:
        """Whether --launcher starts the stage; a range is chosen in one process."""
        return self.command == "sft" or (self.command == "calibrate" and bool(self.values.get("unverified")))


@dataclass(frozen=True)
class Recipe:
    """See the module's docstring.

    Attributes:
        name: `domain/backbone/method`, or the file it was read from.
        title, about: for people.
        tables: the tables and figures of the paper it belongs to; empty for what goes beyond the paper.
        stages: in their order.
        machine: the GPU that its settings are made for.
        architecture: {hub id of a base: its configuration}, so that nothing is fetched to plan.
    """

    name: str
    title: str
    stages: tuple[Stage, ...]
    about: str = ""
    tables: str = ""
    machine: str = ""
    architecture: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """Hub id or folder of the base that the recipe begins with; empty where none is named."""
        return next((str(stage.values["model"]) for stage in self.stages if stage.own_base), "")

    def stage(self, name: str) -> Stage:
        """The stage of this name; a ConfigError names the known ones."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        names = [stage.name for stage in self.stages]
        raise ConfigError(
            f"{self.name} has no stage '{name}'{nearest(name, names) or ';'} its stages are {', '.join(names)}"
        )

    def placed(self, folder: str | Path) -> tuple[Stage, ...]:
        """The stages as they run in `folder`: references to what comes before (ConfigError) replaced by paths, `out` added."""
        placed: list[Stage] = []
        outputs: dict[str, str] = {}
        for stage in self.stages:

            def resolve(name: str, stage: Stage = stage) -> str:  # bound now, as the loop goes on
                if name not in outputs:
                    before = ", ".join(outputs) or "nothing"
                    raise ConfigError(
                        f"{self.name}: stage '{stage.name}' refers to {{{name}}}, but before it there is {before}"
                        + nearest(name, outputs)
                    )
                return outputs[name]

            out = f"{folder}/{stage.output}"
            values = {key: filled(value, resolve) for key, value in stage.values.items()}
            placed.append(dataclasses.replace(stage, values={**values, "out": out}))
            outputs[stage.name] = out
            if stage.command in TRAINS:
                # a sweep leaves many gated adapters, and the one that it chose in best/
                outputs["last"] = f"{out}/best" if stage.command == "sweep" else out
        return tuple(placed)

    def with_values(self, given: Mapping[str, Any]) -> Recipe:
        """Replace values: "stage.option" in one stage, "option" in every stage whose command has it.

        Args:
            given: key to value; a text is read as YAML, and an empty one leaves the option to the command.

        Raises:
            ConfigError: for a key that fits no stage.
        """
        stages = list(self.stages)
        for key, value in given.items():
            name, _, option = key.rpartition(".")
            option = option.replace("-", "_")
            if option == "out":
                raise ConfigError(f"--set {key}: the folder of a stage follows from --out")
            fitting = [
                index
                for index, stage in enumerate(stages)
                if (stage.name == name or not name) and option in field_kinds(command(stage.command).options)
            ]
            if not fitting:
                if name:
                    self.stage(name)
                known = {f"{stage.name}.{other}" if name else other for stage in stages for other in stage.values}
                where = f"stage '{name}'" if name else "any stage"
                raise ConfigError(f"--set {key}: no such option of {where} of {self.name}{nearest(key, known)}")
            for index in fitting:
                stages[index] = _replaced(stages[index], {option: _read(key, value)}, "yours: --set")
        return dataclasses.replace(self, stages=tuple(stages))

    def with_local(self, model: str = "", data: str = "") -> Recipe:
        """The recipe with a local base and local rows in place of hub ids, whose commits and splits belong to the hub.

        Raises:
            ConfigError: for a place that there is not.
        """
        for place, flag in ((model, "--local-model"), (data, "--local-data")):
            if place and not Path(place).exists():
                raise ConfigError(f"{flag} {place}: does not exist")
        stages = []
        for stage in self.stages:
            if model and stage.own_base:
                stage = _replaced(stage, {"model": model}, "yours: --local-model")
            if data and stage.own_rows:
                values = {"data": data, "revision": "", "split": "", "heldout_split": ""}
                stage = _replaced(stage, values, "yours: --local-data")
            stages.append(stage)
        return dataclasses.replace(self, stages=tuple(stages))

    def as_record(self) -> list[dict[str, Any]]:
        """The stages as JSON, to tell two recipes apart."""
        return [{"stage": stage.name, "command": stage.command, **stage.values} for stage in self.stages]

    def differences(self, other: Recipe) -> list[tuple[str, str, Any, Any]]:
        """(stage, option, value here, value in `other`) where the same stages differ; None for what is not set."""
        return [
            (stage.name, option, stage.values.get(option), now.values.get(option))
            for stage, now in zip(self.stages, other.stages, strict=True)
            for option in sorted({*stage.values, *now.values})
            if stage.values.get(option) != now.values.get(option)
        ]

    def as_yaml(self) -> str:
        """The recipe as a YAML file that is a recipe again, each value with its source behind it."""
        about = [self.tables and f"in the paper: {self.tables}", *textwrap.wrap(self.about, WIDTH - 2)]
        about.append("beside each value: paper (quoted), unstated (the paper does not say, so ours) or ours")
        lines = [f"# {self.name}: {self.title}", *(f"# {line}" for line in about if line), ""]
        order = [stage.name if stage.name == stage.command else {stage.name: stage.command} for stage in self.stages]
        top = {"stages": order, "machine": self.machine, "architecture": self.architecture}
        lines += [_pair(key, value) for key, value in top.items() if value]
        for stage in self.stages:
            pairs = {key: _pair(key, value) for key, value in stage.values.items()}
            # sources stand in a column, behind all but the longest values
            wide = min(max(map(len, pairs.values()), default=0), 44)
            lines += ["", f"{stage.name}:"]
            marks = {key: f"  # {mark}" for key, mark in stage.marks.items() if mark}
            lines += [f"  {pair:<{wide}}{marks.get(key, '')}".rstrip() for key, pair in pairs.items()]
        return "\n".join(lines) + "\n"


def options_of(stage: Stage, where: str) -> Any:
    """The options of a stage, as its command has them; a ConfigError names the recipe (`where`), stage and key."""
    owner, what = command(stage.command), f"{where}: stage '{stage.name}'"
    values = checked_values(stage.values, owner, what)
    try:
        return owner.options(**values)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error


def filled(value: Any, resolve: Callable[[str], str]) -> Any:
    """`value` with every `{name}` in its texts replaced."""
    if isinstance(value, str):
        return REFERENCE.sub(lambda found: resolve(found.group(1)), value)
    return value


def _replaced(stage: Stage, given: Mapping[str, Any], source: str) -> Stage:
    """The stage with these values, without those that are empty."""
    values = {key: value for key, value in {**stage.values, **given}.items() if value not in ("", None)}
    return dataclasses.replace(stage, values=values, marks={**stage.marks, **dict.fromkeys(given, source)})


def _read(key: str, value: Any) -> Any:
    if not isinstance(value, str) or not value.strip():  # an empty text would be read as null
        return value.strip() if isinstance(value, str) else value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {key}={value}: not valid YAML ({getattr(error, 'problem', error)})") from None


def _pair(key: str, value: Any) -> str:
    """`key: value` on one line, as YAML."""
    if isinstance(value, dict | list):
        return f"{key}: {yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()}"
    return yaml.safe_dump({key: value}, width=10_000, allow_unicode=True).rstrip()
