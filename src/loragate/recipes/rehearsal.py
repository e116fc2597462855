"""A recipe run on the spot: its counts cut, its materials replaced by stand-ins, every other setting as shipped.

A rehearsal is a recipe of its own; where the two differ (`Recipe.differences`) it does not show what the full run would do.

The stand-ins are a small base with the tokenizer of a real one, and rows and questions in the hub's columns.
The tokenizer is Qwen2's own class over 54,000 merges that are written down, not trained: it ends a turn with `<|im_end|>`
while its end of sequence is `<|endoftext|>`, writes a system message where none is given, and has fewer tokens than the
model has rows. The base has random weights in the shape of Qwen2, in bf16, and 4096 positions. Its answers end: see `END`.
For a recipe that brings a chat template there is a second base: without one, and with answers that end in `<|endoftext|>`.
Training rows are made up here; the questions, also made up, lie in `questions/`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import shutil
import string
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from loragate.errors import LoragateError
from loragate.evaluation.results import read_record as read_scores
from loragate.evaluation.tasks.arithmetic import rows as arithmetic
from loragate.files import require_new, write_text
from loragate.recipes.files import HERE
from loragate.recipes.ready import tasks_of
from loragate.recipes.recipe import Recipe, Stage, options_of
from loragate.recipes.run import Run, interpreter, run_recipe, start

STANDINS = "stand-ins"
ROWS = 320  # two steps of 128, and 32 questions of the rows set aside where a range is chosen
TRAINING = {"max_rows": ROWS, "max_steps": 2, "save_steps": 1}
COUNTS: dict[str, dict[str, Any]] = {
    "sft": TRAINING,
    "calibrate": TRAINING,
    "sweep": TRAINING,
    "mask": {"max_rows": ROWS},
}
RANGES = "-6,1;-6,6;0,1;0,6"  # the corners of the grid
ASKED, SAMPLES = 2, 2
# share of sampled answers that must end; nine in ten do where an engine stops at the end of a turn, else none
ENDED = 0.5

# the stand-ins
QUESTIONS = HERE / "questions"
MADE, HELD_OUT, PROBES = 400, 16, 40
LONGEST = 240  # sums of the longest solutions: more than 4096 tokens, so that the limits cut
VOCABULARY = 55_296
POSITIONS = 4096
HIDDEN = 64
SPREAD = 2.2  # of the logits at temperature 1: about as undecided as a base of 50,000 tokens can be and still loop when greedy
END = 8.7
"""Logit of the token that ends an answer over the mean of all: after some tens of tokens, or hundreds in long contexts.

An end of turn at which an engine does not stop is so missed at once: its answers run to the limit.
"""
ENDOFTEXT, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{%- if messages[0]['role'] != 'system' -%}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def rehearsal_of(recipe: Recipe, folder: Path, run: Run | None = None) -> Recipe:
    """The recipe on the stand-ins in `folder`.

    Args:
        folder: what `write_standins` fills.
        run: of the rehearsal, whose interpreter may have vLLM; without vLLM transformers answers. None leaves the engine.
    """
    vllm = run is None or interpreter(run) or importlib.util.find_spec("vllm") is not None
    engine = "" if vllm else "transformers"
    stages = []
    for stage in recipe.stages:
        values = {
            key: value for key, value in _rehearsed(stage, folder, engine, recipe.name).items() if value is not None
        }
        stages.append(dataclasses.replace(stage, values=values))
    return dataclasses.replace(recipe, stages=tuple(stages))


def rehearse(small: Recipe, run: Run) -> dict[str, float]:
    """Run a rehearsal on stand-ins beside the run's folder, and the report on it there; gives {stage: seconds}.

    A stage that fails, or answers that do not end, are a LoragateError.
    """
    folder = run.folder.parent
    if not (folder / STANDINS).is_dir():
        require_new(folder)
    write_standins(folder / STANDINS)
    seconds = run_recipe(small, run)
    report = [sys.executable, "-m", "loragate", "report", str(run.folder), "--out", str(folder / "report.html")]
    start([*report, "--overwrite"], f"the report on {small.name}", f"loragate report {run.folder}")
    require_endings(run.folder)
    return seconds


def require_endings(run: Path) -> None:
    """Refuse sampled answers that run to their limits: the stand-in's end of turn was not stopped at (LoragateError)."""
    found: dict[str, float] = {}
    for path in sorted(run.glob("*/results.json")):
        record = read_scores(path)
        sampled = {task.name for task in record.tasks if task.sampling.temperature > 0}
        for result in record.results:
            if result.task in sampled and result.control is None:
                name = f"{path.parent.name}/{result.task}"
                found[name] = min(found.get(name, 1.0), 1.0 - result.truncated)
    if found and sum(found.values()) / len(found) < ENDED:
        worst = min(found, key=lambda name: found[name])
        raise LoragateError(
            f"{worst}: only {100 * found[worst]:.0f} % of the answers ended before their limit. The stand-in ends nearly all of "
            "them in time, so this engine does not stop at the end of a turn"
        )


def _rehearsed(stage: Stage, folder: Path, engine: str, recipe: str) -> dict[str, Any]:
    """The values of a stage of the recipe called so; None where one is left out."""
    values = dict(stage.values)
    for option, most in COUNTS.get(stage.command, {}).items():
        values[option] = min(values.get(option) or most, most)
    if stage.own_base:
        values["model"] = str(folder / base_folder(template=not values.get("chat_template")))
    if stage.command in COUNTS:
        values |= {"strategy": None, "processes": None}  # one process on this machine
    if stage.own_rows:
        # commits and splits belong to the hub
        data = str(values["data"])
        values |= {"data": str(folder / rows_file(data)), "revision": None, "split": None}
        if values.get("heldout") or values.get("heldout_split"):
            values |= {"heldout": str(folder / rows_file(data, "held-out")), "heldout_split": None}
    if stage.command == "sweep" and values.get("ranges") == "grid":
        values["ranges"] = RANGES
    if values.get("probe"):
        # the whole text: the stand-in answers at random, and a probe of which nothing can be read is refused
        values |= {"probe": str(folder / "probe.jsonl"), "probe_task": None, "probe_grader": "exact"}
    if values.get("suite") or values.get("tasks"):
        values |= {"limit": min(values.get("limit") or ASKED, ASKED), "data": str(folder / "questions")}
        values["revision"] = None
        # tasks of the harness are answered greedily, so that samples would be refused
        asked = options_of(stage, recipe)
        if any(task.harness is None for task in tasks_of(asked.suite, asked.tasks)):
            values["samples"] = min(values.get("samples") or SAMPLES, SAMPLES)
        if engine and "engine" in values:
            values["engine"] = engine
    return values


def write_standins(folder: Path) -> None:
    """The bases, two parquet files of rows per data set, probe.jsonl with labelled questions, and questions/ of every suite."""
    folder.mkdir(parents=True, exist_ok=True)
    write_base(folder / base_folder(template=True), build_tokenizer(), END_OF_TURN)
    plain = build_tokenizer()
    plain.chat_template = None
    write_base(folder / base_folder(template=False), plain, ENDOFTEXT)
    for name, make in ROWS_OF.items():
        rows = make(MADE + HELD_OUT)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:MADE]), folder / rows_file(name))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[MADE:]), folder / rows_file(name, "held-out"))
    asked = [{"prompt": row["question"], "answer": row["answer"]} for row in arithmetic(PROBES, 7)]
    write_text(folder / "probe.jsonl", "".join(json.dumps(row) + "\n" for row in asked))
    shutil.copytree(QUESTIONS, folder / "questions", dirs_exist_ok=True)


def build_tokenizer() -> Any:
    """Qwen2's tokenizer class over generated merges; 54,909 tokens, built without a network in a second."""
    # pairs and triples of letters: after a space, small, and beginning with a capital
    letters, space = string.ascii_lowercase, "Ġ"
    pairs = [(head, tail) for head in [*letters, *string.ascii_uppercase] for tail in letters]
    triples = [(head + middle, tail) for head, middle in pairs for tail in letters]
    words = [(space, left + right) for left, right in pairs[: 26**2]]
    merges = pairs + triples + words + [(space, left + right) for left, right in triples[: 26**3]]
    # the 256 characters that stand for bytes, as every byte-level tokenizer has them; sorted, as GPT-2 orders them
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    codes = [*shown, *(256 + index for index in range(256 - len(shown)))]
    tokens = [*map(chr, codes), *(left + right for left, right in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return Qwen2Tokenizer(
        vocab={**vocabulary, ENDOFTEXT: len(tokens), TURN: len(tokens) + 1, END_OF_TURN: len(tokens) + 2},
        merges=merges,
        extra_special_tokens=[TURN, END_OF_TURN],
        chat_template=CHATML,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def base_folder(template: bool) -> str:
    """Name of the base with a chat template, or of the one without."""
    return "base" if template else "base-without-template"


def write_base(folder: Path, tokenizer: Any, ends: str) -> None:
    """A random Qwen2 with tied embeddings, two layers, bf16, and such a tokenizer; its answers end in the token `ends`.

    Hidden dimension 0 carries a constant that layers hardly write to. Through it each token has a logit of its own beside what
    the weights make of the context: higher for the end of turn, far lower for ids that are no token.
    """
    end = tokenizer.eos_token_id
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        dtype=torch.bfloat16,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        embedding = model.get_input_embeddings().weight
        embedding.normal_(std=0.1)
        embedding[:, 0] = 1.0
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[0] = 0.0  # attention and MLP do not see the constant
            # what layers add outweighs the embedding, or a token with tied embeddings would predict itself
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.normal_()
                linear.weight[0] *= 1e-3  # next to nothing; a row of zeros has no direction, which DoRA divides by
        # a normed state has entries of size 1 and an embedding of 0.1: their product over H entries has a spread of 0.1·√H
        final = model.model.norm.weight.fill_(10 * SPREAD / HIDDEN**0.5)
        final[0] = 1.0
        embedding[tokenizer.convert_tokens_to_ids(ends), 0] += END
        embedding[len(tokenizer) :, 0] = -400.0  # rows past the vocabulary, as Qwen has them: never drawn
    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end, max_new_tokens=2048)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def numina_rows(count: int) -> list[dict[str, Any]]:
    """Rows in the columns of AI-MO/NuminaMath-CoT: source, problem, solution, messages."""
    rows = []
    for index, item in enumerate(arithmetic(count, 1)):
        problem, solution = item["question"], f"{_steps(index)}\nThe answer is $\\boxed{{{item['answer']}}}$."
        turns = [{"content": problem, "role": "user"}, {"content": solution, "role": "assistant"}]
        rows.append({"source": "synthetic_math", "problem": problem, "solution": solution, "messages": turns})
    return rows


def magicoder_rows(count: int) -> list[dict[str, Any]]:
    """Rows in the columns of ise-uiuc/Magicoder-OSS-Instruct-75K: lang, raw_index, index, seed, …, problem, solution."""
    rows = []
    for index in range(count):
        name, factor = f"scaled_{index}", index % 17 + 2
        problem = f"Write a Python function `{name}` that multiplies every number of a list by {factor}."
        code = f"def {name}(numbers):\n    return [{factor} * number for number in numbers]"
        solution = f"```python\n{code}\n```\n{_steps(index)}"
        fixed = {"lang": "python", "raw_index": index, "index": index, "seed": code, "openai_fingerprint": None}
        rows.append({**fixed, "problem": problem, "solution": solution})
    return rows


ROWS_OF = {"AI-MO/NuminaMath-CoT": numina_rows, "ise-uiuc/Magicoder-OSS-Instruct-75K": magicoder_rows}


def rows_file(data: str, part: str = "") -> str:
    """Name of the stand-in for a data set of the hub, or for a part of it; rows of your own are rehearsed on mathematics."""
    name = (data if data in ROWS_OF else next(iter(ROWS_OF))).rpartition("/")[2]
    return "-".join(filter(None, (name, part))) + ".parquet"


def _steps(index: int) -> str:
    """Lines of sums; one row in 320 is longer than any limit of a recipe."""
    draw = random.Random(index)
    count = LONGEST if index % 320 == 9 else draw.randint(1, 3)
    pairs = [(draw.randint(2, 99), draw.randint(2, 99)) for _ in range(count)]
    return "\n".join(f"We take {a} and add {b}, which gives {a + b}." for a, b in pairs)
