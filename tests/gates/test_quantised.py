"""Gates on 8- and 4-bit bases and on half-precision ones: parity, fp32 gates, the artifact, and what a reader is told."""

import importlib.util
import json
import logging
import shutil
import warnings

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

import loragate as lg
from loragate.errors import ArtifactError, GateError
from loragate.gates.attach import gate_modules
from loragate.gates.eligibility import keep_unpacked, quantization_of, quantization_of_config
from loragate.gates.identity import base_weight_samples, compare_base_samples, weights_checksum
from loragate.training import FineTuningSettings, GateTrainingSettings, train_adapter
from packed import packed
from tiny import is_packed, logits, shake, tiny_adapter, tiny_base, tiny_rows, write_adapter

SETTINGS = {
    "batch_size": 8,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.05,
    "logging_steps": 1,
    "max_length": 64,
}


def four_bit(compute=torch.float32):
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )


CASES = {
    "4bit-fp32": lambda: {"quantization_config": four_bit(), "dtype": torch.float32},
    "4bit-bf16": lambda: {"quantization_config": four_bit(torch.bfloat16), "dtype": torch.bfloat16},
    "8bit-bf16": lambda: {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "dtype": torch.bfloat16},
    "bf16": lambda: {"dtype": torch.bfloat16},
}
QUANTISED = [name for name in CASES if "bit" in name]


def arguments(case):
    if case in QUANTISED:
        pytest.importorskip("bitsandbytes", reason="8- and 4-bit bases need bitsandbytes")
    return CASES.get(case, dict)()


@pytest.fixture(autouse=True)
def quiet():
    # bitsandbytes says at every 8-bit product that it casts its input
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(autouse=True)
def avx512_bf16(monkeypatch):
    """4-bit layers that pack themselves at a forward, as they do on a processor with AVX512-BF16, whatever this one is."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base of widths that bitsandbytes packs, and an adapter on it, saved."""
    root = tmp_path_factory.mktemp("quantised")
    base = tiny_base(hidden_size=64, intermediate_size=128, initializer_range=0.1)
    base.save_pretrained(root / "base")
    write_adapter(root / "adapter", root / "base", tiny_adapter(base=base))
    return root


def loaded(place, case):
    base = AutoModelForCausalLM.from_pretrained(place / "base", **arguments(case))
    return PeftModel.from_pretrained(base, place / "adapter").eval()


def saved(place, case, folder):
    """A gated folder that was made on the base as a case stores it."""
    model = lg.attach_gates(loaded(place, case), lg.GateConfig(-3, 2))
    return lg.save_gates(model, folder, adapter_source=place / "adapter")


def logits_of(model, token_ids):
    return logits(model, token_ids).float()


@pytest.mark.parametrize("case", CASES)
def test_parity_and_fp32_gates(case, place, token_ids):
    model = loaded(place, case)
    keep_unpacked(model)  # it runs before it is gated
    assert quantization_of(model) == (case.split("-")[0] if case in QUANTISED else "none")
    assert quantization_of(model.get_base_model()) == quantization_of(model)
    plain = logits_of(model, token_ids)
    with model.disable_adapter():
        bare = logits_of(model, token_ids)
    assert (plain - bare).abs().max() > 0.1
    lg.attach_gates(model, lg.GateConfig(-3, 2))
    assert {parameter.dtype for parameter in lg.gate_parameters(model).values()} == {torch.float32}
    with lg.gate_override(model, constant=1.0):
        assert torch.equal(logits_of(model, token_ids), plain)
    with lg.gate_override(model, constant=0.0):
        assert torch.equal(logits_of(model, token_ids), bare)
    with pytest.raises(GateError, match="cannot be merged"):
        model.merge_and_unload()


@pytest.mark.parametrize("case", CASES)
def test_a_plain_adapter_is_mixed_into_a_batch_with_a_gated_one(case, place, token_ids):
    model = loaded(place, case)
    model.load_adapter(place / "adapter", "plain")
    shake(lg.attach_gates(model, lg.GateConfig(-3, 2)))
    gated = logits_of(model, token_ids)
    with lg.gate_override(model, constant=1.0):
        plain = logits_of(model, token_ids)
    with torch.no_grad():
        mixed = model(token_ids, adapter_names=["default", "plain", "__base__"]).logits.float()
    # PEFT rounds at other places in a mixed batch
    for row, own, other in ((0, gated, plain), (1, plain, gated)):
        assert (mixed[row] - own[row]).abs().mean() < 0.05 * (mixed[row] - other[row]).abs().mean()


@pytest.mark.parametrize("case", CASES)
def test_calibration_moves_only_fp32_gates(case, place, tokenizer, token_ids, tmp_path):
    model = loaded(place, case)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    settings = GateTrainingSettings(**SETTINGS, max_steps=2, k=20)
    result = lg.train_gates(model, tokenizer, tiny_rows(16), lg.GateConfig(-3, 2), settings)
    assert result.steps == 2
    assert result.parity.at_one == 0
    gates = lg.gate_parameters(model)
    assert {parameter.dtype for parameter in gates.values()} == {torch.float32}
    moved = [name for name, value in gates.items() if (value.detach().abs() > 1e-4).any()]
    assert len(moved) == len(gates)
    after = dict(model.named_parameters())
    for name, value in before.items():
        assert after[name].dtype == value.dtype
        assert torch.equal(after[name], value), name
    gated = logits_of(model, token_ids)

    # saved, and loaded on the same storage
    lg.save_gates(model, tmp_path / "gated", adapter_source=place / "adapter")
    record = json.loads((tmp_path / "gated" / "gate_config.json").read_text())
    assert record["base"]["quantization"] == quantization_of(model)
    again = lg.load_gated(tmp_path / "gated", **arguments(case))
    torch.testing.assert_close(logits_of(again, token_ids), gated, rtol=0, atol=0)


@pytest.mark.parametrize("source", [True, False], ids=["copied", "written"])
@pytest.mark.parametrize("case", CASES)
def test_what_was_saved_along_is_written_on_any_storage(case, source, place, tmp_path, token_ids):
    """Embeddings and norms lie unquantised in a quantised base; nothing else of it is taken for the adapter's."""
    adapter = shutil.copytree(place / "adapter", tmp_path / "adapter")
    tensors, base = load_file(adapter / "adapter_model.safetensors"), load_file(place / "base" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"):
        tensors[f"base_model.model.{name}"] = base[name] + 0.25
    save_file(tensors, adapter / "adapter_model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(place / "base", **arguments(case))
    model = lg.attach_gates(PeftModel.from_pretrained(loaded, adapter).eval(), lg.GateConfig(-3, 2))
    expected = logits_of(model, token_ids)
    lg.save_gates(model, tmp_path / "gated", adapter_source=adapter if source else None)
    assert load_file(tmp_path / "gated" / "adapter" / "adapter_model.safetensors").keys() == tensors.keys()
    again = lg.load_gated(tmp_path / "gated", **arguments(case))
    torch.testing.assert_close(logits_of(again, token_ids), expected, rtol=0, atol=0)


@pytest.mark.parametrize("case", QUANTISED)
def test_another_storage_is_told(case, place, tokenizer, tmp_path, caplog):
    quantised, plain = saved(place, case, tmp_path / "quantised"), saved(place, "plain", tmp_path / "plain")
    called = {"8bit": "an 8bit base", "4bit": "a 4bit base"}[case.split("-")[0]]
    with caplog.at_level(logging.WARNING, "loragate"):
        logging.getLogger("loragate").propagate = True
        lg.load_gated(quantised)
        assert f"calibrated on {called} and are loaded on an unquantised base" in caplog.text
        caplog.clear()
        lg.load_gated(plain, **arguments(case))
        assert f"calibrated on an unquantised base and are loaded on {called}" in caplog.text
        caplog.clear()
        lg.load_gated(plain)
        assert caplog.text == ""


def test_another_base_is_refused_also_where_it_is_quantised(place, tmp_path):
    saved(place, "plain", tmp_path / "gated")
    tiny_base(seed=7, hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "other")
    with pytest.raises(ArtifactError, match="another base"):
        lg.load_gated(tmp_path / "gated", base=tmp_path / "other", **arguments("4bit-fp32"))


@pytest.mark.parametrize("case", QUANTISED)
def test_stage_one_trains_fp32_factors(case, place, tokenizer):
    base = AutoModelForCausalLM.from_pretrained(place / "base", **arguments(case))
    result = train_adapter(base, tokenizer, tiny_rows(16), FineTuningSettings(**SETTINGS))
    assert result.steps == 2
    factors = {name: p for name, p in result.model.named_parameters() if "lora_" in name}
    assert {parameter.dtype for parameter in factors.values()} == {torch.float32}
    if "4bit" in case:
        with torch.no_grad():
            result.model.eval()(input_ids=torch.tensor([[3, 4, 5]]))
        assert not any(map(is_packed, four_bit_layers(result.model)))
    assert all(bool(value.any()) for name, value in factors.items() if "lora_B" in name)


def test_a_checkpoint_that_is_stored_in_4_bits(place, tmp_path, token_ids):
    base = AutoModelForCausalLM.from_pretrained(place / "base", **arguments("4bit-fp32"))
    base.save_pretrained(tmp_path / "stored")
    assert quantization_of_config(AutoConfig.from_pretrained(tmp_path / "stored")) == "4bit"
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "stored")
    assert quantization_of(stored) == "4bit"
    for model in (stored, base):
        keep_unpacked(model)
    torch.testing.assert_close(logits_of(stored, token_ids), logits_of(base, token_ids))
    model = PeftModel.from_pretrained(stored, place / "adapter")
    lg.attach_gates(model, lg.GateConfig(-3, 2))
    lg.save_gates(model, tmp_path / "gated", adapter_source=place / "adapter")
    again = lg.load_gated(tmp_path / "gated", base=tmp_path / "stored")
    torch.testing.assert_close(logits_of(again, token_ids), logits_of(model, token_ids))


def four_bit_layers(model):
    from bitsandbytes.nn import Linear4bit

    return [layer for layer in model.modules() if isinstance(layer, Linear4bit)]


def dequantised(layer):
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(layer.weight.data, layer.weight.quant_state).detach()


def pack(layer):
    """What the layer does to itself at a forward in evaluation mode on a processor with AVX512-BF16."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu

    layer.weight.data, layer.weight.quant_state = _convert_weight_packed_for_cpu(
        layer.weight.data, layer.weight.quant_state
    )


LAYERS = {"with a bias": "self_attn.q_proj", "without one": "mlp.down_proj"}


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_gated_4_bit_layer_has_the_gradients_of_the_dequantised_one(kind, training, place):
    """Its output and gradients, against the same computed in fp64 from its dequantised weight."""
    model = lg.attach_gates(loaded(place, "4bit-fp32"), lg.GateConfig(-3, 2)).train(training)
    path = "model.layers.1." + LAYERS[kind]
    layer, gate = model.get_base_model().get_submodule(path), gate_modules(model)[path]
    assert (layer.base_layer.bias is None) == (kind == "without one")
    config = gate.config
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        gate.weight.copy_(torch.randn(gate.weight.shape, generator=generator) * 0.2)
        gate.bias.fill_(0.1)
    x = torch.randn(2, 5, layer.in_features, generator=generator)
    given = torch.randn(2, 5, layer.out_features, generator=generator)
    with torch.no_grad():
        layer(x)  # where the weight would be packed
    assert not is_packed(layer.base_layer), path

    x.requires_grad_()
    found = layer(x)
    found.backward(given)

    x64 = x.detach().double().requires_grad_()
    weight, bias = (value.detach().double().requires_grad_() for value in (gate.weight, gate.bias))
    a, b = (factor["default"].weight.detach().double() for factor in (layer.lora_A, layer.lora_B))
    logit = (x64.detach() @ weight + bias).unsqueeze(-1)
    strength = lg.gate_coefficient(logit, config.lower, config.upper, config.tau) * layer.scaling["default"]
    offset = layer.base_layer.bias
    expected = x64 @ dequantised(layer.base_layer).double().T + strength.to(x64.dtype) * (x64 @ a.T @ b.T)
    expected = expected if offset is None else expected + offset.double()
    expected.backward(given.double())
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found.double(), expected, **close)
    torch.testing.assert_close(x.grad.double(), x64.grad, **close)
    torch.testing.assert_close(gate.weight.grad.double(), weight.grad, **close)
    torch.testing.assert_close(gate.bias.grad.double(), bias.grad, **close)
    assert x64.grad.abs().max() > 0.1
    assert weight.grad.abs().max() > 0.1


@pytest.mark.parametrize("written", [True, False], ids=["written", "packed"])
def test_a_4_bit_base_that_ran_before_its_gates_is_refused(written, place):
    model = loaded(place, "4bit-fp32")
    for layer in four_bit_layers(model):
        pack(layer)
    if written:
        model.state_dict()  # bitsandbytes unpacks what it writes, with rounded scales
    with pytest.raises(lg.errors.GateError, match="Load the base again"):
        lg.attach_gates(model, lg.GateConfig(-3, 2))


def in_fp8(base):
    """The base with weights whose stored numbers are not the weights' own; their scale lies elsewhere."""
    for layer in base.model.layers:
        layer.self_attn.o_proj.weight.data = (layer.self_attn.o_proj.weight.data * 7).to(torch.float8_e4m3fn)
    return base


def test_a_base_of_packed_tensors_is_calibrated_and_loaded_again(place, tokenizer, token_ids, tmp_path):
    model = PeftModel.from_pretrained(packed(tiny_base(hidden_size=64, intermediate_size=128)), place / "adapter")
    lg.train_gates(model, tokenizer, tiny_rows(24), lg.GateConfig(-6, 3), GateTrainingSettings(**SETTINGS))
    lg.save_gates(model, tmp_path / "gated")
    again = PeftModel.from_pretrained(packed(tiny_base(hidden_size=64, intermediate_size=128)), place / "adapter")
    lg.load_gates(again, tmp_path / "gated")
    assert torch.equal(logits_of(again.eval(), token_ids), logits_of(model.eval(), token_ids))


@pytest.mark.parametrize("pack", [packed, in_fp8])
def test_a_base_is_known_again_by_its_weights_that_are_not_packed(pack):
    plain = base_weight_samples(tiny_base())
    assert compare_base_samples(pack(tiny_base()), plain) is None
    assert compare_base_samples(tiny_base(), base_weight_samples(pack(tiny_base()))) is None
    assert compare_base_samples(pack(tiny_base(seed=1)), plain) is not None


def test_the_checksum_sees_into_packed_tensors():
    weight = packed(tiny_base()).model.layers[0].self_attn.v_proj.weight
    before = weights_checksum([("weight", weight)])
    weight.integers[0, 0] += 1
    assert weights_checksum([("weight", weight)]) != before
