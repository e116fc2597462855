"""Stage I beyond plain cross-entropy: reference models, unlearned tokens, entropy on LoRA, continued adapters."""

import copy

import pytest
import torch
from peft import PeftModel

import loragate as lg
from loragate.data import Collator, encode_rows, load_rows
from loragate.errors import ConfigError, GateError
from loragate.files import write_json
from loragate.losses import ObjectiveContext, objectives, statistics_of_logits
from loragate.losses.objectives import EntropyKLSelective, Forgetting
from loragate.training import StageOneSettings
from loragate.training.settings import CalibrationSettings
from tiny import tiny_adapter, tiny_base, tiny_rows


def settings(**options):
    usual = {"batch_size": 8, "micro_batch_size": 8, "learning_rate": 5e-3, "logging_steps": 1, "max_length": 64}
    return StageOneSettings(**{**usual, "rank": 4, "alpha": 8, **options})


def masked_rows(count=8, seed=1):
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for row in tiny_rows(count):
        length = len(row["messages"][1]["content"].split()) + 1
        rows.append({**row, "keep_mask": (torch.rand(length, generator=draw) > 0.4).int().tolist()})
    return rows


def logits_of(model, rows, tokenizer, seed=42):
    encoded = encode_rows(load_rows(rows).shuffled(seed), tokenizer, max_length=64)
    batch = Collator(0)(list(encoded))
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits[:, :-1], batch


def saved_adapter(tmp_path, seed=0, **lora):
    model = tiny_adapter(seed, **lora)
    model.save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "adapter"


def contents(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("other", [False, True])
def test_eksft_in_the_trainer_equals_full_logits(tokenizer, rows, tmp_path, other):
    """The first step of a continued adapter, against the base with the adapter off, or against another model."""
    folder = saved_adapter(tmp_path)
    reference = tiny_base(5) if other else None
    options = {"ratio": 0.3, "entropy_weight": 0.5, "kl_weight": 0.5}
    chosen = settings(
        objective="eksft",
        objective_options=options,
        max_steps=1,
        batch_size=24,
        micro_batch_size=24,
        adapter=str(folder),
    )
    found = lg.train_adapter(tiny_base(), tokenizer, rows, chosen, reference_model=reference).history[0]
    logits, batch = logits_of(PeftModel.from_pretrained(tiny_base(), folder), rows, tokenizer)
    against, _ = logits_of(reference or tiny_base(), rows, tokenizer)
    stats = statistics_of_logits(logits, batch["labels"][:, 1:], 0, against)
    expected = EntropyKLSelective(**options).loss(stats).sum() / stats.mask.sum()
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert found["reference_kl"] == pytest.approx((stats.kl.sum() / stats.mask.sum()).item(), rel=1e-4)
    assert found["reference_kl"] > 0.01


def test_a_fresh_adapter_stands_at_its_base(tokenizer, rows):
    record = lg.train_adapter(tiny_base(), tokenizer, rows, settings(objective="eksft", max_steps=1)).history[0]
    assert record["reference_kl"] == pytest.approx(0, abs=1e-5)


def test_a_reference_model_is_refused_where_it_has_no_effect_or_does_not_fit(tokenizer, rows):
    with pytest.raises(ConfigError, match="no effect on the objective 'sft', only on eksft"):
        lg.train_adapter(tiny_base(), tokenizer, rows, settings(), reference_model=tiny_base(1))
    with pytest.raises(ConfigError, match="vocabulary of 170 and the model one of 160"):
        lg.train_adapter(
            tiny_base(), tokenizer, rows, settings(objective="eksft"), reference_model=tiny_base(1, vocab_size=170)
        )


def test_forgetting_in_the_trainer(tokenizer):
    rows = masked_rows()
    chosen = settings(
        objective="forgetting", objective_options={"t_max": 0.5, "schedule": "constant"}, max_steps=12, warmup=0.0,
        learning_rate=0.02,
    )  # fmt: skip
    result = lg.train_adapter(tiny_base(), tokenizer, rows, chosen)
    keeping, batch = {}, None
    for name, model in (("before", tiny_base()), ("after", result.model)):
        logits, batch = logits_of(model.eval(), rows, tokenizer)
        stats = statistics_of_logits(logits, batch["labels"][:, 1:], 2)
        keep = batch["keep_mask"][:, 1:]
        keeping[name] = [(-stats.log_prob[stats.mask & side]).mean().item() for side in (keep, ~keep)]
        if name == "before":
            loss = (
                Forgetting(t_max=0.5, schedule="constant").loss(stats, ObjectiveContext(keep_mask=keep)).sum()
                / stats.mask.sum()
            )
            assert result.history[0]["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert keeping["after"][0] < keeping["before"][0] - 0.3, "kept tokens were learned"
    assert keeping["after"][1] > keeping["before"][1] + 0.3, "the others were unlearned"
    with pytest.raises(ConfigError, match=r"no such column.*loragate mask"):
        lg.train_adapter(tiny_base(), tokenizer, tiny_rows(8), chosen)


def test_lora_trained_with_entropy(tokenizer, rows, tmp_path):
    folder = saved_adapter(tmp_path)
    before = contents(folder)
    chosen = settings(
        objective="entropy", adapter=str(folder), max_steps=15, batch_size=24, micro_batch_size=24, learning_rate=0.02
    )
    result = lg.train_adapter(tiny_base(), tokenizer, rows, chosen)
    entropies = [record["topk_entropy"] for record in result.history if "topk_entropy" in record]
    assert entropies[-1] < entropies[0] - 0.05
    assert "nll" in result.history[0], "what it costs on the responses is logged beside it"
    assert contents(folder) == before


def test_interleaved_steps_take_turns(tokenizer, rows):
    """Each logged loss is the one of its turn; either objective moves under the other's steps (the drift)."""
    chosen = settings(
        objective="interleaved", objective_options={"ce_steps": 2, "entropy_steps": 1}, batch_size=24, micro_batch_size=24,
        max_steps=6, warmup=0.0, learning_rate=0.02,
    )  # fmt: skip
    history = [record for record in lg.train_adapter(tiny_base(), tokenizer, rows, chosen).history if "nll" in record]
    for step, record in enumerate(history):
        expected = record["topk_entropy"] if step % 3 == 2 else record["nll"]
        assert record["loss"] == pytest.approx(expected, rel=1e-4), step
    assert history[3]["topk_entropy"] < history[2]["topk_entropy"]
    assert history[2]["nll"] < history[0]["nll"]


def test_a_continued_adapter_starts_where_it_stopped(tokenizer, rows, tmp_path, caplog):
    folder = saved_adapter(tmp_path)
    before = contents(folder)
    chosen = settings(adapter=str(folder), max_steps=1, batch_size=24, micro_batch_size=24, rank=16, alpha=16)
    with caplog.at_level("INFO", logger="loragate"):
        result = lg.train_adapter(tiny_base(), tokenizer, rows, chosen, run_folder=tmp_path / "run")
    assert "warm-up of 0 of the steps" in caplog.text
    logits, batch = logits_of(PeftModel.from_pretrained(tiny_base(), folder), rows, tokenizer)
    stats = statistics_of_logits(logits, batch["labels"][:, 1:], 2)
    loss = objectives["sft"].loss(stats).sum() / stats.mask.sum()
    assert result.history[0]["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert (result.settings.rank, result.settings.alpha, result.settings.warmup) == (4, 8, 0.0)
    assert contents(folder) == before, "the source is only read"
    result.model.save_pretrained(str(tmp_path / "longer"))
    again = PeftModel.from_pretrained(tiny_base(), tmp_path / "longer")
    first, _ = logits_of(result.model.eval(), rows, tokenizer)
    second, _ = logits_of(again, rows, tokenizer)
    assert torch.equal(first, second)
    assert (first - logits).abs().max() > 1e-3


def test_warm_up_of_a_fresh_and_a_continued_adapter():
    assert StageOneSettings().warmup == 0.1
    assert StageOneSettings(adapter="x").warmup == 0.0
    assert StageOneSettings(adapter="x", warmup=0.05).warmup == 0.05


@pytest.mark.parametrize("name", ["rank", "alpha", "dropout", "dora", "rslora", "target_modules"])
def test_what_the_adapter_decides_cannot_be_contradicted(tokenizer, rows, tmp_path, name):
    folder = saved_adapter(tmp_path)
    value = {"rank": 8, "alpha": 32, "dropout": 0.1, "dora": True, "rslora": True, "target_modules": "q_proj"}[name]
    usual = {"rank": 16, "alpha": 16}
    with pytest.raises(ConfigError, match=f"{name} is .* but the adapter .*adapter has"):
        lg.train_adapter(tiny_base(), tokenizer, rows, settings(adapter=str(folder), **{**usual, name: value}))


def test_resume_refuses_an_adapter_that_changed(tokenizer, rows, tmp_path):
    folder = saved_adapter(tmp_path)
    chosen = settings(adapter=str(folder), rank=16, alpha=16, max_steps=2)
    lg.train_adapter(tiny_base(), tokenizer, rows, chosen, run_folder=tmp_path / "run")
    tiny_adapter(3).save_pretrained(str(folder))
    from loragate.errors import TrainingError

    with pytest.raises(TrainingError, match="another run: 'start'"):
        lg.train_adapter(tiny_base(), tokenizer, rows, chosen, run_folder=tmp_path / "run", resume=True)


def test_dora_is_saved_loaded_continued_and_not_gated(tokenizer, rows, tmp_path):
    result = lg.train_adapter(tiny_base(), tokenizer, rows, settings(dora=True, max_steps=3))
    result.model.save_pretrained(str(tmp_path / "dora"))
    loaded = PeftModel.from_pretrained(tiny_base(), tmp_path / "dora")
    first, _ = logits_of(result.model.eval(), rows, tokenizer)
    second, _ = logits_of(loaded, rows, tokenizer)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)
    chosen = settings(adapter=str(tmp_path / "dora"), rank=16, alpha=16, max_steps=2)
    longer = lg.train_adapter(tiny_base(), tokenizer, rows, chosen)
    assert longer.settings.dora
    with pytest.raises(GateError, match="Dora variant"):
        lg.calibrate(loaded, tokenizer, rows, lg.GateConfig(-1, 2), CalibrationSettings(max_steps=1))


@pytest.mark.parametrize("objective", ["dft", "profit", "talr"])
def test_gates_on_adapters_of_other_objectives(tokenizer, rows, objective):
    options = {"threshold": 1e-4} if objective == "profit" else None
    chosen = settings(objective=objective, objective_options=options, max_steps=4, learning_rate=0.02, warmup=0.0)
    model = lg.train_adapter(tiny_base(), tokenizer, rows, chosen).model
    gates = CalibrationSettings(
        batch_size=24, micro_batch_size=24, max_steps=8, learning_rate=0.05, max_length=64, k=20
    )
    result = lg.calibrate(model, tokenizer, rows, lg.GateConfig(-3, 3), gates)
    assert result.entropy_after < result.entropy_before
    assert result.parity.at_one < 1e-5


def test_options_are_checked_by_name_and_type(tokenizer, rows):
    with pytest.raises(ConfigError, match="no option 'ratoi'; did you mean 'ratio'"):
        lg.train_adapter(tiny_base(), tokenizer, rows, settings(objective="eksft", objective_options={"ratoi": 1}))
    with pytest.raises(ConfigError, match="wrong type"):
        lg.train_adapter(
            tiny_base(), tokenizer, rows, settings(objective="profit", objective_options={"threshold": "x"})
        )


def test_an_adapter_of_another_kind_is_not_continued(tokenizer, rows, tmp_path):
    write_json(
        tmp_path / "other" / "adapter_config.json",
        {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 2},
    )
    with pytest.raises(ConfigError, match="is a PROMPT_TUNING adapter"):
        lg.train_adapter(tiny_base(), tokenizer, rows, settings(adapter=str(tmp_path / "other")))


def test_the_base_is_left_as_it_was(tokenizer, rows):
    base = tiny_base()
    before = copy.deepcopy(base.state_dict())
    lg.train_adapter(base, tokenizer, rows, settings(objective="eksft", max_steps=2))
    after = {name.replace(".base_layer", ""): value for name, value in base.state_dict().items() if "lora_" not in name}
    assert all(torch.equal(before[name], value) for name, value in after.items())
