"""Gates that were trained where no evidence could be had: kept aside and off, until the user switches them on.

What is kept beside the values says which base and adapter they belong to, because the command that accepts them comes
later and could name others.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from loragate.errors import ConfigError, DataError
from loragate.files import write_atomically, write_json
from loragate.gates import GateConfig, adapter_fingerprint, attach_gates
from loragate.gates.attach import active_adapter
from loragate.gates.fingerprint import base_weight_samples, compare_base_samples
from loragate.gates.range import Range
from loragate.gates.schema import read_gate_config
from loragate.models import is_gated
from loragate.selection.candidate import Candidate
from loragate.selection.transaction import load_gate_values

PLACE = Path("run") / "unaccepted"


def keep_unaccepted(
    model: Any,
    folder: Path,
    candidate: Candidate,
    config: GateConfig,
    gates: dict[str, Any],
    evidence: dict[str, Any],
    why: str,
) -> None:
    """Write the trained values and all that is needed to accept them; the record comes last."""
    place = folder / PLACE
    write_atomically(place / "gates.safetensors", lambda path: save_file(gates, path))
    write_json(
        place / "evidence.json",
        {
            "range": [candidate.range.lower, candidate.range.upper],
            "gate": asdict(config),
            "adapter_sha256": adapter_fingerprint(model, active_adapter(model)),
            "base_weights": base_weight_samples(model),
            "why": why,
            "evidence": evidence,
        },
    )


def is_unaccepted(folder: Path) -> bool:
    """Whether the folder holds gates that were trained and are still off (also after an interrupted acceptance)."""
    if not (folder / PLACE / "evidence.json").is_file():
        return False
    if not is_gated(folder):
        return (folder / "adapter").is_dir()
    return (read_gate_config(folder).get("selection") or {}).get("accepted") is False


def read_unaccepted(folder: Path, candidate: Candidate) -> dict[str, Any]:
    """The record of `keep_unaccepted`.

    Raises:
        ConfigError: if the gates are those of another range.
        DataError: if the record cannot be read.
    """
    path = folder / PLACE / "evidence.json"
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kept = Range(*record["range"])
        record["gate"], record["adapter_sha256"], record["base_weights"], record["why"], record["evidence"]["training"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not what this version writes ({error}); calibrate again into another --out") from None
    if kept != candidate.range:
        raise ConfigError(
            f"{folder} holds gates of {kept}, not of {candidate.name}; accept them with "
            f"--range={kept.typed}, or give another --out"
        )
    return record


def put_on(model: Any, folder: Path, record: dict[str, Any]) -> None:
    """Attach the kept gates.

    Raises:
        ConfigError: if adapter or base are others than they were trained on.
    """
    name = active_adapter(model)
    if adapter_fingerprint(model, name) != record["adapter_sha256"]:
        raise ConfigError(f"{folder} holds gates of another adapter; give the --adapter they were trained on")
    difference = compare_base_samples(model, record["base_weights"])
    if difference is not None:
        raise ConfigError(f"{folder} holds gates of another base: {difference}; give the --base they were trained on")
    attach_gates(model, GateConfig(**record["gate"]), name)
    load_gate_values(model, load_file(folder / PLACE / "gates.safetensors"))
