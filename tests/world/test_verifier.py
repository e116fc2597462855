import pytest

from loragate.world.problems import Problem, verify

ARITHMETIC = Problem("solve 6 * 0 - 5", "5", "arithmetic", 2)
REVERSE = Problem("reverse a b c d", "d c b a", "reverse", 0)
FACT = Problem("tell color of fox", "green", "fact", 0)


@pytest.mark.parametrize(
    ("text", "finished", "passed"),
    [
        ("6 * 0 = 0 0 - 5 = 5 answer 5", True, True),
        ("6 * 0 = 0 0 - 5 = 5 answer 5 <eos> <pad> <pad>", True, True),
        ("okay so finally answer 5", True, True),
        ("answer 5", True, True),
        ("6 * 0 = 1 1 - 5 = 6 answer 5", True, True),  # the steps are not judged
        ("6 * 0 = 0 0 - 5 = 5 answer 6", True, False),
        ("6 * 0 = 0 0 - 5 = 5 answer 5", False, False),  # ran into the length limit
        ("6 * 0 = 0 0 - 5 = 5", True, False),
        ("6 * 0 = 0 0 - 5 = 5 result 5", True, False),
        ("answer 5 done", True, False),
        ("answer 5 answer 6", True, False),
        ("answer 6 answer 5", True, True),
        ("answer", True, False),
        ("answer five", True, False),
        ("answer 5 5", True, False),
        ("answer 5 <q> solve", True, False),
        ("answer 4 <eos> answer 5", True, False),  # nothing after the end counts
        ("", True, False),
    ],
)
def test_arithmetic(text, finished, passed):
    assert verify(ARITHMETIC, text, finished) is passed


@pytest.mark.parametrize(
    ("problem", "text", "finished", "passed"),
    [
        (REVERSE, "d c b a", True, True),
        (REVERSE, " d  c b a <eos>", True, True),
        (REVERSE, "d c b a", False, False),
        (REVERSE, "d c b", True, False),
        (REVERSE, "d c b a a", True, False),
        (REVERSE, "answer d c b a", True, False),
        (FACT, "green", True, True),
        (FACT, "blue", True, False),
        (FACT, "", True, False),
    ],
)
def test_retention_items_must_match_whole(problem, text, finished, passed):
    assert verify(problem, text, finished) is passed
