"""A recipe: stages in their order, the values of each, and where every value comes from.

A value may refer to what an earlier stage left: `{sft}` is the output of the stage called sft, `{last}` that of the stage
before which trained something. References stay in the recipe until it is given a folder to run in.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from loragate.errors import ConfigError, nearest

REFERENCE = re.compile(r"\{([A-Za-z][\w.-]*)\}")
# what a stage leaves behind, below the folder of the run
OUTPUT = {"mask": "{name}.jsonl"}
MODEL = {"sweep": "best"}  # what {last} is, below that
TRAINS = ("sft", "calibrate", "sweep", "extract")
SOURCES = ("paper", "ours", "unstated")
YOURS = "yours: --set"


@dataclass(frozen=True)
class Stage:
    """One command with its options.

    Attributes:
        name: within the recipe; the name of its folder.
        command: of loragate.
        values: option to value; no option stands here that the recipe leaves to the command's default.
        marks: option to the sentence that says where the value comes from; it begins with paper, ours or unstated.
    """

    name: str
    command: str
    values: dict[str, Any]
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def output(self) -> str:
        """What later stages read, below the folder of the run."""
        return OUTPUT.get(self.command, "{name}").format(name=self.name)

    @property
    def out(self) -> str:
        """What the command is told to write, below the folder of the run."""
        return self.output if self.command == "mask" else self.name


@dataclass(frozen=True)
class Recipe:
    """See the module's docstring.

    Attributes:
        name: `domain/backbone/method`, or the file it was read from.
        title, about: for people.
        tables: the tables and figures of the paper it belongs to; empty for what goes beyond the paper.
        stages: in their order.
        needs: "stage.option" to what the user must give before it can run.
        launcher: how training stages are started, in place of a plain process; empty for that.
        machine: the GPU that its settings are made for, as `loragate plan --gpu-memory` names it; the launcher says how many.
        architecture: {hub id of a base: its configuration}, so that nothing is fetched to plan.
    """

    name: str
    title: str
    stages: tuple[Stage, ...]
    about: str = ""
    tables: str = ""
    needs: dict[str, str] = field(default_factory=dict)
    launcher: str = ""
    machine: str = ""
    architecture: dict[str, dict[str, Any]] = field(default_factory=dict)

    def stage(self, name: str) -> Stage:
        """A stage by name."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        names = [stage.name for stage in self.stages]
        raise ConfigError(
            f"{self.name} has no stage '{name}'{nearest(name, names) or ';'} its stages are {', '.join(names)}"
        )

    def missing(self) -> dict[str, str]:
        """What of `needs` is not given yet."""
        given = {f"{stage.name}.{key}" for stage in self.stages for key, value in stage.values.items() if value}
        return {key: why for key, why in self.needs.items() if key not in given}

    def placed(self, folder: str | Path) -> tuple[Stage, ...]:
        """The stages as they run in `folder`: references replaced by paths, `out` added.

        Raises:
            ConfigError: for a reference to what does not come before.
        """
        placed: list[Stage] = []
        for stage in self.stages:
            outputs = {done.name: f"{folder}/{done.output}" for done in placed}
            if trained := [done.name for done in placed if done.command in TRAINS]:
                last = next(done for done in placed if done.name == trained[-1])
                outputs["last"] = "/".join(filter(None, (outputs[last.name], MODEL.get(last.command))))

            def resolve(name: str, stage: Stage = stage, outputs: dict[str, str] = outputs) -> str:
                if name not in outputs:
                    before = ", ".join(outputs) or "nothing"
                    raise ConfigError(
                        f"{self.name}: stage '{stage.name}' refers to {{{name}}}, but before it there is {before}"
                        + nearest(name, outputs)
                    )
                return outputs[name]

            values = {key: filled(value, resolve) for key, value in stage.values.items()}
            placed.append(dataclasses.replace(stage, values={**values, "out": f"{folder}/{stage.out}"}))
        return tuple(placed)

    def with_values(self, given: Mapping[str, str], accepts: Callable[[str, str], bool]) -> Recipe:
        """Replace values: "stage.option" in one stage, "option" in every stage that has it.

        Args:
            given: key to text, which is read as YAML.
            accepts: (command, option) to whether there is such an option.

        Raises:
            ConfigError: for a key that fits no stage.
        """
        stages = list(self.stages)
        for key, text in given.items():
            name, _, option = key.rpartition(".")
            option = option.replace("-", "_")
            fitting = [
                index
                for index, stage in enumerate(stages)
                if (stage.name == name or not name) and accepts(stage.command, option)
            ]
            if option == "out":
                raise ConfigError(f"--set {key}: the folder of a stage follows from --out")
            if not fitting:
                if name:
                    self.stage(name)
                known = {f"{s.name}.{o}" if name else o for s in stages for o in s.values}
                where = f"stage '{name}'" if name else "any stage"
                raise ConfigError(f"--set {key}: no such option of {where} of {self.name}{nearest(key, known)}")
            for index in fitting:
                stage = stages[index]
                values = {**stage.values, option: _value(key, text)}
                stages[index] = dataclasses.replace(stage, values=values, marks={**stage.marks, option: YOURS})
        return dataclasses.replace(self, stages=tuple(stages))

    def as_record(self) -> list[dict[str, Any]]:
        """The stages as JSON, to tell two recipes apart."""
        return [{"stage": stage.name, "command": stage.command, **stage.values} for stage in self.stages]


def filled(value: Any, resolve: Callable[[str], str]) -> Any:
    """`value` with every `{name}` in its texts replaced."""
    if isinstance(value, str):
        return REFERENCE.sub(lambda found: resolve(found.group(1)), value)
    return value


def _value(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text) if text.strip() else ""
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {key}={text}: not valid YAML ({getattr(error, 'problem', error)})") from None
