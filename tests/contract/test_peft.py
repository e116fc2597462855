"""What loragate relies on in PEFT though PEFT calls it private. If one of these fails, PEFT has moved."""

import inspect
from pathlib import Path

import peft.tuners.lora as package
import pytest
import torch
from peft.tuners.lora import layer as lora_layer

import loragate as lg
from loragate.gates.eligibility import GATEABLE_CLASSES
from tiny import tiny_adapter

pytestmark = pytest.mark.contract

MODULES = {
    "Linear": "layer",
    "Linear8bitLt": "bnb",
    "Linear4bit": "bnb",
    "GPTQLoraLinear": "gptq",
    "HqqLoraLinear": "hqq",
    "TorchaoLoraLinear": "torchao",
    "IncLoraLinear": "inc",
}


def test_every_gateable_class_consults_the_variant():
    assert set(MODULES) == GATEABLE_CLASSES
    for name, module in MODULES.items():
        source = (Path(package.__path__[0]) / f"{module}.py").read_text(encoding="utf-8")
        assert f"class {name}(" in source, name
        body = source.split(f"class {name}(")[1].split("\n    class ")[0]
        inherits = body.split(")")[0]
        assert "lora_variant[active_adapter].forward" in body or "Linear" in inherits, name


@pytest.mark.parametrize("module", ["awq", "aqlm", "eetq"])
def test_refused_classes_still_do_not_consult_it(module):
    source = (Path(package.__path__[0]) / f"{module}.py").read_text(encoding="utf-8")
    assert "lora_variant" not in source, f"{module} now reads variants: its class may be gated after a test"


def test_forward_dispatches_on_the_instance_dictionary():
    source = inspect.getsource(lora_layer.Linear.forward)
    assert "self.lora_variant[active_adapter].forward" in source
    assert "x = self._cast_input_dtype(x, lora_A.weight.dtype)" in source
    mixed = inspect.getsource(lora_layer.LoraLayer._mixed_batch_forward)
    assert "self.lora_variant[active_adapter].forward" in mixed


def test_the_cast_of_the_input_can_be_switched_off_on_an_instance():
    layer = tiny_adapter().base_model.model.model.layers[0].mlp.up_proj
    assert layer.cast_input_dtype_enabled is True
    x = torch.zeros(1, dtype=torch.bfloat16)
    assert layer._cast_input_dtype(x, torch.float32).dtype == torch.float32
    layer.cast_input_dtype_enabled = False
    assert layer._cast_input_dtype(x, torch.float32) is x


def test_extension_points_exist_on_instances():
    layer = tiny_adapter().base_model.model.model.layers[0].mlp.up_proj
    assert layer.lora_variant == {}
    assert "lora_A" in layer.adapter_layer_names
    assert layer.frozen_peft_weight_names == {}
    assert callable(layer._freeze_non_trainable_peft_weights)
    assert layer.scaling["default"] == 2.0
    assert layer.lora_bias["default"] is False


def test_attachment_leaves_classes_alone():
    before = dict(vars(lora_layer.Linear)), lora_layer.LoraLayer.adapter_layer_names
    lg.attach_gates(tiny_adapter(), lg.GateConfig(-1, 2))
    assert dict(vars(lora_layer.Linear)) == before[0]
    assert lora_layer.LoraLayer.adapter_layer_names == before[1]
    assert lora_layer.LoraLayer.frozen_peft_weight_names == {}
