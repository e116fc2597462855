"""What the documents promise: every command line parses, the Python example runs, every named path exists."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from loragate.cli.arguments import parse
from loragate.cli.main import COMMANDS
from tiny import tiny_adapter, tiny_base, tiny_tokenizer

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def command_lines():
    for path in DOCUMENTS:
        for block in re.findall(r"```sh\n(.*?)```", path.read_text(encoding="utf-8"), re.S):
            for line in block.splitlines():
                if line.startswith("loragate "):
                    yield path.name, line
        for inline in re.findall(r"`(loragate [a-z]+ -[^`]+)`", path.read_text(encoding="utf-8")):
            yield path.name, inline


def test_command_lines_parse(tmp_path, monkeypatch):
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "data.md").read_text(encoding="utf-8"), re.S)
    monkeypatch.chdir(tmp_path)
    Path("calibrate.yaml").write_text(example, encoding="utf-8")
    lines = list(command_lines())
    assert len(lines) >= 4
    for _, line in lines:
        words = shlex.split(line, comments=True)[1:]
        command = importlib.import_module(f"loragate.cli.{COMMANDS[words[0]][0]}").COMMAND
        parse(command, words[1:])


def test_examples_of_help_texts_parse(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("calibrate.yaml", "sft.yaml"):
        Path(name).write_text("seed: 1\n")
    for module, _ in COMMANDS.values():
        command = importlib.import_module(f"loragate.cli.{module}").COMMAND
        for line in command.examples:
            words = shlex.split(line)
            assert words[:2] == ["loragate", command.name]
            parse(command, words[2:])


def test_the_python_example_runs(tmp_path, monkeypatch, capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    monkeypatch.chdir(tmp_path)
    tiny_base().save_pretrained("path/to/base")
    tiny_tokenizer().save_pretrained("path/to/base")
    model = tiny_adapter()
    model.peft_config["default"].base_model_name_or_path = "path/to/base"
    model.save_pretrained("path/to/adapter")
    exec(compile(block, "README.md", "exec"), {})
    assert Path("gated/gate_config.json").is_file()
    assert capsys.readouterr().out.count("\n") == 2


def test_named_paths_exist():
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(((?!http)[^)#]+)\)", text):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
        for target in re.findall(r"`((?:src|tests|benchmarks|scripts|docs)/[\w./-]+)`", text):
            assert (ROOT / target).exists(), f"{path.name} names {target}"


@pytest.mark.slow
def test_a_wheel_holds_the_tiny_base(tmp_path):
    import subprocess
    import sys
    import zipfile

    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("model.safetensors", "config.json", "tokenizer.json", "recipe.json"):
        assert f"loragate/world/assets/tiny-base/{name}" in names
    assert "loragate/py.typed" in names
