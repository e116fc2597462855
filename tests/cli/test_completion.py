"""Shell completion: the words that bash offers, what zsh and fish are given, and that none of it loads a library."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from loragate.cli import completion
from loragate.cli.main import COMMANDS, main


@pytest.fixture(scope="module")
def scripts():
    return {shell: make() for shell, make in completion.SHELLS.items()}


def offered(script, folder, *words):
    """What bash offers for the last of `words`."""
    line = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _loragate; printf "%s\\n" "${COMPREPLY[@]}"'
    path = folder / "script.bash"
    path.write_text(script)
    command = ["bash", "--norc", "-c", line, "bash", str(path), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_offers_commands_options_and_files(scripts, tmp_path):
    (tmp_path / "gated").mkdir()
    (tmp_path / "rows.jsonl").write_text("")
    script = scripts["bash"]
    assert offered(script, tmp_path, "loragate", "") == {*COMMANDS, "--help", "--version"}
    assert offered(script, tmp_path, "loragate", "cal") == {"calibrate"}
    assert offered(script, tmp_path, "loragate", "calibrate", "--gate") == {"--gate-modules"}
    assert {"--card", "--no-card"} <= offered(script, tmp_path, "loragate", "push", "--")
    assert offered(script, tmp_path, "loragate", "calibrate", "--data", "ro") == {"rows.jsonl"}
    assert offered(script, tmp_path, "loragate", "explore", "ga") == {"gated"}
    assert offered(script, tmp_path, "loragate", "nothing", "--x") == set()


def test_every_option_is_known_to_every_shell(scripts):
    for name, (_, flags) in completion.commands().items():
        assert {"--config", "--help", "--debug", "--print-config"} <= {flag.name for flag in flags}
        (bash,) = re.findall(rf"^    {name}\) words='(.*)' ;;$", scripts["bash"], re.M)
        assert bash.split() == [flag.name for flag in flags]
        (zsh,) = re.findall(rf"^    {name}\) _arguments -s (.*) ;;$", scripts["zsh"], re.M)
        assert re.findall(r"'(--[a-z0-9-]+)\[", zsh) == [flag.name for flag in flags]
        fish = re.findall(rf"seen_subcommand_from {name}' -l ([a-z0-9-]+)", scripts["fish"])
        assert ["--" + word for word in fish] == [flag.name for flag in flags]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_itself_accepts_the_script(scripts, shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(scripts[shell])
    done = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_quotes_are_balanced(scripts, shell):
    for line in scripts[shell].splitlines():
        assert line.count("'") % 2 == 0 or line.startswith("#"), line


def test_wrong_shells_are_named(capsys):
    assert main(["completion", "bsh"]) == 2
    assert "did you mean 'bash'" in capsys.readouterr().err
    assert main(["completion"]) == 2
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.startswith("# loragate completion for bash")


def test_nothing_heavy_is_loaded():
    code = (
        "import sys, io, contextlib; from loragate.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): status = main(['completion', 'bash'])\n"
        "print(status, [m for m in ('torch', 'transformers', 'trl', 'peft', 'ray', 'jinja2') if m in sys.modules])"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "0 []", done.stdout + done.stderr
