"""`loragate diagnose tokens` on a stored evaluation."""

import base64
import json

import pytest

from loragate.cli.main import main


def test_needs_a_stored_evaluation(tmp_path, capsys):
    assert main(["diagnose", "tokens", "--model", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "--run" in capsys.readouterr().err


def test_settings_of_other_looks_are_refused(tmp_path, capsys):
    arguments = [
        "diagnose",
        "tokens",
        "--model",
        "m",
        "--run",
        "r",
        "--out",
        str(tmp_path / "o"),
        "--suppress",
        "negative",
    ]
    assert main(arguments) == 2
    assert "--suppress has no effect" in capsys.readouterr().err


@pytest.mark.slow("whole commands")
def test_traces_of_a_stored_evaluation(tmp_path, monkeypatch):
    """The shipped base with a gated adapter, evaluated on two questions, then traced and reported."""
    import torch
    from peft import LoraConfig, get_peft_model

    import loragate as lg
    from loragate.world.base import load_base, save_base

    monkeypatch.chdir(tmp_path)
    base, tokenizer = load_base()
    save_base(base, tokenizer, tmp_path / "base")
    base.name_or_path = base.config._name_or_path = str(tmp_path / "base")
    torch.manual_seed(0)
    model = get_peft_model(
        base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    )
    model.save_pretrained("adapter")
    lg.attach_gates(model, lg.GateConfig(-6, 3))
    with torch.no_grad():
        for parameter in lg.gate_parameters(model).values():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    lg.save_gates(model, "gated", adapter_source="adapter")
    small = ["--limit", "2", "--samples", "2", "--controls", "none"]
    assert main(["eval", "--model", "gated", "--tasks", "tiny", *small, "--out", "run"]) == 0
    assert main(["diagnose", "tokens", "--model", "gated", "--run", "run", "--out", "tokens"]) == 0
    record = json.loads((tmp_path / "tokens" / "tokens.json").read_text())
    assert [question["id"] for question in record["questions"]] == ["tiny/0", "tiny/1"]
    for question in record["questions"]:
        assert [answer["variant"] for answer in question["answers"]] == ["base", "adapter", "gated"]
        for answer in question["answers"]:
            stored = (tmp_path / "run" / "samples" / answer["variant"] / "tiny.jsonl").read_text().splitlines()
            sample = next(
                line
                for line in map(json.loads, stored)
                if f"tiny/{line['question']}" == question["id"] and line["sample"] == 0
            )
            assert len(answer["tokens"]) == len(sample["token_ids"])
            assert answer["verdict"]["correct"] in (True, False)
            assert len(base64.b64decode(answer["gates"])) == len(record["modules"]) * len(answer["tokens"])
    assert main(["report", "run", "tokens", "--out", "report.html"]) == 0
    assert 'id="traces"' in (tmp_path / "report.html").read_text()
