"""Stage II through the trainer: the plain loop's trajectory, guards, logs, resume, interruption."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model

import loragate as lg
from loragate.data import Collator, encode_rows, load_rows
from loragate.errors import ConfigError, DivergenceError, GateError, LoragateError, TrainingError
from loragate.files import file_lock
from loragate.gates import Parity, measure_parity, weights_checksum
from loragate.training import GateTrainingSettings, gate_training, training_rows
from loragate.training.gate_training import check_parity, check_start
from loragate.training.model_state import without_dropout
from loragate.training.reference import reference_loop, response_entropies
from tiny import gate_values, logits, same, tiny_adapter, tiny_base, tiny_rows

CONFIG = lg.GateConfig(-3, 2)
SETTINGS = GateTrainingSettings(
    batch_size=8, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, k=20, max_length=64, max_rows=0
)


def losses(result):
    return [record["loss"] for record in result.history if "loss" in record]


@pytest.mark.parametrize("granularity", ["token", "global"])
def test_the_trainer_follows_the_plain_loop(tokenizer, rows, granularity):
    config = lg.GateConfig(-3, 2, granularity=granularity)
    trained = tiny_adapter()
    result = lg.train_gates(trained, tokenizer, rows, config, SETTINGS)
    plain = lg.attach_gates(tiny_adapter(), config)
    _, encoded = training_rows(load_rows(rows), tokenizer, SETTINGS)
    expected = reference_loop(plain, list(encoded), SETTINGS, tokenizer.pad_token_id)
    assert len(expected) == 3
    assert losses(result) == pytest.approx(expected, rel=1e-6)
    for name, parameter in gate_values(trained).items():
        torch.testing.assert_close(parameter, gate_values(plain)[name], rtol=1e-4, atol=1e-7)
    assert gate_values(plain).keys() == gate_values(trained).keys()


def test_heldout_rows_are_measured_and_change_nothing(tokenizer, rows):
    heldout = encode_rows(load_rows(tiny_rows(70, seed=9)), tokenizer, max_length=64)
    plain, measured = tiny_adapter(), tiny_adapter()
    before = lg.train_gates(plain, tokenizer, rows, CONFIG, SETTINGS)
    result = lg.train_gates(measured, tokenizer, rows, CONFIG, SETTINGS, heldout=heldout)
    assert "heldout" not in before.evidence()["training"]
    assert same(gate_values(measured), gate_values(plain))
    assert (result.entropy_before, result.entropy_after) == (before.entropy_before, before.entropy_after)
    found, collator = result.evidence()["training"]["heldout"], Collator(tokenizer.pad_token_id)
    assert found["rows"] == 70
    with torch.no_grad():
        entropies = torch.cat([response_entropies(measured, collator([row]), SETTINGS.k) for row in heldout])
    assert found["entropy_after"] == pytest.approx(float(entropies.mean()), rel=1e-4)
    assert found["entropy_before"] not in (found["entropy_after"], result.entropy_before)
    assert 0 < result.training_seconds < result.seconds


def test_entropy_falls_and_only_gates_change(tokenizer):
    model = tiny_adapter()
    before = weights_checksum(model.named_parameters())
    settings = replace(
        SETTINGS, batch_size=16, per_device_train_batch_size=16, learning_rate=0.05, max_steps=25, logging_steps=5
    )
    result = lg.train_gates(model, tokenizer, tiny_rows(16), CONFIG, settings)
    assert result.entropy_after < result.entropy_before - 0.005
    lg.detach_gates(model)
    assert weights_checksum(model.named_parameters()) == before
    assert (result.steps, result.parameters) == (25, 14 * 33 + 2 * 16)
    first, record = result.history[0], result.history[-2]
    assert (first["step"], first["gate_mean"]) == (1, pytest.approx(1, abs=1e-3)), (
        "where the gates begin: at the adapter"
    )
    shares = {"gate_below_zero", "gate_zero_to_one", "gate_above_one"}
    assert {"loss", "topk_entropy", "grad_norm", "gate_saturated"} | shares <= set(record)
    assert record["loss"] == pytest.approx(record["topk_entropy"], rel=1e-4)
    assert sum(result.gates_total[key.removeprefix("gate_")] for key in shares) == pytest.approx(1)
    assert result.parity.at_one == result.parity.at_zero == 0
    assert 0 < result.parity.initial < 1e-3


def test_a_changed_frozen_weight_is_noticed(tokenizer, rows):
    model = tiny_adapter()

    def sabotage(report):
        with torch.no_grad():
            model.base_model.model.model.norm.weight[0] += 1e-3

    with pytest.raises(TrainingError, match="frozen weight"):
        lg.train_gates(model, tokenizer, rows, CONFIG, SETTINGS, on_step=sabotage)
    with pytest.raises(GateError, match="carries no gates"):
        lg.gate_parameters(model)


def test_parity_failure_stops_before_training(tokenizer, rows):
    steps = []
    with pytest.raises(TrainingError, match="does not start at the adapter"):
        lg.train_gates(
            tiny_adapter(), tokenizer, rows, lg.GateConfig(-6, 3, init_scale=0.5), SETTINGS, on_step=steps.append
        )
    assert steps == []


def test_a_dead_first_gradient_is_refused(tokenizer, rows, monkeypatch):
    monkeypatch.setattr(gate_training.GateEntropy, "loss", lambda self, stats, context=None: stats.topk_entropy * 0.0)
    with pytest.raises(TrainingError, match="exactly zero"):
        lg.train_gates(tiny_adapter(), tokenizer, rows, CONFIG, SETTINGS)


def test_a_loss_that_is_not_finite_names_the_row(tokenizer, rows, monkeypatch):
    seen = []

    def poisoned(self, stats, context=None):
        seen.append(1)
        factor = torch.ones_like(stats.topk_entropy)
        if len(seen) == 4:
            factor[2] = float("nan")
        return stats.topk_entropy * factor

    monkeypatch.setattr(gate_training.GateEntropy, "loss", poisoned)
    model = tiny_adapter()
    with pytest.raises(TrainingError, match=r"not finite at step 2: row \d+\. Nothing was updated"):
        lg.train_gates(model, tokenizer, rows, CONFIG, SETTINGS)


@pytest.fixture
def skipping(monkeypatch):
    """fp16 needs CUDA; here accelerate's optimiser skips the steps that a list names, as loss scaling makes it do."""
    from accelerate.optimizer import AcceleratedOptimizer

    from loragate.training import callbacks, trainer

    step = AcceleratedOptimizer.step

    def prepare(skipped, longest=25):
        said = iter(skipped)

        def sometimes(self, closure=None):
            self._is_overflow = next(said)
            if not self._is_overflow:
                step(self, closure)

        monkeypatch.setattr(AcceleratedOptimizer, "step", sometimes)
        monkeypatch.setattr(callbacks.SkippedStepCheck, "MAX_CONSECUTIVE_SKIPS", longest)
        monkeypatch.setattr(
            trainer, "GradientCheck", lambda trained, objective, uses_loss_scaling: callbacks.SkippedStepCheck()
        )
        return replace(SETTINGS, per_device_train_batch_size=8, max_steps=len(skipped), save_steps=2)

    return prepare


@pytest.mark.parametrize(
    ("skipped", "told"),
    [
        ([True] * 5, "skipped all 5 steps because their gradients were not finite, so nothing was trained"),
        (
            [True, False, True, True, True],
            "not finite in the last 3 steps, up to step 5, and fp16's loss scaling skipped",
        ),
        ([True, True, False, True, True], None),
    ],
)
def test_steps_that_loss_scaling_skips_do_not_pass_in_silence(tokenizer, skipping, skipped, told):
    settings = skipping(skipped, 25 if all(skipped) else 3)
    if told is None:
        assert lg.train_gates(tiny_adapter(), tokenizer, tiny_rows(40), CONFIG, settings).steps == 5
        return
    with pytest.raises(DivergenceError, match=told):
        lg.train_gates(tiny_adapter(), tokenizer, tiny_rows(40), CONFIG, settings)


def test_bf16_keeps_gates_in_fp32_and_serves_a_second_training_of_one_model(tokenizer, rows):
    """A choice trains its ranges one after the other on the same model."""
    settings, model, runs = replace(SETTINGS, per_device_train_batch_size=8), tiny_adapter(), []
    for precision in ("bf16", "bf16", "fp32"):
        result = lg.train_gates(model, tokenizer, rows, CONFIG, replace(settings, precision=precision))
        assert {parameter.dtype for parameter in lg.gate_parameters(model).values()} == {torch.float32}
        runs.append((losses(result), gate_values(model)))
        lg.detach_gates(model)
    (first, gates), (second, again), (whole, _) = runs
    assert first == second
    assert same(gates, again)
    assert first != whole
    assert first == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize(
    ("lora", "targets"),
    [
        ({}, ["q_proj", "down_proj"]),
        ({"target_modules": ["q_proj", "up_proj", "embed_tokens"]}, None),
        ({"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["lm_head"]}, None),
        ({"lora_dropout": 0.3}, ["q_proj"]),
    ],
)
def test_partly_gated_adapters_calibrate(tokenizer, rows, lora, targets, token_ids):
    model = tiny_adapter(base=tiny_base(tie_word_embeddings=False), **lora)
    plain = logits(model, token_ids)
    result = lg.train_gates(model, tokenizer, rows, lg.GateConfig(-3, 2, target_modules=targets), SETTINGS)
    assert result.parity.at_zero == 0
    assert result.parity.at_one == 0
    with torch.no_grad(), lg.gate_override(model, constant=1.0):
        assert torch.equal(model(token_ids).logits, plain)
    with model.disable_adapter():
        pass
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_gate" in name or "modules_to_save" in name for name in names), names


def test_an_adapter_on_the_output_head_is_refused(tokenizer, rows):
    model = tiny_adapter(base=tiny_base(tie_word_embeddings=False), target_modules=["q_proj", "lm_head"])
    with pytest.raises(TrainingError, match="LoRA delta on the output head"):
        lg.train_gates(model, tokenizer, rows, CONFIG, SETTINGS)


def test_dropout_is_off_while_gates_train_and_back_afterwards(tokenizer, rows):
    model = tiny_adapter(lora_dropout=0.4)
    dropouts = [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    seen = []
    lg.train_gates(
        model, tokenizer, rows, CONFIG, SETTINGS, on_step=lambda report: seen.append({module.p for module in dropouts})
    )
    assert seen
    assert all(values == {0.0} for values in seen)
    assert {module.p for module in dropouts} == {0.4}


@pytest.mark.parametrize("family", ["opt", "gpt_bigcode", "falcon", "bloom", "biogpt", "starcoder2"])
def test_dropout_is_off_wherever_a_family_keeps_it(family):
    small = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    narrow = {"ffn_dim": 48, "intermediate_size": 48, "word_embed_proj_dim": 32, "num_key_value_heads": 2}
    drop = ("dropout", "hidden_dropout", "attention_dropout", "attn_pdrop", "resid_pdrop", "hidden_dropout_prob")
    drop += ("residual_dropout", "embedding_dropout", "layerdrop")
    config = tf.AutoConfig.for_model(family, **small, **narrow, **dict.fromkeys(drop, 0.3))
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).train()
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, model(ids).logits)
        with without_dropout(model):
            assert torch.equal(model(ids).logits, model(ids).logits)
        assert not torch.equal(model(ids).logits, model(ids).logits), "it is back"


def test_resume_needs_the_same_tokens_and_the_same_weights(tokenizer, rows, tmp_path):
    settings = replace(SETTINGS, per_device_train_batch_size=8, save_steps=1)
    _, own = training_rows(load_rows(rows), tokenizer, settings)
    run = partial(lg.train_gates, tokenizer=tokenizer, rows=rows, settings=settings, run_folder=tmp_path)
    run(tiny_adapter(), config=CONFIG, encoded=own)
    _, other = training_rows(load_rows(tiny_rows(24, seed=5)), tokenizer, settings)
    with pytest.raises(TrainingError, match="begun with tokens = "):
        run(tiny_adapter(), config=CONFIG, resume=True, encoded=other)
    with pytest.raises(TrainingError, match=r"gate.lower = -3, now it is -1"):
        run(tiny_adapter(), config=lg.GateConfig(-1, 2), resume=True, encoded=own)
    changed = tiny_adapter()
    with torch.no_grad():
        changed.base_model.model.model.norm.weight.mul_(1.5)
    with pytest.raises(TrainingError, match="begun with frozen_weights = "):
        run(changed, config=CONFIG, resume=True, encoded=own)


def test_one_run_at_a_time_writes_to_a_folder(tokenizer, rows, tmp_path):
    with file_lock(tmp_path / "lock", 0.0, "taken"), pytest.raises(LoragateError, match="another run is writing to"):
        lg.train_gates(tiny_adapter(), tokenizer, rows, CONFIG, SETTINGS, run_folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_parity_says_how_far_lambda_is_from_one(tokenizer, rows):
    model = lg.attach_gates(tiny_adapter(), lg.GateConfig(-6, 3))
    ids = torch.arange(5, 25).reshape(2, 10)
    values = torch.tensor([0.5, -0.25])  # biases of two modules; the others' λ is 1
    with torch.no_grad():
        for name, parameter in lg.gate_parameters(model).items():
            parameter.zero_()
            if name.endswith(".bias") and len(values):
                parameter.fill_(values[0])
                values = values[1:]
    count = len(list(lg.gate_parameters(model))) // 2
    lam = [2 * math.tanh(0.5), -7 * math.tanh(0.25)]
    assert measure_parity(model, ids).apart == pytest.approx(math.sqrt(sum(x * x for x in lam) / count), rel=1e-5)


def test_an_untrained_adapter_is_refused(tokenizer, rows):
    with pytest.raises(GateError, match="nothing to gate"):
        lg.train_gates(tiny_adapter(init_lora_weights=True), tokenizer, rows, CONFIG, SETTINGS)


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
    with pytest.raises(TrainingError, match=rf"^adapters are trained on causal language models.*{what}"):
        lg.train_adapter(BASES[what](), tokenizer, tiny_rows(4))


@pytest.mark.parametrize("granularity", ["token", "module", "global"])
def test_gates_that_no_gradient_would_move_are_refused(granularity, tokenizer):
    model, flat = tiny_adapter(), lg.GateConfig(-3, 1, init_scale=0, granularity=granularity)
    with pytest.raises(ConfigError, match=r"init_scale=0 with an upper bound of 1 .*set init_scale above 0"):
        lg.train_gates(model, tokenizer, tiny_rows(4), flat)
    assert not any("lora_gate" in name for name, _ in model.named_modules())
    for moved in (replace(flat, upper=2), replace(flat, init_scale=1e-6)):
        check_start(moved)


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
