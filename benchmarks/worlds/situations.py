"""A benchmark of small situations: which base, which demonstrations, how hard they were trained on.

Whatever claims to choose a range of gates, or one λ, must do so where the right answer differs: noisy demonstrations that
are best held back, a format that the base lacks, adapters that stop short. Each situation is named by a handful of
numbers and can be rebuilt from them; four are marked "test" and were so before any selector was tried on the others. As a
default was changed after seeing these four, another four, "test2", were named before anything was measured on them.

The file holds only the parts: base, rows, questions. Training adapters and gates is the business of who asks.
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
SPLITS = ("tune", "test", "test2")


@dataclass(frozen=True)
class Situation:
    """One base with the adapter that is to be trained on it.

    Attributes:
        name: unique, and fit for a folder.
        world: "arithmetic" or "commands".
        base_seed: seed of a base trained for the purpose; None for the one that ships.
        sft_seed: seed of the demonstrations and of the adapter.
        learning_rate: of the adapter.
        noise: share of wrong steps in the demonstrations (whose sloppy endings stay), or of steps that take a reading which
            is not agreed.
        rows: number of demonstrations, read once in batches of 32.
        lacks_format: the base seldom ends in the way that is graded, and learned without wrong steps.
        split: "tune" to build a selector on, "test" and "test2" to judge it once each.
    """

    name: str
    world: str
    base_seed: int | None
    sft_seed: int
    learning_rate: float
    noise: float
    rows: int
    lacks_format: bool
    split: str

    def __post_init__(self) -> None:
        if self.world not in WORLDS:
            raise ConfigError(
                f"found the world '{self.world}'; expected {', '.join(WORLDS)}{nearest(self.world, WORLDS)}"
            )
        if self.split not in SPLITS:
            raise ConfigError(
                f"found the split '{self.split}' of a situation; expected {', '.join(SPLITS)}{nearest(self.split, SPLITS)}"
            )
        if self.base_seed is None and (self.world != "arithmetic" or self.lacks_format):
            raise ConfigError(
                f"situation '{self.name}' has no base_seed; only the arithmetic base with the graded format ships: "
                "give the seed of a base to train"
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


def recipe_of(situation: Situation) -> TinyBaseRecipe:
    """How the situation's base is trained."""
    recipe = WORLDS[situation.world].recipe
    return replace(recipe, answered=0.15, step_error=0.0) if situation.lacks_format else recipe


def base_name(situation: Situation) -> str:
    """The same for situations that share a base."""
    if situation.base_seed is None:
        return "shipped"
    return f"{situation.world}-{situation.base_seed}" + ("-lacks-format" if situation.lacks_format else "")


def base_for(
    situation: Situation, cache_folder: str | Path | None = None, on_progress: Progress | None = None
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """The situation's base in eval mode: the shipped one, one kept in the cache, or one trained now (100 s, one thread).

    Args:
        situation: whose base.
        cache_folder: where trained bases are kept, one folder each; None keeps nothing.
        on_progress: as in `train_base`.

    Raises:
        DataError: the cached folder is incomplete, or was made by another recipe.
    """
    if situation.base_seed is None:
        return load_base()
    kept = None if cache_folder is None else Path(cache_folder) / base_name(situation)
    if kept is not None and kept.is_dir():
        _require_same_recipe(kept, recipe_of(situation))
        return load_base(kept)
    world = WORLDS[situation.world]
    model, tokenizer = train_base(
        recipe_of(situation),
        situation.base_seed,
        on_progress,
        write_documents=world.documents,
        tokenizer=world.tokenizer(),
    )
    if kept is not None:
        _keep(model, tokenizer, kept, {"seed": situation.base_seed, "recipe": recipe_of(situation).as_dict()})
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


def _arithmetic(
    name: str,
    base_seed: int | None,
    sft_seed: int,
    learning_rate: float,
    noise: float,
    rows: int = 4096,
    *,
    lacks_format: bool = False,
    split: str = "tune",
) -> Situation:
    return Situation(name, "arithmetic", base_seed, sft_seed, learning_rate, noise, rows, lacks_format, split)


def _commands(
    name: str, base_seed: int, sft_seed: int, learning_rate: float, noise: float = 0.0, split: str = "tune"
) -> Situation:
    return Situation(name, "commands", base_seed, sft_seed, learning_rate, noise, 2048, False, split)


# Those marked "test" and "test2" have bases of their own.
SITUATIONS: tuple[Situation, ...] = (
    _arithmetic("shipped", None, 0, 1e-3, 0.20),
    _arithmetic("shipped-noisy", None, 2, 1e-3, 0.35),
    _arithmetic("shipped-hard", None, 1, 5e-3, 0.10, 6144),
    _arithmetic("fresh", 5, 0, 1e-3, 0.20),
    _arithmetic("fresh-clean", 5, 1, 1e-3, 0.0),
    _arithmetic("format", 7, 0, 3e-3, 0.08, 6144, lacks_format=True),
    _commands("commands", 11, 0, 5e-4),
    _commands("commands-weak", 11, 1, 3e-4),
    _commands("commands-noisy", 12, 0, 5e-4, 0.10),
    _commands("commands-hard", 12, 1, 3e-3, 0.20),
    _arithmetic("test-fresh", 6, 0, 1e-3, 0.20, split="test"),
    _arithmetic("test-hard", 6, 1, 5e-3, 0.10, 6144, split="test"),
    _arithmetic("test-format", 8, 0, 3e-3, 0.08, 6144, lacks_format=True, split="test"),
    _commands("test-commands", 14, 0, 5e-4, split="test"),
    _arithmetic("test2-noisy", 21, 3, 2e-3, 0.30, split="test2"),
    _arithmetic("test2-hard", 22, 4, 3e-3, 0.15, 6144, split="test2"),
    _arithmetic("test2-format", 23, 5, 2e-3, 0.05, 6144, lacks_format=True, split="test2"),
    _commands("test2-commands", 24, 6, 1e-3, 0.05, split="test2"),
)


def situation_named(name: str) -> Situation:
    """The situation of the list that bears this name."""
    known = [situation.name for situation in SITUATIONS]
    if name not in known:
        raise ConfigError(f"found the situation '{name}'; expected one of {', '.join(known)}{nearest(name, known)}")
    return SITUATIONS[known.index(name)]
