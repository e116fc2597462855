"""A small situation: which base, which demonstrations, how hard an adapter is trained on them.

A situation is named by a handful of numbers and can be rebuilt from them. The file holds only the parts: base, rows, questions.
Training adapters and gates is the business of who asks.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from loragate.errors import ConfigError, DataError, nearest
from loragate.files import write_json
from loragate.world.base import load_base, save_base
from loragate.world.demonstrations import demonstrations
from loragate.world.problems import Problem, problems, verify
from loragate.world.tokenizer import build_tokenizer
from worlds.command_demonstrations import command_demonstrations, command_documents
from worlds.commands import command_problems
from worlds.tiny_base import Document, Progress, TinyBaseRecipe, arithmetic_documents, train_base

Rows = list[dict[str, list[dict[str, str]]]]
BATCH_SIZE = 32


@dataclass(frozen=True)
class Situation:
    """One base with the adapter that is to be trained on it.

    Attributes:
        name: unique, and fit for a folder.
        world: "arithmetic" or "commands".
        base_seed: seed of the base.
        sft_seed: seed of the demonstrations and of the adapter.
        learning_rate: of the adapter.
        noise: share of wrong steps in the demonstrations (whose sloppy endings stay), or of steps that take a reading which
            is not agreed.
        rows: number of demonstrations, read once in batches of 32.
    """

    name: str
    world: str
    base_seed: int
    sft_seed: int
    learning_rate: float
    noise: float
    rows: int

    def __post_init__(self) -> None:
        if self.world not in WORLDS:
            raise ConfigError(
                f"found the world '{self.world}'; expected {', '.join(WORLDS)}{nearest(self.world, WORLDS)}"
            )

    @property
    def steps(self) -> int:
        """Optimiser steps of the adapter."""
        return -(-self.rows // BATCH_SIZE)


@dataclass(frozen=True)
class World:
    """What a kind of problem needs to become a situation."""

    recipe: TinyBaseRecipe
    documents: Callable[[TinyBaseRecipe, int], list[Document]]
    demonstrations: Callable[[int, int, float], Rows]
    problems: Callable[[str, int, int], list[Problem]]
    verify: Callable[[Problem, str, bool], bool] = verify
    tokenizer: Callable[[], PreTrainedTokenizerFast] = build_tokenizer


def _documents_of_commands(recipe: TinyBaseRecipe, seed: int) -> list[Document]:
    """The recipe's numbers, read for commands; the readings' shares take the place of its `step_error`."""
    return command_documents(
        recipe.documents,
        seed,
        programmes=recipe.arithmetic,
        answered=recipe.answered,
        aside=recipe.aside,
        commands=recipe.operations,
    )


WORLDS = {
    "arithmetic": World(
        recipe=TinyBaseRecipe(),
        documents=arithmetic_documents,
        demonstrations=lambda count, seed, noise: demonstrations(count, seed, step_error=noise),
        problems=lambda split, count, seed: problems(split, count, (4, 4), seed),
    ),
    "commands": World(
        recipe=replace(TinyBaseRecipe(), steps=1000, step_error=0.0),
        documents=_documents_of_commands,
        demonstrations=lambda count, seed, noise: command_demonstrations(count, seed, noise=noise),
        problems=lambda split, count, seed: command_problems(split, count, (4, 4), seed),
    ),
}


def base_name(situation: Situation) -> str:
    """The same for situations that share a base."""
    return f"{situation.world}-{situation.base_seed}"


def base_for(
    situation: Situation, cache_folder: str | Path | None = None, on_progress: Progress | None = None
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """The situation's base in eval mode: one kept in the cache, or one trained now (100 s, one thread).

    Args:
        situation: whose base.
        cache_folder: where trained bases are kept, one folder each; None keeps nothing.
        on_progress: as in `train_base`.

    Raises:
        DataError: the cached folder is incomplete, or was made by another recipe.
    """
    kept = None if cache_folder is None else Path(cache_folder) / base_name(situation)
    if kept is not None and kept.is_dir():
        _require_same_recipe(kept, WORLDS[situation.world].recipe)
        return load_base(kept)
    world = WORLDS[situation.world]
    model, tokenizer = train_base(
        WORLDS[situation.world].recipe,
        situation.base_seed,
        on_progress,
        write_documents=world.documents,
        tokenizer=world.tokenizer(),
    )
    if kept is not None:
        _keep(model, tokenizer, kept, {"seed": situation.base_seed, "recipe": WORLDS[situation.world].recipe.as_dict()})
    return model, tokenizer


def demonstration_rows(situation: Situation) -> Rows:
    """The rows to train the adapter on, and the gates."""
    return WORLDS[situation.world].demonstrations(situation.rows, situation.sft_seed, situation.noise)


@dataclass(frozen=True)
class Questions:
    """Questions as conversations of one user turn, with their verdict."""

    items: tuple[Problem, ...]
    judge: Callable[[Problem, str, bool], bool] = verify

    @property
    def prompts(self) -> list[list[dict[str, str]]]:
        """One conversation per question, for the chat template."""
        return [[{"role": "user", "content": item.prompt}] for item in self.items]

    def verify(self, index: int, response_text: str, finished: bool) -> bool:
        """Whether a response to question `index` is right and complete."""
        return self.judge(self.items[index], response_text, finished)


def questions(situation: Situation, split: str, count: int, seed: int = 0) -> Questions:
    """Different questions of a split ("probe", "dev" or "test"; "train" holds the demonstrations' problems)."""
    world = WORLDS[situation.world]
    return Questions(tuple(world.problems(split, count, seed)), world.verify)


def _keep(model: Any, tokenizer: Any, folder: Path, record: dict[str, Any]) -> None:
    """Write beside the place and rename, so that a folder in the cache is always whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        save_base(model, tokenizer, partial)
        write_json(partial / "base.json", record)
        if not folder.is_dir():
            os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _require_same_recipe(folder: Path, recipe: TinyBaseRecipe) -> None:
    try:
        found = json.loads((folder / "base.json").read_text(encoding="utf-8"))["recipe"]
        differing = {key: (found.get(key), value) for key, value in recipe.as_dict().items() if found.get(key) != value}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"found no readable base.json in '{folder}', which tells how its base was trained; remove the folder to train "
            "the base again"
        ) from error
    if differing:
        told = ", ".join(f"{key} was {was} and is {now} now" for key, (was, now) in differing.items())
        raise DataError(
            f"the base in '{folder}' was trained by another recipe: {told}; remove the folder to train it again"
        )
