"""What the serving plugin holds on to, in every version of vLLM that it supports."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from loragate.serving.plugin import HOOKS, vllm_version, why_unsupported

ROOT = Path(__file__).parents[2]
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


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_source_is_read_through_imports_and_bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("vllm_contract", ROOT / "scripts" / "vllm_contract.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    write(
        tmp_path,
        {
            "vllm/__init__.py": "",
            "vllm/lora/__init__.py": "",
            "vllm/lora/base.py": "class Base:\n    def set_mapping(self, punica_wrapper): ...\n",
            "vllm/lora/layers.py": "from .base import Base\nclass Head(Base):\n    async def go(self, *, index): ...\n",
            "vllm/lora/utils.py": "from vllm.lora.layers import Head\ndef from_layer(layer, max_loras): ...\n",
            "vllm-0.40.0.dist-info/METADATA": "Name: vllm\nVersion: 0.40.0\n",
        },
    )
    places = {
        "vllm.lora.utils:Head.set_mapping": "punica_wrapper",
        "vllm.lora.utils:Head.go": "index",
        "vllm.lora.utils:from_layer": "layer lora_config",
        "vllm.lora.gone:nothing": "",
    }
    monkeypatch.setattr(script, "HOOKS", places)
    names = [" ".join(one) if one is not None else None for one in script.contract(tmp_path).values()]
    assert names == ["self punica_wrapper", "self index", "layer max_loras", None]
    monkeypatch.setattr(sys, "argv", ["vllm_contract.py", str(tmp_path)])
    assert script.main() == 1, "from_layer takes no lora_config there"
