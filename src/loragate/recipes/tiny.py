"""A recipe made tiny (`recipes run NAME --tiny`): the same stages through the same code in minutes, on the CPU, without a network.

The base has random weights in the backbone's own architecture and a tokenizer of single bytes. Rows and questions are made up and
lie in `materials/`, in the columns of the real data sets. What the scores say means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from loragate.cli.arguments import field_types
from loragate.cli.main import load_command
from loragate.evaluation.prepared import select_tasks
from loragate.files import atomic_folder, require_empty_folder
from loragate.recipes.recipe import HERE, Recipe, Stage, options_of
from loragate.recipes.run import TINY_BASE

MATERIALS = HERE / "materials"
QUESTIONS = MATERIALS / "questions"
TRAINING = {"max_rows": 32, "max_steps": 2, "save_steps": 1, "batch_size": 8, "per_device_train_batch_size": 4}
RANGES = "-6,1;0,6"  # two corners of the grid
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
}
PAD, END, TURN, END_OF_TURN = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# as Qwen has it: a default system message, and a turn ends in another token than a text
CHATML = (
    "{%- if messages[0]['role'] != 'system' -%}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def tiny_recipe(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe on the tiny base, rows and questions, which trains two steps; the base is written to `folder` where it is not."""
    if not (base := folder / TINY_BASE).is_dir():
        require_empty_folder(folder, "lock")
        own_template = any("chat_template" in stage.options for stage in recipe.stages)
        with atomic_folder(base) as new:
            write_base(new, recipe.architecture, None if own_template else CHATML)
    domain = recipe.domain or "math"
    stages = []
    for stage in recipe.stages:
        known = field_types(load_command(stage.command).options)
        options = {**stage.options, **_replaced(stage, base, domain)}
        options = {key: value for key, value in options.items() if value is not None and key in known}
        stages.append(replace(stage, options=options))
    # its memory is that of the tiny base
    return replace(recipe, name=f"{recipe.name} --tiny", stages=tuple(stages), architecture={})


def describe_overruled(recipe: Recipe, tiny: Recipe, changes: Mapping[str, Any]) -> Iterator[str]:
    """A line for each value of --set that the rehearsal has something else for."""
    for key, value in changes.items():
        name, _, option = key.replace("-", "_").rpartition(".")
        for stage, rehearsed in zip(recipe.stages, tiny.stages):
            before, now = stage.options.get(option), rehearsed.options.get(option)
            if before != now and (stage.name.replace("-", "_") == name or (not name and before == value)):
                yield f"--tiny rehearses with its own {stage.name}.{option}, {now}; --set {key}={value} holds without --tiny"


def _replaced(stage: Stage, base: Path, domain: str) -> dict[str, Any]:
    """What a tiny stage has in place of its options; None for what it is without."""
    given = stage.options
    new: dict[str, Any] = {"device": "cpu", "strategy": None, "processes": None}
    if stage.command not in ("eval", "diagnose"):
        new |= TRAINING
    if "{" not in given.get("model", "{"):  # else it is what an earlier stage left
        new["model"] = str(base)
    if stage.command not in ("eval", "diagnose") and "{" not in given.get("data", "{"):
        new |= {"data": str(MATERIALS / f"{domain}.jsonl"), "revision": None, "split": None}
        if given.get("eval_data") or given.get("eval_split"):
            new |= {"eval_data": str(MATERIALS / f"{domain}-heldout.jsonl"), "eval_split": None}
    if given.get("ranges") == "grid":
        new["ranges"] = RANGES
    if stage.command == "calibrate" and not given.get("skip_selection"):
        # the whole text is the answer, as no other grader reads anything in random characters
        new |= {"dev_data": str(MATERIALS / "dev.jsonl"), "dev_task": None, "dev_grader": "exact"}
    if given.get("engine"):
        new["engine"] = "transformers"
    if given.get("suite") or given.get("tasks"):
        new |= {"limit": 2, "max_new_tokens": 16, "data": str(QUESTIONS), "revision": None}
        # the harness's tasks are answered once, greedily
        if any(task.harness is None for task in select_tasks(options_of(stage, stage.name))):
            new["samples"] = 2
    return new


def write_base(folder: Path, architecture: dict[str, Any], chat_template: str | None) -> None:
    """A random model of this architecture (Qwen2 where none is given) in `SHAPE` and bf16, with a tokenizer of single bytes."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[TURN, END_OF_TURN],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    values = {"model_type": "qwen2", **architecture, **SHAPE, "vocab_size": len(tokenizer), "dtype": "bfloat16"}
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(**values, **special)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
