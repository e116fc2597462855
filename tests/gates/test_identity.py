"""The sample of a base: norms of every shape of model are in it; a record of other names is compared. Parity changes nothing."""

import pytest
import torch

import loragate as lg
from loragate.errors import ArtifactError
from loragate.files import write_json
from loragate.gates import identity
from loragate.gates.identity import base_weight_samples, compare_base_samples
from loragate.gates.schema import CONFIG, read_gate_config
from tiny import tiny_adapter, tiny_base

NARROW = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}


def deep_base(layers: int, shift: float = 0.0):
    """A base of so many layers; `shift` moves its norms alone."""
    base = tiny_base(num_hidden_layers=layers, **NARROW)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if "norm" in name:
                parameter.add_(shift)
    return base


@pytest.mark.parametrize("layers", [1, 2, 24, 28, 36, 48, 64])
def test_norms_are_recorded_whatever_the_number_of_layers(layers):
    """At equal distances in the list of all names there would be none with 24, 28, 36, 48 or 64 layers."""
    base = deep_base(layers)
    record = base_weight_samples(base)
    norms = [name for name in record["values"] if "norm" in name]
    assert len(norms) == min(12, 2 * layers + 1)
    assert {"model.layers.0.input_layernorm.weight", "model.norm.weight"} <= set(norms)
    assert {name.split(".")[-2] for name in norms} == {"input_layernorm", "post_attention_layernorm", "norm"}
    assert "model.embed_tokens.weight" in record["values"]
    assert len(record["values"]) == min(24, len(list(base.parameters())))
    assert compare_base_samples(base, record) is None
    assert "norm" in compare_base_samples(deep_base(layers, 0.5), record)


@pytest.mark.parametrize("record", ["float32", "bfloat16", "float16", "bfloat16+float32"])
@pytest.mark.parametrize("here", ["float32", "bfloat16", "float16"])
def test_a_sibling_is_another_base_whatever_both_dtypes(record, here):
    """One checkpoint agrees in every pair of dtypes; one whose weights are a bf16 step off agrees in none that can tell."""

    def base(dtype, step=0):
        model = tiny_base(num_hidden_layers=1, **NARROW).to(torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(torch.int16).add_(step * (parameter != 0))
        return model.to(getattr(torch, dtype))

    stored = base_weight_samples(base(record.split("+")[0])) | {"dtype": record}
    assert compare_base_samples(base(here), stored) is None
    sibling = compare_base_samples(base(here, 1), stored)
    assert (sibling is None) == ({*record.split("+"), here} >= {"bfloat16", "float16"})


def earlier_choice(base):
    """The record as the first versions wrote it: names at equal distances in the list of all."""
    parameters = dict(base.named_parameters())
    names = sorted(parameters)
    chosen = names[:: max(1, len(names) // 24)][:24]
    return {"dtype": "float32", "values": {name: identity._sampled(parameters[name], 4).tolist() for name in chosen}}


def test_a_record_of_other_names_is_compared_by_its_own(tmp_path):
    record = earlier_choice(deep_base(24))
    assert not any("norm" in name for name in record["values"])
    folder = lg.save_gates(
        lg.attach_gates(tiny_adapter(base=deep_base(24), target_modules=["q_proj"]), lg.GateConfig(-3, 2)),
        tmp_path / "gated",
        base_id="somewhere",
    )
    written = read_gate_config(folder)
    assert written["base"]["weights"]["values"].keys() != record["values"].keys()
    write_json(folder / CONFIG, {**written, "base": {**written["base"], "weights": record}})
    lg.load_gates(tiny_adapter(base=deep_base(24), target_modules=["q_proj"]), folder)
    other = tiny_base(seed=7, num_hidden_layers=24, **NARROW)
    with pytest.raises(ArtifactError, match="another base"):
        lg.load_gates(tiny_adapter(base=other, target_modules=["q_proj"]), folder)


def test_a_base_with_other_positions_is_warned_of_where_the_record_says_which(tmp_path, caplog):
    """Shape and weights are those of the base, so that nothing else tells; artifacts of earlier versions say nothing."""

    def model(**rope):
        return tiny_adapter(base=tiny_base(**NARROW, **rope), target_modules=["q_proj"])

    folder = lg.save_gates(lg.attach_gates(model(), lg.GateConfig(-3, 2)), tmp_path / "gated", base_id="somewhere")
    lg.load_gates(model(), folder)
    assert caplog.text == ""
    longer = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}
    lg.load_gates(model(**longer), folder)
    assert "RoPE: rope_type = default; here it is rope_type = linear" in caplog.text
    caplog.clear()
    written = read_gate_config(folder)
    del written["base"]["rope"]
    write_json(folder / CONFIG, written)
    lg.load_gates(model(**longer), folder)
    assert caplog.text == ""
