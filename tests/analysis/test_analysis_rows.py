"""Rows: classes of their tokens, intervals over them."""

import math

import numpy as np
import pytest
import torch

from loragate.analysis.alignment import terms
from loragate.analysis.context import About
from loragate.analysis.directions import RowDirections
from loragate.analysis.gates import measure_realised_gates
from loragate.analysis.rows import (
    Interval,
    Reader,
    TokenClasses,
    bootstrap_ratio,
    class_of_text,
    require_finite,
    row_weights,
)
from loragate.analysis.token_traces import Answer, Question, trace_answers
from loragate.data import encode_rows
from loragate.errors import ArtifactError
from loragate.generation import Sample
from tiny import tiny_gated, tiny_rows, tiny_tokenizer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 12", "digits"),
        ("+", "operators"),
        (" ≤", "operators"),
        ("don't", "words"),
        ("Ärger", "words"),
        ("x2", "mixed"),
        ("}$", "punctuation"),
        ("\n\n", "space"),
        ("", "mixed"),
        ("\ufffd", "mixed"),
        ("\\frac", "mixed"),
        ("数", "words"),
    ],
)
def test_text(text, expected):
    assert class_of_text(text) == expected


def test_weights_draw_whole_rows():
    weights = row_weights(7, 50, seed=1)
    assert weights.shape == (50, 7)
    assert (weights.sum(1) == 7).all()
    assert np.array_equal(weights, row_weights(7, 50, seed=1))


def test_ratio_is_the_mean_over_tokens():
    found = bootstrap_ratio([4.0, 1.0, 9.0], [4, 1, 5])
    assert found.mean == pytest.approx(1.4)
    assert found.low < 1.4 < found.high
    assert bootstrap_ratio([3.0, 0.0], [2, 0]) == Interval(1.5, None, None)
    assert (found.ends(), bootstrap_ratio([3.0], [2]).ends()) == (f" ({found.low:.2f} to {found.high:.2f})", "")


def test_coverage_on_known_rows():
    """About 95 of 100 intervals over 60 rows hold the truth (a wide allowance for 100 repetitions)."""
    generator = np.random.default_rng(0)
    held = 0
    for repetition in range(100):
        sizes = generator.integers(5, 20, 60)
        means = generator.normal(0.3, 0.1, 60)
        found = bootstrap_ratio(means * sizes, sizes, seed=repetition)
        held += found.low <= 0.3 <= found.high
    assert 86 <= held <= 100


def test_what_is_not_finite_is_refused_by_every_diagnosis():
    """A cosine of NaN would be 1 (its angle 0°), λ of NaN would lie in [0, 1], and a mean of it "is not shown" to be anything."""
    peft, tokenizer = tiny_gated(-2, 3, seed=4), tiny_tokenizer()
    row = next(iter(encode_rows(tiny_rows(1), tokenizer, max_length=64)))
    with torch.no_grad():
        next(part for name, part in peft.named_parameters() if "0.mlp.down_proj.lora_A" in name).fill_(math.nan)
    reader = Reader(peft, tokenizer)
    sample = Sample(0, 0, "", (9, 12), "stop", None)
    for refused in (
        lambda: measure_realised_gates(reader, [row], TokenClasses(tokenizer, ()), About("", {}, "", 0, {}, {}, 0.0)),
        lambda: trace_answers(peft, tokenizer, [Question("q", tokenizer.decode([5]), "", [Answer("gated", sample)])]),
        lambda: terms("all", [RowDirections(torch.full((4, 3), math.nan), 2, 1)]),
        lambda: require_finite([1.0, math.inf], "entropies"),
    ):
        with pytest.raises(ArtifactError, match=r"are not finite.*loragate doctor"):
            refused()
