"""One place on disk for all sweeps of a test run."""

from __future__ import annotations

import pytest
from places import arguments, make_place, sweep


@pytest.fixture(scope="session")
def place(once):
    return once("sweep-place", make_place)


@pytest.fixture(scope="session")
def swept(place, once):
    """A finished sequential sweep, uninterrupted: 2 ranges × 2 seeds and the adapter."""

    def fill(folder):
        arguments_of = arguments(place, folder / "sweep", "--runner", "sequential")
        assert sweep(arguments_of) == 0

    return once("swept", fill) / "sweep"
