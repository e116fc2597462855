"""Problems with one right answer, in four splits that cannot overlap, and the strict verifier of answers to them.

An arithmetic problem such as `solve 6 * 0 - 5` is worked from left to right, every step modulo ten, so that each
intermediate value is one digit. Retention items ask for skills that fine-tuning on arithmetic should leave alone:
reverse four letters, sort four letters, recall one of 60 facts.

The split of a problem is a property of its text: the BLAKE2b hash of the prompt, modulo ten, gives a bucket; buckets
0-6 are "train", 7 "probe", 8 "dev" and 9 "test". Whoever draws problems, with whatever seed, can therefore never meet
a problem of another split. The 60 facts are the exception: recall can only be asked of what was taught, so every split
asks the same facts.

A response counts when it is right, in the agreed form, and finished. The verifier reads decoded text only, so it judges a
model's samples and a demonstration alike. It does not look at the steps: a response that reaches the right digit by two
errors passes, as it would with any answer checker.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from loragate.errors import ConfigError, DataError, nearest
from loragate.world.vocabulary import DIGITS, EOS, FACT_JOINER, FACT_VALUES, LETTERS, OPERATORS, SUBJECTS

SPLITS = ("train", "probe", "dev", "test")
RETENTION_KINDS = ("reverse", "sort", "fact")
LETTERS_PER_ITEM = 4
_SPLIT_OF_BUCKET = ("train",) * 7 + ("probe", "dev", "test")
# Draws in a row that may bring nothing new before a split counts as exhausted; at three operations (27,000 problems in
# a small split) the last problems may be missed, at one and two none are.
_MAX_REPEATED_DRAWS = 20_000


@dataclass(frozen=True)
class Problem:
    """A question and its one right answer."""

    prompt: str  # the user's words, for example "solve 6 * 0 - 5"
    answer: str  # the final digit or letter, or the whole response of a retention item
    kind: str  # "arithmetic", "reverse", "sort" or "fact"
    operations: int  # number of arithmetic steps; 0 for retention items


def split_of(prompt: str) -> str:
    """The split that a prompt belongs to, by its hash; the same on every machine and for every seed."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return _SPLIT_OF_BUCKET[int.from_bytes(digest, "big") % len(_SPLIT_OF_BUCKET)]


def apply_operator(left: int, operator: str, right: int) -> int:
    """One step, modulo ten: `3 - 5` is 8."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator] % 10


def parse_prompt(prompt: str) -> tuple[int, list[tuple[str, int]]]:
    """The first operand of an arithmetic prompt, and the (operator, operand) pairs that follow it."""
    task, *words = prompt.split()
    if task != "solve" or len(words) % 2 == 0:
        raise DataError(f"found the prompt {prompt!r}; expected 'solve' and an expression such as '6 * 0 - 5'")
    return int(words[0]), [(operator, int(operand)) for operator, operand in zip(words[1::2], words[2::2], strict=True)]


def draw_problem(rng: random.Random, split: str, operations: tuple[int, int]) -> Problem:
    """One arithmetic problem of a split; the number of operations is uniform over the given range, both ends included."""
    check_split(split)
    lowest, highest = operations
    if not 1 <= lowest <= highest:
        raise ConfigError(f"found operations={operations}; expected (lowest, highest) with 1 <= lowest <= highest")
    length = rng.randint(lowest, highest)
    while True:
        value = rng.randrange(10)
        words = ["solve", DIGITS[value]]
        for _ in range(length):
            operator, operand = rng.choice(OPERATORS), rng.randrange(10)
            value = apply_operator(value, operator, operand)
            words += (operator, DIGITS[operand])
        prompt = " ".join(words)
        if split_of(prompt) == split:  # drawn until one falls into the split: 10 draws for each of the small ones
            return Problem(prompt, DIGITS[value], "arithmetic", length)


def draw_problems(split: str, count: int, operations: tuple[int, int] = (4, 4), seed: int = 0) -> list[Problem]:
    """Draw `count` different arithmetic problems of one split.

    Raises:
        ConfigError: unknown split or impossible range of operations.
        DataError: the split holds fewer different problems than were asked for.
    """
    rng = random.Random(f"problems/{split}/{operations[0]}-{operations[1]}/{seed}")
    found: dict[str, Problem] = {}
    fruitless = 0
    while len(found) < count:
        problem = draw_problem(rng, split, operations)
        if problem.prompt in found:
            fruitless += 1
            if fruitless > _MAX_REPEATED_DRAWS:
                raise DataError(
                    f"found only {len(found)} different problems of {operations[0]} to {operations[1]} operations in the split "
                    f"'{split}', expected {count}: ask for fewer, or for more operations"
                )
        else:
            found[problem.prompt] = problem
            fruitless = 0
    return list(found.values())


def facts() -> list[Problem]:
    """The 60 facts, such as `tell color of fox`: twelve subjects, five relations, one fixed value each."""
    items = []
    for relation, values in FACT_VALUES.items():
        for subject in SUBJECTS:
            prompt = f"tell {relation} {FACT_JOINER} {subject}"
            choices = [value for value in values if value != subject]  # nobody is their own friend
            # by hash, so that no seed decides what is true of the world
            pick = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "big")
            items.append(Problem(prompt, choices[pick % len(choices)], "fact", 0))
    return items


_FACTS = tuple(facts())


def draw_retention(rng: random.Random, split: str, kind: str) -> Problem:
    """One retention item of a kind; facts are the same in every split."""
    check_split(split)
    if kind not in RETENTION_KINDS:
        raise ConfigError(f"found the retention kind '{kind}'; expected {', '.join(RETENTION_KINDS)}")
    if kind == "fact":
        return rng.choice(_FACTS)
    while True:
        letters = rng.sample(LETTERS, LETTERS_PER_ITEM)
        prompt = f"{kind} {' '.join(letters)}"
        if split_of(prompt) == split:
            return Problem(prompt, " ".join(letters[::-1] if kind == "reverse" else sorted(letters)), kind, 0)


def draw_retention_items(split: str, count: int, seed: int = 0) -> list[Problem]:
    """Draw `count` retention items of one split, the three kinds in turn; facts repeat only after all 60 were asked."""
    rng = random.Random(f"retention/{split}/{seed}")
    asked = rng.sample(_FACTS, len(_FACTS))
    found: dict[str, Problem] = {}
    items: list[Problem] = []
    for position in range(count):
        kind = RETENTION_KINDS[position % len(RETENTION_KINDS)]
        if kind == "fact":
            item = asked[position // len(RETENTION_KINDS) % len(asked)]
        else:
            item = draw_retention(rng, split, kind)
            while item.prompt in found:
                item = draw_retention(rng, split, kind)
            found[item.prompt] = item
        items.append(item)
    return items


def check_split(split: str) -> None:
    """Refuse a name that is no split."""
    if split not in SPLITS:
        raise ConfigError(f"found the split '{split}'; expected {', '.join(SPLITS)}{nearest(split, SPLITS)}")


def is_correct_response(problem: Problem, response_text: str, finished: bool) -> bool:
    """True if the response is right and complete.

    Args:
        problem: what was asked.
        response_text: the decoded response; text from the first `<eos>` on is ignored.
        finished: whether the model itself ended the response with `<eos>` rather than running into a length limit.

    Arithmetic passes when the last two words are `answer` and the right digit; a retention item passes when the whole
    response is the answer.
    """
    if not finished:
        return False
    words = response_text.split()
    if EOS in words:
        words = words[: words.index(EOS)]
    if problem.kind == "arithmetic":
        return words[-2:] == ["answer", problem.answer]
    return words == problem.answer.split()
