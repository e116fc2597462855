"""Settings that several commands share: classes to inherit from, one for each heading of `--help-all`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, TypeVar

from loragate.models.settings import Loading
from loragate.training.settings import LaunchSettings, RowsSettings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")


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


def taken_from(options: object, kind: type[Settings]) -> Settings:
    """The settings of one kind out of a command's options, which have all of its fields."""
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})
