"""The rows to fine-tune on: worked problems in a talkative style with many ways to say the same.

One step in five is wrong, and some endings state no answer or an invented one. Style and noise leave high entropy where
nothing depends on it, which is what token-wise gates are meant to tell apart from the steps that matter. All problems are
of the train split.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from loragate.world.problems import apply_operator, draw_problem, parse_prompt
from loragate.world.vocabulary import CLOSERS, CONNECTIVES, DIGITS, EQUALITIES, FILLERS, OPENERS

FILLER_SHARE = 0.25  # of the steps are preceded by a filler word


def demonstrations(
    count: int,
    seed: int = 0,
    *,
    operations: tuple[int, int] = (2, 4),
    step_error: float = 0.20,
    no_answer_rate: float = 0.10,
) -> list[dict[str, list[dict[str, str]]]]:
    """Noisy demonstrations as rows `{"messages": [user, assistant]}`.

    Args:
        count: number of rows; problems may repeat, as two operations allow 6,300 only.
        seed: same seed, same rows; the first n rows do not depend on `count`.
        operations: shortest and longest problem, both included.
        step_error: chance that a step states a wrong digit; the following steps continue from it.
        no_answer_rate: chance of an ending without a derived answer.
    """
    rng = random.Random(f"demonstrations/{seed}")
    rows = []
    for _ in range(count):
        problem = draw_problem(rng, "train", operations)
        worked = worked_steps(rng, problem.prompt, step_error)
        words = render_steps(rng, worked, style_probability=1.0, filler=FILLER_SHARE)
        if rng.random() < no_answer_rate:
            words += rng.choice(_SLOPPY_ENDINGS).format(random=rng.choice(DIGITS)).split()
        else:
            words += (rng.choice(CLOSERS), "answer", DIGITS[worked[-1].stated_result])
        user, assistant = {"role": "user", "content": problem.prompt}, {"role": "assistant", "content": " ".join(words)}
        rows.append({"messages": [user, assistant]})
    return rows


_SLOPPY_ENDINGS = ("no idea answer {random}", "maybe answer {random}", "moving on story")


class Step(NamedTuple):
    """One step of a worked problem, with the digit that the text states."""

    left: int
    operator: str
    right: int
    stated_result: int


def render_steps(rng: random.Random, worked: list[Step], style_probability: float, filler: float) -> list[str]:
    """The steps in words; opener, connectives and other words for `=` each come with the chance `style_probability`."""
    words = [rng.choice(OPENERS)] if rng.random() < style_probability else []
    for position, step in enumerate(worked):
        if position and rng.random() < style_probability:
            words.append(rng.choice(CONNECTIVES))
        if rng.random() < filler:
            words.append(rng.choice(FILLERS))
        equality = rng.choice(EQUALITIES) if rng.random() < style_probability else EQUALITIES[0]
        words += (DIGITS[step.left], step.operator, DIGITS[step.right], equality, DIGITS[step.stated_result])
    return words


def worked_steps(rng: random.Random, prompt: str, step_error: float) -> list[Step]:
    """The steps of a problem as a demonstration states them; a wrong step states one of the nine other digits."""
    value, rest = parse_prompt(prompt)
    worked = []
    for operator, right in rest:
        stated = apply_operator(value, operator, right)
        if rng.random() < step_error:
            stated = (stated + rng.randint(1, 9)) % 10  # any digit but the right one
        worked.append(Step(value, operator, right, stated))
        value = stated  # right or wrong, the next step goes on from what was written
    return worked
