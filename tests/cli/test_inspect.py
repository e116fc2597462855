"""What `loragate inspect` counts of a base, whatever its linear layers are and whatever the adapter puts over them."""

import pytest
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from loragate.analysis.inspection import inspect_adapter
from loragate.errors import ConfigError
from tiny import tiny_adapter, tiny_base


def inspected(folder, model):
    model.get_base_model().config.save_pretrained(folder / "base")
    model.peft_config["default"].base_model_name_or_path = str(folder / "base")
    model.save_pretrained(folder / "adapter")
    return inspect_adapter(str(folder / "adapter"))


def test_transposed_linear_layers_are_counted(tmp_path):
    """GPT-2 keeps its linear layers as Conv1D."""
    base = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    total = sum(parameter.numel() for parameter in base.parameters())
    model = get_peft_model(
        base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    )
    found = inspected(tmp_path, model)
    body, head, gates, lora = 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128), 100 * 32, 2 * 33, 2 * 4 * 128
    passes = 4 * body + 3 * 2 * 4 * 32 * 2048 + 4 * lora  # forward and activation backward of the body
    step = passes + 4 * gates + 0.75 * (2 * head + 2 * 100 * 32)
    assert found["base_parameters"] == total
    assert found["cost"]["gate_parameters"] == gates
    assert found["cost"]["tflop_per_million_tokens"] == pytest.approx(step / 1e6)
    assert found["cost"]["ratio_to_lora_step"] == pytest.approx(step / (passes + 2 * lora + 0.75 * 4 * head))


@pytest.mark.parametrize(
    "beside", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["embed_tokens", "lm_head"]}]
)
def test_a_head_under_lora_and_whole_copies_are_not_the_base(tmp_path, beside):
    plain = inspected(tmp_path / "plain", tiny_adapter(target_modules=["q_proj"]))
    more = inspected(tmp_path / "more", tiny_adapter(**{"target_modules": ["q_proj"], **beside}))
    assert more["base_parameters"] == plain["base_parameters"] == sum(p.numel() for p in tiny_base().parameters())
    assert more["cost"] == plain["cost"]


def test_an_adapter_of_another_base_is_refused(tmp_path):
    inspected(tmp_path, tiny_adapter())
    other = tiny_base().config
    other.intermediate_size *= 2
    other.save_pretrained(tmp_path / "other")
    message = r"adapter was not trained on .*other: its .*lora_[AB]\.weight has the shape .* and here it would be"
    with pytest.raises(ConfigError, match=message):
        inspect_adapter(str(tmp_path / "adapter"), str(tmp_path / "other"))
