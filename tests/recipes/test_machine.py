"""Every recipe fits the machine that it names, and says how many answers it samples."""

import dataclasses
from types import SimpleNamespace

import pytest

from loragate.errors import ConfigError
from loragate.recipes import Library, every_name, read_recipe
from loragate.recipes.machine import disk, needs, plans, tight

LIBRARY = Library()
SCALE = "math/qwen2.5-math-1.5b/scale"
MATH = 16 * (500 + 272 + 674 + 30 + 40)


def test_the_controls_of_a_row_are_a_recipe_of_their_own():
    for name in every_name(LIBRARY, seeds=False):
        for stage in read_recipe(name, LIBRARY).stages:
            if stage.command == "eval":
                cheap = name.endswith("/controls") and stage.name == "eval"
                assert stage.values["controls"] == ("cheap" if cheap else "alone"), name


@pytest.mark.slow("families")
@pytest.mark.parametrize("backbone", list(LIBRARY.files("backbone")))
def test_every_training_stage_fits_the_machine_that_is_named(backbone):
    """At full length: every row of a pass has as many tokens as the limit."""
    for method in ("scale", "scale-auto") if "32b" in backbone else ("scale",):  # chosen on evidence in one process
        recipe = read_recipe(f"math/{backbone}/{method}", LIBRARY)
        for stage, found in plans(recipe).items():
            (option,) = found.options
            assert option.fits, f"{recipe.name} {stage}: {option.gib:.1f} GiB"


def test_a_training_that_this_gpu_may_not_hold_is_named(monkeypatch):
    def planned(request, config):
        fits = float(request.gpu_memory) > 40
        option = SimpleNamespace(way=SimpleNamespace(gpus=1), gib=40.0, seconds=1.0)
        gpu = SimpleNamespace(name="own")
        return SimpleNamespace(chosen=option if fits else None, least=option, gpu=gpu)

    monkeypatch.setattr("loragate.recipes.machine.make_plan", planned)
    assert tight(read_recipe(SCALE, LIBRARY), 80.0) == {}
    found = tight(read_recipe(SCALE, LIBRARY), 24.0)
    assert list(found) == ["sft", "calibrate"]
    assert "40 GiB of a GPU, and there are 24" in found["sft"]


def test_what_is_planned_is_what_the_recipe_sets(monkeypatch):
    monkeypatch.setattr("loragate.recipes.machine.make_plan", lambda request, config: (request, config))
    asked = {name: plans(read_recipe(name, LIBRARY)) for name in (SCALE, "code/qwen2.5-32b/scale", SCALE + "-auto")}
    request, config = asked[SCALE]["calibrate"]
    assert (request.stage, request.seq, request.micro_batch, request.batch) == ("calibrate", 4096, 8, 128)
    assert (request.gradient_checkpointing, request.gpu_memory, request.rows) == ("yes", "h100", 20_000)
    assert (request.strategy, config.hidden_size, config.vocab_size) == ("single", 1536, 151_936)
    assert asked[SCALE]["sft"][0].gradient_checkpointing == "no"
    request, config = asked["code/qwen2.5-32b/scale"]["sft"]
    assert (request.strategy, request.gpus, config.num_hidden_layers) == ("fsdp2", 8, 64)


def test_room_on_the_disk_that_a_run_needs():
    def gib(method):
        run, hub = disk(read_recipe(f"math/qwen2.5-math-1.5b/{method}", LIBRARY))
        return run / 2**30, hub / 2**30

    lora, hub = gib("lora")
    assert hub == pytest.approx(1.5436e9 * 2 / 2**30 + 3, rel=0.01), "the base in bf16, and one data set"
    adapter = 4 * 18_464_768 / 2**30  # 28 layers of r = 16, fp32
    answers = 10 * 4096 * MATH / 2**30
    assert lora > 10 * adapter + answers, "the adapter, three checkpoints with two moments, the answers"
    assert lora < 10 * adapter + answers + 1
    assert gib("dora")[0] - lora == pytest.approx(1.5436e9 * 2 / 2**30, rel=0.01), "merged for vLLM"
    assert gib("grid")[0] > 42 * adapter, "each of the 42 cells is an artifact"


def test_a_machine_that_there_is_not():
    with pytest.raises(ConfigError, match="h1000"):
        plans(dataclasses.replace(read_recipe(SCALE, LIBRARY), machine="h1000"))


def test_memory_settings_alone_differ_between_backbones():
    memory = {"micro_batch_size", "gradient_checkpointing", "strategy", "processes"}

    def settings(name):
        stages = read_recipe(f"{name}/scale", LIBRARY).stages
        free = {*memory, "model", "chat_template"}
        kept = [{key: value for key, value in stage.values.items() if key not in free} for stage in stages]
        return kept, [{key: stage.values.get(key) for key in memory} for stage in stages if stage.command != "eval"]

    for backbone in list(LIBRARY.files("backbone")):
        assert settings(f"code/{backbone}")[0] == settings("code/qwen2.5-math-1.5b")[0], backbone
        assert settings(f"code/{backbone}")[1] == settings(f"math/{backbone}")[1], "one plan holds for both domains"


@pytest.fixture
def found(monkeypatch):
    """{stage: need} of a method of mathematics on a tiny base, without planning a training."""
    tiny = {"model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    tiny |= {"num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "bfloat16", "max_position_embeddings": 4096}
    monkeypatch.setattr("loragate.recipes.machine.make_plan", lambda request, config: request)
    monkeypatch.setattr("loragate.recipes.machine._training", lambda request: (1.0, request.rows / 1000, ""))

    def of(method):
        recipe = read_recipe(f"math/qwen2.5-math-1.5b/{method}", LIBRARY)
        recipe = dataclasses.replace(recipe, architecture=dict.fromkeys(recipe.architecture, tiny))
        return {need.stage: need for need in needs(recipe)}

    return of


def test_what_every_stage_needs(found):
    """Each stage stands there with what it does, so that nothing is missing from the hours."""
    scale, grid, mask, look = found("scale"), found("grid"), found("mask"), found("interventions")
    assert list(scale) == ["sft", "calibrate", "eval", "retention"]
    assert scale["eval"].note == f"{MATH:,} answers of at most 4096 tokens"
    # 12,032 of MMLU-Pro and 6,511 of BBH; OpenBookQA is scored by likelihood
    assert scale["retention"].note == "18,543 answers of at most 2048 tokens"
    assert (scale["sft"].hours, scale["calibrate"].hours) == (100, 20)
    assert grid["sweep"].hours == 42 * 20
    assert (mask["reference"].hours, mask["mask"].hours) == (10, 100)
    assert look["diagnose"].note.startswith(f"{6 * MATH:,} answers")
    assert "transformers" in found("delta-entropy")["diagnose"].note
    assert "transformers" not in look["diagnose"].note
    assert scale["eval"].hours is None, "what answers take depends on their lengths"


def test_a_row_is_answered_once_and_its_controls_are_not_asked_for_retention(found):
    assert MATH == 24_256
    for method in ("base", "lora", "gate-ce"):
        assert found(method)["eval"].note.startswith(f"{MATH:,} answers"), method
    controls = found("controls")
    # base, adapter, two lower temperatures and seven constants; greedy draws one answer a question
    assert controls["eval"].note.startswith(f"{11 * MATH + MATH // 16:,} answers")
    assert controls["retention"].note.startswith("18,543 answers")
