"""An adapter that was trained with tokens added: the advice of the error message, followed word by word, ends in a right model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import loragate as lg
from tiny import logits, run, shake, tiny_adapter, tiny_base, tiny_rows, write_base, write_rows

IDS = torch.tensor([[5, 9, 20, 165, 7, 168, 4, 8]])  # with tokens that the base does not have


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def place(tmp_path: Path, request: Any) -> Path:
    """base/ and adapter/, trained on the base with ten tokens more, as PEFT writes it, and its logits."""
    write_base(tmp_path / "base", tie_word_embeddings=request.param)
    base = tiny_base(tie_word_embeddings=request.param)
    base.resize_token_embeddings(170)
    model = tiny_adapter(base=base)
    for layer in {model.get_input_embeddings(), model.get_output_embeddings()}:
        layer.weight.data.add_(0.2 * torch.randn_like(layer.weight))  # the vocabulary was trained, too
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    torch.save(logits(model, IDS), tmp_path / "expected")
    return tmp_path


def size_in(message: str) -> int:
    """The number of tokens by the message."""
    return int(re.search(r"base\.resize_token_embeddings\((\d+)\)", message)[1])  # type: ignore[index]


def resized(place: Path, message: str) -> Any:
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    base.resize_token_embeddings(size_in(message))
    return base


def test_the_base_is_saved_once_and_named(place: Path, fails: Any) -> None:
    rows = write_rows(place / "rows.jsonl", tiny_rows(8))
    line = ["--adapter", place / "adapter", "--data", rows, "--ranges=0,1", "--skip-selection", "--max-steps", "2"]
    line += ["--device", "cpu", "--out", place / "gated"]
    message = fails("calibrate", *line)
    base, tokenizer = resized(place, message), AutoTokenizer.from_pretrained(place / "base")
    for words in ('base.save_pretrained("FOLDER")', 'tokenizer.save_pretrained("FOLDER")', "--base FOLDER"):
        assert words in message
    base.save_pretrained(place / "FOLDER")
    tokenizer.save_pretrained(place / "FOLDER")
    run("calibrate", *line, "--base", place / "FOLDER")
    expected = torch.load(place / "expected", weights_only=True)
    model = lg.load_gated(place / "gated")
    with lg.gate_override(model, constant=1.0):
        torch.testing.assert_close(logits(model, IDS), expected, rtol=1e-4, atol=1e-4)
    run("export", place / "gated", "--constant", "0.5", "--out", place / "plain")
    with lg.gate_override(model, constant=0.5):
        half = logits(model, IDS)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place / "FOLDER"), place / "plain").eval()
    torch.testing.assert_close(logits(plain, IDS), half, rtol=1e-4, atol=1e-4)


def test_the_base_is_resized_in_memory(place: Path, fails: Any) -> None:
    message = fails("generate", "--model", place / "adapter", "--prompt", "w1 w2", "--device", "cpu")
    assert "resize it in memory, then PeftModel.from_pretrained and, for gates, loragate.load_gates" in message
    model = PeftModel.from_pretrained(resized(place, message), place / "adapter").eval()
    expected = torch.load(place / "expected", weights_only=True)
    torch.testing.assert_close(logits(model, IDS), expected, rtol=1e-4, atol=1e-4)
    shake(lg.attach_gates(model, lg.GateConfig(-3, 2)))
    gated = logits(model, IDS)
    for name, source in (("copied", place / "adapter"), ("written", None)):
        lg.save_gates(model, place / name, adapter_source=source)
        with pytest.raises(lg.errors.ArtifactError) as refused:
            lg.load_gated(place / name)
        again = PeftModel.from_pretrained(resized(place, str(refused.value)), place / name / "adapter").eval()
        torch.testing.assert_close(logits(lg.load_gates(again, place / name), IDS), gated, rtol=1e-4, atol=1e-4)


def test_a_base_of_another_width_is_another_base(place: Path, fails: Any) -> None:
    write_base(place / "wide", tiny_base(hidden_size=48, head_dim=12))
    message = fails(
        "generate", "--model", place / "adapter", "--base", place / "wide", "--prompt", "w1", "--device", "cpu"
    )
    assert "it was made for another one; name that with --base" in message
    assert "resize_token_embeddings" not in message
