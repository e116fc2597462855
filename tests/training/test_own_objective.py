"""Objectives of one's own: they train as the named ones do, records name them, and what cannot be right is refused."""

import json
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import loragate as lg
from loragate.data import load_rows
from loragate.errors import ConfigError, GateError, TrainingError
from loragate.gates.attach import is_gated
from loragate.losses import WeightedCrossEntropy
from loragate.training import FineTuningSettings, GateTrainingSettings, reference, training_rows
from tiny import gate_values, tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer

SHARED = {
    "batch_size": 8,
    "per_device_train_batch_size": 4,
    "learning_rate": 5e-3,
    "logging_steps": 1,
    "max_length": 64,
}
ONE = FineTuningSettings(**SHARED, rank=4, alpha=8, max_steps=2)
TWO = GateTrainingSettings(**{**SHARED, "learning_rate": 1e-2}, k=20, max_steps=2)
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


def one(settings, rows=None, **more):
    return lg.train_adapter(tiny_base(), tiny_tokenizer(), rows or tiny_rows(8), settings, **more)


def two(settings, rows=None, model=None, **more):
    return lg.train_gates(model or tiny_adapter(), tiny_tokenizer(), rows or tiny_rows(8), CONFIG, settings, **more)


def losses(result):
    return [record["loss"] for record in result.history if "loss" in record]


def masked_rows():
    rows = tiny_rows(8)
    return [{**row, "keep_mask": [1, 0] + [1] * (len(row["messages"][1]["content"].split()) - 1)} for row in rows]


def test_an_adapter_trains_as_with_the_same_rule_by_name():
    named = one(replace(ONE, objective="dft"))
    own = one(ONE, objective=mine(settings={"power": 1}, reads=("entropy",)))
    assert losses(own) == pytest.approx(losses(named), rel=1e-6)
    assert own.history[0]["entropy"] > 0
    assert (named.objective, named.constants) == ("dft", {})
    assert (own.objective, own.constants) == ("mine", {"power": 1})


def test_gates_train_as_with_the_same_loss_by_name():
    named = two(replace(TWO, objective="ce"))
    plain = mine(rule=lambda stats, _: torch.ones_like(stats.log_prob))
    own = two(TWO, objective=plain)
    assert losses(own) == pytest.approx(losses(named), rel=1e-6)
    assert (own.entropy_before, own.entropy_after) == pytest.approx((named.entropy_before, named.entropy_after))
    assert (named.objective, named.evidence()["training"]["settings"]["objective"]) == ("ce", "ce")


def test_a_class_of_ones_own_trains_both():
    assert losses(one(ONE, objective=Margin()))
    model = tiny_adapter()
    result = two(TWO, model=model, objective=Margin(0.2))
    training = json.loads(json.dumps(result.evidence()))["training"]
    assert (result.objective, training["settings"]["objective"]) == ("margin", "margin")
    assert training["constants"] == {"share": 0.2}


@pytest.mark.parametrize("reads", [("entropy",), ()], ids=["its loss reads it", "its batch alone does"])
def test_an_evaluation_takes_its_data_for_the_whole_batch(tmp_path, reads):
    def highest(parts, gather):
        top = gather(torch.cat([stats.entropy.flatten() for stats, _ in parts])).max()
        return [top] * len(parts)

    rule = lambda stats, context: torch.ones_like(stats.log_prob) * context.batch  # noqa: E731
    objective = mine(rule=rule, reads=reads, over_batch=highest, batch_reads=("entropy",))
    found = []
    for size in (1, 3, 8):
        args = lg.GateTrainingArguments(str(tmp_path), per_device_eval_batch_size=size, report_to="none")
        trainer = lg.GateTrainer(
            tiny_adapter(),
            args,
            train_dataset=tiny_rows(8),
            eval_dataset=tiny_rows(8, seed=9),
            processing_class=tiny_tokenizer(),
            gates=CONFIG,
            objective=objective,
        )
        found.append(trainer.evaluate()["eval_loss"])
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)


def trainer_of(folder, objective, **more):
    usual = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 1, "k": 20}
    data = {name: more.pop(name) for name in ("train_dataset", "eval_dataset") if name in more}
    return lg.GateTrainer(
        tiny_adapter(),
        lg.GateTrainingArguments(str(folder), report_to="none", **{**usual, **more}),
        processing_class=tiny_tokenizer(),
        gates=CONFIG,
        objective=objective,
        **{"train_dataset": tiny_rows(8), **data},
    )


def test_what_it_says_of_a_batch_comes_from_what_it_names(tmp_path):
    """Also where one pass is the whole step, which has more."""
    seen = []

    def mean(parts, gather):
        seen.extend((stats.log_prob.numel() > 0, stats.entropy.numel()) for stats, _ in parts)
        return [1.0] * len(parts)

    rule = lambda stats, context: stats.entropy * context.batch  # noqa: E731
    own = mine(rule=rule, reads=("entropy",), over_batch=mean, batch_reads=("log_prob",))
    trainer = trainer_of(tmp_path, own, eval_dataset=tiny_rows(4))
    trainer.train()
    trainer.evaluate()
    assert seen == [(True, 0)] * 2
    with pytest.raises(ConfigError, match="'mine' has over_batch and no batch_reads: name the statistics"):
        trainer_of(tmp_path, replace(own, batch_reads=None))
    wrong = replace(own, over_batch=lambda parts, gather: [1.0, 2.0])
    with pytest.raises(ConfigError, match="over_batch returned 2 values for 1 forward passes"):
        trainer_of(tmp_path, wrong).train()


def test_rows_to_evaluate_on_have_what_it_requires(tmp_path):
    rule = lambda stats, context: context.keep_mask.float()  # noqa: E731
    masked = mine(rule=rule, requires=frozenset({"keep_mask"}))
    data = {"train_dataset": masked_rows(), "eval_dataset": {"held": tiny_rows(4)}}
    with pytest.raises(ConfigError, match="'mine' needs a keep_mask, and rows in memory has no such column"):
        trainer_of(tmp_path, masked, **data)
    seen = []

    def by_sequence(stats, context):
        seen.append(sorted(context.sequence_ids[stats.mask].unique().tolist()))
        return stats.log_prob.exp()

    trainer = trainer_of(
        tmp_path,
        mine(rule=by_sequence, requires=frozenset({"sequence_ids"})),
        packing=True,
        per_device_eval_batch_size=4,
        eval_dataset=tiny_rows(4),
    )
    trainer.train()
    trainer.evaluate()
    assert [len(ids) for ids in seen] == [4, 4]


def test_an_objective_may_begin_at_zero_and_not_stay_there(tmp_path):
    ramp = mine(rule=lambda stats, context: torch.full_like(stats.log_prob, context.progress))
    assert len(losses(two(TWO, objective=ramp))) == 2
    nothing = mine(rule=lambda stats, _: torch.zeros_like(stats.log_prob))
    for train, settings in ((one, ONE), (two, TWO)):
        with pytest.raises(TrainingError, match=r"exactly zero up to step 2, .* objective 'mine' gives any token"):
            train(settings, objective=nothing)


def test_masks_and_references_reach_it():
    rows = masked_rows()
    rule = lambda stats, context: context.keep_mask.float()  # noqa: E731
    masked = mine(rule=rule, requires=frozenset({"keep_mask"}))
    named = one(replace(ONE, objective="mask"), rows=rows)
    assert losses(one(ONE, rows=rows, objective=masked)) == losses(named)
    assert losses(two(TWO, rows=rows, objective=masked))
    with pytest.raises(ConfigError, match="'mine' needs a keep_mask, and rows in memory has no such column"):
        two(TWO, objective=masked)
    near = mine(rule=lambda stats, _: torch.exp(-stats.kl), requires=frozenset({"reference_kl"}))
    result = one(ONE, rows=rows, objective=near)
    assert result.history[1]["reference_kl"] > 1e-6, "one step away from the base"
    gated = two(TWO, rows=rows, objective=near)
    assert gated.history[0]["reference_kl"] > 1e-6, "of the adapter from its base"
    biased = tiny_adapter(bias="lora_only")
    with pytest.raises(GateError, match=r"'mine' needs the base as its reference: .*biases"):
        two(TWO, objective=near, model=biased)
    assert not is_gated(biased, "default"), "before anything is changed"


@dataclass(frozen=True)
class Near(Margin):
    """The paper's entropy, and a share of the KL to the base."""

    name: str = "near"
    k: int = 20
    requires: frozenset = frozenset({"reference_kl"})
    outputs: tuple = ("topk_entropy",)
    gradients: tuple | None = ("topk_entropy",)

    def loss(self, stats, context=None):
        return stats.topk_entropy + self.share * stats.kl


def test_gates_are_held_near_the_base_as_a_plain_loop_over_full_logits_holds_them(monkeypatch, tmp_path):
    def entropies_and_kl(model, batch, k):
        counted = batch["labels"][:, 1:] != -100
        read = {name: batch[name] for name in ("input_ids", "attention_mask")}
        log_p = model(**read).logits[:, :-1][counted].log_softmax(-1)
        with torch.no_grad(), model.disable_adapter():
            log_base = model(**read).logits[:, :-1][counted].log_softmax(-1)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        lg.gates.train_gates_only(model)
        return lg.topk_entropy(log_p, k) + 0.5 * (log_p.exp() * (log_p - log_base)).sum(-1)

    monkeypatch.setattr(reference, "response_entropies", entropies_and_kl)
    rows, tokenizer, model, plain = (
        tiny_rows(8),
        tiny_tokenizer(),
        tiny_adapter(),
        lg.attach_gates(tiny_adapter(), CONFIG),
    )
    settings = replace(TWO, batch_size=4, per_device_train_batch_size=2)
    result = two(settings, rows, model, objective=Near(0.5), run_folder=tmp_path / "run")
    _, encoded = training_rows(load_rows(rows), tokenizer, settings)
    expected = reference.reference_loop(plain, list(encoded), settings, tokenizer.pad_token_id)
    assert losses(result) == pytest.approx(expected, rel=1e-5)
    for name, parameter in gate_values(model).items():
        torch.testing.assert_close(parameter, gate_values(plain)[name], rtol=1e-4, atol=1e-7)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["reference"] == "base"


@pytest.mark.parametrize(("train", "settings"), [(one, ONE), (two, TWO)], ids=["one", "two"])
def test_another_one_is_refused_on_resume(tmp_path, train, settings):
    run = partial(train, replace(settings, save_steps=1), run_folder=tmp_path / "run")
    objective = mine(settings={"power": 1})
    whole = run(objective=objective)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["settings"]["objective"], record["constants"]) == ("mine", {"power": 1})
    assert run(objective=objective, resume=True).steps == whole.steps
    with pytest.raises(TrainingError, match=r"constants.power = 1, now it is 2"):
        run(objective=mine(settings={"power": 2}), resume=True)
    for other in (replace(objective, name="other"), None):
        with pytest.raises(TrainingError, match="was begun with"):
            run(objective=other, resume=True)


WHOLE = {
    name: getattr(Margin(), name) for name in ("name", "k", "requires", "outputs", "gradients", "settings", "loss")
}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"name": "dft"}, "'dft' is the name of a built-in objective"),
        ({"name": "entropy"}, "built-in"),
        ({"requires": frozenset({"labels"})}, "requires names 'labels'"),
    ],
)
def test_what_it_holds_is_checked(changed, told):
    for train, settings in ((one, ONE), (two, TWO)):
        with pytest.raises(ConfigError, match=told):
            train(settings, objective=SimpleNamespace(**{**WHOLE, **changed}))


@pytest.mark.parametrize(
    ("own", "named", "told"),
    [
        (mine(), "ce", "'mine' is given, and the setting objective is 'ce'"),
        (replace(mine(), name="entropy"), "entropy", "'entropy' is the name of a built-in objective"),
        (probability, "entropy", "has no name, k, .*give WeightedCrossEntropy"),
    ],
)
def test_the_trainer_checks_it_as_the_functions_do(tmp_path, own, named, told):
    args = lg.GateTrainingArguments(str(tmp_path), objective=named, report_to="none")
    more = {"train_dataset": tiny_rows(8), "processing_class": tiny_tokenizer(), "gates": CONFIG}
    with pytest.raises(ConfigError, match=told):
        lg.GateTrainer(tiny_adapter(), args, objective=own, **more)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda stats, context: -stats.log_prob.sum(), r"returned \[\], expected one value per token, \[4, \d+\]"),
        (lambda stats, context: -stats.log_prob.mean(-1), r"returned \[4\], expected one value per token"),
    ],
)
def test_a_loss_of_another_shape_is_refused_at_the_first_step(loss, told):
    objective = SimpleNamespace(**{**WHOLE, "loss": loss})
    with pytest.raises(ConfigError, match=told):
        one(ONE, objective=objective)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (
            lambda stats, context: stats.topk_entropy * 1,
            r"empty tensor. It is given log_prob, entropy: .*\(topk_entropy, perhaps",
        ),
        (
            lambda stats, context: stats.log_prob,
            "no gradient, so nothing could train. Of the statistics entropy carry one",
        ),
        (lambda stats, context: stats.entropy.detach(), r"keep that out of detach\(\)"),
    ],
    ids=["not in outputs", "not in gradients", "detached"],
)
@pytest.mark.parametrize(("train", "settings"), [(one, ONE), (two, TWO)], ids=["one", "two"])
def test_a_loss_of_what_it_does_not_name_is_refused_at_the_first_step(train, settings, loss, told):
    objective = SimpleNamespace(**{**WHOLE, "loss": loss, "gradients": ("entropy",)})
    with pytest.raises(ConfigError, match=told):
        train(settings, objective=objective)


@pytest.mark.parametrize(("train", "settings"), [(one, ONE), (two, TWO)], ids=["one", "two"])
def test_a_gradient_that_is_not_finite_stops_the_run_before_it_is_applied(train, settings):
    """In the last step no later loss would tell, and the result would be NaN throughout."""

    class Steep(Margin):
        def loss(self, stats, context):
            losses = super().loss(stats, context)
            last = context.step == context.total_steps - 1
            return losses + (losses * 0).sqrt() if last else losses  # finite, with an infinite slope times 0

    settings = replace(settings, batch_size=4, per_device_train_batch_size=2, max_steps=3)
    with pytest.raises(TrainingError, match=r"gradient is not finite at step 3, though the loss is\. Nothing was"):
        train(settings, rows=tiny_rows(12), objective=Steep())


def test_weights_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="'mine': its rule gave a negative weight"):
        one(ONE, objective=mine(rule=lambda s, _: s.log_prob))
    nan = mine(rule=lambda stats, _: stats.log_prob * float("nan"))
    with pytest.raises(TrainingError, match=r"not finite at step 1: row \d+"):
        one(ONE, objective=nan)
