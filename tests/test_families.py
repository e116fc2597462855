"""The whole way through on tiny random models of many families: parity, calibration, artifact, generation."""

import pytest
import torch
import transformers as tf

import loragate as lg
from loragate.losses import StatisticsRequest, statistics_of_logits
from loragate.training import GateTrainingSettings
from loragate.training.model_state import statistics_forward
from tiny import VOCABULARY, logits, tiny_adapter, tiny_rows

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
    "initializer_range": 0.2,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
FAMILIES = {
    "qwen2": lambda: tf.Qwen2Config(**GROUPED),
    "qwen3": lambda: tf.Qwen3Config(**GROUPED, head_dim=8),
    "llama": lambda: tf.LlamaConfig(**GROUPED),
    "mistral": lambda: tf.MistralConfig(**GROUPED, sliding_window=8),
    "gemma": lambda: tf.GemmaConfig(**GROUPED, head_dim=8),
    "gemma2": lambda: tf.Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=5.0),
    "phi3": lambda: tf.Phi3Config(**GROUPED),
    "olmo2": lambda: tf.Olmo2Config(**GROUPED),
    "granite": lambda: tf.GraniteConfig(**GROUPED, logits_scaling=4.0),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**SHAPE),
    "cohere": lambda: tf.CohereConfig(**GROUPED, logit_scale=0.25),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        eos_token_id=1,
        bos_token_id=1,
        initializer_range=0.2,
    ),
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(
        **GROUPED, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    ),
}
SETTINGS = GateTrainingSettings(
    batch_size=8, per_device_train_batch_size=4, max_steps=2, learning_rate=0.05, logging_steps=1, k=20, max_length=64
)


def family_base(name):
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(FAMILIES[name]()).eval()


# an ordinary one, one that caps its logits, one of transposed layers, one of experts
QUICK = ("llama", "gemma2", "gpt2", "qwen2_moe")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow("families")) for name in FAMILIES]
)
def test_family(name, tokenizer, token_ids, tmp_path):
    base = family_base(name)
    base.save_pretrained(tmp_path / "base")
    model = tiny_adapter(base=base)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    plain = logits(model, token_ids)
    lg.attach_gates(model, lg.GateConfig(-3, 2))

    # the fused head reads this family's head rightly
    labels = token_ids.clone()
    labels[:, :3] = -100
    with statistics_forward(model) as fused, torch.no_grad():
        stats = model(input_ids=token_ids, labels=labels, statistics=StatisticsRequest(20))
    assert fused, "every family here has one frozen linear head"
    expected = statistics_of_logits(logits(model, token_ids)[:, :-1], labels[:, 1:], 20)
    for field in ("log_prob", "entropy", "topk_entropy"):
        torch.testing.assert_close(getattr(stats, field), getattr(expected, field), rtol=2e-4, atol=2e-5)
    lg.detach_gates(model)

    # two calibration steps with measured parity, saved and loaded
    result = lg.train_gates(model, tokenizer, tiny_rows(16), lg.GateConfig(-3, 2), SETTINGS)
    assert result.steps == 2
    assert result.parity.at_one == 0
    assert result.parity.at_zero == 0
    assert result.parity.initial < 1e-3
    assert result.parity.delta > 1e-2
    gated = logits(model, token_ids)
    assert not torch.equal(gated, plain)
    lg.save_gates(model, tmp_path / "gated", evidence=result.evidence())
    again = lg.load_gated(tmp_path / "gated")
    torch.testing.assert_close(logits(again, token_ids), gated, rtol=1e-5, atol=1e-5)

    # generation with and without cache
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(token_ids)
    cached = again.generate(input_ids=token_ids, attention_mask=mask, use_cache=True, **options)
    assert torch.equal(cached, again.generate(input_ids=token_ids, attention_mask=mask, use_cache=False, **options))
    torch.testing.assert_close(
        cached, model.generate(input_ids=token_ids, attention_mask=mask, use_cache=True, **options), rtol=0, atol=0
    )


def test_fused_experts_get_a_verdict():
    base = family_base("qwen2_moe")
    model = tiny_adapter(base=base, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    verdicts = {verdict.status: verdict for verdict in lg.examine_adapter(model, "default")}
    assert verdicts["gate"].path.endswith("q_proj")
    assert "fused expert" in verdicts["leave"].reason
    lg.attach_gates(model, lg.GateConfig(-3, 2))
    assert len(lg.gate_parameters(model)) == 4
