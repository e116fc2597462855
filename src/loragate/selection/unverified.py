"""What a transaction came to, and gates without evidence: taken as they are, or trained, left off and accepted later."""

from __future__ import annotations

from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError
from loragate.gates.range import Range
from loragate.gates.schema import ADAPTER as ADAPTER_FOLDER
from loragate.gates.schema import CONFIG, EVIDENCE, read_gate_config
from loragate.selection.candidate import Candidate
from loragate.selection.store import GATED, Store
from loragate.selection.study import RECORD, Study
from loragate.selection.trial import copy_artifact

CANDIDATES = Path("run") / "candidates"
UNVERIFIED = "given by the user without a probe; not compared with the plain adapter"
OFF = "trained without evidence, so the gates are off (λ = 1); accept them with --unverified"


@dataclass(frozen=True)
class Chosen:
    """What a transaction came to.

    Attributes:
        folder: the gated adapter.
        candidate: whose gates act; None where the adapter remains or the gates stay off.
        trained: what was trained where nothing could be compared; None where there was a probe.
        evidence: as the artifact keeps it: "selection", and of gates that were trained "training" and "parity".
    """

    folder: Path
    candidate: Candidate | None
    trained: Candidate | None
    evidence: dict[str, Any]


def is_unaccepted(folder: Path) -> bool:
    """Whether the folder holds gates that were trained and are still off (also after an interrupted acceptance)."""
    if not (folder / CANDIDATES / RECORD).is_file() or not (folder / ADAPTER_FOLDER).is_dir():
        return False
    if Study.read(folder / CANDIDATES).identity.get("probe", "") is not None:
        return False
    return not (folder / CONFIG).is_file() or (read_gate_config(folder).get("selection") or {}).get("accepted") is False


def accept_gates(folder: str | Path, bounds: Range, adapter: str | Path) -> Chosen:
    """Switch on gates that were trained where no evidence could be had, and left off.

    Args:
        folder: that `choose_gates` wrote.
        bounds: range of the gates, which whoever accepts them should know.
        adapter: folder of the adapter that they are for.

    Raises:
        ConfigError: if the folder holds none, or those of another range or adapter.
    """
    folder = Path(folder)
    if not is_unaccepted(folder):
        raise ConfigError(f"{folder} holds no gates that wait to be accepted")
    store = Store.open(folder / CANDIDATES)
    (one,) = store.study.candidates
    gated = store.place(one) / GATED
    assert one.range is not None, "gates were trained"
    if one.range != bounds:
        raise ConfigError(
            f"{folder} holds gates of {one.cell}, not of {bounds}; accept them with --range={one.range.typed}, or give another "
            "--out"
        )
    given, kept = (place / "adapter_model.safetensors" for place in (Path(adapter), gated / ADAPTER_FOLDER))
    if given.is_file() and kept.is_file() and not cmp(given, kept, shallow=False):
        raise ConfigError(f"{folder} holds gates of another adapter; give the --adapter they were trained on")
    selection = {**without_evidence(one, UNVERIFIED, accepted=True), "why": store.study.identity["why"]}
    (folder / CONFIG).unlink(missing_ok=True)  # written again last; until then nothing can be loaded
    copy_artifact(gated, folder, selection)
    return chosen_in(folder, one, one)


def chosen_in(folder: Path, candidate: Candidate | None = None, trained: Candidate | None = None) -> Chosen:
    """What stands in a folder that was just written."""
    record = read_gate_config(folder)
    return Chosen(folder, candidate, trained, {key: record[key] for key in EVIDENCE if record.get(key)})


def without_evidence(one: Candidate, reason: str, *, accepted: bool) -> dict[str, Any]:
    """The record of gates that were compared with nothing."""
    assert one.range is not None, "gates were trained"
    return {
        "method": "given by the user",
        "accepted": accepted,
        "range": [one.range.lower, one.range.upper],
        "reason": reason,
        "evidence": "none: not compared with the adapter",
    }
