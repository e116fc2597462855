"""The reward of `--objective reward`: 1 for an answer that the probe's grader calls right."""

from __future__ import annotations

from typing import Any

from loragate.data import Rows
from loragate.errors import ConfigError


def reward_of(options: Any, rows: Rows) -> Any:
    """Reward 1 for a right answer: rows must carry an answer, judged by the probe's grader.

    Raises:
        ConfigError: if a row has no answer.
    """
    from loragate.evaluation import grade_math
    from loragate.evaluation.judging import MATH
    from loragate.evaluation.tasks.extractors import grade_choice, grade_exact
    from loragate.evaluation.tasks.tiny import grade_tiny
    from loragate.selection.questions import ANSWERS

    def answer(row: Any) -> Any:
        return next((row[name] for name in ANSWERS if row.get(name) is not None), None)

    missing = [index for index in range(len(rows)) if answer(rows[index]) is None]
    if missing:
        raise ConfigError(
            f"{rows.where(missing[0])}: --objective reward needs an answer in every row ({', '.join(ANSWERS)}), to compare "
            "sampled answers with"
        )

    def reward(row: Any, text: str, finished: bool) -> float:
        gold = str(answer(row))
        if options.probe_grader == "tiny":
            return float(grade_tiny(row, text, finished).correct)
        if not finished:
            return 0.0
        if options.probe_grader in MATH:
            return float(grade_math(text, gold, options.probe_grader).correct)
        grade = grade_choice(text, gold) if options.probe_grader == "choice" else grade_exact(text, gold)
        return float(grade.correct)

    return reward
