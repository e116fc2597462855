"""Models of shapes that are far too large to run: every operator is met, and no tensor holds data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loragate.gates.gate import SignedGate


@contextmanager
def without_data(selected: int) -> Iterator[None]:
    """Inside, models have shapes and no memory, and every mask selects `selected` positions."""
    with FakeTensorMode(), KnownSelection(selected):
        yield


def under_fake_mode() -> bool:
    """Whether tensors made here hold no data."""
    return active_fake_mode() is not None


def build_fake(build: Callable[[], Any]) -> Any:
    """A model built on the meta device, its tensors then made fake ones that look like CPU memory, which autograd takes."""
    with unset_fake_temporarily(), torch.device("meta"):
        model = build()
    made: dict[int, nn.Parameter] = {}  # shared parameters stay shared
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                fake = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made.setdefault(id(parameter), fake)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return model


@contextmanager
def gates_stay_put() -> Iterator[None]:
    """Inside, under a fake mode, `gate.to(device)` does nothing: PyTorch cannot move a module of fake parameters."""
    if not under_fake_mode():
        yield
        return
    with patch.object(SignedGate, "to", lambda gate, *_args, **_options: gate):
        yield


class KnownSelection(TorchFunctionMode):
    """`tensor[mask]` with a mask that selects a known number of positions: fake tensors cannot count them."""

    def __init__(self, selected: int) -> None:
        super().__init__()
        self.selected = selected

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool:
            flat = args[0].flatten(0, args[1].dim() - 1)
            return flat.index_select(0, torch.empty(min(self.selected, flat.shape[0]), dtype=torch.int64))
        return function(*args, **(kwargs or {}))


class StorageTracker(TorchDispatchMode):
    """Bytes of all storages alive, and the most there ever were; `owned` tensors do not count."""

    def __init__(self, owned: list[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0.0
        # by address of the storage, which views share; an address can come again once its storage is gone
        self.sizes: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in owned}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._drop, storage._cdata)
        return out

    def _drop(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0)
