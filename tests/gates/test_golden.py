"""Schema version 1 is frozen: files written once are read with the same values, and what is newer is refused with the way out."""

import json
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import loragate as lg
from loragate.analysis import delta_entropy, token_traces
from loragate.errors import ArtifactError
from loragate.evaluation import results
from loragate.files import file_sha256
from loragate.gates.schema import SCHEMA_VERSION, read_gate_config, read_tensors

GOLDEN = Path(__file__).parents[1] / "golden"
sys.path.insert(0, str(GOLDEN))

from base import PROMPT, golden_base  # noqa: E402

EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
FROZEN = {
    "gate_config.json": "437f6dc3d31dd91135d95c5a47fbe50cd1e4172c34a4d1e12e58f9e2a02b0ce0",
    "gates.safetensors": "b0c5fe8dbf530848ddc580da1e6afa93e232dbb5238a087f173749d1ed2f9b2c",
    "adapter/adapter_config.json": "577050f0125e5c345957c71673c0eb49c37bb990924c205516d9aba985c39c69",
    "adapter/adapter_model.safetensors": "ae72b622e9e248375fe2e63d1a953b259155bdaf42bda1480258652f63e3c715",
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    place = tmp_path_factory.mktemp("golden") / "base"
    golden_base().save_pretrained(place)
    return lg.load_gated(GOLDEN / "artifact-v1", base=place)


def test_the_golden_files_were_not_written_again():
    for name, digest in FROZEN.items():
        assert file_sha256(GOLDEN / "artifact-v1" / name) == digest, name


def test_the_record_is_read_with_the_same_values():
    record = read_gate_config(GOLDEN / "artifact-v1")
    assert record["schema_version"] == 1 == SCHEMA_VERSION
    assert lg.GateConfig(**record["gate"]) == lg.GateConfig(-3, 2)
    assert record["k"] == 100
    assert record["base"]["id"] == "golden/base"
    assert record["base"]["revision"] == "0123456789abcdef0123456789abcdef01234567"
    assert record["modules"] == ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"]
    assert record["adapter"]["rank"] == 2
    assert record["training"]["entropy_after"] == 0.25
    assert record["selection"]["accepted"] is True
    tensors = read_tensors(GOLDEN / "artifact-v1", record)
    assert {name: values.tolist() for name, values in tensors.items()} == EXPECTED["gates"]


def test_the_model_acts_as_it_did(loaded):
    """Exact gates; logits within what kernels of other versions may round differently."""
    gates = {name: values.tolist() for name, values in lg.gate_parameters(loaded).items()}
    assert gates == EXPECTED["gates"]
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(torch.tensor([PROMPT])).logits[0, -1], torch.tensor(EXPECTED["gated_logits"]), rtol=1e-5, atol=1e-5
        )
        with lg.gates_disabled(loaded):
            plain = loaded(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(plain, torch.tensor(EXPECTED["adapter_logits"]), rtol=1e-5, atol=1e-5)


def test_writing_it_again_gives_the_same_tensors_and_keys(loaded, tmp_path):
    old = json.loads((GOLDEN / "artifact-v1" / "gate_config.json").read_text())
    evidence = {key: old[key] for key in ("parity", "selection", "training")}
    lg.save_gates(
        loaded,
        tmp_path / "again",
        adapter_source=GOLDEN / "artifact-v1" / "adapter",
        base_id="golden/base",
        base_revision=old["base"]["revision"],
        evidence=evidence,
    )
    new = json.loads((tmp_path / "again" / "gate_config.json").read_text())
    for record in (old, new):  # safetensors orders the two entries of its header as it likes, so its bytes differ
        del record["loragate_version"], record["gates_sha256"]
    # the golden file was written without a look at its training: k = 100, of the base's 16 tokens
    assert (old.pop("k"), new.pop("k")) == (100, 16)
    assert new["base"].pop("rope")["rope_type"] == "default", "an optional key, which that version did not write"
    assert new == old, "what version 1 means has changed; a new meaning needs a new schema version"
    for name in ("gates.safetensors", "adapter/adapter_model.safetensors"):
        one, other = load_file(tmp_path / "again" / name), load_file(GOLDEN / "artifact-v1" / name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("version", "way_out"), [(2, "pip install -U loragate"), (99, "pip install -U loragate"), (0, "fetch")]
)
def test_other_schema_versions_are_refused_with_the_way_out(tmp_path, version, way_out):
    shutil.copytree(GOLDEN / "artifact-v1", tmp_path / "gated")
    path = tmp_path / "gated" / "gate_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": version}))
    with pytest.raises(ArtifactError, match=f"schema version {version} .*reads version 1.*{way_out}"):
        read_gate_config(tmp_path / "gated")


def test_the_schema_numbers_of_all_records_are_known():
    """A changed number means a reader of old files, a golden file beside, and a line in the changelog."""
    kinds = (results.EvaluationRecord, delta_entropy.EntropyRecord)
    written = [field.default for kind in kinds for field in fields(kind) if field.name == "schema"]
    assert (SCHEMA_VERSION, *written, token_traces.SCHEMA) == (1, 1, 1, 1)
