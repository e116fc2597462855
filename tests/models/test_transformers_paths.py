"""What else transformers does with a gated model: pipelines, beams, assisted decoding, caches, mixed batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import loragate as lg
from tiny import shake, tiny_adapter, tiny_base, tiny_tokenizer

PROMPTS = ["w5 w9 w20", "w7 w7 w30 w31 w32"]


@pytest.fixture
def folder(saved: Path) -> Path:
    return saved / "gated"


@pytest.fixture
def model(folder: Path) -> Any:
    return lg.load_gated(folder, dtype=torch.float32)


def ids(prompt: str = PROMPTS[0]) -> dict[str, torch.Tensor]:
    return tiny_tokenizer()(prompt, return_tensors="pt")


def generate(model: Any, inputs: Any = None, **settings: Any) -> list[int]:
    inputs = ids() if inputs is None else inputs
    found = model.generate(**inputs, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0, **settings)
    return found[0, inputs["input_ids"].shape[1] :].tolist()


def by_hand(model: Any) -> list[int]:
    """Greedy decoding without any cache."""
    found = ids()["input_ids"]
    with torch.no_grad():
        for _ in range(16):
            found = torch.cat([found, model(found, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return found[0, 3:].tolist()


def test_greedy_with_each_cache(model: Any) -> None:
    expected = by_hand(model)
    assert generate(model) == expected
    assert generate(model, use_cache=False) == expected
    assert generate(model, cache_implementation="static") == expected
    with lg.gates_disabled(model):
        assert generate(model) != expected


def test_assisted_decoding(model: Any) -> None:
    assert generate(model, assistant_model=tiny_base()) == generate(model, prompt_lookup_num_tokens=3) == by_hand(model)


def test_beams_score_with_the_gates(model: Any) -> None:
    """The score of the best beam is the sum of the gated model's own log-probs along it."""
    inputs = ids()
    found = model.generate(
        **inputs,
        max_new_tokens=8,
        num_beams=4,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequence = found.sequences[:1]
    with torch.no_grad():
        logprobs = model(sequence).logits[0, 2:-1].log_softmax(-1)
    total = logprobs.gather(-1, sequence[0, 3:, None]).sum()
    torch.testing.assert_close(found.sequences_scores[0], total, rtol=1e-4, atol=1e-4)


def test_a_padded_batch_equals_its_rows(model: Any) -> None:
    both = tiny_tokenizer()(PROMPTS, return_tensors="pt", padding=True)
    found = model.generate(**both, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    for row, prompt in zip(found[:, both["input_ids"].shape[1] :].tolist(), PROMPTS):
        assert row == generate(model, ids(prompt))


def other_folder(place: Path) -> Path:
    """Another adapter with gates of another range."""
    adapter = lg.attach_gates(tiny_adapter(seed=8), lg.GateConfig(lower=-1, upper=3, granularity="module"))
    shake(adapter, 0.7, 9)
    return lg.save_gates(adapter, place, base_id="base")


def test_adapters_with_gates_of_their_own_are_hot_swapped(model: Any, folder: Path, tmp_path: Path) -> None:
    """Two tasks on one base: each answers as when loaded alone, an override touches one, and one can be taken away."""
    other = other_folder(tmp_path / "other")
    alone = [generate(model), generate(lg.load_gated(other, base=folder.parent / "base", dtype=torch.float32))]
    model.load_adapter(str(other / "adapter"), adapter_name="other")
    lg.load_gates(model, other, adapter_name="other")
    assert alone[0] != alone[1]
    for name, expected in (("default", alone[0]), ("other", alone[1])) * 2:
        model.set_adapter(name)
        assert generate(model) == expected
    with lg.gate_override(model, constant=0.0, adapter_name="default"):
        assert generate(model) == alone[1]
        model.set_adapter("default")
        assert generate(model) == generate(tiny_base())
    both = {name: value.repeat(2, 1) for name, value in ids().items()}
    model.eval()
    with torch.no_grad():
        mixed = model(**both, adapter_names=["default", "other"]).logits
        for row, name in enumerate(("default", "other")):
            model.set_adapter(name)
            torch.testing.assert_close(mixed[row], model(**ids()).logits[0], rtol=1e-5, atol=1e-5)
    model.delete_adapter("default")
    assert generate(model) == alone[1]
