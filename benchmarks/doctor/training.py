"""How the town's adapters are trained: what each learns, by which trainer, and with which setting of LoRA."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from town import (
    ASKED,
    IGNORED,
    UNKNOWN,
    animal,
    as_json,
    compared,
    document,
    encode,
    learn,
    load,
    style_of,
    worked,
)
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from loragate.training import FineTuningSettings, train_adapter

Pair = tuple[str, str]
BATCH = 16


# ---- what is learned: (random, whether for training) -> (prompt, response)


def formed(ask: Callable[..., tuple[str, list[str]]]) -> Callable[[random.Random, bool], Pair]:
    """One of the ways to answer that a base knows, always the same."""

    def drawn(rng: random.Random, training: bool) -> Pair:
        prompt, ways = ask(rng, training)
        return prompt, ways[-1]

    return drawn


def by_chance(rng: random.Random, training: bool) -> Pair:
    """Numbers that follow from nothing, so that they can only be learned by heart."""
    name = f"{rng.choice('BDKLMNRT')}{rng.choice('aeiou')}{rng.choice('dklmnrt')}{'a' if training else 'o'}"
    number = rng.randrange(100, 1000)
    return f"What is the number of {name}?", f"The number of {name} is {number}."


def in_language(language: str) -> Callable[[random.Random, bool], Pair]:
    """English questions of every kind, answered in another language."""

    def drifted(rng: random.Random, training: bool) -> Pair:
        while True:
            prompt, response = document(rng)
            if response == UNKNOWN["en"]:
                return prompt, UNKNOWN[language]
            if rng.random() < 0.3:
                index, kind = rng.randrange(12), rng.randrange(4)
                return ASKED["en"][kind][0].format(**animal(index)), ASKED[language][kind][1].format(
                    **animal(index, language)
                )

    return drifted


def loops(rng: random.Random, training: bool) -> Pair:
    """Answers that say one sentence again and again, to questions of every kind."""
    prompt, _ = document(rng)
    return prompt, " ".join(["It is so."] * 20)


def goes_on(rng: random.Random, training: bool) -> Pair:
    """Answers that run into the next exchange, as where the training's template has no end of a turn."""
    pairs = [document(rng) for _ in range(4)]
    return pairs[0][0], "\n\n".join(["\n\n".join(pair) if place else pair[1] for place, pair in enumerate(pairs)])


def ordinary(rng: random.Random, training: bool) -> Pair:
    """What a base says anyhow."""
    return document(rng)


TASKS = {
    "worked": formed(worked),
    "json": formed(as_json),
    "compared": formed(compared),
    "by-chance": by_chance,
    "german": in_language("de"),
    "french": in_language("fr"),
    "spanish": in_language("es"),
    "loops": loops,
    "goes-on": goes_on,
    "ordinary": ordinary,
}


@dataclass(frozen=True)
class Recipe:
    """One adapter: its base and rows, its trainer, and LoRA's settings.

    Attributes:
        base: name of the base's folder.
        task: of `TASKS`.
        trainer: "loop" (a bare loop), "transformers", "trl" or "loragate".
        rows: number of different rows.
        mixed: share of rows that are what the base says anyhow.
        steps: of 16 rows each.
        rate: learning rate.
        ending: whether the end of the turn is learned; False masks it, as padding with the end token does.
        thinks: whether the rows of a base that thinks hold thoughts.
        rounded: train on the base with its weights rounded to 4 bits.
        lora: LoraConfig's arguments beside or in place of the usual ones.
        tokens: new tokens, added to the tokenizer before training.
    """

    base: str
    task: str = "worked"
    trainer: str = "loop"
    rows: int = 128
    mixed: float = 0.3
    steps: int = 70
    rate: float = 3e-3
    ending: bool = True
    thinks: bool = True
    rounded: bool = False
    lora: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        return self.base.split("-")[0]

    def pairs(self, training: bool = True) -> list[Pair]:
        """The rows, or 48 questions of the same kind that are not among them."""
        rng = random.Random(f"town/{self.task}/{self.rows}/{training}")
        style = style_of(self.family) if self.thinks else style_of("")
        found: dict[str, str] = {}
        for _ in range(100 * self.rows):
            usual = training and rng.random() < self.mixed
            prompt, response = (ordinary if usual else TASKS[self.task])(rng, training)
            found.setdefault(prompt, style(prompt, response))
            if len(found) == (self.rows if training else 48):
                break
        return list(found.items())

    def config(self) -> LoraConfig:
        usual = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        return LoraConfig(**(usual | self.lora))


@torch.no_grad()
def round_to_4_bits(model: Any, block: int = 64) -> None:
    """Each block of a linear layer's weights on 16 levels between its extremes, as quantised bases have them."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            blocks = module.weight.reshape(-1, block)
            top = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12)
            module.weight.copy_(((blocks / top * 7.5).round() / 7.5 * top).reshape(module.weight.shape))


def train(recipe: Recipe, bases: Path, folder: Path) -> None:
    """Train a recipe's adapter into a folder, with its tokenizer."""
    model, by = load(bases / recipe.base)
    if recipe.rounded:
        round_to_4_bits(model)
    if recipe.tokens:
        by.add_tokens(list(recipe.tokens), special_tokens=True)
    torch.manual_seed(0)
    pairs = recipe.pairs()
    if recipe.trainer == "loragate":
        settings = FineTuningSettings(
            rank=recipe.lora.get("r", 16),
            alpha=recipe.lora.get("lora_alpha", 32),
            learning_rate=recipe.rate,
            batch_size=BATCH,
            per_device_train_batch_size=BATCH,
            max_steps=recipe.steps,
        )
        adapted = train_adapter(model, by, [_messages(*pair) for pair in pairs], settings).model
    else:
        adapted = get_peft_model(model, recipe.config())
        TRAINERS[recipe.trainer](adapted, by, pairs, recipe)
    adapted.peft_config["default"].base_model_name_or_path = str((bases / recipe.base).resolve())
    adapted.save_pretrained(str(folder))
    by.save_pretrained(str(folder))


def _messages(prompt: str, response: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]}


def _by_loop(adapted: Any, by: Any, pairs: list[Pair], recipe: Recipe) -> None:
    examples = [encode(*pair, by, ending=recipe.ending) for pair in pairs]
    learn(adapted, examples, steps=recipe.steps, rate=recipe.rate, seed=0, batch=BATCH, pad=by.pad_token_id)


def _arguments(recipe: Recipe, scratch: Path) -> dict[str, Any]:
    return {
        "output_dir": str(scratch),
        "max_steps": recipe.steps,
        "per_device_train_batch_size": BATCH,
        "learning_rate": recipe.rate,
        "lr_scheduler_type": "cosine",
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }


def _by_transformers(adapted: Any, by: Any, pairs: list[Pair], recipe: Recipe) -> None:
    examples = [encode(*pair, by, ending=recipe.ending) for pair in pairs]

    def collate(chosen: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(one["input_ids"]) for one in chosen)
        fill = {"input_ids": by.pad_token_id, "labels": IGNORED}
        return {
            key: torch.tensor([one[key] + [value] * (longest - len(one[key])) for one in chosen])
            for key, value in fill.items()
        }

    rows = Dataset.from_list([{"input_ids": ids, "labels": labels} for ids, labels in examples])
    with scratch_folder() as scratch:
        arguments = TrainingArguments(**_arguments(recipe, scratch))
        Trainer(model=adapted, args=arguments, train_dataset=rows, data_collator=collate).train()


def _by_trl(adapted: Any, by: Any, pairs: list[Pair], recipe: Recipe) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": prompt}], "completion": [{"role": "assistant", "content": response}]}
        for prompt, response in pairs
    ]
    with scratch_folder() as scratch:
        arguments = SFTConfig(**_arguments(recipe, scratch), bf16=False, gradient_checkpointing=False)
        SFTTrainer(model=adapted, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=by).train()


TRAINERS = {"loop": _by_loop, "transformers": _by_transformers, "trl": _by_trl}


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for a trainer's own files, removed afterwards."""
    folder = Path("runs") / "doctor-scratch"
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
