"""Train candidates, probe them, keep the best or fall back to the adapter: one transaction, resumable at every point.

    folder/<candidate>/run/              log and checkpoints of its training
    folder/<candidate>/gates.safetensors
    folder/<candidate>/result.json       what it did on the probe; written last, so it marks the candidate as finished
    folder/adapter/result.json           the untouched adapter, always a candidate

Where nothing beats the adapter, the gates that remain are zero: λ = 1 everywhere, bit for bit the adapter, in every program
that can load gates. Nothing here prints, and training's own loss is never looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from loragate.data import EncodedRows, Rows
from loragate.errors import ConfigError, DataError
from loragate.files import write_atomically, write_json
from loragate.gates import GateConfig, attach_gates, detach_gates, gate_parameters
from loragate.generation import Engine
from loragate.selection.candidate import Candidate
from loragate.selection.choose import Choice, choose
from loragate.selection.probe import Probe
from loragate.training import CalibrationSettings, calibrate

ADAPTER = "adapter"
OnEvent = Callable[[str, str, int, int, str], None]
"""Called with (candidate, stage, done, total, note); stages are "training" and "probing"."""


@dataclass(frozen=True)
class Outcome:
    """What one candidate did.

    Attributes:
        name: of the candidate, "adapter" for the untouched one.
        scores: float64 [questions, samples] on the probe.
        signs: what its answers look like (`ProbeScores.signs`).
        evidence: record of its training (`CalibrationResult.evidence`); empty for the adapter.
        gates: its tensors; empty for the adapter.
        seconds: of training and probing.
    """

    name: str
    scores: np.ndarray
    signs: dict[str, float]
    evidence: dict[str, Any] = field(default_factory=dict)
    gates: dict[str, torch.Tensor] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Selection:
    """What was chosen, and everything it was chosen from.

    Attributes:
        choice: pick and evidence.
        candidate: the picked candidate; None where the adapter remains.
        outcomes: by name, the adapter among them.
        probe: description of the questions.
    """

    choice: Choice
    candidate: Candidate | None
    outcomes: dict[str, Outcome]
    probe: dict[str, Any]

    def as_record(self) -> dict[str, Any]:
        """What the artifact keeps under "selection"."""
        trainings = [outcome for outcome in self.outcomes.values() if outcome.evidence]
        return {
            "method": f"best of {len(trainings)} on a {self.probe['kind']} probe, the adapter among the candidates",
            "accepted": self.choice.accepted,
            "picked": self.choice.name,
            "probe": self.probe,
            "evidence": self.choice.evidence,
            "signs": {name: outcome.signs for name, outcome in self.outcomes.items()},
            "cost": {
                "trainings": len(trainings),
                "training_seconds": round(sum(o.seconds.get("training", 0.0) for o in self.outcomes.values()), 1),
                "probing_seconds": round(sum(o.seconds.get("probing", 0.0) for o in self.outcomes.values()), 1),
            },
        }


class Transaction:
    """Everything that one selection needs; `run` does it.

    Args:
        model: base with the plain adapter; left ungated between candidates.
        tokenizer, rows, encoded: of the calibration.
        settings: of the training; a candidate's objective replaces the one in it.
        gate_config: from (lower, upper) to the gates' configuration.
        probe: the questions.
        engine: answers with the model as it stands.
        folder: where candidates are kept.
        calibrate_options: passed on to `calibrate` (sampler, reward, guard, …).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        rows: Rows,
        encoded: EncodedRows,
        settings: CalibrationSettings,
        gate_config: Callable[[float, float], GateConfig],
        probe: Probe,
        engine: Engine,
        folder: Path,
        **calibrate_options: Any,
    ) -> None:
        self.model, self.tokenizer, self.rows, self.encoded = model, tokenizer, rows, encoded
        self.settings, self.gate_config, self.probe = settings, gate_config, probe
        self.engine, self.folder, self.calibrate_options = engine, folder, calibrate_options
        self.data = rows.fingerprint

    def run(
        self, candidates: Sequence[Candidate], on_event: OnEvent | None = None, *, resume: bool = False
    ) -> Selection:
        """Train and probe what is not finished yet, and choose.

        The model is left ungated; `put_on` attaches what was chosen.

        Raises:
            ConfigError: for no candidates, or two of one name.
        """
        if not candidates or len({candidate.slug for candidate in candidates}) != len(candidates):
            raise ConfigError(f"candidate ranges must be given, each once; found {[c.name for c in candidates]}")
        outcomes = {ADAPTER: self._adapter(on_event)}
        for candidate in candidates:
            outcomes[candidate.name] = self._try(candidate, on_event, resume)
        choice = choose({name: outcome.scores for name, outcome in outcomes.items()}, ADAPTER)
        picked = next((candidate for candidate in candidates if candidate.name == choice.name), None)
        return Selection(choice, picked, outcomes, self.probe.as_dict())

    def put_on(self, selection: Selection, reference: Candidate) -> None:
        """Attach the chosen gates, or zero gates in the range of `reference` where the adapter remains."""
        candidate = selection.candidate or reference
        attach_gates(self.model, self.gate_config(candidate.lower, candidate.upper))
        load_gate_values(self.model, selection.outcomes[candidate.name].gates if selection.candidate else {})

    def _adapter(self, on_event: OnEvent | None) -> Outcome:
        path = self.folder / ADAPTER / "result.json"
        found = self._finished(path, ADAPTER)
        return found or self._probed(ADAPTER, path, on_event)

    def _try(self, candidate: Candidate, on_event: OnEvent | None, resume: bool) -> Outcome:
        place = self.folder / candidate.slug
        found = self._finished(place / "result.json", candidate.name)
        if found is not None:
            return replace(found, gates=load_file(place / "gates.safetensors"))
        begun = (place / "run" / "run.json").is_file()

        def report(step: Any) -> None:
            if on_event is not None:
                entropy = step.values.get("topk_entropy")
                note = "" if entropy is None else f"entropy {entropy:.3f}"
                on_event(candidate.name, "training", step.step, step.total, note)

        result = calibrate(
            self.model,
            self.tokenizer,
            self.rows,
            self.gate_config(candidate.lower, candidate.upper),
            replace(self.settings, objective=candidate.objective),
            run_folder=place / "run",
            resume=resume and begun,
            on_step=report,
            encoded=self.encoded,
            **self.calibrate_options,
        )
        try:
            gates = {name: value.detach().cpu().clone() for name, value in gate_parameters(self.model).items()}
            write_atomically(place / "gates.safetensors", lambda path: save_file(gates, path))
            outcome = self._probed(candidate.name, place / "result.json", on_event, result.evidence(), result.seconds)
            return replace(outcome, gates=gates)
        finally:
            detach_gates(self.model)

    def _probed(
        self,
        name: str,
        path: Path,
        on_event: OnEvent | None,
        evidence: dict[str, Any] | None = None,
        training_seconds: float = 0.0,
    ) -> Outcome:
        import time

        def report(done: int, total: int) -> None:
            if on_event is not None:
                on_event(name, "probing", done, total, "")

        began = time.monotonic()
        found = self.probe.score(self.engine, report)
        seconds = {"training": training_seconds, "probing": time.monotonic() - began}
        write_json(
            path,
            {
                "name": name,
                "made_from": self._made_from(),
                "scores": found.scores.tolist(),
                "signs": found.signs,
                "evidence": evidence or {},
                "seconds": seconds,
            },
        )
        return Outcome(name, found.scores, found.signs, evidence or {}, {}, seconds)

    def _made_from(self) -> dict[str, Any]:
        """What a finished candidate must share with this transaction."""
        settings = {**self.settings.as_record(), "objective": None}
        return {"probe": self.probe.fingerprint, "data": self.data, "training": settings}

    def _finished(self, path: Path, name: str) -> Outcome | None:
        if not path.is_file():
            return None
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            before, now = kept["made_from"], json.loads(json.dumps(self._made_from()))
            if differing := [key for key in now if before.get(key) != now[key]]:
                raise DataError(
                    f"{path} was made with another {' and another '.join(differing)}; repeat the command with the same settings, "
                    "or choose another --out"
                )
            scores = np.array(kept["scores"], dtype=float)
            return Outcome(name, scores, kept["signs"], kept["evidence"], {}, kept["seconds"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: not what this version writes ({error}); delete {path.parent} to measure again"
            ) from None


def load_gate_values(model: Any, values: dict[str, torch.Tensor]) -> None:
    """Copy values into the attached gates; those that are not given become zero (λ = 1)."""
    with torch.no_grad():
        for name, parameter in gate_parameters(model).items():
            if name in values:
                parameter.copy_(values[name])
            else:
                parameter.zero_()
            parameter.requires_grad_(False)
