"""Models of shapes that are far too large to run: every operator is met, and no tensor holds data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from loragate.analysis.plan_step import KnownSelection, materialise
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
    materialise(model)
    return model


@contextmanager
def gates_stay_put() -> Iterator[None]:
    """Inside, under a fake mode, `gate.to(device)` does nothing: PyTorch cannot move a module of fake parameters."""
    if not under_fake_mode():
        yield
        return
    with patch.object(SignedGate, "to", lambda gate, *_args, **_options: gate):
        yield
