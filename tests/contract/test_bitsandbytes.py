"""What `loragate.gates.eligibility` relies on in bitsandbytes: when and how a 4-bit weight is packed for inference on a CPU."""

import pytest
import torch

bitsandbytes = pytest.importorskip("bitsandbytes", reason="8- and 4-bit bases need bitsandbytes")

from bitsandbytes import functional  # noqa: E402
from bitsandbytes.nn import Linear4bit  # noqa: E402

from tiny import is_packed  # noqa: E402

pytestmark = pytest.mark.contract


def layer_with(monkeypatch, has_it, *, double=True, bias=False):
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: has_it)
    torch.manual_seed(0)
    layer = Linear4bit(128, 64, bias=bias, compute_dtype=torch.float32, compress_statistics=double, quant_type="nf4")
    return layer.to("cpu").eval()


def test_a_layer_packs_its_weight_by_an_attribute_of_its_own(monkeypatch):
    # what multiplies packed weights is missing on other processors; the packing itself is not
    monkeypatch.setattr("bitsandbytes.matmul_4bit", lambda x, weight, **how: x)
    assert vars(layer_with(monkeypatch, False))["support_avx512bf16_for_cpu"] is False
    layer = layer_with(monkeypatch, True)
    assert vars(layer)["support_avx512bf16_for_cpu"] is True
    layer.train()(torch.zeros(1, 128))
    layer.eval()(torch.zeros(1, 128, requires_grad=True))
    assert not is_packed(layer)
    layer(torch.zeros(1, 128))
    assert is_packed(layer)

    kept = layer_with(monkeypatch, True)
    kept.support_avx512bf16_for_cpu = False
    kept(torch.zeros(1, 128))
    assert not is_packed(kept)


@pytest.mark.parametrize("double", [True, False])
def test_packing_rounds_the_scales(double, monkeypatch):
    layer = layer_with(monkeypatch, True, double=double)
    _, state = functional._convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)
    assert state.absmax.dtype == torch.bfloat16
    assert state.packing_format_for_cpu


@pytest.mark.parametrize("bias", [True, False])
def test_an_unpacked_product_is_the_dequantised_one_with_and_without_a_gradient(bias, monkeypatch):
    layer = layer_with(monkeypatch, False, bias=bias)
    weight = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    for tokens in (1, 7):
        x = torch.randn(tokens, 128)
        expected = torch.nn.functional.linear(x, weight, layer.bias)
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer(x.clone().requires_grad_()), expected)
