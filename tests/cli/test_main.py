"""The command line as a whole: help at once, one clear message per mistake, settings from flags and files."""

import logging
import subprocess
import sys
import time

import pytest
import torch
import yaml

from loragate.cli.arguments import build_parser, field_kinds, help_texts, parse, resolved_yaml
from loragate.cli.calibrate import COMMAND as CALIBRATE
from loragate.cli.calibrate import CalibrateOptions
from loragate.cli.main import COMMANDS, main
from loragate.errors import ConfigError


def fails(capsys, *argv, status=2):
    assert main(list(argv)) == status
    captured = capsys.readouterr()
    assert captured.err.startswith("loragate: error: ")
    assert "Traceback" not in captured.err
    return " ".join(captured.err.split())


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


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert f"loragate {name}" in text
    assert "--config FILE" in text


def test_every_setting_is_described():
    import importlib

    for module, _ in COMMANDS.values():
        command = importlib.import_module(f"loragate.cli.{module}").COMMAND
        described = help_texts(command.options)
        missing = [name for name in field_kinds(command.options) if not described.get(name)]
        assert missing == [], f"loragate {command.name}: {missing}"


def test_help_says_what_is_required_first_and_nothing_of_what_is_off():
    from loragate.cli.sweep import COMMAND as SWEEP

    text = " ".join(build_parser(CALIBRATE).format_help().split())
    flags = [word for word in text.split() if word.startswith("--")]
    assert set(flags[1:4]) == {"--data", "--out", "--adapter"}
    assert text.count("[required]") == 3
    assert "[False]" not in text
    assert "complete gradient, a variant. [on]" in text
    offered = build_parser(SWEEP).format_help()
    for flag in ("--seed ", "--objective ", "--strategy ", "--random-scale "):
        assert flag not in offered
    options, _ = parse(SWEEP, ["--out", "x"])
    assert not {"seed", "objective"} & set(yaml.safe_load(resolved_yaml(options)))


def test_mistakes_on_the_command_line(capsys):
    assert "unknown command 'calibrte'; did you mean 'calibrate'?" in fails(capsys, "calibrte")
    assert "unknown argument --lerning-rate=1; did you mean '--learning-rate'?" in fails(
        capsys, "calibrate", "--lerning-rate=1"
    )
    assert "expected integer, found 'many'" in fails(capsys, "calibrate", "--k", "many")
    assert "needs --adapter" in fails(capsys, "calibrate")
    assert "needs --model" in fails(capsys, "sft")


def test_a_range_without_evidence_is_refused_with_the_reason(capsys):
    arguments = ["calibrate", "--adapter", "a", "--data", "b", "--out", "c"]
    text = fails(capsys, *arguments, "--range=-3,1")
    assert "nothing would show that --range=-3,1 helps" in text
    assert "--unverified" in text
    assert "wrong way round" in fails(capsys, *arguments, "--range=1,-3", "--unverified")
    assert "two numbers" in fails(capsys, *arguments, "--range=-3", "--unverified")
    assert "two numbers" in fails(capsys, *arguments, "--range=a,b", "--unverified")
    assert "accepts one range" in fails(capsys, *arguments, "--unverified")
    assert "leave out one of" in fails(capsys, *arguments, "--range=0,1", "--unverified", "--probe", "p.jsonl")
    assert "stands there twice" in fails(capsys, *arguments, "--ranges", "0,1;0,1")
    assert "no effect without --probe" in fails(capsys, *arguments, "--probe-task", "tiny")
    assert "'anchored'" in fails(capsys, *arguments, "--ranges", "0,1@anchord")


def test_a_range_with_a_space_is_understood():
    options, _ = parse(CALIBRATE, ["--range", "-3,1", "--adapter", "a"])
    assert options.range == "-3,1"


def test_configuration_files(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(
        "adapter: a\nlearning-rate: 5e-4\nrange: -3,1\nepochs: 2\nresume: true\ngate_modules: [q_proj, up_proj]\n"
    )
    options, _ = parse(CALIBRATE, ["--config", str(path), "--epochs", "3", "--no-resume"])
    assert options.learning_rate == 5e-4
    assert options.range == "-3,1"
    assert options.epochs == 3
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
    assert "'k' must be integer, found 'ten'" in message("k: ten")
    assert "'k' must be integer, found 1.5" in message("k: 1.5")
    assert "'resume' must be true or false" in message("resume: maybe")
    assert "expected keys and values, found list" in message("- 1")
    assert "put them in quotes" in message("precision: yes")
    assert "line 3: key 'max-rows' stands in line 1 already" in message("max_rows: 1\nk: 2\nmax-rows: 3")
    assert "cannot be read" in fails(capsys, "calibrate", "--config", str(tmp_path / "none.yaml"))


def test_keys_without_a_value_and_lists_in_configuration_files(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("adapter: a\nbatch_size:\nprobe: null\nresume:\nselect_seed:\n")
    assert parse(CALIBRATE, ["--config", str(path)])[0] == CalibrateOptions(adapter="a")
    for text in ('ranges: ["-3,1", "0,1"]', "ranges: [[-3, 1], [0, 1]]", "ranges: -3,1;0,1"):
        path.write_text(text)
        assert parse(CALIBRATE, ["--config", str(path)])[0].ranges == "-3,1;0,1"


def test_print_config(capsys):
    assert main(["calibrate", "--adapter", "a", "--print-config"]) == 0
    text = capsys.readouterr().out
    assert "adapter: a" in text
    assert "learning_rate: 0.0005" in text


def test_defaults_are_the_papers():
    options = CalibrateOptions()
    assert (options.batch_size, options.learning_rate, options.k, options.max_length) == (128, 5e-4, 100, 4096)
    assert (options.max_rows, options.warmup, options.schedule, options.epochs) == (20_000, 0.0, "cosine", 1.0)


def test_unexpected_errors_show_no_traceback_unless_asked(capsys, monkeypatch):
    from loragate.cli import doctor

    def broken():
        raise KeyError("inside")

    monkeypatch.setattr(doctor, "findings", broken)
    assert "run again with --debug" in fails(capsys, "doctor", status=1)
    assert main(["doctor", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_doctor(capsys):
    import json

    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert found["versions"]["torch"]
    assert any(device.startswith("cpu") for device in found["devices"])
    assert found["instructions"][0] == torch.backends.cpu.get_cpu_capability()
    assert main(["doctor"]) == 0
    assert "next: loragate quickstart" in capsys.readouterr().out


@pytest.mark.parametrize("has_it", [True, False])
def test_doctor_tells_the_instruction_set_and_what_follows(has_it, capsys, monkeypatch):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: has_it)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert ("AVX512-BF16 (no AMX)" if has_it else "(no AVX512-BF16 or AMX)") in said
    assert ("keeps them unpacked" in said) == has_it
    assert ("--dtype float32 is faster" in said) == (not has_it)


def test_no_command_speaks_of_a_kernel_that_none_uses(capsys):
    assert main(["doctor", "--json"]) == 0
    speaker = logging.getLogger("bitsandbytes.backends.cpu.ops")
    records = {
        text: logging.LogRecord(speaker.name, logging.WARNING, "", 0, text, ("no module",), None)
        for text in ("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "something else: %s")
    }
    assert [text for text, record in records.items() if speaker.filter(record)] == ["something else: %s"]


def test_an_error_that_quotes_a_file_does_not_act_on_the_terminal(tmp_path, capsys):
    record = '{"peft_type": "LORA", "base_model_name_or_path": "a/b/\\u001b]0;owned\\u0007"}'
    (tmp_path / "adapter_config.json").write_text(record)
    assert "names as its base model a/b/\\x1b]0;owned\\x07" in fails(capsys, "inspect", str(tmp_path))
