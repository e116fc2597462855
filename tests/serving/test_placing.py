"""The base under gates that vLLM serves: what of a record is compared, without vLLM itself."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import loragate as lg
from loragate.errors import ArtifactError
from loragate.models.folder_gates import FolderGates, read_gates
from tiny import tiny_adapter, tiny_base

SHAPE = {
    "num_hidden_layers": 24,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
}


def parsed(name: str, mapper: Any) -> tuple[str, bool]:
    """vLLM's `parse_fine_tuned_lora_name` of a name of a lora_A."""
    path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
    return (mapper(path) if mapper else path), True


@pytest.fixture
def check_base(monkeypatch: pytest.MonkeyPatch) -> Callable[[FolderGates, Any], None]:
    """`_check_base` of a room that found no more of vLLM than it imports."""
    for name, held in {
        "vllm": {},
        "vllm.distributed": {"get_pp_group": lambda: SimpleNamespace(world_size=1)},
        "vllm.lora": {},
        "vllm.lora.utils": {"parse_fine_tuned_lora_name": parsed},
    }.items():
        module = ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.find_spec("loragate.serving.placing")
    assert spec is not None
    assert spec.loader is not None
    # a copy of its own: the one in sys.modules may hold the real vLLM
    placing = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loragate.serving.placing", placing)
    spec.loader.exec_module(placing)
    return placing._check_base


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> FolderGates:
    model = tiny_adapter(base=tiny_base(**SHAPE), target_modules=["q_proj"])
    folder = tmp_path_factory.mktemp("placing") / "gated"
    lg.save_gates(lg.attach_gates(model, lg.GateConfig(-3, 2)), folder, base_id="x/y")
    return read_gates(Path(folder))


def served(shift: float = 0.0, prefix: str = "") -> Any:
    """A manager over the base as vLLM holds it: linear layers are packed under other names, all else shifted."""
    base = tiny_base(**SHAPE)
    kept = [
        (prefix + name, (parameter + shift).detach())
        for name, parameter in base.named_parameters()
        if "self_attn" not in name and "mlp" not in name
    ]
    model = SimpleNamespace(config=base.config, named_parameters=lambda: kept)
    if prefix:
        model.hf_to_vllm_mapper = SimpleNamespace(get_rename_mapper=lambda: lambda path: prefix + path)
    return SimpleNamespace(model=model)


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_base_with_other_norms_is_refused_also_under_vllm_s_names(
    check_base: Any, gates: FolderGates, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_base(gates, served(prefix=prefix))
    assert caplog.text == ""
    with pytest.raises(ArtifactError, match=r"another base \(x/y\): model.*norm"):
        check_base(gates, served(shift=0.5, prefix=prefix))


def test_a_record_without_norms_is_told(check_base: Any, gates: FolderGates, caplog: pytest.LogCaptureFixture) -> None:
    values = {name: numbers for name, numbers in gates.base["weights"]["values"].items() if "norm" not in name}
    earlier = replace(gates, base={**gates.base, "weights": {**gates.base["weights"], "values": values}})
    check_base(earlier, served())
    assert "only the architecture of the base was checked" in caplog.text
    with pytest.raises(ArtifactError, match="another architecture"):
        check_base(replace(earlier, base={**earlier.base, "config_sha256": "0"}), served())
