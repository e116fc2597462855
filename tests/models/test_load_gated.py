"""Loading an artifact whole: a base that is not there, and gates that are to train again."""

import pytest
import torch
import transformers as tf
from peft import LoraConfig, PeftModel, get_peft_model

import loragate as lg
from loragate.errors import ArtifactError, LoragateError
from loragate.gates.schema import read_gate_config
from tiny import logits, tiny_adapter, tiny_base


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
    with pytest.raises(ArtifactError, match=r"base model nobase: no such folder.*--base"):
        lg.load_gated("relative", base="nobase")
    monkeypatch.chdir(tmp_path)
    for name in ("relative", "dotted"):
        with pytest.raises(ArtifactError, match=r"base model .*base: no such folder.*--base"):
            lg.load_gated(place / name)
    assert lg.load_gated(place / "dotted", base=place / "base").config.hidden_size == 32
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoragateError, match=r"base model .*empty cannot be loaded"):
        lg.load_gated(place / "dotted", base=tmp_path / "empty")


def test_the_base_that_was_loaded_is_recorded_where_the_adapter_names_none(place, tmp_path, caplog):
    model = tiny_adapter(base=tf.AutoModelForCausalLM.from_pretrained(place / "base"))
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_adapter_that_was_rounded_while_it_was_loaded_is_told_how_to_load(place, dtype):
    def loaded(**how):
        base = tf.AutoModelForCausalLM.from_pretrained(place / "base", dtype=dtype)
        return PeftModel.from_pretrained(base, place / "absolute" / "adapter", **how)

    with pytest.raises(ArtifactError, match=r"another adapter .*factors in fp32.*autocast_adapter_dtype=True"):
        lg.load_gates(loaded(autocast_adapter_dtype=False), place / "absolute")
    gates = lg.gate_parameters(lg.load_gates(loaded(), place / "absolute"))
    assert {parameter.dtype for parameter in gates.values()} == {torch.float32}


def test_models_of_another_class_are_told_how_to_load(tmp_path, token_ids):
    shape = {"vocab_size": 160, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    bases = {
        "SEQ_CLS": (tf.Qwen2ForSequenceClassification, tiny_base().config),
        "SEQ_2_SEQ_LM": (tf.T5ForConditionalGeneration, tf.T5Config(**shape, decoder_start_token_id=0)),
        None: (tf.T5ForConditionalGeneration, tf.T5Config(**shape, decoder_start_token_id=0)),
    }
    for task, (kind, config) in bases.items():
        torch.manual_seed(0)
        kind(config).save_pretrained(tmp_path / f"base-{task}")
        record = LoraConfig(task_type=task, r=2, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(kind.from_pretrained(tmp_path / f"base-{task}"), record).eval()
        folder = lg.save_gates(lg.attach_gates(model, lg.GateConfig(-1, 2)), tmp_path / f"gated-{task}")
        said = f"task_type is {task}" if task else "has the configuration .*T5Config"
        with pytest.raises(LoragateError, match=rf"causal language models.*{said}.*PeftModel.*load_gates"):
            lg.load_gated(folder, base=tmp_path / f"base-{task}")
        again = PeftModel.from_pretrained(kind.from_pretrained(tmp_path / f"base-{task}"), folder / "adapter").eval()
        lg.load_gates(again, folder)
        more = {"decoder_input_ids": token_ids} if kind is tf.T5ForConditionalGeneration else {}
        with torch.no_grad():
            assert torch.equal(again(input_ids=token_ids, **more).logits, model(input_ids=token_ids, **more).logits)


@pytest.mark.parametrize("whole", [None, ["embed_tokens", "lm_head"]])
def test_added_tokens_are_told_how_to_load(whole, place, tmp_path, token_ids):
    def enlarged(seed):
        torch.manual_seed(seed)
        base = tf.AutoModelForCausalLM.from_pretrained(place / "base")
        base.resize_token_embeddings(170)
        return base

    model = tiny_adapter(base=enlarged(0), target_modules=["q_proj"], modules_to_save=whole)
    folder = lg.save_gates(lg.attach_gates(model, lg.GateConfig(-1, 2)), tmp_path / "gated")
    with pytest.raises(ArtifactError, match=r"does not fit this base .*170.*resize_token_embeddings.*load_gates"):
        lg.load_gated(folder)
    again = PeftModel.from_pretrained(enlarged(1), folder / "adapter").eval()
    lg.load_gates(again, folder)
    assert torch.equal(logits(again, token_ids), logits(model, token_ids))
