"""The adapter from its files alone."""

from __future__ import annotations

from collections.abc import Sequence

from loragate.analysis.inspection import inspect_adapter
from loragate.doctor.record import Static
from loragate.gates.adapter_rules import Finding


def examine_static(adapter: str, base: str = "", *, trust_remote_code: bool = False) -> tuple[Static, list[Finding]]:
    """See `Static`; in seconds, without weights of the base."""
    found = inspect_adapter(adapter, base, trust_remote_code=trust_remote_code)
    keys = ("code", "severity", "message", "remedy", "evidence")
    findings = [Finding(**{key: one[key] for key in keys}) for one in found["findings"]]
    return Static(found["adapter"], found.get("base", "")), findings


def prevents_loading(findings: Sequence[Finding]) -> bool:
    """Whether the parts that need the model cannot run."""
    return any(one.forbids("load") for one in findings)
