from .callbacks import (
    StepReport as StepReport,
)
from .guards import (
    GuardLimits as GuardLimits,
)
from .adapter_run import (
    make_adapter as make_adapter,
)
from .rollouts import (
    Reward as Reward,
    Sampler as Sampler,
)
from .settings import (
    CalibrationSettings as CalibrationSettings,
    RowsSettings as RowsSettings,
    StageOneSettings as StageOneSettings,
    TrainSettings as TrainSettings,
)
from .stage_one import (
    StageOneResult as StageOneResult,
    train_adapter as train_adapter,
)
from .stage_two import (
    CalibrationResult as CalibrationResult,
    calibrate as calibrate,
    calibration_rows as calibration_rows,
)
