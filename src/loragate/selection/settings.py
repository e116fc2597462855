"""How candidates are asked and what may be picked; torch-free, so that a command line can be checked at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from loragate.errors import ConfigError


@dataclass(frozen=True)
class ProbeSettings:
    """How the questions of a probe are asked and judged.

    Attributes:
        probe_task: task (name or file) whose prompt, columns and grader the probe uses.
        probe_grader: how answers are judged without a task: default (math), math_verify, dft, exact, choice or tiny.
        probe_samples: samples per probe question.
        probe_temperature: sampling temperature of the probe; set the one that you will use.
        probe_max_new_tokens: token limit of a probe answer; 0 takes what the training rows' answers need.
    """

    probe_task: str = ""
    probe_grader: str = "default"
    probe_samples: int = 4
    probe_temperature: float = 1.0
    probe_max_new_tokens: int = 0

    def check_probe(self) -> None:
        """Refuse numbers that cannot be used; raises ConfigError."""
        if self.probe_samples < 1 or self.probe_max_new_tokens < 0 or not 0 <= self.probe_temperature < math.inf:
            raise ConfigError(
                "--probe-samples must be at least 1, --probe-max-new-tokens and --probe-temperature must not be negative"
            )


@dataclass(frozen=True)
class SelectionSettings(ProbeSettings):
    """How the range is chosen.

    Attributes:
        probe_sandbox: where the programs of a code probe run; rlimits isolates nothing.
        exclude: file of evaluation rows; a probe that shares a question with it is refused.
        retention_task: task (name or file) of the retention probe; without it a file of prompts and answers.
        references: also score the base without adapter and the adapter at temperature 0.3 on a labelled probe, for
            comparison.
        guard: stop the training of anchored or reward when sampled answers collapse: they repeat, never end, change
            their length or lose variety.
    """

    probe_sandbox: Literal["bubblewrap", "rlimits"] = "bubblewrap"
    exclude: str = ""
    retention_task: str = ""
    references: bool = True
    guard: bool = True
