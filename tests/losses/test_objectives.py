"""Objectives from their formulas: weights, detachment, denominators, and what they need."""

import math

import pytest
import torch

from loragate.errors import ConfigError
from loragate.losses import ObjectiveContext, TokenStatistics, objectives, statistics_of_logits
from loragate.losses.objectives import eaft, profit, talr


@pytest.fixture
def stats():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, 40, generator=draw, dtype=torch.float64, requires_grad=True) * 3
    labels = torch.randint(0, 40, (3, 6), generator=draw)
    labels[0, :2] = -100
    labels[2] = -100
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


def test_profit_is_strict_and_keeps_the_denominator(stats):
    value = p(stats)[stats.mask].max().item()
    at = profit(threshold=value).weights(stats)
    assert at.sum() == 0, "p = threshold is not kept"
    assert int(stats.mask.sum()) == 10, "masked tokens stay in the denominator, which the trainer counts from the mask"


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


def test_wrong_constants_are_refused(stats):
    with pytest.raises(ConfigError, match="statistics were made with k = 20"):
        eaft(k=10).weights(stats)
    with pytest.raises(ConfigError, match="probability"):
        profit(threshold=1.5)
    with pytest.raises(ConfigError, match="'median'"):
        talr(tau="mean")
    with pytest.raises(ConfigError, match="positive"):
        talr(tau=0.0)
