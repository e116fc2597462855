"""Where and how far the adapter moves the predictions: by class of token, by layer and kind of module, token by token.

Both models read the same text, the examples where there are any, else the answers of both to the prompts. Where the adapter
acts is seen by switching modules off in turn: the nats between the adapter with and without them. These do not add up to the
whole, because modules stand in for one another.

Shapes: T response tokens of a batch, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from loragate.analysis.delta_entropy import TokenEntropies, by_class, divergence, measure_token_entropies
from loragate.analysis.rows import Row
from loragate.analysis.token_traces import token_texts
from loragate.display import pluralize
from loragate.doctor.exam_context import ExamContext
from loragate.doctor.record import Cell, ChangedToken, Effect
from loragate.gates.adapter_rules import Finding
from loragate.gates.control import base_unavailable_reason
from loragate.gates.strength import kind_of, layer_of, lora_paths, scale_adapter
from loragate.losses.head import IGNORE_INDEX

TOKENS, ROW_TOKENS = 2048, 64
"""Response tokens that are read, and of one row: many rows make the intervals narrow."""
READING_SECONDS, CELL_SECONDS = 30.0, 90.0
"""For reading with base and adapter, and for switching modules off: both beside the answers within ten minutes."""
CELL_TOKENS, CELL_ROW_TOKENS, FEWEST = 256, 32, 64
"""Response tokens that tell the modules apart at most, those of one row, and the fewest tokens in all; where time allows fewer,
only layers and kinds are told apart. On a CPU it allows 91 with 135M parameters (30 layers, LoRA of rank 16 on 7 kinds), 31 with
0.5B."""
CHANGED, CHANGED_OF_ROW = 12, 2
"""Most changed tokens that are shown, and of one row."""
CONTEXT_TOKENS = 12
"""Tokens of text on each side of a changed token."""
ROUNDING = 1e-6
"""Nats per token (KL) that fp32 rounding makes of two equal predictions; adapters that act make 0.001 or more."""


def examine_effect(exam: ExamContext) -> tuple[Effect | None, list[Finding]]:
    """See `Effect`; None where the base cannot be had by switching the adapter off."""
    if not exam.has_base:
        exam.say(f"what the adapter changes is left out: {base_unavailable_reason(exam.model)}")
        return None, []
    rows, source = _rows(exam)
    if not rows:
        exam.say("what the adapter changes is left out: there is no response token to read")
        return None, []
    rows = exam.subsample_to_budget(rows, 2, READING_SECONDS)
    with exam.job("base and adapter on the same text", len(rows), "rows") as on_progress:
        found = measure_token_entropies(
            exam.reader, exam.loaded.kind, rows, exam.settings.batch_size, on_progress, gates=False
        )
    if not np.isfinite(found.kl).all():
        return None, [_not_finite(found, source)]
    cells, cell_tokens = _ablate_modules(exam, rows)
    effect = Effect(
        source=source,
        rows=len(rows),
        tokens=len(found.token_ids),
        agree=found.agree,
        classes=by_class(found, rows, exam.classes),
        cell_tokens=cell_tokens,
        cells=cells,
        changed=_changed(exam, rows, found),
    )
    return effect, _not_applied(found, source)


def _not_applied(found: TokenEntropies, source: str) -> list[Finding]:
    mean, tokens = float(found.kl.mean()), len(found.token_ids)
    if mean > ROUNDING:
        return []
    return [
        Finding(
            "not-applied",
            "error",
            f"the adapter changes nothing: on {pluralize(tokens, 'token')} ({source}) the model predicts the same with and "
            f"without it (KL {mean:.1g} nats per token, {found.kl.max():.1g} at the most; one that acts moves predictions by "
            "0.001 or more)",
            "check that training ran and that what it trained was saved: lora_B is 0 in an adapter as it is made, before its "
            "first step",
            {"kl": mean, "largest": float(found.kl.max()), "tokens": tokens},
        )
    ]


def _not_finite(found: TokenEntropies, source: str) -> Finding:
    share = float((~np.isfinite(found.kl)).mean())
    return Finding(
        "weights-not-finite",
        "error",
        f"with the adapter the model computes no finite predictions at {100 * share:.0f} % of "
        f"{pluralize(len(found.kl), 'token')} ({source})",
        "compare lora_alpha, r and use_rslora in adapter_config.json with those of the training, and try --dtype float32",
        {"share": share},
    )


def _rows(exam: ExamContext) -> tuple[list[Row], str]:
    """Rows of few response tokens in a random order, so that the first are a sample of all, and what they are."""
    if exam.rows:
        assert exam.examples is not None
        rows, source = exam.rows, f"examples of {exam.examples.source}"
    else:
        rows = [*exam.greedy_answer_rows("adapter"), *exam.greedy_answer_rows("base")]
        source = f"answers of base and adapter to {pluralize(len(exam.prompts), 'prompt')}"
    cut = [_cut(rows[at], ROW_TOKENS) for at in np.random.default_rng(0).permutation(len(rows))]
    return _take_within_budget([row for row in cut if _responses(row)], TOKENS), source


def _cut(row: Row, tokens: int) -> Row:
    """The row up to the last of its first response tokens."""
    end = next(iter(_response_positions(row)[tokens - 1 :]), len(row["labels"])) + 1
    return {**row, "input_ids": row["input_ids"][:end], "labels": row["labels"][:end]}


def _response_positions(row: Row) -> list[int]:
    """Where the response tokens stand; the first token of all is predicted from nothing."""
    return [at for at, label in enumerate(row["labels"]) if at and label != IGNORE_INDEX]


def _responses(row: Row) -> int:
    return len(_response_positions(row))


def _take_within_budget(rows: Sequence[Row], most: float, size: Callable[[Row], int] = _responses) -> list[Row]:
    """The first rows with so many response tokens (or what `size` counts), one row at the least."""
    reached = np.cumsum([size(row) for row in rows])
    return list(rows[: max(1, int((reached <= most).sum()))])


def _ablate_modules(exam: ExamContext, rows: Sequence[Row]) -> tuple[tuple[Cell, ...], int]:
    """Every layer and kind, every layer, every kind switched off in turn, and the response tokens that this was read on."""
    modules: dict[tuple[int | None, str | None], list[str]] = {}
    for path in lora_paths(exam.model):
        layer, kind = layer_of(path), kind_of(path)
        for place in dict.fromkeys([(layer, kind), (layer, None), (None, kind)]):
            if place != (None, None):
                modules.setdefault(place, []).append(path)
    # short rows first: more of their tokens are response
    ascending = sorted((_cut(row, CELL_ROW_TOKENS) for row in rows), key=lambda row: len(row["input_ids"]))
    short = _take_within_budget(ascending[: exam.settings.batch_size], CELL_TOKENS)
    if exam.token_budget(CELL_SECONDS / (1 + len(modules))) < min(FEWEST, sum(len(row["input_ids"]) for row in short)):
        modules = {place: paths for place, paths in modules.items() if None in place}
    chosen = _take_within_budget(
        short, exam.token_budget(CELL_SECONDS / (1 + len(modules))), lambda row: len(row["input_ids"])
    )
    batch = exam.reader.batch(*chosen)
    nats: dict[tuple[str, ...], float] = {}
    ordered = sorted(modules, key=lambda place: (place[0] is None, place[1] is None))
    with torch.no_grad(), exam.acting("adapter"):
        with_all_TV = exam.reader.log_probs(exam.reader.states(batch))
        with exam.job("switching modules off in turn", len(ordered), "cells") as on_progress:
            for done, place in enumerate(ordered, 1):
                paths = tuple(modules[place])
                if paths not in nats:
                    with scale_adapter(exam.model, dict.fromkeys(paths, 0.0)):
                        without_TV = exam.reader.log_probs(exam.reader.states(batch))
                    nats[paths] = float(divergence(with_all_TV, without_TV).mean())
                on_progress(done, len(ordered))
    cells = tuple(Cell(*place, nats[tuple(modules[place])]) for place in ordered)
    return cells, sum(map(_responses, chosen))


def _changed(exam: ExamContext, rows: Sequence[Row], found: TokenEntropies) -> tuple[ChangedToken, ...]:
    """The most changed tokens, most first, from several rows."""
    shown: list[ChangedToken] = []
    taken: Counter[int] = Counter()
    first = np.searchsorted(found.rows, found.rows)  # of each token's row
    for at in np.argsort(-found.kl, kind="stable"):
        index = int(found.rows[at])
        if len(shown) == CHANGED or found.kl[at] <= ROUNDING:
            break
        if taken[index] == CHANGED_OF_ROW:
            continue
        taken[index] += 1
        ids, place = rows[index]["input_ids"], _response_positions(rows[index])[at - first[at]]
        start = max(0, place - CONTEXT_TOKENS)
        texts = token_texts(exam.tokenizer, ids[start : place + 1 + CONTEXT_TOKENS])
        here = place - start
        base, adapter = (
            tuple(
                (exam.tokenizer.decode([int(token)]), float(share))
                for token, share in zip(found.top_token_ids[name][at], found.top_probs[name][at], strict=True)
            )
            for name in ("base", "adapter")
        )
        kl = float(found.kl[at])
        around = "".join(texts[:here]), texts[here], "".join(texts[here + 1 :])
        shown.append(ChangedToken(*around, kl, base, adapter))
    return tuple(shown)
