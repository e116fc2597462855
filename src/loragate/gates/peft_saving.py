"""Telling that PEFT's own saving loses the gates.

`save_pretrained` of a gated model writes the gates' numbers beside the adapter's factors, but no range and no hash; PEFT
loads such a folder as the plain adapter and drops the numbers. PEFT and transformers let the adapter's configuration write
itself, so the configuration of a gated adapter is one that warns; this covers selected adapters, natively loaded ones and
the checkpoints of any trainer.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from loragate.gates.adapter_files import ADAPTER_WEIGHTS

logger = logging.getLogger("loragate")

_METHOD = "save_pretrained"
_GATE_KEY = ".lora_gate."


def warn_on_saving(model: nn.Module, adapter_name: str) -> None:
    """Give the adapter a configuration of its own that warns when it is written."""
    for configs in config_tables(model, adapter_name):
        # a copy: the caller's object may serve other adapters and models, which carry no gates
        config = copy.copy(configs[adapter_name])
        # partial of a module's function, not a closure, so that the model can still be copied and pickled
        vars(config)[_METHOD] = partial(_save_and_warn, config, adapter_name)
        configs[adapter_name] = config


def warn_no_more(model: nn.Module, adapter_name: str) -> None:
    """Let the configuration be written as PEFT does it."""
    for configs in config_tables(model, adapter_name):
        vars(configs[adapter_name]).pop(_METHOD, None)


def lost_gates(folder: Path) -> bool:
    """Whether a folder holds an adapter that PEFT wrote while it was gated."""
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        return False
    try:
        with safe_open(str(path), framework="pt") as file:
            return any(_GATE_KEY in key for key in file.keys())  # noqa: SIM118
    except (SafetensorError, OSError):
        return False


def _save_and_warn(config: Any, adapter_name: str, save_directory: str, **kwargs: Any) -> None:
    type(config).save_pretrained(config, save_directory, **kwargs)
    logger.warning(
        "save_pretrained wrote the gated adapter %r to %s in a form that loads as the plain adapter, without its gates; to "
        "keep them, write loragate.save_gates(model, folder) and load that folder with loragate.load_gated",
        adapter_name,
        save_directory,
    )


def config_tables(model: nn.Module, adapter_name: str) -> Iterator[dict[str, Any]]:
    """Every {adapter name: configuration} of the model, its wrappers included, that holds the adapter."""
    seen: set[int] = set()
    for module in model.modules():
        configs = vars(module).get("peft_config")
        if isinstance(configs, dict) and adapter_name in configs and id(configs) not in seen:
            seen.add(id(configs))
            yield configs
