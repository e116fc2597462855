import hashlib
from collections import Counter
from itertools import pairwise

import pytest

from loragate.world.demonstrations import demonstrations
from loragate.world.problems import Problem, apply_operator, is_correct_response, split_of
from loragate.world.vocabulary import DIGITS, EQUALITIES, OPERATORS

from .test_problems import value_of


def split_rows(rows):
    return [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in rows]


def steps_of(response):
    """(left, operator, right, equality, stated) wherever five words have that shape."""
    words = response.split()
    return [
        (int(words[i]), words[i + 1], int(words[i + 2]), words[i + 3], int(words[i + 4]))
        for i in range(len(words) - 4)
        if words[i] in DIGITS and words[i + 1] in OPERATORS and words[i + 3] in EQUALITIES and words[i + 4] in DIGITS
    ]


def wrong_share(responses):
    steps = [step for response in responses for step in steps_of(response)]
    return sum(apply_operator(a, op, b) != stated for a, op, b, _, stated in steps) / len(steps)


@pytest.fixture(scope="module")
def rows():
    return demonstrations(4096)


def test_rows_are_conversations_of_the_train_split(rows):
    assert len(rows) == 4096
    assert {tuple(m["role"] for m in row["messages"]) for row in rows} == {("user", "assistant")}
    prompts = [prompt for prompt, _ in split_rows(rows)]
    assert {split_of(prompt) for prompt in prompts} == {"train"}
    lengths = Counter((len(prompt.split()) - 2) // 2 for prompt in prompts)
    assert {n: share / len(rows) for n, share in lengths.items()} == pytest.approx(
        {2: 1 / 3, 3: 1 / 3, 4: 1 / 3}, abs=0.03
    )


def test_the_world_never_moves(rows):
    """Pinned: every table of the quickstart was made from these texts."""
    texts = "\n".join(response for _, response in split_rows(rows))
    assert hashlib.sha256(texts.encode()).hexdigest()[:12] == "1647e1d98808"


def test_one_step_in_five_is_wrong_and_is_continued_from(rows):
    responses = [response for _, response in split_rows(rows)]
    assert wrong_share(responses) == pytest.approx(0.20, abs=0.015)
    for prompt, response in split_rows(rows):
        steps = steps_of(response)
        assert len(steps) == (len(prompt.split()) - 2) // 2
        assert [f"{op} {right}" for _, op, right, _, _ in steps] == [
            f"{op} {right}" for op, right in zip(prompt.split()[2::2], prompt.split()[3::2], strict=True)
        ]
        assert all(step[4] == following[0] for step, following in pairwise(steps))


def test_noise_can_be_switched_off():
    for prompt, response in split_rows(demonstrations(300, step_error=0.0, no_answer_rate=0.0)):
        assert is_correct_response(Problem(prompt, value_of(prompt), "arithmetic", 0), response, finished=True)
