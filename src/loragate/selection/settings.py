"""How candidates are asked and what may be picked; torch-free, so that a command line can be checked at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loragate.errors import ConfigError
from loragate.training.strategy import launch_of
from loragate.validate import Amount, Count, Size, check


@dataclass(frozen=True)
class ProbeSettings:
    """How the questions of a probe are asked and judged.

    Attributes:
        probe_task: task (name or file) whose prompt, columns and grader the probe uses.
        probe_grader: how answers are judged without a task: default (math), math_verify, dft, exact, choice or tiny.
        probe_samples: samples per probe question.
        probe_temperature: the one sampling temperature at which everything is asked, 0 for greedy; by default calibrate asks at
            1, 0.6, 0.3 and greedily and recommends one of them, without labels at 0.3 alone, and a sweep asks at 1.
        probe_max_new_tokens: token limit of a probe answer; 0 takes what the training rows' answers need.
        probe_sandbox: where the programs of a code probe run; rlimits isolates nothing.
    """

    probe_task: str = ""
    probe_grader: str = "default"
    probe_samples: Count = 4
    probe_temperature: Amount | None = None
    probe_max_new_tokens: Size = 0
    probe_sandbox: Literal["bubblewrap", "rlimits"] = "bubblewrap"

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class SelectionSettings(ProbeSettings):
    """How what is recommended is chosen.

    Attributes:
        exclude: file of evaluation rows; a probe that shares a question with it is refused.
        retention_task: task (name or file) of the retention probe; without it a file of prompts and answers.
        probe_covers_all: the probe has all kinds of questions that will be asked, though the rows may have more; so a setting
            may be recommended that gives up forms of answers which only the rows have.
    """

    exclude: str = ""
    retention_task: str = ""
    probe_covers_all: bool = False


def require_one_process(asked: int = 0) -> None:
    """Refuse several processes, launched or asked for, which could not choose together; raises ConfigError."""
    if (processes := max(asked, launch_of().processes)) > 1:
        raise ConfigError(
            f"ranges are chosen in one process, not in {processes}; leave out --processes and any distributed launcher, or train "
            "one range on all of them with --range=L,U --unverified"
        )
