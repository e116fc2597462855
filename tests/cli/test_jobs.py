"""The commands on small local files: sft, doctor, calibrate, generate, quickstart, and what bad input is answered with."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import loragate as lg
from loragate.cli.main import main
from loragate.evaluation import judging
from loragate.selection import trials
from tiny import run, tiny_base, tiny_tokenizer, write_adapter, write_base, write_rows


@pytest.fixture
def place(made):
    return made


def test_what_sft_and_calibrate_leave(place):
    from peft import PeftModel

    plain = PeftModel.from_pretrained(tiny_base(), place / "adapter")
    assert plain.peft_config["default"].r == 16
    tensors = load_file(place / "adapter" / "adapter_model.safetensors")
    assert any(value.abs().max() > 0 for name, value in tensors.items() if "lora_B" in name)
    gated = place / "gated"
    record = json.loads((gated / "gate_config.json").read_text())
    assert (record["gate"]["lower"], record["k"], record["training"]["steps"]) == (-3, 20, 5)
    assert record["parity"]["at_zero"] == 0
    assert "without a dev set" in record["selection"]["reason"]
    assert "adapter_config.json" not in [path.name for path in gated.iterdir()]
    original = (place / "adapter" / "adapter_model.safetensors").read_bytes()
    assert (gated / "adapter" / "adapter_model.safetensors").read_bytes() == original
    assert "no evidence of better answers" in (gated / "README.md").read_text()
    assert "topk_entropy" in json.loads((gated / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert len(lg.gate_parameters(lg.load_gated(gated))) == 28


def test_what_calibrate_says(place, tmp_path, capsys):
    data = ["--data", place / "alpaca.json", "--batch-size", 20, "--per-device-train-batch-size", 20]
    run("calibrate", "--adapter", place / "adapter", "--ranges=0,1", "--skip-selection", *data, "--out", tmp_path / "g")
    text = capsys.readouterr().out
    assert "20 rows" in text
    assert "⟦" in text, "the response mask is shown before training"
    assert "next: loragate eval" in text
    (tmp_path / "odd.jsonl").write_text(json.dumps({"prompt": "w1", "completion": "never seen words"}) + "\n")
    assert "warning" not in text
    data[1] = tmp_path / "odd.jsonl"
    run(
        "calibrate",
        "--adapter",
        place / "adapter",
        "--ranges=0,1",
        "--skip-selection",
        *data,
        "--out",
        tmp_path / "odd",
    )
    text = " ".join(capsys.readouterr().out.split())
    assert "without the chat template" in text
    assert "unknown to the tokenizer" in text
    assert "data: 1 row (" in text
    assert "warning: fewer than 8 rows teach nothing" in text


def test_generate(place, capsys, fails):
    prompt = ["--prompt", "w1 w2 w3", "--max-new-tokens", 6, "--samples", 3, "--json"]
    texts = {}
    for name in ("gated", "adapter", "base"):
        capsys.readouterr()
        run("generate", "--model", place / name, *prompt)
        records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [record["sample"] for record in records] == [0, 1, 2]
        texts[name] = [record["text"] for record in records]
    for constant, name in ((1, "adapter"), (0, "base")):
        run("generate", "--model", f"{place / 'gated'}@constant={constant}", *prompt)
        records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [record["text"] for record in records] == texts[name]
    assert "plain adapter has no gates" in fails("generate", "--model", f"{place / 'adapter'}@unit", *prompt)


def test_evidence_that_cannot_be_had_is_missed_before_anything_is_tokenised(place, tmp_path, fails, monkeypatch):
    monkeypatch.setattr(trials, "training_rows", None)
    options = ["--adapter", place / "adapter", "--data", place / "messages.jsonl", "--out", tmp_path / "out"]
    probe = tmp_path / "dev.jsonl"
    assert "found no file" in fails("calibrate", *options, "--dev-data", probe)
    probe.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    monkeypatch.setattr(judging, "find_spec", lambda name: None)
    options += ["--dev-data", probe, "--dev-grader", "math_verify"]
    assert "needs math-verify" in fails("calibrate", *options)
    assert not (tmp_path / "out").exists()


def test_wrong_paths(place, tmp_path, fails):
    options = ["--data", place / "messages.jsonl", "--ranges=-3,1", "--skip-selection", "--out", tmp_path / "out"]
    for adapter, words in (
        (tmp_path / "none", "does not exist"),
        (place / "gated", "is already a gated adapter"),
        (place / "base", "no adapter_config.json"),
    ):
        assert words in fails("calibrate", "--adapter", adapter, *options)
    options[1] = place / "mesages.jsonl"
    assert "messages.jsonl" in fails("calibrate", "--adapter", place / "adapter", *options)
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n{"a"\n')
    options[1] = tmp_path / "bad.jsonl"
    assert "bad.jsonl:2" in fails("calibrate", "--adapter", place / "adapter", *options)
    assert "does not exist" in fails("generate", "--model", tmp_path / "none", "--prompt", "x")
    assert not (tmp_path / "out").exists(), "nothing is left behind"


def test_a_tokenizer_without_a_chat_template(place, tmp_path, fails):
    for folder in ("base", "adapter"):
        shutil.copytree(place / folder, tmp_path / folder)
        (tmp_path / folder / "chat_template.jinja").unlink()
    line = [
        "calibrate",
        "--adapter",
        tmp_path / "adapter",
        "--base",
        tmp_path / "base",
        "--ranges=-3,1",
        "--skip-selection",
    ]
    line += ["--out", tmp_path / "out", "--data", place / "messages.jsonl"]
    assert "--chat-template" in fails(*line)
    template = tmp_path / "template.jinja"
    template.write_text(tiny_tokenizer().chat_template)
    run(*line, "--chat-template", template, "--batch-size", 20, "--per-device-train-batch-size", 20)


def test_resume_through_the_command(place, tmp_path, fails, monkeypatch):
    from loragate.training import run as run_module

    out = tmp_path / "gated"
    line = ["calibrate", "--adapter", place / "adapter", "--data", place / "messages.jsonl", "--ranges=-3,2"]
    line += [
        "--skip-selection",
        "--batch-size",
        4,
        "--per-device-train-batch-size",
        4,
        "--save-steps",
        2,
        "--k",
        20,
        "--out",
        out,
    ]
    real = run_module.StepReporter._report

    def stop(self, state):
        if state.global_step == 3:
            raise KeyboardInterrupt
        real(self, state)

    monkeypatch.setattr(run_module.StepReporter, "_report", stop)
    assert main([str(word) for word in line]) == 130
    assert not (out / "gate_config.json").exists(), "nothing half-written"
    monkeypatch.undo()
    kept = {path.name: path.read_bytes() for path in (out / "run").glob("*.*")}
    assert {"config.yaml", "run.json"} <= set(kept)
    other = [place / "plain.jsonl" if word == place / "messages.jsonl" else word for word in line]
    for again in (line, [*other, "--max-rows", 8]):
        said = fails(*again)
        assert "an unfinished run (checkpoint-2)" in said
        assert "--resume" in said
    said = fails("export", place / "adapter", "--out", out)
    assert "is not empty (it holds run)" in said
    assert "begun with settings.learning_rate = " in fails(*line, "--resume", "--learning-rate", "1e-3")
    assert kept == {path.name: path.read_bytes() for path in (out / "run").glob("*.*")}, "what the run began with stays"
    run(*line, "--resume")
    run(*line[:-1], tmp_path / "whole")
    gates = load_file(out / "gates.safetensors")
    for name, value in load_file(tmp_path / "whole" / "gates.safetensors").items():
        assert torch.equal(gates[name], value), name


def test_a_training_stopped_while_the_model_loaded_is_resumed_from_the_start(place, tmp_path):
    (tmp_path / "out" / "run").mkdir(parents=True)
    (tmp_path / "out" / "run" / "config.yaml").touch()
    line = ["sft", "--model", place / "base", "--data", place / "plain.jsonl", "--out", tmp_path / "out", "--resume"]
    run(*line, "--max-rows", 4, "--batch-size", 4, "--per-device-train-batch-size", 4)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_a_folder_that_is_not_empty_is_left_alone(place, tmp_path, fails):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "README.md").write_text("mine")
    calibrate = ["calibrate", "--adapter", place / "adapter", "--data", place / "messages.jsonl", "--ranges=-3,1"]
    calibrate.append("--skip-selection")
    for out, words in (
        (tmp_path / "full", "is not empty"),
        (place / "adapter", "is not empty"),
        (place / "gated", "already holds a gated adapter"),
    ):
        before = sorted((path.name, path.stat().st_mtime_ns) for path in out.iterdir())
        assert words in fails(*calibrate, "--out", out)
        assert sorted((path.name, path.stat().st_mtime_ns) for path in out.iterdir()) == before
    sft = ["sft", "--model", place / "base", "--data", place / "plain.jsonl"]
    assert "is not empty" in fails(*sft, "--out", tmp_path / "full")
    assert "run the command without --resume" in fails(*calibrate, "--out", tmp_path / "new", "--resume")


def test_mistakes_are_found_before_anything_is_loaded(place, tmp_path, fails):
    sft = ["sft", "--model", place / "base", "--data", place / "messages.jsonl", "--out", tmp_path / "out"]
    for flags, words in (
        (["--objective", "profit", "--objective-options", '{"x": 1}'], "has no option 'x' (it has threshold)"),
        (["--batch-size", 10, "--per-device-train-batch-size", 4], "not a multiple of per_device_train_batch_size"),
        (["--report-to", "nothing_of_the_kind"], "pip install nothing_of_the_kind"),
        (["--target-modules", "zzz"], "its linear layers end in"),
    ):
        assert words in fails(*sft, *flags)
    sft[2] = place / "adapter"
    assert "is an adapter, not a base model" in fails(*sft)
    sft[2] = tmp_path / "nowhere"
    assert "base model" in fails(*sft)
    assert "wrong way round" in fails("quickstart", "--ranges", "3,-1", "--out", tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_rows_longer_than_the_model_are_refused(tmp_path, fails):
    write_base(tmp_path / "base", max_position_embeddings=16)
    write_adapter(tmp_path / "adapter", tmp_path / "base")
    write_rows(tmp_path / "long.jsonl", [{"prompt": "w1", "completion": " ".join(["w2"] * 30)}])
    data = ["--data", tmp_path / "long.jsonl", "--out", tmp_path / "out"]
    calibrate = ["calibrate", "--adapter", tmp_path / "adapter", "--ranges=0,1", "--skip-selection"]
    for line in (["sft", "--model", tmp_path / "base"], calibrate):
        assert "long.jsonl:1 has 32 tokens, but the model has 16 positions" in fails(*line, *data)


@pytest.mark.slow("whole commands")
def test_quickstart(tmp_path, capsys):
    """A shortened quickstart: scores, reading, page, and folders that the other commands take."""
    from loragate.evaluation.results import read_record
    from loragate.quickstart.run import DFT

    out = tmp_path / "run"
    run("quickstart", "--out", out, "--questions", 10, "--samples", 2, "--ranges=-3,1")
    assert "next: loragate generate" in capsys.readouterr().out
    record = read_record(out / "results.json")
    names = [row.label for row in record.results if row.task == "tiny"]
    heats, models = ("", " T=0.6", " T=0.3", " greedy"), ("adapter", "base", "gated")
    assert names[:12] == [f"{model}{heat}" for heat in heats for model in models]
    assert names[12].startswith("adapter λ=")
    assert names[13] == f"adapter {DFT}"
    assert names[14:] == [f"gated [-3,1] {name}" for name in ("noreverse", "noextrapolate", "unit")]
    assert [row.label for row in record.results if row.task == "tiny_retention"] == names
    selection = json.loads((out / "gated" / "gate_config.json").read_text())["selection"]
    assert selection["recommendation"]["label"] in {row["label"] for row in selection["variants"]}
    reading = (out / "results.md").read_text()
    assert reading.count("the control") == 2, "on both tasks"
    assert "questions: 10" in (out / "config.yaml").read_text()
    assert (out / "report.html").read_text().count("<svg ") >= 4
    run("regrade", out)
    assert not read_record(out / "results.json").suites, "the two tasks are never averaged"
    run("generate", "--model", out / "gated", "--prompt", "solve 3 + 4")
    run("doctor", out / "adapters" / "sft", "--quick")


@pytest.mark.slow("whole commands")
def test_the_quickstart_gives_the_same_numbers_again(tmp_path):
    tables = []
    for name in ("one", "two"):
        run("quickstart", "--out", tmp_path / name, "--questions", 10, "--samples", 2, "--ranges", "0,1")
        tables.append((tmp_path / name / "results.md").read_text())
    assert tables[0] == tables[1], "same seed, same machine"
