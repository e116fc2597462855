"""The layer's forward: what a forward hook on the base layer has kept is not written over."""

import torch

import loragate as lg
from tiny import tiny_adapter


def test_a_base_output_that_a_hook_kept_stays_as_it_was(token_ids):
    model = lg.attach_gates(tiny_adapter(), lg.GateConfig(-1, 2))
    layer = model.get_base_model().model.layers[1].mlp.down_proj
    kept, inputs = [], []

    def keep(module, given, output):
        inputs.append(given[0].detach())
        kept.append(output)

    handle = layer.base_layer.register_forward_hook(keep)
    hooked = model(token_ids).logits  # with gradients, where the delta may be written into the base output
    handle.remove()
    torch.testing.assert_close(kept[0], layer.base_layer(inputs[0]), rtol=0, atol=0)
    assert torch.equal(model(token_ids).logits, hooked)
