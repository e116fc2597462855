"""What a user gets from the index: everything the package reads is in the wheel, and the command runs after installing it."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import lazy_loader
import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "loragate"

pytestmark = [
    pytest.mark.slow("documents"),
    pytest.mark.skipif(
        importlib.util.find_spec("hatchling") is None, reason="hatchling, which builds, is not installed"
    ),
    pytest.mark.skipif(importlib.util.find_spec("build") is None, reason="build is not installed"),
]


def package_files():
    """Every file of the package in the checkout, as paths in the wheel."""
    return {
        path.relative_to(SOURCE.parent).as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".partial")
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist), the wheel made from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_holds_the_whole_package_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        inside = {name.split(".dist-info/")[1] for name in wheel.namelist() if ".dist-info/" in name}
    assert names == package_files()
    for name in (
        "loragate/py.typed",
        "loragate/gates/card.md.jinja",
        "loragate/recipes/common.yaml",
        "loragate/report/templates/page.css",
        "loragate/world/assets/tiny-base/config.json",
    ):
        assert name in names, name
    assert any(name.startswith("loragate/evaluation/tasks/") and name.endswith(".yaml") for name in names)
    assert any(name.startswith("loragate/training/accelerate/") and name.endswith(".yaml") for name in names)
    assert {"METADATA", "entry_points.txt", "licenses/LICENSE"} <= inside


def test_the_source_distribution_can_be_tested(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"src/{name}" for name in package_files()} <= names
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "constraints.txt", "Makefile"} <= names
    assert {"tests/conftest.py", "tests/golden/artifact-v1/gate_config.json", "docs/artifact.md"} <= names
    assert not any(
        "__pycache__" in name or name.endswith(".pyc") or name.startswith((".git/", "runs/")) for name in names
    )


def test_the_command_answers_in_a_clean_environment(built, tmp_path):
    """With one dependency alone: help, version and the names of the commands load nothing else."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(built[0])]
    subprocess.run(install, check=True, capture_output=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    shutil.copytree(Path(lazy_loader.__file__).parent, site / "lazy_loader")
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    for argument, words in (("--help", "calibrate"), ("--version", "loragate ")):
        command = [str(python.parent / "loragate"), argument]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=clean, cwd=tmp_path)
        assert words in done.stdout


def test_metadata_names_the_extras(built):
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = wheel.read(name).decode()
    for extra in ("math", "eval", "sweep", "vllm", "all"):
        assert f"Provides-Extra: {extra}" in metadata
    assert "Requires-Python: >=3.11" in metadata
