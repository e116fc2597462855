"""A model in evaluation mode for a while. Who measures on a model that others train gives it back as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Put every module in evaluation mode and restore each one's own mode, which `model.train()` would not."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
