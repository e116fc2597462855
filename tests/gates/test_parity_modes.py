"""Measuring leaves the model as it was; the figures themselves are tested where gates are trained (tests/training)."""

import loragate as lg
from loragate.gates import measure_parity


def test_every_module_keeps_its_own_mode(adapter, token_ids):
    lg.attach_gates(adapter, lg.GateConfig(-3, 2)).train()
    adapter.get_base_model().model.layers[0].eval()
    before = {name: module.training for name, module in adapter.named_modules()}
    assert set(before.values()) == {True, False}
    measure_parity(adapter, token_ids)
    assert {name: module.training for name, module in adapter.named_modules()} == before
