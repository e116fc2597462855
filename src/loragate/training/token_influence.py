"""Offline token masks: how much a reference model that learned the task gains on each response token, and which to keep.

Token Cleaning (arXiv 2502.01968), fixed-model variant. With the base model θ and a reference θ′, a finetuned copy of it,

    influence_t = ℓ_t(θ) − ℓ_t(θ′),    ℓ_t = −log p(y_t | y_<t, x)

and the tokens of the largest influence are kept: the first `int(keep · N)` of all N response tokens ("global", the
method's own choice) or of each row ("row"). Scores of finished passes are kept in a folder, so that long work can be
interrupted. The self-evolving variant is this one repeated by hand on the parts of a data set, each time with the model
trained on the part before as the reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loragate.data import Collator
from loragate.errors import ConfigError, DataError, nearest
from loragate.files import write_json
from loragate.losses import StatisticsRequest
from loragate.losses.head import IGNORED
from loragate.training.model_state import statistics_forward

SCOPES = ("global", "row")
WINDOW = 16  # forward passes whose rows are sorted by length before they are cut into passes

Scores = list[np.ndarray]


@torch.no_grad()
def response_log_probs(
    model: Any,
    encoded: Sequence[dict[str, Any]],
    pad_token_id: int,
    *,
    micro_batch_size: int = 8,
    first: int = 0,
) -> Iterator[Scores]:
    """log p of every response token, window by window and in the order of the rows, each row [tokens] fp32.

    Args:
        model: a causal LM or PeftModel, used as it is.
        encoded: tokenised rows.
        pad_token_id: for the collator.
        micro_batch_size: rows per forward pass.
        first: rows to leave out at the beginning, as they were scored before.

    Raises:
        DataError: if a log-probability is not finite.
    """
    device = next(model.parameters()).device
    collate = Collator(pad_token_id)
    request = StatisticsRequest(2, ("log_prob",), ())
    step = WINDOW * micro_batch_size
    model.eval()
    with statistics_forward(model):
        for start in range(first, len(encoded), step):
            rows = list(encoded[start : start + step])
            found: Scores = [np.empty(0, dtype=np.float32)] * len(rows)
            order = sorted(range(len(rows)), key=lambda index: (-len(rows[index]["input_ids"]), index))
            for at in range(0, len(order), micro_batch_size):
                members = order[at : at + micro_batch_size]
                batch = collate([{k: v for k, v in rows[i].items() if k != "keep_mask"} for i in members])
                chosen = {name: batch[name].to(device) for name in ("input_ids", "attention_mask", "labels")}
                stats = model(**chosen, statistics=request)
                for index, values, mask in zip(members, stats.log_prob.float().cpu(), stats.mask.cpu(), strict=True):
                    found[index] = values[mask].numpy().astype(np.float32)
            if not all(np.isfinite(values).all() for values in found):
                bad = next(i for i, values in enumerate(found) if not np.isfinite(values).all())
                raise DataError(f"row {rows[bad]['row']}: the model gives a response token no finite probability")
            yield found


def keep_masks(influence: Scores, keep: float, scope: str = "global") -> list[np.ndarray]:
    """1 for the tokens of the largest influence, 0 for the others, per row like `influence`.

    Among equal influences the earlier token is kept.

    Args:
        influence: per row, [tokens].
        keep: share of tokens to keep, in (0, 1].
        scope: "global" ranks all tokens together, "row" those of each row.

    Raises:
        ConfigError: for a share outside (0, 1] or an unknown scope.
    """
    check_choice(keep, scope)
    if scope == "row":
        return [_largest(values, keep) for values in influence]
    lengths = [len(values) for values in influence]
    joined = np.concatenate(influence) if influence else np.empty(0, dtype=np.float32)
    return np.split(_largest(joined, keep), np.cumsum(lengths)[:-1]) if lengths else []


def check_choice(keep: float, scope: str) -> None:
    """Refuse what is no share or no scope.

    Raises:
        ConfigError: naming it.
    """
    if not 0 < keep <= 1:
        raise ConfigError(f"keep is a share of the tokens in (0, 1], found {keep!r}; Token Cleaning keeps 0.6")
    if scope not in SCOPES:
        raise ConfigError(f"scope must be one of {', '.join(SCOPES)}, found {scope!r}{nearest(scope, SCOPES)}")


def require_same_tokens(base: Any, reference: Any, texts: Sequence[str]) -> None:
    """Refuse two tokenizers that cut text differently: a difference of losses then compares different tokens.

    Raises:
        ConfigError: naming a token, or a text, on which they differ.
    """
    one, other = base.get_vocab(), reference.get_vocab()
    if one != other:
        token = min((t for t in {*one, *other} if one.get(t) != other.get(t)), key=str)
        raise ConfigError(
            f"the tokenizers of base and reference differ: {token!r} is {_id(one, token)} in the base and "
            f"{_id(other, token)} in the reference. Influence compares the same tokens under two models; take a reference "
            "that was trained from this base"
        )
    for text in texts:
        if base(text, add_special_tokens=False)["input_ids"] != reference(text, add_special_tokens=False)["input_ids"]:
            raise ConfigError(
                f"the tokenizers of base and reference cut {text[:60]!r} differently; take a reference that was trained "
                "from this base"
            )


class ScoreFolder:
    """Scores of passes over the rows, appended window by window: an interrupted pass goes on where it stopped.

    Args:
        folder: created if need be.
        identity: what the scores belong to; another identity in the folder is refused.
        lengths: response tokens of each row.
        resume: whether scores that are there may be used.

    Raises:
        ConfigError: if the folder holds scores that are not to be used, or of another job.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], lengths: Sequence[int], *, resume: bool) -> None:
        self.folder, self.lengths = folder, list(lengths)
        record = folder / "identity.json"
        if record.is_file():
            if not resume:
                raise ConfigError(f"{folder} holds an unfinished run; go on with --resume, or remove the folder")
            try:
                stored = json.loads(record.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{record}: cannot be read ({error}); remove {folder} to begin again") from error
            if stored != json.loads(json.dumps(identity)):
                named = sorted(key for key in {*stored, *identity} if stored.get(key) != identity.get(key))
                raise ConfigError(
                    f"{folder} holds scores of another run: {', '.join(named)} differ; repeat the original command, or "
                    "remove the folder"
                )
        elif resume:
            raise ConfigError(f"--resume: there is no unfinished run in {folder}; run the command without --resume")
        write_json(record, identity)

    def finished(self, name: str) -> int:
        """Rows whose scores of this pass are complete."""
        path = self._path(name)
        tokens = path.stat().st_size // 4 if path.is_file() else 0
        ends = np.cumsum(self.lengths)
        return int(np.searchsorted(ends, tokens, side="right"))

    def append(self, name: str, windows: Iterator[Scores], on_progress: Callable[[int], None] | None = None) -> None:
        """Write the windows of a pass that begins at row `finished(name)`."""
        done = self.finished(name)
        path = self._path(name)
        with path.open("ab") as file:
            file.truncate(4 * sum(self.lengths[:done]))
            for scores in windows:
                for offset, values in enumerate(scores):
                    if len(values) != self.lengths[done + offset]:
                        raise DataError(
                            f"row {done + offset}: {len(values)} scores for {self.lengths[done + offset]} tokens"
                        )
                file.write(b"".join(values.astype("<f4").tobytes() for values in scores))
                file.flush()
                done += len(scores)
                if on_progress is not None:
                    on_progress(done)

    def read(self, name: str) -> Scores:
        """The scores of a finished pass, per row."""
        joined = np.fromfile(self._path(name), dtype="<f4")
        return np.split(joined, np.cumsum(self.lengths)[:-1])

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.f32"


def response_lengths(encoded: Sequence[dict[str, Any]]) -> list[int]:
    """Response tokens of each row."""
    return [sum(label != IGNORED for label in row["labels"]) for row in encoded]


def _largest(values: np.ndarray, keep: float) -> np.ndarray:
    mask = np.zeros(len(values), dtype=np.int8)
    mask[np.argsort(-values, kind="stable")[: int(len(values) * keep)]] = 1
    return mask


def _id(vocabulary: dict[str, int], token: str) -> str:
    return f"token {vocabulary[token]}" if token in vocabulary else "unknown"
