"""What a rehearsal runs on behaves as the real thing, and what it changes is on its list."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from loragate.data import encode_rows, ending_health, load_rows
from loragate.evaluation.tasks import load_questions, suite
from loragate.generation import SamplingConfig, TransformersEngine
from loragate.recipes import Run, read_recipe
from loragate.recipes.rehearsal import QUESTIONS, rehearsal_of, write_standins

SCALE = "math/qwen2.5-math-1.5b/scale"
MAGICODER = ["lang", "raw_index", "index", "seed", "openai_fingerprint", "problem", "solution"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stand-ins")
    write_standins(folder)
    return folder


@pytest.mark.parametrize("domain", ["math", "code"])
def test_held_out_rows_are_there_and_none_of_the_trained(place, domain):
    """A split belongs to the hub; a file, which has none, is refused with one."""
    small = rehearsal_of(read_recipe(f"{domain}/qwen2.5-math-1.5b/scale"), place)
    values = small.stage("calibrate").values
    trained = list(load_rows(values["data"], split=values.get("split")))
    assert ("heldout" in values) == (domain == "math")
    assert not values.get("heldout_split")
    if "heldout" in values:
        apart = list(load_rows(values["heldout"]))
        assert len(apart) == 16
        assert not [row for row in apart if row in trained]


def test_a_chat_template_that_a_recipe_brings_meets_a_base_that_ends_as_it_does(place):
    small = rehearsal_of(read_recipe("math/llama-3.1-8b/scale"), place)
    values = small.stage("sft").values
    tokenizer = AutoTokenizer.from_pretrained(values["model"])
    assert tokenizer.chat_template is None
    tokenizer.chat_template = Path(values["chat_template"]).read_text()
    health = ending_health(tokenizer)
    assert health.end_tokens == ("<|endoftext|>",)
    model = AutoModelForCausalLM.from_pretrained(values["model"])
    likeliest = model(torch.tensor([tokenizer("What is 2 + 3?").input_ids])).logits[0].mean(0).argmax()
    assert int(likeliest) in tokenizer.convert_tokens_to_ids(list(health.end_tokens))


def test_the_tokenizer_ends_a_turn_otherwise_than_a_text(place):
    tokenizer = AutoTokenizer.from_pretrained(place / "base")
    assert len(tokenizer) > 50_000
    assert tokenizer.eos_token == "<|endoftext|>"
    assert "system" in tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    health = ending_health(tokenizer)
    assert health.end_tokens == ("<|im_end|>",)
    text = "We take 87 and add 83; naïve café λ ≥ 0."
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    rows = load_rows(place / "NuminaMath-CoT.parquet", limit=20)
    encoded = encode_rows(rows, tokenizer, max_length=4096)
    assert encoded.summary.plain == 0, "a problem and its solution are two turns, not plain text"
    end = tokenizer.convert_tokens_to_ids(health.end_tokens[0])
    assert [item["input_ids"][-1] == end for item in encoded].count(False) == 1, "one row is cut at the limit"


def test_sampled_answers_of_the_base_end_long_before_their_limit(place):
    tokenizer = AutoTokenizer.from_pretrained(place / "base")
    model = AutoModelForCausalLM.from_pretrained(place / "base", dtype="auto")
    assert model.config.vocab_size > len(tokenizer), "as in Qwen, some rows of the embedding are no token"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 3?"}], tokenize=False, add_generation_prompt=True
    )
    engine = TransformersEngine(model, tokenizer)
    drawn = engine.generate([prompt], SamplingConfig(max_new_tokens=300, temperature=1.0, samples=8, seed=1))
    assert [sample.finish_reason for sample in drawn].count("stop") >= 6
    assert len({sample.text for sample in drawn}) == 8


@pytest.mark.parametrize("name", ["math", "code"])
def test_there_are_questions_for_every_task_that_is_asked(name):
    for task in suite(name):
        assert len(load_questions(task, QUESTIONS / f"{task.name}.jsonl").questions) >= 4


def test_counts_and_materials_are_replaced_and_nothing_else(tmp_path, monkeypatch):
    recipe = read_recipe("code/qwen2.5-math-7b/full-entropy")
    real = importlib.util.find_spec
    there = lambda name, *rest: None if name == "vllm" else real(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", there)
    small = rehearsal_of(recipe, tmp_path, Run(tmp_path))
    replaced = recipe.differences(small)
    sft, calibrate, evaluation = small.stages
    free = {"model", "data", "revision", "split", "max_rows", "max_steps", "save_steps", "limit", "samples", "engine"}
    assert {option for _, option, _, _ in replaced} == free
    for before, now in zip(recipe.stages, small.stages, strict=True):
        assert {k: v for k, v in before.values.items() if k not in free} == {
            k: v for k, v in now.values.items() if k not in free
        }
    assert sft.values["data"] == str(tmp_path / "Magicoder-OSS-Instruct-75K.parquet")
    assert sft.values["max_steps"] == calibrate.values["max_steps"] == 2
    assert calibrate.values["k"] == 0
    assert evaluation.values["model"] == "{last}"
    assert "max_new_tokens" not in evaluation.values
    assert ("eval", "engine", "vllm", "transformers") in replaced


def test_an_engine_that_is_here_is_kept_and_one_process_trains(tmp_path):
    recipe = read_recipe("math/qwen2.5-32b/lora")
    small = rehearsal_of(recipe, tmp_path)
    assert small.stage("eval").values["engine"] == "vllm"
    assert "processes" not in small.stage("sft").values
    assert ("sft", "strategy", "fsdp2", None) in recipe.differences(small)


def test_fewer_than_the_rehearsals_counts_stay(tmp_path):
    recipe = read_recipe(SCALE)
    few = dataclasses.replace(recipe.stage("sft"), values={**recipe.stage("sft").values, "max_rows": 9, "max_steps": 1})
    small = rehearsal_of(dataclasses.replace(recipe, stages=(few,)), tmp_path)
    assert (small.stage("sft").values["max_rows"], small.stage("sft").values["max_steps"]) == (9, 1)


def test_tasks_may_be_a_list(tmp_path):
    (tmp_path / "own.yaml").write_text("stages: [eval]\neval: {model: a/b, tasks: [math500, aime24], samples: 16}\n")
    values = rehearsal_of(read_recipe(str(tmp_path / "own.yaml")), tmp_path).stage("eval").values
    assert (values["samples"], values["limit"]) == (2, 2)


def test_a_grid_has_the_corners_and_a_probe_of_the_stand_ins(place):
    recipe = read_recipe("math/qwen2.5-math-1.5b/grid").with_values({"sweep.probe": "mine"})
    small = rehearsal_of(recipe, place)
    assert small.stage("sweep").values["probe"] == str(place / "probe.jsonl")
    assert len(small.stage("sweep").values["ranges"].split(";")) == 4
    rows = [json.loads(line) for line in (place / "probe.jsonl").read_text().splitlines()]
    assert len(rows) >= 32
    assert set(rows[0]) == {"prompt", "answer"}
