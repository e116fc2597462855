"""A whole dataset, encoded: format detection, tokenising in batches, and the account of what happened to the rows.

Long preparation is spread over processes and kept on disk under a key of everything that it depends on; both give
exactly the items of the plain path. Processes are started afresh (spawn), because a copy of one that has run torch's threads
may hang; at most a few batches wait for each, so that a data set is never in memory twice.
"""

from __future__ import annotations

import hashlib
import json
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loragate.data.chat import active_template
from loragate.data.formats import EmptyResponse, Turns, detect_format, normalize
from loragate.data.loading import load_rows
from loragate.data.packed import PackedRows, read_packed, write_packed
from loragate.data.rendering import IGNORED, Encoder
from loragate.data.rows import Rows
from loragate.errors import DataError
from loragate.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 256  # rows per call of the tokenizer
WAITING = 3  # batches per process


@dataclass(frozen=True)
class Summary:
    """What became of the rows.

    Attributes:
        format: the row format.
        rows: rows given.
        dropped: rows left out because max_length cut their whole response.
        truncated: kept rows that max_length cut.
        response_tokens, prompt_tokens: tokens of the kept rows after truncation, with and without a label.
        plain: rows used as plain text, without the chat template.
        last_turn_only: kept rows of which only the last assistant turn is trained (the template rewrites earlier ones).
        empty: rows left out because their response is empty.
        cached: the items were read from the cache.
    """

    format: str
    rows: int
    dropped: int
    truncated: int
    response_tokens: int
    prompt_tokens: int
    last_turn_only: int
    plain: int = 0
    empty: int = 0
    cached: bool = False


class EncodedRows(PackedRows):
    """Encoded rows `{"input_ids", "labels", "row"[, "keep_mask"]}` and their `summary`.

    `row` is the index into the rows that were given.
    """

    def __init__(self, packed: PackedRows, summary: Summary) -> None:
        super().__init__(packed.arrays)
        self.summary = summary

    def __repr__(self) -> str:
        return f"EncodedRows({len(self)} rows, {self.summary})"


def encode_rows(
    rows: Rows | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    system: str = "none",
    format: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    cache: str | Path | None = None,
    processes: int = 1,
) -> EncodedRows:
    """Encode every row; rows without a response, or whose response is cut completely, are left out and counted.

    Args:
        rows: from `load_rows`, or a list of dicts.
        max_length: longest sequence in tokens, cut on the right; None for no limit.
        system: "none" or "keep", see `Chat`.
        format: name of the row format; detected from the row that comes first in its file when None. All rows must have it.
        on_progress: called with (rows done, rows in all) after each batch.
        cache: folder in which the result is looked up and kept; None for neither. A slow tokenizer, which cannot be
            told apart from another by its content, is not cached.
        processes: how many encode at once; above 1 they are started afresh, which needs the usual guard of
            `if __name__ == "__main__":` in a script.

    Raises:
        DataError: for the first row that cannot be used, named by its place; or when no row is left.
    """
    rows = load_rows(rows)
    name = format
    if name is None:
        first = rows.earliest()
        try:
            name = detect_format(rows[first])
        except DataError as error:
            raise DataError(f"{rows.where(first)}: {error}") from None
    kept = None if cache is None else _cache_file(Path(cache), rows, tokenizer, max_length, system, name)
    if kept is not None and (found := read_packed(kept)) is not None:
        packed, stored = found
        if on_progress is not None:
            on_progress(len(rows), len(rows))
        return EncodedRows(packed, Summary(**{**stored, "cached": True}))
    masked = rows[0].get("keep_mask") is not None
    work = _Work(tokenizer, max_length, system, name, masked, rows.where(0))
    parts: list[PackedRows] = []
    counts: Counter[str] = Counter()
    done = 0
    for part, found_counts in work.over(rows, processes):
        parts.append(part)
        counts += found_counts
        done += found_counts["rows"]
        if on_progress is not None:
            on_progress(done, len(rows))
    items = PackedRows.joined(parts)
    if counts["empty"] == len(rows):
        raise DataError(
            f"{rows.source}: the response of every one of {len(rows)} rows is empty, so there is nothing to learn"
        )
    if not len(items):
        without = f" ({counts['empty']} of them have none)" if counts["empty"] else ""
        raise DataError(
            f"{rows.source}: max_length={max_length} cuts the whole response of every one of {len(rows)} rows{without}, so "
            "nothing is left to learn. Raise max_length."
        )
    summary = Summary(
        format=name,
        rows=len(rows),
        dropped=len(rows) - len(items) - counts["empty"],
        truncated=counts["truncated"],
        response_tokens=counts["response_tokens"],
        prompt_tokens=counts["prompt_tokens"],
        last_turn_only=counts["last_turn_only"],
        plain=counts["plain"],
        empty=counts["empty"],
    )
    if kept is not None:
        write_packed(kept, items, asdict(summary))
    return EncodedRows(items, summary)


@dataclass
class _Work:
    """What encoding one batch needs; also what a worker process is given."""

    tokenizer: Any
    max_length: int | None
    system: str
    format: str
    masked: bool
    first: str
    encoder: Encoder | None = None

    def over(self, rows: Rows, processes: int) -> Any:
        """(items, counts) of each batch in turn."""
        batches = (
            (start, [(row, rows.where(start + at)) for at, row in enumerate(rows.fetch(indices))])
            for start in range(0, len(rows), BATCH)
            for indices in [range(start, min(start + BATCH, len(rows)))]
        )
        if processes < 2 or len(rows) <= BATCH:
            return (self.batch(*batch) for batch in batches)
        return spread(self, batches, processes)

    def batch(self, start: int, rows: list[tuple[dict[str, Any], str]]) -> tuple[PackedRows, Counter[str]]:
        """Encode the rows from index `start` on."""
        if self.encoder is None:
            self.encoder = Encoder(self.tokenizer, max_length=self.max_length, system=self.system)
        counts = Counter(rows=len(rows))
        turns: list[tuple[Turns, str]] = []
        places: list[int] = []
        for index, (row, where) in enumerate(rows, start):
            try:
                turns.append((self._turns(row, where), where))
                places.append(index)
            except EmptyResponse:
                counts["empty"] += 1
        counts["plain"] = sum(one.is_plain for one, _ in turns)
        items = []
        for index, encoded in zip(places, self.encoder.encode(turns)):
            if encoded.responses == 0:
                continue
            item: dict[str, Any] = {"input_ids": encoded.input_ids, "labels": encoded.labels, "row": index}
            if encoded.keep_mask is not None:
                item["keep_mask"] = encoded.keep_mask
            items.append(item)
            learned = sum(label != IGNORED for label in encoded.labels)
            counts["response_tokens"] += learned
            counts["prompt_tokens"] += len(encoded.labels) - learned
            counts["truncated"] += encoded.truncated
            counts["last_turn_only"] += encoded.last_turn_only
        return PackedRows.of(items), counts

    def _turns(self, row: dict[str, Any], where: str) -> Turns:
        """A keep_mask is on all rows or on none, as a batch has it or has it not."""
        turns = normalize(row, self.format, where)
        if (turns.keep_mask is not None) != self.masked:
            raise DataError(
                f"{where}: the row has {'no' if self.masked else 'a'} keep_mask, unlike {self.first}; "
                "give it on every row or on none"
            )
        return turns


def _cache_file(
    folder: Path, rows: Rows, tokenizer: Any, max_length: int | None, system: str, format: str
) -> Path | None:
    """The file that holds exactly these rows under exactly this tokenizer and template; None without a fast tokenizer."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return None
    # padding and truncation are switches that other calls leave behind; encoding sets its own
    model = {key: value for key, value in json.loads(core.to_str()).items() if key not in ("padding", "truncation")}
    key = {
        "rows": rows.fingerprint,
        "kept": [field.name for field in fields(Summary)],
        "tokenizer": [type(tokenizer).__name__, model, {k: str(v) for k, v in tokenizer.special_tokens_map.items()}],
        "template": active_template(tokenizer),
        "max_length": max_length,
        "system": system,
        "format": format,
        "versions": [__version__, *(version(name) for name in ("transformers", "tokenizers"))],
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"{digest[:32]}.safetensors"


_work: _Work | None = None  # of a worker process


def spread(work: _Work, batches: Iterable[tuple[Any, ...]], processes: int) -> Iterator[Any]:
    """`work.batch(*batch)` of every batch, in order.

    Raises:
        DataError: what a batch raises, the first one first; or that a process died.
    """
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (work,))
    futures: deque[Future[Any]] = deque()
    try:
        for batch in batches:
            futures.append(pool.submit(_encode, batch))
            if len(futures) >= WAITING * processes:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            "a process that tokenises rows died, probably for want of memory; use fewer of them (--data-workers 1)"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(work: _Work) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the others
    _work = work


def _encode(batch: tuple[Any, ...]) -> Any:
    assert _work is not None
    return _work.batch(*batch)
