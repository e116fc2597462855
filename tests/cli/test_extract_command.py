"""`loragate extract` on small local checkpoints: its lines, its files, what follows it, and what it refuses."""

import json

import pytest
import torch

from loragate.cli.main import main
from tiny import tiny_base, tiny_rows, tiny_tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base and a copy whose q_proj layers changed by rank 3, its embeddings a little, and its chat template."""
    root = tmp_path_factory.mktemp("extract")
    base = tiny_base()
    tokenizer = tiny_tokenizer()
    base.save_pretrained(root / "base")
    tokenizer.save_pretrained(root / "base")
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for layer in base.model.layers:
            left, right = (torch.randn(size, generator=generator) for size in ((32, 3), (3, 32)))
            layer.self_attn.q_proj.weight += 0.1 * left @ right
        base.model.embed_tokens.weight += 0.01
    tokenizer.chat_template = "{# of the fine-tuned model #}" + tokenizer.chat_template
    base.save_pretrained(root / "tuned")
    tokenizer.save_pretrained(root / "tuned")
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny_rows(20)))
    return root


def extract(place, out, *more, model="tuned", rank="3"):
    where = ["--model", str(place / model), "--base", str(place / "base"), "--out", str(out)]
    return main(["extract", *where, "--rank", rank, "--device", "cpu", *more])


def fails(capsys, *argv, status=2):
    capsys.readouterr()
    assert main([str(argument) for argument in argv]) == status
    captured = capsys.readouterr()
    assert captured.err.count("loragate: error:") == 1
    return " ".join(captured.err.split())


def test_report_and_files(place, tmp_path, capsys):
    assert extract(place, tmp_path / "adapter", rank="2") == 0
    out = capsys.readouterr().out
    assert "2 linear layers changed (12 did not)" in out
    assert "95 % would take rank 3" in out
    assert "most is lost in" in out
    assert "model.layers.0.self_attn.q_proj" in out
    assert "left out: " in out
    assert "(embeddings " in out
    assert f"next: loragate calibrate --adapter {tmp_path / 'adapter'}" in out
    record = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert record["base_model_name_or_path"] == str((place / "base").resolve())
    assert record["target_modules"] == ["q_proj"]
    template = (tmp_path / "adapter" / "chat_template.jinja").read_text()
    assert template.startswith("{# of the fine-tuned model #}")


def test_much_left_out_is_warned_about(place, tmp_path, capsys):
    model = tiny_base()
    with torch.no_grad():
        model.model.embed_tokens.weight += 1.0
        model.model.layers[0].mlp.up_proj.weight += 0.01
    model.save_pretrained(tmp_path / "tuned")
    assert extract(place, tmp_path / "adapter", model=tmp_path / "tuned") == 0
    assert "warning: much of the fine-tune lies where a LoRA cannot hold it" in capsys.readouterr().out
    # the fine-tuned model's folder has no tokenizer, and an empty one is none
    assert not list((tmp_path / "adapter").glob("*token*"))


def test_what_follows_takes_the_adapter(place, tmp_path, capsys):
    assert extract(place, tmp_path / "adapter") == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "adapter"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"gate": 2}
    calibrate = ["calibrate", "--adapter", str(tmp_path / "adapter"), "--data", str(place / "rows.jsonl")]
    calibrate += ["--batch-size", "4", "--micro-batch-size", "4", "--max-length", "64", "--k", "20", "--device", "cpu"]
    assert main([*calibrate, "--range=-3,2", "--unverified", "--out", str(tmp_path / "gated")]) == 0
    record = json.loads((tmp_path / "gated" / "gate_config.json").read_text())
    assert len(record["modules"]) == 2
    assert record["parity"]["at_one"] == 0
    prompt = ["--prompt", "w1 w2", "--max-new-tokens", "4", "--device", "cpu"]
    assert main(["generate", "--model", str(tmp_path / "gated"), *prompt]) == 0


def test_refusals(place, tmp_path, capsys):
    given = ["extract", "--model", place / "tuned", "--base", place / "base"]
    assert "needs --rank" in fails(capsys, *given, "--out", tmp_path / "x")
    assert "needs --out" in fails(capsys, *given, "--rank", "4")
    assert "--energy must be at most 1, found 1.5" in fails(
        capsys, *given, "--rank", "4", "--energy", "1.5", "--out", tmp_path / "x"
    )
    assert "--rank must be at least 0, found -1" in fails(capsys, *given, "--rank", "-1", "--out", tmp_path / "x")
    assert "is not empty" in fails(capsys, *given, "--rank", "4", "--out", place / "base")
    same = ["extract", "--model", place / "base", "--base", place / "base", "--rank", "4", "--out", tmp_path / "x"]
    assert "hold the same weights" in fails(capsys, *same)
    absent = ["extract", "--model", tmp_path / "absent", "--base", place / "base", "--rank", "4"]
    assert "does not exist" in fails(capsys, *absent, "--out", tmp_path / "x")
    assert extract(place, tmp_path / "adapter") == 0
    again = ["extract", "--model", tmp_path / "adapter", "--base", place / "base", "--rank", "4"]
    assert "is an adapter, not a base model" in fails(capsys, *again, "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()
