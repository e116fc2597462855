"""Settings that act only beside others: one table, and one refusal of a setting that would have no effect.

A row says which settings are read where another setting has certain values. Only those stand here whose silence would mislead
somebody who set them. What only a loaded model can tell (a gate override on a model without gates) is refused where the
model is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from loragate.errors import ConfigError


@dataclass(frozen=True)
class SettingCondition:
    """One row: `settings` act only where the setting `depends_on` has one of `values`."""

    settings: tuple[str, ...]
    depends_on: str  # the setting that decides
    values: tuple[Any, ...] = ()  # with which they act; empty for anything that was given, (None,) for nothing given

    def is_met_by(self, found: Any) -> bool:
        """Whether the settings act where `depends_on` is `found`."""
        if not self.values:
            return bool(found)
        return found in self.values or (None in self.values and not found)


_DEV_GRADER_CONDITIONS = (
    SettingCondition(("dev_grader",), "dev_task", (None,)),  # a task has a grader of its own
    SettingCondition(("dev_pattern",), "dev_grader", ("regex",)),
)
_DEV_SET_CONDITIONS = (
    SettingCondition(("dev_samples", "dev_max_new_tokens", "retention_data", "exclude"), "dev_data"),
    *_DEV_GRADER_CONDITIONS,
)
_GRADERS = ("default", "math_verify", "gsm8k", "regex", "choice", "exact", "boxed", "humaneval", "mbpp", "tiny")

SETTING_CONDITIONS: dict[str, tuple[SettingCondition, ...]] = {
    "calibrate": _DEV_SET_CONDITIONS,
    "doctor": (
        SettingCondition(("data", "dev_data", "retention_data", "resume"), "quick", (None,)),  # which reads files alone
        SettingCondition(("dev_task", "dev_grader"), "dev_data"),
        *_DEV_GRADER_CONDITIONS,
    ),
    "sweep": (
        *_DEV_SET_CONDITIONS,
        SettingCondition(("workers", "gpus_per_trial"), "runner", ("auto", "ray")),
        SettingCondition(("learning_rate",), "learning_rates", (None,)),
    ),
    # a task file; the harness asks and judges in its own way
    "task": (
        SettingCondition(("harness",), "grader", ("lm-eval",)),
        SettingCondition(("system", "prompt", "raw"), "grader", _GRADERS),
        SettingCondition(("pattern",), "grader", ("regex",)),
        SettingCondition(("system",), "raw", (None,)),
    ),
    "rows": (SettingCondition(("select_seed",), "select", ("shuffled",)),),
    # transformers' constant schedule has no warm-up
    "training": (
        SettingCondition(("warmup_ratio",), "lr_scheduler_type", ("cosine", "linear", "constant_with_warmup")),
    ),
    "dataset": (SettingCondition(("config", "split", "revision"), "hub"),),
    "diagnose": (
        SettingCondition(("rows",), "what", ("entropy", "alignment")),
        SettingCondition(("suppress",), "what", ("entropy",)),
        SettingCondition(("run",), "what", ("gates", "alignment", "tokens")),
        SettingCondition(("interventions", "engine"), "what", ("interventions",)),
        SettingCondition(("value",), "what", ("alignment",)),
        # stored answers are chosen with --tasks, --answers and --limit
        SettingCondition(
            ("suite", "data", "samples", "temperature", "max_new_tokens"),
            "what",
            ("entropy", "interventions"),
        ),
    ),
    # the rows of an evaluated sweep are the adapter and the cells
    "eval": (SettingCondition(("model", "constants"), "sweep", (None,)),),
}


def require_effect(subject: str, options: Any, *, flags: bool = False) -> None:
    """Refuse a setting that is not at its default and would have no effect.

    Args:
        subject: whose rows of the table are meant.
        options: a dataclass with the settings.
        flags: whether the settings were given as flags of a command line; only words depend on it.

    Raises:
        ConfigError: naming the setting, what stands against it and where it acts.
    """
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(options)
    }
    for row in SETTING_CONDITIONS[subject]:
        found = getattr(options, row.depends_on)
        if row.is_met_by(found):
            continue
        for name in row.settings:
            if getattr(options, name) != defaults[name]:
                raise ConfigError(_sentence(row, name, found, flags))


def active_settings(subject: str, names: Iterable[str], **facts: Any) -> tuple[str, ...]:
    """Those of the settings `names` that act where the settings that decide are as in `facts`."""
    idle = {
        name for row in SETTING_CONDITIONS[subject] if not row.is_met_by(facts[row.depends_on]) for name in row.settings
    }
    return tuple(name for name in names if name not in idle)


def _sentence(row: SettingCondition, name: str, found: Any, flags: bool) -> str:
    shown, needed = (f"--{one.replace('_', '-')}" if flags else one for one in (name, row.depends_on))
    if not row.values:
        return f"{shown} has no effect without {needed}; give that too, or leave {shown} out"
    # (None,) acts where nothing is given, which is not said
    only = " and ".join(str(value) for value in row.values if value is not None)
    against = needed if found is True else f"{row.depends_on} {found}"
    return f"{shown} has no effect with {against}{only and f', only with {only}'}; leave it out"
