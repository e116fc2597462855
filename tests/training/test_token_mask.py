"""Influence of tokens as a difference of losses, and the choice of the largest share."""

import json

import numpy as np
import pytest
import torch

from loragate.data import encode_rows, load_rows
from loragate.errors import ConfigError
from loragate.losses.objectives import make_objective
from loragate.training.rows import require_mask_column
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


@pytest.mark.parametrize("objective", ["mask", "forgetting"])
def test_rows_longer_than_what_was_scored_are_refused(tokenizer, tmp_path, objective):
    path = tmp_path / "masked.jsonl"
    # one token of the prompt, ten of the response and its end
    row = {"prompt": "w1", "completion": " ".join(["w2"] * 10), "keep_mask": [1] * 5 + [0] * 6}
    path.write_text(json.dumps(row) + "\n")
    chosen, rows = make_objective(objective, None), load_rows(str(path))
    whole, cut = (encode_rows(rows, tokenizer, max_length=limit) for limit in (None, 8))
    require_mask_column(chosen, whole, rows.source)  # a mask of one's own has no record
    path.with_name("masked.jsonl.record.json").write_text(json.dumps({"max_length": 8}))
    require_mask_column(chosen, cut, rows.source)
    with pytest.raises(ConfigError, match="masked with max_length 8, and a row of this training has 12 tokens"):
        require_mask_column(chosen, whole, rows.source)
    require_mask_column(make_objective("sft", None), whole, rows.source)
