import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from loragate.errors import DataError
from loragate.world import base
from loragate.world.base import TinyBaseRecipe, load_base, save_base, shipped_base_folder, train_base
from loragate.world.demonstrations import Document, pretraining_documents
from loragate.world.problems import problems, retention_items, verify
from loragate.world.tokenizer import build_tokenizer

SHORT = replace(TinyBaseRecipe(), steps=12, documents=2048, batch_size=64)


@pytest.fixture(scope="module")
def shipped():
    return load_base()


@pytest.fixture(scope="module")
def record():
    return json.loads((shipped_base_folder() / "recipe.json").read_text())


@torch.inference_mode()
def greedy_share(model, tokenizer, asked):
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p.prompt}], tokenize=False, add_generation_prompt=True
        )
        for p in asked
    ]
    encoded = tokenizer(prompts, return_tensors="pt", padding=True)
    out = model.generate(**encoded, do_sample=False, max_new_tokens=48)[:, encoded["input_ids"].shape[1] :]
    verdicts = [
        verify(problem, text, bool((ids == tokenizer.eos_token_id).any()))
        for problem, text, ids in zip(asked, tokenizer.batch_decode(out, skip_special_tokens=True), out, strict=True)
    ]
    return sum(verdicts) / len(verdicts)


def test_shipped_base_is_small_and_of_the_promised_shape(shipped):
    model, tokenizer = shipped
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.num_parameters() == 157_504
    assert (shipped_base_folder() / "model.safetensors").stat().st_size < 2_000_000
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 1
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 0


def test_auto_classes_load_the_shipped_folder(shipped):
    model, tokenizer = shipped
    auto_model = AutoModelForCausalLM.from_pretrained(shipped_base_folder())
    encoded = AutoTokenizer.from_pretrained(shipped_base_folder())("<q> solve 1 + 1 <a>", return_tensors="pt")
    assert encoded["input_ids"].tolist() == [tokenizer("<q> solve 1 + 1 <a>")["input_ids"]]
    with torch.inference_mode():
        assert torch.equal(auto_model(**encoded).logits, model(**encoded).logits)


def test_shipped_record_agrees_with_the_recipe_and_the_rule(record):
    assert record["recipe"] == TinyBaseRecipe().as_dict()
    assert record["parameters"] == 157_504
    candidates = record["selection"]["candidates"]
    assert [c["seed"] for c in candidates] == [0, 1, 2, 3]
    able = [c for c in candidates if c["greedy_accuracy"] >= 0.95]
    assert record["seed"] == min(able, key=lambda c: abs(c["sampled_accuracy_t1"] - 0.36))["seed"]
    assert f"seed {record['seed']}" in (shipped_base_folder() / "BASE.md").read_text()


def test_shipped_base_works_problems_out_greedily(shipped):
    assert greedy_share(*shipped, problems("dev", 40)) >= 0.9


def test_shipped_base_has_the_retention_skills(shipped):
    assert greedy_share(*shipped, retention_items("dev", 45)) >= 0.9


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


def test_saved_base_loads_with_the_same_bits(short_runs, tmp_path):
    model = short_runs[0][0]
    save_base(model, build_tokenizer(), tmp_path / "base")
    loaded, tokenizer = load_base(tmp_path / "base")
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert len(tokenizer) == 144
    assert sorted(path.suffix for path in (tmp_path / "base").iterdir()) == [
        ".jinja", ".json", ".json", ".json", ".json", ".safetensors"
    ]  # fmt: skip


def test_batches_label_the_response_only_and_visit_every_document_once():
    tokenizer = build_tokenizer()
    documents = pretraining_documents(256)
    recipe = replace(SHORT, documents=256, batch_size=32, batches_per_bucket=4)
    batches = base._batches(base._encode(documents, tokenizer), recipe, tokenizer.pad_token_id, 0)
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


def test_folder_without_a_base_is_refused_with_what_is_missing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"found no model\.safetensors, tokenizer\.json in .*expected the folder"):
        load_base(tmp_path)
