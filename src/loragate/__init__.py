"""loragate: gate a finished LoRA adapter by entropy, token by token (SCALE).

The public names below are imported on first use, so that `import loragate` and the command line start at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from loragate.version import __version__

_EXPORTS = {
    "GateConfig": "loragate.gates",
    "gate_coefficient": "loragate.gates",
    "attach_gates": "loragate.gates",
    "detach_gates": "loragate.gates",
    "gate_parameters": "loragate.gates",
    "gate_override": "loragate.gates",
    "gates_disabled": "loragate.gates",
    "record_gates": "loragate.gates",
    "save_gates": "loragate.gates",
    "load_gates": "loragate.gates",
    "load_gated": "loragate.gates",
    "examine_adapter": "loragate.gates",
    "topk_entropy": "loragate.losses",
    "token_statistics": "loragate.losses",
    "objectives": "loragate.losses",
    "calibrate": "loragate.training",
    "CalibrationSettings": "loragate.training",
    "train_adapter": "loragate.training",
    "StageOneSettings": "loragate.training",
    "LoragateError": "loragate.errors",
}

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from loragate.errors import LoragateError as LoragateError
    from loragate.gates import (
        GateConfig as GateConfig,
    )
    from loragate.gates import (
        attach_gates as attach_gates,
    )
    from loragate.gates import (
        detach_gates as detach_gates,
    )
    from loragate.gates import (
        examine_adapter as examine_adapter,
    )
    from loragate.gates import (
        gate_coefficient as gate_coefficient,
    )
    from loragate.gates import (
        gate_override as gate_override,
    )
    from loragate.gates import (
        gate_parameters as gate_parameters,
    )
    from loragate.gates import (
        gates_disabled as gates_disabled,
    )
    from loragate.gates import (
        load_gated as load_gated,
    )
    from loragate.gates import (
        load_gates as load_gates,
    )
    from loragate.gates import (
        record_gates as record_gates,
    )
    from loragate.gates import (
        save_gates as save_gates,
    )
    from loragate.losses import objectives as objectives
    from loragate.losses import token_statistics as token_statistics
    from loragate.losses import topk_entropy as topk_entropy
    from loragate.training import CalibrationSettings as CalibrationSettings
    from loragate.training import StageOneSettings as StageOneSettings
    from loragate.training import calibrate as calibrate
    from loragate.training import train_adapter as train_adapter


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        from loragate.errors import nearest

        raise AttributeError(f"module 'loragate' has no attribute {name!r}{nearest(name, _EXPORTS)}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
