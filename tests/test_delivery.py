"""Images and workflows, as far as they can be checked without an engine: what they name exists, and nothing floats."""

import contextlib
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


def steps():
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            for step in job["steps"]:
                yield pytest.param(
                    step, id=f"{path.stem}-{name}-{step.get('name') or step.get('run') or step['uses']}"[:60]
                )


def pinned(path):
    """{name: version} of a file of exact requirements."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {name.lower(): version for name, sign, version in (line.partition("==") for line in lines) if sign}


def targets():
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_is_pinned_and_runs_as_a_user(path):
    text = re.sub(r"\\\n\s*", "", path.read_text())
    instructions = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for word, rest in instructions:
        if word == "FROM":
            assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+[a-z0-9.-]*", rest), f"{rest} is not pinned to a version"
        if word == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
        if word == "RUN":
            assert rest.count("pip install") == rest.count("-c constraints.txt")
    assert {"root", "0"}.isdisjoint(dict(instructions)["USER"].split())
    assert dict(instructions)["ENTRYPOINT"] == '["loragate"]'


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
    pins = pinned(ROOT / "constraints-lowest.txt")
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


def test_vllm_and_this_package_can_be_installed_together():
    """What vLLM 0.32 was tested with is within what pyproject.toml asks for, and within what vLLM's own metadata does."""
    script = (ROOT / "scripts" / "vllm_cpu_env.sh").read_text()
    tested = pinned(ROOT / "scripts" / "vllm-cpu-requirements.txt")
    tested |= dict(re.findall(r"^(?:torch|xgrammar)=(\w+)==([\d.]+)$", script, re.M))
    tested["vllm"] = re.search(r"^vllm_version=([\d.]+)$", script, re.M)[1]
    asked = [Requirement(text) for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["vllm"])]
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
    with contextlib.suppress(metadata.PackageNotFoundError):
        known = [Requirement(text) for text in metadata.requires("vllm-cpu") or ()]
        of_vllm |= {one.name: str(one.specifier).replace("+cpu", "") for one in known if one.name in of_vllm}
    for name, specifier in of_vllm.items():
        assert tested[name] in SpecifierSet(specifier), name
    newer = pinned(ROOT / "constraints.txt")["transformers"]
    assert newer not in SpecifierSet(of_vllm["transformers"]), "then the page need not warn of constraints.txt"
