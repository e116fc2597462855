"""Every recipe fits the machine that it names."""

import dataclasses
from types import SimpleNamespace

import pytest

from loragate.analysis.settings import Request
from loragate.errors import ConfigError
from loragate.recipes import Recipe, Stage, every_name, read_recipe
from loragate.recipes.files import files
from loragate.recipes.ready import needs

SCALE = "math/qwen2.5-math-1.5b/scale"


def test_the_controls_of_a_row_are_a_recipe_of_their_own():
    for name in every_name():
        for stage in read_recipe(name).stages:
            if stage.command == "eval":
                cheap = name.endswith("/controls") and stage.name == "eval"
                assert stage.values["controls"] == ("cheap" if cheap else "alone"), name


@pytest.mark.slow("families")
@pytest.mark.parametrize("backbone", list(files("backbone")))
def test_every_training_stage_fits_the_machine_that_is_named(backbone):
    """At full length: every row of a pass has as many tokens as the limit."""
    for method in ("scale", "scale-auto") if "32b" in backbone else ("scale",):  # chosen on evidence in one process
        for need in needs(read_recipe(f"math/{backbone}/{method}")):
            (option,) = need.plan.options
            assert option.fits, f"{backbone} {method} {need.stage}: {option.gib:.1f} GiB"


@pytest.fixture
def asked(monkeypatch):
    """{stage: need} of a recipe, with what the planner would be asked in place of a plan."""

    def make_plan(request, config):
        least = SimpleNamespace(gib=1.0, seconds=3.6 * request.rows, way=SimpleNamespace(gpus=request.gpus))
        gpu = SimpleNamespace(name=request.gpu_memory)
        return SimpleNamespace(request=request, config=config, least=least, chosen=least, gpu=gpu)

    monkeypatch.setattr("loragate.recipes.ready.make_plan", make_plan)
    return lambda recipe: {need.stage: need for need in needs(recipe)}


def test_what_is_planned_is_what_the_recipe_sets(asked):
    scale, large = (asked(read_recipe(name)) for name in (SCALE, "code/qwen2.5-32b/scale"))
    request, config = scale["calibrate"].plan.request, scale["calibrate"].plan.config
    assert (request.stage, request.seq, request.micro_batch, request.batch) == ("calibrate", 4096, 8, 128)
    assert (request.gradient_checkpointing, request.gpu_memory, request.rows) == ("yes", "h100", 20_000)
    assert (request.strategy, config.hidden_size, config.vocab_size) == ("single", 1536, 151_936)
    assert scale["sft"].plan.request.gradient_checkpointing == "no"
    request = large["sft"].plan.request
    assert (request.strategy, request.gpus, large["sft"].plan.config.num_hidden_layers) == ("fsdp2", 8, 64)
    assert large["sft"].note == "8 × h100"


def test_what_every_stage_needs(asked):
    """Each stage that trains stands there, so that nothing is missing from the hours."""
    scale, grid, mask = (asked(read_recipe(f"math/qwen2.5-math-1.5b/{name}")) for name in ("scale", "grid", "mask"))
    assert [(name, need.hours) for name, need in scale.items()] == [("sft", 100), ("calibrate", 20)]
    assert grid["sweep"].hours == 42 * 20
    assert grid["sweep"].note == "1 × h100, 42 trials"
    assert (mask["reference"].hours, mask["mask"].hours) == (10, 100)


def test_what_a_recipe_of_ones_own_leaves_open_is_planned_with_defaults(asked, monkeypatch):
    monkeypatch.setattr("loragate.recipes.ready._config", lambda recipe: None)
    mine = Recipe("mine", "", (Stage("sft", "sft", {"model": "mine", "data": "rows.jsonl", "rank": 8}),))
    request = asked(mine)["sft"].plan.request
    assert (request.rank, request.seq, request.strategy, request.quantization) == (8, Request.seq, "single", "none")


def test_a_machine_that_there_is_not():
    with pytest.raises(ConfigError, match="h1000"):
        needs(dataclasses.replace(read_recipe(SCALE), machine="h1000"))


def test_memory_settings_alone_differ_between_backbones():
    memory = {"per_device_train_batch_size", "gradient_checkpointing", "strategy", "processes"}

    def settings(name):
        stages = read_recipe(f"{name}/scale").stages
        free = {*memory, "model", "chat_template"}
        kept = [{key: value for key, value in stage.values.items() if key not in free} for stage in stages]
        return kept, [{key: stage.values.get(key) for key in memory} for stage in stages if stage.command != "eval"]

    for backbone in list(files("backbone")):
        assert settings(f"code/{backbone}")[0] == settings("code/qwen2.5-math-1.5b")[0], backbone
        assert settings(f"code/{backbone}")[1] == settings(f"math/{backbone}")[1], "one plan holds for both domains"
