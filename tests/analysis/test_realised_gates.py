"""Realised λ on generated tokens, against λ taken one by one."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import loragate as lg
from loragate.analysis.context import About
from loragate.analysis.gates import histogram_edges, measure_realised_gates
from loragate.analysis.rows import Reader, TokenClasses, answer_rows
from loragate.gates import trace_gates
from loragate.gates.range import Range
from loragate.generation import SamplingConfig, TransformersEngine
from tiny import VOCABULARY, tiny_gated, tiny_tokenizer

PROMPTS = ["w1 w2 w3", "w9"]
ABOUT = About("now", {}, "answers", 0, {}, {}, 1.0)


def counted(peft):
    tokenizer = tiny_tokenizer()
    samples = TransformersEngine(peft, tokenizer).generate(PROMPTS, SamplingConfig(samples=2, max_new_tokens=6, seed=1))
    rows = answer_rows(tokenizer(PROMPTS, add_special_tokens=False)["input_ids"], samples)
    classes = TokenClasses(tokenizer, {tokenizer.eos_token_id})
    return rows, measure_realised_gates(Reader(peft, tokenizer), rows, classes, ABOUT, 3)


def test_shares_are_those_of_single_coefficients():
    peft = tiny_gated(-3, 2, 0.4)
    rows, record = counted(peft)
    every = []
    for row in rows:
        with torch.no_grad(), trace_gates(peft) as traced:
            peft(input_ids=torch.tensor([row["input_ids"]]))
        start = next(at for at, label in enumerate(row["labels"]) if label >= 0)
        every.append(np.stack([v[0][0, start - 1 : len(row["labels"]) - 1].numpy() for v in traced.values()]))
    values = np.concatenate(every, axis=1)
    assert record.tokens == values.shape[1]
    assert record.all.count == values.size
    assert record.all.below_zero == pytest.approx((values < 0).mean())
    assert record.all.above_one == pytest.approx((values > 1).mean())
    assert record.all.mean == pytest.approx(values.mean(), abs=1e-5)
    assert sum(record.histogram.counts) == values.size
    assert len(record.modules) == len(lg.gate_parameters(peft)) // 2
    assert (
        sum(s.count for s in record.by_layer.values()) == sum(s.count for s in record.by_type.values()) == values.size
    )


class VocabularyWide(TorchDispatchMode):
    """Counts the tensors that are made as wide as the vocabulary."""

    found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            self.found += torch.is_tensor(tensor) and tensor.dim() > 1 and tensor.shape[-1] == VOCABULARY
        return made


def test_no_logits_are_made():
    peft, tokenizer = tiny_gated(-3, 2, 0.4), tiny_tokenizer()
    row = {"input_ids": list(range(5, 25)), "labels": [-100] * 4 + list(range(9, 25)), "row": 0}
    reader = Reader(peft, tokenizer)  # it compares its head with the model's, once
    with VocabularyWide() as seen:
        measure_realised_gates(reader, [row] * 3, TokenClasses(tokenizer, set()), ABOUT)
    assert seen.found == 0
    with VocabularyWide() as seen, torch.no_grad():
        peft(input_ids=torch.tensor([row["input_ids"]]))
    assert seen.found > 0, "the model's own forward makes them"


def test_histogram_has_zero_and_one_among_its_edges():
    for lower, upper in ((-6, 3), (0, 1), (-0.3, 1), (0, 6)):
        edges = histogram_edges(Range(lower, upper))
        assert (np.diff(edges) > 0).all()
        assert {0.0, 1.0} <= set(edges.tolist())
        assert (edges[0], edges[-1]) == (lower, upper)
