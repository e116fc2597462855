import pytest

from loragate.world.problems import Problem, split_of, verify
from loragate.world.tokenizer import FILLERS, OPENERS, build_tokenizer, render
from worlds.command_demonstrations import NAMED, READING_SHARES, command_demonstrations, command_documents
from worlds.commands import COMMANDS, apply_command, programme


def pairs(rows):
    return [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in rows]


def named(prompt):
    """The prompt without the animal it names, and the animal."""
    plain, _, animal = prompt.partition(" of ")
    return plain, animal


def readings(prompt, response):
    """The reading that each step of a response takes."""
    letter, commands = programme(named(prompt)[0])
    words = [word for word in response.split() if word not in (*OPENERS, *FILLERS)]
    taken = []
    for position, command in enumerate(commands):
        assert words[2 * position] == command
        stated = words[2 * position + 1]
        taken.append([apply_command(letter, command, reading) for reading in range(3)].index(stated))
        letter = stated
    return taken


@pytest.fixture(scope="module")
def documents():
    return command_documents(20_000)


def test_clean_rows_are_right_terse_and_of_the_train_split():
    rows = command_demonstrations(1000)
    assert {tuple(m["role"] for m in row["messages"]) for row in rows} == {("user", "assistant")}
    for prompt, response in pairs(rows):
        letter, commands = programme(prompt)
        assert split_of(prompt) == "train"
        assert 2 <= len(commands) <= 4
        assert set(readings(prompt, response)) == {0}
        for command in commands:
            letter = apply_command(letter, command)
        assert verify(Problem(prompt, letter, "commands", len(commands)), response, finished=True)
        assert len(response.split()) == 2 * len(commands) + 2


def test_noise_is_the_share_of_steps_that_are_read_otherwise():
    taken = [reading for pair in pairs(command_demonstrations(3000, noise=0.2)) for reading in readings(*pair)]
    shares = [taken.count(reading) / len(taken) for reading in range(3)]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.015)


def test_seeds(documents):
    assert command_demonstrations(50) == command_demonstrations(80)[:50]
    assert command_demonstrations(50) != command_demonstrations(50, seed=1)
    assert command_documents(100) == documents[:100]
    assert command_documents(100) != command_documents(100, seed=1)


def test_documents_that_name_nobody_read_every_command_in_three_ways(documents):
    unnamed = [d for d in documents if d.prompt.startswith("start") and not named(d.prompt)[1]]
    for command in COMMANDS:
        taken = [
            reading
            for d in unnamed
            for name, reading in zip(programme(d.prompt)[1], readings(*d), strict=True)
            if name == command
        ]
        shares = [taken.count(reading) / len(taken) for reading in range(3)]
        assert shares == pytest.approx(READING_SHARES, abs=0.03)


def test_documents_that_name_an_animal_keep_to_its_reading(documents):
    worked = [d for d in documents if d.prompt.startswith("start")]
    assert len(worked) / len(documents) == pytest.approx(0.62, abs=0.015)
    for reading, animal in enumerate(NAMED):
        its_own = [d for d in worked if named(d.prompt)[1] == animal]
        assert len(its_own) / len(worked) == pytest.approx(1 / 6, abs=0.015)
        assert all(set(readings(*d)) == {reading} for d in its_own)


def test_documents_end_in_several_ways_and_keep_the_other_skills(documents):
    worked = [d for d in documents if d.prompt.startswith("start")]
    answered = sum(d.response.split()[-2] == "answer" for d in worked)
    assert answered / len(worked) == pytest.approx(0.70, abs=0.015)
    for ending in (" result ", " note", " moving on story", " maybe guess ", " skip"):
        assert sum(ending in d.response for d in worked) / len(worked) == pytest.approx(0.06, abs=0.01)
    assert {d.prompt.split()[0] for d in documents} == {"start", "reverse", "sort", "tell"}
    assert {split_of(named(d.prompt)[0]) for d in documents if not d.prompt.startswith("tell")} == {"train"}


def test_every_word_is_known_and_fits_the_context(documents):
    tokenizer = build_tokenizer()
    texts = [render(*pair) for pair in [*pairs(command_demonstrations(500, noise=0.5)), *documents]]
    encoded = tokenizer(texts)["input_ids"]
    assert not any(tokenizer.unk_token_id in ids for ids in encoded)
    assert max(map(len, encoded)) < 32
