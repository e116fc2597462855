"""Every shipped recipe and its numbers, how files are merged and changed, and what a mistake is answered with."""

import json
import re
from pathlib import Path

import pytest
import yaml

from loragate.cli.arguments import field_types
from loragate.cli.main import load_command, main
from loragate.errors import ConfigError
from loragate.evaluation.tasks import suite
from loragate.recipes import costs, every_name, find_recipes, memory_warnings, options_of, read_recipe, summary
from loragate.recipes.costs import build_meta_model, estimate_of
from loragate.recipes.recipe import HERE, KINDS, TOP, TRAINS
from loragate.recipes.tiny import write_base

NAMES = list(every_name())
SCALE = "math/qwen2.5-math-1.5b/scale"
LORA = "math/qwen2.5-math-1.5b/lora"
OWN = "domain: math\nbackbone: qwen2.5-math-1.5b\nmethod: lora\n"


def option(name, key):
    stage, _, key = key.partition(".")
    return next(one for one in read_recipe(name).stages if one.name == stage).options.get(key)


def unknown_keys(stage):
    """Options of a stage that its command does not have."""
    return stage.options.keys() - field_types(load_command(stage.command).options).keys()


def test_commands_have_every_option_and_take_every_value():
    tried = set()  # most recipes share their stages
    for name in NAMES:
        recipe = read_recipe(name)
        assert not [(name, stage.name, key) for stage in recipe.stages for key in unknown_keys(stage)]
        for stage in recipe.resolve_stages("out"):
            written = repr((stage.command, sorted(stage.options.items())))
            if written not in tried:
                options_of(stage, name)
            tried.add(written)
    assert len(tried) > 100


def test_every_row_of_the_papers_tables_has_a_recipe():
    methods = {"math": "Table 1", "code": "Table 2"}
    for domain, table in methods.items():
        for backbone in ("qwen2.5-math-1.5b", "qwen2.5-math-7b", "qwen3-4b-base"):
            for method in ("base", "lora", "dora", "profit", "dft", "eaft", "talr", "scale"):
                assert read_recipe(f"{domain}/{backbone}/{method}").tables.startswith(table)
            assert read_recipe(f"{domain}/{backbone}/grid").tables == "Fig. 3"
    assert len(NAMES) == len(set(NAMES)) == 406


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("table 5", {"delta-entropy", "lora", "scale"}),
        ("Table 6", {"gate-ce", "lora", "lora-continued", "scale"}),
        ("Table 7", {"dft", "lora", "scale"}),
        ("Table 8", {"realised-gates", "scale"}),
        ("table 10", {"interventions", "scale"}),
        ("Fig. 4", {"dft", "dora", "five-ranges", "lora", "talr"}),
        ("app. c", {"eksft", "forgetting"}),
    ],
)
def test_recipes_are_found_by_their_place_in_the_paper(place, expected):
    assert {name.rpartition("/")[2] for name in find_recipes(place)} == expected


def test_every_number_says_where_it_comes_from():
    """All values of options that are not taken from elsewhere, in every shipped file."""
    for path in HERE.rglob("*.yaml"):
        block = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            block = line.partition(":")[0] if line[:1].strip() else block
            found = re.match(r" +[\w-]+: (?P<value>[^#]*[^# ])(?P<comment> +# .*)?$", line)
            if not found or (block in TOP and block != "for") or found["value"] in ("null", ">-"):
                continue
            if "{" in found["value"] or found["value"].startswith("["):
                continue
            assert re.match(r"  # (paper|unstated|ours)", found["comment"] or ""), f"{path.name}: {line}"


VALUES = {
    "math/qwen2.5-math-1.5b/scale": {
        "sft": {"rank": 16, "alpha": 16, "batch_size": 128, "learning_rate": 5e-4, "max_rows": 100_000},
        "calibrate": {
            "ranges": "-6,3",
            "max_rows": 20_000,
            "max_length": 4096,
            "learning_rate": 5e-4,
            "k": 100,
            "select": "first",
            "seed": 42,
            "skip_selection": True,
        },
    },
    "code/qwen3-4b-base/lora": {"sft": {"learning_rate": 5e-5, "max_rows": 75_197}},
    "code/qwen2.5-math-7b/scale": {"calibrate": {"ranges": "0,6", "select": "shuffled", "select_seed": 42}},
    "math/qwen2.5-math-7b/scale": {"calibrate": {"ranges": "-4,4"}, "retention": {"suite": "retention"}},
    "math/qwen3-4b-base/scale": {"calibrate": {"ranges": "-6,1"}},
    "code/llama-3.1-8b/scale": {"calibrate": {"ranges": "0,6"}},
    "math/qwen2.5-math-7b/scale-auto": {"calibrate": {"skip_selection": False}},
    "math/qwen2.5-math-7b/full-entropy": {"calibrate": {"k": 0}},
    "math/qwen2.5-math-7b/complete-gradient": {"calibrate": {"detach_input": False}},
    "math/qwen2.5-math-7b/gates-global": {"calibrate": {"granularity": "global"}},
    "math/qwen2.5-math-7b/gate-ce": {"calibrate": {"objective": "ce"}},
    "math/qwen2.5-math-7b/scale-on-dft": {"sft": {"objective": "dft"}, "calibrate": {"objective": "entropy"}},
    "math/qwen2.5-math-7b/forgetting": {"mask": {"keep": 0.7}},
    "code/qwen2.5-math-7b/lora-continued": {"continued": {"max_rows": 20_000, "rank": None}},
    "math/qwen2.5-math-7b/grid": {"sweep": {"ranges": "grid", "seed": None}},
    "math/qwen2.5-math-7b/base": {"eval": {"model": "Qwen/Qwen2.5-Math-7B"}},
    "math/qwen2.5-32b/scale": {"sft": {"strategy": "fsdp2"}},
}
"""{recipe: {stage: options}}, as the paper has them; None: left to the command."""


@pytest.mark.parametrize("name", VALUES)
def test_values_of_the_paper(name):
    for stage, options in VALUES[name].items():
        assert {key: option(name, f"{stage}.{key}") for key in options} == options


def test_backbones_differ_in_the_model_and_in_memory_alone():
    memory = {"per_device_train_batch_size", "gradient_checkpointing", "strategy", "processes"}

    def kept(backbone):
        stages = read_recipe(f"code/{backbone}/lora-continued").stages
        return [
            {k: v for k, v in one.options.items() if k not in {*memory, "model", "chat_template"}} for one in stages
        ]

    for path in (HERE / "backbone").glob("*.yaml"):
        assert kept(path.stem) == kept("qwen2.5-math-1.5b"), path.stem


def test_a_stage_with_a_name_of_its_own_begins_with_its_commands_block():
    stages = {stage.name: stage.options for stage in read_recipe("code/qwen2.5-math-7b/interventions").stages}
    assert list(stages) == ["sft", "calibrate", "diagnose", "wide", "diagnose-wide"]
    assert stages["wide"] == {**stages["calibrate"], "ranges": "-3,3"}
    assert stages["diagnose-wide"] == stages["diagnose"]
    assert "suite" not in stages["diagnose"], "null leaves an option to the command"


def test_references_become_paths():
    stages = {stage.name: stage.options for stage in read_recipe("math/qwen2.5-math-1.5b/mask").resolve_stages("r")}
    assert stages["sft"]["data"] == stages["mask"]["out"] == "r/mask.jsonl"
    assert stages["mask"]["reference"] == "r/reference"
    assert stages["reference"]["data"] == "AI-MO/NuminaMath-CoT"
    assert stages["eval"]["model"] == stages["retention"]["model"] == "r/sft"
    llama = read_recipe("math/llama-3.1-8b/lora").stages[0]
    assert Path(llama.options["chat_template"]).is_file()


def test_changed_values(tmp_path):
    changes = {"sft.max_rows": 5, "sft.seed": 7, "model": "me/mine", "continued.warmup-ratio": None}
    stages = read_recipe("math/qwen2.5-math-1.5b/lora-continued", changes).stages
    assert [stage.options.get("max_rows") for stage in stages] == [5, 20_000, None, None]
    assert [stage.options["seed"] for stage in stages[:2]] == [7, 42]
    assert stages[0].options["model"] == "me/mine"
    assert "warmup_ratio" not in stages[1].options
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    local = read_recipe(LORA, {"data": str(rows)}).stages[0].options
    assert local["data"] == str(rows)
    assert not {"split", "revision"} & local.keys(), "of the hub"


def test_what_belongs_to_a_changed_model_or_data_set_goes_with_it(tmp_path):
    name, path = "math/llama-3.1-8b/scale", tmp_path / "own.yaml"
    path.write_text("domain: math\nbackbone: llama-3.1-8b\nmethod: scale\ndata: me/rows\nmodel: me/mine\n")
    for recipe in (read_recipe(name, {"data": "me/rows", "model": "me/mine"}), read_recipe(str(path))):
        assert not [one for one in recipe.stages if {"revision", "eval_split", "chat_template"} & one.options.keys()]
        assert recipe.architecture == costs(recipe) == {}
        assert "unknown" in summary(recipe, {})
    kept = read_recipe(name, {"data": "me/rows", "revision": "v1", "calibrate.eval_split": "dev"}).stages[1].options
    assert (kept["revision"], kept["eval_split"]) == ("v1", "dev")


def test_a_model_is_changed_for_all_stages_or_none(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("domain: math\nbackbone: llama-3.1-8b\nmethod: scale\nsft: {model: me/mine}\n")
    for name, changes, stage in (
        ("math/llama-3.1-8b/scale", {"sft.model": "me/mine"}, "sft"),
        ("math/llama-3.1-8b/mask", {"mask.model": "me/mine"}, "mask"),
        ("math/llama-3.1-8b/base", {"eval.model": "me/mine"}, "eval"),
        (str(own), {}, "sft"),
    ):
        with pytest.raises(ConfigError, match=rf"stage '{stage}' has the model me/mine.*--set model=me/mine"):
            read_recipe(name, changes)
    # another folder to evaluate is no other base
    assert read_recipe("math/llama-3.1-8b/scale", {"eval.model": "runs/mine"}).stages[2].options["model"] == "runs/mine"


def test_the_estimate_is_that_of_the_model_in_a_folder(tmp_path):
    write_base(tmp_path, {}, None)
    large, small = (costs(read_recipe("math/qwen2.5-32b/scale", one)) for one in ({}, {"model": str(tmp_path)}))
    assert list(small) == list(large)
    assert small["sft"].hours < large["sft"].hours / 1000
    path = tmp_path / "own.yaml"
    path.write_text(f"{OWN}architecture: {{model_type: qwen9}}\n")
    with pytest.raises(ConfigError, match=r"own\.yaml: architecture is none that transformers knows"):
        costs(read_recipe(str(path)))


def test_costs_read_what_is_left_to_the_command():
    changes = {
        "sft.max_length": None,
        "sft.per_device_train_batch_size": None,
        "sft.batch_size": None,
        "sft.objective": None,
    }
    assert list(costs(read_recipe(SCALE, changes))) == ["sft", "calibrate", "eval", "retention"]
    elsewhere = costs(read_recipe("math/qwen2.5-math-1.5b/grid", {"eval.sweep": "runs/sweep"}))["eval"]
    assert (elsewhere.hours, "unknown" in elsewhere.memory) == (None, True)


@pytest.mark.parametrize(("key", "value"), [("model", None), ("data", None), ("data", [1]), ("model", 5)])
def test_a_value_for_all_stages_is_a_text(key, value):
    with pytest.raises(ConfigError, match=f"--set {key} is .*, expected text"):
        read_recipe(SCALE, {key: value})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("sft.rnak", "no stage of .* has it; did you mean 'sft.rank'"),
        ("sfr.rank", "no stage of .* has it; did you mean 'sft.rank'.*stages: sft, eval, retention"),
        ("modle", "did you mean 'model'"),
        ("sft.out", "follows from --out"),
    ],
)
def test_a_key_that_no_stage_has(key, message):
    with pytest.raises(ConfigError, match=message):
        read_recipe(LORA, {key: 1}).resolve_stages("out")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math/qwen2.5-math-1.5b", "expected domain/backbone/method"),
        ("maths/qwen2.5-math-1.5b/lora", "there is no domain 'maths'; did you mean 'math'"),
        ("math/qwen2.5-math-1.6b/lora", "there is no backbone 'qwen2.5-math-1.6b'; did you mean 'qwen2.5-math-1.5b'"),
        ("math/qwen2.5-math-1.5b/lira", "there is no method 'lira'; did you mean 'lora'"),
        ("nowhere.yaml", r"nowhere\.yaml: cannot be read"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(ConfigError, match=message):
        read_recipe(name)


def test_a_recipe_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"{OWN}model: me/mine\nsft: {{rank: 64}}\ntitle: wide\n")
    recipe = read_recipe(str(path))
    assert (recipe.title, recipe.tables, recipe.architecture) == ("wide", "", {})
    assert recipe.stages[0].options == {**read_recipe(LORA).stages[0].options, "rank": 64, "model": "me/mine"}
    assert [file.name for file in recipe.files] == [
        "common.yaml", "math.yaml", "qwen2.5-math-1.5b.yaml", "lora.yaml", "mine.yaml",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sft: {a: 1}\nsft: {b: 2}\n", "'sft' appears twice"),
        ("machine: b10\n", "machine is 'b10'"),
        ("stages: sft\n", "stages is 'sft', expected a list"),
        ("stages: null\n", "stages is empty, expected a list"),
        ("machine: [h100]\n", r"machine is \['h100'\], expected text"),
        ("revision: 12345678\n", r"revision is 12345678, expected text \(in quotes"),
        ("for: math\n", "for is 'math', expected a block of keys"),
        ("stagse: [sft]\n", "'stagse' is no stage and no key of a recipe; did you mean 'stages'"),
        ("stages: [sft, sft]\n", "'sft' cannot be the name of a stage"),
        ("stages: [{x/../../../y: sft}]\n", "cannot be the name of a stage"),
        ("stages: [{a: sft, ..: sft}]\n", r"'\.\.' cannot be the name of a stage"),
        ("stages: [{data: sft}]\n", "'data' cannot be the name of a stage"),
        ("stages: [{b: calibrate}]\nb: {adapter: '{sfd}'}\n", r"refers to \{sfd\}, before it there is nothing"),
        ("stages: [push]\n", "'push' is no stage"),
        ("stages: [stf]\n", "'stf' is no stage; did you mean 'sft'"),
        ("sfd: {rank: 3}\n", "'sfd' is no stage and no key of a recipe; did you mean 'sft'"),
        ("sft: {rnak: 3}\n", "stage 'sft': unknown key 'rnak'; did you mean 'rank'"),
        ("sft: {objective: dtf}\n", "stage 'sft': objective must be one of"),
        ("sft: {out: ../x}\n", "follows from --out"),
        ("sft: {launcher: touch there}\n", "unknown key 'launcher'"),
        ("launcher: touch there\n", "'launcher' is no stage and no key"),
        ("sft: touch there\n", "expected a block of options"),
        ("sft: {trust_remote_code: true}\n", "--set sft.trust_remote_code=true"),
        ("eval: {trust-remote-code: true}\n", "--set eval.trust_remote_code=true"),
        ("eval: {sandbox: rlimits}\n", "--set eval.sandbox="),
    ],
)
def test_mistakes_and_dangers_in_a_file_are_named(tmp_path, text, message):
    """A file may come from others: it starts no program and opens nothing."""
    path = tmp_path / "own.yaml"
    path.write_text(OWN + text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_recipe(str(path)).resolve_stages("x")
    assert "own.yaml" in str(caught.value)


def needs(recipe):
    """{training: the estimate of a step}."""
    model = build_meta_model(json.dumps(recipe.architecture))
    trainings = [stage for stage in recipe.stages if stage.command in TRAINS]
    return {stage.name: estimate_of(stage, model) for stage in trainings}


@pytest.mark.parametrize("backbone", sorted({name.split("/")[1] for name in every_name()}))
def test_trainings_fit_the_gpu_that_they_are_made_for(backbone):
    """By the formula of `training.plan`, with 4 GiB to spare for what it does not count; DoRA keeps most."""
    for method in ("scale", "dora", "eksft"):
        recipe = read_recipe(f"math/{backbone}/{method}")
        found = needs(recipe)
        assert list(found) == ["sft", "calibrate"][: 1 + (method == "scale")]
        assert recipe.machine == "h100"
        assert all(need.complete and need.peak < 76 * 2**30 for need in found.values())


@pytest.mark.parametrize("method", ["delta-entropy", "realised-gates", "mask"])
def test_stages_that_read_and_answer_fit_or_say_what_to_set(method):
    for name in NAMES:
        if name.endswith(f"/{method}"):
            assert list(memory_warnings(read_recipe(name))) == [], name
    mask = costs(read_recipe("math/qwen2.5-32b/mask"))["mask"]
    assert 62 < mask.needed / 2**30 < 70, "one model of 61 GiB at a time, and what a pass needs"


def test_what_does_not_fit_is_warned_of_with_a_size_that_would():
    changes = {"diagnose.batch_size": 128, "sft.per_device_train_batch_size": 128}
    recipe = read_recipe("math/qwen2.5-math-7b/delta-entropy", changes)
    sft, look = memory_warnings(recipe)
    assert look == (
        "warning: diagnose may need 99 GiB of GPU memory, of which one h100 has 79: "
        "--set diagnose.batch_size=64 would fit, in more batches"
    )
    assert sft.endswith("the steps stay the same")
    assert list(memory_warnings(recipe, ["diagnose"])) == [look]
    size = int(re.search("per_device_train_batch_size=([0-9]+) would fit", sft)[1])
    assert list(memory_warnings(read_recipe(LORA, {"sft.per_device_train_batch_size": size}))) == []


def test_constants_that_are_no_numbers():
    with pytest.raises(ConfigError, match="--constants half: expected numbers separated by commas"):
        costs(read_recipe(LORA, {"eval.controls": "cheap", "eval.constants": "half"}))


def test_hours_are_those_of_the_method_and_hold_the_evaluation():
    """What a baseline costs beside LoRA, answers that are drawn, and the look that only transformers can take."""
    at = {
        method: costs(read_recipe(f"math/qwen2.5-math-1.5b/{method}"))
        for method in ("lora", "dora", "eksft", "talr", "dft")
    }
    times = {method: found["sft"].hours / at["lora"]["sft"].hours for method, found in at.items()}
    assert times["dft"] == 1.0
    assert 1.0 < times["dora"] < 1.3
    assert 1.15 < times["talr"] < 1.35, "one forward pass more over every batch, for its median loss"
    assert 1.8 < times["eksft"] < 2.3, "two forward passes of the base, and two more of the adapter"
    assert "24,256 answers of at most 4,096 tokens" in at["lora"]["eval"].memory
    assert 0.5 < at["lora"]["eval"].hours < 3
    cheap = costs(read_recipe("math/qwen2.5-math-1.5b/controls"))["eval"]
    assert f"{9 * (3 * 16 + 1) * 1516:,} answers of at most" in cheap.memory, (
        "9 variants, of each 16 samples at three temperatures and a greedy answer to 1,516 questions"
    )
    two = costs(read_recipe("math/qwen2.5-math-1.5b/controls", {"eval.temperature": [0.3, 0]}))["eval"]
    assert f"{9 * 17 * 1516:,} answers of at most" in two.memory
    with pytest.raises(ConfigError, match=r"--temperature 0\.3,-1: found -1, expected numbers from 0"):
        costs(read_recipe("math/qwen2.5-math-1.5b/controls", {"eval.temperature": "0.3,-1"}))
    scale = costs(read_recipe("math/qwen2.5-math-1.5b/scale-auto"))
    look = costs(read_recipe("math/qwen2.5-math-1.5b/delta-entropy"))["diagnose"]
    assert look.hours > 48
    assert "on transformers" in look.memory
    one = costs(read_recipe("math/qwen2.5-math-1.5b/scale"))["calibrate"].hours
    assert scale["calibrate"].hours == pytest.approx(3 * one), "three ranges"
    fewer = costs(read_recipe("math/qwen2.5-math-1.5b/lora", {"sft.max_rows": 1000, "eval.limit": 10}))
    assert fewer["sft"].hours == pytest.approx(at["lora"]["sft"].hours / 100)
    assert "800 answers" in fewer["eval"].memory
    few = {"retention.suite": None, "retention.tasks": "bbh_zeroshot,mmlu_pro", "retention.limit": 2}
    kept = costs(read_recipe("math/qwen2.5-math-1.5b/lora", few))["retention"]
    assert f"{2 * (27 + 14)} answers" in kept.memory, "a limit is of each subset"
    controlled = costs(read_recipe("math/qwen2.5-math-1.5b/lora", {**few, "retention.controls": "cheap"}))["retention"]
    assert f"{2 * 2 * (27 + 14)} answers" in controlled.memory, "adapter and base, without controls"


def test_memory_follows_the_dtype_of_the_base():
    name = "math/qwen2.5-math-1.5b/lora"
    half, full = needs(read_recipe(name)), needs(read_recipe(name, {"sft.dtype": "float32", "sft.precision": "fp32"}))
    assert full["sft"].weights == 2 * half["sft"].weights
    assert full["sft"].activations > half["sft"].activations
    look = "math/qwen2.5-math-1.5b/delta-entropy"
    half, full = (costs(read_recipe(look, change))["diagnose"].memory for change in ({}, {"diagnose.dtype": "float32"}))
    assert half != full, "what answers and reads follows it too"


def test_trainings_whose_times_are_compared_recompute_alike():
    """Fig. 4 has minutes of LoRA, DFT, DoRA, TALR and gates side by side."""
    for domain in ("math", "code"):
        for backbone in ("qwen2.5-math-1.5b", "qwen2.5-math-7b"):
            names = [name for name in find_recipes("Fig. 4") if name.startswith(f"{domain}/{backbone}/")]
            assert len(names) == 5
            stages = [stage for name in names for stage in read_recipe(name).stages if stage.command in TRAINS]
            assert {stage.options["gradient_checkpointing"] for stage in stages} == {True}
            assert len({stage.options["per_device_train_batch_size"] for stage in stages}) == 1
    assert option("math/qwen2.5-math-7b/five-ranges", "sweep.ranges").count(";") == 4


def test_rows_can_be_scored_as_the_paper_prints_them():
    assert option("math/qwen2.5-math-7b/realised-gates", "diagnose.answers") == 16
    assert option("math/qwen2.5-math-7b/lora", "eval.grader") == "default"
    samples = {task.name: task.generation.samples for task in suite("code")}
    assert samples == {"humaneval": 3, "humaneval_plus": 1, "mbpp": 1}, "multiples of 1/492, 1/164 and 1/500"


def test_list_and_show(capsys):
    assert main(["recipes", "list", "math/qwen3-4b-base/scale"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["math/qwen3-4b-base/scale", "Table 1; Fig. 1"] in lines
    assert ["math/qwen3-4b-base/scale-auto", "beyond the paper"] in lines
    assert main(["recipes", "list", "math/qwen2.5-math-1.5b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (proposed,) = (line for line in lines if line.startswith(f"{lines[-1].split()[-1]} "))
    assert "beyond the paper" not in proposed
    assert main(["recipes", "list"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == list(KINDS)
    named = {part for name in NAMES for part in name.split("/")}
    assert {line.split()[0] for line in lines if line.startswith("  ")} == named
    assert "  talr               TALR" in lines  # a row of the paper's tables
    assert "  olmo-2-7b          OLMo-2-7B, beyond the paper" in lines
    assert last.startswith("406 recipes, named domain/backbone/method.")
    assert last.split()[-1] in NAMES
    assert main(["recipes", "show", LORA, "--set", "sft.rank=8", "--out", "runs/x"]) == 0
    text = capsys.readouterr().out
    assert f"# loragate recipes run {LORA} --out runs/x --set sft.rank=8\n" in text
    assert re.search(r"^# sft: about [\d.]+ GiB of GPU memory \(.*\), about \d+ h \d\d min$", text, re.M)
    assert re.search(
        r"^# eval: vLLM fills 0.9 of the GPU; 24,256 answers of at most 4,096 tokens, about \d+ h \d\d min$", text, re.M
    )
    assert re.search(
        r"^# about \d+ h \d\d min in all on 1 h100, grading aside: with every row .* both assumed$", text, re.M
    )
    assert all(f"{kind}/" in text for kind in KINDS), "where each number comes from"
    shown = yaml.safe_load(text)
    assert shown["stages"] == ["sft", "eval", {"retention": "eval"}]
    assert shown["sft"] == {**read_recipe(LORA).stages[0].options, "rank": 8}


def test_what_is_refused(fails):
    assert "did you mean 'show'" in fails("recipes", "shaw", LORA)
    assert "takes one name" in fails("recipes", "run")
    assert "takes one name" in fails("recipes", "show", LORA, LORA)
    assert "no recipe has 'table 99'" in fails("recipes", "list", "table 99")
    assert "did you mean 'qwen2.5-math-7b'" in fails("recipes", "list", "qwen2.5-maths-7b")
    assert "--tiny has no effect on loragate recipes show" in fails("recipes", "show", LORA, "--tiny")
    assert "expected key=value" in fails("recipes", "show", LORA, "--set", "rank")
    assert "rank must be a whole number, found 'many'" in fails("recipes", "show", LORA, "--set", "sft.rank=many")
