"""How a dev set is asked and judged; torch-free, so that a command line can be checked at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loragate.errors import ConfigError
from loragate.training.strategy import detect_launch
from loragate.validate import NonNegativeInt, PositiveInt, check_fields


@dataclass(frozen=True)
class DevSettings:
    """How the questions that choose are asked and judged.

    Attributes:
        dev_task: task (name or file) whose prompt, columns and grader it has.
        dev_grader: grader without a task: default (math), math_verify, gsm8k (last number), regex, choice, exact, boxed,
            tiny.
        dev_pattern: regular expression of the grader regex; its one group is the answer.
        dev_samples: samples per question where a variant is sampled at a temperature above 0.
        dev_max_new_tokens: token limit of an answer; 0 takes what the training examples' answers need.
        dev_batch_size: sequences generated at a time.
        retention_task: task (name or file) of the retention set; without it a file of prompts and answers.
        exclude: file of evaluation questions; a dev set that shares one with it is refused.
        drop_overlap: leave out of the dev set what is also in --data or --exclude, in place of the refusal.
        sandbox: where the programs of a dev set of code run; rlimits isolates nothing.
    """

    dev_task: str = ""
    dev_grader: str = "default"
    dev_pattern: str = ""
    dev_samples: PositiveInt = 4
    dev_max_new_tokens: NonNegativeInt = 0
    dev_batch_size: PositiveInt = 64
    retention_task: str = ""
    exclude: str = ""
    drop_overlap: bool = False
    sandbox: Literal["bubblewrap", "rlimits"] = "bubblewrap"

    def __post_init__(self) -> None:
        check_fields(self)


def require_one_process(asked: int = 0) -> None:
    """Refuse several processes, launched or asked for, which could not choose together; raises ConfigError."""
    if (processes := max(asked, detect_launch().processes)) > 1:
        raise ConfigError(
            f"variants are chosen in one process, not in {processes}; leave out --processes and any distributed launcher, or "
            "train one range on all of them with --ranges=L,U --skip-selection"
        )
