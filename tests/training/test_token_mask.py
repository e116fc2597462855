"""Influence of tokens as a difference of losses, and the choice of the largest share."""

import numpy as np
import pytest
import torch

from loragate.data import encode_rows
from loragate.training.token_mask import keep_masks, response_lengths, response_log_probs
from tiny import tiny_base, tiny_rows


def influence_of(rng, lengths):
    return [rng.normal(size=length).astype(np.float32) for length in lengths]


def test_log_probs_equal_a_plain_forward(tokenizer):
    encoded = encode_rows(tiny_rows(11), tokenizer, max_length=None)
    model = tiny_base()
    found = [
        values for window in response_log_probs(model, encoded, 0, per_device_train_batch_size=3) for values in window
    ]
    assert [len(values) for values in found] == response_lengths(encoded)
    for row, values in zip(encoded, found, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"])[1:]
        kept = labels != -100
        expected = torch.log_softmax(logits, -1)[kept].gather(-1, labels[kept].unsqueeze(-1)).squeeze(-1)
        np.testing.assert_allclose(values, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("keep", [0.05, 0.6, 1.0])
def test_the_choice_is_the_published_one(keep):
    """Written as the method states it: sort (score, row, position), take the first int(keep · N)."""
    scores = influence_of(np.random.default_rng(0), [5, 1, 17, 8])
    tokens = [(float(v), i, j) for i, row in enumerate(scores) for j, v in enumerate(row)]
    chosen = {(i, j) for _, i, j in sorted(tokens, key=lambda t: t[0], reverse=True)[: int(len(tokens) * keep)]}
    expected = [[int((i, j) in chosen) for j in range(len(row))] for i, row in enumerate(scores)]
    assert [mask.tolist() for mask in keep_masks(scores, keep)] == expected
    rows = keep_masks(scores, keep, "row")
    for values, mask in zip(scores, rows, strict=True):
        count = int(len(values) * keep)
        assert mask.sum() == count
        if 0 < count < len(values):
            assert values[mask == 1].min() >= values[mask == 0].max()


def test_equal_influences_keep_the_earlier_token():
    assert [mask.tolist() for mask in keep_masks([np.zeros(3), np.zeros(3)], 0.5)] == [[1, 1, 1], [0, 0, 0]]
