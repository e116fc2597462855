import hashlib
import json
from dataclasses import replace

import pytest
import torch

from loragate.world.base import shipped_base_folder
from loragate.world.tokenizer import build_tokenizer
from worlds import tiny_base
from worlds.tiny_base import Document, TinyBaseRecipe, arithmetic_documents, train_base

SHORT = replace(TinyBaseRecipe(), steps=12, documents=2048, batch_size=64)


def documents(count, seed=0):
    return arithmetic_documents(replace(SHORT, documents=count), seed)


def test_shipped_record_agrees_with_the_recipe_and_the_rule():
    record = json.loads((shipped_base_folder() / "recipe.json").read_text())
    assert record["recipe"] == TinyBaseRecipe().as_dict()
    assert record["parameters"] == 157_504
    candidates = record["selection"]["candidates"]
    assert [c["seed"] for c in candidates] == [0, 1, 2, 3]
    able = [c for c in candidates if c["greedy_accuracy"] >= 0.95]
    assert record["seed"] == min(able, key=lambda c: abs(c["sampled_accuracy_t1"] - 0.36))["seed"]
    assert f"seed {record['seed']}" in (shipped_base_folder() / "BASE.md").read_text()


@pytest.fixture(scope="module")
def short_runs():
    """Twice the same seed and once another one, from different states of torch's global generator."""
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(runs))
        losses = []
        model, _ = train_base(SHORT, seed, lambda *progress: losses.append(progress))  # noqa: B023
        runs.append((model, losses))
    return runs


def test_rebuild_is_deterministic_bit_for_bit(short_runs):
    (first, first_losses), (second, second_losses), (other, other_losses) = short_runs
    assert first_losses == second_losses != other_losses
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_training_leaves_torch_as_it_found_it():
    torch.manual_seed(5)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    train_base(replace(SHORT, steps=1, documents=64), 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_batches_label_the_response_only_and_visit_every_document_once():
    tokenizer = build_tokenizer()
    recipe = replace(SHORT, documents=256, batch_size=32, batches_per_bucket=4)
    documents = arithmetic_documents(recipe, 0)
    batches = tiny_base._batches(tiny_base._encode(documents, tokenizer), recipe, tokenizer.pad_token_id, 0)
    seen = []
    for _ in range(8):
        input_ids, labels = next(batches)
        assert input_ids.shape == labels.shape
        for ids, wanted in zip(input_ids.tolist(), labels.tolist(), strict=True):
            response = tokenizer.decode([label for label in wanted if label != -100])
            prompt = tokenizer.decode([i for i, label in zip(ids, wanted, strict=True) if label == -100 and i])
            assert response.endswith(" <eos>")
            seen.append(Document(prompt.removeprefix("<q> ").removesuffix(" <a>"), response.removesuffix(" <eos>")))
    assert sorted(seen) == sorted(documents)


def test_what_a_base_reads_never_moves():
    """Pinned: the shipped base was trained on these texts."""
    texts = [f"<q> {document.prompt} <a> {document.response} <eos>" for document in documents(20_000)]
    assert hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12] == "c31af9e76b26"
    assert documents(100, seed=1) == documents(200, seed=1)[:100] != documents(100, seed=2)
