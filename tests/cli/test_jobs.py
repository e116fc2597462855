"""The commands on small local files: sft, inspect, calibrate, generate, and what bad input is answered with."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import loragate as lg
from loragate.cli.main import main
from tiny import tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a base, data in several formats, an adapter and a gated adapter made by the commands."""
    root = tmp_path_factory.mktemp("jobs")
    base = tiny_base()
    base.save_pretrained(root / "base")
    tiny_tokenizer().save_pretrained(root / "base")
    rows = tiny_rows(20)
    (root / "messages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = [{"prompt": r["messages"][0]["content"], "completion": r["messages"][1]["content"]} for r in rows]
    (root / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
    alpaca = [{"instruction": row["prompt"], "input": "", "output": row["completion"]} for row in plain]
    (root / "alpaca.json").write_text(json.dumps(alpaca))
    common = ["--batch-size", "4", "--micro-batch-size", "4", "--max-length", "64"]
    data = ["--data", str(root / "messages.jsonl"), *common]
    assert (
        main(["sft", "--model", str(root / "base"), *data, "--learning-rate", "5e-3", "--out", str(root / "adapter")])
        == 0
    )
    calibrate = ["calibrate", "--adapter", str(root / "adapter"), *data, "--range", "-3,2", "--unverified"]
    calibrate += ["--learning-rate", "5e-2"]
    assert main([*calibrate, "--k", "20", "--out", str(root / "gated")]) == 0
    return root


def fails(capsys, *argv, status=1):
    capsys.readouterr()
    assert main([str(argument) for argument in argv]) == status
    captured = capsys.readouterr()
    assert captured.err.count("loragate: error:") == 1
    assert "Traceback" not in captured.err
    return " ".join(captured.err.split())


def test_the_adapter_is_an_ordinary_peft_adapter(place):
    from peft import PeftModel

    model = PeftModel.from_pretrained(tiny_base(), place / "adapter")
    assert model.peft_config["default"].r == 16
    tensors = load_file(place / "adapter" / "adapter_model.safetensors")
    assert any(value.abs().max() > 0 for name, value in tensors.items() if "lora_B" in name)


def test_the_gated_folder_is_complete(place):
    record = json.loads((place / "gated" / "gate_config.json").read_text())
    assert record["gate"]["lower"] == -3
    assert record["k"] == 20
    assert record["training"]["steps"] == 5
    assert record["parity"]["at_zero"] == 0
    assert record["selection"]["evidence"].startswith("none")
    assert "adapter_config.json" not in [path.name for path in (place / "gated").iterdir()]
    original = (place / "adapter" / "adapter_model.safetensors").read_bytes()
    assert (place / "gated" / "adapter" / "adapter_model.safetensors").read_bytes() == original
    card = (place / "gated" / "README.md").read_text()
    assert "no evidence of better answers" in card
    logged = [json.loads(line) for line in (place / "gated" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert logged
    assert "topk_entropy" in logged[0]
    model = lg.load_gated(place / "gated")
    assert len(lg.gate_parameters(model)) == 28


@pytest.mark.parametrize("name", ["plain.jsonl", "alpaca.json"])
def test_other_formats_are_detected(place, tmp_path, capsys, name):
    arguments = [
        "--data",
        str(place / name),
        "--batch-size",
        "20",
        "--micro-batch-size",
        "20",
        "--out",
        str(tmp_path / "g"),
    ]
    assert main(["calibrate", "--adapter", str(place / "adapter"), "--range=0,1", "--unverified", *arguments]) == 0
    text = capsys.readouterr().out
    assert "20 rows" in text
    assert "⟦" in text, "the response mask is shown before training"
    assert "next: loragate eval" in text


def test_generate(place, capsys):
    prompt = ["--prompt", "w1 w2 w3", "--max-new-tokens", "6", "--samples", "3", "--json"]
    texts = {}
    for name in ("gated", "adapter", "base"):
        capsys.readouterr()
        assert main(["generate", "--model", str(place / name), *prompt]) == 0
        records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [record["sample"] for record in records] == [0, 1, 2]
        texts[name] = [record["text"] for record in records]
    capsys.readouterr()
    for constant, name in (("1", "adapter"), ("0", "base")):
        assert main(["generate", "--model", str(place / "gated"), *prompt, "--lambda-constant", constant]) == 0
        records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [record["text"] for record in records] == texts[name]
    message = fails(capsys, "generate", "--model", place / "adapter", *prompt, "--lambda-constant", "0", status=2)
    assert "carries no gates" in message


def test_generate_from_a_file_and_greedily(place, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("w1 w2\n\nw3 w4 w5\n")
    arguments = ["--prompts", str(tmp_path / "prompts.txt"), "--temperature", "0", "--max-new-tokens", "5"]
    assert main(["generate", "--model", str(place / "gated"), *arguments]) == 0
    first = capsys.readouterr().out
    assert len(first.splitlines()) == 2
    assert main(["generate", "--model", str(place / "gated"), *arguments, "--batch-size", "1"]) == 0
    assert capsys.readouterr().out == first


def test_inspect(place, capsys):
    assert main(["inspect", str(place / "adapter"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"gate": 14}
    assert found["cost"]["gate_parameters"] == 14 * 33 + 2 * 16
    assert found["endings"]["stops"] is True
    assert main(["inspect", str(place / "adapter")]) == 0
    text = capsys.readouterr().out
    assert "14 modules can be gated" in text
    assert "next: loragate calibrate" in text


def test_inspect_says_what_cannot_be_gated(place, tmp_path, capsys):
    model = tiny_adapter(use_dora=True)
    model.peft_config["default"].base_model_name_or_path = str(place / "base")
    model.save_pretrained(tmp_path / "dora")
    assert main(["inspect", str(tmp_path / "dora")]) == 1
    assert "Dora variant of LoRA" in " ".join(capsys.readouterr().out.split())
    untrained = tiny_adapter(init_lora_weights=True)
    untrained.peft_config["default"].base_model_name_or_path = str(place / "base")
    untrained.save_pretrained(tmp_path / "untrained")
    assert main(["inspect", str(tmp_path / "untrained")]) == 0
    assert "14 modules have B = 0" in capsys.readouterr().out


def test_what_an_adapter_holds_beside_linear_deltas(place, tmp_path, capsys):
    base = str(place / "base")
    head = tiny_adapter(target_modules=["q_proj", "lm_head"])
    head.peft_config["default"].base_model_name_or_path = base
    head.save_pretrained(tmp_path / "head")
    assert main(["inspect", str(tmp_path / "head")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "delta on the output head (lm_head)" in said
    assert "next: this adapter cannot be gated as it is" in said
    options = ["--data", place / "messages.jsonl", "--range=0,1", "--unverified", "--out", tmp_path / "out"]
    assert "delta on the output head" in fails(capsys, "calibrate", "--adapter", tmp_path / "head", *options)
    assert not (tmp_path / "out").exists()
    copies = tiny_adapter(target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    copies.peft_config["default"].base_model_name_or_path = base
    copies.save_pretrained(tmp_path / "copies")
    assert main(["inspect", str(tmp_path / "copies")]) == 0
    assert "whole copies of embed_tokens" in capsys.readouterr().out


def test_evidence_that_cannot_be_had_is_missed_before_anything_is_read(place, tmp_path, capsys, monkeypatch):
    options = ["--adapter", place / "adapter", "--data", place / "gone.jsonl", "--out", tmp_path / "out"]
    probe = tmp_path / "probe.jsonl"
    assert "found no file" in fails(capsys, "calibrate", *options, "--probe", probe)
    probe.write_text("{}\n")
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert "math answers need math-verify" in fails(capsys, "calibrate", *options, "--probe", probe, status=2)


def test_wrong_paths(place, tmp_path, capsys):
    options = ["--data", place / "messages.jsonl", "--range=-3,1", "--unverified", "--out", tmp_path / "out"]
    assert "does not exist" in fails(capsys, "calibrate", "--adapter", tmp_path / "none", *options, status=2)
    assert "is already a gated adapter" in fails(capsys, "calibrate", "--adapter", place / "gated", *options, status=2)
    assert "no adapter_config.json" in fails(capsys, "calibrate", "--adapter", place / "base", *options, status=2)
    options[1] = place / "mesages.jsonl"
    assert "messages.jsonl" in fails(capsys, "calibrate", "--adapter", place / "adapter", *options)
    assert "does not exist" in fails(capsys, "generate", "--model", tmp_path / "none", "--prompt", "x", status=2)
    assert "already holds a gated adapter" in fails(
        capsys,
        "calibrate",
        "--adapter",
        place / "adapter",
        "--data",
        place / "messages.jsonl",
        "--range=-3,1",
        "--unverified",
        "--out",
        place / "gated",
        status=2,
    )
    assert not (tmp_path / "out").exists(), "nothing is left behind"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "empty"),
        ('{"messages": []}\n{"a"\n', "bad.jsonl:2"),
        ('{"messages": [{"role": "user", "content": "w1"}]}\n', "bad.jsonl:1"),
        ('{"text": "w1"}\n', "text"),
    ],
)
def test_bad_data_names_its_line(place, tmp_path, capsys, content, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    message = fails(
        *(capsys, "calibrate", "--adapter", place / "adapter", "--data", path),
        *("--range=-3,1", "--unverified", "--out", tmp_path / "out"),
    )
    assert words in message
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_base(place, tmp_path, capsys):
    other = tiny_adapter(base=tiny_base(hidden_size=16))
    other.peft_config["default"].base_model_name_or_path = str(place / "base")
    other.save_pretrained(tmp_path / "other")
    message = fails(
        capsys,
        "calibrate",
        "--adapter",
        tmp_path / "other",
        "--data",
        place / "messages.jsonl",
        "--range=-3,1",
        "--unverified",
        "--out",
        tmp_path / "out",
    )
    assert "does not fit this base model" in message


def test_another_base_behind_the_same_name_is_noticed_at_loading(place, tmp_path, capsys):
    shutil.copytree(place / "gated", tmp_path / "gated")
    tiny_base(seed=9).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    message = fails(capsys, "generate", "--model", tmp_path / "gated", "--base", tmp_path / "base", "--prompt", "w1")
    assert "made on another base" in message


def test_a_tampered_artifact_is_refused(place, tmp_path, capsys):
    shutil.copytree(place / "gated", tmp_path / "gated")
    tensors = load_file(tmp_path / "gated" / "gates.safetensors")
    save_file({name: value + 1 for name, value in tensors.items()}, tmp_path / "gated" / "gates.safetensors")
    assert "sha256" in fails(capsys, "generate", "--model", tmp_path / "gated", "--prompt", "w1")


def test_a_tokenizer_without_a_chat_template(place, tmp_path, capsys):
    shutil.copytree(place / "base", tmp_path / "base")
    shutil.copytree(place / "adapter", tmp_path / "adapter")
    for folder in ("base", "adapter"):
        (tmp_path / folder / "chat_template.jinja").unlink()
    arguments = [
        "--base",
        tmp_path / "base",
        "--range=-3,1",
        "--unverified",
        "--out",
        tmp_path / "out",
        "--data",
        place / "messages.jsonl",
    ]
    message = fails(capsys, "calibrate", "--adapter", tmp_path / "adapter", *arguments)
    assert "chat template" in message
    assert "--chat-template" in message
    template = tmp_path / "template.jinja"
    template.write_text(tiny_tokenizer().chat_template)
    assert (
        main(
            [
                *(str(part) for part in ("calibrate", "--adapter", tmp_path / "adapter", *arguments)),
                *("--chat-template", str(template), "--batch-size", "20", "--micro-batch-size", "20"),
            ]
        )
        == 0
    )


def test_resume_through_the_command(place, tmp_path, capsys, monkeypatch):
    from loragate.training import run as run_module

    out = tmp_path / "gated"
    arguments = [
        *("calibrate", "--adapter", str(place / "adapter"), "--data", str(place / "messages.jsonl")),
        *("--range=-3,2", "--unverified"),
        *("--batch-size", "4", "--micro-batch-size", "4", "--save-steps", "2", "--k", "20", "--out", str(out)),
    ]
    real = run_module.StepReporter._report

    def stop(self, state):
        if state.global_step == 3:
            raise KeyboardInterrupt
        real(self, state)

    monkeypatch.setattr(run_module.StepReporter, "_report", stop)
    assert main(arguments) == 130
    assert not (out / "gate_config.json").exists(), "nothing half-written"
    monkeypatch.undo()
    kept = {path.name: path.read_bytes() for path in (out / "run").glob("*.*")}
    assert {"config.yaml", "data.json", "run.json"} <= set(kept)
    other = ["plain.jsonl" if "messages.jsonl" in word else word for word in arguments]
    other[other.index("plain.jsonl")] = str(place / "plain.jsonl")
    for again in (arguments, [*other, "--max-rows", "8"]):
        assert "an unfinished run (checkpoint-2); continue it with --resume" in fails(capsys, *again, status=2)
    exported = fails(capsys, "export", place / "adapter", "--out", out, status=2)
    assert "holds an unfinished run (checkpoint-2); choose another folder" in exported
    assert "'settings.learning_rate' was" in fails(capsys, *arguments, "--resume", "--learning-rate", "1e-3")
    assert kept == {path.name: path.read_bytes() for path in (out / "run").glob("*.*")}, "what the run began with stays"
    assert main([*arguments, "--resume"]) == 0
    gates = load_file(out / "gates.safetensors")
    monkeypatch.undo()
    whole = [*arguments[:-1], str(tmp_path / "whole")]
    assert main(whole) == 0
    for name, value in load_file(tmp_path / "whole" / "gates.safetensors").items():
        assert torch.equal(gates[name], value), name


def test_a_training_stopped_while_the_model_loaded_is_resumed_from_the_start(place, tmp_path):
    line = ["sft", "--model", str(place / "base"), "--data", str(place / "plain.jsonl"), "--out", str(tmp_path / "out")]
    (tmp_path / "out" / "run").mkdir(parents=True)
    (tmp_path / "out" / "run" / "config.yaml").touch()
    assert main([*line, "--max-rows", "4", "--batch-size", "4", "--micro-batch-size", "4", "--resume"]) == 0
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_a_folder_that_is_not_empty_is_left_alone(place, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "README.md").write_text("mine")
    data = ["--data", place / "messages.jsonl", "--range=-3,1", "--unverified"]
    for out in (tmp_path / "full", place / "adapter"):
        before = sorted((path.name, path.stat().st_mtime_ns) for path in out.iterdir())
        message = fails(capsys, "calibrate", "--adapter", place / "adapter", *data, "--out", out, status=2)
        assert "is not empty" in message
        assert sorted((path.name, path.stat().st_mtime_ns) for path in out.iterdir()) == before
    message = fails(
        capsys, "sft", "--model", place / "base", "--data", place / "plain.jsonl", "--out", tmp_path / "full", status=2
    )
    assert "is not empty" in message
    message = fails(
        capsys, "calibrate", "--adapter", place / "adapter", *data, "--out", tmp_path / "new", "--resume", status=2
    )
    assert "run the command without --resume" in message


def test_mistakes_are_found_before_anything_is_loaded(place, tmp_path, capsys):
    sft = ["sft", "--model", place / "base", "--data", place / "messages.jsonl", "--out", tmp_path / "out"]
    cases = [
        (["--objective", "profit", "--objective-options", '{"x": 1}'], "has no option 'x' (it has threshold)"),
        (["--batch-size", "10", "--micro-batch-size", "4"], "not a multiple of micro_batch_size"),
        (["--report-to", "nothing_of_the_kind"], "pip install nothing_of_the_kind"),
    ]
    for flags, words in cases:
        assert words in fails(capsys, *sft, *flags, status=2)
    assert "its linear layers end in" in fails(capsys, *sft, "--target-modules", "zzz", status=2)
    sft[2] = place / "adapter"
    assert "is an adapter, not a base model" in fails(capsys, *sft, status=2)
    sft[2] = tmp_path / "nowhere"
    assert "base model" in fails(capsys, *sft, status=2)
    assert "wrong way round" in fails(capsys, "quickstart", "--ranges", "3,-1", "--out", tmp_path / "q", status=2)
    assert not (tmp_path / "q").exists()


def test_rows_longer_than_the_model_are_refused(place, tmp_path, capsys):
    base = tiny_base(max_position_embeddings=16)
    base.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    rows = [{"prompt": "w1", "completion": " ".join(["w2"] * 30)}]
    (tmp_path / "long.jsonl").write_text(json.dumps(rows[0]) + "\n")
    common = ["--data", tmp_path / "long.jsonl", "--out", tmp_path / "out"]
    message = fails(capsys, "sft", "--model", tmp_path / "base", *common)
    assert "long.jsonl:1 has 32 tokens, but the model has 16 positions" in message


def test_plain_rows_and_unknown_tokens_are_pointed_out(place, tmp_path, capsys):
    (tmp_path / "odd.jsonl").write_text(json.dumps({"prompt": "w1", "completion": "never seen words"}) + "\n")
    arguments = [
        "--data",
        str(tmp_path / "odd.jsonl"),
        "--range=0,1",
        "--unverified",
        "--out",
        str(tmp_path / "out"),
        "--batch-size",
        "8",
    ]
    assert main(["calibrate", "--adapter", str(place / "adapter"), *arguments]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "without the chat template" in text
    assert "unknown to the tokenizer" in text


def test_an_unfinished_run_is_not_taken_for_a_model(tmp_path, capsys):
    (tmp_path / "half" / "run").mkdir(parents=True)
    (tmp_path / "half" / "run" / "run.json").write_text("{}")
    assert "unfinished run" in fails(capsys, "generate", "--model", tmp_path / "half", "--prompt", "x", status=2)


SHORT = ("--questions", "10", "--samples", "2", "--ranges", "0,1")


@pytest.mark.slow("whole commands")
def test_quickstart(tmp_path, capsys):
    """A shortened quickstart: table, reading, figures and an artifact that generates."""
    out = tmp_path / "run"
    assert main(["quickstart", "--out", str(out), *SHORT]) == 0
    text = capsys.readouterr().out
    assert "next: loragate generate" in text
    results = json.loads((out / "results.json").read_text())
    names = [row["name"] for row in results["table"]]
    for name in ("base", "LoRA", "LoRA, T = 0.3", "DFT", "SCALE [0,1]"):
        assert name in names
    assert sum("clip(λ,0,1)" in name or "max(λ,0)" in name or "min(λ,1)" in name for name in names) == 3
    ran = [row for row in results["table"] if not row["not_run"]]
    assert all(0 <= row["accuracy"]["low"] <= row["accuracy"]["mean"] <= row["accuracy"]["high"] <= 1 for row in ran)
    assert all(row["retention"] is not None for row in ran)
    assert results["reading"]
    selection = json.loads((out / "gated" / "gate_config.json").read_text())["selection"]
    assert selection["picked"] == results["selection"]["picked"] == ("[0,1]" if selection["accepted"] else "adapter")
    assert set(selection["evidence"]) == {"adapter", "[0,1]"}
    assert "picked nothing" not in (out / "gated" / "README.md").read_text()
    for name in ("accuracy.png", "entropy.png", "lambda.png"):
        assert (out / "figures" / name).stat().st_size > 5000
    assert main(["generate", "--model", str(out / "gated"), "--prompt", "solve 3 + 4"]) == 0
    assert main(["inspect", str(out / "adapters" / "sft")]) == 0


@pytest.mark.slow("whole commands")
def test_the_quickstart_gives_the_same_numbers_again(tmp_path):
    tables = []
    for name in ("one", "two"):
        assert main(["quickstart", "--out", str(tmp_path / name), *SHORT]) == 0
        tables.append(json.loads((tmp_path / name / "results.json").read_text())["table"])
    assert tables[0] == tables[1], "same seed, same machine"
