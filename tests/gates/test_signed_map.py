"""The signed map: values, slopes, end points, refusals (eq:rw-gate-logit, eq:rw-transform, eq:rw-transform-branches)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loragate.errors import GateError
from loragate.gates.gate import GateConfig
from loragate.gates.signed_map import gate_coefficient

RANGES = [(-6.0, 3.0), (-3.0, 1.0), (0.0, 1.0), (0.0, 6.0), (-4.0, 4.0)]


@pytest.mark.parametrize(("lower", "upper"), RANGES)
def test_identity_zero_and_ends(lower, upper):
    logits = torch.tensor([0.0, -0.0, 1e4, -1e4])
    lam = gate_coefficient(logits, lower, upper, 1.0)
    assert lam.dtype == torch.float32
    assert lam.tolist() == [1.0, 1.0, upper, lower]
    if lower < 0:
        root = torch.atanh(torch.tensor(-1.0 / (1.0 - lower), dtype=torch.float64))
        assert gate_coefficient(root, lower, upper, 1.0).item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("lower", "upper"), RANGES)
def test_matches_the_papers_formula(lower, upper):
    logits = torch.linspace(-4, 4, 101, dtype=torch.float64)
    v = torch.tanh(logits / 0.7)
    expected = 1 + (1 - lower) * torch.minimum(v, torch.zeros_like(v)) + (upper - 1) * torch.clamp(v, min=0)
    torch.testing.assert_close(gate_coefficient(logits, lower, upper, 0.7), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("lower", "upper"), RANGES)
def test_slope_at_the_join_is_that_of_one_branch(lower, upper):
    at_zero = torch.zeros(1, requires_grad=True)
    gate_coefficient(at_zero, lower, upper, 1.0).backward()
    assert at_zero.grad.item() == pytest.approx(upper - 1)
    below = torch.tensor([-1e-6], requires_grad=True)
    gate_coefficient(below, lower, upper, 1.0).backward()
    assert below.grad.item() == pytest.approx(1 - lower, rel=1e-5)


@given(logit=st.floats(-50, 50), lower=st.floats(-10, 0), upper=st.floats(1, 10), tau=st.floats(0.1, 10))
def test_image_and_monotonicity(logit, lower, upper, tau):
    pair = gate_coefficient(torch.tensor([logit, logit + 0.5], dtype=torch.float64), lower, upper, tau)
    assert lower - 1e-9 <= pair[0].item() <= upper + 1e-9
    assert pair[1] >= pair[0] - 1e-12


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"tau": 0}, "tau must be above 0"),
        ({"granularity": "tokens"}, "did you mean 'token'"),
        ({"target_modules": []}, "target_modules must be text or a list"),
        ({"init_scale": -1e-6}, "init_scale"),
        ({"lower": 3}, "wrong way round"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"detach_input": 1}, "detach_input must be true or false"),
    ],
)
def test_other_settings_are_checked(setting, words):
    with pytest.raises(GateError, match=words):
        GateConfig(**{"lower": -1, "upper": 2, **setting})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0.2, 0.8), "lower bound must be ≤ 0"),
        ((-1, 0.8), "upper bound must be ≥ 1"),
        ((float("nan"), 1), "lower must be a finite number"),
        ((0, float("inf")), "upper must be a finite number"),
        ((-1, 1, 0.0), "tau must be positive"),
        ((-1, 1, -1.0), "tau must be positive"),
    ],
)
def test_the_map_refuses_what_is_no_range(arguments, words):
    with pytest.raises(GateError, match=words):
        gate_coefficient(torch.zeros(2), *arguments)
