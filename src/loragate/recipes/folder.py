"""The folder of one recipe's run: what it is, what is finished, what a repeated command does with what lies there.

resolved.yaml          the recipe with the source of every value; a recipe file itself
recipe.json            the same as data, with the state of every stage
config/1-sft.yaml      what each stage was given, for loragate sft --config
sft/  calibrate/  …    the stages' own folders, each with its own run.json and checkpoints
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from loragate.errors import ConfigError, LoragateError
from loragate.files import first_difference, write_json, write_text
from loragate.recipes.recipe import Recipe, Stage
from loragate.recipes.show import as_yaml
from loragate.version import __version__

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


@dataclass
class RunFolder:
    """See the module's docstring; `record` is the content of recipe.json."""

    path: Path
    recipe: Recipe
    record: dict[str, Any]

    @classmethod
    def begin(cls, path: Path, recipe: Recipe) -> RunFolder:
        """The folder of this recipe, new or to be continued; evaluations that have answered nothing yet may have changed.

        Raises:
            ConfigError: if the folder holds another recipe's run, naming the first difference, or something else.
        """
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--out {path} is a file; give a folder")
        stages = json.loads(json.dumps(recipe.as_record()))
        file = path / RECORD
        if file.is_file():
            record = _read(file)
            _require_same(path, record["stages"], stages, _open(path, record, recipe))
            if record["stages"] != stages:
                record["stages"] = stages
                write_text(path / "resolved.yaml", as_yaml(recipe))
                write_json(file, record)
            return cls(path, recipe, record)
        present = sorted(item.name for item in path.iterdir() if item.name != "lock") if path.is_dir() else []
        if present:
            raise ConfigError(
                f"--out {path} is not empty (it holds {', '.join(present[:3])}) and no recipe's run; choose another folder"
            )
        record = {"recipe": recipe.name, "loragate": __version__, "stages": stages, "state": {}}
        folder = cls(path, recipe, record)
        write_text(path / "resolved.yaml", as_yaml(recipe))
        write_json(file, record)
        return folder

    def config(self, stage: Stage, position: int) -> Path:
        """Write the file that the stage's command reads; returns its path."""
        path = self.path / "config" / f"{position + 1}-{stage.name}.yaml"
        text = yaml.safe_dump(stage.values, sort_keys=False, allow_unicode=True)
        write_text(path, f"# loragate {stage.command} --config {path}\n{text}")
        return path

    def is_finished(self, stage: Stage) -> bool:
        """Whether the stage came to its end, also where only its record is missing."""
        if self.record["state"].get(stage.name, {}).get("finished"):
            return True
        out = Path(str(stage.values["out"]))
        if stage.command == "mask":
            return out.is_file()
        marks = FINISHED.get(stage.command)
        return bool(marks) and all((out / name).is_file() for name in marks or ())

    def prepare(self, stage: Stage) -> bool:
        """Clear what a killed command may have left half-written; returns whether the command is to resume.

        Raises:
            ConfigError: if something lies there that this run did not make.
        """
        out = Path(str(stage.values["out"]))
        if stage.command == "mask":
            return out.with_name(out.name + ".partial").is_dir()
        if not out.is_dir():
            return False
        if stage.name not in self.record["state"]:
            raise ConfigError(f"{out} is in the way: this run did not make it. Remove it, or choose another --out")
        begun = any(next(out.glob(pattern), None) is not None for pattern in BEGUN.get(stage.command, ()))
        if stage.command in ("sft", "calibrate"):
            for item in out.iterdir():
                if item.name not in KEPT:
                    shutil.rmtree(item) if item.is_dir() else item.unlink()
        elif not begun:
            shutil.rmtree(out)
        return begun

    def remember(self, **values: Any) -> None:
        """Keep what later runs in this folder go by, where it has a value."""
        if any(value and self.record.get(key) != value for key, value in values.items()):
            self.record |= {key: value for key, value in values.items() if value}
            write_json(self.path / RECORD, self.record)

    def note(self, stage: Stage, **state: Any) -> None:
        """Keep the state of a stage."""
        before = self.record["state"].get(stage.name, {})
        self.record["state"][stage.name] = {**before, **state}
        write_json(self.path / RECORD, self.record)

    def began(self, stage: Stage, command: str) -> None:
        """Note that a stage was started."""
        runs = self.record["state"].get(stage.name, {}).get("started", [])
        self.note(stage, command=command, started=[*runs, time.strftime("%Y-%m-%dT%H:%M:%S%z")])


def _open(path: Path, record: dict[str, Any], recipe: Recipe) -> set[str]:
    """Names of the stages that train nothing and have left nothing: their settings are not bound to what lies in the folder."""
    names = {stage.name for stage in recipe.stages if stage.command in ("eval", "diagnose")}
    finished = {name for name, state in record["state"].items() if state.get("finished")}
    return {name for name in names - finished if not (path / name / "eval.json").is_file()}


def _require_same(path: Path, before: Any, now: Any, free: set[str]) -> None:
    old, new = ({stage["stage"]: stage for stage in stages} for stages in (before, now))
    both = free & old.keys() & new.keys()
    left, right = ({name: side[name] for name in side if name not in both} for side in (old, new))
    found = first_difference(left, right)
    if found is not None:
        key, old, new = found
        raise ConfigError(
            f"--out {path} holds the run of another recipe: {key} was {_short(old)}, now {_short(new)}. Run the recipe as it "
            "was, or choose another --out"
        )


def _read(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(record["stages"], list) or not isinstance(record["state"], dict):
            raise ValueError("not a record of a run")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoragateError(f"{file}: cannot be read ({error}); choose another --out") from None
    return record


def _short(value: Any) -> str:
    text = "not there" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "..."
