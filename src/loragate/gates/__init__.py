"""Gates on a LoRA adapter: the signed map, the fused operation, attachment to PEFT, the artifact on disk."""

from loragate.gates.artifact import load_gates, save_gates
from loragate.gates.attach import (
    attach_gates,
    attached_config,
    detach_gates,
    gate_parameters,
    train_gates_only,
)
from loragate.gates.config import GateConfig
from loragate.gates.control import constant_gate, gate_override, gates_disabled, record_gates, trace_gates
from loragate.gates.eligibility import Verdict, active_adapter, examine_adapter, require_gateable
from loragate.gates.fingerprint import adapter_fingerprint, weights_checksum
from loragate.gates.loading import load_gated
from loragate.gates.parity import Parity, measure_parity
from loragate.gates.quantised import keep_unpacked
from loragate.gates.signed_map import gate_coefficient

__all__ = [
    "GateConfig",
    "Parity",
    "Verdict",
    "active_adapter",
    "adapter_fingerprint",
    "attach_gates",
    "attached_config",
    "constant_gate",
    "detach_gates",
    "examine_adapter",
    "gate_coefficient",
    "gate_override",
    "gate_parameters",
    "gates_disabled",
    "keep_unpacked",
    "load_gated",
    "load_gates",
    "measure_parity",
    "record_gates",
    "require_gateable",
    "save_gates",
    "trace_gates",
    "train_gates_only",
    "weights_checksum",
]
