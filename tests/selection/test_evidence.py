"""What the training rows say about a probe."""

from __future__ import annotations

from loragate.selection.evidence import answer_tokens


def test_a_probe_answer_may_take_what_training_answers_take():
    def rows(*lengths):
        return [{"labels": [-100] * 7 + [1] * length} for length in lengths]

    assert answer_tokens(rows(*[14] * 500)) == 48, "14 and half as many again, 16 to spare, in steps of 16"
    assert answer_tokens(rows(*[14] * 500, 4000)) == 48, "one row of its own kind"
    assert answer_tokens(rows(1000, 1000)) == 1520
