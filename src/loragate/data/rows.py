"""`Rows`, which know their place, and `load_rows`: JSON lines, a JSON array, CSV, parquet, a hub dataset, or rows in memory.

A row keeps its place ("train.jsonl:12") through shuffling and taking, so that any later error can name it. The
fingerprint is over the content alone: equal rows from JSONL and from parquet have the same one. Every failure of reading names
the file, the line and what to do. Data is only ever parsed: no pickle, no dataset scripts. The `datasets` library is imported
only for hub ids and dataset folders. Nothing here knows the formats of rows.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import itertools
import json
import math
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast, overload

from loragate.errors import ConfigError, DataError, nearest
from loragate.printable import excerpt

FIELD_LIMIT = 1 << 30  # characters of one value in CSV
CONSTANTS = {"NaN": None, "Infinity": math.inf, "-Infinity": -math.inf}
"""What JSON has no word for and Python writes: NaN is what pandas has for a value that is missing."""
FETCHED = 1000  # rows that are read together out of a column store


class Rows(Sequence[dict[str, Any]]):
    """An immutable sequence of row dicts.

    Attributes:
        source: the path or hub id that the rows were read from, "rows in memory" for a list.
    """

    def __init__(
        self,
        items: Sequence[Any],
        *,
        source: str,
        place: str,
        numbers: Sequence[int] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        """`place` + `numbers[i]` names `items[i]`; `order` lists the items that this view shows, in its order."""
        self.source = source
        self._items = items
        self._place = place
        self._numbers = range(len(items)) if numbers is None else numbers
        self._order = range(len(items)) if order is None else order

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Rows:
        if isinstance(index, slice):
            return self._view(self._order[index])
        row = self._items[self._order[index]]
        if not isinstance(row, Mapping):
            raise DataError(
                f"{self.where(index)}: found a value of type {type(row).__name__}, expected a row (an object)"
            )
        return row if isinstance(row, dict) else dict(row)

    def where(self, index: int) -> str:
        """Name row `index` for a person: 'file.jsonl:12' (lines from 1), 'org/name[train] row 7' (rows from 0)."""
        return f"{self._place}{self._numbers[self._order[index]]}"

    def earliest(self) -> int:
        """The index of the row that comes first in its file, however the rows are ordered here."""
        return min(range(len(self)), key=self._order.__getitem__)  # items are in the file's order

    def shuffled(self, seed: int) -> Rows:
        """The same rows in a random order that depends on `seed` and the number of rows only."""
        order = list(self._order)
        random.Random(seed).shuffle(order)
        return self._view(order)

    def take(self, n: int) -> Rows:
        """The first `n` rows, or all when there are fewer; ConfigError for fewer than none."""
        _require_count("take", n)
        return self._view(self._order[:n])

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the rows in their order, each as canonical JSON.

        Keys are sorted, null fields dropped (a column store writes null for an absent key) and whole floats written as
        integers (a column of mixed numbers is stored as floats).
        """
        return self._hashes[0]

    def as_record(self) -> dict[str, Any]:
        """What these rows are known by: their number, their content in any order, and their order."""
        order, content = self._hashes
        return {"rows": len(self), "content_sha256": content, "order_sha256": order}

    @cached_property
    def _hashes(self) -> tuple[str, str]:
        ordered = hashlib.sha256()
        each: list[bytes] = []
        for index, row in enumerate(self):
            try:
                line = json.dumps(_canonical(row), sort_keys=True, separators=(",", ":")).encode() + b"\n"
            except RecursionError:
                raise DataError(f"{self.where(index)}: the row is nested too deeply to be read") from None
            ordered.update(line)
            each.append(hashlib.sha256(line).digest())
        # sorted, so that the second does not depend on the order
        return ordered.hexdigest(), hashlib.sha256(b"".join(sorted(each))).hexdigest()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows in their order; those of a column store are fetched many at a time, which is far quicker."""
        for start in range(0, len(self), FETCHED):
            yield from self.fetch(range(start, min(start + FETCHED, len(self))))

    def fetch(self, indices: range) -> list[dict[str, Any]]:
        """The rows at these indices, read in one access."""
        if not hasattr(self._items, "column_names"):
            return [self[index] for index in indices]
        # `datasets` gives many rows as {column: values}, in one read where single rows take one each
        columns: dict[str, list[Any]] = self._items[[self._order[index] for index in indices]]  # type: ignore[call-overload]
        return [dict(zip(columns, values)) for values in zip(*columns.values())]

    def _view(self, order: Sequence[int]) -> Rows:
        return Rows(self._items, source=self.source, place=self._place, numbers=self._numbers, order=order)

    def __repr__(self) -> str:
        return f"Rows({len(self)} from {self.source})"


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, str | int | float):
        return value
    # what JSON lines cannot hold and parquet can: bytes, dates, decimals
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


RowsGiven = str | Path | Iterable[Mapping[str, Any]] | Any
"""A file, a folder, a hub id, or rows in memory; Any stands for tables (pandas, polars, pyarrow), which nothing here imports."""
Numbered = Iterator[tuple[int, dict[str, Any]]]

HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<config>[\w.-]+))?")
HUB_HELP = "A hub dataset is written owner/name, or owner/name:config"
OTHER_SUFFIXES = {".gz", ".txt", ".xlsx", ".arrow", ".zip", ".zst", ".bz2", ".xz", ".pkl", ".yaml", ".yml"}


def load_rows(
    source: RowsGiven,
    *,
    split: str | None = None,
    limit: int | None = None,
    revision: str | None = None,
) -> Rows:
    """Read rows from `source`.

    Args:
        source: path to a .jsonl, .json (array), .csv, .tsv or .parquet file (all but parquet also gzipped), a folder that
            `datasets` can read, a hub id "owner/name" or "owner/name:config", or rows in memory: any iterable of dicts, a
            `Dataset` or `IterableDataset`, a table of pandas, polars or pyarrow.
        split: split of a hub dataset or folder; "train" when not given.
        limit: read the first rows only; JSON lines and parquet are read no further.
        revision: branch, tag or commit of a hub dataset.

    Raises:
        DataError: for anything that cannot be read; the message names the file and line.
        ConfigError: for a split or revision that would have no effect, or a negative limit.
    """
    _require_count("limit", limit)
    if not isinstance(source, str | Path):
        _refuse_without_effect("rows in memory", split=split, revision=revision)
        return _from_memory(source, limit)
    path = Path(source).expanduser()
    if path.is_file():
        _refuse_without_effect(f"the file {source}", split=split, revision=revision)
        return _from_file(path, str(source), limit)
    if path.is_dir():
        _refuse_without_effect(f"the folder {source}", revision=revision)
        return _from_datasets(str(path), None, str(source), split, limit, None)
    hub_id = HUB_ID.fullmatch(str(source))
    if hub_id and path.suffix.lower() not in OTHER_SUFFIXES | READERS.keys():
        return _from_datasets(hub_id["repo"], hub_id["config"], str(source), split, limit, revision)
    folder = path.parent
    beside = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    near = nearest(path.name, beside) if folder.is_dir() else f", nor a folder {folder}."
    raise DataError(f"found no file {source}{near or '.'} {HUB_HELP}.")


def _from_memory(source: Any, limit: int | None) -> Rows:
    if isinstance(source, Rows):
        return source if limit is None else source.take(limit)
    if isinstance(source, Mapping):  # a `DatasetDict` looks like a data set
        raise DataError(f"found {type(source).__name__}, expected a list of rows: one of {', '.join(map(str, source))}")
    if hasattr(source, "iloc"):  # pandas writes NaN for what is missing, and its columns hold numpy's numbers and lists
        frame = source.astype(object).where(source.notna(), None)
        source = [_without_numpy(row) for row in frame.to_dict("records")]
    for tabular in ("to_pylist", "to_dicts"):  # of pyarrow and polars
        source = getattr(source, tabular)() if hasattr(source, tabular) else source
    if hasattr(source, "with_format"):  # of `datasets`, whose rows may have been given as tensors
        if getattr(source, "format", {}).get("type") == "custom":  # streams have no `format`, and no transforms
            raise DataError(
                "found a data set with a transform (with_transform or set_transform), which makes rows anew whenever they "
                "are read. Apply it once with .map, and give its result"
            )
        source = source.with_format(None)
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        source = list(itertools.islice(source, limit))  # an iterator, read once and perhaps without end
    if len(source) == 0:
        raise DataError("found an empty list of rows, expected at least one row")
    rows = Rows(source, source="rows in memory", place="row ")
    return rows if limit is None else rows.take(limit)


def _without_numpy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_numpy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_numpy(item) for item in value]
    return _without_numpy(value.tolist()) if hasattr(value, "tolist") else value


def _from_file(path: Path, name: str, limit: int | None) -> Rows:
    zipped = path.suffix.lower() == ".gz"
    suffix = Path(path.stem).suffix.lower() if zipped else path.suffix.lower()
    if suffix not in READERS or (zipped and suffix == ".parquet"):
        raise DataError(
            f"found {name} with the ending {''.join(path.suffixes[-2:]) or '(none)'}; "
            f"expected {', '.join(READERS)}, all but .parquet also with .gz"
        )
    reader, place = READERS[suffix]
    try:
        with gzip.open(path) if zipped else path.open("rb") as stream:
            # readers are generators: with a limit, what lies behind it is neither read nor checked
            pairs = list(itertools.islice(reader(cast(BinaryIO, stream), name), limit))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name} cannot be read: {error}. Check its permissions and that it is complete.") from None
    if not pairs:
        raise DataError(f"{name} is empty: expected at least one row")
    numbers, items = zip(*pairs)  # numbers of lines leave out blank ones
    return Rows(items, source=name, place=name + place, numbers=numbers)


def _read_jsonl(stream: BinaryIO, name: str) -> Numbered:
    for number, raw in enumerate(stream, start=1):
        text = _decode(raw, name, number)
        if text.strip():  # blank lines are passed over, and count
            if text.lstrip().startswith("["):
                raise DataError(
                    f"{name}:{number}: found {excerpt(text)}, expected one JSON object per line. "
                    "A file that is one JSON array ends in .json: rename it."
                )
            value = _parse(text.rstrip("\r\n"), name, number, per_line=True, last=not raw.endswith(b"\n"))
            if not isinstance(value, dict):
                raise DataError(f"{name}:{number}: found {excerpt(text)}, expected one JSON object per line.")
            yield number, value


def _read_json(stream: BinaryIO, name: str) -> Numbered:
    text = _decode(stream.read(), name, 1)
    if not text.strip():
        return
    rows = _parse(text, name, 1)
    if isinstance(rows, dict):  # rows below one key, with notes beside them, as BIG-Bench Hard is published
        arrays = [value for value in rows.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
        rows = arrays[0] if len(arrays) == 1 and not any(isinstance(value, dict) for value in rows.values()) else rows
    if not isinstance(rows, list):
        found = f"an object with the keys {', '.join(list(rows)[:8])}" if isinstance(rows, dict) else excerpt(text)
        raise DataError(f"{name}: found {found}, expected an array of objects. JSON lines end in .jsonl.")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{name} row {number}: found {excerpt(json.dumps(row))}, expected an object")
        yield number, row


def _read_csv(stream: BinaryIO, name: str) -> Numbered:
    """Rows under a line of column names; every value is text. Columns are separated by what separates most names."""

    def lines() -> Iterator[str]:
        for number, raw in enumerate(stream, start=1):
            yield _decode(raw, name, number)

    rest = lines()
    names = next(rest, "")
    csv.field_size_limit(FIELD_LIMIT)
    reader = csv.reader(itertools.chain([names], rest), delimiter=max(",;\t", key=names.count), strict=True)
    header: list[str] = []
    before = 0  # a row begins on the line behind the one on which the last row ended, and may take several
    try:
        for values in reader:
            number, before = before + 1, reader.line_num
            if not header:
                header = values
                if (
                    len(header) > 1 and not header[0].strip()
                ):  # the index that pandas' to_csv writes, called as pandas does
                    header[0] = "Unnamed: 0"
                if len(set(header)) < len(header) or not all(key.strip() for key in header):
                    raise DataError(f"{name}:1: found {excerpt(names)}, expected different names of columns")
            elif values:
                if len(values) != len(header):
                    raise DataError(
                        f"{name}:{number}: found {len(values)} values for the {len(header)} columns {', '.join(header)}; text "
                        "that holds commas, quotes or line ends stands between double quotes"
                    )
                yield number, dict(zip(header, values, strict=True))
    except csv.Error as error:
        cut = " The file may have been cut off." if "unexpected end" in str(error) else ""
        raise DataError(f"{name}:{before + 1}: malformed CSV in the row that begins here: {error}.{cut}") from None


def _read_parquet(stream: BinaryIO, name: str) -> Numbered:
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(stream).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield number, row
                number += 1
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{name} is not a readable parquet file: {excerpt(str(error), 200)}. It may have been cut off, or stand for a large "
            "file that was not fetched (git lfs pull)."
        ) from None


READERS: dict[str, tuple[Callable[[BinaryIO, str], Numbered], str]] = {
    ".jsonl": (_read_jsonl, ":"),
    ".ndjson": (_read_jsonl, ":"),
    ".json": (_read_json, " row "),
    ".csv": (_read_csv, ":"),
    ".tsv": (_read_csv, ":"),
    ".parquet": (_read_parquet, " row "),
}
FILE_SUFFIXES = (*READERS, *(f"{suffix}.gz" for suffix in READERS if suffix != ".parquet"))


def _from_datasets(
    repo: str, config: str | None, name: str, split: str | None, limit: int | None, revision: str | None
) -> Rows:
    """Rows of a hub dataset or a local dataset folder; they stay memory-mapped."""
    import datasets

    saved = is_saved(Path(repo))
    arguments = (repo,) if config is None else (repo, config)
    try:
        if saved:
            dataset = datasets.load_from_disk(repo)
        else:
            split = split or "train"
            dataset = datasets.load_dataset(*arguments, split=split, revision=revision)
    except Exception as error:  # the hub, the network and every file reader raise their own kinds
        raise DataError(
            f"{name}[{split}] cannot be loaded: {type(error).__name__}: {excerpt(str(error), 400)}. Check the id, the "
            f"split and the connection. {HUB_HELP}."
        ) from error
    if saved and isinstance(dataset, datasets.DatasetDict):
        split = split or ("train" if len(dataset) > 1 else next(iter(dataset)))
        if split not in dataset:
            raise DataError(f"{name} has no split {split!r}{nearest(split, dataset)}; it has {', '.join(dataset)}")
        dataset = dataset[split]
    elif saved:
        _refuse_without_effect(f"the data set in {name}", split=split)
    place = f"{name}[{split}]" if split else name
    if len(dataset) == 0:
        raise DataError(f"{place} is empty: expected at least one row")
    rows = Rows(dataset, source=name, place=f"{place} row ")
    return rows if limit is None else rows.take(limit)


SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of `datasets` wrote a folder: one data set, or a dictionary of splits."""
    return (folder / SAVED).is_file() or (folder / SAVED_SPLITS).is_file()


def _decode(raw: bytes, name: str, line: int) -> str:
    if line == 1:
        if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise DataError(f"{name} is UTF-16; save it as UTF-8")
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        # of the whole array in .json, of one line in .jsonl: lines before the byte are counted either way
        line += raw.count(b"\n", 0, error.start)
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise DataError(
            f"{name}:{line}: byte {column} of the line is {raw[error.start : error.start + 1]!r}, "
            "which is not UTF-8; save the file as UTF-8"
        ) from None


def _parse(text: str, name: str, line: int, *, per_line: bool = False, last: bool = True) -> Any:
    """JSON out of a text that begins on a line of a file; `last`: the file ends with it."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=lambda name: CONSTANTS[name])
    except json.JSONDecodeError as error:
        broken = text.split("\n")[error.lineno - 1]
        snippet = broken[max(0, error.colno - 31) : error.colno + 29]
        raise DataError(
            f"{name}:{line + error.lineno - 1}: malformed JSON at column {error.colno}: {error.msg}, "
            f"near {excerpt(snippet)}.{_hint(error, per_line, last)}"
        ) from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; lists in lists in lists
        raise DataError(f"{name}:{line}: JSON that cannot be read: {excerpt(str(error), 100)}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; a ValueError for a key that stands in it twice, of which Python would keep the last value alone."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {excerpt(twice)} stands twice in one object; remove one of them")
    return found


def _hint(error: json.JSONDecodeError, per_line: bool, last: bool) -> str:
    """What a JSON error mostly comes from."""
    text = error.doc
    # several objects below one another in a .json
    if not per_line and error.msg == "Extra data" and error.lineno > 1 and text[error.pos : error.pos + 1] == "{":
        return " The file looks like JSON lines: name it .jsonl."
    # nothing follows, or half a word or number
    unfinished = bool(re.fullmatch(r"[\w.+-]*\s*", text[error.pos :])) or error.msg.startswith("Unterminated string")
    if unfinished and last:
        return " The file ends in the middle of a row: it was cut off. Fetch or write it again, or remove the last row."
    if unfinished and per_line:
        return " In .jsonl every row stands on one line; write the file without indentation."
    return ""


def _require_count(name: str, number: int | None) -> None:
    if number is not None and number < 0:
        raise ConfigError(f"found {name}={number}, expected a number of rows: 0 or more")


def _refuse_without_effect(what: str, **settings: str | None) -> None:
    for key, value in settings.items():
        if value is not None:
            raise ConfigError(f"found {key}={value!r} for {what}, where it would have no effect; leave it out")
