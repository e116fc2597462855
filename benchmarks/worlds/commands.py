"""A second kind of problem: commands on a letter, whose meaning is a matter of convention.

The twenty letters stand in a ring. `start c clock mirror` asks for the letter that is reached from c after both commands.
Every command has three readings, such as one place forward, one place back or half round, and only the first of them,
the agreed one, counts as right. The base knows all three and is undecided; clean demonstrations teach it which one is
meant. An adapter that was trained a little points the right way and does not go far enough, so here it pays to take more
than all of it (λ > 1) in places, where the noisy demonstrations of arithmetic are best held back.

No two readings of a command lead from a letter to the same one, so one token decides each step. Splits are those of
`problems`: by the hash of the prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from loragate.errors import ConfigError, DataError, nearest
from loragate.world.problems import Problem, check_split, different_problems, split_of
from loragate.world.tokenizer import LETTERS

Reading = Callable[[int], int]


def _forward(places: int) -> Reading:
    return lambda place: place + places


def _opposite(axis: int) -> Reading:
    return lambda place: axis - place


# The agreed reading comes first.
READINGS: dict[str, tuple[Reading, Reading, Reading]] = {
    "clock": (_forward(1), _forward(-1), _forward(10)),
    "ladder": (_forward(3), _forward(-3), _forward(6)),
    "rope": (_forward(5), _forward(-5), _forward(2)),
    "lamp": (_forward(7), _forward(-7), _forward(4)),
    "mirror": (_opposite(19), _opposite(9), _opposite(0)),
    "drum": (_opposite(5), _opposite(12), _opposite(16)),
}
COMMANDS = tuple(READINGS)


def apply_command(letter: str, command: str, reading: int = 0) -> str:
    """The letter after one command; reading 0 is the agreed one."""
    if command not in READINGS:
        raise DataError(
            f"found the command {command!r}; expected one of {', '.join(COMMANDS)}{nearest(command, COMMANDS)}"
        )
    return LETTERS[READINGS[command][reading](LETTERS.index(letter)) % len(LETTERS)]


def programme(prompt: str) -> tuple[str, list[str]]:
    """The first letter of a prompt and the commands that follow it."""
    task, *words = prompt.split()
    if task != "start" or len(words) < 2 or words[0] not in LETTERS:
        raise DataError(f"found the prompt {prompt!r}; expected 'start', a letter and commands: 'start c clock mirror'")
    return words[0], words[1:]


def draw_command_problem(rng: random.Random, split: str, commands: tuple[int, int]) -> Problem:
    """One problem of a split; the number of commands is uniform over the given range, both ends included."""
    check_split(split)
    lowest, highest = commands
    if not 1 <= lowest <= highest:
        raise ConfigError(f"found commands={commands}; expected (lowest, highest) with 1 <= lowest <= highest")
    length = rng.randint(lowest, highest)
    while True:
        letter = rng.choice(LETTERS)
        names = [rng.choice(COMMANDS) for _ in range(length)]
        prompt = " ".join(("start", letter, *names))
        if split_of(prompt) == split:
            for name in names:
                letter = apply_command(letter, name)
            return Problem(prompt, letter, "commands", length)


def command_problems(split: str, count: int, commands: tuple[int, int] = (4, 4), seed: int = 0) -> list[Problem]:
    """Draw `count` different problems of one split.

    Raises:
        ConfigError: unknown split or impossible range of commands.
        DataError: the split holds fewer different problems than were asked for.
    """
    rng = random.Random(f"commands/{split}/{commands[0]}-{commands[1]}/{seed}")
    what = f"{commands[0]} to {commands[1]} commands in the split '{split}'"
    return different_problems(lambda: draw_command_problem(rng, split, commands), count, what, "commands")
