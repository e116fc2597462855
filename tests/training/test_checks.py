"""What is checked before Stage II: that the base is a causal language model, and that the gates start at the adapter."""

from dataclasses import replace

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model

import loragate as lg
from loragate.errors import ConfigError, GateError, TrainingError
from loragate.gates import Parity
from loragate.training import GateTrainingSettings
from loragate.training.checks import check_parity, check_start
from tiny import tiny_adapter, tiny_base, tiny_rows

T5 = {"vocab_size": 160, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
BASES = {
    "no output head": lambda: tf.Qwen2ForSequenceClassification(tiny_base().config),
    "an encoder and a decoder": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5, decoder_start_token_id=0)),
}


@pytest.mark.parametrize("what", BASES)
def test_other_models_are_refused_before_gates_are_attached(what, tokenizer):
    torch.manual_seed(0)
    model = get_peft_model(BASES[what](), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    with pytest.raises(TrainingError, match=rf"causal language models.*{what}.*a loop of your own"):
        lg.train_gates(model, tokenizer, tiny_rows(4), lg.GateConfig(-1, 2))
    assert not any("lora_gate" in name for name, _ in model.named_modules())


@pytest.mark.parametrize("granularity", ["token", "module", "global"])
def test_gates_that_no_gradient_would_move_are_refused(granularity, tokenizer):
    model, flat = tiny_adapter(), lg.GateConfig(-3, 1, init_scale=0, granularity=granularity)
    with pytest.raises(ConfigError, match=r"init_scale=0 with an upper bound of 1 .*set init_scale above 0"):
        lg.train_gates(model, tokenizer, tiny_rows(4), flat)
    assert not any("lora_gate" in name for name, _ in model.named_modules())
    drawn = GateTrainingSettings(objective="random", random_scale=0.3)
    assert lg.train_gates(model, tokenizer, tiny_rows(4), flat, drawn).steps == 0
    for moved in (replace(flat, upper=2), replace(flat, init_scale=1e-6)):
        check_start(moved, "entropy")


def test_parity_that_is_not_a_number_is_refused():
    nan = float("nan")
    for broken in (Parity(nan, 0, 0, 1, 1, 1, 0), Parity(0, nan, 0, 1, 1, 1, 0), Parity(0, 0, nan, 1, 1, 1, 0)):
        for dtype in (torch.float32, torch.bfloat16):
            with pytest.raises((GateError, TrainingError)):
                check_parity(broken, dtype)
    with pytest.raises(TrainingError, match="λ differs"):
        check_parity(Parity(0, 0, 0, 1, 1, 1, nan), torch.bfloat16)


def test_half_precision_starts_where_lambda_does():
    """Through thirty layers of bf16 a difference of 6e-5 in λ grows to a thirtieth of the logits, as on a real model."""
    real = Parity(initial=1.44, at_one=0, at_zero=0, delta=27.4, logit_scale=45.25, tokens=412, apart=6e-5)
    check_parity(real, torch.bfloat16)
    with pytest.raises(TrainingError, match=r"logits differ by 1\.4 \(limit 0\.27\)"):
        check_parity(real, torch.float32)
    with pytest.raises(TrainingError, match=r"λ differs from 1 by 0\.02 \(limit 0\.01\)"):
        check_parity(replace(real, initial=0.1, apart=0.02), torch.bfloat16)
