"""Settings that several commands share: classes to inherit from, one for each heading of `--help-all`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from loragate import gates
from loragate.errors import DataError, nearest
from loragate.evaluation.settings import EngineSettings, GradingSettings, TaskSettings
from loragate.models.settings import Loading
from loragate.training.settings import LaunchSettings, RowsSettings
from loragate.validate import comma_list

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")

# of every training: recipes state it, people hardly ever change it
RARE = "adam_beta1 adam_beta2 max_grad_norm save_total_limit select_seed system"
# the same of calibrate and sweep
RARE_WITH_GATES = (
    f"{RARE} weight_decay lr_scheduler_type warmup_ratio logging_steps packing group_by_length select revision tau "
    "init_scale detach_input gate_modules dev_batch_size retention_task sandbox trust_remote_code"
)


@dataclass(frozen=True)
class OutputOptions:
    """Where a run writes.

    Attributes:
        out: run folder; must be new or empty, or hold the run to resume.
        resume: continue the unfinished run in the out folder.
    """

    out: str = ""
    resume: bool = False


@dataclass(frozen=True)
class ModelOptions(Loading):
    """How a model is loaded and spoken to.

    Attributes:
        system: none leaves out a default system message of the template.
    """

    system: Literal["none", "keep"] = "none"


@dataclass(frozen=True)
class RunOptions(RowsSettings, ModelOptions, LaunchSettings, OutputOptions):
    """What every training takes beside the settings of its stage."""


@dataclass(frozen=True)
class GateOptions:
    """How the gates are made.

    Attributes:
        tau: gate temperature.
        init_scale: size of the initial perturbation of the gate weights; above 0 where an upper bound is 1.
        granularity: unit that has its own λ: token (each token in each module), module (each module, whatever the
            token) or global (one λ for all).
        detach_input: the gate reads its input without a gradient (the paper's semi-gradient); false gives the complete
            gradient, a variant.
        gate_modules: gate only these modules (names separated by commas); by default all LoRA linears.
    """

    tau: float = 1.0
    init_scale: float = 1e-6
    granularity: Literal["token", "module", "global"] = "token"
    detach_input: bool = True
    gate_modules: str = ""

    def gate_config(self) -> gates.GateConfig:
        """These settings as the gates take them; range and seed, which are a candidate's, are placeholders."""
        return gates.GateConfig(
            0,
            1,
            tau=self.tau,
            init_scale=self.init_scale,
            detach_input=self.detach_input,
            granularity=self.granularity,
            target_modules=tuple(comma_list(self.gate_modules)) or None,
        )


@dataclass(frozen=True)
class EvaluationInputs(ModelOptions, EngineSettings, TaskSettings, GradingSettings, OutputOptions):
    """What is evaluated, on what, and by which engine. A command that inherits from it says which models it takes.

    Attributes:
        base: where the base model is, instead of the recorded one.
    """

    base: str = ""
    model: str = ""


def require_files(options: object) -> None:
    """Refuse a data file that is not there, before anything heavy is imported; a folder or a hub id is asked later."""
    for name in ("data", "dev_data", "retention_data", "eval_data"):
        path = Path(given := getattr(options, name, "")).expanduser()
        if path.suffix.lower() in (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".gz") and not path.exists():
            beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            raise DataError(f"--{name.replace('_', '-')}: found no file {given}{nearest(path.name, beside)}")


def extract_settings(options: object, kind: type[Settings]) -> Settings:
    """The settings of one kind out of a command's options, which have all of its fields."""
    # a subclass would do for a call, but what is recorded of a run is the settings' own fields and no others
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})
