"""Samples survive the file, also one that was cut off in the middle of a line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from loragate.errors import DataError
from loragate.generation import Sample, SampleWriter, read_samples

SAMPLES = [
    Sample(0, 0, "answer 7", (4, 5, 1), "stop", 0.25),
    Sample(0, 1, "zwei\n\u2028Zeilen é \x0b", (6,), "length", 1.0 / 3.0),
    Sample(1, 0, "", (1,), "stop", 0.0),
]


def write(path: Path, samples: list[Sample]) -> None:
    with SampleWriter(path) as writer:
        writer.write(samples)


def test_round_trip_is_ordered(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "samples.jsonl"
    write(path, SAMPLES[::-1])
    assert read_samples(path) == SAMPLES


def test_every_write_reaches_the_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with SampleWriter(path) as writer:
        for count, sample in enumerate(SAMPLES, start=1):
            writer.write([sample])
            assert len(read_samples(path)) == count


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_skipped_and_replaced(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, SAMPLES)
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_samples(path) == SAMPLES[:2]
    write(path, SAMPLES[2:])
    assert read_samples(path) == SAMPLES


def test_an_empty_file_holds_no_samples(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.touch()
    assert read_samples(path) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{torn", "line 2: not JSON"),
        ('{"question": 1}', "line 2: the key 'sample' is missing"),
        ("[1]", r"line 2: expected a block of keys, found \[1\]"),
    ],
)
def test_a_line_that_is_no_sample_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "samples.jsonl"
    write(path, SAMPLES[:1])
    kept = path.read_bytes() + f"{line}\n".encode()
    path.write_bytes(kept)
    with pytest.raises(DataError, match=message):
        read_samples(path)
    with pytest.raises(DataError, match=message):
        SampleWriter(path)
    assert path.read_bytes() == kept


def test_repeated_and_absent_samples_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with pytest.raises(DataError, match="There is no sample file"):
        read_samples(path)
    write(path, SAMPLES + SAMPLES[1:2])
    with pytest.raises(DataError, match="lines 2 and 4: both are sample 1 of question 0"):
        read_samples(path)


def test_non_finite_entropy_is_not_written(tmp_path: Path) -> None:
    with SampleWriter(tmp_path / "samples.jsonl") as writer, pytest.raises(ValueError, match="not JSON compliant"):
        writer.write([Sample(0, 0, "", (1,), "stop", math.nan)])
