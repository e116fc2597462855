from .artifact import load_gates as load_gates, save_gates as save_gates
from .attach import (
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
    require_gateable as require_gateable,
)
from .fingerprint import adapter_fingerprint as adapter_fingerprint, weights_checksum as weights_checksum
from .gate import GateConfig as GateConfig
from .parity import Parity as Parity, measure_parity as measure_parity
from .quantised import keep_unpacked as keep_unpacked
from .signed_map import gate_coefficient as gate_coefficient
