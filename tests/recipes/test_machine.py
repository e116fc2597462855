"""What the trainings of recipes need, and which settings of memory differ between backbones."""

from loragate.recipes import every_name, read_recipe
from loragate.recipes.files import files
from loragate.recipes.ready import needs

SCALE = "math/qwen2.5-math-1.5b/scale"


def test_the_controls_of_a_row_are_a_recipe_of_their_own():
    for name in every_name():
        for stage in read_recipe(name).stages:
            if stage.command == "eval":
                cheap = name.endswith("/controls") and stage.name == "eval"
                assert stage.values["controls"] == ("cheap" if cheap else "alone"), name


def test_what_is_estimated_is_what_the_recipe_sets(monkeypatch):
    monkeypatch.setattr("loragate.recipes.ready.estimate", lambda config, **asked: (config, asked))
    (_, sft), (config, gating) = (needs(read_recipe(SCALE))[name] for name in ("sft", "calibrate"))
    assert (config.hidden_size, config.vocab_size) == (1536, 151_936)
    assert (sft["stage"], sft["adapter"], sft["gradient_checkpointing"]) == ("sft", 16, False)
    assert (gating["stage"], gating["sequence"], gating["rows"]) == ("calibrate", 4096, 8)
    assert (gating["gradient_checkpointing"], gating["base"], gating["autocast"]) == (True, "bfloat16", True)


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
