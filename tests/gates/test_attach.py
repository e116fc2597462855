"""Gates on a PEFT model: parity, exactness, what trains, and living with the rest of PEFT."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file

import loragate as lg
from loragate.errors import GateError
from loragate.gates import active_adapter, gates_disabled, train_gates_only
from tiny import logits, shake, tiny_adapter, tiny_base

CONFIG = lg.GateConfig(-6, 3)


@pytest.mark.parametrize("granularity", ["token", "module", "global"])
def test_zero_gates_are_the_adapter_and_lambda_zero_the_base_bit_for_bit(adapter, token_ids, granularity):
    plain = logits(adapter, token_ids)
    with adapter.disable_adapter():
        base = logits(adapter, token_ids)
    lg.attach_gates(adapter, lg.GateConfig(-6, 3, granularity=granularity))
    assert (logits(adapter, token_ids) - plain).abs().max() < 1e-3
    shake(adapter, 0)
    assert torch.equal(logits(adapter, token_ids), plain)
    shake(adapter)
    assert not torch.allclose(logits(adapter, token_ids), plain, atol=1e-2)
    with lg.gate_override(adapter, constant=1.0):
        assert torch.equal(logits(adapter, token_ids), plain)
    with lg.gate_override(adapter, constant=0.0):
        assert torch.equal(logits(adapter, token_ids), base)
    with gates_disabled(adapter):
        assert torch.equal(logits(adapter, token_ids), plain)
    with adapter.disable_adapter():
        assert torch.equal(logits(adapter, token_ids), base)


def test_parameters_have_the_promised_names_and_shapes(adapter):
    lg.attach_gates(adapter, CONFIG)
    parameters = lg.gate_parameters(adapter)
    assert len(parameters) == 2 * 7 * 2
    assert parameters["model.layers.0.self_attn.q_proj.weight"].shape == (32,)
    assert parameters["model.layers.1.mlp.down_proj.weight"].shape == (48,)
    assert parameters["model.layers.1.mlp.down_proj.bias"].shape == (1,)
    assert all(parameter.dtype == torch.float32 for parameter in parameters.values())


def test_query_key_and_value_keep_one_input_between_them():
    """On a bf16 base with fp32 factors: 2 bytes a value of x, once, and of each layer A x, v and λ in fp32."""
    tokens, width, rank = 12, 32, 4
    model = lg.attach_gates(tiny_adapter(base=tiny_base().to(torch.bfloat16)), lg.GateConfig(-3, 2))
    attention = model.base_model.model.model.layers[0].self_attn
    layers = [getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")]
    assert {layer.lora_A["default"].weight.dtype for layer in layers} == {torch.float32}
    x = torch.randn(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = [layer(x) for layer in layers]
    assert {output.dtype for output in outputs} == {torch.bfloat16}
    assert sum(storage.nbytes() for storage in kept.values()) == tokens * (2 * width + 3 * (4 * rank + 8))


def test_a_plain_adapter_beside_a_gated_one_still_gets_pefts_cast(token_ids):
    model = tiny_adapter(base=tiny_base().to(torch.bfloat16))
    shake(lg.attach_gates(model, lg.GateConfig(-3, 2)))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    alone = logits(model, token_ids)
    assert layer.cast_input_dtype_enabled is False
    model.add_adapter("plain", model.peft_config["default"])
    for active in (["default", "plain"], "plain", "default"):
        model.base_model.set_adapter(active)
        assert torch.isfinite(model(token_ids).logits).all()
        assert layer.cast_input_dtype_enabled is True
    assert torch.equal(logits(model, token_ids), alone)
    model.delete_adapter("plain")
    assert torch.equal(logits(model, token_ids), alone)
    assert layer.cast_input_dtype_enabled is False
    with gates_disabled(model):
        assert torch.isfinite(model(token_ids).logits).all()
        assert layer.cast_input_dtype_enabled is True
    lg.detach_gates(model)
    assert torch.isfinite(model(token_ids).logits).all()
    assert layer.cast_input_dtype_enabled is True
    assert not layer._forward_pre_hooks


def test_module_and_global_granularity(adapter, token_ids):
    lg.attach_gates(adapter, lg.GateConfig(-3, 1, granularity="module"))
    assert len(lg.gate_parameters(adapter)) == 14
    lg.detach_gates(adapter)
    lg.attach_gates(adapter, lg.GateConfig(-3, 1, granularity="global"))
    parameters = lg.gate_parameters(adapter)
    assert list(parameters) == ["global.bias"]
    with torch.no_grad():
        parameters["global.bias"].fill_(-0.5)
    with lg.record_gates(adapter) as recording:
        logits(adapter, token_ids)
    means = {round(values["mean"], 5) for values in recording.statistics().values()}
    assert means == {round(1 + 4 * torch.tanh(torch.tensor(-0.5)).item(), 5)}
    moved = copy.deepcopy(adapter)
    assert len({id(gate) for gate in lg.gate_parameters(moved).values()}) == 1
    assert sum(parameter.requires_grad for parameter in moved.parameters()) == 1


@pytest.mark.parametrize("granularity", ["token", "module", "global"])
@pytest.mark.parametrize("upper", [1, 3])
def test_no_dead_start(granularity, upper, token_ids):
    model = lg.attach_gates(tiny_adapter(), lg.GateConfig(-3, upper, granularity=granularity))
    lg.topk_entropy(model(token_ids).logits, 20).mean().backward()
    gradients = [parameter.grad for parameter in lg.gate_parameters(model).values()]
    assert any(gradient is not None and gradient.abs().max() > 0 for gradient in gradients)


@pytest.mark.parametrize("granularity", ["token", "module", "global"])
def test_a_whole_number_as_the_initial_size_is_a_number(granularity, token_ids):
    """As JSON gives it."""
    model = lg.attach_gates(tiny_adapter(), lg.GateConfig(-3, 1, init_scale=0, granularity=granularity))
    neutral = logits(model, token_ids)
    with gates_disabled(model):
        assert torch.equal(logits(model, token_ids), neutral)
    model = lg.attach_gates(tiny_adapter(), lg.GateConfig(-3, 2, init_scale=1, granularity=granularity))
    assert {parameter.dtype for parameter in lg.gate_parameters(model).values()} == {torch.float32}


def test_initialisation_is_deterministic_and_leaves_the_random_state_alone(token_ids):
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    first, second = tiny_adapter(), tiny_adapter()
    torch.manual_seed(123)
    lg.attach_gates(first, CONFIG)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(9)
    lg.attach_gates(second, CONFIG)
    for left, right in zip(lg.gate_parameters(first).values(), lg.gate_parameters(second).values(), strict=True):
        assert torch.equal(left, right)
    lg.detach_gates(second)
    lg.attach_gates(second, lg.GateConfig(-6, 3, seed=1))
    weight = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(lg.gate_parameters(first)[weight], lg.gate_parameters(second)[weight])
    values = torch.cat([p for name, p in lg.gate_parameters(first).items() if name.endswith("weight")])
    assert values.std().item() == pytest.approx(1e-6, rel=0.1)
    assert all(p.item() == 0 for name, p in lg.gate_parameters(first).items() if name.endswith("bias"))


def test_only_gates_train_through_peft_operations(adapter, token_ids):
    lg.attach_gates(adapter, CONFIG)
    expected = set(map(id, lg.gate_parameters(adapter).values()))

    def training():
        return {id(parameter) for parameter in adapter.parameters() if parameter.requires_grad}

    assert training() == expected
    with adapter.disable_adapter():
        logits(adapter, token_ids)
    assert training() == expected
    adapter.set_adapter("default")
    assert training() == expected
    model = copy.deepcopy(adapter)
    assert sum(parameter.requires_grad for parameter in model.parameters()) == len(expected)


def test_detach_restores_the_plain_adapter(adapter, token_ids):
    plain = logits(adapter, token_ids)
    layer = adapter.base_model.model.model.layers[0].mlp.up_proj
    before = layer.adapter_layer_names
    shake(lg.attach_gates(adapter, CONFIG))
    lg.detach_gates(adapter)
    assert torch.equal(logits(adapter, token_ids), plain)
    assert layer.adapter_layer_names == before
    assert not hasattr(layer, "lora_gate")
    adapter.merge_adapter()
    with pytest.raises(GateError, match="carries no gates"):
        lg.detach_gates(adapter)


def odd(change):
    """An adapter with one layer changed."""
    model = tiny_adapter()
    change(model.base_model.model.model.layers[0].mlp.up_proj)
    return model


def as_other(name, module):
    def change(layer):
        layer.__class__ = type(name, (type(layer),), {"__module__": f"peft.tuners.lora.{module}"})

    return change


REFUSED = {
    "Dora variant": lambda: tiny_adapter(use_dora=True),
    "lora_bias": lambda: tiny_adapter(target_modules=["q_proj"], lora_bias=True),
    "merged into the base weights": lambda: odd(lambda layer: layer.merge()),
    "tensor-parallel": lambda: odd(lambda layer: setattr(layer.base_layer, "_hf_tp_plan", "colwise")),
    "AwqLoraLinear layers do not consult a LoRA variant": lambda: odd(as_other("AwqLoraLinear", "awq")),
    "HqqLoraLinear layers .* not in mixed batches": lambda: odd(as_other("HqqLoraLinear", "hqq")),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals_name_the_reason_and_change_nothing(words):
    model = REFUSED[words]()
    with pytest.raises(GateError, match=words):
        lg.attach_gates(model, CONFIG)
    assert not any("lora_gate" in name for name, _ in model.named_modules())
    with pytest.raises(GateError, match="carries no gates"):
        lg.gate_parameters(model)


def test_gates_are_attached_once(adapter):
    lg.attach_gates(adapter, CONFIG)
    with pytest.raises(GateError, match="already carries gates"):
        lg.attach_gates(adapter, CONFIG)
    with pytest.raises(GateError, match="did you mean 'default'"):
        lg.attach_gates(adapter, CONFIG, adapter_name="defualt")


def test_embeddings_keep_full_strength_with_a_verdict(token_ids):
    base = tiny_base(tie_word_embeddings=False)
    model = tiny_adapter(base=base, target_modules=["q_proj", "embed_tokens"])
    verdicts = {verdict.path: verdict for verdict in lg.examine_adapter(model, "default")}
    assert verdicts["model.embed_tokens"].status == "leave"
    assert "full strength" in verdicts["model.embed_tokens"].reason
    plain = logits(model, token_ids)
    shake(lg.attach_gates(model, CONFIG), 0)
    assert torch.equal(logits(model, token_ids), plain)
    assert len(lg.gate_parameters(model)) == 4


def test_target_modules(adapter):
    lg.attach_gates(adapter, lg.GateConfig(-1, 2, target_modules=["q_proj", "model.layers.1.mlp.up_proj"]))
    assert {name.rpartition(".")[0] for name in lg.gate_parameters(adapter)} == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }
    lg.detach_gates(adapter)
    lg.attach_gates(adapter, lg.GateConfig(-1, 2, target_modules=r".*layers\.1\..*_proj"))
    assert len(lg.gate_parameters(adapter)) == 14
    lg.detach_gates(adapter)
    with pytest.raises(GateError, match="'q_prj', which is no LoRA module of the adapter; did you mean 'q_proj'"):
        lg.attach_gates(adapter, lg.GateConfig(-1, 2, target_modules=["q_prj"]))
    with pytest.raises(GateError, match="matches no LoRA module"):
        lg.attach_gates(adapter, lg.GateConfig(-1, 2, target_modules="layers"))
    with pytest.raises(GateError, match="not a valid regular expression"):
        lg.attach_gates(adapter, lg.GateConfig(-1, 2, target_modules="("))


def test_several_adapters_each_with_its_own_gates(token_ids):
    model = tiny_adapter()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    model.eval()
    shake(lg.attach_gates(model, CONFIG, "default"), seed=1, adapter_name="default")
    model.set_adapter("second")
    second = logits(shake(lg.attach_gates(model, lg.GateConfig(-1, 2), "second"), adapter_name="second"), token_ids)
    model.set_adapter("default")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_gate.default" in name for name in trained)
    with model.disable_adapter():
        base = logits(model, token_ids)
    mixed = model(token_ids, adapter_names=["default", "second", "__base__"]).logits
    for row, expected in enumerate((logits(model, token_ids), second, base)):
        torch.testing.assert_close(mixed[row], expected[row], rtol=1e-5, atol=1e-5)
    lg.detach_gates(model, "default")
    model.set_adapter("second")
    torch.testing.assert_close(logits(model, token_ids), second, rtol=0, atol=0)
    model.delete_adapter("second")
    assert not any("second" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(token_ids, use_reentrant):
    gradients = []
    for checkpointing in (False, True):
        model = shake(lg.attach_gates(tiny_adapter(), CONFIG))
        model.train()
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        with lg.record_gates(model):
            out = model(token_ids).logits
        lg.topk_entropy(out, 20).mean().backward()
        gradients.append([parameter.grad.clone() for parameter in lg.gate_parameters(model).values()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    "options", [{"use_rslora": True}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}}]
)
def test_pefts_own_scaling_is_used(options, token_ids):
    model = tiny_adapter(**options)
    plain = logits(model, token_ids)
    shake(lg.attach_gates(model, CONFIG), 0)
    assert torch.equal(logits(model, token_ids), plain)
    with lg.gate_override(model, constant=2.0):
        doubled = logits(model, token_ids)
    twin = tiny_adapter(**options)
    for layer in twin.modules():
        if hasattr(layer, "set_scale"):
            layer.scale_layer(2.0)
    torch.testing.assert_close(doubled, logits(twin, token_ids), rtol=1e-5, atol=1e-5)


def test_modules_to_save_stay_frozen_and_in_force(token_ids):
    base = tiny_base(tie_word_embeddings=False)
    model = tiny_adapter(base=base, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.5)
    plain = logits(model, token_ids)
    shake(lg.attach_gates(model, CONFIG), 0)
    assert torch.equal(logits(model, token_ids), plain)
    assert {name for name, p in model.named_parameters() if p.requires_grad and "lora_gate" not in name} == set()


def test_lora_dropout_is_off_in_a_gated_layer(token_ids):
    model = lg.attach_gates(tiny_adapter(lora_dropout=0.5), CONFIG)
    model.train()
    assert torch.equal(logits(model, token_ids), logits(model, token_ids))


def test_peft_saves_and_restores_gates_with_the_adapter(adapter, tmp_path, token_ids):
    shake(lg.attach_gates(adapter, CONFIG))
    checkpoint = tmp_path / "checkpoint-1"  # as a trainer calls it
    adapter.save_pretrained(checkpoint)
    again = PeftModel.from_pretrained(tiny_base(), checkpoint)
    lg.attach_gates(again, CONFIG)
    set_peft_model_state_dict(again, load_file(checkpoint / "adapter_model.safetensors"))
    assert torch.equal(logits(again, token_ids), logits(adapter, token_ids))


def test_gates_stay_fp32_when_the_model_is_cast(adapter):
    lg.attach_gates(adapter, CONFIG)
    name = "model.layers.0.self_attn.q_proj.weight"
    before = lg.gate_parameters(adapter)[name].clone()
    for cast in (adapter.half, adapter.bfloat16, adapter.float):
        assert lg.gate_parameters(cast())[name].dtype == torch.float32
    assert torch.equal(lg.gate_parameters(adapter)[name], before), "no bit is lost on the way"


def test_torch_compile_has_no_graph_break_and_agrees(adapter, token_ids):
    shake(lg.attach_gates(adapter, CONFIG))
    mlp = adapter.base_model.model.model.layers[0].mlp
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    explained = torch._dynamo.explain(mlp)(hidden)
    assert explained.graph_break_count == 0
    eager = mlp(hidden)
    eager.square().sum().backward()
    expected = [p.grad.clone() for n, p in lg.gate_parameters(adapter).items() if ".layers.0.mlp" in n]
    adapter.zero_grad()
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    out = compiled(hidden)
    torch.testing.assert_close(out, eager, rtol=1e-5, atol=1e-5)
    out.square().sum().backward()
    actual = [p.grad for n, p in lg.gate_parameters(adapter).items() if ".layers.0.mlp" in n]
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_offloaded_adapters_are_refused():
    with torch.device("meta"):
        model = tiny_adapter()
    assert {verdict.status for verdict in lg.examine_adapter(model, "default")} == {"gate"}, (
        "inspection works without weights"
    )
    with pytest.raises(GateError, match="not in memory"):
        lg.attach_gates(model, CONFIG)
    assert not any("lora_gate" in name for name, _ in model.named_modules())


def test_no_name_means_the_active_adapter(token_ids):
    model = tiny_adapter(name="mine")
    assert {verdict.status for verdict in lg.examine_adapter(model)} == {"gate"}
    for arguments in ((), (None,), ("mine",)):
        lg.attach_gates(model, CONFIG, *arguments)
        assert lg.gate_parameters(model)
        train_gates_only(model)
        lg.detach_gates(model, *arguments)
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.set_adapter("second")
    lg.attach_gates(model, CONFIG)
    assert len(lg.gate_parameters(model, "second")) == 4
    model.base_model.set_adapter(["mine", "second"])
    for act in (lg.detach_gates, lg.examine_adapter, lambda model: lg.attach_gates(model, CONFIG)):
        with pytest.raises(GateError, match="2 adapters are active"):
            act(model)


def test_the_active_adapter_is_found_through_wrappers():
    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = lg.attach_gates(tiny_adapter(name="mine"), CONFIG)
    expected = list(lg.gate_parameters(model))
    assert list(lg.gate_parameters(Wrapper(model))) == expected
    assert list(lg.gate_parameters(model.base_model.model)) == expected, "a transformers model that knows of no adapter"


def test_a_base_without_an_adapter_is_told_apart(base):
    def record(model):
        with lg.record_gates(model):
            pass

    for act in (lg.gate_parameters, record, active_adapter, lg.detach_gates, lg.examine_adapter, train_gates_only):
        with pytest.raises(GateError, match="carries no LoRA layers; load the adapter onto its base first"):
            act(base)
    with pytest.raises(GateError, match=r"no LoRA adapter named 'zz' \(it has default\)"):
        lg.gate_parameters(tiny_adapter(), "zz")
    with pytest.raises(GateError, match="'default' carries no gates"):
        lg.detach_gates(tiny_adapter(), None)
    with pytest.raises(
        GateError, match=r"expected a loaded model, found 'path/to/adapter'; load the adapter onto its base"
    ):
        lg.GateTrainer("path/to/adapter", gates=lg.GateConfig(-1, 2))


def test_a_base_output_that_a_hook_kept_stays_as_it_was(adapter, token_ids):
    layer = lg.attach_gates(adapter, CONFIG).get_base_model().model.layers[1].mlp.down_proj
    kept = []
    handle = layer.base_layer.register_forward_hook(lambda module, given, output: kept.append((given[0], output)))
    hooked = adapter(token_ids).logits  # with gradients, where the delta may be written into the base output
    handle.remove()
    torch.testing.assert_close(kept[0][1], layer.base_layer(kept[0][0]), rtol=0, atol=0)
    assert torch.equal(adapter(token_ids).logits, hooked)
