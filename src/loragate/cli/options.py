"""Settings that several commands share: classes to inherit from, one for each heading of `--help-all`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loragate.models.settings import Loading
from loragate.training.settings import LaunchSettings, RowsSettings


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
