"""A base, an adapter and a gated folder are opened in one way, and compute what their parts put together by hand compute."""

import json
import re

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

import loragate as lg
from loragate.doctor.static import examine_static
from loragate.errors import ConfigError, GateError, LoragateError
from loragate.gates.schema import read_gate_config
from loragate.gates.strength import lora_paths, modules_of_part, scale_adapter
from loragate.models import (
    Loading,
    ModelRef,
    load_adapter,
    open_base,
    open_model,
    open_tokenizer,
    open_without_weights,
    resolve,
)
from loragate.serving.vllm_server import stopping_arguments
from tiny import logits, shake, tiny_adapter, tiny_base, tiny_tokenizer, write_adapter, write_base

CPU = Loading(device="cpu")


@pytest.fixture(scope="module")
def place(saved, tmp_path_factory):
    """base/, adapter/ on it, gated/ with gates that act, idle/ whose gates are off."""
    root = tmp_path_factory.mktemp("opened")
    for name in ("base", "adapter", "gated"):
        (root / name).symlink_to(saved / name)
    off = {"selection": {"accepted": False}}
    model = shake(lg.attach_gates(tiny_adapter(), lg.GateConfig(-3, 2)), 0)
    lg.save_gates(model, root / "idle", base_id=str(root / "base"), stop_token_ids=[7], evidence=off)
    return root


def test_each_kind_is_what_its_parts_make(saved, place, token_ids):
    model = lg.load_gated(place / "gated")
    with lg.gates_disabled(model):
        adapter = logits(model, token_ids)
    with model.disable_adapter():
        base = logits(model, token_ids)
    gated = logits(model, token_ids)
    assert not torch.equal(gated, adapter)
    for name, kind, expected in (("base", "base", base), ("adapter", "adapter", adapter), ("gated", "gated", gated)):
        loaded = open_model(resolve(place / name), CPU)
        assert (loaded.kind, loaded.dtype, loaded.commit) == (kind, "float32", "")
        assert torch.equal(logits(loaded.model, token_ids), expected), name
        assert not any(parameter.requires_grad for parameter in loaded.model.parameters()) or kind == "base"
        assert len(loaded.tokenizer) == len(tiny_tokenizer())
        assert loaded.names["base"] == str((saved if kind != "base" else place) / "base")
        held = open_base(ModelRef(str(place / "base")), CPU)
        if kind != "base":
            assert torch.equal(logits(load_adapter(held, resolve(place / name)), token_ids), expected), name


def test_an_override_behind_the_name_is_laid_over_lambda(place, token_ids):
    adapter = logits(open_model(resolve(place / "adapter"), CPU).model, token_ids)
    off = open_model(resolve(f"{place / 'gated'}@off", allow_override=True), CPU).model
    torch.testing.assert_close(logits(off, token_ids), adapter)
    torch.testing.assert_close(logits(lg.load_gated(f"{place / 'gated'}@off"), token_ids), adapter)
    plain = open_model(resolve(f"{place / 'adapter'}@constant=0", allow_override=True), CPU).model
    base = logits(open_model(resolve(place / "base"), CPU).model, token_ids)
    torch.testing.assert_close(logits(plain, token_ids), base)
    held = open_model(resolve(place / "adapter"), CPU).model
    with scale_adapter(held, dict.fromkeys(modules_of_part("lower", lora_paths(held)), 0.5)):
        expected = logits(held, token_ids)
    for kind in ("adapter", "gated"):
        part = open_model(resolve(f"{place / kind}@lower=0.5", allow_override=True), CPU).model
        torch.testing.assert_close(logits(part, token_ids), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(GateError, match="λ for upper would have no effect"):
        open_model(resolve(f"{place / 'adapter'}@upper=0.5", allow_override=True), CPU)
    with pytest.raises(ConfigError, match="plain adapter has no gates"):
        open_model(resolve(f"{place / 'adapter'}@unit", allow_override=True), CPU)
    with pytest.raises(ConfigError, match="override of λ"):
        resolve(place / "adapter", f"{place / 'base'}@unit")
    for base in (place / "base", "owner/name"):
        with pytest.raises(ConfigError, match=r"override of λ \(@unit\) has no effect"):
            resolve(f"{base}@unit", allow_override=True)


def test_custom_code_is_trusted_for_the_endings_too(place, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass Mine(LlamaConfig):\n    model_type = 'mine'\n"
    )
    tiny_tokenizer().save_pretrained(tmp_path)
    record = json.loads((place / "base" / "config.json").read_text())
    record |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}, "eos_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(LoragateError, match="custom code"):
        open_without_weights(resolve(tmp_path), CPU)
    loaded = open_without_weights(resolve(tmp_path), Loading(device="cpu", trust_remote_code=True))
    assert 5 in loaded.endings.token_ids
    asked = stopping_arguments(loaded.tokenizer, loaded.model_source, {}, tmp_path, trust=True)
    assert asked == stopping_arguments(tiny_tokenizer(), resolve(place / "base"), {}, tmp_path)


def test_a_bases_text_is_split_as_auto_tokenizer_does(tmp_path):
    core = Tokenizer(BPE({text: id for id, text in enumerate(sorted(ByteLevel.alphabet()))}, []))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)  # which transformers does not take of a Qwen2 folder
    tf.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>").save_pretrained(tmp_path)
    tiny_base().config.save_pretrained(tmp_path)
    own, theirs = open_tokenizer(resolve(tmp_path)), tf.AutoTokenizer.from_pretrained(tmp_path)
    assert str(own.backend_tokenizer.pre_tokenizer) == str(theirs.backend_tokenizer.pre_tokenizer)
    assert type(own) is type(theirs) is not tf.PreTrainedTokenizerFast


def test_idle_gates_are_taken_off_and_their_endings_stay(place):
    for opening in (open_model, open_without_weights):
        loaded = opening(resolve(place / "idle"), CPU).detach_inactive_gates()
        assert loaded.kind == "adapter"
        assert "are off: nothing beat the adapter" in loaded.note
        assert loaded.names["adapter"] == str(place / "idle" / "adapter")
        assert 7 in loaded.endings.token_ids
    assert read_gate_config(place / "idle")["stop_token_ids"] == [7]


def test_what_does_not_fit_is_said_in_one_sentence(place, tmp_path):
    tiny_base(hidden_size=64).save_pretrained(tmp_path / "wider")
    with pytest.raises(LoragateError, match="does not fit this base model"):
        open_model(resolve(place / "adapter", tmp_path / "wider"), CPU)
    with pytest.raises(ConfigError, match="--device cuda:99"):
        open_model(resolve(place / "base"), Loading(device="cuda:99"))
    with pytest.raises(ConfigError, match="float8"):
        open_model(resolve(place / "base"), Loading(dtype="float8"))


@pytest.mark.parametrize("rest", [b"", b"version https://git-lfs.github.com/spec/v1\n"], ids=["cut off", "not fetched"])
def test_weights_of_a_base_that_cannot_be_read_are_named(tmp_path, rest):
    tiny_base().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    weights = tmp_path / "base" / "model.safetensors"
    weights.write_bytes(rest or weights.read_bytes()[:-100])
    with pytest.raises(LoragateError, match=r"base/model.safetensors cannot be read .*Fetch it again"):
        open_model(resolve(tmp_path / "base"), CPU)


def test_only_causal_language_models_are_bases(place, tmp_path):
    """Judged by the base's own class, and not by an adapter's label."""
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 160,
    }
    for kind, config in (
        (tf.BertForMaskedLM, tf.BertConfig(**small)),
        (tf.LlamaForSequenceClassification, tf.LlamaConfig(**small)),
        (
            tf.T5ForConditionalGeneration,
            tf.T5Config(vocab_size=160, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4),
        ),
        (tf.Qwen2Model, tf.Qwen2Config(**small, tie_word_embeddings=False)),  # whose head would be random
    ):
        folder = tmp_path / kind.__name__
        kind(config).save_pretrained(folder)
        words = "does not hold lm_head.weight" if kind is tf.Qwen2Model else rf"{kind.__name__}|T5Config"
        for given in ((folder,), (place / "adapter", folder)):
            with pytest.raises(LoragateError, match=words):
                open_model(resolve(*given), CPU)
        if kind is not tf.Qwen2Model:
            found = examine_static(str(place / "adapter"), str(folder))[1]
            assert any(one.code == "task-type" and re.search(words, one.message) for one in found)


def test_a_chat_template_without_a_tokenizer_is_not_used_in_silence(tmp_path, caplog):
    write_base(tmp_path / "base")
    write_adapter(tmp_path / "adapter", tmp_path / "base", target_modules=["q_proj"])
    lone = tmp_path / "adapter" / "chat_template.jinja"
    template = open_tokenizer(resolve(tmp_path / "adapter")).chat_template
    lone.write_text(template)
    assert open_tokenizer(resolve(tmp_path / "adapter")).chat_template == template
    assert caplog.text == "", "it is the base's own"
    lone.write_text("{{ messages[0]['content'] }}")
    assert open_tokenizer(resolve(tmp_path / "adapter")).chat_template == template
    assert f"{lone} is not used, as no tokenizer lies beside it" in caplog.text
