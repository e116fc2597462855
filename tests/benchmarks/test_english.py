"""The study's English world: solutions that are right, a tokenizer that gives text back, splits that do not meet."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from loragate.evaluation.tasks.arithmetic import KINDS
from tiny import scripts_of
from worlds.situations import WORLDS, Situation, base_for, questions

FOLDER = Path(__file__).parents[2] / "benchmarks" / "study"


@pytest.fixture(scope="module")
def english() -> Iterator[ModuleType]:
    with scripts_of(FOLDER) as load:
        yield load("english")
    WORLDS.pop("english", None)  # other tests go through all worlds that ship


@pytest.mark.parametrize("kind", list(KINDS))
def test_solutions_end_in_the_suites_answer_and_survive_slips(english, kind):
    rng = random.Random(kind)
    sure, careless = english.slips(rng, 0.0), english.slips(rng, 0.5)
    wrong = 0
    for _ in range(200):
        question, answer = KINDS[kind](rng, 1)
        steps, found = english.work(kind, question, sure)
        assert steps
        assert found == str(answer)
        wrong += english.work(kind, question, careless)[1] != str(answer)
    assert wrong > 20  # a slip in every second statement shows


def test_tokens_give_the_text_back_and_digits_stand_alone(english):
    tokenizer = english.tokenizer()
    for document in english.documents(replace(english.WORLD.recipe, documents=100), seed=3):
        ids = tokenizer(document.response).input_ids
        assert tokenizer.decode(ids) == document.response
        assert all(sum(c.isdigit() for c in piece) <= 1 for piece in tokenizer.convert_ids_to_tokens(ids))


def test_splits_do_not_meet_and_kinds_take_turns(english):
    tested, held = english.problems("test", 70, 0), english.problems("dev", 70, 0)
    assert len({one.prompt for one in tested + held}) == 140
    assert [one.kind for one in tested[:7]] == list(KINDS)
    read = {document.prompt for document in english.documents(replace(english.WORLD.recipe, documents=3000), seed=1)}
    assert not read & {one.prompt for one in tested + held}
    assert not read & {one.prompt for one in english.retention("test", 30, 0)}


def test_a_base_is_trained_on_it(english, monkeypatch, tmp_path):
    small = replace(english.WORLD.recipe, hidden_size=16, intermediate_size=32, layers=1, steps=3, documents=200)
    monkeypatch.setitem(WORLDS, "english", replace(english.WORLD, recipe=small))
    situation = Situation("english-1-0", "english", 1, 0, 1e-3, 0.2, 64, False, "tune")
    losses: list[float] = []
    model, tokenizer = base_for(situation, tmp_path, lambda step, steps, loss: losses.append(loss))
    assert len(losses) == 3
    assert model.config.vocab_size == len(tokenizer) == len(english.tokenizer())
    again, read = base_for(situation, tmp_path)
    assert read.chat_template == tokenizer.chat_template
    assert again.config.hidden_size == 16
    asked = questions(situation, "dev", 7)
    assert asked.verify(0, f"\\boxed{{{asked.items[0].answer}}}", True)
