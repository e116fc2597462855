"""Shell completion: the words that bash offers, what zsh and fish are given, and that none of it loads a library."""

import re
import shutil
import subprocess

import pytest

from loragate.cli import completion
from loragate.cli.arguments import field_kinds, flag_of
from loragate.cli.main import COMMANDS, command, main

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(scope="module")
def scripts():
    return {shell: completion.script(shell) for shell in SHELLS}


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
    assert set(COMMANDS) <= offered(script, tmp_path, "loragate", "")
    assert offered(script, tmp_path, "loragate", "cal") == {"calibrate"}
    assert offered(script, tmp_path, "loragate", "calibrate", "--gate") == {"--gate-modules"}
    assert offered(script, tmp_path, "loragate", "calibrate", "--dtype", "b") == {"bfloat16"}
    assert offered(script, tmp_path, "loragate", "completion", "f") == {"fish"}
    assert {"--card", "--no-card"} <= offered(script, tmp_path, "loragate", "push", "--")
    assert offered(script, tmp_path, "loragate", "calibrate", "--data", "ro") == {"rows.jsonl"}
    assert offered(script, tmp_path, "loragate", "explore", "ga") == {"gated"}
    assert offered(script, tmp_path, "loragate", "nothing", "--x") == set()


def test_every_option_is_known_to_every_shell(scripts):
    for name in COMMANDS:
        found = command(name)
        for field in {*field_kinds(found.options), "config", "print_config", "debug"} - {found.positional}:
            flag = flag_of(field)
            assert f'"{flag}"' in scripts["bash"]
            assert f"{flag}[" in scripts["zsh"]
            assert re.search(rf"__fish_loragate_using_command {name}' -l {flag[2:]}\b", scripts["fish"])


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_itself_accepts_the_script(scripts, shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(scripts[shell])
    done = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_wrong_shells_are_named(capsys):
    assert main(["completion", "bsh"]) == 2
    assert 'Did you mean "bash"' in " ".join(capsys.readouterr().err.split())
    assert main(["completion"]) == 2
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.startswith("# Bash completion for loragate")
