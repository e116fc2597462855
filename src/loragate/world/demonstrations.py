"""The texts that models of this world learn from.

`demonstrations` are the rows to fine-tune on: worked problems in a talkative style with many ways to say the same, a
wrong step in five, and some endings that state no answer or an invented one. Style and noise leave high entropy where
nothing depends on it, which is what token-wise gates are meant to tell apart from the steps that matter.

`pretraining_documents` are what the base is trained on: mostly terse worked problems with a wrong step in seven and
several ways to end, and the retention skills. Now and then a talkative word is put in, so that fine-tuning finds words
which the base knows, as it would in a large model. Both use problems of the train split only.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from loragate.errors import ConfigError
from loragate.world.problems import RETENTION_KINDS, apply_operator, draw_problem, draw_retention, expression
from loragate.world.tokenizer import CLOSERS, CONNECTIVES, DIGITS, EQUALITIES, FILLERS, OPENERS

FILLER_SHARE = 0.25  # of the steps are preceded by a filler word


class Document(NamedTuple):
    """A prompt and the response to learn, both as words."""

    prompt: str
    response: str

    def row(self) -> dict[str, list[dict[str, str]]]:
        """The conversational form that trainers read."""
        return {
            "messages": [
                {"role": "user", "content": self.prompt},
                {"role": "assistant", "content": self.response},
            ]
        }


def demonstrations(
    count: int,
    seed: int = 0,
    *,
    operations: tuple[int, int] = (2, 4),
    step_error: float = 0.20,
    sloppy: float = 0.10,
) -> list[dict[str, list[dict[str, str]]]]:
    """Noisy demonstrations as rows `{"messages": [user, assistant]}`.

    Args:
        count: number of rows; problems may repeat, as two operations allow 6,300 only.
        seed: same seed, same rows; the first n rows do not depend on `count`.
        operations: shortest and longest problem, both included.
        step_error: chance that a step states a wrong digit; the following steps continue from it.
        sloppy: chance of an ending without a derived answer.
    """
    check_share("step_error", step_error)
    check_share("sloppy", sloppy)
    rng = random.Random(f"demonstrations/{seed}")
    rows = []
    for _ in range(count):
        problem = draw_problem(rng, "train", operations)
        worked = _worked_steps(rng, problem.prompt, step_error)
        words = _told(rng, worked, talk=1.0, filler=FILLER_SHARE)
        if rng.random() < sloppy:
            words += rng.choice(_SLOPPY_ENDINGS).format(random=rng.choice(DIGITS)).split()
        else:
            words += (rng.choice(CLOSERS), "answer", DIGITS[worked[-1].stated])
        rows.append(Document(problem.prompt, " ".join(words)).row())
    return rows


def pretraining_documents(
    count: int,
    seed: int = 0,
    *,
    arithmetic: float = 0.62,
    step_error: float = 0.15,
    answered: float = 0.70,
    aside: float = 0.10,
    operations: tuple[int, int] = (1, 4),
) -> list[Document]:
    """The documents the base is trained on.

    Args:
        count: number of documents.
        seed: same seed, same documents; the first n do not depend on `count`.
        arithmetic: share of worked problems; the rest are retention skills, each with a third.
        step_error: chance that a step states a wrong digit; the following steps continue from it.
        answered: share of the worked problems that end in `answer N`; the rest end in one of five other ways.
        aside: chance of a talkative word at every place where a demonstration would have one.
        operations: shortest and longest problem, both included.
    """
    shares = {"arithmetic": arithmetic, "step_error": step_error, "answered": answered, "aside": aside}
    for name, share in shares.items():
        check_share(name, share)
    rng = random.Random(f"pretraining/{seed}")
    documents = []
    for _ in range(count):
        if rng.random() >= arithmetic:
            item = draw_retention(rng, "train", rng.choice(RETENTION_KINDS))
            documents.append(Document(item.prompt, item.answer))
            continue
        problem = draw_problem(rng, "train", operations)
        worked = _worked_steps(rng, problem.prompt, step_error)
        words = _told(rng, worked, talk=aside, filler=aside)
        if rng.random() < aside:
            words.append(rng.choice(CLOSERS))
        ending = "answer {value}" if rng.random() < answered else rng.choice(_OTHER_ENDINGS)
        words += ending.format(value=worked[-1].stated).split()
        documents.append(Document(problem.prompt, " ".join(words)))
    return documents


_SLOPPY_ENDINGS = ("no idea answer {random}", "maybe answer {random}", "moving on story")
_OTHER_ENDINGS = ("result {value}", "value {value} note", "moving on story", "maybe guess {value}", "skip")


class _Step(NamedTuple):
    left: int
    operator: str
    right: int
    stated: int


def _told(rng: random.Random, worked: list[_Step], talk: float, filler: float) -> list[str]:
    """The steps in words; opener, connectives and other words for `=` each come with the chance `talk`."""
    words = [rng.choice(OPENERS)] if rng.random() < talk else []
    for position, step in enumerate(worked):
        if position and rng.random() < talk:
            words.append(rng.choice(CONNECTIVES))
        if rng.random() < filler:
            words.append(rng.choice(FILLERS))
        equality = rng.choice(EQUALITIES) if rng.random() < talk else EQUALITIES[0]
        words += (DIGITS[step.left], step.operator, DIGITS[step.right], equality, DIGITS[step.stated])
    return words


def _worked_steps(rng: random.Random, prompt: str, step_error: float) -> list[_Step]:
    """The steps of a problem as a demonstration states them; a wrong step states one of the nine other digits."""
    value, rest = expression(prompt)
    worked = []
    for operator, right in rest:
        stated = apply_operator(value, operator, right)
        if rng.random() < step_error:
            stated = (stated + rng.randint(1, 9)) % 10
        worked.append(_Step(value, operator, right, stated))
        value = stated
    return worked


def check_share(name: str, share: float) -> None:
    """Refuse a number that is no share."""
    if not 0.0 <= share <= 1.0:
        raise ConfigError(f"found {name}={share}; expected a share between 0 and 1")
