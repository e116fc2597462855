"""`loragate extract` on small local checkpoints: its lines, its files, what follows it, and what it refuses."""

import json

import pytest
import torch

from tiny import run, tiny_base, tiny_tokenizer, write_base


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base and a copy whose q_proj layers changed by rank 3, its embeddings a little, and its chat template."""
    root = tmp_path_factory.mktemp("extract")
    base = tiny_base()
    tokenizer = tiny_tokenizer()
    write_base(root / "base", base, tokenizer)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for layer in base.model.layers:
            left, right = (torch.randn(size, generator=generator) for size in ((32, 3), (3, 32)))
            layer.self_attn.q_proj.weight += 0.1 * left @ right
        base.model.embed_tokens.weight += 0.01
    tokenizer.chat_template = "{# of the fine-tuned model #}" + tokenizer.chat_template
    write_base(root / "tuned", base, tokenizer)
    return root


def extract(place, out, *more, model="tuned", rank="3"):
    where = ["--model", place / model, "--base", place / "base", "--out", out]
    run("extract", *where, "--rank", rank, "--device", "cpu", *more)


def test_report_and_files(place, tmp_path, capsys):
    extract(place, tmp_path / "adapter", rank="2")
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
    extract(place, tmp_path / "adapter", model=tmp_path / "tuned")
    assert "warning: much of the fine-tune lies where a LoRA cannot hold it" in capsys.readouterr().out
    # the fine-tuned model's folder has no tokenizer, and an empty one is none
    assert not list((tmp_path / "adapter").glob("*token*"))


def test_refusals(place, tmp_path, fails):
    def refused(*more, model=place / "tuned", out=tmp_path / "x"):
        return fails("extract", "--model", model, "--base", place / "base", "--out", out, *more)

    assert "needs --rank" in refused()
    assert "needs --out" in fails("extract", "--model", place / "tuned", "--base", place / "base", "--rank", "4")
    assert "--energy must be at most 1, found 1.5" in refused("--rank", "4", "--energy", "1.5")
    assert "is not empty" in refused("--rank", "4", out=place / "base")
    assert "hold the same weights" in refused("--rank", "4", model=place / "base")
    assert "does not exist" in refused("--rank", "4", model=tmp_path / "absent")
    extract(place, tmp_path / "adapter")
    assert "is an adapter, not a base model" in refused("--rank", "4", model=tmp_path / "adapter")
    assert not (tmp_path / "x").exists()
