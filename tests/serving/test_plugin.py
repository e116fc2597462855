"""The vLLM plugin over a vLLM that has no more than what the plugin holds on to: what it takes hold of, and when it refuses."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from loragate.serving import SUPPORTED_RANGE, TESTED_VERSIONS, frontend, hooks, layers, plugin, why_unsupported
from loragate.serving.layers import GateMixin
from loragate.serving.plugin import HOOKS, missing_hook


def method(parameters: str) -> Any:
    """A function of these parameters that returns nothing."""
    found: dict[str, Any] = {}
    exec(f"def made(self, {', '.join(parameters.split())}): pass", found)
    return found["made"]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """{module: it} of a fake vLLM in sys.modules, which holds every class and function of `HOOKS`."""
    modules: dict[str, ModuleType] = {}

    def module(name: str) -> ModuleType:
        if name not in modules:
            modules[name] = ModuleType(name)
            modules[name].__path__ = []
            monkeypatch.setitem(sys.modules, name, modules[name])
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(module(parent), last, modules[name])
        return modules[name]

    for place, parameters in HOOKS.items():
        where, _, path = place.partition(":")
        owner: Any = module(where)
        *classes, name = path.split(".")
        for one in classes:
            if not hasattr(owner, one):
                setattr(owner, one, type(one, (), {}))
            owner = getattr(owner, one)
        setattr(owner, name, method(parameters))
    linear = modules["vllm.lora.layers.base_linear"].BaseLinearLayerWithLoRA
    modules["vllm.lora.utils"]._all_lora_classes = (type("Linear", (linear,), {}), type("Embedding", (), {}))
    module("vllm.platforms").current_platform = SimpleNamespace(is_cpu=lambda: True)
    modules["vllm.v1.core.kv_cache_utils"]._gen_lora_extra_hash_keys = lambda request: [request.lora_request.lora_path]
    module("vllm.entrypoints.openai.models.api_router").router = None
    monkeypatch.setattr(frontend, "add_routes", lambda router: None)  # which need FastAPI
    monkeypatch.setattr(frontend, "open_log", lambda: None)
    monkeypatch.setattr(plugin, "vllm_version", lambda: TESTED_VERSIONS[0])
    monkeypatch.setattr(logging.getLogger("loragate"), "level", logging.NOTSET)  # which `register` sets
    return modules


def worker_of(vllm: dict[str, ModuleType]) -> Any:
    return vllm["vllm.lora.worker_manager"].WorkerLoRAManager


@pytest.mark.parametrize("on_cpu", [True, False])
def test_it_takes_hold_of_every_place_once(
    vllm: dict[str, ModuleType], on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pkgutil import resolve_name

    assert {*hooks.REPLACED, *hooks.REPLACED_ON_CPU} <= set(HOOKS), "what is replaced is looked at before"
    vllm["vllm.platforms"].current_platform.is_cpu = lambda: on_cpu
    for _ in range(2):
        plugin.register()
    assert getattr(worker_of(vllm), plugin.MARK) == ""
    assert logging.getLogger("loragate").level == logging.WARNING
    for place in HOOKS:
        wrapped = hasattr(resolve_name(place), "__wrapped__")
        assert wrapped == (place in hooks.REPLACED or (on_cpu and place in hooks.REPLACED_ON_CPU)), place
        assert not hasattr(getattr(resolve_name(place), "__wrapped__", None), "__wrapped__")
    linear, embedding = vllm["vllm.lora.utils"]._all_lora_classes
    assert issubclass(linear, GateMixin)
    assert embedding.__name__ == "Embedding"
    assert hasattr(vllm["vllm.lora.utils"].LogitsProcessorWithLoRA, "prompt_slot") == on_cpu


def test_an_adapter_whose_gates_cannot_be_filled_is_taken_out_again(vllm: dict[str, ModuleType]) -> None:
    """vLLM has marked it as active by then."""
    plugin.register()
    filled: list[Any] = []

    class Gates:
        def fill(self, modules: Any, index: int) -> None:
            filled.append((modules, index))
            if modules is None:
                raise RuntimeError("no memory left")

    def manager(modules: Any) -> Any:
        one = vllm["vllm.lora.worker_manager"].LRUCacheWorkerLoRAManager._manager_cls()
        one._registered_adapters = SimpleNamespace(cache={7: SimpleNamespace(loragate=Gates()), 8: SimpleNamespace()})
        one.modules, one.lora_index_to_id, one.removed = modules, [None, 7], []
        one.remove_adapter = one.removed.append
        return one

    base = vllm["vllm.lora.model_manager"].LRUCacheLoRAModelManager
    base.activate_adapter = lambda self, lora_id: True
    for lora_id in (7, 8):
        assert manager("layers").activate_adapter(lora_id)
    assert filled == [("layers", 1)], "in its own slot; a plain adapter has no gates"
    broken = manager(None)
    with pytest.raises(RuntimeError, match="no memory left"):
        broken.activate_adapter(7)
    assert broken.removed == [7]


@pytest.mark.parametrize("lack", ["version", "name", "parameter", "key"])
def test_another_vllm_serves_plain_adapters_alone(
    vllm: dict[str, ModuleType], lack: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = vllm["vllm.v1.engine.input_processor"].InputProcessor
    if lack == "version":
        monkeypatch.setattr(plugin, "vllm_version", lambda: "0.31.4")
        told = SUPPORTED_RANGE
    elif lack == "name":
        del processor._validate_lora
        told = "InputProcessor._validate_lora is gone"
    elif lack == "parameter":
        processor._validate_lora = method("request")
        told = "takes no lora_request any more"
    else:
        name = lambda request: [request.lora_request.lora_name]  # noqa: E731
        vllm["vllm.v1.core.kv_cache_utils"]._gen_lora_extra_hash_keys = name
        told = "two strengths would share blocks"
    worker = worker_of(vllm)
    worker._load_adapter = lambda self, lora_request: "loaded"
    plugin.register()
    assert told in getattr(worker, plugin.MARK)
    assert worker()._load_adapter(SimpleNamespace(lora_path=str(saved / "adapter"))) == "loaded"
    for path in (saved / "gated", f"{saved / 'adapter'}@constant=0.5"):
        with pytest.raises(ValueError, match=told):
            worker()._load_adapter(SimpleNamespace(lora_path=str(path)))


def test_versions(vllm: dict[str, ModuleType]) -> None:
    assert missing_hook() is None
    for version in (*TESTED_VERSIONS, "0.32.0+cpu", "0.32.7", "0.33.0"):
        assert why_unsupported(version) is None
    for version in ("0.31.9", "0.34.0", "1.32.0", "", "main"):
        assert SUPPORTED_RANGE in (why_unsupported(version) or "")


def adapter(name: str, path: str) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=1, lora_path=path)


def test_a_prompt_read_in_part_draws_without_its_seed() -> None:
    """What is drawn there is dropped, and vLLM would wind the generator back, which on a CPU raises."""
    batch = SimpleNamespace(generators={0: "first", 2: "third"})
    runner = SimpleNamespace(
        input_batch=batch, discard_request_mask=SimpleNamespace(np=np.array([True, True, False, True]))
    )
    assert hooks.hide_discarded_generators(lambda self, *_: dict(self.input_batch.generators), runner, None) == {
        2: "third"
    }
    assert batch.generators == {0: "first", 2: "third"}
    with pytest.raises(KeyError):
        hooks.hide_discarded_generators(lambda self: self.input_batch.generators[0], runner)
    assert batch.generators == {0: "first", 2: "third"}


def test_limits_of_a_batch_reach_the_layers_of_both_runners() -> None:
    """The first model runner knows its requests by name; the second keeps their adapters in a state of its own."""
    manager = SimpleNamespace(
        _adapter_manager=SimpleNamespace(
            punica_wrapper_mapping={"llm": SimpleNamespace(_token_lora_indices=torch.zeros(8, dtype=torch.long))}
        )
    )
    (punica,) = manager._adapter_manager.punica_wrapper_mapping.values()
    half, none = adapter("a", "/a@constant=0.5"), None
    first = SimpleNamespace(
        requests={name: SimpleNamespace(lora_request=one) for name, one in (("x", half), ("y", none))},
        lora_manager=manager,
    )
    hooks.set_active(lambda *_: None, first, SimpleNamespace(req_ids=["y", "x"]), np.array([1, 2]))
    limits = layers.token_limits(punica).values_M2
    assert limits[:3].tolist() == [list(layers.NO_LIMITS), [0.5, 0.5], [0.5, 0.5]]
    state = SimpleNamespace(lora_requests={"x": half})
    second = SimpleNamespace(lora_state=state, lora_manager=manager)
    hooks.keep_batch(lambda *_: None, state, ["x", "y"], None, np.array([3, 1]))
    for _ in range(2):  # a dummy run that follows has no batch
        hooks.set_kept_active(lambda *_: None, second)
        assert limits[:4].tolist() == [[0.5, 0.5]] * 3 + [list(layers.NO_LIMITS)]
