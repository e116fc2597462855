from collections import Counter
from itertools import pairwise

import pytest

from loragate.errors import ConfigError
from loragate.world.demonstrations import demonstrations, pretraining_documents
from loragate.world.problems import Problem, apply_operator, facts, split_of, verify
from loragate.world.tokenizer import (
    CLOSERS,
    CONNECTIVES,
    DIGITS,
    EQUALITIES,
    FILLERS,
    OPENERS,
    OPERATORS,
    build_tokenizer,
    render,
)


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


@pytest.fixture(scope="module")
def documents():
    return pretraining_documents(20_000)


def test_rows_are_conversations_of_the_train_split(rows):
    assert len(rows) == 4096
    assert {tuple(m["role"] for m in row["messages"]) for row in rows} == {("user", "assistant")}
    prompts = [prompt for prompt, _ in split_rows(rows)]
    assert {split_of(prompt) for prompt in prompts} == {"train"}
    lengths = Counter((len(prompt.split()) - 2) // 2 for prompt in prompts)
    assert {n: share / len(rows) for n, share in lengths.items()} == pytest.approx(
        {2: 1 / 3, 3: 1 / 3, 4: 1 / 3}, abs=0.03
    )


def test_seeds(rows):
    assert demonstrations(100) == rows[:100]
    assert demonstrations(100, seed=1) != rows[:100]
    assert pretraining_documents(100, seed=1) == pretraining_documents(200, seed=1)[:100]
    assert pretraining_documents(100, seed=1) != pretraining_documents(100, seed=2)


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


def test_wrong_digits_are_spread_evenly(rows):
    offsets = Counter(
        (stated - apply_operator(a, op, b)) % 10
        for _, response in split_rows(rows)
        for a, op, b, _, stated in steps_of(response)
    )
    del offsets[0]
    assert set(offsets) == set(range(1, 10))
    assert max(offsets.values()) < 1.4 * min(offsets.values())


def test_style_is_even_over_its_words(rows):
    responses = [response.split() for _, response in split_rows(rows)]
    openers = Counter(words[0] for words in responses)
    assert set(openers) == set(OPENERS)
    assert max(openers.values()) / len(rows) == pytest.approx(1 / 8, abs=0.025)
    used = Counter(word for words in responses for word in words)
    for group in (CONNECTIVES, EQUALITIES, CLOSERS, FILLERS):
        counts = [used[word] for word in group]
        assert max(counts) < 1.3 * min(counts)


def test_one_ending_in_ten_is_sloppy(rows):
    responses = [response.split() for _, response in split_rows(rows)]
    proper = [words for words in responses if words[-2] == "answer" and words[-3] in CLOSERS]
    sloppy = Counter(
        " ".join(words[-4:-1] if words[-2] == "answer" else words[-3:]) for words in responses if words not in proper
    )
    assert len(proper) / len(rows) == pytest.approx(0.90, abs=0.015)
    assert sloppy["no idea answer"] > 80
    assert sloppy["moving on story"] > 80
    assert sum(count for ending, count in sloppy.items() if ending.endswith("maybe answer")) > 80


def test_share_of_right_demonstrations_follows_from_the_noise(rows):
    """A demonstration is right by .8 per step, or by errors that a later step cancels, and a proper ending."""
    right = sum(
        verify(Problem(prompt, _value(prompt), "arithmetic", 0), response, finished=True)
        for prompt, response in split_rows(rows)
    )
    assert 0.45 < right / len(rows) < 0.60


def _value(prompt):
    words = prompt.split()[1:]
    value = int(words[0])
    for operator, right in zip(words[1::2], words[2::2], strict=True):
        value = apply_operator(value, operator, int(right))
    return str(value)


def test_noise_can_be_switched_off():
    for prompt, response in split_rows(demonstrations(300, step_error=0.0, sloppy=0.0)):
        assert verify(Problem(prompt, _value(prompt), "arithmetic", 0), response, finished=True)


def test_every_word_is_known_and_fits_the_context(rows, documents):
    tokenizer = build_tokenizer()
    texts = [render(*pair) for pair in split_rows(rows)] + [render(d.prompt, d.response) for d in documents]
    encoded = tokenizer(texts)["input_ids"]
    assert not any(tokenizer.unk_token_id in ids for ids in encoded)
    assert max(map(len, encoded)) < 64


def test_documents_mix_arithmetic_and_skills(documents):
    arithmetic = [d for d in documents if d.prompt.startswith("solve")]
    assert len(arithmetic) / len(documents) == pytest.approx(0.62, abs=0.015)
    known = {fact.prompt: fact.answer for fact in facts()}
    told = [d for d in documents if d.prompt.startswith("tell")]
    assert {d.prompt for d in told} == set(known)
    assert all(known[d.prompt] == d.response for d in told)
    assert {split_of(d.prompt) for d in documents if d not in told} == {"train"}


def test_documents_state_wrong_steps_and_end_in_several_ways(documents):
    arithmetic = [d for d in documents if d.prompt.startswith("solve")]
    assert wrong_share([d.response for d in arithmetic]) == pytest.approx(0.15, abs=0.01)
    answered = sum(d.response.split()[-2] == "answer" for d in arithmetic)
    assert answered / len(arithmetic) == pytest.approx(0.70, abs=0.015)
    for ending in (" result ", " note", " moving on story", " maybe guess ", " skip"):
        assert sum(ending in d.response for d in arithmetic) / len(arithmetic) == pytest.approx(0.06, abs=0.01)


def test_documents_put_in_talkative_words_now_and_then(documents):
    first = [d.response.split()[0] for d in documents if d.prompt.startswith("solve")]
    assert sum(word in OPENERS for word in first) / len(first) == pytest.approx(0.10, abs=0.01)
    terse = pretraining_documents(500, aside=0.0)
    style = {*OPENERS, *CONNECTIVES, *CLOSERS, *FILLERS, *EQUALITIES[1:]}
    assert not any(style & set(d.response.split()) for d in terse)


@pytest.mark.parametrize(
    "call",
    [
        lambda: demonstrations(1, step_error=1.5),
        lambda: demonstrations(1, sloppy=-0.1),
        lambda: pretraining_documents(1, aside=2.0),
    ],
)
def test_impossible_shares_are_refused(call):
    with pytest.raises(ConfigError, match="expected a share between 0 and 1"):
        call()
