"""`loragate plan`: table, JSON, the launch command, the refusal."""

import json

import pytest

from loragate.analysis import plan
from loragate.analysis.plan import make_plan
from loragate.cli.main import main
from tiny import tiny_base


@pytest.fixture
def model_file(tmp_path):
    config = tiny_base(hidden_size=64, max_position_embeddings=4096).config
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config.to_dict(), "torch_dtype": "bfloat16"}, default=str))
    return str(path)


def test_a_plan_is_printed_as_a_table_or_as_json(model_file, capsys, monkeypatch):
    made = []

    def once(options):
        """Planned once, shown twice."""
        made[:] = made or [make_plan(options)]
        return made[0]

    monkeypatch.setattr(plan, "make_plan", once)
    arguments = ["plan", model_file, "--stage", "sft", "--seq", "256", "--batch", "8", "--gpu-memory", "4090"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "     ←" in text
    assert "next: loragate sft --model MODEL --rank 16" in text
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["chosen"]["fits"] is True
    assert record["chosen"]["gib"] == pytest.approx(sum(record["chosen"]["parts"].values()))
    assert {option["way"]["quantization"] for option in record["options"]} == {"none", "8bit", "4bit"}
    assert record["command"].startswith("loragate sft")


def test_what_does_not_fit_is_refused_with_the_way_out(model_file, capsys):
    arguments = ["plan", model_file, "--gpu-memory", "0.5", "--seq", "128", "--batch", "1"]
    assert main([*arguments, "--quantization", "none", "--gradient-checkpointing", "yes"]) == 1
    shown = capsys.readouterr()
    assert "  no\n" in shown.out
    assert "nothing that was asked for fits into 0.5 GiB" in shown.err
    assert "- GPUs of at least 1 GiB" in shown.err


def test_wrong_usage(capsys):
    assert main(["plan"]) == 2
    assert main(["plan", "model", "--gpu-memory", "h1000"]) == 2
    assert "did you mean 'h100'" in " ".join(capsys.readouterr().err.split())
