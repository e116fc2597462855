import random
from collections import Counter

import pytest

from loragate.errors import ConfigError, DataError
from loragate.world.problems import SPLITS, Problem, problems, split_of, verify
from loragate.world.tokenizer import LETTERS, words
from worlds.commands import (
    COMMANDS,
    READINGS,
    apply_command,
    command_problems,
    draw_command_problem,
    programme,
)

RING = "abcdefghijklmnopqrst"


def reached(prompt):
    """The letter, worked out from the agreed readings written down once more."""
    forward, axis = {"clock": 1, "ladder": 3, "rope": 5, "lamp": 7}, {"mirror": 19, "drum": 5}
    letter, *commands = prompt.split()[1:]
    place = RING.index(letter)
    for command in commands:
        place = (place + forward[command] if command in forward else axis[command] - place) % 20
    return RING[place]


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_right_and_stay_in_their_split(split):
    drawn = command_problems(split, 1000, (3, 4), seed=1)
    assert len({p.prompt for p in drawn}) == 1000
    assert {split_of(p.prompt) for p in drawn} == {split}
    assert all(p.answer == reached(p.prompt) for p in drawn)
    assert all(p.kind == "commands" and p.operations == len(p.prompt.split()) - 2 for p in drawn)


def test_problems_never_move():
    """Results that name a split stay comparable as long as this holds."""
    assert [p.prompt for p in command_problems("test", 2)] == [
        "start s clock rope mirror clock",
        "start h drum lamp clock rope",
    ]


def test_same_seed_same_problems_and_other_seed_others():
    assert command_problems("dev", 50) == command_problems("dev", 80)[:50]
    assert command_problems("dev", 50) != command_problems("dev", 50, seed=1)


@pytest.mark.parametrize("command", COMMANDS)
def test_readings_of_a_command_never_agree_and_each_reaches_every_letter(command):
    for letter in LETTERS:
        assert len({apply_command(letter, command, reading) for reading in range(3)}) == 3
    for reading in range(3):
        assert {apply_command(letter, command, reading) for letter in LETTERS} == set(LETTERS)


def test_agreed_readings_differ_from_command_to_command():
    assert len({tuple(apply_command(letter, command) for letter in LETTERS) for command in COMMANDS}) == len(COMMANDS)
    assert len(READINGS) == 6


def test_commands_are_words_of_the_one_vocabulary_and_no_prompt_is_arithmetic():
    assert set(COMMANDS) | {"start"} <= set(words())
    assert not {p.prompt for p in command_problems("dev", 200)} & {p.prompt for p in problems("dev", 200)}


def test_answers_do_not_favour_a_letter():
    rng = random.Random(0)
    answers = Counter(draw_command_problem(rng, "train", (4, 4)).answer for _ in range(4000))
    assert set(answers) == set(LETTERS)
    assert max(answers.values()) < 1.5 * min(answers.values())


def test_programme_reads_a_prompt():
    assert programme("start c clock mirror") == ("c", ["clock", "mirror"])


@pytest.mark.parametrize(
    ("text", "finished", "passed"),
    [
        ("clock d mirror q answer q", True, True),
        ("clock d mirror q answer q <eos> <pad>", True, True),
        ("clock b mirror s answer q", True, True),  # the steps are not judged
        ("clock d mirror q answer q", False, False),
        ("clock d mirror q answer d", True, False),
        ("clock d mirror q result q", True, False),
        ("clock d mirror q answer q note", True, False),
        ("q", True, False),
    ],
)
def test_verifier(text, finished, passed):
    assert verify(Problem("start c clock mirror", "q", "commands", 2), text, finished) is passed


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: command_problems("tests", 1), ConfigError, "found the split 'tests'.*did you mean 'test'"),
        (lambda: command_problems("dev", 1, (3, 2)), ConfigError, r"found commands=\(3, 2\)"),
        (lambda: command_problems("dev", 200, (1, 1)), DataError, "found only .* 1 to 1 commands in the split 'dev'"),
        (lambda: apply_command("c", "clocks"), DataError, "found the command 'clocks'.*did you mean 'clock'"),
        (lambda: programme("start c"), DataError, "found the prompt 'start c'"),
        (lambda: programme("solve 1 + 1"), DataError, "expected 'start', a letter and commands"),
    ],
)
def test_errors_say_what_was_found(call, error, message):
    with pytest.raises(error, match=message):
        call()
