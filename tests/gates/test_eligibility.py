"""What is judged before anything is attached: initialisations that change the base, and module paths under wrappers."""

import pytest
import torch
from peft import PeftModel
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import loragate as lg
from loragate.cli.main import main
from loragate.errors import GateError
from loragate.evaluation.variants import canary
from loragate.gates.eligibility import base_change_reason, base_module_name
from tiny import logits, shake, tiny_adapter, tiny_base


def test_initialisations_that_change_the_base_are_known_and_others_are_not_refused():
    for start in ("pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "lora_ga", "loftq"):
        assert repr(start) in base_change_reason(start)
    for start in (True, False, None, "gaussian", "eva", "orthogonal"):
        assert base_change_reason(start) == "", start


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_an_adapter_without_which_the_model_is_not_the_base_is_refused(start, tmp_path, token_ids, capsys):
    base = tiny_base()
    base.save_pretrained(tmp_path / "base")
    expected = logits(base, token_ids)
    model = tiny_adapter(base=base, init_lora_weights=start)
    with torch.no_grad(), model.disable_adapter():
        assert not torch.allclose(model(token_ids).logits, expected, atol=0.1), (
            "PEFT changes the base no more: allow it"
        )
    with pytest.raises(GateError, match=rf"init_lora_weights='{start}'.*is not the base.*path_initial_model"):
        lg.attach_gates(model, lg.GateConfig(-1, 2))
    assert not any("lora_gate" in name for name, _ in model.named_modules())
    with pytest.raises(GateError, match="canary: the variant of the base would not be the base"):
        canary(model, None, [], "adapter")
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    main(["doctor", str(tmp_path / "adapter"), "--quick", "--json"])
    assert '"refuse": 14' in capsys.readouterr().out
    assert main(["export", str(tmp_path / "adapter"), "--constant", "0.5", "--out", str(tmp_path / "out")]) == 2
    assert "is not the base" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.mlp",
        "_orig_mod.base_model.model.model.layers.0.mlp",
        "module._orig_mod.base_model.model.model.layers.0.mlp",
        "base_model.model.model.layers.0._orig_mod.mlp",
        "base_model.model.model.layers.0._checkpoint_wrapped_module.mlp._orig_mod",
        "base_model.model.model.layers.0.mlp.base_layer",
    ],
)
def test_paths_are_the_base_models_own(name):
    assert base_module_name(name) == "model.layers.0.mlp"
    assert base_module_name("model._orig_mods.0") == "model._orig_mods.0"


WRAPPERS = {"compiled": lambda layer: torch.compile(layer, backend="eager"), "checkpointed": checkpoint_wrapper}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gates_of_wrapped_layers_are_saved_under_the_names_of_the_base(wrapper, tmp_path, token_ids):
    tiny_base().save_pretrained(tmp_path / "base")
    tiny_adapter().save_pretrained(tmp_path / "adapter")
    model = lg.attach_gates(PeftModel.from_pretrained(tiny_base(), tmp_path / "adapter").eval(), lg.GateConfig(-6, 3))
    expected, names = logits(shake(model), token_ids), list(lg.gate_parameters(model))
    layers = model.get_base_model().model.layers
    for index, layer in enumerate(layers):
        layers[index] = WRAPPERS[wrapper](layer)
    assert list(lg.gate_parameters(model)) == names
    for source in (None, tmp_path / "adapter"):
        folder = lg.save_gates(
            model, tmp_path / str(source is None), adapter_source=source, base_id=str(tmp_path / "base")
        )
        assert torch.equal(logits(lg.load_gated(folder), token_ids), expected)
