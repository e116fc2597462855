"""`loragate plan`: tables, JSON, the launch command, the refusal."""

import json

import pytest

from loragate.cli.main import main
from tiny import tiny_base


@pytest.fixture
def model_file(tmp_path):
    config = tiny_base(hidden_size=64, max_position_embeddings=4096).config
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config.to_dict(), "torch_dtype": "bfloat16"}, default=str))
    return str(path)


def test_a_plan_is_printed_and_written(model_file, tmp_path, capsys):
    out = tmp_path / "plan.json"
    arguments = ["plan", model_file, "--stage", "sft", "--seq", "256", "--batch", "8", "--gpu-memory", "4090"]
    assert main([*arguments, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "← take this" in text
    assert (
        "next: loragate sft --model MODEL --rank 16 --target-modules all-linear --data DATA --out OUT --max-length 256"
        in text
    )
    record = json.loads(out.read_text())
    assert record["chosen"]["fits"] is True
    assert record["chosen"]["gib"] == pytest.approx(sum(record["chosen"]["parts"].values()))
    assert {option["way"]["quantization"] for option in record["options"]} == {"none", "8bit", "4bit"}
    assert record["command"].startswith("loragate sft")


def test_json_to_the_screen_is_json_alone(model_file, capsys):
    assert main(["plan", model_file, "--seq", "128", "--batch", "1", "--strategy", "single", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["gates"] == 2 * (6 * 65 + 49)


def test_what_does_not_fit_is_refused_with_the_way_out(model_file, capsys):
    arguments = ["plan", model_file, "--gpu-memory", "0.5", "--seq", "128", "--batch", "1"]
    assert main([*arguments, "--quantization", "none", "--gradient-checkpointing", "yes"]) == 1
    shown = capsys.readouterr()
    assert "too large" in shown.out
    assert "nothing that was asked for fits into 0.5 GiB" in shown.err
    assert "- GPUs of at least 1 GiB" in shown.err


def test_wrong_usage(capsys):
    assert main(["plan"]) == 2
    assert main(["plan", "model", "--gpu-memory", "h1000"]) == 2
    assert "did you mean 'h100'" in " ".join(capsys.readouterr().err.split())
