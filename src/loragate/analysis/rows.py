"""Rows of token ids: read by a model at the positions that count, told apart by the kind of token, with intervals over rows.

A row is what `loragate.data` makes of demonstrations, or an answer behind its prompt; either way its labels say which
tokens are response. Final hidden states stand for logits as long as they can: the head is applied in chunks. Tokens of one
row resemble one another, so intervals come from drawing whole rows again.

Shapes: B sequences, S positions, T counted positions of a batch in row order, D hidden, V vocabulary, C chunk of positions;
N rows, W draws.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from loragate.data import Collator
from loragate.errors import ArtifactError, TrainingError
from loragate.losses import StatisticsRequest, verify_head
from loragate.losses.causal_head import Batch, Reference, causal_model, read_head, response_mask, statistics_of_states
from loragate.losses.head import IGNORE_INDEX
from loragate.losses.projection import Head
from loragate.models.passes import iter_passes

if TYPE_CHECKING:
    from loragate.generation import OnProgress, Sample

Row = dict[str, Any]
Array = NDArray[np.float64]
CHUNK = 256
DRAWS = 2000
CONFIDENCE = 0.95


def no_progress(done: int, of: int) -> None:
    """An `OnProgress` for nobody."""


def answer_rows(
    prompt_ids: Sequence[Sequence[int]], samples: Sequence[Sample], max_length: int | None = None
) -> list[Row]:
    """Rows {input_ids, labels, row} of answers behind their prompts, both together cut to `max_length` tokens (None: whole), as
    rows of a file are; `row` is the index of the sample. Those of which no response token is left are left out."""
    rows = []
    for index, sample in enumerate(samples):
        head, answer = list(prompt_ids[sample.question]), list(sample.token_ids)
        ids, labels = [*head, *answer][:max_length], [*[IGNORE_INDEX] * len(head), *answer][:max_length]
        if len(ids) > len(head):
            rows.append({"input_ids": ids, "labels": labels, "row": index})
    return rows


def distinct(rows: Sequence[Row]) -> np.ndarray:
    """For each row the number of its text, in order of first appearance: rows that repeat are one in intervals, [N]."""
    seen: dict[tuple[tuple[int, ...], ...], int] = {}
    return np.array(
        [seen.setdefault((tuple(row["input_ids"]), tuple(row["labels"])), len(seen)) for row in rows], np.int64
    )


class Reader:
    """What a causal model says at the counted positions of rows, with whatever acts on it at the moment.

    One pass of the body gives the states, of which several things may be read. `fused` says whether the output head is projected
    in chunks (False: full logits).
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.causal = model, causal_model(model)
        adapters = (getattr(model, "peft_config", None) or {}).values()
        # PeftModel.forward alone finds the tokens from which on an activated LoRA acts
        activated = any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters)
        self.fused = not activated and verify_head(self.causal)
        # padding is masked, and right of causal attention changes nothing
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.collate, self.device = Collator(int(pad)), next(model.parameters()).device

    def batch(self, *rows: Row) -> Batch:
        """The rows side by side on the model's device, padded on the right."""
        batch = self.collate([{key: row[key] for key in ("input_ids", "labels", "row")} for row in rows])
        return {key: value.to(self.device) for key, value in batch.items()}

    def batches(
        self, rows: Sequence[Row], size: int, on_progress: OnProgress = no_progress
    ) -> Iterator[tuple[Batch, np.ndarray, np.ndarray]]:
        """Batches in the order of the rows, each with (row, token id) of its counted tokens, [T] and [T]."""
        for members in iter_passes(self.causal, [len(row["input_ids"]) for row in rows], size):
            batch = self.batch(*(rows[index] for index in members))
            mask = response_mask(batch)
            yield batch, mask.nonzero()[:, 0].cpu().numpy() + members[0], batch["labels"][:, 1:][mask].cpu().numpy()
            on_progress(members[-1] + 1, len(rows))

    def states(self, batch: Batch) -> Tensor:
        """Final hidden states (or full logits) at the positions that predict a response token, [T, D] (or [T, V])."""
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
        output = self.causal.base_model(**inputs).last_hidden_state if self.fused else self.model(**inputs).logits
        # a model that is spread over devices ends on another one than it begins
        return output[:, :-1][response_mask(batch).to(output.device)]

    def head(self) -> Head:
        """The frozen output head; raises TrainingError where it is none any more."""
        head = read_head(self.causal)
        if head is None:
            raise TrainingError("the output head changed during training; it must stay frozen")
        return head

    def logits(self, states: Tensor) -> Tensor:
        """Logits [C, V] of a chunk of states, fp32 (fp64 stays fp64), differentiable."""
        working = torch.float64 if states.dtype == torch.float64 else torch.float32
        return self.head().logits(states, working) if self.fused else states.to(working)

    @torch.no_grad()
    def log_probs(self, states: Tensor) -> Tensor:
        """Log-probabilities [C, V] of a chunk of states under the head that acts at the moment, fp32, without gradients."""
        whole = Reference(states, self.head() if self.fused else None)
        return whole.log_probs(whole.vocabulary)

    @torch.no_grad()
    def label_log_probs(self, batch: Batch) -> Tensor:
        """log p of the response tokens, [T] fp32, without gradients."""
        states, head = self.states(batch), self.head() if self.fused else None
        states = states if head is None else states.to(head.weight.device)
        labels_T = batch["labels"][:, 1:][response_mask(batch)].to(states.device)
        return statistics_of_states(states, head, labels_T, StatisticsRequest(2, ("log_prob",), ())).log_prob


CLASSES = ("digits", "operators", "words", "punctuation", "space", "mixed", "special", "end")
"""end: a token that ends an answer; special: the tokenizer's other special tokens; mixed: several kinds in one token, or a
part of a character."""
_OPERATORS = frozenset("+-*/=<>^%±×÷·−≤≥≠≈√∑∏∫")
_INNER = frozenset("'’-_")


def class_of_text(text: str) -> str:
    """The class of a token that is not special, by its text without white space around it; its context does not count.

    >>> class_of_text(" 12"), class_of_text("+"), class_of_text("don't"), class_of_text("x2")
    ('digits', 'operators', 'words', 'mixed')
    """
    stripped = text.strip()
    if not stripped:
        return "space" if text else "mixed"
    if all(character.isdecimal() for character in stripped):
        return "digits"
    if all(character in _OPERATORS for character in stripped):
        return "operators"
    if stripped[0].isalpha() and all(character.isalpha() or character in _INNER for character in stripped):
        return "words"
    if all(unicodedata.category(character)[0] in "PS" and character != "\ufffd" for character in stripped):
        return "punctuation"
    return "mixed"


class TokenClasses:
    """Classes of a tokenizer's tokens, found when first asked for; `ends` are all ids that end an answer."""

    def __init__(self, tokenizer: Any, ends: Collection[int]) -> None:
        self.tokenizer, self.ends = tokenizer, frozenset(ends)
        self.special = frozenset(tokenizer.all_special_ids)
        self._known: dict[int, str] = {}

    def name(self, token_id: int) -> str:
        """The token's class."""
        if token_id not in self._known:
            # an id that ends answers need not be one of the tokenizer's
            known = "end" if token_id in self.ends else "special" if token_id in self.special else self._read(token_id)
            self._known[token_id] = known
        return self._known[token_id]

    def _read(self, token_id: int) -> str:
        text = self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        if not text:  # a SentencePiece blank decodes to nothing when it stands alone
            piece = self.tokenizer.convert_ids_to_tokens(token_id)
            text = " " if isinstance(piece, str) and piece and not piece.strip("▁Ġ ") else text
        return class_of_text(text)

    def indices(self, token_ids: Iterable[int]) -> np.ndarray:
        """Positions of several tokens' classes in `CLASSES`, int64."""
        return np.array([CLASSES.index(self.name(int(token_id))) for token_id in token_ids], dtype=np.int64)


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % percentile interval over rows; the ends are None where rows are too few to say."""

    mean: float
    low: float | None
    high: float | None

    def ends(self, form: str = ".2f") -> str:
        """ " (low to high)" in this format; empty where there is no interval."""
        return "" if self.low is None or self.high is None else f" ({self.low:{form}} to {self.high:{form}})"


@dataclass(frozen=True)
class ClassEntropy:
    """One class of tokens (or "all"); intervals over rows.

    Attributes:
        tokens: number of tokens.
        delta: mean ΔH in nats.
        negative, positive: share of tokens with ΔH below, above 0.
        kl: mean KL(adapter‖base) in nats.
        base, adapter, gated: mean entropies; gated is None without gates.
    """

    name: str
    tokens: int
    delta: Interval
    negative: Interval
    positive: Interval
    kl: Interval
    base: Interval
    adapter: Interval
    gated: Interval | None = None


@dataclass(frozen=True)
class Histogram:
    """Counts between consecutive edges; what lies outside is counted in the first and last bin."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, edges: np.ndarray, counts: np.ndarray) -> Histogram:
        """From the arrays of `np.histogram`."""
        return cls(tuple(edges.tolist()), tuple(counts.astype(int).tolist()))


def require_finite(values: ArrayLike, what: str) -> None:
    """Raise ArtifactError where a figure is NaN or infinite: a mean of it says nothing, and comparisons with it are false."""
    bad = ~np.isfinite(np.asarray(values))
    if bad.any():
        raise ArtifactError(
            f"{what}: {bad.sum():,} of {bad.size:,} are not finite, so nothing can be said about them; `loragate doctor` examines "
            "the adapter's weights and its strength (lora_alpha, r and use_rslora in adapter_config.json)"
        )


def row_weights(rows: int, draws: int = DRAWS, seed: int = 0) -> Array:
    """How often each row was drawn, [W, N]; every line sums to N."""
    return np.random.default_rng(seed).multinomial(rows, [1 / rows] * rows, size=draws).astype(np.float64)


def percentiles(values: ArrayLike) -> tuple[float | None, float | None]:
    """Low and high of bootstrap values [W]; values that are not finite (empty draws) are left out."""
    array = np.asarray(values, dtype=np.float64)
    array = array[np.isfinite(array)]
    if len(array) < 2:
        return None, None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(array, [tail, 1 - tail])
    return float(low), float(high)


def bootstrap_ratio(numerators: ArrayLike, denominators: ArrayLike, seed: int = 0) -> Interval:
    """Σ numerators / Σ denominators over rows [N], of which the latter is not 0, with its interval.

    The mean over tokens of rows of unequal length is such a ratio (sum over tokens ÷ number of tokens).
    """
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    mean = float(top.sum() / bottom.sum())
    if (bottom != 0).sum() < 2:  # drawn again, one row gives the same ratio each time
        return Interval(mean, None, None)
    weights = row_weights(len(top), seed=seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        return Interval(mean, *percentiles((weights @ top) / (weights @ bottom)))
