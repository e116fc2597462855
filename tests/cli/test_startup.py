"""The command line answers at once: help, version and typing errors import none of the heavy libraries.

What is imported is counted, not timed.
"""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "peft", "trl", "datasets", "accelerate", "numpy", "pandas", "matplotlib", "gradio")
HEAVY += ("ray", "vllm", "lm_eval", "math_verify", "jinja2", "yaml", "huggingface_hub", "tokenizers", "safetensors")
PROGRAM = f"""
import contextlib, io, json, sys
import loragate
from loragate.cli.main import COMMANDS, main

def heavy():
    return [name for name in {HEAVY!r} if name in sys.modules]

found = {{"import loragate": [None, heavy(), ""]}}
helps = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
mistakes = [["calibrat"], *([name, "--no-such-flag"] for name in COMMANDS), ["calibrate", "--seed", "one"]]
for arguments in [*helps, *mistakes]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            status = main(arguments)
        except SystemExit as stopped:
            status = stopped.code
    found[" ".join(arguments)] = [status, heavy(), text.getvalue()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def answers():
    """{arguments: (status, heavy modules imported so far, text)}, all in one fresh process: what comes stays."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_nothing_heavy_is_imported(answers):
    assert len(answers) > 2 * 17
    guilty = next((call for call, (_, modules, _) in answers.items() if modules), None)
    assert guilty is None, f"{guilty} imports {answers[guilty][1]}"


def test_the_check_sees_what_it_looks_for():
    code = "import sys, loragate.generation; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_a_missing_file_is_found_before_anything_heavy_is_imported(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys; from loragate.cli.main import main\n"
        "assert main(['sft', '--model', 'base', '--data', 'rws.jsonl', '--out', 'out']) == 2; assert 'torch' not in sys.modules"
    )
    (tmp_path / "rows.jsonl").write_text("{}")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "--data: found no file rws.jsonl; did you mean 'rows.jsonl'?" in ended.stderr
