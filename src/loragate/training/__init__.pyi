from .arguments import GateTrainingArguments as GateTrainingArguments
from .callbacks import StepReport as StepReport
from .settings import (
    GateTrainingSettings as GateTrainingSettings,
    RowsSettings as RowsSettings,
    FineTuningSettings as FineTuningSettings,
    TrainSettings as TrainSettings,
)
from .fine_tuning import (
    FineTuningResult as FineTuningResult,
    make_adapter as make_adapter,
    train_adapter as train_adapter,
)
from .gate_training import (
    GateTrainer as GateTrainer,
    GateTrainingResult as GateTrainingResult,
    train_gates as train_gates,
)
from .rows import training_rows as training_rows
