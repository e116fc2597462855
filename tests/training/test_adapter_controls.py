"""Stage I beyond plain cross-entropy: reference models, unlearned tokens, entropy on LoRA, continued adapters."""

import pytest
import torch
from peft import PeftModel

import loragate as lg
from loragate.data import Collator, encode_rows, load_rows
from loragate.errors import ConfigError, GateError, TrainingError
from loragate.losses import ObjectiveContext, objectives, statistics_of_logits
from loragate.losses.objectives import EntropyKLSelective, Forgetting
from loragate.training import FineTuningSettings
from loragate.training.settings import GateTrainingSettings
from tiny import tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer

ROWS = tiny_rows(24)
WHOLE = {"batch_size": 24, "per_device_train_batch_size": 24}
SILENT = {"rank": 16, "alpha": 16}
"""The usual values, which a continued adapter may contradict."""


def train(rows=ROWS, run_folder=None, resume=False, **options):
    usual = {
        "batch_size": 8,
        "per_device_train_batch_size": 8,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "max_length": 64,
    }
    settings = FineTuningSettings(**{**usual, "rank": 4, "alpha": 8, **options})
    return lg.train_adapter(tiny_base(), tiny_tokenizer(), rows, settings, run_folder=run_folder, resume=resume)


def logits_of(model, rows=ROWS):
    batch = Collator(0)(list(encode_rows(load_rows(rows).shuffled(42), tiny_tokenizer(), max_length=64)))
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits[:, :-1], batch


def loaded(folder):
    return PeftModel.from_pretrained(tiny_base(), folder)


@pytest.fixture
def folder(tmp_path):
    """A finished adapter, which is only read."""

    def contents():
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(place.iterdir())}

    place = tmp_path / "adapter"
    tiny_adapter().save_pretrained(place)
    before = contents()
    yield str(place)
    assert contents() == before


def test_eksft_in_the_trainer_equals_full_logits(folder):
    """The first step of a continued adapter, against the base with the adapter off."""
    options = {"ratio": 0.3, "entropy_weight": 0.5, "kl_weight": 0.5}
    how = {"objective": "eksft", "objective_options": options, "max_steps": 1, "adapter": folder}
    found = train(**how, **WHOLE).history[0]
    logits, batch = logits_of(loaded(folder))
    stats = statistics_of_logits(logits, batch["labels"][:, 1:], 0, logits_of(tiny_base())[0])
    expected = EntropyKLSelective(**options).loss(stats).sum() / stats.mask.sum()
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert found["reference_kl"] == pytest.approx((stats.kl.sum() / stats.mask.sum()).item(), rel=1e-4)
    assert found["reference_kl"] > 0.01
    fresh = train(objective="eksft", max_steps=1).history[0]
    assert fresh["reference_kl"] == pytest.approx(0, abs=1e-5), "a fresh adapter stands at its base"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"objective": "eksft", "objective_options": {"ratoi": 1}}, "no option 'ratoi'; did you mean 'ratio'"),
        ({"objective": "profit", "objective_options": {"threshold": "x"}}, "must be a number, found 'x'"),
        ({"objective": "forgetting"}, r"no such column.*loragate mask"),
    ],
)
def test_what_has_no_effect_or_does_not_fit_is_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        train(**options)


def test_forgetting_in_the_trainer():
    draw = torch.Generator().manual_seed(1)
    lengths = [len(row["messages"][1]["content"].split()) + 1 for row in ROWS[:8]]
    keep = [(torch.rand(length, generator=draw) > 0.4).int().tolist() for length in lengths]
    rows = [{**row, "keep_mask": mask} for row, mask in zip(ROWS, keep)]
    options = {"t_max": 0.5, "schedule": "constant"}
    how = {"max_steps": 12, "warmup_ratio": 0.0, "learning_rate": 0.02}
    result = train(rows, objective="forgetting", objective_options=options, **how)
    keeping = {}
    for name, model in (("before", tiny_base()), ("after", result.model)):
        logits, batch = logits_of(model, rows)
        stats, keep = statistics_of_logits(logits, batch["labels"][:, 1:], 2), batch["keep_mask"][:, 1:]
        keeping[name] = [(-stats.log_prob[stats.mask & side]).mean().item() for side in (keep, ~keep)]
        if name == "before":
            loss = Forgetting(**options).loss(stats, ObjectiveContext(keep_mask=keep)).sum() / stats.mask.sum()
            assert result.history[0]["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert keeping["after"][0] < keeping["before"][0] - 0.3, "kept tokens were learned"
    assert keeping["after"][1] > keeping["before"][1] + 0.3, "the others were unlearned"


def test_a_continued_adapter_starts_where_it_stopped(folder, tmp_path, caplog):
    with caplog.at_level("INFO", logger="loragate"):
        result = train(adapter=folder, max_steps=1, run_folder=tmp_path / "run", **WHOLE, **SILENT)
    assert "warm-up of 0 of the steps" in caplog.text
    logits, batch = logits_of(loaded(folder))
    stats = statistics_of_logits(logits, batch["labels"][:, 1:], 2)
    loss = objectives["sft"].loss(stats).sum() / stats.mask.sum()
    assert result.history[0]["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert (result.settings.rank, result.settings.alpha, result.settings.warmup_ratio) == (4, 8, 0.0)
    result.model.save_pretrained(str(tmp_path / "longer"))
    found = logits_of(result.model)[0]
    assert torch.equal(found, logits_of(loaded(tmp_path / "longer"))[0])
    assert (found - logits).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "value"),
    [("rank", 8), ("alpha", 32), ("dropout", 0.1), ("dora", True), ("rslora", True), ("target_modules", "q_proj")],
)
def test_what_the_adapter_decides_cannot_be_contradicted(folder, name, value):
    with pytest.raises(ConfigError, match=f"{name} is .* but the adapter .*adapter has"):
        train(adapter=folder, **{**SILENT, name: value})


def test_resume_refuses_an_adapter_that_changed(tmp_path):
    tiny_adapter().save_pretrained(tmp_path / "adapter")
    how = {"adapter": str(tmp_path / "adapter"), "max_steps": 2, "run_folder": tmp_path / "run", **SILENT}
    train(**how)
    tiny_adapter(3).save_pretrained(tmp_path / "adapter")
    with pytest.raises(TrainingError, match="begun with start = "):
        train(**how, resume=True)


def test_dora_is_saved_loaded_continued_and_not_gated(tokenizer, tmp_path):
    result = train(dora=True, max_steps=3)
    result.model.save_pretrained(str(tmp_path / "dora"))
    again = loaded(tmp_path / "dora")
    torch.testing.assert_close(logits_of(result.model)[0], logits_of(again)[0], rtol=1e-5, atol=1e-5)
    assert train(adapter=str(tmp_path / "dora"), max_steps=2, **SILENT).settings.dora
    with pytest.raises(GateError, match="Dora variant"):
        lg.train_gates(again, tokenizer, ROWS, lg.GateConfig(-1, 2), GateTrainingSettings(max_steps=1))
