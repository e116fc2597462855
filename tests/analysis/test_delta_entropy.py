"""ΔH on teacher-forced prefixes: against full logits, by class, with records that come back as they went."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import loragate as lg
from loragate.analysis import delta_entropy
from loragate.analysis.context import About, Answers, DiagnosticContext
from loragate.analysis.delta_entropy import (
    ALL,
    EntropyRecord,
    by_class,
    conclude_entropy,
    distribution,
    measure_token_entropies,
)
from loragate.analysis.rows import Interval, Reader, TokenClasses
from loragate.data import encode_rows
from loragate.errors import ArtifactError
from loragate.evaluation.prepared import Request
from loragate.evaluation.settings import TaskSettings
from loragate.generation import Sample
from tiny import logits, tiny_adapter, tiny_base, tiny_gated, tiny_rows, tiny_tokenizer


def record_of(rows=0, tokens=0, classes=(), distribution=None):
    about = About("now", {}, "rows", 0, {}, {}, 1.0)
    found = {"rows": rows, "tokens": tokens, "classes": classes, "distribution": distribution}
    return EntropyRecord(about=about, conclusion=("nothing",), interventions=(), **found)


def encoded(count=6):
    tokenizer = tiny_tokenizer()
    return tokenizer, list(encode_rows(tiny_rows(count), tokenizer, max_length=64))


def test_delta_is_the_difference_of_full_entropies():
    """eq:rw-delta-entropy at every response token, whatever the batch size."""
    tokenizer, rows = encoded()
    peft = tiny_gated(-2, 2, 0.4)
    found = measure_token_entropies(Reader(peft, tokenizer), "gated", rows, batch_size=4)
    for index, row in enumerate(rows):
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        kept = labels[1:] >= 0

        def entropies(ids=ids, kept=kept):
            with torch.no_grad():
                return torch.special.entr(peft(input_ids=ids).logits[0, :-1][kept].softmax(-1)).sum(-1).numpy()

        gated = entropies()
        with lg.gate_override(peft, constant=1.0):
            adapter = entropies()
        with peft.disable_adapter():
            base = entropies()
        at = found.rows == index
        assert np.allclose(found.delta[at], adapter - base, atol=1e-5)
        assert np.allclose(found.entropy["gated"][at], gated, atol=1e-5)
        assert found.token_ids[at].tolist() == labels[labels >= 0].tolist()


def test_rows_that_repeat_are_one_row_of_an_interval():
    """A file of one row, six times over, says as little as the row alone; two rows, three times each, as much as the two."""
    tokenizer, rows = encoded(2)
    reader, classes = Reader(tiny_adapter(), tokenizer), TokenClasses(tokenizer, {tokenizer.eos_token_id})

    def total(rows):
        return by_class(measure_token_entropies(reader, "adapter", rows, 4), rows, classes)[0]

    assert (total(rows[:1] * 6).delta.low, total(rows[:1] * 6).kl.high) == (None, None)
    once, thrice = total(rows), total(rows * 3)
    assert thrice.tokens == 3 * once.tokens
    ends = [(one.delta.mean, one.delta.low, one.delta.high) for one in (once, thrice)]
    assert ends[0] == pytest.approx(ends[1], abs=1e-6)


@pytest.mark.parametrize("copies", [None, ["lm_head"]])
def test_how_far_predictions_move(copies, monkeypatch):
    """KL(adapter‖base) and the likeliest tokens against full logits, in chunks, where the head is a copy of its own too."""
    monkeypatch.setattr(delta_entropy, "CHUNK", 5)
    tokenizer, rows = encoded(3)
    peft = tiny_adapter(base=tiny_base(tie_word_embeddings=False), modules_to_save=copies)
    if copies:
        with torch.no_grad():
            peft.get_output_embeddings().modules_to_save["default"].weight.mul_(1.5)
    for parameter in peft.parameters():
        parameter.requires_grad_(False)
    found = measure_token_entropies(Reader(peft, tokenizer), "adapter", rows)
    kl, agree = [], []
    for row in rows:
        ids, kept = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])[1:] >= 0
        adapter = logits(peft, ids)[0, :-1][kept].log_softmax(-1)
        with peft.disable_adapter():
            base = logits(peft, ids)[0, :-1][kept].log_softmax(-1)
        kl += torch.nn.functional.kl_div(base, adapter, reduction="none", log_target=True).sum(-1).tolist()
        agree += (adapter.argmax(-1) == base.argmax(-1)).tolist()
    assert found.kl == pytest.approx(np.array(kl), rel=1e-4, abs=1e-6)
    assert min(kl) > 0.01
    assert found.agree == pytest.approx(np.mean(agree))
    assert found.agree < 1
    assert found.top_token_ids["adapter"][-1].tolist() == adapter[-1].topk(3).indices.tolist()
    assert found.top_probs["base"][-1] == pytest.approx(base[-1].exp().topk(3).values.numpy(), abs=1e-6)


def test_figures_of_answers_that_are_read_again_must_be_finite(tmp_path, monkeypatch):
    """ΔH of NaN is neither below nor above 0: the delta would be called switched off nowhere."""
    tokenizer, peft = tiny_tokenizer(), tiny_adapter()
    with torch.no_grad():
        next(part for name, part in peft.named_parameters() if "0.mlp.down_proj.lora_A" in name).fill_(np.nan)
    task = SimpleNamespace(task=SimpleNamespace(name="words"), prompts=["w1 w2"])
    scored = SimpleNamespace(control="negative", task="words", label="adapter negative", avg_at_k=None)
    scored.comparison = scored.adjusted_p = scored.verdict = None
    answers = Answers(task, [(Sample(0, 0, "", (9, 12), "stop", None), None)])
    monkeypatch.setattr(delta_entropy, "open_evaluation", lambda *_: SimpleNamespace(tasks=[task]))
    monkeypatch.setattr(delta_entropy, "stored_answers", lambda *_: answers)
    monkeypatch.setattr(DiagnosticContext, "evaluate", lambda *_: SimpleNamespace(results=[scored]))
    loaded = SimpleNamespace(model=peft, tokenizer=tokenizer, kind="adapter")
    monkeypatch.setattr(DiagnosticContext, "loaded", loaded)
    with pytest.raises(ArtifactError, match="entropies of the adapter model, token by token"):
        delta_entropy._intervene(DiagnosticContext(Request("adapter", tmp_path, TaskSettings())), ["negative"])


def test_table():
    tokenizer, rows = encoded()
    peft = tiny_adapter()
    found = measure_token_entropies(Reader(peft, tokenizer), "adapter", rows)
    classes = TokenClasses(tokenizer, {tokenizer.eos_token_id})
    table = by_class(found, rows, classes)
    assert table[0].name == ALL
    assert table[0].tokens == sum(row.tokens for row in table[1:]) == len(found.token_ids)
    assert table[0].delta.mean == pytest.approx(found.delta.mean())
    assert table[0].negative.mean + table[0].positive.mean == pytest.approx(1.0)
    assert table[0].gated is None
    assert table[0].kl.mean == pytest.approx(found.kl.mean())
    assert {row.name for row in table[1:]} == {"mixed", "end"}, "the tokens of the test are w0, w1, …"
    histogram = distribution(found.delta)
    assert sum(histogram.counts) == len(found.delta)

    def said(low, high):
        total = replace(table[0], delta=Interval(0.25, low, high))
        tokens = len(found.token_ids)
        return conclude_entropy(
            record_of(rows=len(rows), tokens=tokens, classes=(total, *table[1:]), distribution=histogram)
        )[0]

    assert said(0.1, 0.4).startswith("The adapter raises the entropy by 0.250 nats per token on average")
    for ends in ((-0.1, 0.6), (None, None)):
        assert said(*ends).startswith("The adapter is not shown to raise or lower the entropy: +0.250 nats per token")
