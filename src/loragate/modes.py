"""Modes of a model, and a parameter's values. Who works on a model that others train gives it back as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def restore_training_modes(model: Any) -> Iterator[None]:
    """Restore every module's own mode at the end, which `model.train()` would not."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Every module in evaluation mode for a while."""
    with restore_training_modes(model):
        model.eval()
        yield


def whole_parameter(parameter: Any) -> Any:
    """A parameter's full values, where FSDP2 or tensor parallelism spread it; every process must ask."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
