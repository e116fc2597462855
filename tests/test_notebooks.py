"""The notebooks of the documentation: valid, without outputs, linked, and, slowly, run from the first cell to the last."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_there_are_three_and_the_page_lists_them():
    assert [path.stem for path in NOTEBOOKS] == ["gate-your-adapter", "read-the-report", "tiny-study"]
    linked = re.findall(r"\(notebooks/([\w-]+)\.ipynb\)", (DOCS / "python.md").read_text(encoding="utf-8"))
    assert sorted(linked) == [path.stem for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_clean(path):
    book = read(path)
    assert (book["nbformat"], book["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert "".join(book["cells"][0]["source"]).startswith("# ")
    identities = [cell["id"] for cell in book["cells"]]
    assert len(set(identities)) == len(identities)
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "outputs are not stored"
            assert cell["execution_count"] is None
            ast.parse(source)
        else:
            for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", source):
                assert (path.parent / target).is_file(), f"{path.name} links to {target}"


@pytest.mark.slow("documents")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    for package in ("nbclient", "nbformat", "ipykernel"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    NotebookClient(book, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert printed
    assert not [output for output in printed if output.output_type == "error"]
