"""What loragate relies on in PEFT though PEFT calls it private. If one of these fails, PEFT has moved."""

import ast
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
    "TorchaoLoraLinear": "torchao",
    "IncLoraLinear": "inc",
}


CONSULTS = "self.lora_variant[active_adapter].forward"


def forwards_of(name, module):
    """(names of the base classes, {method: source}) of a class of PEFT's; of its methods those that run the layer."""
    tree = ast.parse((Path(package.__path__[0]) / f"{module}.py").read_text(encoding="utf-8"))
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    methods = {node.name: ast.unparse(node) for node in found.body if isinstance(node, ast.FunctionDef)}
    running = {key: methods[key] for key in ("forward", "_mixed_batch_forward") if key in methods}
    return [ast.unparse(base) for base in found.bases], running


def test_every_gateable_class_consults_the_variant():
    assert set(MODULES) == GATEABLE_CLASSES
    for name, module in MODULES.items():
        bases, methods = forwards_of(name, module)
        assert "forward" in methods or "Linear" in bases, name
        for method, source in methods.items():
            assert CONSULTS in source, f"{name}.{method}"


def test_hqq_layers_still_do_not_consult_it_in_mixed_batches():
    _, methods = forwards_of("HqqLoraLinear", "hqq")
    assert CONSULTS in methods["forward"]
    assert CONSULTS not in methods["_mixed_batch_forward"], "HqqLoraLinear may be gated after a test"


@pytest.mark.parametrize("module", ["awq", "aqlm", "eetq"])
def test_refused_classes_still_do_not_consult_it(module):
    source = (Path(package.__path__[0]) / f"{module}.py").read_text(encoding="utf-8")
    assert "lora_variant" not in source, f"{module} now reads variants: its class may be gated after a test"


def test_forward_dispatches_on_the_instance_dictionary():
    source = inspect.getsource(lora_layer.Linear.forward)
    assert CONSULTS in source
    assert "x = self._cast_input_dtype(x, lora_A.weight.dtype)" in source
    mixed = inspect.getsource(lora_layer.LoraLayer._mixed_batch_forward)
    assert CONSULTS in mixed


def test_the_cast_of_the_input_can_be_switched_off_on_an_instance():
    layer = tiny_adapter().base_model.model.model.layers[0].mlp.up_proj
    assert layer.cast_input_dtype_enabled is True
    x = torch.zeros(1, dtype=torch.bfloat16)
    assert layer._cast_input_dtype(x, torch.float32).dtype == torch.float32
    layer.cast_input_dtype_enabled = False
    assert layer._cast_input_dtype(x, torch.float32) is x


def test_attachment_leaves_classes_alone():
    before = dict(vars(lora_layer.Linear)), lora_layer.LoraLayer.adapter_layer_names
    lg.attach_gates(tiny_adapter(), lg.GateConfig(-1, 2))
    assert dict(vars(lora_layer.Linear)) == before[0]
    assert lora_layer.LoraLayer.adapter_layer_names == before[1]
    assert lora_layer.LoraLayer.frozen_peft_weight_names == {}
