"""The artifact: round trip, byte-for-byte adapter, and every way it must refuse."""

import json
import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file

import loragate as lg
from loragate.errors import ArtifactError, ConfigError, GateError, LoragateError
from loragate.files import file_sha256
from loragate.gates import attached_config
from loragate.gates.schema import gate_metadata, read_gate_config
from loragate.models import open_tokenizer, resolve
from tiny import chatml_tokenizer, logits, shake, tiny_adapter, tiny_base

CONFIG = lg.GateConfig(-3, 2)


@pytest.fixture
def folders(saved):
    """(base folder, adapter folder, gated folder)."""
    return saved / "base", saved / "adapter", saved / "gated"


@pytest.fixture
def gated(folders, tmp_path):
    shutil.copytree(folders[2], tmp_path / "gated")
    return tmp_path / "gated"


@pytest.fixture
def loaded(folders):
    return PeftModel.from_pretrained(tiny_base(), folders[1])


def rewrite(folder, change):
    path = folder / "gate_config.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def resave(folder, tensors):
    gate = json.loads((folder / "gate_config.json").read_text())["gate"]
    save_file(tensors, folder / "gates.safetensors", metadata=gate_metadata(gate))
    rewrite(folder, lambda record: record.update(gates_sha256=file_sha256(folder / "gates.safetensors")))


def test_round_trip_is_exact(folders, loaded, token_ids):
    _, adapter, gated = folders
    expected = logits(shake(lg.attach_gates(tiny_adapter(), CONFIG), 0.5), token_ids)
    lg.load_gates(loaded, gated)
    assert torch.equal(logits(loaded, token_ids), expected)
    model = lg.load_gated(gated)
    assert torch.equal(logits(model, token_ids), expected)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (gated / "adapter" / name).read_bytes() == (adapter / name).read_bytes()
    files = ["README.md", "adapter", "gate_config.json", "gates.safetensors"]
    assert sorted(path.name for path in gated.iterdir()) == files


@pytest.mark.parametrize("granularity", ["token", "module", "global"])
def test_every_granularity_round_trips(tmp_path, folders, granularity, token_ids):
    model = PeftModel.from_pretrained(tiny_base(), folders[1])
    shake(lg.attach_gates(model, lg.GateConfig(-3, 1, granularity=granularity, target_modules=["q_proj", "up_proj"])))
    expected = logits(model, token_ids)
    lg.save_gates(model, tmp_path / "gated", adapter_source=folders[1])
    assert torch.equal(logits(lg.load_gated(tmp_path / "gated"), token_ids), expected)


@pytest.mark.parametrize("where", [".", "tokenizer"])
def test_the_tokenizer_of_the_source_comes_along(tmp_path, folders, where):
    shutil.copytree(folders[1], tmp_path / "adapter")
    tokenizer = chatml_tokenizer()  # the base has another template
    tokenizer.save_pretrained(tmp_path / "adapter" / where)
    model = lg.attach_gates(PeftModel.from_pretrained(tiny_base(), tmp_path / "adapter"), CONFIG)
    gated = lg.save_gates(model, tmp_path / "gated", adapter_source=tmp_path / "adapter")
    assert open_tokenizer(resolve(gated)).chat_template == tokenizer.chat_template
    lg.load_gated(gated)


def test_plain_programs_find_no_adapter_at_the_top(folders):
    with pytest.raises((ValueError, OSError)):
        PeftModel.from_pretrained(tiny_base(), folders[2])


def test_nothing_is_overwritten(folders, loaded):
    lg.load_gates(loaded, folders[2])
    before = (folders[2] / "gate_config.json").read_bytes()
    with pytest.raises(ArtifactError, match="already holds a gated adapter"):
        lg.save_gates(loaded, folders[2])
    assert (folders[2] / "gate_config.json").read_bytes() == before


def test_a_readme_of_the_users_is_kept_and_a_card_of_an_interrupted_write_is_not(tmp_path, loaded, monkeypatch):
    lg.attach_gates(loaded, CONFIG)
    (tmp_path / "README.md").write_text("my notes")
    with pytest.raises(ArtifactError, match=r"README\.md would be overwritten by the model card"):
        lg.save_gates(loaded, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    lg.save_gates(loaded, tmp_path / "gated")
    (tmp_path / "gated" / "gate_config.json").unlink()
    lg.save_gates(loaded, tmp_path / "gated")
    assert (tmp_path / "gated" / "gate_config.json").exists()


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_adapter_folder_that_no_artifact_wrote_is_never_overwritten(tmp_path, folders, loaded, overwrite):
    lg.attach_gates(loaded, CONFIG)
    own = tmp_path / "project" / "adapter"  # a training's own folder
    shutil.copytree(folders[1], own / "checkpoint-100")
    (own / "notes.txt").write_text("mine")
    before = contents(tmp_path)
    for more in ({}, {"adapter_source": folders[1]}, {"adapter_source": own / "checkpoint-100"}):
        with pytest.raises(ArtifactError, match=r"adapter exists, and no gated adapter wrote it.*another folder"):
            lg.save_gates(loaded, tmp_path / "project", overwrite=overwrite, **more)
    with pytest.raises(ArtifactError, match="no gated adapter wrote it"):
        loaded.save_pretrained(tmp_path / "project")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kept", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_gates_are_not_put_around_a_plain_adapter(tmp_path, loaded, kept, overwrite):
    """Which other programs would load, without a word."""
    lg.attach_gates(loaded, CONFIG)
    (tmp_path / kept).write_text("{}")
    with pytest.raises(ArtifactError, match=rf"{kept} is of a plain adapter.*choose another folder"):
        lg.save_gates(loaded, tmp_path, overwrite=overwrite)
    with pytest.raises(ArtifactError, match="is of a plain adapter"):
        loaded.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [kept]


def test_a_generation_config_is_removed_with_an_artifact_alone(tmp_path, loaded):
    lg.attach_gates(loaded, CONFIG)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7}')
    with pytest.raises(ArtifactError, match=r"generation_config\.json would not be that of these gates"):
        lg.save_gates(loaded, tmp_path, temperature=0, overwrite=True)
    with pytest.raises(ArtifactError, match=r"generation_config\.json would not be that of these gates"):
        lg.save_gates(loaded, tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["generation_config.json"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_link_is_not_written_through(tmp_path, folders, loaded, overwrite):
    lg.save_gates(lg.attach_gates(loaded, CONFIG), tmp_path / "gated")
    shutil.rmtree(tmp_path / "gated" / "adapter")
    shutil.copytree(folders[1], tmp_path / "shared")
    (tmp_path / "gated" / "adapter").symlink_to(tmp_path / "shared")
    before = contents(tmp_path)
    if not overwrite:
        (tmp_path / "gated" / "gate_config.json").unlink()
        before = contents(tmp_path)
    with pytest.raises(ArtifactError, match=r"adapter is a link to .*shared"):
        lg.save_gates(loaded, tmp_path / "gated", overwrite=overwrite)
    assert contents(tmp_path) == before


def test_a_source_inside_the_adapter_that_is_replaced_is_refused(tmp_path, folders, loaded):
    gated = lg.save_gates(lg.attach_gates(loaded, CONFIG), tmp_path / "gated")
    source = shutil.copytree(folders[1], gated / "adapter" / "checkpoint-100")
    before = contents(tmp_path)
    with pytest.raises(ArtifactError, match=r"checkpoint-100, the adapter's source, lies in .*adapter"):
        lg.save_gates(loaded, gated, adapter_source=source, overwrite=True)
    assert contents(tmp_path) == before


def test_gates_may_be_put_beside_their_own_adapter_which_stays_as_it_is(tmp_path, folders, loaded):
    shutil.copytree(folders[1], tmp_path / "adapter")
    (tmp_path / "adapter" / "optimizer.pt").write_bytes(b"state")
    before = contents(tmp_path / "adapter")
    lg.attach_gates(loaded, CONFIG)
    for overwrite in (False, True):
        lg.save_gates(loaded, tmp_path, adapter_source=tmp_path / "adapter", overwrite=overwrite)
        assert contents(tmp_path / "adapter") == before
    shutil.copytree(tmp_path / "adapter", tmp_path / "other" / "adapter")
    other = lg.attach_gates(tiny_adapter(seed=5), CONFIG)  # than the folder holds
    with pytest.raises(ArtifactError, match="does not hold the adapter as it is loaded, so it would be overwritten"):
        lg.save_gates(other, tmp_path / "other", adapter_source=tmp_path / "other" / "adapter")
    assert contents(tmp_path / "other" / "adapter") == before


def test_a_gate_that_is_not_finite_is_not_written(tmp_path, loaded):
    lg.attach_gates(loaded, CONFIG)
    with torch.no_grad():
        next(iter(lg.gate_parameters(loaded).values()))[0] = float("nan")
    with pytest.raises(GateError, match="not finite"):
        lg.save_gates(loaded, tmp_path / "gated")
    assert not (tmp_path / "gated").exists()


def test_a_strength_that_was_changed_in_memory_is_not_lost_without_a_word(tmp_path, folders):
    """No file of an adapter says what set_scale did."""
    model = lg.attach_gates(tiny_adapter(), CONFIG)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.set_scale("default", 0.5)
    with pytest.raises(ArtifactError, match=r"changed in memory \(set_scale.*set it back before saving"):
        lg.save_gates(model, tmp_path / "out", base_id=str(folders[0]))
    assert not (tmp_path / "out" / "gate_config.json").exists()


def test_a_full_disk_leaves_no_readable_artifact(tmp_path, loaded, monkeypatch):
    lg.attach_gates(loaded, CONFIG)
    real = os.fsync
    calls = []

    def failing(descriptor):
        calls.append(descriptor)
        if len(calls) > 4:
            raise OSError(28, "No space left on device")
        return real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(LoragateError, match="the disk is full"):
        lg.save_gates(loaded, tmp_path / "gated")
    assert not (tmp_path / "gated" / "gate_config.json").exists()
    assert list(tmp_path.rglob("*.partial")) == []
    monkeypatch.undo()
    lg.save_gates(loaded, tmp_path / "gated")
    assert (tmp_path / "gated" / "gate_config.json").exists(), "the same folder can be used once there is room"


def change_gates(key, make):
    def change(folder):
        tensors = load_file(folder / "gates.safetensors")
        make(tensors, key)
        resave(folder, tensors)

    return change


Q = "model.layers.0.self_attn.q_proj.weight"
REFUSALS = {
    "tampered": (lambda f: (f / "gates.safetensors").write_bytes(b"x" * 100), "sha256"),
    "no gates file": (lambda f: (f / "gates.safetensors").unlink(), "incomplete"),
    "other format": (lambda f: rewrite(f, lambda r: r.update(format="peft")), "not a gated adapter"),
    "missing key": (lambda f: rewrite(f, lambda r: r.pop("modules")), "'modules' is missing"),
    "unknown gate key": (lambda f: rewrite(f, lambda r: r["gate"].update(power=2)), "gate.power"),
    "bad range": (lambda f: rewrite(f, lambda r: r["gate"].update(lower=1)), "lower bound"),
    "changed range": (lambda f: rewrite(f, lambda r: r["gate"].update(lower=-5.0)), "is not what gates.safetensors"),
    "wrong type": (lambda f: rewrite(f, lambda r: r["gate"].update(tau="1")), "gate.tau"),
    "not JSON": (lambda f: (f / "gate_config.json").write_text("{"), "not valid JSON"),
    "a number without end": (lambda f: rewrite(f, lambda r: r["gate"].update(lower=-(10**400))), "more than 64 bits"),
    "a seed without end": (lambda f: rewrite(f, lambda r: r["gate"].update(seed=2**64)), "more than 64 bits"),
    "NaN in JSON": (lambda f: (f / "gate_config.json").write_text('{"format": NaN}'), "NaN is not allowed"),
    "missing tensor": (change_gates(Q, lambda t, k: t.pop(k)), "is missing"),
    "extra tensor": (
        change_gates(Q, lambda t, k: t.update({"model.extra.weight": t[k].clone()})),
        "belongs to no gate",
    ),
    "wrong shape": (
        change_gates(Q, lambda t, k: t.update({k: t[k][:-1].clone()})),
        r"has shape \(31,\), expected \(32,\)",
    ),
    "wrong dtype": (change_gates(Q, lambda t, k: t.update({k: t[k].half()})), "dtype float16"),
    "NaN": (change_gates(Q, lambda t, k: t[k].fill_(float("nan"))), "NaN or infinity"),
    "missing module": (lambda f: rewrite(f, lambda r: r["modules"].pop()), "belongs to no gate"),
    "extra module": (lambda f: rewrite(f, lambda r: r["modules"].append("model.new")), "model.new.bias is missing"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_are_clear_and_leave_the_model_ungated(gated, loaded, case, token_ids):
    break_it, words = REFUSALS[case]
    break_it(gated)
    plain = logits(loaded, token_ids)
    with pytest.raises(ArtifactError, match=words) as caught:
        lg.load_gates(loaded, gated)
    assert str(gated) in str(caught.value), "the message names the file"
    assert torch.equal(logits(loaded, token_ids), plain)
    with pytest.raises(GateError):
        lg.gate_parameters(loaded)


def test_another_adapter_or_base_is_refused(gated, folders):
    with pytest.raises(ArtifactError, match="belong to another adapter"):
        lg.load_gates(tiny_adapter(seed=8), gated)
    rescaled = PeftModel.from_pretrained(tiny_base(), folders[1])
    for module in rescaled.modules():
        if isinstance(module, LoraLayer):
            module.scaling["default"] *= 2
    with pytest.raises(ArtifactError, match="belong to another adapter"):
        lg.load_gates(rescaled, gated)
    with pytest.raises(ArtifactError, match="another base"):
        lg.load_gates(PeftModel.from_pretrained(tiny_base(seed=4), folders[1]), gated)
    slightly = tiny_base()
    with torch.no_grad():
        slightly.model.embed_tokens.weight[0, 0] += 1e-3
    with pytest.raises(ArtifactError, match=r"another base .*embed_tokens"):
        lg.load_gates(PeftModel.from_pretrained(slightly, folders[1]), gated)
    other = PeftModel.from_pretrained(tiny_base(tie_word_embeddings=False), folders[1])
    with pytest.raises(ArtifactError, match="another architecture"):
        lg.load_gates(other, gated)


def test_loading_errors_name_the_way_out(tmp_path, folders, gated):
    with pytest.raises(ArtifactError, match="does not exist"):
        lg.load_gated(tmp_path / "nowhere")
    rewrite(gated, lambda record: record["base"].update(id="/no/such/base"))
    with pytest.raises(ArtifactError, match="base="):
        lg.load_gated(gated)
    assert lg.load_gated(gated, base=folders[0]) is not None
    shutil.rmtree(gated / "adapter")
    with pytest.raises(ArtifactError, match="plain adapter is missing"):
        lg.load_gated(gated)


FUZZ = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@FUZZ
@given(data=st.binary(max_size=400))
def test_fuzzed_gate_files_never_load(gated, loaded, data):
    (gated / "gates.safetensors").write_bytes(data)
    rewrite(gated, lambda record: record.update(gates_sha256=file_sha256(gated / "gates.safetensors")))
    with pytest.raises(ArtifactError):
        lg.load_gates(loaded, gated)


@FUZZ
@given(data=st.data())
def test_fuzzed_configurations_give_a_clear_error_or_the_same_gates(gated, loaded, data, folders):
    record = json.loads((folders[2] / "gate_config.json").read_text())
    place = record
    key = data.draw(st.sampled_from(sorted(place)))
    if isinstance(place[key], dict) and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place)))
    place[key] = data.draw(JSON)
    (gated / "gate_config.json").write_text(json.dumps(record))
    try:
        lg.load_gates(loaded, gated)
    except ArtifactError:
        return
    parameters = lg.gate_parameters(loaded)
    stored = load_file(folders[2] / "gates.safetensors")
    assert {key: value.tolist() for key, value in parameters.items()} == {k: v.tolist() for k, v in stored.items()}
    assert attached_config(loaded) == CONFIG
    lg.detach_gates(loaded)


@FUZZ
@given(text=st.text(max_size=200) | st.binary(max_size=200))
def test_arbitrary_text_as_configuration_is_refused(gated, loaded, text):
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    (gated / "gate_config.json").write_bytes(data)
    with pytest.raises(ArtifactError):
        lg.load_gates(loaded, gated)


def test_a_source_that_is_not_the_loaded_adapter_is_not_copied(tmp_path, folders, caplog, token_ids):
    model = tiny_adapter(seed=5)
    model.peft_config["default"].base_model_name_or_path = str(folders[0])
    lg.attach_gates(model, CONFIG)
    with caplog.at_level("WARNING", logger="loragate"):
        lg.save_gates(model, tmp_path / "gated", adapter_source=folders[1])
        lg.save_gates(model, tmp_path / "other", adapter_source=tmp_path / "nope")
    assert "does not hold the adapter as it is loaded" in caplog.text
    assert f"{tmp_path / 'nope'} does not exist; the loaded adapter is written instead" in caplog.text
    assert torch.equal(logits(lg.load_gated(tmp_path / "gated"), token_ids), logits(model, token_ids))


@pytest.mark.parametrize("changed", [{"lora_alpha": 16}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 2}}])
def test_a_source_of_another_strength_is_not_copied(tmp_path, folders, caplog, token_ids, changed):
    config = PeftConfig.from_pretrained(folders[1])
    vars(config).update(changed)
    model = PeftModel.from_pretrained(tiny_base(), folders[1], config=config)
    lg.attach_gates(model, CONFIG)
    with caplog.at_level("WARNING", logger="loragate"):
        lg.save_gates(model, tmp_path / "gated", adapter_source=folders[1])
    assert "does not hold the adapter as it is loaded" in caplog.text
    assert torch.equal(logits(lg.load_gated(tmp_path / "gated"), token_ids), logits(model, token_ids))


WITHOUT_SOURCE = {
    "plain": {},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "adapted": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
}


@pytest.mark.parametrize("kind", WITHOUT_SOURCE)
def test_an_adapter_is_written_without_a_source(tmp_path, folders, kind, token_ids):
    """Without gate keys; embeddings and head that it keeps tied stay so."""
    model = tiny_adapter(**WITHOUT_SOURCE[kind])
    shake(lg.attach_gates(model, CONFIG))
    lg.save_gates(model, tmp_path / "gated", base_id=str(folders[0]))
    keys = load_file(tmp_path / "gated" / "adapter" / "adapter_model.safetensors").keys()
    assert keys
    assert not any("lora_gate" in key for key in keys)
    assert torch.equal(logits(lg.load_gated(tmp_path / "gated"), token_ids), logits(model, token_ids))


def test_gates_that_a_trainer_has_cast_are_written_as_the_reader_wants_them(tmp_path, folders):
    model = PeftModel.from_pretrained(tiny_base(), folders[1])
    shake(lg.attach_gates(model, CONFIG))
    for parameter in lg.gate_parameters(model).values():
        parameter.data = parameter.data.to(torch.bfloat16)  # as TRL does it on a 4-bit base
    lg.save_gates(model, tmp_path / "gated", adapter_source=folders[1])
    again = lg.gate_parameters(lg.load_gated(tmp_path / "gated"))
    for name, parameter in lg.gate_parameters(model).items():
        assert torch.equal(again[name], parameter.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_natively_loaded_adapter_round_trips(tmp_path, folders, dtype, token_ids):
    model = tiny_base().to(dtype)
    model.load_adapter(str(folders[1]))
    shake(lg.attach_gates(model, CONFIG))
    lg.save_gates(model, tmp_path / "gated", base_id=str(folders[0]))
    again = lg.load_gated(tmp_path / "gated", dtype=dtype)
    for name, parameter in lg.gate_parameters(again).items():
        assert torch.equal(parameter, lg.gate_parameters(model)[name])
    if dtype == torch.float32:  # PEFT computes bf16 factors in fp32, the native loader in bf16
        with torch.no_grad():
            torch.testing.assert_close(again(token_ids).logits, model(token_ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"evidence": {"paritee": {}}},
            r"'paritee'; did you mean 'parity'\? \(the keys are parity, selection, training\)",
        ),
        ({"evidence": {"training": {"loss": torch.ones(1)}}}, "evidence cannot be written as JSON"),
        ({"evidence": {"training": {"loss": float("nan")}}}, "evidence cannot be written as JSON"),
        ({"k": 1}, "k must be an integer of at least 2, or 0"),
        ({"k": 100, "evidence": {"training": {"settings": {"k": 20}}}}, "leave k out"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_anything_is_written(adapter, tmp_path, arguments, words):
    lg.attach_gates(adapter, CONFIG)
    with pytest.raises(ConfigError, match=words):
        lg.save_gates(adapter, tmp_path / "gated", **arguments)
    assert not (tmp_path / "gated").exists()


def test_stop_tokens_are_recorded_and_set_where_the_folder_is_loaded(adapter, tmp_path, folders):
    lg.attach_gates(adapter, CONFIG)
    lg.save_gates(adapter, tmp_path / "gated", base_id=str(folders[0]), stop_token_ids={9, 1, 4})
    assert json.loads((tmp_path / "gated" / "gate_config.json").read_text())["stop_token_ids"] == [1, 4, 9]
    gated = lg.load_gated(tmp_path / "gated")
    assert gated.generation_config.eos_token_id == [1, 4, 9]
    assert gated.get_base_model().generation_config is gated.generation_config
    assert lg.load_gated(folders[2]).generation_config.eos_token_id == 1, "a folder without the record changes nothing"
    for wrong in (5, ["5"], [True], [-1]):
        rewrite(tmp_path / "gated", lambda record, wrong=wrong: record.update(stop_token_ids=wrong))
        with pytest.raises(ArtifactError, match="stop_token_ids"):
            lg.load_gated(tmp_path / "gated")


def test_evidence_is_recorded_as_it_is_given(adapter, tmp_path):
    lg.attach_gates(adapter, CONFIG)
    lg.save_gates(
        adapter, tmp_path / "gated", k=0, base_id="a/b", evidence={"training": {"steps": 3}, "selection": None}
    )
    record = read_gate_config(tmp_path / "gated")
    assert (record["k"], record["parity"], record["selection"], record["training"]) == (0, None, None, {"steps": 3})
    folder = lg.save_gates(adapter, tmp_path / "other", base_id="a/b", evidence={"training": ["by hand"]})
    assert (read_gate_config(folder)["training"], read_gate_config(folder)["k"]) == (["by hand"], None)
    rewrite(tmp_path / "gated", lambda record: record.update(k=-4))
    with pytest.raises(ArtifactError, match="k must be at least 0, found -4"):
        read_gate_config(tmp_path / "gated")


@pytest.mark.parametrize(
    ("trained", "given", "recorded"),
    [(20, None, 20), (0, None, 160), (500, None, 160), (0, 160, 160), (20, 20, 20), (None, 30, 30), (None, None, None)],
)
def test_the_support_is_the_one_of_the_training(adapter, tmp_path, trained, given, recorded):
    lg.attach_gates(adapter, CONFIG)
    training = {"steps": 3, "settings": {"batch_size": 8} if trained is None else {"k": trained}}
    lg.save_gates(adapter, tmp_path / "gated", k=given, base_id="a/b", evidence={"training": training})
    assert read_gate_config(tmp_path / "gated")["k"] == recorded
