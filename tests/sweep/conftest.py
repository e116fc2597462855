"""One place on disk for all sweeps of a test run."""

from __future__ import annotations

import pytest
from places import arguments, make_place, sweep


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="session")
def swept(place, tmp_path_factory):
    """A finished sequential sweep with a test set, uninterrupted: 2 ranges × 2 seeds and the adapter."""
    out = tmp_path_factory.mktemp("swept") / "sweep"
    assert sweep(arguments(place, out, "--runner", "sequential", "--test", str(place / "test.jsonl"))) == 0
    return out
