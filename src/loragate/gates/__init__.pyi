from .artifact import load_gates as load_gates, save_gates as save_gates
from .attach import (
    GatedPeftModel as GatedPeftModel,
    attach_gates as attach_gates,
    attached_config as attached_config,
    detach_gates as detach_gates,
    draw_gates as draw_gates,
    gate_parameters as gate_parameters,
    sizes_of as sizes_of,
    train_gates_only as train_gates_only,
)
from .control import (
    constant_gate as constant_gate,
    gate_override as gate_override,
    gates_disabled as gates_disabled,
    record_gates as record_gates,
    trace_gates as trace_gates,
)
from .eligibility import (
    Verdict as Verdict,
    active_adapter as active_adapter,
    examine_adapter as examine_adapter,
    keep_unpacked as keep_unpacked,
    require_gateable as require_gateable,
)
from .gate import GateConfig as GateConfig
from .identity import (
    Parity as Parity,
    adapter_fingerprint as adapter_fingerprint,
    measure_parity as measure_parity,
    weights_checksum as weights_checksum,
)
from .push import Pushed as Pushed, push_gated as push_gated
from .signed_map import gate_coefficient as gate_coefficient
