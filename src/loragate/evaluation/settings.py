"""Settings of an evaluation that a command line offers as they are: which tasks, what answers them, what judges.

Light: `--help` reads this file, so that nothing here may load a model's libraries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from loragate.errors import ConfigError
from loragate.validate import PositiveFloat, PositiveInt, UnitInterval, comma_list


@dataclass(frozen=True)
class TaskSettings:
    """Which tasks, on which questions, and how their answers are sampled.

    Attributes:
        suite: math, retention, code, arithmetic, tiny, tiny_retention or all.
        tasks: tasks by name, or your own task files, separated by commas; instead of a suite, or in addition to it.
        data: local files in place of hub data sets: TASK=FILE separated by commas, or a folder that holds TASK.jsonl files.
        limit: first questions of each task only.
        samples: samples per question, in place of the task's own.
        temperature: of sampling, one or several as in 1,0.6,0.3,0 (0 is greedy): every variant is scored at each; in place of the
            tasks' own and the controls'.
        max_new_tokens: token limit of an answer, in place of the task's own.
        seed: seed of sampling, and of generated questions.
    """

    suite: str = ""
    tasks: str = ""
    data: str = ""
    limit: PositiveInt | None = None
    samples: PositiveInt | None = None
    temperature: str = ""
    max_new_tokens: PositiveInt | None = None
    seed: int = 0

    @property
    def temperatures(self) -> list[float]:
        """Those of `temperature`, the highest first, which stands in place of the tasks' own; none where they keep it.

        Raises:
            ConfigError: for what is no temperature, or is there twice.
        """
        return parse_temperatures("" if self.temperature is None else str(self.temperature))


@dataclass(frozen=True)
class EngineSettings:
    """What answers the questions.

    Attributes:
        engine: transformers runs on any device; vllm needs pip install ".[vllm]" in a checkout.
        replicas: copies of the model that answer in parallel, on a Ray cluster (pip install ".[sweep]" in a checkout).
        batch_size: sequences at a time; with vLLM or replicas, questions whose answers are drawn together.
        vllm_memory: share of a device's memory that vLLM may fill; 0 takes 0.9, or on a CPU half of what is free.
        tensor_parallel: devices that share one copy of the model in vLLM.
    """

    engine: Literal["transformers", "vllm"] = "transformers"
    replicas: PositiveInt = 1
    batch_size: PositiveInt = 64
    vllm_memory: UnitInterval = 0.0
    tensor_parallel: PositiveInt = 1


@dataclass(frozen=True)
class GradingSettings:
    """How answers are judged.

    Attributes:
        grader: in place of the tasks' own: default or math_verify of math answers, gsm8k (a last number) or regex of any.
        pattern: regular expression for --grader regex; its one group is the answer, and its last match counts.
        sandbox: where programs run; rlimits isolates nothing.
        workers: grading processes.
        timeout: seconds after which grading an answer is stopped; for a program, seconds of processor time.
    """

    grader: str = ""
    pattern: str = ""
    sandbox: Literal["bubblewrap", "rlimits"] = "bubblewrap"
    workers: PositiveInt = 2
    timeout: PositiveFloat = 10.0


def parse_constants(text: str) -> list[float | str]:
    """The λ of --constants, each a number or, for a part of the model, as "lower=0.5"; a ConfigError for anything else."""
    try:
        return [one if "=" in one else float(one) for one in comma_list(text)]
    except ValueError:
        raise ConfigError(
            f"--constants {text}: expected numbers separated by commas, such as -0.5,0.5 or 0.5,lower=0.5"
        ) from None


def parse_temperatures(text: str) -> list[float]:
    """The temperatures of --temperature, the highest first; a ConfigError for what is none, or is there twice."""
    expected = "expected numbers from 0 (greedy) separated by commas, such as 1,0.6,0.3,0"
    try:
        found = [float(one) for one in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(f"--temperature {text}: {expected}") from None
    for one in found:
        if not 0 <= one < math.inf:
            raise ConfigError(f"--temperature {text}: found {one:g}, {expected}")
        if found.count(one) > 1:
            raise ConfigError(f"--temperature {text}: {one:g} is given twice; every variant is scored at it once")
    return sorted(found, reverse=True)
