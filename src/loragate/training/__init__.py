"""Stage I (adapters) and Stage II (gates): trainers, settings, run folders."""

from loragate.training.callbacks import StepReport
from loragate.training.settings import CalibrationSettings, StageOneSettings, TrainSettings
from loragate.training.stage_one import StageOneResult, train_adapter
from loragate.training.stage_two import CalibrationResult, calibrate, calibration_rows

__all__ = [
    "CalibrationResult",
    "CalibrationSettings",
    "StageOneResult",
    "StageOneSettings",
    "StepReport",
    "TrainSettings",
    "calibrate",
    "calibration_rows",
    "train_adapter",
]
