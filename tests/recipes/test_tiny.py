"""A tiny recipe: what it replaces, what it runs on, and every kind of stage through to the end."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from loragate.cli.main import main
from loragate.data import encode_rows, ending_health, load_rows
from loragate.evaluation.sandbox import probe as probe_sandbox
from loragate.evaluation.tasks import load_questions, suite
from loragate.files import read_json
from loragate.recipes import QUESTIONS, describe_overruled, read_recipe, run, tiny_recipe
from loragate.recipes.recipe import HERE

BACKBONE = "qwen2.5-math-1.5b"
MADE = [
    *(f"math/{BACKBONE}/{method}" for method in ("scale", "dora", "mask", "lora-continued", "grid", "delta-entropy")),
    *(f"code/{BACKBONE}/{method}" for method in ("scale-auto", "realised-gates")),
    "code/qwen2.5-math-7b/interventions",  # five stages
    "math/llama-3.1-8b/scale",  # a chat template of ours
]
"""Every kind of stage, and every way from one to the next."""


@pytest.mark.parametrize("backbone", [path.stem for path in sorted((HERE / "backbone").glob("*.yaml"))])
def test_a_tiny_base_has_the_backbones_architecture_and_ends_as_its_template_does(backbone, tmp_path):
    recipe = read_recipe(f"math/{backbone}/lora")
    options = tiny_recipe(recipe, tmp_path).stages[0].options
    model = AutoModelForCausalLM.from_pretrained(options["model"])
    assert model.config.model_type == recipe.architecture["model_type"]
    assert model.num_parameters() < 200_000
    tokenizer = AutoTokenizer.from_pretrained(options["model"])
    text = "We take 87 and add 83; naïve café λ ≥ 0."
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text
    own = options.get("chat_template")
    assert (tokenizer.chat_template is None) == bool(own)
    if own:
        tokenizer.chat_template = Path(own).read_text(encoding="utf-8")
    assert ending_health(tokenizer).end_tokens == (("<|endoftext|>",) if own else ("<|im_end|>",))
    encoded = encode_rows(load_rows(options["data"]), tokenizer, max_length=2048)
    assert (len(encoded), encoded.summary.plain) == (32, 0), "a problem and its solution are two turns, not plain text"


@pytest.mark.parametrize("name", ["math", "retention", "code"])
def test_there_are_questions_for_every_task_that_is_asked(name):
    for task in suite(name):
        assert len(load_questions(task, QUESTIONS / f"{task.name}.jsonl").questions) >= 4


def test_held_out_rows_are_none_of_the_trained(tmp_path):
    options = tiny_recipe(read_recipe(f"math/{BACKBONE}/scale"), tmp_path).stages[1].options
    assert "eval_split" not in options, "a split is the hub's, and a file with one is refused"
    apart, trained = (list(load_rows(options[key])) for key in ("eval_data", "data"))
    assert apart
    assert not [row for row in apart if row in trained]


def test_a_grid_has_two_cells_and_questions_where_the_recipe_has(tmp_path):
    recipe = read_recipe(f"math/{BACKBONE}/grid")
    assert "dev_data" not in tiny_recipe(recipe, tmp_path).stages[1].options
    assert len(tiny_recipe(recipe, tmp_path).stages[1].options["ranges"].split(";")) == 2


@pytest.mark.parametrize("name", ["code/qwen2.5-math-7b/interventions", f"code/{BACKBONE}/five-ranges"])
def test_a_code_recipe_rehearses_on_code_rows_whatever_it_asks(name, tmp_path):
    assert Path(tiny_recipe(read_recipe(name), tmp_path).stages[0].options["data"]).name == "code.jsonl"


def test_what_a_rehearsal_overrules_is_said(tmp_path):
    changes = {"sft.max-rows": 2000, "sft.rank": 4, "eval.engine": "transformers", "data": "me/rows"}
    recipe = read_recipe(f"math/{BACKBONE}/lora", changes)
    said = list(describe_overruled(recipe, tiny_recipe(recipe, tmp_path), changes))
    assert [line.partition(";")[2] for line in said] == [
        " --set sft.max-rows=2000 holds without --tiny",
        " --set data=me/rows holds without --tiny",
    ]
    assert said[0].startswith("--tiny rehearses with its own sft.max_rows, 32;")


@pytest.mark.slow("rehearsals")
@pytest.mark.parametrize("name", MADE)
def test_every_stage_of_a_recipe_runs(name, tmp_path, monkeypatch):
    if problem := probe_sandbox("bubblewrap"):
        pytest.skip(f"bubblewrap: {problem}")
    for module in ("math_verify", "lm_eval"):
        pytest.importorskip(module, reason=f"{module} is not installed (pip install loragate[eval])")

    def start(command, title, offline):
        """In this process, which spares each stage the imports."""
        assert main(command[command.index("loragate") + 1 :]) == 0, title

    monkeypatch.setattr(run, "run_command", start)
    out = tmp_path / "run"
    assert main(["recipes", "run", name, "--tiny", "--out", str(out)]) == 0
    assert list(read_json(out / "stages.json")) == [stage.name for stage in read_recipe(name).stages]
    assert json.loads((out / "recipe.json").read_text())["recipe"] == f"{name} --tiny"
