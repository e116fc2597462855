"""A gated folder read from its files alone: same identity as in memory, refused when anything is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import loragate as lg
from beside import BESIDE, make
from loragate.errors import ArtifactError
from loragate.gates.control import zero_unavailable_reason
from loragate.models import is_gated, load_adapter, read_gates, resolve
from loragate.models.folder_gates import stamp, unreached_note
from tiny import shake, tiny_adapter, tiny_base, write_adapter, write_base


def write(folder: Path, lora: dict | None = None, **gate) -> Path:
    model = lg.attach_gates(tiny_adapter(**(lora or {})), lg.GateConfig(**{"lower": -3, "upper": 2, **gate}))
    shake(model, 1.0)
    return lg.save_gates(model, folder, base_id="base")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "gated")


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"v_proj": 3}},
        {"use_rslora": True},
        {"lora_alpha": 5, "target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=["all-linear", "patterns", "rslora", "two", "embedding"],
)
def test_the_adapter_is_known_again_from_its_file(tmp_path: Path, lora: dict) -> None:
    gates = read_gates(write(tmp_path / "gated", lora))
    assert gates.config.lower == -3
    assert set(gates.weights) == set(gates.biases)
    assert all(path.endswith("_proj") for path in gates.biases)


def test_the_digest_follows_gates_and_adapter(tmp_path: Path) -> None:
    digests = set()
    for name, lora, tau in (("a", {}, 1.0), ("b", {}, 2.0), ("c", {"seed": 1}, 1.0)):
        torch.manual_seed(0)
        digests.add(read_gates(write(tmp_path / name, lora, tau=tau)).digest)
    assert len(digests) == 3
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    assert read_gates(tmp_path / "copy").digest == read_gates(tmp_path / "a").digest


def test_a_rewritten_folder_has_another_stamp(folder: Path) -> None:
    before = stamp(folder)
    assert len(before) == 4
    weights = folder / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    assert stamp(folder) != before
    assert is_gated(folder)
    assert not is_gated(folder / "adapter")


def placed(text: str):
    place = resolve(text, allow_override=True, base_optional=True)
    return read_gates(place.folder, place.override)


def test_a_plain_adapter_takes_one_constant(folder: Path) -> None:
    plain = folder / "adapter"
    gates = placed(f"{plain}@constant=0.5")
    assert gates.adapter == plain
    assert set(gates.biases) == set(read_gates(folder).biases)
    assert not resolve(plain, base_optional=True).needs_lambda
    with pytest.raises(ArtifactError, match="takes @constant=C alone"):
        placed(f"{plain}@unit")


@pytest.mark.parametrize("constant", [-1.5, 0.0, 0.5, 3.0])
@pytest.mark.parametrize("source", ["gated", "plain"])
def test_a_constant_for_a_part_is_read_as_one_constant_per_module(folder: Path, source: str, constant: float) -> None:
    place = folder if source == "gated" else folder / "adapter"
    gates = placed(f"{place}@lower={constant}")
    assert gates.override is None
    assert not gates.weights
    found = {path: float(gates.config.signed_map(bias)) for path, bias in gates.biases.items()}
    assert set(found) == set(read_gates(folder).biases)
    for path, lam in found.items():
        assert lam == pytest.approx(constant if ".layers.0." in path else 1.0, abs=1e-6)
    with pytest.raises(ArtifactError, match=r"λ for upper would have no effect"):
        placed(f"{place}@upper={constant}")


def other_adapter(folder: Path) -> None:
    path = folder / "adapter" / "adapter_model.safetensors"
    save_file({name: values + 1 for name, values in load_file(path).items()}, path)


def other(**settings: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "adapter" / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))

    return change


MALFORMED = {
    "cut gates": (lambda f: (f / "gates.safetensors").write_bytes(b"x"), "sha256"),
    "no adapter": (lambda f: shutil.rmtree(f / "adapter"), "adapter_config.json"),
    "no weights": (lambda f: (f / "adapter" / "adapter_model.safetensors").unlink(), "not a readable safetensors"),
    "other adapter": (other_adapter, "another adapter"),
    "other alpha": (other(lora_alpha=9), "another adapter"),
    "modules to save": (other(modules_to_save=["lm_head"]), "modules_to_save"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_folder_is_refused(folder: Path, name: str) -> None:
    spoil, message = MALFORMED[name]
    spoil(folder)
    with pytest.raises(ArtifactError, match=message):
        read_gates(folder)


def require_same_note(place, named: str, **shape) -> None:
    """What the files tell of the reach of λ is what the loaded model tells; it names `named`, or nothing."""
    note, in_memory = unreached_note(place), zero_unavailable_reason(load_adapter(tiny_base(**shape), place))
    assert bool(note) == bool(in_memory) == bool(named), (note, in_memory)
    if named:
        start, end = (
            f"no strength reaches {named}",
            "the adapter keeps its full strength there, so that λ = 0 is not the base",
        )
        assert note.startswith(start)
        assert note.endswith(end)
        assert in_memory.endswith(end)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("factors alone", ""),
        ("tied embeddings", "embeddings saved along"),
        ("all biases", "6 biases saved along"),
        ("trained tokens", "2 trained token embeddings"),
        ("modules to save", "whole copies of input_layernorm, lm_head"),
    ],
)
def test_what_no_strength_reaches_is_told_by_the_files_as_by_the_model(tmp_path: Path, kind: str, named: str) -> None:
    _, adapter = make(tmp_path, kind)
    require_same_note(resolve(adapter), named, **BESIDE[kind][0])


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_a_delta_on_an_embedding_or_the_head_is_told_to_keep_its_strength(tmp_path: Path, target: str) -> None:
    untied = {"tie_word_embeddings": False}
    write_base(tmp_path / "base", **untied)
    model = tiny_adapter(base=tiny_base(**untied), target_modules=["q_proj", target])
    write_adapter(tmp_path / "adapter", tmp_path / "base", model)
    named = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}[target]
    require_same_note(resolve(tmp_path / "adapter"), named, **untied)
    lg.save_gates(lg.attach_gates(model, lg.GateConfig(-3, 2)), tmp_path / "gated", base_id=str(tmp_path / "base"))
    assert named in unreached_note(resolve(tmp_path / "gated"))
    assert unreached_note(resolve(tmp_path / "base")) == ""
