"""The recommended sampling of an artifact: written, read closed, set where the folder is loaded, and said with figures."""

import json

import pytest
import torch
from transformers import GenerationConfig

import loragate as lg
from loragate.errors import ArtifactError, ConfigError
from loragate.gates.recommended import SAMPLING, with_recommended
from loragate.gates.schema import read_gate_config
from loragate.models import resolve
from tiny import tiny_adapter, tiny_base


def gated():
    return lg.attach_gates(tiny_adapter(base=tiny_base()), lg.GateConfig(-3, 1))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base whose own generation config samples otherwise and stops at two tokens."""
    folder = tmp_path_factory.mktemp("recommended") / "base"
    model = tiny_base()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=20, top_p=0.8, min_p=0.1, repetition_penalty=1.1, eos_token_id=[1, 3]
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path, base):
    return lg.save_gates(gated(), tmp_path / "gated", temperature=0.3, base_id=str(base), stop_token_ids=[1, 9])


def test_written_as_transformers_writes_it_and_set_where_the_folder_is_loaded(folder):
    theirs = GenerationConfig.from_pretrained(folder)
    assert (theirs.do_sample, theirs.temperature, theirs.top_k, theirs.top_p) == (True, 0.3, 0, 1.0)
    assert resolve(folder).recommended_temperature == resolve(folder).as_plain_adapter.recommended_temperature == 0.3
    model = lg.load_gated(folder)
    told = model.generation_config
    assert (told.do_sample, told.temperature, told.top_k, told.top_p) == (True, 0.3, 0, 1.0)
    assert (told.min_p, told.repetition_penalty) == (None, 1.0), "what was not measured with must not act"
    assert told.eos_token_id == [1, 3, 9]
    assert model.get_base_model().generation_config is told


def test_greedy_decoding_can_be_recommended(tmp_path, base):
    folder = lg.save_gates(gated(), tmp_path / "gated", temperature=0, base_id=str(base))
    assert GenerationConfig.from_pretrained(folder).do_sample is False
    assert resolve(folder).recommended_temperature == 0.0
    model = lg.load_gated(folder)
    assert model.generation_config.do_sample is False
    prompt = torch.tensor([[5, 9, 20]])
    more = {"max_new_tokens": 6, "pad_token_id": 0}
    assert model.generate(prompt, **more).equal(model.generate(prompt, do_sample=False, repetition_penalty=1.0, **more))


def test_a_recommendation_goes_with_its_gates(folder, tmp_path, base):
    model = lg.load_gated(folder)
    lg.detach_gates(model)
    own, told = GenerationConfig.from_pretrained(base), model.generation_config
    for key in ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        assert getattr(told, key) == getattr(own, key), key
    lg.load_gates(model, folder)
    told.top_k = 5  # by the user, who is left in peace
    model.load_adapter(folder / "adapter", "second")
    quiet = lg.save_gates(gated(), tmp_path / "quiet", base_id=str(base))
    lg.load_gates(model, quiet, "second")
    assert (told.temperature, told.top_p, told.top_k) == (0.7, 0.8, 5), "which recommends nothing"
    lg.detach_gates(model, "second")
    assert (told.temperature, told.top_p) == (0.3, 1.0), "what is left recommends it"
    lg.detach_gates(model)
    assert (told.temperature, told.top_p, told.top_k) == (0.7, 0.8, 5)


def test_without_a_recommendation_nothing_is_written(tmp_path, base):
    folder = lg.save_gates(gated(), tmp_path / "gated", base_id=str(base))
    assert not (folder / SAMPLING).exists()
    assert "sampling" not in read_gate_config(folder)
    assert resolve(folder).recommended_temperature is None
    assert lg.load_gated(folder).generation_config.temperature == 0.7
    (folder / SAMPLING).write_text('{"temperature": 0.3, "do_sample": true}')
    with pytest.raises(ArtifactError, match=r"generation_config\.json: .*recommends no sampling.* delete it"):
        resolve(folder)
    (folder / "gate_config.json").unlink()
    with pytest.raises(ArtifactError, match="would not be that of these gates"):
        lg.save_gates(gated(), folder)
    assert (folder / SAMPLING).exists(), "somebody's file, which may be the base's"


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf"), True, "hot"])
def test_what_is_no_temperature_is_refused_before_anything_is_written(tmp_path, wrong):
    with pytest.raises(ConfigError, match="temperature"):
        lg.save_gates(gated(), tmp_path / "gated", temperature=wrong)
    assert not (tmp_path / "gated").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": 0.6}, r"'temperature' must be 0\.3, found 0\.6"),
        ({"temperature": None}, r"'temperature' must be 0\.3, found None"),
        ({"do_sample": False}, "'do_sample' must be True, found False"),
        ({"top_k": 50}, "'top_k' must be 0, found 50"),
        ({"num_beams": 4}, "unknown key 'num_beams'"),
    ],
)
def test_a_file_that_says_something_else_is_refused(folder, change, words):
    path = folder / SAMPLING
    told = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in told.items() if value is not None}))
    with pytest.raises(ArtifactError, match=rf"generation_config\.json: .*{words}"):
        lg.load_gated(folder)


def test_a_record_that_says_something_else_is_refused(folder):
    path = folder / "gate_config.json"
    right = json.loads(path.read_text())
    for sampling, words in (
        ({"temperature": 1.0}, r"'temperature' must be 1\.0, found 0\.3"),
        ({"temperature": 0}, "'do_sample' must be False"),
        ({"temperature": -1}, r"sampling\.temperature must be at least 0"),
        ({}, r"sampling\.temperature"),
        (0.3, "sampling"),
        (None, "recommends no sampling"),
    ):
        path.write_text(json.dumps({**right, "sampling": sampling}))
        with pytest.raises(ArtifactError, match=words):
            resolve(folder)
    path.write_text(json.dumps(right))
    (folder / SAMPLING).write_text("[]")
    with pytest.raises(ArtifactError, match="JSON object"):
        resolve(folder)
    (folder / SAMPLING).unlink()
    with pytest.raises(ArtifactError, match=r"generation_config\.json: is missing"):
        resolve(folder)


def test_a_merged_model_draws_as_recommended_and_not_as_its_base():
    of_base = {"eos_token_id": 7, "do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}
    assert with_recommended(of_base, 0.0) == {"eos_token_id": 7, "do_sample": False, "repetition_penalty": 1.0}
    assert with_recommended(of_base, 0.5) == {
        "eos_token_id": 7,
        "do_sample": True,
        "repetition_penalty": 1.0,
        "temperature": 0.5,
        "top_k": 0,
        "top_p": 1.0,
    }
