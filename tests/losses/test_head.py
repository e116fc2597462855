"""The token-statistics head against full logits and autograd, over shapes, families' head extras and dtypes."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from loragate.errors import ConfigError
from loragate.losses import projection, statistics_of_logits, token_statistics, topk_entropy
from loragate.losses.projection import Head
from speed.fake import KnownSelection, StorageTracker

STATISTICS = ("log_prob", "entropy", "topk_entropy")
EXTRAS = [{}, {"scale": 0.3}, {"softcap": 4.0}, {"scale": 1.7, "softcap": 6.0}]


def operands(tokens=13, width=8, vocabulary=37, dtype=torch.float64, seed=0, ignored=4):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=draw, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocabulary, width, generator=draw, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, vocabulary, (tokens,), generator=draw)
    labels[torch.randperm(tokens, generator=draw)[:ignored]] = -100
    return hidden, weight, labels


def token_statistics_reference(hidden, weight, labels, *, k=100, bias=None, scale=1.0, softcap=None):
    """The same statistics from full logits, by autograd."""
    working = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return statistics_of_logits(Head(weight, bias, scale, softcap).logits(hidden, working), labels, k)


def gradient(run, hidden, name):
    hidden = hidden.detach().clone().requires_grad_()
    stats = run(hidden)
    value = getattr(stats, name)
    (value * torch.linspace(0.5, 2, value.numel(), dtype=value.dtype).view_as(value)).sum().backward()
    return hidden.grad


def test_top_k_of_the_vocabulary_is_the_full_entropy():
    hidden, weight, labels = operands()
    stats = token_statistics(hidden, weight, labels, k=37)
    torch.testing.assert_close(stats.topk_entropy, stats.entropy / math.log(37), rtol=1e-12, atol=0)
    assert token_statistics(hidden, weight, labels, k=10_000).k == token_statistics(hidden, weight, labels, k=0).k == 37
    logits = hidden @ weight.t()
    categorical = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(topk_entropy(logits, 37, normalize=False), categorical, rtol=1e-12, atol=1e-13)


def test_ignored_positions_are_zero_and_not_projected():
    hidden, weight, labels = operands()
    hidden[labels == -100] = math.nan
    hidden = hidden.requires_grad_()
    stats = token_statistics(hidden, weight, labels, k=5)
    assert stats.topk_entropy[labels == -100].eq(0).all()
    stats.topk_entropy.sum().backward()
    assert torch.isfinite(hidden.grad).all()
    assert hidden.grad[labels == -100].eq(0).all()


@pytest.mark.parametrize("odd", [0.0, math.nan, -math.inf])
@pytest.mark.parametrize("gradients", [None, ("topk_entropy",)])
def test_empty_micro_batch_keeps_the_graph_alive(gradients, odd):
    hidden, weight, labels = operands()
    hidden[0] = odd  # what is not projected may be anything
    hidden = hidden.requires_grad_()
    stats = token_statistics(hidden, weight, torch.full_like(labels, -100), k=5, gradients=gradients)
    assert stats.topk_entropy.eq(0).all()
    stats.topk_entropy.sum().backward()
    assert hidden.grad.eq(0).all()
    assert not stats.mask.any()


def test_named_gradients_detach_the_others_and_outputs_limit_the_work():
    hidden, weight, labels = operands()
    full = token_statistics(hidden.requires_grad_(), weight, labels, k=5, gradients=("topk_entropy",))
    assert [getattr(full, name).requires_grad for name in STATISTICS] == [False, False, True]
    stats = token_statistics(hidden, weight, labels, k=5, outputs=("topk_entropy",))
    assert stats.log_prob.numel() == stats.entropy.numel() == 0
    torch.testing.assert_close(stats.topk_entropy, full.topk_entropy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_heads_use_fp32_logits(dtype):
    hidden, weight, labels = operands(tokens=20, width=16, vocabulary=64, dtype=dtype)
    exact = token_statistics_reference(hidden.double(), weight.double(), labels, k=10)
    actual = token_statistics(hidden.requires_grad_(), weight, labels, k=10)
    for name in ("log_prob", "entropy", "topk_entropy"):
        value = getattr(actual, name)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), getattr(exact, name), rtol=1e-4, atol=1e-4)
    actual.topk_entropy.sum().backward()
    assert hidden.grad.dtype == dtype


@pytest.mark.parametrize("gradients", [None, ("log_prob", "topk_entropy")])
def test_the_direct_path_of_low_precision_heads(monkeypatch, gradients):
    """The path that CUDA takes (weights stay bf16, fp32 products), run on the CPU, against the widened one."""
    hidden, weight, labels = operands(tokens=20, width=16, vocabulary=64, dtype=torch.bfloat16)

    def run():
        h = hidden.detach().clone().requires_grad_()
        stats = token_statistics(h, weight, labels, k=10, gradients=gradients, chunk_tokens=7)
        (stats.log_prob.sum() + 3 * stats.topk_entropy.sum()).backward()
        return stats, h.grad.float()

    widened, exact = run()
    monkeypatch.setattr(projection, "multiplies_directly", lambda weight: True)
    direct, gradient = run()
    torch.testing.assert_close(direct.topk_entropy, widened.topk_entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(direct.log_prob, widened.log_prob, rtol=1e-5, atol=1e-5)
    assert (gradient - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_head_of_a_large_model_keeps_to_its_memory(dtype):
    """4096 response tokens × 152k vocabulary, on tensors without data: 0.7 GiB is the limit set, 0.17 what it takes."""
    with FakeTensorMode():
        hidden = torch.empty(4096, 1536, dtype=dtype, requires_grad=True)
        weight, labels = torch.empty(151936, 1536, dtype=dtype), torch.empty(4096, dtype=torch.int64)
        tracker = StorageTracker([hidden, weight, labels])
        with tracker, KnownSelection(4096):
            stats = token_statistics(hidden, weight, labels, outputs=("topk_entropy",), gradients=("topk_entropy",))
            stats.topk_entropy.sum().backward()
    assert tracker.peak <= 0.2 * 2**30


@pytest.mark.parametrize("k", [0, 2, 20, 36, 37, 100])
@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("budget", [None, 1, 16 * 16 * 4])
def test_values_and_gradients_equal_autograd(monkeypatch, k, extras, budget):
    """Chunks of 4 tokens, or tiles of 13 columns out of 37, fewer than k, with ties: every statistic and gradient, with a bias."""
    hidden, weight, labels = operands()
    bias = torch.randn(37, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    if budget is not None:
        monkeypatch.setattr(projection, "TILE_BYTES", budget)
        weight[20:30], bias[20:30] = weight[3:13].clone(), bias[3:13].clone()  # equal logits in different tiles
    options = {"k": k, "bias": bias, **extras}
    for name in STATISTICS:
        reference = lambda h: token_statistics_reference(h, weight, labels, **options)  # noqa: E731
        wanted, value = gradient(reference, hidden, name), getattr(reference(hidden), name)
        # which of two equal logits counts as the k-th is free, and changes the gradient but not the entropy
        split = name == "topk_entropy" and 0 < k < 37 and budget is not None
        for gradients in (None, (name,), STATISTICS):
            how = {"gradients": gradients, "chunk_tokens": None if budget else 4, **options}
            actual = lambda h, how=how: token_statistics(h, weight, labels, **how)  # noqa: E731
            torch.testing.assert_close(getattr(actual(hidden), name), value, rtol=1e-11, atol=1e-12)
            if not split:
                torch.testing.assert_close(gradient(actual, hidden, name), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gradients", [None, ("log_prob",), ("entropy",), ("topk_entropy",)])
def test_tiles_change_nothing(monkeypatch, dtype, gradients):
    hidden, weight, labels = operands(tokens=60, width=16, vocabulary=1000, dtype=dtype)
    name = "topk_entropy" if gradients is None else gradients[0]

    def run():
        return gradient(lambda h: token_statistics(h, weight, labels, k=10, gradients=gradients), hidden, name).float()

    whole = run()
    monkeypatch.setattr(projection, "TILE_BYTES", 64 * 128 * 4)
    parts = run()
    assert (parts - whole).norm() <= (1e-2 if dtype == torch.bfloat16 else 1e-5) * whole.norm()


def test_a_masked_part_of_the_vocabulary(monkeypatch):
    """A bias of −∞ over a whole tile, the first one: log-probability and top-k entropy are those of the rest."""
    monkeypatch.setattr(projection, "TILE_BYTES", 1)
    hidden, weight, labels = operands()
    bias = torch.zeros(37, dtype=torch.float64)
    bias[:16] = -torch.inf
    labels[labels >= 0] = labels[labels >= 0].clamp(min=16)
    rest = torch.where(labels >= 0, labels - 16, labels)
    for name, k in (("log_prob", 5), ("topk_entropy", 5)):
        options = {"k": k, "outputs": (name,), "gradients": (name,)}
        masked = gradient(lambda h, o=options: token_statistics(h, weight, labels, bias=bias, **o), hidden, name)
        wanted = gradient(lambda h, o=options: token_statistics(h, weight[16:], rest, **o), hidden, name)
        torch.testing.assert_close(masked, wanted, rtol=1e-10, atol=1e-12)


def test_bad_arguments_are_explained():
    hidden, weight, labels = operands()
    for words, arguments in {
        "must agree": {"labels": labels[:-1]},
        "head is trainable": {"weight": weight.clone().requires_grad_()},
        "out of modules_to_save": {"bias": weight.new_zeros(37).requires_grad_()},
        "k must be an integer of at least 2": {"k": 1},
        "unknown statistic 'entropie'": {"gradients": ("entropie",)},
        "not among outputs": {"outputs": ("entropy",), "gradients": ("log_prob",)},
    }.items():
        with pytest.raises(ConfigError, match=words):
            token_statistics(**{"hidden": hidden, "weight": weight, "labels": labels, **arguments})


@pytest.mark.parametrize("wrong", [37, -1])
def test_a_label_that_is_no_index_is_refused(wrong):
    """Other losses ignore −1; clamped into the vocabulary it would be a wrong number and no error."""
    hidden, weight, labels = operands()
    labels = labels.clone()
    labels[labels >= 0] = labels[labels >= 0].index_fill(0, torch.tensor([0]), wrong)
    with pytest.raises(ConfigError, match="the head has 37 rows: give indices from 0 to 36, and -100 where"):
        token_statistics(hidden, weight, labels)
    with pytest.raises(ConfigError, match=f"(from {wrong} to|to {wrong},)"):
        statistics_of_logits(hidden @ weight.t(), labels, 7)


def test_masked_logits_add_nothing_to_the_topk_entropy():
    logits = torch.randn(4, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    masked = torch.cat([logits, torch.full((4, 20), -torch.inf, dtype=torch.float64)], -1)
    for k in (10, 40, 0):
        (left,) = torch.autograd.grad(topk_entropy(masked, k, normalize=False).sum(), logits, retain_graph=True)
        (right,) = torch.autograd.grad(topk_entropy(logits, min(k, 30), normalize=False).sum(), logits)
        torch.testing.assert_close(left, right)
    assert torch.isfinite(topk_entropy(masked, 0)).all()
