"""What else transformers does with a gated model: pipelines, beams, assisted decoding, caches, mixed batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import loragate as lg
from tiny import tiny_adapter, tiny_base, tiny_tokenizer

PROMPTS = ["w5 w9 w20", "w7 w7 w30 w31 w32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gated")
    tiny_base().save_pretrained(place / "base")
    tiny_tokenizer().save_pretrained(place / "base")
    model = lg.attach_gates(tiny_adapter(), lg.GateConfig(lower=-3, upper=2))
    torch.manual_seed(3)
    for parameter in lg.gate_parameters(model).values():
        parameter.data.normal_(0, 0.5)
    return lg.save_gates(model, place / "gated", base_id=str(place / "base"))


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


def test_assisted_decoding_with_the_base_as_assistant(model: Any) -> None:
    assert generate(model, assistant_model=tiny_base()) == by_hand(model)


def test_prompt_lookup_decoding(model: Any) -> None:
    assert generate(model, prompt_lookup_num_tokens=3) == by_hand(model)


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


def test_pipeline(model: Any) -> None:
    from transformers import pipeline

    pipe = pipeline("text-generation", model=model, tokenizer=tiny_tokenizer())
    settings = {"max_new_tokens": 16, "do_sample": False, "return_full_text": False}
    text = pipe(PROMPTS[0], **settings)[0]["generated_text"]
    end = by_hand(model)
    end = end[: end.index(1)] if 1 in end else end
    assert text.split() == tiny_tokenizer().decode(end).split()
    chat = pipe([{"role": "user", "content": PROMPTS[0]}], **settings)[0]["generated_text"]
    assert isinstance(chat, str)


def test_two_gated_adapters_are_swapped(model: Any, folder: Path) -> None:
    """A second adapter with gates of its own on the same base; `set_adapter` switches both together."""
    first = generate(model)
    model.load_adapter(str(folder / "adapter"), adapter_name="second")
    model.set_adapter("second")
    plain = generate(model)
    lg.load_gates(model, folder, adapter_name="second")
    assert generate(model) == first
    assert plain != first
    model.set_adapter("default")
    assert generate(model) == first
