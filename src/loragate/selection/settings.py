"""How candidates are asked and what may be picked; torch-free, so that a command line can be checked at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from loragate.errors import ConfigError
from loragate.training.strategy import launch_of


@dataclass(frozen=True)
class ProbeSettings:
    """How the questions of a probe are asked and judged.

    Attributes:
        probe_task: task (name or file) whose prompt, columns and grader the probe uses.
        probe_grader: how answers are judged without a task: default (math), math_verify, dft, exact, choice or tiny.
        probe_samples: samples per probe question.
        probe_temperature: the one sampling temperature at which everything is asked, 0 for greedy; by default calibrate asks at
            1, 0.6, 0.3 and greedily and recommends one of them, and a sweep asks at 1.
        probe_max_new_tokens: token limit of a probe answer; 0 takes what the training rows' answers need.
    """

    probe_task: str = ""
    probe_grader: str = "default"
    probe_samples: int = 4
    probe_temperature: float | None = None
    probe_max_new_tokens: int = 0

    def check_probe(self) -> None:
        """Refuse numbers that cannot be used; raises ConfigError."""
        if self.probe_samples < 1 or self.probe_max_new_tokens < 0 or not 0 <= (self.probe_temperature or 0) < math.inf:
            raise ConfigError(
                "--probe-samples must be at least 1, --probe-max-new-tokens and --probe-temperature must not be negative"
            )


@dataclass(frozen=True)
class SelectionSettings(ProbeSettings):
    """How what is recommended is chosen.

    Attributes:
        probe_sandbox: where the programs of a code probe run; rlimits isolates nothing.
        exclude: file of evaluation rows; a probe that shares a question with it is refused.
        retention_task: task (name or file) of the retention probe; without it a file of prompts and answers.
        guard: stop the training of anchored or reward when sampled answers collapse: they repeat, never end, change
            their length or lose variety.
    """

    probe_sandbox: Literal["bubblewrap", "rlimits"] = "bubblewrap"
    exclude: str = ""
    retention_task: str = ""
    guard: bool = True


def require_one_process() -> None:
    """Refuse several processes, which could not choose together; raises ConfigError."""
    if (processes := launch_of().processes) > 1:
        raise ConfigError(
            f"ranges are chosen in one process, and this is one of {processes}; start loragate without a distributed "
            "launcher, or train one range on all of them with --range=L,U --unverified"
        )
