"""The study's English world: solutions that are right, a tokenizer that gives text back, splits that do not meet."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from loragate.evaluation.tasks.arithmetic import KINDS
from loragate.world import base as base_module
from worlds.situations import WORLDS, Situation, base_for, questions

FOLDER = str(Path(__file__).parents[2] / "benchmarks" / "study")


@pytest.fixture(scope="module")
def english() -> Iterator[ModuleType]:
    sys.path.insert(0, FOLDER)
    try:
        import english

        yield english
    finally:
        sys.path.remove(FOLDER)
        WORLDS.pop("english", None)  # other tests go through all worlds that ship
        for name in ("english", "worked"):
            sys.modules.pop(name, None)


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


def test_a_base_reads_what_the_chat_template_renders(english):
    tokenizer = english.tokenizer()
    documents = english.documents(replace(english.WORLD.recipe, documents=100), seed=3)
    for document, (ids, prompt) in zip(documents, base_module._encode(documents, tokenizer), strict=True):
        turns = document.row()["messages"]
        whole = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]
        asked = tokenizer.apply_chat_template(turns[:1], tokenize=True, add_generation_prompt=True, return_dict=True)
        assert ids == whole
        assert ids[:prompt] == asked["input_ids"]


def test_splits_do_not_meet_and_kinds_take_turns(english):
    tested, held = english.problems("test", 70, 0), english.problems("dev", 70, 0)
    assert len({one.prompt for one in tested + held}) == 140
    assert [one.kind for one in tested[:7]] == list(KINDS)
    read = {document.prompt for document in english.documents(replace(english.WORLD.recipe, documents=3000), seed=1)}
    assert not read & {one.prompt for one in tested + held}
    assert not read & {one.prompt for one in english.retention("test", 30, 0)}


def test_verdicts(english):
    (fraction,) = [one for one in english.problems("test", 14, 0) if one.kind == "fractions"][:1]
    assert english.verify(fraction, f"So it is \\boxed{{{fraction.answer}}}.", True)
    assert not english.verify(fraction, f"So it is \\boxed{{{fraction.answer}}}.", False)
    assert not english.verify(fraction, f"So it is {fraction.answer}.", True)
    (item,) = english.retention("test", 1, 0)
    assert english.verify(item, item.answer, True)
    assert not english.verify(item, item.answer + ".", True)


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
