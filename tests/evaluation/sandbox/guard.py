"""Which tiers the tests of this folder can use: absent ones are skipped by name, unless the machine must have them."""

from __future__ import annotations

import os

import pytest

from loragate.evaluation.sandbox import probe

ALL = ("bubblewrap", "rlimits")
TOP = ("bubblewrap",)
REQUIRED = {"bubblewrap"} if os.environ.get("LORAGATE_REQUIRE_BWRAP") == "1" else set()


def need(tier: str) -> str:
    """Return `tier`, or skip the test where it does not work; LORAGATE_REQUIRE_BWRAP=1 makes that a failure."""
    reason = probe(tier)
    if reason is not None and tier in REQUIRED:
        pytest.fail(f"sandbox tier {tier}: {reason}")
    if reason is not None:
        pytest.skip(f"sandbox tier {tier}: {reason}")
    return tier
