"""Loading an artifact whole: a base that is not there, and gates that are to train again."""

import pytest

import loragate as lg
from loragate.errors import ArtifactError, GateError
from loragate.gates import train_gates_only
from loragate.gates.schema import read_gate_config
from tiny import tiny_adapter, tiny_base


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("loading")
    tiny_base().save_pretrained(root / "base")
    model = lg.attach_gates(tiny_adapter(), lg.GateConfig(-6, 3))
    lg.save_gates(model, root / "absolute", base_id=str(root / "base"))
    lg.save_gates(model, root / "relative", base_id="base")
    lg.save_gates(model, root / "dotted", base_id="./base")
    return root


def test_a_base_that_is_not_there_is_named(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    assert lg.load_gated("relative").config.hidden_size == 32
    with pytest.raises(ArtifactError, match="the base nobase is no folder here"):
        lg.load_gated("relative", base="nobase")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match=r"the recorded base base is no folder here \(a relative path.*base=…"):
        lg.load_gated(place / "relative")
    with pytest.raises(
        ArtifactError, match=r"the recorded base \./base is a relative path that leads to no folder.*base=…"
    ):
        lg.load_gated(place / "dotted")
    assert lg.load_gated(place / "dotted", base=place / "base").config.hidden_size == 32
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"the base .*empty cannot be loaded \("):
        lg.load_gated(place / "dotted", base=tmp_path / "empty")


def test_loaded_gates_are_frozen_until_asked_to_train(place, token_ids):
    model = lg.load_gated(place / "absolute")
    train_gates_only(model)
    lg.topk_entropy(model(token_ids).logits, 20).mean().backward()
    assert all(parameter.grad is not None for parameter in lg.gate_parameters(model).values())


def test_the_base_that_was_loaded_is_recorded_where_the_adapter_names_none(place, tmp_path, caplog):
    from transformers import AutoModelForCausalLM

    model = tiny_adapter(base=AutoModelForCausalLM.from_pretrained(place / "base"))
    model.peft_config["default"].base_model_name_or_path = None
    lg.attach_gates(model, lg.GateConfig(-6, 3))
    with caplog.at_level("WARNING", logger="loragate"):
        lg.save_gates(model, tmp_path / "named")
        assert caplog.text == ""
        assert read_gate_config(tmp_path / "named")["base"]["id"] == str(place / "base")
        assert lg.load_gated(tmp_path / "named") is not None
        lg.save_gates(lg.attach_gates(tiny_adapter(), lg.GateConfig(-6, 3)), tmp_path / "unnamed")
    assert "base_id=" in caplog.text
    with pytest.raises(ArtifactError, match=r"key 'base\.id' is empty; say which base with base=…"):
        lg.load_gated(tmp_path / "unnamed")


def test_gates_go_onto_a_named_adapter_once(place):
    model = tiny_adapter(name="mine")
    with pytest.raises(GateError, match=r"no LoRA adapter named 'zz' \(it has mine\)"):
        lg.load_gates(model, place / "absolute", adapter_name="zz")
    lg.load_gates(model, place / "absolute")
    with pytest.raises(GateError, match=r"'mine' carries gates already.*detach_gates"):
        lg.load_gates(model, place / "absolute")
    assert lg.gate_parameters(model)
