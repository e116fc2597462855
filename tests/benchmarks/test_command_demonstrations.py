import hashlib

import pytest

from loragate.world.problems import Problem, split_of, verify
from loragate.world.tokenizer import FILLERS, OPENERS, build_tokenizer
from worlds.command_demonstrations import command_demonstrations, command_documents
from worlds.commands import apply_command, programme

PINNED = ["c748135f26b9", "c98269554def"]


def pairs(rows):
    return [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in rows]


def test_the_world_never_moves():
    """Pinned: the study's bases and adapters were made from these texts; a fifth of the noisy steps is read otherwise."""
    rows = pairs(command_demonstrations(3000, noise=0.2))
    taken = [reading for pair in rows for reading in readings(*pair)]
    assert [taken.count(reading) / len(taken) for reading in range(3)] == pytest.approx([0.8, 0.1, 0.1], abs=0.015)
    documents = [f"<q> {prompt} <a> {response} <eos>" for prompt, response in command_documents(20_000)]
    texts = [response for _, response in rows], documents
    assert [hashlib.sha256("\n".join(part).encode()).hexdigest()[:12] for part in texts] == PINNED
    tokenizer = build_tokenizer()
    encoded = tokenizer(texts[1])["input_ids"]
    assert not any(tokenizer.unk_token_id in ids for ids in encoded)
    assert max(map(len, encoded)) < 32


def readings(prompt, response):
    """The reading that each step of a response takes."""
    letter, commands = programme(prompt)
    words = [word for word in response.split() if word not in (*OPENERS, *FILLERS)]
    taken = []
    for position, command in enumerate(commands):
        assert words[2 * position] == command
        stated = words[2 * position + 1]
        taken.append([apply_command(letter, command, reading) for reading in range(3)].index(stated))
        letter = stated
    return taken


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
