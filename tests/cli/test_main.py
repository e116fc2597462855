"""The command line as a whole: help at once, one clear message per mistake, settings from flags and files."""

import json
import re

import pytest
import torch
import yaml
from safetensors.torch import save_file

from loragate.cli.arguments import GLOBAL, field_types, flag_of, headings, parse, resolved_yaml
from loragate.cli.calibrate import COMMAND as CALIBRATE
from loragate.cli.calibrate import CalibrateOptions
from loragate.cli.env import findings
from loragate.cli.main import COMMANDS, load_command, main, overview
from loragate.cli.sft import COMMAND as SFT
from loragate.errors import ConfigError


def lines_at(width, text):
    """How many lines a terminal of this width shows."""
    return sum(max(1, -(-len(line) // width)) for line in text.splitlines())


def options_of(text):
    """The options that a help text shows, in its order; a long name may be followed by its opposite."""
    return re.findall(r"^│ (--[a-z0-9-]+|[A-Z]+ )", text, re.M)


def test_the_commands():
    names = (
        "quickstart doctor sft calibrate sweep eval regrade generate diagnose report explore serve verify export push"
    )
    assert list(COMMANDS) == [*names.split(), "recipes", "mask", "env"]
    assert all(f"\n  {name} " in overview() for name in COMMANDS)
    assert lines_at(100, overview()) <= 40


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_one_screen_and_help_all_has_every_setting(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert lines_at(100, text) <= 40
    assert f"examples:\n  loragate {name}" in text
    assert text.splitlines()[-1].endswith(f"loragate {name} --help-all")
    assert "advanced" not in text
    assert "Stage I" not in text
    found = load_command(name)
    fields, rare = set(field_types(found.options)), set(found.rare.split())
    assert set(found.common.split()) | rare <= fields
    assert main([name, "--help-all"]) == 0
    text = capsys.readouterr().out
    shown = {option.strip() for option in options_of(text)}
    assert {flag_of(field) for field in fields - rare if field != found.positional} <= shown
    assert {"--config", "--print-config", "--debug"} <= shown
    assert not {flag_of(field) for field in rare} & shown
    assert all(f"\n  {flag_of(field)}: " in text for field in rare)
    assert "Stage I" not in text


def test_no_flag_is_broken_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["calibrate", "--help-all"]) == 0
    text = capsys.readouterr().out
    assert "│ --per-device-train-batch-size " in text
    assert {len(line) for line in text.splitlines() if line.startswith("│")} == {80}


def test_calibrate_shows_fewer_than_forty_flags_and_takes_all_settings(tmp_path):
    flags = set(field_types(CALIBRATE.options)) - set(CALIBRATE.rare.split())
    assert len(flags) + len(GLOBAL) < 40
    options = CalibrateOptions(adapter="a", tau=0.5, adam_beta1=0.8, detach_input=False, eval_split="test")
    (tmp_path / "all.yaml").write_text(resolved_yaml(options))
    assert parse(CALIBRATE, ["--config", str(tmp_path / "all.yaml")])[0] == options
    typed = ["--adapter", "a", "--tau", "0.5", "--adam-beta1", "0.8", "--no-detach-input", "--eval-split", "test"]
    assert parse(CALIBRATE, typed)[0] == options, "each is a flag too"


def test_help_says_what_is_required_first_and_nothing_of_what_is_off(capsys):
    from loragate.cli.sweep import COMMAND as SWEEP

    assert main(["calibrate", "--help"]) == 0
    text = capsys.readouterr().out
    assert options_of(text)[:3] == ["--adapter", "--data", "--out"]
    assert text.index("required") < text.index("--adapter") < text.index("options ─") < text.index("--ranges")
    assert "[default: False]" not in text
    assert "--no-resume" not in text
    assert headings(CALIBRATE)["k"] == "advanced: gate training"
    assert not {"seed", "objective", "strategy"} & set(field_types(SWEEP.options))
    options, _ = parse(SWEEP, ["--out", "x"])
    assert not {"seed", "objective"} & set(yaml.safe_load(resolved_yaml(options)))


@pytest.mark.parametrize(
    ("name", "tried", "meant"),
    [
        ("calibrate", "--lr", "--learning-rate"),
        ("calibrate", "--bs", "--batch-size"),
        ("sft", "--batch", "--batch-size"),
        ("mask", "--batch", "--per-device-train-batch-size"),
        ("sft", "--epochs", "--num-train-epochs"),
        ("calibrate", "--probe", "--dev-data"),
        ("sweep", "--range", "--ranges"),
        ("calibrate", "--model", "--adapter"),
        ("sweep", "--lora", "--adapter"),
        ("eval", "--lora", "--model"),
        ("generate", "--adapter", "--model"),
        ("eval", "--output", "--out"),
        ("sft", "--output-dir=x", "--out"),
        ("calibrate", "--train-data", "--data"),
        ("sft", "--dataset", "--data"),
        ("sft", "--train-file", "--data"),
        ("sft", "--lora_r", "--rank"),
        ("sft", "--lora_alpha", "--alpha"),
        ("sft", "--model_name_or_path", "--model"),
        ("calibrate", "--model_name_or_path", "--adapter"),
        ("sft", "--bf16", "--precision bf16"),
        ("export", "--bf16", "--dtype bfloat16"),
        ("sft", "--gradient_accumulation_steps", "--batch-size"),
        ("eval", "--output_path", "--out"),
        ("export", "--format", "--to"),
        ("export", "--scale", "--constant"),
    ],
)
def test_names_that_people_bring_along(name, tried, meant, fails):
    assert f"did you mean {meant}?" in fails(name, tried, "1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("export --model ad", "--model; give it without a flag: loragate export ad"),
        ("export --out x --adapter=ad", "--adapter; give it without a flag: loragate export ad"),
        ("serve --model", "--model; give it without a flag: loragate serve MODEL"),
        ("verify --model ad", "--model; give it without a flag: loragate verify ad"),
        ("doctor --adapter ad", "--adapter; give it without a flag: loragate doctor ad"),
        ("calibrate ad", "ad stands without a flag; did you mean --adapter ad?"),
        ("calibrate --adapter=ad rows.jsonl", "rows.jsonl stands without a flag; did you mean --data rows.jsonl?"),
        ("eval ad", "ad stands without a flag; did you mean --model ad?"),
        ("generate ad", "ad stands without a flag; did you mean --model ad?"),
        ("export ad y", "y stands without a flag; did you mean --out y?"),
        ("doctor ad more", "more stands without a flag (loragate"),
    ],
)
def test_what_is_given_with_a_flag_and_what_without(words, said, fails):
    found = fails(*words.split())
    assert said in found
    assert "unknown option" not in found or "did you mean" not in found


def test_mistakes_on_the_command_line(fails):
    assert "unknown command 'calibrte'; did you mean 'calibrate'?" in fails("calibrte")
    assert "--lerning-rate. Did you mean --learning-rate" in fails("calibrate", "--lerning-rate=1")
    assert "--k must be a whole number, found 'many'" in fails("calibrate", "--k", "many")
    assert "--k must be a whole number, found 1.5" in fails("calibrate", "--k", "1.5")
    assert "--learning-rate must be a finite number" in fails("calibrate", "--learning-rate", "nan")
    assert '"half" for --dtype. Choose from: "auto", "float32"' in fails("calibrate", "--dtype", "half")
    assert "--out expects a value, found the flag --resume" in fails("calibrate", "--out", "--resume")
    assert "--out requires an argument" in fails("calibrate", "--out")
    assert "'{}x'" in fails("sft", "--objective-options", "{}x")
    assert "needs --adapter" in fails("calibrate")
    assert "--port must be at most 65535, found 99999" in fails("explore", "gated", "--port", "99999")
    assert "unknown command 'inspect'; did you mean 'doctor --quick'?" in fails("inspect", "adapter")
    assert "unknown command 'merge'; did you mean 'export --to merged'?" in fails("merge", "adapter")
    assert "unknown command 'train'; did you mean 'sft'?" in fails("train")


@pytest.mark.parametrize("name", ["sft", "mask"])
def test_a_negative_number_of_rows_is_refused(name, tmp_path, fails):
    given = ["--model", tmp_path, "--data", "rows.jsonl", "--out", tmp_path / "out", "--max-rows", "-3"]
    assert "--max-rows must be at least 0, found -3" in fails(name, *given)


def test_values_are_read_as_they_are_meant():
    for words in (["--ranges", "-3,1"], ["--ranges=-3,1"]):
        assert parse(CALIBRATE, words)[0].ranges == "-3,1"
    options, _ = parse(CALIBRATE, ["--learning-rate", "1e-4", "--max-rows", "2e3", "--num-train-epochs", "2"])
    assert (options.learning_rate, options.max_rows, options.num_train_epochs) == (1e-4, 2000, 2.0)
    options, _ = parse(SFT, ["--objective-options", '{"threshold": 0.1}'])
    assert options.objective_options == {"threshold": 0.1}


def test_configuration_files(tmp_path, fails):
    path = tmp_path / "run.yaml"
    path.write_text(
        "adapter: a\nlearning-rate: 5e-4\nranges: [[-3, 1], [0, 1]]\nnum_train_epochs: 2\nresume: true\nbatch_size:\n"
        "gate_modules: [q_proj, up_proj]\n"
    )
    options, _ = parse(CALIBRATE, ["--config", str(path), "--num-train-epochs", "3", "--no-resume"])
    assert (options.learning_rate, options.ranges, options.num_train_epochs) == (5e-4, "-3,1;0,1", 3)
    assert (options.resume, options.gate_modules, options.batch_size) == (False, "q_proj,up_proj", 0)

    def message(text):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            parse(CALIBRATE, ["--config", str(path)])
        return str(caught.value)

    assert "unknown key 'learning_rat'; did you mean 'learning_rate'?" in message("learning_rat: 1")
    assert "unknown key 'lr'; did you mean 'learning_rate'?" in message("lr: 1")
    assert "line 2: not valid YAML" in message("a: 1\n: : x\n - ]")
    assert "k must be a whole number, found 1.5" in message("k: 1.5")
    assert "expected keys and values, found list" in message("- 1")
    assert "put them in quotes" in message("dev_data: yes")
    assert "line 2" in message("k: 1\nk: 2")
    assert "'max_rows' and 'max-rows' are one key" in message("max_rows: 1\nmax-rows: 3")
    assert "cannot be read" in fails("calibrate", "--config", str(tmp_path / "none.yaml"))


def test_unexpected_errors_show_no_traceback_unless_asked(capsys, fails, monkeypatch):
    def broken():
        raise KeyError("inside")

    monkeypatch.setattr("loragate.cli.env.findings", broken)
    assert "run again with --debug" in fails("env", status=1)
    assert main(["env", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False}, ", no bf16: use float32)"),
        ({"avx512_bf16": True, "amx_bf16": False}, ", bf16)"),
        ({}, f"{torch.backends.cpu.get_cpu_capability()})"),
    ],
)
def test_env_says_whether_the_processor_multiplies_bf16(known, said, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    assert findings()["devices"][0].endswith(said)


def test_env(capsys):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert found["versions"]["torch"]
    assert any(device.startswith("cpu") for device in found["devices"])
    assert main(["env"]) == 0
    assert "next: loragate quickstart" in capsys.readouterr().out


def test_an_error_that_quotes_a_file_does_not_act_on_the_terminal(tmp_path, fails, capsys):
    record = '{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": "a/b/\\u001b]0;owned\\u0007"}'
    factors = {f"base_model.model.q_proj.lora_{one}.weight": torch.ones(2, 2) for one in "AB"}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(record)
    named = "a/b/\\x1b]0;owned\\x07"
    assert f"names as its base model {named}" in fails("generate", "--model", str(tmp_path), "--prompt", "w1")
    assert main(["doctor", str(tmp_path), "--quick"]) == 0
    assert named in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("command", "said"), [("eval", "--resume goes on"), ("env", "nothing half-written was left")])
def test_ctrl_c_says_whether_the_command_can_go_on(command, said, monkeypatch, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("loragate.cli.main._run", stopped)
    assert main([command]) == 130
    assert said in capsys.readouterr().err
