"""Gates of one λ per module folded into plain adapters: the same function, in any family, scale and granularity."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import loragate as lg
from beside import BESIDE, make
from beside import loaded as loaded_beside
from loragate.errors import ArtifactError, GateError
from loragate.gates import constant_gate
from loragate.gates.override import Override
from loragate.models import export as export_room
from loragate.models import open_tokenizer, resolve
from loragate.models.export import constant_coefficients, export_adapter, find_non_uniform_keys, fold_adapter
from test_families import FAMILIES, GROUPED
from tiny import chatml_tokenizer, run, same, shake, tiny_adapter, tiny_base, tiny_tokenizer, write_adapter, write_base
from tiny import logits as logits_of

IDS = torch.tensor([[5, 9, 20, 33, 7, 100, 101, 8]])


def gated(base: Any, granularity: str = "module") -> Any:
    """A model whose λ lie between −3 and 2, some of them negative."""
    model = tiny_adapter(base=base)
    return shake(lg.attach_gates(model, lg.GateConfig(-3, 2, granularity=granularity)), 0.7, 4)


def logits(model: Any) -> torch.Tensor:
    return logits_of(model, IDS)


def loaded(folder: Path) -> Any:
    return PeftModel.from_pretrained(tiny_base(), str(folder)).eval()


def export(model: Any, place: Path, *more: str) -> Path:
    run("export", lg.save_gates(model, place / "gated", base_id="base"), "--out", place / "out", *more)
    return place / "out"


def test_fused_experts_keep_full_strength_and_are_not_made_uniform(tmp_path: Path) -> None:
    """PEFT nests the second adapted parameter of a module below the first."""
    torch.manual_seed(0)
    base = tf.AutoModelForCausalLM.from_config(FAMILIES["qwen2_moe"]()).eval()
    write_base(tmp_path / "base", base)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = {"target_modules": ["q_proj"], "target_parameters": names, "lora_dropout": 0.0}
    write_adapter(tmp_path / "adapter", tmp_path / "base", tiny_adapter(base=base, **lora))
    done = export_adapter(str(tmp_path / "adapter"), tmp_path / "out", constant=0.5)
    assert done.agreement is not None
    assert all(path.endswith("q_proj") for path in done.coefficients)
    with pytest.raises(ArtifactError, match=r"adapter_config\.json: target_parameters is set.*without --uniform"):
        export_adapter(str(tmp_path / "adapter"), tmp_path / "uniform", constant=0.5, uniform=True)
    assert not (tmp_path / "uniform").exists()


def test_experts_of_earlier_transformers_and_an_adapted_router_keep_full_strength(tmp_path: Path) -> None:
    """They are parameters of one module when the adapter is loaded, whose deltas no λ reaches."""
    torch.manual_seed(0)
    base = tf.AutoModelForCausalLM.from_config(FAMILIES["qwen2_moe"]()).eval()
    write_base(tmp_path / "routed", base)
    model = tiny_adapter(base=base, target_modules=["q_proj"], target_parameters=["mlp.gate.weight"], lora_dropout=0.0)
    write_adapter(tmp_path / "router", tmp_path / "routed", model)
    done = export_adapter(str(tmp_path / "router"), tmp_path / "out", constant=0.25)
    assert all(path.endswith("q_proj") for path in done.coefficients)

    shape = tf.MixtralConfig(**GROUPED, num_local_experts=2, num_experts_per_tok=1)
    base = tf.AutoModelForCausalLM.from_config(shape).eval()
    write_base(tmp_path / "base", base)
    write_adapter(tmp_path / "experts", tmp_path / "base", tiny_adapter(base=base, target_modules=["q_proj"]))
    width, inner = shape.hidden_size, shape.intermediate_size
    file, config = (tmp_path / "experts" / name for name in ("adapter_model.safetensors", "adapter_config.json"))
    state = load_file(file)
    for layer in range(shape.num_hidden_layers):
        path = f"base_model.model.model.layers.{layer}.block_sparse_moe.gate"
        state |= {f"{path}.lora_A.weight": torch.randn(4, width), f"{path}.lora_B.weight": torch.randn(2, 4)}
        for expert in range(shape.num_local_experts):
            for name in ("w1", "w2", "w3"):
                path = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                d_in, d_out = (inner, width) if name == "w2" else (width, inner)
                state |= {f"{path}.lora_A.weight": torch.randn(4, d_in), f"{path}.lora_B.weight": torch.randn(d_out, 4)}
    save_file(state, file)
    targets = ["q_proj", "gate", "w1", "w2", "w3"]
    config.write_text(json.dumps({**json.loads(config.read_text()), "target_modules": targets}))
    done = export_adapter(str(tmp_path / "experts"), tmp_path / "folded", constant=0.25)
    assert done.agreement is not None
    assert all(path.endswith("q_proj") for path in done.coefficients)


def require_constant(model: Any, folder: Path, **override: float) -> None:
    """The adapter in the folder computes what the model does under an override of λ."""
    with lg.gate_override(model, **override):
        expected = logits(model)
    torch.testing.assert_close(logits(loaded(folder)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("uniform", [[], ["--uniform"]], ids=["as-is", "uniform"])
@pytest.mark.parametrize("name", ["qwen2", "llama", "gemma2", "phi3", "gpt_neox", "gpt2"])
def test_every_family(name: str, uniform: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = tf.AutoModelForCausalLM.from_config(FAMILIES[name]()).eval()
    base.save_pretrained(tmp_path / "base")
    model = gated(base)
    expected = logits(model)
    with lg.gates_disabled(model):
        assert (logits(model) - expected).abs().max() > 0.01
    out = export(model, tmp_path, *uniform)
    again = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    found = logits(PeftModel.from_pretrained(again, str(out)).eval())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


LORA: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 6, r"layers\.1\.mlp\.up_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "both": {"use_rslora": True, "rank_pattern": {"q_proj": 6}, "alpha_pattern": {"q_proj": 3}},
    "two modules": {"target_modules": ["q_proj", "down_proj"], "lora_alpha": 5},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"], "rank_pattern": {"q_proj": 6}},
}


@pytest.mark.parametrize("uniform", [[], ["--uniform"]], ids=["as-is", "uniform"])
@pytest.mark.parametrize("granularity", ["module", "global"])
@pytest.mark.parametrize("name", LORA)
def test_every_kind_of_scale(name: str, granularity: str, uniform: list[str], tmp_path: Path) -> None:
    model = tiny_adapter(base=tiny_base(tie_word_embeddings=False), **LORA[name])
    shake(lg.attach_gates(model, lg.GateConfig(-3, 2, granularity=granularity)), 0.7, 4)
    expected = logits(model)
    out = export(model, tmp_path, *uniform)
    again = PeftModel.from_pretrained(tiny_base(tie_word_embeddings=False), str(out)).eval()
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-4)
    config = json.loads((out / "adapter_config.json").read_text())
    state = load_file(out / "adapter_model.safetensors")
    assert not any("lora_gate" in key for key in state)
    if uniform:
        assert find_non_uniform_keys(config) == []
        assert config["r"] == config["lora_alpha"]
        ranks = {tensor.shape[0] for key, tensor in state.items() if key.endswith(("lora_A.weight", "embedding_A"))}
        assert ranks == {config["r"]}


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("unit", {"minimum": 0.0, "maximum": 1.0}),
        ("clip=-0.5:", {"minimum": -0.5}),
        ("constant=-0.5", {"constant": -0.5}),
    ],
)
def test_clipped_and_constant_gates(tmp_path: Path, name: str, override: dict[str, float]) -> None:
    model = gated(tiny_base())
    folder = lg.save_gates(model, tmp_path / "gated", base_id="base")
    run("export", f"{folder}@{name}", "--out", tmp_path / "out")
    require_constant(model, tmp_path / "out", **override)


def test_token_gates_are_refused_and_a_constant_folds(tmp_path: Path, fails: Any) -> None:
    model, out = gated(tiny_base(), "token"), ("--out", tmp_path / "out")
    folder = lg.save_gates(model, tmp_path / "gated", base_id="base")
    for place in (folder, f"{folder}@unit"):
        said = fails("export", place, *out)
        assert "λ differs from token to token in 14 of 14 modules" in said
        assert "--constant 0.5" in said
        assert "--granularity module" in said
    assert not (tmp_path / "out").exists()
    run("export", folder, "--constant", "0.5", *out)
    require_constant(model, tmp_path / "out", constant=0.5)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "λ is one constant, 0.5" in card
    assert "Learned gates" in card
    assert "give one of the two" in fails("export", f"{folder}@off", "--constant", "0.5", "--out", tmp_path / "two")


def test_gates_of_zero_fold_to_the_very_adapter(tmp_path: Path) -> None:
    out = export(shake(lg.attach_gates(tiny_adapter(), lg.GateConfig(-6, 3)), 0), tmp_path)
    assert same(*(load_file(place / "adapter_model.safetensors") for place in (tmp_path / "gated" / "adapter", out)))


def test_a_plain_adapter_is_scaled(tmp_path: Path, fails: Any) -> None:
    model, line = tiny_adapter(), ("export", tmp_path / "plain", "--out", tmp_path / "out")
    model.save_pretrained(tmp_path / "plain")
    assert "a plain PEFT adapter without gates" in fails(*line)
    run(*line, "--constant", "0.25")
    require_constant(lg.attach_gates(model, lg.GateConfig(-1, 2)), tmp_path / "out", constant=0.25)


@pytest.mark.parametrize("to", ["peft", "gguf", "mlx"])
def test_names_that_keep_the_adapters_own_name_are_folded(tmp_path: Path, to: str) -> None:
    write_base(tmp_path / "base")
    write_adapter(tmp_path / "adapter", tmp_path / "base", target_modules=["q_proj", "v_proj"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({key.replace(".weight", ".default.weight"): value for key, value in tensors.items()}, file)
    done = export_adapter(str(tmp_path / "adapter"), tmp_path / "compared", to=to, constant=0.5)
    assert done.agreement is not None
    assert len(done.coefficients) == 4
    export_adapter(str(tmp_path / "adapter"), tmp_path / "out", to=to, constant=0.5, compare_outputs=False)
    if to == "peft":
        found = load_file(tmp_path / "out" / "adapter_model.safetensors")
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], tensors[key] * (0.5 if "lora_B" in key else 1)) for key in found)


def test_a_constant_that_reaches_no_module_is_refused(tmp_path: Path, fails: Any) -> None:
    write_base(tmp_path / "base")
    write_adapter(tmp_path / "adapter", tmp_path / "base", target_modules=["embed_tokens", "lm_head"])
    line = ("export", tmp_path / "adapter", "--constant", "0.5", "--out", tmp_path / "out")
    for more in ([], ["--skip-comparison"]):
        said = fails(*line, *more)
        assert "λ = 0.5 would reach no module" in said
        assert "lm_head, model.embed_tokens" in said
        assert "--skip-comparison" not in said
    assert not (tmp_path / "out").exists()


def test_a_head_keeps_its_strength_whatever_it_is_called(tmp_path: Path) -> None:
    def base() -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": 160, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        return tf.BioGptForCausalLM(tf.BioGptConfig(**sizes, num_attention_heads=4, tie_word_embeddings=False)).eval()

    model = tiny_adapter(base=base(), target_modules=["q_proj", "output_projection"])
    model.save_pretrained(tmp_path / "plain")
    run("export", tmp_path / "plain", "--constant", "0.5", "--out", tmp_path / "constant")
    with constant_gate(model, 0.5):
        expected = logits(model)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base(), str(tmp_path / "constant")).eval()), expected)
    shake(lg.attach_gates(model, lg.GateConfig(-3, 2, granularity="module")), 0.7)
    out = export(model, tmp_path)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base(), str(out)).eval()), logits(model))


@pytest.mark.parametrize("kind", ["gated", "plain"])
def test_the_adapters_tokenizer_comes_along(tmp_path: Path, kind: str) -> None:
    write_base(tmp_path / "base")
    model, tokenizer = write_adapter(tmp_path / "plain", tmp_path / "base"), chatml_tokenizer()
    lg.save_gates(lg.attach_gates(model, lg.GateConfig(-1, 2)), tmp_path / "gated")
    tokenizer.save_pretrained(tmp_path / {"gated": "gated/adapter/tokenizer", "plain": "plain"}[kind])
    run("export", tmp_path / kind, "--constant", "0.5", "--out", tmp_path / "out")
    assert open_tokenizer(resolve(tmp_path / "out")).chat_template == tokenizer.chat_template


def test_files_of_another_tokenizer_stay_behind(tmp_path: Path) -> None:
    """Beside the factors lie a template and tokens that the tokenizer of the own folder does not have."""
    write_base(tmp_path / "base")
    write_adapter(tmp_path / "plain", tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "plain" / "tokenizer")
    (tmp_path / "plain" / "LICENSE").write_text("mine")
    (tmp_path / "plain" / "added_tokens.json").write_text('{"w3 w4": 150}')
    (tmp_path / "plain" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (tmp_path / "plain" / "tokenizer" / "chat_template.jinja").unlink()
    given = open_tokenizer(resolve(tmp_path / "plain"))
    run("export", tmp_path / "plain", "--constant", "0.5", "--out", tmp_path / "out")
    found = open_tokenizer(resolve(tmp_path / "out"))
    assert found("w3 w4 w5").input_ids == given("w3 w4 w5").input_ids
    assert found.chat_template == given.chat_template
    assert (tmp_path / "out" / "LICENSE").is_file()


def test_sixteen_bit_factors_become_fp32_where_λ_acts(tmp_path: Path) -> None:
    """λ·B rounded to bf16 would be off by a third of a per cent; what λ leaves alone keeps its bits."""
    base = tiny_base()
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    path = "model.layers.0.self_attn.q_proj"
    fold_adapter(tmp_path / "half", {path: 0.7}, tmp_path / "out")
    before = load_file(tmp_path / "half" / "adapter_model.safetensors")
    after = load_file(tmp_path / "out" / "adapter_model.safetensors")
    key = f"base_model.model.{path}.lora_B.weight"
    assert torch.equal(after[key], before[key].float() * 0.7)
    assert all(torch.equal(before[other], after[other]) for other in before if other != key)


@pytest.mark.parametrize(("kind", "named"), [("lora_bias", r"lora_B\.bias"), ("use_dora", "lora_magnitude_vector")])
def test_a_delta_that_is_more_than_two_factors_is_not_scaled_by_one(tmp_path: Path, kind: str, named: str) -> None:
    """λ·B leaves a bias of B at full strength, and at λ = 0 DoRA's magnitudes would still change the base."""
    tiny_adapter(**{kind: True}).save_pretrained(tmp_path / "plain")
    with pytest.raises(ArtifactError, match=named):
        export_adapter(str(tmp_path / "plain"), tmp_path / "out", constant=0.0, compare_outputs=False)


def test_what_cannot_be_folded(tmp_path: Path) -> None:
    config = lg.GateConfig(-3, 2)
    with pytest.raises(GateError, match="in 1 of 2 modules"):
        constant_coefficients(config, {"a": torch.ones(3)}, {"a": torch.zeros(1), "b": torch.zeros(1)})
    assert constant_coefficients(config, {"a": torch.zeros(3)}, {"a": torch.zeros(1)}) == {"a": 1.0}
    assert constant_coefficients(config, {"a": torch.ones(3)}, {"a": torch.zeros(1)}, Override(constant=2.0)) == {
        "a": 2
    }
    tiny_adapter().save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match=r"no factor of model\.nowhere"):
        fold_adapter(tmp_path, {"model.nowhere": 0.5}, tmp_path / "out")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ArtifactError, match="not a readable safetensors"):
        fold_adapter(tmp_path, {}, tmp_path / "out")
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ArtifactError, match="not a readable configuration"):
        fold_adapter(tmp_path, {}, tmp_path / "out")


@pytest.mark.parametrize("uniform", [[], ["--uniform"]], ids=["as-is", "uniform"])
@pytest.mark.parametrize("kind", BESIDE)
def test_an_export_brings_all_that_the_adapter_changes(
    tmp_path: Path, kind: str, uniform: list[str], capsys: Any
) -> None:
    base, adapter = make(tmp_path, kind)
    model = shake(lg.attach_gates(loaded_beside(kind, adapter), lg.GateConfig(-3, 2, granularity="module")), 0.7, 4)
    expected = logits(model)
    lg.save_gates(model, tmp_path / "gated", adapter_source=adapter)
    run("export", tmp_path / "gated", "--base", base, "--out", tmp_path / "out", *uniform)
    shown = " ".join(capsys.readouterr().out.split())
    assert "loaded again and compared with" in shown
    assert "nats per token apart on" in shown
    card = (tmp_path / "out" / "README.md").read_text()
    assert "nats per token apart" in card
    assert ("no strength reaches" in shown) == ("No strength reaches" in card) == (kind != "factors alone")
    torch.testing.assert_close(logits(loaded_beside(kind, tmp_path / "out")), expected, rtol=1e-4, atol=1e-4)


def test_an_export_that_computes_something_else_is_refused(tmp_path: Path, fails: Any, monkeypatch: Any) -> None:
    base, adapter = make(tmp_path, "embeddings and head")
    line = ("export", adapter, "--constant", "0.5", "--out", tmp_path / "out")
    right = export_room.write_factors

    def without_head(folder: Path, tensors: Any) -> None:
        right(folder, {key: value for key, value in tensors.items() if "lm_head" not in key})

    with monkeypatch.context() as patch:
        patch.setattr(export_room, "write_factors", without_head)
        assert "the exported adapter does not compute what" in fails(*line, status=1)
        assert not (tmp_path / "out").exists()
    run(*line)
    (base / "config.json").rename(base / "elsewhere.json")
    said = fails(*line[:-1], tmp_path / "again", status=1)
    assert ". Name another copy of the base with --base, the unquantised one where a package" in said
    assert ".. " not in said
    assert "--skip-comparison exports without" in said
    run(*line[:-1], tmp_path / "again", "--skip-comparison")


def test_without_its_base_an_export_says_what_it_did_not_compare(tmp_path: Path, capsys: Any, fails: Any) -> None:
    base, adapter = make(tmp_path, "norms")
    shutil.move(base, tmp_path / "moved")
    run("export", adapter, "--constant", "0.5", "--out", tmp_path / "out")
    assert f"its outputs were not compared: the base {base} is not here" in " ".join(capsys.readouterr().out.split())
    _, adapter = make(tmp_path / "other", "trained tokens")
    shutil.move(tmp_path / "other" / "base", tmp_path / "other" / "moved")
    line = ("export", adapter, "--constant", "0.5", "--out", tmp_path / "tokens")
    assert "trainable_token_indices is set" in fails(*line)
    run(*line, "--base", tmp_path / "other" / "moved")


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_what_is_for_others_is_exported_and_the_rest_is_named(tmp_path: Path, form: str, capsys: Any) -> None:
    _, adapter = make(tmp_path, "embeddings and head", form)
    for name in ("trainer_state.json", "rows.jsonl"):
        (adapter / name).write_text("{}")
    for name in ("tekken.json", "qwen.tiktoken", "additional_chat_templates/tool_use.jinja", "training_args.bin"):
        (adapter / name).parent.mkdir(exist_ok=True)
        (adapter / name).write_text("{}")
    run("export", adapter, "--constant", "0.5", "--out", tmp_path / "out")
    found = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"tekken.json", "qwen.tiktoken", "additional_chat_templates/tool_use.jinja", "README.md"} <= found
    assert not any(name.endswith((".bin", "state.json", ".jsonl")) for name in found)
    assert "left out: rows.jsonl, trainer_state.json\n" in capsys.readouterr().out


@pytest.mark.parametrize("to", ["gguf", "mlx"])
@pytest.mark.parametrize("more", [[], ["--skip-comparison"]], ids=["compared", "not compared"])
def test_a_runtime_that_would_not_change_the_base_is_refused(
    tmp_path: Path, to: str, more: list[str], fails: Any
) -> None:
    write_base(tmp_path / "base")
    write_adapter(tmp_path / "plain", tmp_path / "base", tiny_adapter(init_lora_weights="pissa"))
    said = fails("export", tmp_path / "plain", "--to", to, "--out", tmp_path / "out", *more)
    assert "another base than its own. init_lora_weights='pissa' subtracts" in said
    assert not (tmp_path / "out").exists()
