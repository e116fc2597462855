"""Stage I: the objectives train what they should, against transformers' own loss where it is the same."""

import pytest
import torch
from safetensors.torch import load_file

import loragate as lg
from loragate.data import Collator, encode_rows, load_rows
from loragate.errors import ConfigError, TrainingError
from loragate.models.peft_loading import load_peft
from loragate.training import FineTuningSettings
from loragate.training.settings import OBJECTIVES
from tiny import tiny_adapter, tiny_base, tiny_rows, write_adapter

MASKED = ("mask", "forgetting")


def settings(**options):
    usual = {
        "batch_size": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "max_length": 64,
    }
    return FineTuningSettings(**{**usual, "rank": 4, "alpha": 8, **options})


@pytest.mark.parametrize(
    ("objective", "dora"),
    [
        pytest.param(name, dora, marks=pytest.mark.slow("products") if dora and name != "sft" else ())
        for name in OBJECTIVES
        if name not in (*MASKED, "entropy")
        for dora in (False, True)
    ],
)
def test_every_objective_learns(tokenizer, objective, dora):
    # a random base gives every token less than ProFit's usual threshold
    options = {"threshold": 1e-4} if objective == "profit" else None
    chosen = settings(
        objective=objective, objective_options=options, dora=dora, max_steps=15, learning_rate=0.03, warmup_ratio=0.0
    )
    result = lg.train_adapter(tiny_base(), tokenizer, tiny_rows(8), chosen)
    nll = [record["nll"] for record in result.history if "nll" in record]
    assert nll[-1] < nll[0] - 1, nll
    moved = {name for name, parameter in result.model.named_parameters() if parameter.requires_grad}
    assert moved
    assert all("lora_" in name for name in moved)
    assert any("lora_magnitude_vector" in name for name in moved) == dora


def test_sft_equals_the_models_own_cross_entropy(tokenizer, rows):
    result = lg.train_adapter(tiny_base(), tokenizer, rows, settings(max_steps=1, batch_size=24))
    source = load_rows(rows).shuffled(42)
    encoded = encode_rows(source, tokenizer, max_length=64)
    batch = Collator(0)(list(encoded))
    with torch.no_grad():
        expected = tiny_base()(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]
        ).loss
    assert result.history[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_the_mask_objective_reads_the_keep_mask(tokenizer):
    rows = tiny_rows(8)
    plain = lg.train_adapter(tiny_base(), tokenizer, rows, settings(max_steps=1)).history[0]["loss"]
    tokens = [len(row["messages"][1]["content"].split()) + 1 for row in rows]
    kept = [{**row, "keep_mask": [1] * count} for row, count in zip(rows, tokens, strict=True)]
    dropped = [{**row, "keep_mask": [0] * count} for row, count in zip(rows, tokens, strict=True)]
    run = lambda data: lg.train_adapter(tiny_base(), tokenizer, data, settings(objective="mask", max_steps=1))  # noqa: E731
    assert run(kept).history[0]["loss"] == pytest.approx(plain, rel=1e-6)
    with pytest.raises(TrainingError, match=r"exactly zero up to step 1, .* objective 'mask' gives any token"):
        run(dropped)
    with pytest.raises(ConfigError, match="keep_mask"):
        run(rows)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("saved", [["norm"], ["embed_tokens", "lm_head"], ["mlp"]])
def test_what_an_adapter_saves_whole_trains_in_fp32_on_a_base_in_bf16(tokenizer, rows, tmp_path, saved, precision):
    def base():
        return tiny_base(tie_word_embeddings=False).to(torch.bfloat16)

    start = tiny_adapter(base=base(), target_modules=["q_proj"], modules_to_save=saved)
    write_adapter(tmp_path / "start", "base", start)
    # a step that bf16 rounds away from a norm's weight of 1, and from most others
    chosen = settings(adapter=str(tmp_path / "start"), precision=precision, max_steps=2, learning_rate=5e-4)
    model = lg.train_adapter(base(), tokenizer, rows, chosen).model
    before = dict(start.named_parameters())
    whole = {name: value for name, value in model.named_parameters() if "modules_to_save" in name}
    assert {value.dtype for value in whole.values()} == {torch.float32}
    moved = {name: (value - before[name].float()).abs().mean() for name, value in whole.items()}
    assert all(2e-5 < size < 2e-3 for size in moved.values()), moved
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
        assert logits.dtype == torch.bfloat16, "the others compute as before"
        # written in fp32, read by a base in any precision
        model.save_pretrained(tmp_path / "end")
        assert {value.dtype for value in load_file(tmp_path / "end" / "adapter_model.safetensors").values()} == {
            torch.float32
        }
        again = load_peft(base(), tmp_path / "end")(input_ids=ids).logits
    torch.testing.assert_close(again, logits, rtol=0.05, atol=0.1)


def test_a_trained_bias_beside_a_frozen_weight_in_bf16_is_refused(tokenizer, rows, tmp_path):
    write_adapter(tmp_path, "base", tiny_adapter(bias="all"))
    chosen = settings(adapter=str(tmp_path), max_steps=1)
    with pytest.raises(ConfigError, match=r"trains 'bias' of .*q_proj.* Load the base in fp32"):
        lg.train_adapter(tiny_base().to(torch.bfloat16), tokenizer, rows, chosen)
    assert lg.train_adapter(tiny_base(), tokenizer, rows, chosen).steps == 1


def test_every_target_module_is_one_of_the_base(tokenizer, rows):
    chosen = settings(target_modules="q_proj, qkv_proj, layers.1.mlp.gate_prj, nowhere", max_steps=1)
    with pytest.raises(ConfigError) as caught:
        lg.train_adapter(tiny_base(), tokenizer, rows, chosen)
    said = str(caught.value)
    assert "target_modules names 'qkv_proj' (perhaps '" in said
    assert "'layers.1.mlp.gate_prj' (perhaps 'gate_proj'), 'nowhere', which matches no module of the base" in said
    assert "its linear layers end in down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj" in said
    with pytest.raises(
        ConfigError, match=r"'self_attn' cannot be adapted: .* layers end in down_proj.*is not supported"
    ):
        lg.train_adapter(tiny_base(), tokenizer, rows, settings(target_modules="self_attn", max_steps=1))
    kept = settings(target_modules="q_proj,layers.1.mlp.gate_proj", max_steps=1)
    model = lg.train_adapter(tiny_base(), tokenizer, rows, kept).model
    trained = {
        name.split(".lora_")[0].split("model.")[-1] for name, value in model.named_parameters() if value.requires_grad
    }
    assert trained == {"layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "layers.1.mlp.gate_proj"}
