"""Rows that share a forward pass: none computes other numbers for the rows beside it."""

import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loragate.analysis.rows import Reader
from loragate.data import encode_rows, load_rows
from loragate.models.passes import iter_passes
from loragate.training.token_mask import response_log_probs
from tiny import tiny_base, tiny_tokenizer

LENGTH = 16


def model_of(**rope):
    config = types.SimpleNamespace(rope_parameters=rope)
    return types.SimpleNamespace(config=types.SimpleNamespace(get_text_config=lambda: config))


LONGROPE = model_of(rope_type="longrope", original_max_position_embeddings=LENGTH)


@given(st.lists(st.integers(1, 40)), st.integers(1, 5))
def test_rows_of_both_sides_of_the_length_share_no_pass(lengths, size):
    passes = list(iter_passes(LONGROPE, lengths, size))
    assert [row for rows in passes for row in rows] == list(range(len(lengths)))
    assert all(1 <= len(rows) <= size for rows in passes)
    sides = [{lengths[row] > LENGTH for row in rows} for rows in passes]
    assert all(len(side) == 1 for side in sides)
    # and a pass ends for a reason
    for (rows, side), after in zip(zip(passes, sides), sides[1:]):
        assert len(rows) == size or side != after


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20))), st.integers(1, 5))
def test_answers_cross_the_length_at_one_step(rows, size):
    rows = sorted(rows, reverse=True)
    lengths, limits = [length for length, _ in rows], [limit for _, limit in rows]
    for members in iter_passes(LONGROPE, lengths, size, limits):
        inside = all(lengths[row] + limits[row] <= LENGTH for row in members)
        outside = all(lengths[row] > LENGTH for row in members)
        assert inside or outside or len({lengths[row] for row in members}) == 1


def test_other_models_fill_their_passes():
    assert list(iter_passes(model_of(rope_type="llama3"), [30, 3, 30, 3, 3], 2)) == [[0, 1], [2, 3], [4]]
    # a table of 32 positions: the answer of the second row would carry the first past its end
    assert list(iter_passes(model_of(), [30, 20], 2, [2, 10], positions=32)) == [[0], [1]]


def test_readers_and_masks_read_a_row_as_if_it_were_alone():
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": LENGTH}
    rope = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 10000.0, **factors}
    model = tiny_base(max_position_embeddings=64, rope_parameters=rope)
    given = [{"prompt": "w1", "completion": " ".join(f"w{count}" for _ in range(count))} for count in (3, 30, 4, 5, 40)]
    tokenizer = tiny_tokenizer()
    rows = encode_rows(load_rows(given), tokenizer, max_length=64)[:]
    reader = Reader(model, tokenizer)
    read, scored = {}, {}
    for size in (1, 4):
        found = [(rows_T, reader.label_log_probs(batch)) for batch, rows_T, _ in reader.batches(rows, size)]
        read[size] = np.concatenate([np.stack([rows_T, values.numpy()]) for rows_T, values in found], axis=1)
        windows = response_log_probs(model, rows, 0, per_device_train_batch_size=size)
        scored[size] = np.concatenate([values for window in windows for values in window])
    assert read[4] == pytest.approx(read[1], abs=1e-5)
    assert scored[4] == pytest.approx(scored[1], abs=1e-5)
    assert scored[1] == pytest.approx(read[1][1], abs=1e-5)
