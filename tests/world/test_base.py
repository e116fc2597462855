import pytest
import torch

from loragate.world.base import SHIPPED_BASE, load_base
from loragate.world.problems import draw_problems, draw_retention_items, is_correct_response


@pytest.fixture(scope="module")
def shipped():
    return load_base()


@torch.inference_mode()
def greedy_share(model, tokenizer, asked):
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p.prompt}], tokenize=False, add_generation_prompt=True
        )
        for p in asked
    ]
    encoded = tokenizer(prompts, return_tensors="pt", padding=True)
    out = model.generate(**encoded, do_sample=False, max_new_tokens=48)[:, encoded["input_ids"].shape[1] :]
    verdicts = [
        is_correct_response(problem, text, bool((ids == tokenizer.eos_token_id).any()))
        for problem, text, ids in zip(asked, tokenizer.batch_decode(out, skip_special_tokens=True), out, strict=True)
    ]
    return sum(verdicts) / len(verdicts)


def test_shipped_base_is_small_and_of_the_promised_shape(shipped):
    model, tokenizer = shipped
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.num_parameters() == 157_504
    assert (SHIPPED_BASE / "model.safetensors").stat().st_size < 2_000_000
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 1
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 0


def test_shipped_base_works_problems_out_greedily(shipped):
    assert greedy_share(*shipped, draw_problems("dev", 40)) >= 0.9


def test_shipped_base_has_the_retention_skills(shipped):
    assert greedy_share(*shipped, draw_retention_items("dev", 45)) >= 0.9
