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
    GateTrainingSettings as GateTrainingSettings,
    RowsSettings as RowsSettings,
    FineTuningSettings as FineTuningSettings,
    TrainSettings as TrainSettings,
)
from .fine_tuning import (
    FineTuningResult as FineTuningResult,
    train_adapter as train_adapter,
)
from .gate_training import (
    GateTrainingResult as GateTrainingResult,
    train_gates as train_gates,
    training_rows as training_rows,
)
