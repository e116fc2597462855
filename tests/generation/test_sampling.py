"""The counted random stream, the draw and the entropy."""

from __future__ import annotations

import math

import pytest
import torch

from loragate.errors import ConfigError, LoragateError
from loragate.generation.sampling import (
    BLOCK,
    SamplingConfig,
    SeededSampler,
    keep_nucleus,
    request_seed,
    sample_tokens,
    uniform,
)

MASK = (1 << 64) - 1
PINNED = ["0.129645618299747", "0.165268963955801", "0.851302620128832", "0.465216279258435"]


def reference_bits(*counters: int) -> int:
    """The 64 bits behind `uniform` in Python integers: splitmix64's finaliser, chained over the counters."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    state = mix((counters[0] + gamma) & MASK)
    for counter in counters[1:]:
        state = mix(((state ^ counter) + gamma) & MASK)
    return state


def reference_uniform(*counters: int) -> float:
    return (reference_bits(*counters) >> 11) * 2.0**-53


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31, 2**63 + 5, 2**64 - 1])
def test_uniform_equals_integer_reference(seed: int) -> None:
    question = torch.tensor([0, 1, 2, 1318, 2**40])
    sample = torch.tensor([0, 15, 3, 0, 9])
    got = uniform(seed, question, sample, 17)
    assert got.dtype == torch.float64
    assert got.tolist() == [reference_uniform(seed, q, s, 17) for q, s in zip(question.tolist(), sample.tolist())]


def test_uniform_is_pinned() -> None:
    """Changing the stream would change every published sample."""
    got = torch.stack([uniform(0, 0, 0, 0), uniform(0, 0, 0, 1), uniform(0, 0, 1, 0), uniform(1, 5, 3, 200)])
    assert [f"{value:.15f}" for value in got.tolist()] == PINNED


def test_request_seeds_are_the_high_bits_of_the_stream() -> None:
    for counters in ((0, 0, 0), (1, 5, 3), (2**64 - 1, 1318, 15)):
        assert request_seed(*counters) == reference_bits(*counters) >> 1
    seeds = {
        request_seed(seed, question, sample) for seed in range(3) for question in range(40) for sample in range(16)
    }
    assert len(seeds) == 3 * 40 * 16
    assert min(seeds) >= 0
    assert 2**62 < max(seeds) < 2**63
    assert request_seed(0, 0, 0) == 1279368494785126216


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["question", "sample", "position"])
def test_the_stream_is_uniform_and_neighbours_are_uncorrelated(dim: int) -> None:
    draws = uniform(0, *torch.meshgrid(*[torch.arange(64)] * 3, indexing="ij"))
    here, there = draws.narrow(dim, 0, 63).flatten(), draws.narrow(dim, 1, 63).flatten()
    assert abs(torch.corrcoef(torch.stack([here, there]))[0, 1].item()) < 5 / math.sqrt(here.numel())
    assert draws.min() >= 0
    assert draws.max() < 1
    expected = draws.numel() / 100
    chi_square = ((torch.histc(draws, bins=100, min=0, max=1) - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - 99) < 5 * math.sqrt(2 * 99)


@pytest.mark.parametrize("vocabulary", [1, 6, 128, 1000, 4096])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_draw_inverts_the_cumulative_distribution(vocabulary: int, temperature: float) -> None:
    """Against one sum over the whole vocabulary in fp64; a draw that falls on a rounding may differ, which none of these does."""
    scores = 4 * torch.randn(300, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    scores[:, vocabulary // 2 :: 7] = -torch.inf if vocabulary > 1 else 0.0
    uniforms = uniform(5, torch.arange(300), 0, 0)
    cumulative = (scores.double() / temperature).softmax(-1).cumsum(-1)
    expected = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    assert torch.equal(sample_tokens(scores, uniforms, temperature, 1.0), expected)


def test_the_rows_of_a_large_vocabulary_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, found = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)), []
    for at_once in (1 << 20, 100, 1):
        monkeypatch.setattr("loragate.generation.sampling.SCORES_AT_ONCE", at_once)
        sampler = SeededSampler(SamplingConfig(), torch.arange(7), torch.zeros(7, dtype=torch.int64), 1, [])
        found.append((sampler.choose(torch.zeros(7, 0, dtype=torch.int64), scores), sampler.mean_entropy()))
    for chosen, entropy in found[1:]:
        assert torch.equal(chosen, found[0][0])
        torch.testing.assert_close(entropy, found[0][1], rtol=0, atol=1e-6)


def test_draw_never_takes_an_impossible_token() -> None:
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(3, -1)
    assert sample_tokens(scores, torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64), 1.0, 1.0).tolist() == [
        1,
        3,
        3,
    ]


def test_draw_at_a_tiny_temperature_is_greedy() -> None:
    scores = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    uniforms = uniform(0, torch.arange(50), 0, 0)
    assert torch.equal(sample_tokens(scores, uniforms, 1e-300, 1.0), scores.argmax(-1))


def test_nucleus_is_the_smallest_set_that_reaches_the_mass() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    assert keep_nucleus(probs, 0.6).tolist() == [[0, 0.4, 0, 0.3], [0.25, 0.25, 0.25, 0]]
    assert keep_nucleus(probs, 0.4).tolist() == [[0, 0.4, 0, 0], [0.25, 0.25, 0, 0]]
    assert keep_nucleus(probs, 1e-9)[0].tolist() == [0, 0.4, 0, 0]


def test_top_p_draws_renormalised_nucleus() -> None:
    scores = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    tokens = sample_tokens(scores.expand(20_000, -1), uniform(0, torch.arange(20_000), 0, 0), 1.0, 0.6)
    assert set(tokens.tolist()) == {1, 3}
    share = (tokens == 1).double().mean().item()
    assert share == pytest.approx(4 / 7, abs=5 * math.sqrt(4 / 7 * 3 / 7 / 20_000))


def test_sampler_marks_the_drawn_token_and_stops_counting() -> None:
    config = SamplingConfig(temperature=0)
    sampler = SeededSampler(config, torch.tensor([4, 5]), torch.tensor([0, 0]), prompt_length=3, stop_token_ids=[1])
    scores = torch.tensor([[0.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    first = sampler(torch.zeros(2, 3, dtype=torch.long), scores)
    assert first.tolist() == [[-torch.inf, 0.0, -torch.inf], [0.0, -torch.inf, -torch.inf]]
    sampler(torch.zeros(2, 4, dtype=torch.long), scores)
    assert sampler.tokens_B.tolist() == [1, 2]
    assert sampler.stopped_B.tolist() == [True, False]
    expected = torch.distributions.Categorical(logits=scores.double()).entropy()
    torch.testing.assert_close(sampler.mean_entropy(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("vocabulary", [2, 5 * BLOCK])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_of_running_rows_alone_are_refused(bad: float, vocabulary: int, temperature: float) -> None:
    """A row that has ended may be broken."""
    config = SamplingConfig(temperature=temperature)
    sampler = SeededSampler(config, torch.tensor([8, 9]), torch.tensor([0, 2]), 1, [1])
    scores = torch.full((2, vocabulary), -torch.inf)
    scores[0, 1] = scores[1, 0] = 0.0
    assert sampler.choose(torch.zeros(2, 0, dtype=torch.long), scores).tolist() == [1, 0]
    scores[0] = bad
    assert sampler.choose(torch.zeros(2, 1, dtype=torch.long), scores).tolist() == [1, 0]
    assert sampler.tokens_B.tolist() == [1, 2]
    assert sampler.mean_entropy().isfinite().all()
    scores[1] = bad
    with pytest.raises(LoragateError, match="token 2 of question 9, sample 2"):
        sampler.choose(torch.zeros(2, 2, dtype=torch.long), scores)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop": "END"}, "stop must be a list, found 'END'"),
        ({"temperature": -0.1}, "temperature must be at least 0, found -0.1"),
        ({"top_p": 0.0}, "top_p must be above 0, found 0.0"),
        ({"temperature": 0, "samples": 4}, "all 4 samples of a prompt would be the same"),
    ],
)
def test_config_refuses(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**settings)  # type: ignore[arg-type]


def test_rows_that_are_left_out_change_nothing_for_the_others() -> None:
    config, scores = SamplingConfig(seed=3), torch.randn(4, 3, 9, generator=torch.Generator().manual_seed(0))
    samplers = [SeededSampler(config, torch.tensor([4, 5, 5]), torch.tensor([0, 0, 1]), 2, []) for _ in range(2)]
    tokens = torch.zeros(3, 0, dtype=torch.long)
    for step in range(4):
        if step == 2:
            samplers[1].keep(torch.tensor([0, 2]))
        rows = samplers[1].rows_b
        every, kept = samplers[0].choose(tokens, scores[step]), samplers[1].choose(tokens[rows], scores[step][rows])
        assert kept.tolist() == every[rows].tolist()
        tokens = torch.cat([tokens, every[:, None]], dim=1)
    assert samplers[0].tokens_B.tolist() == [4, 4, 4]
    assert samplers[1].tokens_B.tolist() == [4, 2, 4]
    expected = samplers[0].mean_entropy()
    assert torch.equal(samplers[1].mean_entropy()[[0, 2]], expected[[0, 2]])
