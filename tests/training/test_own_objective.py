"""Objectives of one's own: they train as the named ones do, records name them, and what cannot be right is refused."""

import json
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import loragate as lg
from loragate.errors import ConfigError, TrainingError
from loragate.gates.card import render_card
from loragate.losses import ObjectiveContext, WeightedCrossEntropy, statistics_of_logits
from loragate.training import CalibrationSettings, GuardLimits, StageOneSettings
from loragate.training.trainer import token_losses
from tiny import tiny_adapter, tiny_base, tiny_rows

SHARED = {"batch_size": 8, "micro_batch_size": 4, "learning_rate": 5e-3, "logging_steps": 1, "max_length": 64}
ONE = StageOneSettings(**SHARED, rank=4, alpha=8, max_steps=2)
TWO = CalibrationSettings(**{**SHARED, "learning_rate": 1e-2}, k=20, max_steps=2)
CONFIG = lg.GateConfig(-3, 2)


def probability(stats, _):
    return stats.log_prob.exp()


def mine(**options):
    return WeightedCrossEntropy("mine", **{"rule": probability, **options})


@dataclass(frozen=True)
class Margin:
    """Cross-entropy plus a share of the full entropy: no weighted cross-entropy."""

    share: float = 0.1
    name: str = "margin"
    k: int = 2
    requires: frozenset = frozenset()
    outputs: tuple = ("log_prob", "entropy")
    gradients: tuple | None = None

    @property
    def settings(self):
        return {"share": self.share}

    def loss(self, stats, context=None):
        return -stats.log_prob + self.share * stats.entropy


def losses(result):
    return [record["loss"] for record in result.history if "loss" in record]


def masked_rows():
    rows = tiny_rows(8)
    return [{**row, "keep_mask": [1, 0] + [1] * (len(row["messages"][1]["content"].split()) - 1)} for row in rows]


def test_an_adapter_trains_as_with_the_same_rule_by_name(tokenizer):
    named = lg.train_adapter(tiny_base(), tokenizer, tiny_rows(8), replace(ONE, objective="dft"))
    own = lg.train_adapter(
        tiny_base(), tokenizer, tiny_rows(8), ONE, objective=mine(settings={"power": 1}, reads_full_entropy=True)
    )
    assert losses(own) == pytest.approx(losses(named), rel=1e-6)
    assert own.history[0]["entropy"] > 0
    assert (named.objective, named.constants) == ("dft", {})
    assert (own.objective, own.constants) == ("mine", {"power": 1})


def test_gates_train_as_with_the_same_loss_by_name(tokenizer):
    named = lg.calibrate(tiny_adapter(), tokenizer, tiny_rows(8), CONFIG, replace(TWO, objective="ce"))
    plain = mine(rule=lambda stats, _: torch.ones_like(stats.log_prob))
    own = lg.calibrate(tiny_adapter(), tokenizer, tiny_rows(8), CONFIG, TWO, objective=plain)
    assert losses(own) == pytest.approx(losses(named), rel=1e-6)
    assert (own.entropy_before, own.entropy_after) == pytest.approx((named.entropy_before, named.entropy_after))
    assert (named.objective, named.evidence()["training"]["settings"]["objective"]) == ("ce", "ce")


def test_a_class_of_ones_own_trains_both(tokenizer):
    assert losses(lg.train_adapter(tiny_base(), tokenizer, tiny_rows(8), ONE, objective=Margin()))
    model = tiny_adapter()
    result = lg.calibrate(model, tokenizer, tiny_rows(8), CONFIG, TWO, objective=Margin(0.2))
    training = json.loads(json.dumps(result.evidence()))["training"]
    assert (result.objective, training["settings"]["objective"]) == ("margin", "margin")
    assert training["constants"] == {"share": 0.2}


@pytest.mark.parametrize(("reads_entropy", "k"), [(True, 7), (False, None)])
def test_the_artifact_records_its_support_and_not_that_of_the_settings(tokenizer, tmp_path, reads_entropy, k):
    model = tiny_adapter()
    result = lg.calibrate(model, tokenizer, tiny_rows(8), CONFIG, TWO, objective=mine(k=7, reads_entropy=reads_entropy))
    lg.save_gates(model, tmp_path / "gated", evidence=result.evidence())
    record = json.loads((tmp_path / "gated" / "gate_config.json").read_text())
    assert record["k"] == k
    assert record["training"]["settings"]["k"] == 20, "entropy was measured with"


def test_the_artifact_and_its_card_name_it(tokenizer, tmp_path):
    model = tiny_adapter()
    model.save_pretrained(tmp_path / "adapter")
    result = lg.calibrate(model, tokenizer, tiny_rows(8), CONFIG, TWO, objective=Margin())
    lg.save_gates(model, tmp_path / "gated", adapter_source=tmp_path / "adapter", evidence=result.evidence())
    record = json.loads((tmp_path / "gated" / "gate_config.json").read_text())
    assert record["training"]["constants"] == {"share": 0.1}
    card = render_card("gated", record)
    assert "margin" in card
    assert "SCALE)" not in card


def test_masks_and_references_reach_it(tokenizer):
    rows = masked_rows()
    rule = lambda stats, context: context.keep_mask.float()  # noqa: E731
    masked = mine(rule=rule, requires=frozenset({"keep_mask"}))
    named = lg.train_adapter(tiny_base(), tokenizer, rows, replace(ONE, objective="mask"))
    assert losses(lg.train_adapter(tiny_base(), tokenizer, rows, ONE, objective=masked)) == losses(named)
    assert losses(lg.calibrate(tiny_adapter(), tokenizer, rows, CONFIG, TWO, objective=masked))
    with pytest.raises(ConfigError, match="'mine' needs a keep_mask, and rows in memory has no such column"):
        lg.calibrate(tiny_adapter(), tokenizer, tiny_rows(8), CONFIG, TWO, objective=masked)
    near = mine(rule=lambda stats, _: torch.exp(-stats.kl), requires=frozenset({"reference_kl"}))
    result = lg.train_adapter(tiny_base(), tokenizer, rows, ONE, objective=near, reference_model=tiny_base(3))
    assert result.history[0]["reference_kl"] > 0
    with pytest.raises(ConfigError, match="Stage II has no reference model"):
        lg.calibrate(tiny_adapter(), tokenizer, rows, CONFIG, TWO, objective=near)
    with pytest.raises(ConfigError, match="no effect on the objective 'mine'"):
        lg.train_adapter(tiny_base(), tokenizer, rows, ONE, objective=mine(), reference_model=tiny_base(3))
    with pytest.raises(ConfigError, match="a guard of the objective 'mine' needs a probe"):
        lg.calibrate(tiny_adapter(), tokenizer, rows, CONFIG, TWO, objective=mine(), guard=GuardLimits())


def test_packed_rows_tell_it_their_sequences(tokenizer):
    seen = []

    def rule(stats, context):
        seen.append(context.sequence_ids.unique().numel())
        return torch.ones_like(stats.log_prob)

    objective = mine(rule=rule, requires=frozenset({"sequence_ids"}))
    packed = lg.train_adapter(tiny_base(), tokenizer, tiny_rows(8), replace(ONE, packing=True), objective=objective)
    plain = lg.train_adapter(tiny_base(), tokenizer, tiny_rows(8), ONE)
    assert losses(packed)[0] == pytest.approx(losses(plain)[0], rel=1e-5)
    assert sum(seen[:2]) == 8


@pytest.mark.parametrize("stage", ["one", "two"])
def test_another_one_is_refused_on_resume(tokenizer, tmp_path, stage):
    def run(objective, resume=True):
        how = {"objective": objective, "run_folder": tmp_path / "run", "resume": resume}
        if stage == "one":
            return lg.train_adapter(tiny_base(), tokenizer, tiny_rows(8), replace(ONE, save_steps=1), **how)
        return lg.calibrate(tiny_adapter(), tokenizer, tiny_rows(8), CONFIG, replace(TWO, save_steps=1), **how)

    whole = run(mine(settings={"power": 1}), resume=False)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["settings"]["objective"], record["constants"]) == ("mine", {"power": 1})
    assert run(mine(settings={"power": 1})).steps == whole.steps
    with pytest.raises(TrainingError, match=r"'constants.power' was 1, now 2"):
        run(mine(settings={"power": 2}))
    with pytest.raises(TrainingError, match="another run"):
        run(replace(mine(settings={"power": 1}), name="other"))
    with pytest.raises(TrainingError, match="another run"):
        run(None)


WHOLE = {
    name: getattr(Margin(), name) for name in ("name", "k", "requires", "outputs", "gradients", "settings", "loss")
}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"name": "dft"}, "'dft' is the name of a built-in objective"),
        ({"name": "anchored"}, "built-in"),
        ({"requires": frozenset({"sequence_ids"})}, "set packing=True"),
    ],
)
def test_what_it_holds_is_checked(tokenizer, changed, told):
    for stage in (lg.train_adapter, lg.calibrate):
        given = (ONE,) if stage is lg.train_adapter else (CONFIG, TWO)
        with pytest.raises(ConfigError, match=told):
            stage(tiny_base(), tokenizer, tiny_rows(8), *given, objective=SimpleNamespace(**{**WHOLE, **changed}))


def test_the_settings_must_not_say_otherwise(tokenizer):
    def refused(told, objective, settings):
        with pytest.raises(ConfigError, match=told):
            lg.train_adapter(tiny_base(), tokenizer, tiny_rows(8), settings, objective=objective)

    refused("settings.objective is 'dft'; leave one", mine(), replace(ONE, objective="dft"))
    refused("'mine' has its own", mine(), replace(ONE, objective_options={"k": 2}))
    with pytest.raises(ConfigError, match=r"settings\.objective is 'ce'; leave one"):
        lg.calibrate(tiny_adapter(), tokenizer, tiny_rows(8), CONFIG, replace(TWO, objective="ce"), objective=Margin())


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda stats, context: -stats.log_prob.sum(), r"returned \[\], expected one value per token, \[4, \d+\]"),
        (lambda stats, context: -stats.log_prob.mean(-1), r"returned \[4\], expected one value per token"),
    ],
)
def test_a_loss_of_another_shape_is_refused_at_the_first_step(tokenizer, loss, told):
    objective = SimpleNamespace(**{**WHOLE, "loss": loss})
    with pytest.raises(ConfigError, match=told):
        lg.train_adapter(tiny_base(), tokenizer, tiny_rows(8), ONE, objective=objective)


@pytest.mark.parametrize("stage", ["train_adapter", "calibrate"])
def test_a_gradient_that_is_not_finite_stops_the_run_before_it_is_applied(tokenizer, stage):
    """In the last step no later loss would tell, and the result would be NaN throughout."""

    class Steep(Margin):
        def loss(self, stats, context):
            losses = super().loss(stats, context)
            last = context.step == context.total_steps - 1
            return losses + (losses * 0).sqrt() if last else losses  # finite, with an infinite slope times 0

    values = {"batch_size": 4, "micro_batch_size": 2, "max_length": 64, "max_steps": 3}
    if stage == "train_adapter":
        settings = StageOneSettings(**values, rank=2)
        train = partial(lg.train_adapter, tiny_base(), tokenizer, tiny_rows(12), settings)
    else:
        settings = CalibrationSettings(**values, k=20)
        train = partial(lg.calibrate, tiny_adapter(), tokenizer, tiny_rows(12), lg.GateConfig(-3, 2), settings)
    with pytest.raises(TrainingError, match=r"gradient is not finite at step 3, though the loss is\. Nothing was"):
        train(objective=Steep())


def test_weights_that_are_none_are_refused(tokenizer):
    with pytest.raises(ConfigError, match="'mine': its rule gave a negative weight"):
        lg.train_adapter(tiny_base(), tokenizer, tiny_rows(8), ONE, objective=mine(rule=lambda s, _: s.log_prob))
    nan = mine(rule=lambda stats, _: stats.log_prob * float("nan"))
    with pytest.raises(TrainingError, match=r"not finite at step 1: row \d+"):
        lg.train_adapter(tiny_base(), tokenizer, tiny_rows(8), ONE, objective=nan)


def test_positions_without_a_label_never_count():
    logits = torch.randn(2, 3, 8, requires_grad=True)
    stats = statistics_of_logits(logits, torch.tensor([[1, 2, -100], [-100, 3, 4]]), 2)
    everywhere = SimpleNamespace(**{**WHOLE, "loss": lambda stats, context: 1.0 - stats.log_prob})
    found = token_losses(everywhere, stats, ObjectiveContext())
    assert torch.equal(found != 0, stats.mask)
