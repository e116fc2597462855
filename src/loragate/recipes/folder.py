"""The folder of a recipe's run: what is finished, and what a repeated command does with what lies there.

resolved.yaml          the recipe with the source of every value; a recipe file itself
recipe.json            the same as data, with the state of every stage
config/1-sft.yaml      what each stage was given, for loragate sft --config
sft/  calibrate/  …    the stages' own folders, each with its own run.json and checkpoints
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError, LoragateError
from loragate.files import require_new, require_same, write_json, write_text
from loragate.recipes.recipe import Recipe, Stage
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
        if stage.command in FINISHED:
            for item in out.iterdir():
                if item.name not in KEPT:
                    shutil.rmtree(item) if item.is_dir() else item.unlink()
        elif not begun:
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
    """recipe.json of a run.

    Raises:
        LoragateError: if it cannot be read or is none.
    """
    file = folder / RECORD
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(record["stages"], list) or not isinstance(record["state"], dict):
            raise ValueError("not a record of a run")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoragateError(f"{file}: cannot be read ({error}); choose another --out") from None
    return dict(record)
