"""Objectives from their formulas: weights, detachment, denominators, and what they need."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch

from loragate.errors import ConfigError
from loragate.losses import ObjectiveContext, TokenStatistics, objectives, statistics_of_logits
from loragate.losses.objectives import (
    FACTORIES,
    EntropyKLSelective,
    EntropyMinimisation,
    Forgetting,
    Interleaved,
    WeightedCrossEntropy,
    eaft,
    talr,
)
from loragate.losses.objectives.base import check_objective, token_losses
from loragate.losses.objectives.signed import top_ratio_masks


def material(seed):
    """(logits, those of a reference, labels): 10 labelled tokens over 40 words."""
    draw = torch.Generator().manual_seed(seed)
    logits, reference = (torch.randn(3, 6, 40, generator=draw, dtype=torch.float64) * 3 for _ in range(2))
    labels = torch.randint(0, 40, (3, 6), generator=draw)
    labels[0, :2] = -100
    labels[2] = -100
    return logits.requires_grad_(), reference, labels


@pytest.fixture
def stats():
    logits, _, labels = material(0)
    return statistics_of_logits(logits, labels, 20)


def p(stats):
    return stats.log_prob.detach().exp()


def test_published_rules(stats):
    keep = stats.mask
    expected = {
        "sft": torch.ones_like(p(stats)),
        "dft": p(stats),
        "profit": (p(stats) > 0.1).double(),
        "eaft": stats.topk_entropy.detach(),
    }
    means = torch.stack([-(stats.log_prob[row][keep[row]]).mean() for row in (0, 1)]).detach()
    expected["talr"] = torch.clamp(p(stats) ** (1 / means.median()), min=0.01)
    for name, weight in expected.items():
        actual = objectives[name].weights(stats)
        torch.testing.assert_close(actual, torch.where(keep, weight, 0.0), rtol=1e-12, atol=1e-14)
        assert not actual.requires_grad


def test_loss_is_weighted_cross_entropy_with_detached_weights(stats):
    for name in ("sft", "dft", "profit", "eaft", "talr"):
        loss = objectives[name].loss(stats)
        torch.testing.assert_close(loss, -objectives[name].weights(stats) * stats.log_prob)
        (gradient,) = torch.autograd.grad(loss.sum(), stats.log_prob, retain_graph=True)
        torch.testing.assert_close(gradient, -objectives[name].weights(stats), rtol=1e-12, atol=0)
        assert loss[~stats.mask].eq(0).all()


def test_released_eaft_rule(stats):
    released = eaft(normalizer=3.0).weights(stats)
    nats = stats.topk_entropy.detach() * math.log(20)
    torch.testing.assert_close(released, torch.where(stats.mask, nats / 3.0, 0.0), rtol=1e-12, atol=0)
    ratio = released[stats.mask] / objectives["eaft"].weights(stats)[stats.mask]
    assert ratio.mean().item() == pytest.approx(math.log(20) / 3, rel=1e-12)
    half = eaft(power=0.5).weights(stats)[stats.mask]
    torch.testing.assert_close(half, stats.topk_entropy.detach()[stats.mask].sqrt())


def test_talr_variants(stats):
    fixed = talr(tau=1.0, floor=0.0).weights(stats)
    torch.testing.assert_close(fixed[stats.mask], p(stats)[stats.mask])
    assert talr(floor=0.5).weights(stats)[stats.mask].min() >= 0.5
    packed = TokenStatistics(*(value.reshape(1, -1) if torch.is_tensor(value) else value for value in stats))
    ids = torch.arange(3).repeat_interleave(6).reshape(1, -1)
    by_ids = objectives["talr"].weights(packed, ObjectiveContext(sequence_ids=ids))
    torch.testing.assert_close(by_ids.reshape(3, 6), objectives["talr"].weights(stats))
    empty = stats._replace(mask=torch.zeros_like(stats.mask))
    assert objectives["talr"].weights(empty).eq(0).all()


def test_mask_needs_and_uses_its_column(stats):
    with pytest.raises(ConfigError, match="keep_mask"):
        objectives["mask"].weights(stats)
    keep = torch.rand(3, 6, generator=torch.Generator().manual_seed(1)) > 0.5
    weights = objectives["mask"].weights(stats, ObjectiveContext(keep_mask=keep))
    assert torch.equal(weights, (keep & stats.mask).double())


def test_statistics_of_another_support_are_refused(stats):
    with pytest.raises(ConfigError, match="statistics were made with k = 20"):
        eaft(k=10).weights(stats)


@pytest.fixture
def referred():
    """Statistics with a KL to a reference, their logits and labels."""
    logits, reference, labels = material(4)
    return statistics_of_logits(logits, labels, 0, reference), logits, reference, labels


def published_eksft(logits, reference, labels, ratio, entropy_weight, kl_weight, union=True):
    """The three means, written with explicit loops over the tokens."""
    tokens = [(b, t) for b in range(3) for t in range(6) if labels[b, t] != -100]
    p = {at: torch.softmax(logits[at], -1) for at in tokens}
    r = {at: torch.softmax(reference[at], -1) for at in tokens}
    entropy = {at: -(p[at] * p[at].log()).sum() for at in tokens}
    kl = {at: (p[at] * (p[at] / r[at]).log()).sum() for at in tokens}
    count = int(len(tokens) * ratio)
    high_entropy = set(sorted(tokens, key=lambda at: -float(entropy[at].detach()))[:count])
    high_kl = set(sorted(tokens, key=lambda at: -float(kl[at].detach()))[:count])
    masked = high_entropy | high_kl if union else high_entropy & high_kl
    kept = [at for at in tokens if at not in masked]
    loss = sum(-p[at][labels[at]].log() for at in kept) / len(kept)
    if count:
        loss = loss - entropy_weight * sum(entropy[at] / math.log(40) for at in high_entropy) / count
        loss = loss + kl_weight * sum(kl[at] for at in high_kl) / count
    return loss


@pytest.mark.parametrize("union", [True, False])
@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.45])
def test_eksft_is_its_published_formula(referred, ratio, union):
    stats, logits, reference, labels = referred
    made = EntropyKLSelective(ratio, 0.3, 0.7, "union" if union else "intersection")
    mean = made.loss(stats).sum() / stats.mask.sum()
    expected = published_eksft(logits, reference, labels, ratio, 0.3, 0.7, union)
    torch.testing.assert_close(mean, expected, rtol=1e-7, atol=1e-9)
    (found,) = torch.autograd.grad(mean, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
    assert made.loss(stats)[~stats.mask].eq(0).all()


def test_eksft_needs_a_reference(stats):
    with pytest.raises(ConfigError, match="'eksft' needs reference_kl"):
        objectives["eksft"].loss(stats)


def test_forgetting_is_its_published_formula(stats):
    keep = torch.rand(3, 6, generator=torch.Generator().manual_seed(1)) > 0.4
    nll = -stats.log_prob
    learn, forget = nll[stats.mask & keep], nll[stats.mask & ~keep]
    assert min(len(learn), len(forget)) > 1
    for step, strength in ((0, 0.0), (5, 0.2), (10, 0.4)):
        context = ObjectiveContext(keep_mask=keep, step=step, total_steps=10)
        mean = Forgetting(0.41, 0.01).loss(stats, context).sum() / stats.mask.sum()
        torch.testing.assert_close(mean, learn.mean() - strength * forget.mean(), rtol=1e-6, atol=1e-9)
    fixed = Forgetting(0.4, schedule="constant", reduction="all")
    constant = fixed.loss(stats, ObjectiveContext(keep_mask=keep, step=0, total_steps=10))
    torch.testing.assert_close(constant.sum(), learn.sum() - 0.4 * forget.sum(), rtol=1e-6, atol=1e-9)
    (gradient,) = torch.autograd.grad(constant.sum(), stats.log_prob, retain_graph=True)
    assert (gradient[stats.mask & keep] < 0).all(), "kept tokens become likelier"
    assert (gradient[stats.mask & ~keep] > 0).all(), "the others become less likely: no nonnegative weight does that"
    with pytest.raises(ConfigError, match="loragate mask"):
        objectives["forgetting"].loss(stats)


def test_forgetting_has_the_released_constants():
    assert objectives["forgetting"].settings == {
        "t_max": 0.25,
        "t_min": 1e-5,
        "schedule": "linear",
        "reduction": "sets",
    }
    half = objectives["forgetting"].strength(ObjectiveContext(step=5, total_steps=10))
    assert half == pytest.approx((0.25 - 1e-5) / 2, rel=1e-12)


def over_processes(objective, processes):
    """What `over_batch` says on each of several processes; gathering is a meeting of threads."""
    meeting, board = Barrier(len(processes), timeout=30), {}

    def run(rank):
        def gather(rows):
            board[rank] = rows
            meeting.wait()
            whole = torch.cat([board[other] for other in range(len(processes))])
            meeting.wait()
            return whole

        return objective.over_batch(processes[rank], gather)

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(run, range(len(processes))))


@pytest.mark.parametrize("name", ["talr", "eksft", "forgetting"])
def test_a_batch_in_parts_has_the_loss_of_the_whole(referred, name):
    stats, *_ = referred
    keep = torch.rand(3, 6, generator=torch.Generator().manual_seed(1)) > 0.4
    objective = objectives[name]
    whole = objective.loss(stats, ObjectiveContext(keep_mask=keep))

    def part(row):
        cut = [value[row : row + 1] if torch.is_tensor(value) else value for value in stats]
        return TokenStatistics(*cut), ObjectiveContext(keep_mask=keep[row : row + 1])

    rows = [[0, 2], [1]]  # of two processes, a forward pass each
    values = over_processes(objective, [[part(row) for row in own] for own in rows])
    for own, said in zip(rows, values, strict=True):
        for row, value in zip(own, said, strict=True):
            piece, context = part(row)
            torch.testing.assert_close(objective.loss(piece, replace(context, batch=value))[0], whole[row])
    alone = torch.cat([objective.loss(*part(row)) for row in range(3)])
    assert not torch.allclose(alone, whole), "each part as a batch of its own would be another loss"


def test_eksft_leaves_ties_at_the_edge_out():
    tied = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    chosen = {ratio: top_ratio_masks([tied], [tied > -1], ratio, lambda rows: rows)[0] for ratio in (0.2, 0.6, 0.8)}
    assert {ratio: int(found.sum()) for ratio, found in chosen.items()} == {0.2: 1, 0.6: 1, 0.8: 4}


def test_entropy_and_interleaved(stats):
    torch.testing.assert_close(EntropyMinimisation(k=20).loss(stats), stats.topk_entropy)
    turns = Interleaved(ce_steps=2, entropy_steps=1, k=20)
    for step, entropy in enumerate([False, False, True, False, False, True]):
        loss = turns.loss(stats, ObjectiveContext(step=step))
        torch.testing.assert_close(loss, stats.topk_entropy if entropy else -stats.log_prob)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("eksft", {"ratio": 1.0}, "ratio must be below 1"),
        ("eksft", {"kl_weight": -1}, "kl_weight must be at least 0"),
        ("eksft", {"combine": "unoin"}, "did you mean 'union'"),
        ("forgetting", {"schedule": "cosine"}, "'linear' or 'constant'"),
        ("forgetting", {"t_max": float("nan")}, "t_max must be a finite number"),
        ("forgetting", {"t_max": 0.1, "t_min": 0.2}, "t_min"),
        ("entropy", {"k": 1}, "at least 2, or 0"),
        ("entropy", {"k": 50.5}, "integer of at least 2, or 0"),
        ("eaft", {"k": 20.5}, "integer of at least 2, or 0"),
        ("eaft", {"power": float("nan")}, "power: it must be a finite number"),
        ("eaft", {"normalizer": 0.0}, "normalizer: it must be above 0"),
        ("talr", {"tau": float("nan")}, "tau: it must be a finite number"),
        ("talr", {"floor": 2.0}, "floor, a weight: it must be at most 1"),
        ("interleaved", {"ce_steps": 0}, "at least 1"),
        ("profit", {"threshold": 1.5}, "probability"),
        ("talr", {"tau": "mean"}, "'median'"),
        ("talr", {"tau": 0.0}, "above 0"),
    ],
)
def test_wrong_constants_are_refused(name, options, told):
    with pytest.raises(ConfigError, match=told):
        FACTORIES[name](**options)


class Own:
    name, k, requires, outputs, gradients = "own", 20, frozenset(), ("log_prob", "topk_entropy"), ("log_prob",)

    def __init__(self, **changed):
        self.settings = {"share": 0.5}
        vars(self).update(changed)

    def loss(self, stats, context=None):
        return -stats.log_prob


def nobody(parts, gather):
    return [None] * len(parts)


def test_a_whole_objective_of_ones_own_is_taken():
    check_objective(Own())
    check_objective(Own(gradients=None, requires={"keep_mask", "sequence_ids"}, over_batch=nobody, batch_reads=()))
    check_objective(WeightedCrossEntropy("own", lambda stats, _: stats.entropy, reads=("entropy",)))


@pytest.mark.parametrize(
    ("objective", "told"),
    [
        (Own, r"the class Own: give an instance of it, Own\(\)"),
        ("dft", "has no name, k, .* chosen by the setting objective"),
        (lambda stats, context: stats.log_prob, "has no name, k, requires"),
        (Own(outputs="log_prob"), r"outputs must be names in a tuple, such as \('log_prob',\), found 'log_prob'"),
        (Own(outputs=("nll",)), "outputs names 'nll'"),
        (Own(gradients=("entropy",)), "gradients names 'entropy'.* known are log_prob, topk_entropy"),
        (Own(gradients=()), "gradients is empty"),
        (Own(requires=frozenset({"keepmask"})), "requires names 'keepmask'.*'keep_mask'"),
        (Own(k=2.5), "k must be an integer"),
        (Own(settings=None), "settings must be a dictionary"),
        (Own(settings={"share": torch.ones(1)}), "settings go into the record of the run as JSON"),
        (Own(over_batch=nobody), "has over_batch and no batch_reads"),
        (Own(over_batch=nobody, batch_reads=("kl",)), "batch_reads names 'kl'"),
        (WeightedCrossEntropy("own", nobody, reads="entropy"), "reads must be names in a tuple"),
    ],
)
def test_what_an_objective_of_ones_own_lacks_is_said(objective, told):
    with pytest.raises(ConfigError, match=told):
        check_objective(objective)


def test_a_loss_that_reads_what_it_does_not_name_is_told_so(stats):
    given = stats.only(("log_prob",))
    reader = WeightedCrossEntropy("own", lambda stats, _: stats.topk_entropy)
    with pytest.raises(ConfigError, match=r"'own': .* It is given log_prob: .* in reads= of a WeightedCrossEntropy"):
        token_losses(reader, given, ObjectiveContext())
    nothing = Own(loss=lambda stats, context: None)
    with pytest.raises(ConfigError, match="loss returned NoneType, expected one value per token"):
        token_losses(nothing, given, ObjectiveContext())
