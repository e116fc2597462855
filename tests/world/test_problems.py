import random

import pytest

from loragate.errors import DataError
from loragate.world.problems import (
    SPLITS,
    Problem,
    draw_problems,
    draw_retention_items,
    is_correct_response,
    split_of,
)


def value_of(prompt):
    """The value, worked out by Python's own arithmetic rather than the package's."""
    words = prompt.split()[1:]
    value = int(words[0])
    for operator, operand in zip(words[1::2], words[2::2], strict=True):
        value = eval(f"({value} {operator} {operand}) % 10")
    return str(value)


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_right_and_splits_disjoint_over_thousands(split):
    drawn = [p for seed in range(3) for p in draw_problems(split, 2000, (1, 4) if split == "train" else (3, 4), seed)]
    assert len({p.prompt for p in drawn}) > 5000
    assert {split_of(p.prompt) for p in drawn} == {split}
    assert all(p.answer == value_of(p.prompt) for p in drawn)
    assert all(p.kind == "arithmetic" and p.operations == p.prompt.count(" ") // 2 for p in drawn)


def test_split_shares_are_seven_to_one_to_one_to_one():
    rng = random.Random(0)
    prompts = [f"solve {rng.randrange(10)} + {rng.randrange(10)} * {n}" for n in range(20_000)]
    shares = {split: sum(split_of(prompt) == split for prompt in prompts) / len(prompts) for split in SPLITS}
    assert shares == pytest.approx({"train": 0.7, "probe": 0.1, "dev": 0.1, "test": 0.1}, abs=0.01)


def test_splits_never_move():
    """Pinned: results that name a split stay comparable as long as this holds."""
    pinned = {"solve 6 * 0 - 5": "train", "solve 8 - 8 + 0": "probe", "solve 1 + 1": "dev", "reverse a b c d": "train"}
    assert {prompt: split_of(prompt) for prompt in pinned} == pinned
    assert [p.prompt for p in draw_problems("test", 2)] == ["solve 0 * 8 + 6 * 8 * 9", "solve 9 - 5 - 8 + 1 + 0"]


def test_a_split_that_is_exhausted_says_how_much_it_holds():
    everything = [f"solve {a} {op} {b}" for a in range(10) for op in "+-*" for b in range(10)]
    held = sum(split_of(prompt) == "probe" for prompt in everything)
    assert len(draw_problems("probe", held, operations=(1, 1))) == held
    with pytest.raises(DataError, match=f"found only {held} different problems .* expected {held + 1}"):
        draw_problems("probe", held + 1, operations=(1, 1))


def test_retention_items_ask_the_three_skills_in_equal_parts():
    items = draw_retention_items("test", 180)
    assert items == draw_retention_items("test", 180)
    assert len({item.prompt for item in items}) == 180
    assert [sum(item.kind == kind for item in items) for kind in ("reverse", "sort", "fact")] == [60, 60, 60]
    for item in items:
        task, *words = item.prompt.split()
        if item.kind != "fact":
            assert task == item.kind
            assert item.answer.split() == (words[::-1] if task == "reverse" else sorted(words))
            assert split_of(item.prompt) == "test"


ARITHMETIC = Problem("solve 6 * 0 - 5", "5", "arithmetic", 2)
REVERSE = Problem("reverse a b c d", "d c b a", "reverse", 0)
FACT = Problem("tell color of fox", "green", "fact", 0)


@pytest.mark.parametrize(
    ("problem", "text", "finished", "passed"),
    [
        (ARITHMETIC, "6 * 0 = 0 0 - 5 = 5 answer 5", True, True),
        (ARITHMETIC, "6 * 0 = 0 0 - 5 = 5 answer 5 <eos> <pad> <pad>", True, True),
        (ARITHMETIC, "okay so finally answer 5", True, True),
        (ARITHMETIC, "6 * 0 = 1 1 - 5 = 6 answer 5", True, True),  # the steps are not judged
        (ARITHMETIC, "6 * 0 = 0 0 - 5 = 5 answer 5", False, False),  # ran into the length limit
        (ARITHMETIC, "6 * 0 = 0 0 - 5 = 5", True, False),
        (ARITHMETIC, "6 * 0 = 0 0 - 5 = 5 result 5", True, False),
        (ARITHMETIC, "answer 5 answer 6", True, False),
        (ARITHMETIC, "answer 6 answer 5", True, True),
        (ARITHMETIC, "answer five", True, False),
        (ARITHMETIC, "answer 5 5", True, False),
        (ARITHMETIC, "answer 4 <eos> answer 5", True, False),  # nothing after the end counts
        (ARITHMETIC, "", True, False),
        (REVERSE, "d c b a", True, True),
        (REVERSE, " d  c b a <eos>", True, True),
        (REVERSE, "d c b a", False, False),
        (REVERSE, "d c b a a", True, False),
        (REVERSE, "answer d c b a", True, False),
        (FACT, "green", True, True),
        (FACT, "blue", True, False),
    ],
)
def test_verify(problem, text, finished, passed):
    assert is_correct_response(problem, text, finished) is passed
