import pytest

from loragate.errors import ConfigError, DataError
from loragate.world.problems import SPLITS, Problem, split_of, verify
from worlds.commands import (
    apply_command,
    command_problems,
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
