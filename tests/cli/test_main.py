"""The command line as a whole: help at once, one clear message per mistake, settings from flags and files."""

import logging
import re
import subprocess
import sys
import time

import pytest
import torch
import yaml

from loragate.cli import env
from loragate.cli.arguments import field_kinds, flag_of, headings, parse, resolved_yaml
from loragate.cli.calibrate import COMMAND as CALIBRATE
from loragate.cli.calibrate import CalibrateOptions
from loragate.cli.main import COMMANDS, command, main
from loragate.errors import ConfigError


def test_help_answers_in_half_a_second():
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "loragate", "--help"], capture_output=True, text=True, check=True)
    fastest = time.perf_counter() - began
    for _ in range(2):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "loragate", "--help"], capture_output=True, check=True)
        fastest = min(fastest, time.perf_counter() - began)
    assert fastest < 0.5
    for name in COMMANDS:
        assert f"  {name}" in done.stdout


def options_of(text):
    """The options that a help text shows, in its order; a long name may be followed by its opposite."""
    return re.findall(r"^│ (--[a-z0-9-]+|[A-Z]+ )", text, re.M)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_a_screen_with_what_is_most_used(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"examples:\n  loragate {name}" in text
    assert 1 <= len(options_of(text)) <= 20
    assert len(text.splitlines()) <= 50
    assert max(map(len, text.split("examples:")[0].splitlines())) <= 100
    assert text.splitlines()[-1].endswith(f"loragate {name} --help-all")
    assert "advanced" not in text


@pytest.mark.parametrize("name", COMMANDS)
def test_help_all_shows_every_option(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main([name, "--help-all"]) == 0
    shown = {option.strip() for option in options_of(capsys.readouterr().out)}
    found = command(name)
    fields = field_kinds(found.options)
    assert {flag_of(field) for field in fields if field != found.positional} <= shown
    assert {"--config", "--print-config", "--debug"} <= shown
    assert set(found.common.split()) <= set(fields)


def test_help_says_what_is_required_first_and_nothing_of_what_is_off(capsys):
    from loragate.cli.sweep import COMMAND as SWEEP

    assert main(["calibrate", "--help"]) == 0
    text = capsys.readouterr().out
    assert options_of(text)[:3] == ["--adapter", "--data", "--out"]
    assert text.index("required") < text.index("--adapter") < text.index("options ─") < text.index("--ranges")
    assert "[default: False]" not in text
    assert "--no-resume" not in text
    assert main(["calibrate", "--help-all"]) == 0
    text = capsys.readouterr().out
    assert "--no-detach-input" in text
    assert "--no-resume" not in text
    assert "advanced: model" in text
    assert headings(CALIBRATE)["adam_beta1"] == "advanced: train"
    assert not {"seed", "objective", "strategy", "random_scale"} & set(field_kinds(SWEEP.options))
    options, _ = parse(SWEEP, ["--out", "x"])
    assert not {"seed", "objective"} & set(yaml.safe_load(resolved_yaml(options)))


def test_mistakes_on_the_command_line(fails):
    assert "unknown command 'calibrte'; did you mean 'calibrate'?" in fails("calibrte")
    assert "--lerning-rate. Did you mean --learning-rate" in fails("calibrate", "--lerning-rate=1")
    assert "--k: expected a whole number, found 'many'" in fails("calibrate", "--k", "many")
    assert "--k: expected a whole number, found '1.5'" in fails("calibrate", "--k", "1.5")
    assert "--tau: expected a number, found 'nan'" in fails("calibrate", "--tau", "nan")
    assert '"half" for --dtype. Choose from: "auto", "float32"' in fails("calibrate", "--dtype", "half")
    assert "--out expects a value, found the flag --resume" in fails("calibrate", "--out", "--resume")
    assert "--out requires an argument" in fails("calibrate", "--out")
    assert "'{}x'" in fails("sft", "--objective-options", "{}x")
    assert "needs --adapter" in fails("calibrate")
    assert "needs --model" in fails("sft")
    assert "more" in fails("inspect", "adapter", "more")


@pytest.mark.parametrize("words", [["--ranges", "-3,1"], ["--ranges=-3,1"]])
def test_ranges_that_begin_with_a_minus(words):
    options, _ = parse(CALIBRATE, [*words, "--adapter", "a"])
    assert options.range == "-3,1"


def test_configuration_files(tmp_path, fails):
    path = tmp_path / "run.yaml"
    path.write_text(
        "adapter: a\nlearning-rate: 5e-4\nrange: -3,1\nepochs: 2\nresume: true\ngate_modules: [q_proj, up_proj]\n"
    )
    options, _ = parse(CALIBRATE, ["--config", str(path), "--num-train-epochs", "3", "--no-resume"])
    assert options.learning_rate == 5e-4
    assert options.range == "-3,1"
    assert options.num_train_epochs == 3
    assert options.resume is False
    assert options.gate_modules == "q_proj,up_proj"
    again = tmp_path / "again.yaml"
    again.write_text(resolved_yaml(options))
    assert parse(CALIBRATE, ["--config", str(again)])[0] == options

    def message(text):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            parse(CALIBRATE, ["--config", str(path)])
        return str(caught.value)

    assert "unknown key 'learning_rat'; did you mean 'learning_rate'?" in message("learning_rat: 1")
    assert "line 2: not valid YAML" in message("a: 1\n: : x\n - ]")
    assert "k must be a whole number, found 1.5" in message("k: 1.5")
    assert "expected keys and values, found list" in message("- 1")
    assert "put them in quotes" in message("probe: yes")
    assert "found 'bfloat'; did you mean 'bfloat16'?" in message("dtype: bfloat")
    assert "line 2" in message("k: 1\nk: 2")
    assert "'max_rows' and 'max-rows' are one key" in message("max_rows: 1\nmax-rows: 3")
    assert "cannot be read" in fails("calibrate", "--config", str(tmp_path / "none.yaml"))


def test_keys_without_a_value_and_lists_in_configuration_files(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("adapter: a\nbatch_size:\nprobe: null\nresume:\nselect_seed:\n")
    assert parse(CALIBRATE, ["--config", str(path)])[0] == CalibrateOptions(adapter="a")
    for text in ('ranges: ["-3,1", "0,1"]', "ranges: [[-3, 1], [0, 1]]", "ranges: -3,1;0,1"):
        path.write_text(text)
        assert parse(CALIBRATE, ["--config", str(path)])[0].ranges == "-3,1;0,1"


def test_defaults_are_the_papers():
    options = CalibrateOptions().fitted(20_000)
    assert (options.batch_size, options.learning_rate, options.k, options.max_length) == (128, 5e-4, 100, 4096)
    assert (options.max_rows, options.warmup_ratio, options.lr_scheduler_type, options.num_train_epochs) == (
        20_000,
        0.0,
        "cosine",
        1.0,
    )


def test_unexpected_errors_show_no_traceback_unless_asked(capsys, fails, monkeypatch):
    def broken():
        raise KeyError("inside")

    monkeypatch.setattr("loragate.cli.env.findings", broken)
    assert "run again with --debug" in fails("env", status=1)
    assert main(["env", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("bfloat16", "faster"), [(400, "bfloat16"), (90, "float32")])
def test_env(bfloat16, faster, capsys, monkeypatch):
    import json

    measured = env.cpu_gflops(size=8)
    assert set(measured) == {"float32", "bfloat16"}
    assert min(measured.values()) >= 1
    monkeypatch.setattr(env, "cpu_gflops", lambda: {"float32": 150, "bfloat16": bfloat16})
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert found["versions"]["torch"]
    assert any(device.startswith("cpu") for device in found["devices"])
    assert found["instructions"][0] == torch.backends.cpu.get_cpu_capability()
    assert main(["env"]) == 0
    said = capsys.readouterr().out
    assert f"{bfloat16} GFLOP/s in bfloat16, 150 in float32, so --dtype {faster}" in said
    assert "next: loragate quickstart" in said


def test_no_command_speaks_of_a_kernel_that_none_uses(capsys):
    assert main(["env", "--json"]) == 0
    speaker = logging.getLogger("bitsandbytes.backends.cpu.ops")
    records = {
        text: logging.LogRecord(speaker.name, logging.WARNING, "", 0, text, ("no module",), None)
        for text in ("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "something else: %s")
    }
    assert [text for text, record in records.items() if speaker.filter(record)] == ["something else: %s"]


def test_an_error_that_quotes_a_file_does_not_act_on_the_terminal(tmp_path, fails):
    record = '{"peft_type": "LORA", "base_model_name_or_path": "a/b/\\u001b]0;owned\\u0007"}'
    (tmp_path / "adapter_config.json").write_text(record)
    assert "names as its base model a/b/\\x1b]0;owned\\x07" in fails("inspect", str(tmp_path))
