"""What is checked before Stage II: that the base is a causal language model."""

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model

import loragate as lg
from loragate.errors import TrainingError
from tiny import tiny_base, tiny_rows

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
        lg.calibrate(model, tokenizer, tiny_rows(4), lg.GateConfig(-1, 2))
    assert not any("lora_gate" in name for name, _ in model.named_modules())
