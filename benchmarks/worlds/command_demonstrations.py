"""The texts that models learn from in the world of commands.

`command_documents` are what the base is trained on: half of the worked problems name an animal that keeps to its own
reading (`start c clock mirror of fox`), half name nobody and take a reading at random at every step; beside them stand the
retention skills of the other world. The base thus holds every reading, and without a name it is undecided.
`command_demonstrations` are the rows to fine-tune on: nobody is named, and the reading is the agreed one throughout, unless
noise is asked for. Both use problems of the train split only.
"""

from __future__ import annotations

import random

from loragate.world.demonstrations import as_row
from loragate.world.problems import RETENTION_KINDS, draw_retention
from loragate.world.tokenizer import FACT_JOINER, FILLERS, OPENERS, SUBJECTS
from worlds.commands import apply_command, draw_command_problem, programme
from worlds.tiny_base import Document

# Of the steps where nobody is named. The agreed reading is not the most frequent one, so that a base sampled at a
# low temperature settles on a wrong one.
READING_SHARES: tuple[float, ...] = (0.3, 0.4, 0.3)
# Who keeps to one reading each, in the order of the readings.
NAMED = SUBJECTS[:3]
_OTHER_ENDINGS = ("result {letter}", "value {letter} note", "moving on story", "maybe guess {letter}", "skip")


def command_demonstrations(
    count: int, seed: int = 0, *, commands: tuple[int, int] = (2, 4), noise: float = 0.0
) -> list[dict[str, list[dict[str, str]]]]:
    """Demonstrations as rows `{"messages": [user, assistant]}`.

    Args:
        count: number of rows.
        seed: same seed, same rows; the first n rows do not depend on `count`.
        commands: shortest and longest problem, both included.
        noise: chance that a step takes one of the two readings that are not agreed; the following steps continue from it.
    """
    rng = random.Random(f"command demonstrations/{seed}")
    shares = (1.0 - noise, noise / 2, noise / 2)
    rows = []
    for _ in range(count):
        problem = draw_command_problem(rng, "train", commands)
        words, letter = _worked(rng, problem.prompt, shares)
        rows.append(as_row(problem.prompt, " ".join((*words, "answer", letter))))
    return rows


def command_documents(
    count: int,
    seed: int = 0,
    *,
    programmes: float = 0.62,
    named: float = 0.50,
    answered: float = 0.70,
    aside: float = 0.10,
    commands: tuple[int, int] = (1, 4),
) -> list[Document]:
    """The documents the base is trained on.

    Args:
        count: number of documents.
        seed: same seed, same documents; the first n do not depend on `count`.
        programmes: share of worked problems; the rest are retention skills, each with a third.
        named: share of the worked problems whose prompt ends in `of fox`, `of owl` or `of bear` and which keep to that
            animal's reading.
        answered: share of the worked problems that end in `answer LETTER`; the rest end in one of five other ways.
        aside: chance of an opener, and of a filler before each step.
        commands: shortest and longest problem, both included.
    """
    rng = random.Random(f"command documents/{seed}")
    documents = []
    for _ in range(count):
        if rng.random() >= programmes:
            item = draw_retention(rng, "train", rng.choice(RETENTION_KINDS))
            documents.append(Document(item.prompt, item.answer))
            continue
        problem = draw_command_problem(rng, "train", commands)
        opener = [rng.choice(OPENERS)] if rng.random() < aside else []
        prompt, shares = problem.prompt, READING_SHARES
        if rng.random() < named:
            who = rng.randrange(len(NAMED))
            prompt = f"{prompt} {FACT_JOINER} {NAMED[who]}"
            shares = tuple(float(reading == who) for reading in range(len(NAMED)))
        words, letter = _worked(rng, problem.prompt, shares, aside)
        ending = "answer {letter}" if rng.random() < answered else rng.choice(_OTHER_ENDINGS)
        documents.append(Document(prompt, " ".join((*opener, *words, ending.format(letter=letter)))))
    return documents


def _worked(rng: random.Random, prompt: str, shares: tuple[float, ...], filler: float = 0.0) -> tuple[list[str], str]:
    """The steps in words (command, then the letter it leads to) and the last letter."""
    letter, commands = programme(prompt)
    words: list[str] = []
    for command in commands:
        if rng.random() < filler:
            words.append(rng.choice(FILLERS))
        (reading,) = rng.choices(range(len(shares)), shares)
        letter = apply_command(letter, command, reading)
        words += (command, letter)
    return words, letter
