from collections import Counter
from dataclasses import replace

import pytest
import torch

from loragate.errors import ConfigError, DataError
from loragate.world.problems import split_of
from worlds import situations
from worlds.situations import (
    SITUATIONS,
    WORLDS,
    base_for,
    base_name,
    demonstration_rows,
    questions,
)

BY_NAME = pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)


def test_the_list_spans_what_it_promises():
    assert len(SITUATIONS) >= 12
    assert len({s.name for s in SITUATIONS}) == len(SITUATIONS)
    assert len({replace(s, name="", split="tune") for s in SITUATIONS}) == len(SITUATIONS)
    assert Counter(s.split for s in SITUATIONS) == {"tune": 10, "test": 4, "test2": 4}
    assert sum(s.world == "commands" for s in SITUATIONS) >= 3
    for split in ("test", "test2"):
        assert {s.world for s in SITUATIONS if s.split == split} == set(WORLDS)
    for split in ("tune", "test", "test2"):
        assert {s.lacks_format for s in SITUATIONS if s.split == split} == {True, False}
    assert len({base_name(s) for s in SITUATIONS}) <= 12


def test_the_splits_that_judge_share_no_base_with_any_other():
    bases = {split: {base_name(s) for s in SITUATIONS if s.split == split} for split in ("tune", "test", "test2")}
    assert not bases["test"] & bases["tune"]
    assert not bases["test2"] & (bases["tune"] | bases["test"])


@BY_NAME
def test_rows_are_of_the_train_split_and_as_many_as_asked(situation):
    rows = demonstration_rows(situation)
    assert rows[:64] == demonstration_rows(replace(situation, rows=64))
    assert len(rows) == situation.rows == situation.steps * 32
    assert {split_of(row["messages"][0]["content"]) for row in rows} == {"train"}


@BY_NAME
def test_questions_are_user_turns_with_a_verdict(situation):
    asked = questions(situation, "dev", 64)
    assert len(asked.prompts) == len({turns[0]["content"] for turns in asked.prompts}) == 64
    assert {(len(turns), turns[0]["role"]) for turns in asked.prompts} == {(1, "user")}
    assert {split_of(turns[0]["content"]) for turns in asked.prompts} == {"dev"}
    right = f"answer {asked.items[3].answer}"
    assert asked.verify(3, right, True)
    assert not asked.verify(3, right, False)
    assert not asked.verify(3, right + " note", True)
    assert questions(situation, "dev", 64, seed=1).items != asked.items


@pytest.fixture
def short(monkeypatch):
    """Both worlds with a base of a few steps."""
    for name, world in WORLDS.items():
        recipe = replace(world.recipe, steps=3, documents=128, batch_size=32)
        monkeypatch.setitem(situations.WORLDS, name, replace(world, recipe=recipe))


@pytest.mark.parametrize("world", list(WORLDS))
def test_trained_bases_are_kept_whole_and_taken_from_the_cache(world, short, tmp_path):
    situation = replace(SITUATIONS[0], world=world, base_seed=3)
    steps = []
    trained, _ = base_for(situation, tmp_path, lambda *progress: steps.append(progress))
    assert len(steps) == 3
    again, tokenizer = base_for(replace(situation, sft_seed=5), tmp_path, lambda *progress: steps.append(progress))
    assert len(steps) == 3
    assert len(tokenizer) == 144
    assert not again.training
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in trained.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == [f"{world}-3"]
    assert (tmp_path / f"{world}-3" / "model.safetensors").is_file()
    other, _ = base_for(situation)
    assert torch.equal(other.lm_head.weight, trained.lm_head.weight)


def test_a_cache_of_another_recipe_is_refused(short, tmp_path, monkeypatch):
    situation = replace(SITUATIONS[0], base_seed=3)
    base_for(situation, tmp_path)
    world = situations.WORLDS["arithmetic"]
    monkeypatch.setitem(situations.WORLDS, "arithmetic", replace(world, recipe=replace(world.recipe, steps=4)))
    with pytest.raises(DataError, match=r"another recipe: steps was 3 and is 4 now; remove the folder"):
        base_for(situation, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world": "command", "base_seed": 1}, "found the world 'command'.*did you mean 'commands'"),
        ({"split": "dev"}, "found the split 'dev' of a situation"),
        ({"world": "commands", "base_seed": None}, "has no base_seed"),
        ({"lacks_format": True, "base_seed": None}, "has no base_seed"),
    ],
)
def test_impossible_situations_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        replace(SITUATIONS[0], **change)
