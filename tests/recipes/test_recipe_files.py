"""Every shipped recipe: named, composed, marked; and what a mistake in a file of the user's is answered with."""

import json
from pathlib import Path

import pytest
import yaml

from loragate.errors import ConfigError
from loragate.recipes import every_name, read_recipe
from loragate.recipes.files import HERE, KINDS, SOURCES, files, read_file
from loragate.strict_yaml import read_mapping

NAMES = list(every_name())
SCALE = "math/qwen2.5-math-1.5b/scale"


def value(name, key):
    stage, option = key.split(".")
    return read_recipe(name).stage(stage).values.get(option)


def test_every_row_of_the_papers_tables_has_a_recipe():
    backbones = ("qwen2.5-math-1.5b", "qwen2.5-math-7b", "qwen3-4b-base")
    methods = ("base", "lora", "dora", "profit", "dft", "eaft", "talr", "scale", "grid")
    for domain, table in (("math", "Table"), ("code", "Table")):
        for backbone in backbones:
            for method in methods:
                tables = read_recipe(f"{domain}/{backbone}/{method}").tables
                assert tables.startswith((table, "Fig. 3")), (domain, backbone, method)
    for method in ("lora", "dft", "scale"):
        recipe = read_recipe(f"math/qwen2.5-math-1.5b/{method}")
        assert ", 7" in recipe.tables
        assert {stage.values["seed"] for stage in recipe.stages if "seed" in stage.values} == {42}
    for method in ("gate-ce", "lora-continued"):
        assert read_recipe(f"math/qwen2.5-math-1.5b/{method}").tables == "Table 6"
    assert len(NAMES) == len(set(NAMES)) > 300


@pytest.mark.parametrize("backbone", list(files("backbone")))
def test_every_value_says_where_it_comes_from(backbone):
    for name in NAMES:
        if backbone in name:
            for stage in read_recipe(name).stages:
                for key in stage.values:
                    assert stage.marks.get(key, "").startswith(SOURCES), f"{name} {stage.name}.{key}"


def test_every_value_of_a_file_is_used():
    """A block or an option that no stage has would mislead who reads the file."""
    used = {(stage.name, key) for name in NAMES for stage in read_recipe(name).stages for key in stage.values}
    used |= {(stage.command, key) for name in NAMES for stage in read_recipe(name).stages for key in stage.values}
    for kind in ("domain", "backbone", "method"):
        for path in files(kind).values():
            for block, options in read_file(path).blocks.items():
                for option, (value, _) in options.items():
                    assert value is None or (block, option) in used, f"{path.name}: {block}.{option}"


def test_a_comment_behind_a_value_is_its_source_and_a_new_value_has_a_new_one(tmp_path):
    shared = read_recipe("math/qwen2.5-math-1.5b/lora").stage("sft")
    assert shared.marks["per_device_train_batch_size"].startswith("ours: memory only")
    assert shared.marks["model"] == "paper Sec. 6.1", "of what is put in"
    path = tmp_path / "own.yaml"
    path.write_text(
        "domain: math\nbackbone: qwen2.5-math-1.5b\nmethod: lora\n"
        "sft:\n  rank: 8  # paper 'X': r = 8\n  alpha: 8\n  seed: 1  # mine\n"
    )
    marks = read_recipe(str(path)).stage("sft").marks
    assert (marks["rank"], marks["alpha"], marks["seed"]) == ("paper 'X': r = 8", *2 * ("yours: own.yaml",))


def test_a_stage_with_a_name_of_its_own_begins_with_its_commands_block():
    values = {stage.name: stage.values for stage in read_recipe("code/qwen2.5-math-7b/interventions").stages}
    assert list(values) == ["sft", "calibrate", "diagnose", "wide", "diagnose-wide"]
    assert values["wide"] == {**values["calibrate"], "range": "-3,3"}
    assert values["diagnose-wide"] == values["diagnose"]
    assert values["diagnose"]["tasks"] == "humaneval"
    assert "suite" not in values["diagnose"], "null leaves an option to the command"


@pytest.mark.parametrize(
    ("name", "key", "expected"),
    [
        (SCALE, "sft.rank", 16),
        (SCALE, "sft.learning_rate", 5e-4),
        ("code/qwen3-4b-base/lora", "sft.learning_rate", 5e-5),
        (SCALE, "sft.max_rows", 100_000),
        ("code/qwen3-4b-base/lora", "sft.max_rows", 75_197),
        (SCALE, "calibrate.max_rows", 20_000),
        (SCALE, "calibrate.select", "first"),
        ("code/qwen2.5-math-7b/scale", "calibrate.select", "shuffled"),
        ("code/qwen2.5-math-7b/scale", "calibrate.select_seed", 42),
        (SCALE, "calibrate.range", "-6,3"),
        ("math/qwen2.5-math-7b/scale", "calibrate.range", "-4,4"),
        ("code/qwen2.5-math-7b/scale", "calibrate.range", "0,6"),
        ("math/qwen2.5-math-7b/scale-auto", "calibrate.range", "auto"),
        (SCALE, "calibrate.k", 100),
        ("math/qwen2.5-math-7b/full-entropy", "calibrate.k", 0),
        ("math/qwen2.5-math-7b/complete-gradient", "calibrate.detach_input", False),
        ("math/qwen2.5-math-7b/gates-global", "calibrate.granularity", "global"),
        ("math/qwen2.5-math-7b/gate-ce", "calibrate.objective", "ce"),
        ("math/qwen2.5-math-7b/scale-on-dft", "sft.objective", "dft"),
        ("math/qwen2.5-math-7b/scale-on-dft", "calibrate.objective", "entropy"),
        ("code/qwen2.5-math-7b/lora-continued", "continued.select_seed", 42),
        ("code/qwen2.5-math-7b/lora-continued", "continued.max_rows", 20_000),
        ("math/qwen2.5-math-7b/grid", "sweep.ranges", "grid"),
        ("math/qwen2.5-math-7b/grid", "sweep.max_rows", 20_000),
        ("math/qwen2.5-math-7b/base", "eval.model", "Qwen/Qwen2.5-Math-7B"),
        ("math/qwen2.5-math-7b/scale", "retention.suite", "retention"),
    ],
)
def test_values_of_the_paper(name, key, expected):
    assert value(name, key) == expected


@pytest.mark.parametrize("domain", ["math", "code"])
def test_constants_are_such_as_eval_takes(domain):
    from loragate.evaluation.variants import variants_for

    text = value(f"{domain}/qwen2.5-math-1.5b/controls", "eval.constants")
    constants = [float(part) for part in text.split(",")]
    found = [row.scale for row in variants_for("adapter", "cheap", constants) if row.scale is not None]
    assert found == constants


def test_references_become_paths():
    stages = {stage.name: stage.values for stage in read_recipe(SCALE).placed("runs/x")}
    assert stages["sft"]["out"] == stages["calibrate"]["adapter"] == "runs/x/sft"
    assert stages["eval"]["model"] == stages["retention"]["model"] == "runs/x/calibrate"
    stages = {stage.name: stage.values for stage in read_recipe(SCALE.replace("scale", "mask")).placed("r")}
    assert stages["sft"]["data"] == stages["mask"]["out"] == "r/mask.jsonl"
    assert stages["mask"]["reference"] == "r/reference"
    assert stages["reference"]["data"] == "AI-MO/NuminaMath-CoT"


def test_show_is_a_recipe_file_again(tmp_path):
    for name in (SCALE, "code/llama-3.1-8b/grid", "math/qwen2.5-32b/profit", "math/qwen3-4b-base/mask"):
        recipe = read_recipe(name)
        text = recipe.as_yaml()
        (tmp_path / "again.yaml").write_text(text)
        again = read_recipe(str(tmp_path / "again.yaml"))
        assert again.as_record() == recipe.as_record()
        assert [stage.marks for stage in again.stages] == [stage.marks for stage in recipe.stages]
        assert (again.machine, again.architecture) == (recipe.machine, recipe.architecture)
        assert "# paper " in text
        assert "unstated" in text


def test_changed_values():
    recipe = read_recipe(SCALE)
    changed = recipe.with_values({"sft.max_rows": "5", "seed": "7", "calibrate.range": "-1,2"})
    assert changed.stage("sft").values["max_rows"] == 5
    assert changed.stage("calibrate").values["max_rows"] == 20_000
    assert [stage.values.get("seed") for stage in changed.stages] == [7, 7, 7, 7]
    assert changed.stage("calibrate").values["range"] == "-1,2"
    assert changed.stage("sft").marks["seed"].startswith("yours")
    for key, text in (
        ("sft.rnak", "no such option of stage 'sft' of .*; did you mean 'sft.rank'"),
        ("sfr.rank", "has no stage 'sfr'; did you mean 'sft'"),
        ("rnak", "no such option of any stage"),
        ("sft.out", "follows from --out"),
    ):
        with pytest.raises(ConfigError, match=text):
            recipe.with_values({key: "1"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math/qwen2.5-math-1.5b", "expected domain/backbone/method"),
        ("maths/qwen2.5-math-1.5b/lora", "there is no domain 'maths'; did you mean 'math'"),
        ("math/qwen2.5-math-1.6b/lora", "there is no backbone 'qwen2.5-math-1.6b'; did you mean 'qwen2.5-math-1.5b'"),
        ("math/qwen2.5-math-1.5b/lira", "there is no method 'lira'; did you mean 'lora'"),
        ("nowhere.yaml", "there is no recipe file nowhere.yaml"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(ConfigError, match=message):
        read_recipe(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages: [sft]\nsft: {a: 1}\nsft: {b: 2}\n", "'sft' appears twice"),
        ("stages: sft\n", "stages must be a list, found 'sft'"),
        ("stagse: [sft]\n", "'stagse' is .* expected a block of options; did you mean 'stages'"),
        ("[]\n", "expected keys and values, found list"),
        ("stages: [sft, sft]\n", "stands there twice"),
        ("stages: [{x/../../../y: sft}]\n", "a stage is called 'x/../../../y'"),
        ("stages: [{..: sft}]\n", "a stage is called '..'"),
        ("stages: [calibrate]\ncalibrate: {adapter: '{sft}'}\n", r"refers to \{sft\}, but before it there is nothing"),
        ("stages: [push]\n", "'push' is no stage"),
        ("stages: [stf]\n", "'stf' is no stage; did you mean 'sft'"),
        ("stages: [{a: sft, b: sft}]\n", "is no stage"),
        ("stages: [{data: sft}]\n", "a stage is called 'data'"),
        ("stages: [sft]\nsfd: {rank: 3}\n", "there is no stage 'sfd'; did you mean 'sft'"),
        ("stages: [sft]\nsft: {out: ../x}\n", "follows from --out"),
        ("domain: math\nmethod: lora\n", "give domain, backbone and method together"),
        ("sft: {rank: 3}\n", "expected domain, backbone and method, or stages"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, message):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_recipe(str(path)).placed("x")
    assert "own.yaml" in str(caught.value)


def test_a_recipe_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    named = "domain: math\nbackbone: qwen2.5-math-1.5b\nmethod: scale\n"
    path.write_text(f"{named}model: me/mine\nsft: {{rank: 64}}\ntitle: wide\n")
    recipe = read_recipe(str(path))
    assert recipe.title == "wide"
    assert recipe.stage("sft").values["rank"] == 64
    assert recipe.base == "me/mine"
    for option in ("rank", "model"):
        assert recipe.stage("sft").marks[option] == "yours: mine.yaml", option
    assert recipe.stage("calibrate").values == read_recipe(SCALE).stage("calibrate").values


def test_the_files_are_data_of_the_package():
    for place in read_mapping(HERE / "places.yaml"):
        assert all(part in files(kind) for kind, part in zip(KINDS, place.split("/"), strict=False)), place
    assert {path.name for path in HERE.glob("*.yaml")} == {"common.yaml", "places.yaml"}
    for path in HERE.rglob("*.yaml"):
        assert json.dumps(yaml.safe_load(path.read_text())), path
    for recipe in (read_recipe(name) for name in NAMES if "/llama" in name):
        for stage in recipe.stages:
            assert "chat_template" not in stage.values or Path(stage.values["chat_template"]).is_file()
