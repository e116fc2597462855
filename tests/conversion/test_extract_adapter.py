"""Extraction of an adapter from a fine-tuned checkpoint: exact at full rank, best at every other, clear when it cannot be."""

import copy
import json

import pytest
import torch
import transformers as tf
from peft import PeftModel
from safetensors.torch import load_file, save_file

import loragate as lg
from loragate.conversion.extract import extract_adapter, write_adapter_folder
from loragate.conversion.extract_checkpoint import BIASES, EMBEDDINGS, EXPERTS, HEAD, VECTORS, open_checkpoint
from loragate.conversion.extract_factors import low_rank_factors
from loragate.errors import ConfigError
from loragate.models import resolve
from test_families import FAMILIES, GROUPED, SETTINGS
from tiny import logits, tiny_base, tiny_rows

MOE = {
    "mixtral": lambda: tf.MixtralConfig(**GROUPED, num_local_experts=4),
    "qwen2_moe": FAMILIES["qwen2_moe"],
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    ),
}
CONFIGS = {**FAMILIES, **MOE}
FULL_RANK = 48


def is_held(model, name, parameter):
    """Whether a LoRA on all linear layers can hold a change of this parameter."""
    module = model.get_submodule(name.rpartition(".")[0])
    linear = isinstance(module, (torch.nn.Linear, tf.pytorch_utils.Conv1D))
    return linear and name.endswith(".weight") and module is not model.get_output_embeddings()


def tuned_copy(base, seed=3, scale=0.05, everything=False, only=None):
    """A copy whose linear layers (or all parameters) moved by random numbers."""
    model = copy.deepcopy(base)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (only is None or only in name) and (everything or is_held(model, name, parameter)):
                parameter += scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def saved_pair(tmp_path, base, tuned, **options):
    base.save_pretrained(tmp_path / "base", **options)
    tuned.save_pretrained(tmp_path / "tuned", **options)
    return {"model": str(tmp_path / "tuned"), "base": str(tmp_path / "base")}


@pytest.fixture
def pair(tmp_path):
    """A tiny base and a copy whose linear layers changed."""
    base = tiny_base()
    return saved_pair(tmp_path, base, tuned_copy(base))


def written(tmp_path, pair, rank, **options):
    extraction = extract_adapter(pair["model"], pair["base"], rank, **options)
    return extraction, write_adapter_folder(extraction, tmp_path / f"adapter-{rank}")


@pytest.mark.parametrize("name", CONFIGS)
def test_full_rank_is_the_fine_tuned_model(name, tmp_path, token_ids):
    torch.manual_seed(0)
    base = tf.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    tuned = tuned_copy(base)
    pair = saved_pair(tmp_path, base, tuned)
    widest = max(min(parameter.shape) for parameter in base.parameters() if parameter.dim() == 2)
    extraction, folder = written(tmp_path, pair, max(FULL_RANK, widest))
    assert extraction.kept == pytest.approx(1.0, abs=1e-9)
    assert extraction.left_share == 0
    assert extraction.notes == []
    loaded = PeftModel.from_pretrained(tf.AutoModelForCausalLM.from_pretrained(pair["base"]), str(folder)).eval()
    expected = logits(tuned.eval(), token_ids)
    assert (expected - logits(base, token_ids)).abs().max() > 0.05
    torch.testing.assert_close(logits(loaded, token_ids), expected, rtol=1e-3, atol=2e-4)
    # every adapted layer can be gated
    assert {verdict.status for verdict in lg.examine_adapter(loaded, "default")} == {"gate"}


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (700, 600)], ids=["tall", "wide", "randomised"])
def test_truncation_is_the_best_approximation(shape):
    # a spectrum that falls, as differences of trained weights have
    generator = torch.Generator().manual_seed(1)
    smaller = min(shape)
    left, right = (
        torch.linalg.qr(torch.randn(side, smaller, generator=generator, dtype=torch.float64))[0] for side in shape
    )
    singular = torch.arange(1, smaller + 1, dtype=torch.float64).pow(-0.8)
    delta = ((left * singular) @ right.T).float()
    for rank in (1, 6):
        found = low_rank_factors(delta, rank)
        error = float((delta - found.lora_b_OR @ found.lora_a_RD).double().square().sum())
        best = float(singular[rank:].square().sum())
        assert error == pytest.approx(best, rel=1e-4)
        assert found.kept == pytest.approx(1 - best / float(singular.square().sum()), rel=1e-5)
        assert found.energy == pytest.approx(float(singular.square().sum()), rel=1e-5)
        assert found.complete == (smaller < 512)
        # neither factor outweighs the other
        torch.testing.assert_close(found.lora_a_RD.norm(dim=1), found.lora_b_OR.norm(dim=0))


def test_pure_noise_is_the_hardest_case():
    delta = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    squares = torch.linalg.eigvalsh(delta @ delta.T).flip(0)
    found = low_rank_factors(delta, 32)
    assert not found.complete
    assert 0.99 < found.kept / float(squares[:32].sum() / squares.sum()) < 1.0001


def test_decompositions_repeat_and_leave_the_random_state_alone():
    delta = torch.randn(700, 600, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(9)
    before = torch.get_rng_state()
    first, again, other = (low_rank_factors(delta, 4, seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.lora_a_RD, again.lora_a_RD)
    assert torch.equal(first.lora_b_OR, again.lora_b_OR)
    assert not torch.equal(first.lora_a_RD, other.lora_a_RD)
    peaks = first.lora_b_OR.gather(0, first.lora_b_OR.abs().argmax(0, keepdim=True))
    assert bool((peaks > 0).all())


def test_a_rank_beyond_the_matrix_is_filled_with_zeros():
    delta = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    found = low_rank_factors(delta, 5)
    torch.testing.assert_close(found.lora_b_OR @ found.lora_a_RD, delta)
    assert not found.lora_a_RD[3:].any()
    assert not found.lora_b_OR[:, 3:].any()
    assert found.kept == pytest.approx(1.0)


def test_energy_and_suggested_rank_are_those_of_the_spectra(tmp_path):
    base = tiny_base()
    tuned = tuned_copy(base)
    extraction = extract_adapter(**saved_pair(tmp_path, base, tuned), rank=6)
    paths = [name.removesuffix(".weight") for name, p in base.named_parameters() if is_held(base, name, p)]
    assert list(extraction.modules) == paths
    deltas = [tuned.get_submodule(path).weight.double() - base.get_submodule(path).weight.double() for path in paths]
    squares = [torch.linalg.svdvals(delta).square().detach() for delta in deltas]
    total = float(sum(part.sum() for part in squares))

    def share(rank):
        return float(sum(part[:rank].sum() for part in squares)) / total

    assert extraction.energy == pytest.approx(total, rel=1e-6)
    assert extraction.kept == pytest.approx(share(6), rel=1e-6)
    for wanted in (0.3, 0.5, 0.95, 1.0):
        rank = extraction.rank_for(wanted)
        assert share(rank) >= wanted - 1e-6
        assert rank == 1 or share(rank - 1) < wanted
    for module, part in zip(extraction.modules.values(), squares, strict=True):
        assert module.kept == pytest.approx(float(part[:6].sum() / part.sum()), rel=1e-6)


def test_beyond_what_is_known_no_rank_is_suggested(tmp_path):
    torch.manual_seed(0)
    base = tiny_base(hidden_size=640, intermediate_size=640, num_hidden_layers=1)
    extraction = extract_adapter(**saved_pair(tmp_path, base, tuned_copy(base, only="o_proj")), rank=2)
    assert [module.complete for module in extraction.modules.values()] == [False]
    assert extraction.unchanged == 6
    assert extraction.rank_for(0.9) is None
    assert 1 <= extraction.rank_for(0.01) <= 12


def test_what_no_lora_holds_is_measured(tmp_path):
    base = tiny_base(tie_word_embeddings=False)
    tuned = tuned_copy(base, everything=True)
    extraction = extract_adapter(**saved_pair(tmp_path, base, tuned), rank=4)
    assert set(extraction.left_out) == {EMBEDDINGS, HEAD, BIASES, VECTORS}
    squares = {"left": 0.0, "held": 0.0}
    for (name, old), new in zip(base.named_parameters(), tuned.state_dict().values(), strict=True):
        squares["held" if is_held(base, name, old) else "left"] += float((new - old.detach()).double().square().sum())
    assert extraction.left_share == pytest.approx(squares["left"] / sum(squares.values()), rel=1e-5)
    assert extraction.left_out[HEAD].largest == "lm_head.weight"
    assert extraction.left_out[BIASES].tensors == 6


def test_a_tied_head_counts_once(tmp_path):
    base = tiny_base()
    extraction = extract_adapter(**saved_pair(tmp_path, base, tuned_copy(base, everything=True)), rank=4)
    assert HEAD not in extraction.left_out
    assert extraction.left_out[EMBEDDINGS].tensors == 1


@pytest.mark.parametrize("tied", ["base", "tuned"])
def test_one_model_tied_and_the_other_not(tied, tmp_path):
    base = tiny_base(tie_word_embeddings=tied == "base")
    tuned = tiny_base(tie_word_embeddings=tied == "tuned")
    tuned.load_state_dict(base.state_dict())
    tuned = tuned_copy(tuned, only="o_proj")
    if tied == "base":
        with torch.no_grad():
            tuned.lm_head.weight += 0.5
    extraction = extract_adapter(**saved_pair(tmp_path, base, tuned), rank=4)
    assert "output head of its own" in extraction.notes[0]
    if tied == "base":
        assert extraction.left_out[HEAD].energy == pytest.approx(0.25 * base.lm_head.weight.numel(), rel=1e-4)
    assert len(extraction.modules) == 2


@pytest.mark.parametrize("name", MOE)
def test_fused_experts_are_left_out(name, tmp_path):
    torch.manual_seed(0)
    base = tf.AutoModelForCausalLM.from_config(MOE[name]()).eval()
    tuned = tuned_copy(base, everything=True)
    extraction = extract_adapter(**saved_pair(tmp_path, base, tuned), rank=4)
    assert extraction.left_out[EXPERTS].tensors == 4
    with torch.no_grad():
        expected = sum(
            float((new - old).double().square().sum())
            for (key, new), (_, old) in zip(tuned.named_parameters(), base.named_parameters(), strict=True)
            if ".experts." in key
        )
    assert extraction.left_out[EXPERTS].energy == pytest.approx(expected, rel=1e-5)
    assert not any(".experts." in path for path in extraction.modules)


def test_shards_and_half_precision(tmp_path):
    base = tiny_base().to(torch.bfloat16)
    tuned = tuned_copy(base, scale=0.2)
    pair = saved_pair(tmp_path, base, tuned, max_shard_size="8KB")
    assert len(set(open_checkpoint(resolve(pair["model"], expect="base")).files.values())) > 3
    extraction = extract_adapter(**pair, rank=FULL_RANK)
    path = "model.layers.1.mlp.down_proj"
    delta = tuned.get_submodule(path).weight.float() - base.get_submodule(path).weight.float()
    lora_a, lora_b = extraction.modules[path].lora_a_RD, extraction.modules[path].lora_b_OR
    assert lora_a.dtype == lora_b.dtype == torch.float32
    torch.testing.assert_close(lora_b @ lora_a, delta, rtol=1e-5, atol=1e-6)


def test_only_changed_layers_are_adapted(tmp_path, token_ids):
    base = tiny_base()
    tuned = tuned_copy(base, only="layers.1.mlp.up_proj")
    extraction, folder = written(tmp_path, saved_pair(tmp_path, base, tuned), FULL_RANK)
    assert extraction.unchanged == 13
    record = json.loads((folder / "adapter_config.json").read_text())
    assert record["target_modules"] == ["model.layers.1.mlp.up_proj"]
    loaded = PeftModel.from_pretrained(tiny_base(), str(folder)).eval()
    torch.testing.assert_close(logits(loaded, token_ids), logits(tuned, token_ids), rtol=1e-4, atol=1e-4)


def test_written_adapter_repeats_and_is_calibrated(tmp_path, pair, tokenizer, token_ids):
    _, folder = written(tmp_path, pair, 4)
    again = write_adapter_folder(extract_adapter(**pair, rank=4), tmp_path / "again")
    for name in ("adapter_model.safetensors", "adapter_config.json", "extract.json"):
        assert (folder / name).read_bytes() == (again / name).read_bytes()
    record = json.loads((folder / "adapter_config.json").read_text())
    assert (record["r"], record["lora_alpha"], record["base_model_name_or_path"]) == (4, 4, pair["base"])
    assert record["target_modules"] == sorted(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
    figures = json.loads((folder / "extract.json").read_text())
    assert len(figures["modules"]) == 14
    assert 0 < figures["energy_kept"] < 1

    model = PeftModel.from_pretrained(tf.AutoModelForCausalLM.from_pretrained(pair["base"]), str(folder))
    result = lg.train_gates(model, tokenizer, tiny_rows(16), lg.GateConfig(-3, 2), SETTINGS)
    assert (result.parity.at_one, result.steps) == (0, 2)
    lg.save_gates(model, tmp_path / "gated", adapter_source=folder)
    gated = lg.load_gated(tmp_path / "gated")
    torch.testing.assert_close(logits(gated, token_ids), logits(model.eval(), token_ids), rtol=1e-5, atol=1e-5)


def refusal(pair):
    with pytest.raises(ConfigError) as caught:
        extract_adapter(**pair, rank=4)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tuned", "told"),
    [
        (tiny_base, "hold the same weights"),
        (lambda: tuned_copy(tiny_base(), everything=True, only="norm"), "differ only in what no LoRA"),
        (lambda: tiny_base(num_hidden_layers=3), "num_hidden_layers is 3, not 2"),
        (lambda: tf.AutoModelForCausalLM.from_config(FAMILIES["llama"]()), "model_type is llama, not qwen2"),
    ],
    ids=["equal", "norms alone", "deeper", "llama"],
)
def test_what_no_adapter_lies_between_is_refused(tmp_path, tuned, told):
    assert told in refusal(saved_pair(tmp_path, tiny_base(), tuned()))


def test_a_resized_vocabulary_is_refused_or_left_out(tmp_path):
    base = tiny_base()
    tuned = tuned_copy(base)
    tuned.resize_token_embeddings(168, mean_resizing=False)
    pair = saved_pair(tmp_path, base, tuned)
    assert "vocabulary of 168" in refusal(pair)
    extraction = extract_adapter(**pair, rank=4, ignore_resized_vocabulary=True)
    new_rows = tuned.get_input_embeddings().weight[160:].detach()
    assert extraction.left_out[EMBEDDINGS].energy == pytest.approx(float(new_rows.double().square().sum()), rel=1e-5)


def test_large_tensors_are_compared_in_parts(tmp_path, monkeypatch):
    base = tiny_base(tie_word_embeddings=False)
    tuned = tuned_copy(base, everything=True)
    tuned.resize_token_embeddings(168, mean_resizing=False)
    pair = {**saved_pair(tmp_path, base, tuned), "rank": 4, "ignore_resized_vocabulary": True}
    whole = extract_adapter(**pair)
    monkeypatch.setattr("loragate.conversion.extract.PART", 7 * 32)
    parts = extract_adapter(**pair)
    for kind, left in whole.left_out.items():
        assert parts.left_out[kind].energy == pytest.approx(left.energy, rel=1e-9)
    # the other way round: the fine-tuned model has fewer rows
    shorter = {**pair, "model": pair["base"], "base": pair["model"]}
    assert extract_adapter(**shorter).left_out[HEAD].energy < parts.left_out[HEAD].energy


def test_settings_that_no_adapter_holds_are_noted(tmp_path):
    base = tiny_base()
    tuned = tuned_copy(base)
    tuned.config.rms_norm_eps = 1e-3
    (note,) = extract_adapter(**saved_pair(tmp_path, base, tuned), rank=4).notes
    assert note.startswith("rms_norm_eps is 0.001 in the fine-tuned model and 1e-06 in the base")


def test_pickles_are_not_read(tmp_path, pair):
    (tmp_path / "tuned" / "model.safetensors").rename(tmp_path / "tuned" / "pytorch_model.bin")
    message = refusal(pair)
    assert "pytorch_model.bin, a pickle" in message
    assert "save_pretrained" in message


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("model.layers.0.self_attn.o_proj.weight", None, "has no weights for model.layers.0.self_attn.o_proj"),
        ("model.norm.weight", torch.full((32,), float("nan")), "model.norm.weight contains NaN or infinity"),
        ("model.norm.weight", torch.ones(32, dtype=torch.int8), "stored as int8, so this checkpoint is quantised"),
        ("model.norm.weight", torch.ones(31), "has shape (31,)"),
    ],
    ids=["missing", "nan", "quantised", "shape"],
)
def test_damaged_checkpoints_are_refused(tmp_path, pair, name, tensor, expected):
    rewrite(tmp_path / "tuned", lambda found: found.pop(name) if tensor is None else found.update({name: tensor}))
    assert expected in refusal(pair)


def test_foreign_tensors_are_noted(tmp_path, pair):
    foreign = {"vision.proj.weight": torch.ones(2, 2), "rotary.inv_freq": torch.ones(2)}
    rewrite(tmp_path / "tuned", lambda found: found.update(foreign))
    (note,) = extract_adapter(**pair, rank=4).notes
    assert "1 tensors that are no part of the language model (such as vision.proj.weight)" in note


def test_a_torn_or_foreign_index_is_refused(tmp_path):
    base = tiny_base()
    pair = saved_pair(tmp_path, base, tuned_copy(base), max_shard_size="8KB")
    index = tmp_path / "tuned" / "model.safetensors.index.json"
    record = json.loads(index.read_text())
    first = sorted(record["weight_map"].values())[0]
    for file, told in (
        ("../base/" + first, "outside its own folder"),
        ("absent.safetensors", "absent.safetensors is missing"),
    ):
        record["weight_map"]["model.norm.weight"] = file
        index.write_text(json.dumps(record))
        assert told in refusal(pair)
    index.write_text("{")
    assert "not a readable index" in refusal(pair)


def test_nothing_is_overwritten_or_left_behind(tmp_path, pair, monkeypatch):
    extraction, folder = written(tmp_path, pair, 4)
    before = (folder / "adapter_config.json").read_bytes()
    with pytest.raises(ConfigError, match="is not empty"):
        write_adapter_folder(extraction, folder)
    assert (folder / "adapter_config.json").read_bytes() == before

    def fails(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("loragate.conversion.extract.open_tokenizer", fails)
    with pytest.raises(KeyboardInterrupt):
        write_adapter_folder(extraction, tmp_path / "other")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "tuned", "adapter-4"}
