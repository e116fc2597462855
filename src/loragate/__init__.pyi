from . import (
    analysis as analysis,
    data as data,
    doctor as doctor,
    errors as errors,
    evaluation as evaluation,
    gates as gates,
    generation as generation,
    losses as losses,
    models as models,
    recipes as recipes,
    selection as selection,
    serving as serving,
    training as training,
)
from .doctor.examination import examine as examine
from .errors import LoragateError as LoragateError
from .gates import (
    GateConfig as GateConfig,
    attach_gates as attach_gates,
    detach_gates as detach_gates,
    examine_adapter as examine_adapter,
    gate_coefficient as gate_coefficient,
    gate_override as gate_override,
    gate_parameters as gate_parameters,
    gates_disabled as gates_disabled,
    load_gates as load_gates,
    record_gates as record_gates,
    save_gates as save_gates,
)
from .losses import (
    objectives as objectives,
    token_statistics as token_statistics,
    topk_entropy as topk_entropy,
)
from .models import GatedPeftModel as GatedPeftModel, load_gated as load_gated
from .selection import calibrate as calibrate
from .training import (
    GateTrainer as GateTrainer,
    GateTrainingArguments as GateTrainingArguments,
    GateTrainingSettings as GateTrainingSettings,
    FineTuningSettings as FineTuningSettings,
    make_adapter as make_adapter,
    train_adapter as train_adapter,
    train_gates as train_gates,
)
from .version import __version__ as __version__
