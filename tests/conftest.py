"""Shared small models and rows, made on the spot from configurations; and the order of slow tests."""

from __future__ import annotations

import gc
import os
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# tests are of arithmetic on a CPU, and many hand CPU tensors to what they have loaded; LORAGATE_TEST_GPU=0 shows them a GPU
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("LORAGATE_TEST_GPU", "")

import hypothesis
import pytest
import torch
from filelock import FileLock

import loragate as lg
from loragate.cli.main import main
from tiny import shake, tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer, write_adapter, write_base

torch.set_num_threads(1)
# a busy machine must not fail a property for being slow
hypothesis.settings.register_profile("loragate", deadline=None)
hypothesis.settings.load_profile("loragate")

# kinds of slow tests, as `@pytest.mark.slow("kind")` names them: in this order `make test-all` runs them
KINDS = (
    "whole commands",
    "training",
    "products",
    "processes",
    "kills",
    "attacks",
    "families",
    "documents",
    "statistics",
    "browsers",
    "vLLM",
    "other",
    "rehearsals",
)


def kind_of(item):
    """The kind of a slow test, or None of a quick one."""
    mark = item.get_closest_marker("slow")
    if mark is None:
        return None
    kind = mark.args[0] if mark.args else "other"
    if kind not in KINDS:
        raise pytest.UsageError(f"{item.nodeid}: slow({kind!r}) is none of {', '.join(KINDS)}")
    return kind


def pytest_collection_modifyitems(items):
    # a run that is cut off has done the quick tests and the weightiest of the slow ones
    items.sort(key=lambda item: KINDS.index(kind) + 1 if (kind := kind_of(item)) else 0)


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def little_to_collect():
    """Trainers collect garbage after each run; without all that is imported that takes 10 ms and not 300."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """make(name, fill) -> a folder that fill(folder) filled, once for all processes of a test run; tests leave it as it is."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def make(name, fill):
        folder, done = root / name, root / f"{name}.done"
        with FileLock(root / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return make


@pytest.fixture(scope="session")
def saved(once):
    """A folder with base/, adapter/ on it, and gated/ with gates that act; tests leave it as it is."""

    def fill(root):
        write_base(root / "base")
        model = lg.attach_gates(write_adapter(root / "adapter", root / "base"), lg.GateConfig(-3, 2))
        lg.save_gates(shake(model, 0.5), root / "gated", adapter_source=root / "adapter", base_id=str(root / "base"))

    return once("saved", fill)


@pytest.fixture
def base():
    return tiny_base()


@pytest.fixture
def adapter():
    return tiny_adapter()


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def rows():
    return tiny_rows(24)


@pytest.fixture
def token_ids():
    return torch.randint(3, 60, (3, 11), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def fails(capsys):
    """What a command says that ends with `status`: one error, and no traceback."""

    def call(*argv, status=2):
        capsys.readouterr()
        assert main([str(argument) for argument in argv]) == status
        said = capsys.readouterr().err
        assert said.count("loragate: error: ") == 1
        assert "Traceback" not in said
        return " ".join(said.split())

    return call
