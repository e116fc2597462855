"""Stage I (adapters) and Stage II (gates): trainers, settings, run folders.

Names are imported on first use: the settings alone must not pull in torch and the trainer libraries.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loragate.training.callbacks import StepReport
    from loragate.training.guards import GuardLimits
    from loragate.training.rollouts import Reward, Sampler
    from loragate.training.settings import CalibrationSettings, StageOneSettings, TrainSettings
    from loragate.training.stage_one import StageOneResult, train_adapter
    from loragate.training.stage_two import CalibrationResult, calibrate, calibration_rows

_HOMES = {
    "CalibrationResult": "stage_two",
    "CalibrationSettings": "settings",
    "GuardLimits": "guards",
    "Reward": "rollouts",
    "Sampler": "rollouts",
    "StageOneResult": "stage_one",
    "StageOneSettings": "settings",
    "StepReport": "callbacks",
    "TrainSettings": "settings",
    "calibrate": "stage_two",
    "calibration_rows": "stage_two",
    "train_adapter": "stage_one",
}

__all__ = [
    "CalibrationResult",
    "CalibrationSettings",
    "GuardLimits",
    "Reward",
    "Sampler",
    "StageOneResult",
    "StageOneSettings",
    "StepReport",
    "TrainSettings",
    "calibrate",
    "calibration_rows",
    "train_adapter",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'loragate.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"loragate.training.{_HOMES[name]}"), name)
