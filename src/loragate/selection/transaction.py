"""Train candidates, probe them, keep the best or fall back to the adapter: one transaction, resumable at every point.

    folder/<candidate>/run/              log and checkpoints of its training
    folder/<candidate>/gates.safetensors
    folder/<candidate>/trained.json      record of its training; from here on it is not trained again
    folder/<candidate>/failed.json       in its place: why training could not go on; the other candidates may do
    folder/<candidate>/result.json       what it did on the probe; written last, so it marks the candidate as finished
    folder/adapter/result.json           the untouched adapter, always a candidate
    folder/base/, folder/cooler/         the same of what is asked for comparison only (`references.py`)

Where nothing beats the adapter, the gates that remain are zero: λ = 1 everywhere, bit for bit the adapter, in every program
that can load gates. Nothing here prints, and training's own loss is never looked at. One process: several would each have to
sample the probe.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from loragate.data import EncodedRows, Rows
from loragate.errors import ConfigError, DataError, DivergenceError
from loragate.files import write_atomically, write_json
from loragate.gates import GateConfig, adapter_fingerprint, attach_gates, detach_gates, gate_parameters
from loragate.gates.attach import active_adapter
from loragate.gates.eligibility import trains_biases
from loragate.gates.fingerprint import base_weight_samples
from loragate.gates.range import Range
from loragate.generation import Engine
from loragate.selection.candidate import Candidate
from loragate.selection.choose import choose
from loragate.selection.outcome import ADAPTER, Outcome, Selection
from loragate.selection.probe import Probe
from loragate.selection.references import Reference, references_of
from loragate.selection.retention import vetoes
from loragate.training import CalibrationSettings, calibrate
from loragate.training.guards import Reading
from loragate.training.run import encoded_fingerprint

OnEvent = Callable[[str, str, int, int, str], None]
"""Called with (candidate, stage, done, total, note); stages are "training", "probing" and "retention"."""


def settings_of(settings: CalibrationSettings, objective: str) -> CalibrationSettings:
    """The settings for a candidate's objective; what only other objectives read goes back to its default."""
    given = {name: getattr(settings, name) for name in CalibrationSettings.read_by(objective)}
    return CalibrationSettings(**{**given, "objective": objective})


class Transaction:
    """Everything that one selection needs; `run` does it.

    Args:
        model: base with the plain adapter; left ungated between candidates.
        tokenizer, rows, encoded: of the calibration.
        settings: of the training; a candidate's objective replaces the one in it.
        gate_config: from a range to the gates' configuration.
        probe: the questions.
        engine: answers with the model as it stands.
        folder: where candidates are kept.
        retention: a second labelled probe, on which a candidate must not lose.
        calibrate_options: from a candidate's settings to further arguments of `calibrate` (sampler, reward, guard, …).
        references: on a labelled probe, ask the base and the adapter at temperature 0.3 as well, which cannot be picked.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        rows: Rows,
        encoded: EncodedRows,
        settings: CalibrationSettings,
        gate_config: Callable[[Range], GateConfig],
        probe: Probe,
        engine: Engine,
        folder: Path,
        retention: Probe | None = None,
        calibrate_options: Callable[[CalibrationSettings], Mapping[str, Any]] | None = None,
        references: bool = True,
    ) -> None:
        self.model, self.tokenizer, self.rows, self.encoded = model, tokenizer, rows, encoded
        self.settings, self.gate_config, self.probe = settings, gate_config, probe
        self.engine, self.folder, self.retention = engine, folder, retention
        self.calibrate_options = calibrate_options or (lambda _: {})
        can_be_off = not trains_biases(model, active_adapter(model))
        self.references = references_of(probe, can_be_off) if references else ()
        self.common = {
            "probe": probe.fingerprint,
            "retention": None if retention is None else retention.fingerprint,
            "data": rows.fingerprint,
            "tokens": encoded_fingerprint(encoded),
            "adapter": adapter_fingerprint(model, active_adapter(model)),
            "base": hashlib.sha256(json.dumps(base_weight_samples(model)).encode()).hexdigest(),
        }

    def run(
        self, candidates: Sequence[Candidate], on_event: OnEvent | None = None, *, resume: bool = False
    ) -> Selection:
        """Train and probe what is not finished yet, and choose.

        The model is left ungated; `put_on` attaches what was chosen.

        Raises:
            ConfigError: for no candidates, two of one name, several processes, or earlier candidates in the folder that
                are not to be resumed.
            DataError: if what is resumed was made with another probe, other rows, settings, gates or models.
            DivergenceError: if no candidate's training stayed finite. One that did not only drops out.
        """
        if not candidates or len({candidate.slug for candidate in candidates}) != len(candidates):
            raise ConfigError(f"candidate ranges must be given, each once; found {[c.name for c in candidates]}")
        if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
            raise ConfigError("ranges are chosen in one process; start the command without a distributed launcher")
        if not resume and any(self.folder.glob("*/*.json")):
            raise ConfigError(
                f"{self.folder} holds candidates of an earlier run; go on with --resume, or choose another --out"
            )
        for candidate in candidates:
            settings_of(self.settings, candidate.objective)  # a setting that does not fit shows before any training
        outcomes = {ADAPTER: self._adapter(on_event)}
        failed: dict[str, str] = {}
        for candidate in candidates:
            try:
                outcomes[candidate.name] = self._try(candidate, on_event, resume)
            except DivergenceError as error:
                failed[candidate.name] = str(error)
                if len(failed) == len(candidates):
                    raise
        kept = {name: o.retention for name, o in outcomes.items() if o.retention is not None}
        vetoed = vetoes(kept, ADAPTER) if kept else {}
        choice = choose({name: outcome.scores for name, outcome in outcomes.items()}, ADAPTER, vetoed)
        picked = next((candidate for candidate in candidates if candidate.name == choice.name), None)
        retention = None if self.retention is None else self.retention.as_dict()
        references = {reference.name: self._reference(reference, on_event) for reference in self.references}
        return Selection(choice, picked, outcomes, self.probe.as_dict(), retention, failed, references)

    def put_on(self, selection: Selection, reference: Candidate) -> None:
        """Attach the chosen gates, or zero gates in the range of `reference` where the adapter remains."""
        candidate = selection.candidate or reference
        attach_gates(self.model, self.gate_config(candidate.range), active_adapter(self.model))
        load_gate_values(self.model, selection.outcomes[candidate.name].gates if selection.candidate else {})

    def _adapter(self, on_event: OnEvent | None) -> Outcome:
        place = self.folder / ADAPTER
        return self._finished(place, self.common) or self._probed(ADAPTER, place, self.common, on_event, {}, 0.0)

    def _reference(self, reference: Reference, on_event: OnEvent | None) -> Outcome:
        place = self.folder / reference.folder
        made_from = {**self.common, "probe": reference.probe.fingerprint}
        found = self._finished(place, made_from)
        if found is None:
            with reference.acting(self.model):
                found = self._probed(reference.name, place, made_from, on_event, {}, 0.0, (reference.probe, None))
        return found

    def _try(self, candidate: Candidate, on_event: OnEvent | None, resume: bool) -> Outcome:
        place = self.folder / candidate.slug
        settings, config = settings_of(self.settings, candidate.objective), self.gate_config(candidate.range)
        options = dict(self.calibrate_options(settings))
        guard = options.get("guard")
        made_from = {
            **self.common,
            "settings": settings.as_record(),
            "gates": asdict(config),
            "guard": None if guard is None else asdict(guard),
        }
        found = self._finished(place, made_from)
        if found is not None:
            return replace(found, gates=load_file(place / "gates.safetensors"))
        trained = _read(place / "trained.json", made_from)
        if (known := _read(place / "failed.json", made_from)) is not None:
            raise DivergenceError(known["reason"])

        def report(step: Any) -> None:
            if on_event is not None:
                entropy = step.values.get("topk_entropy")
                note = "" if entropy is None else f"entropy {entropy:.3f}"
                on_event(candidate.name, "training", step.step, step.total, note)

        if trained is None:
            try:
                result = calibrate(
                    self.model,
                    self.tokenizer,
                    self.rows,
                    config,
                    settings,
                    run_folder=place / "run",
                    resume=resume and (place / "run" / "run.json").is_file(),
                    on_step=report,
                    encoded=self.encoded,
                    **options,
                )
            except DivergenceError as error:
                write_json(place / "failed.json", {"made_from": made_from, "reason": str(error)})
                raise
            gates = {name: value.detach().cpu().clone() for name, value in gate_parameters(self.model).items()}
            write_atomically(place / "gates.safetensors", lambda path: save_file(gates, path))
            trained = {"made_from": made_from, "evidence": result.evidence(), "seconds": result.seconds}
            write_json(place / "trained.json", trained)
        else:
            gates = load_file(place / "gates.safetensors")
            attach_gates(self.model, config, active_adapter(self.model))
            load_gate_values(self.model, gates)
        try:
            outcome = self._probed(
                candidate.name, place, made_from, on_event, trained["evidence"], float(trained["seconds"])
            )
            return replace(outcome, gates=gates)
        finally:
            detach_gates(self.model, active_adapter(self.model))

    def _probed(
        self,
        name: str,
        place: Path,
        made_from: dict[str, Any],
        on_event: OnEvent | None,
        evidence: dict[str, Any],
        training_seconds: float,
        asked: tuple[Probe, Probe | None] | None = None,
    ) -> Outcome:
        def reporter(stage: str) -> Callable[[int, int], None]:
            return lambda done, total: on_event(name, stage, done, total, "") if on_event is not None else None

        began = time.monotonic()
        probe, retention = asked or (self.probe, self.retention)
        found = probe.score(self.engine, reporter("probing"))
        retained = None if retention is None else retention.score(self.engine, reporter("retention")).scores
        seconds = {"training": training_seconds, "probing": time.monotonic() - began}
        record = {
            "name": name,
            "made_from": made_from,
            "scores": found.scores.tolist(),
            "signs": found.signs,
            "reading": asdict(found.reading),
            "retention": None if retained is None else retained.tolist(),
            "evidence": evidence,
            "seconds": seconds,
        }
        write_json(place / "result.json", record)
        return Outcome(name, found.scores, found.signs, found.reading, retained, evidence, {}, seconds)

    def _finished(self, place: Path, made_from: dict[str, Any]) -> Outcome | None:
        kept = _read(place / "result.json", made_from)
        if kept is None:
            return None
        try:
            retained = None if kept["retention"] is None else np.array(kept["retention"], dtype=float)
            return Outcome(
                kept["name"],
                np.array(kept["scores"], dtype=float),
                kept["signs"],
                Reading(**kept["reading"]),
                retained,
                kept["evidence"],
                {},
                kept["seconds"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise _unreadable(place / "result.json", error) from None


def _read(path: Path, made_from: dict[str, Any]) -> dict[str, Any] | None:
    """A record of this transaction, or None where there is none yet.

    Raises:
        DataError: for a record of another one.
    """
    if not path.is_file():
        return None
    try:
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        before, now = kept["made_from"], json.loads(json.dumps(made_from))
        differing = [key for key in now if before.get(key) != now[key]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(path, error) from None
    if differing:
        raise DataError(
            f"{path} was made with another {' and another '.join(differing)}; repeat the command with the same settings, or "
            "choose another --out"
        )
    return kept


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: not what this version writes ({error}); delete {path.parent} to measure again")


def load_gate_values(model: Any, values: dict[str, torch.Tensor]) -> None:
    """Copy values into the attached gates; those that are not given become zero (λ = 1)."""
    with torch.no_grad():
        for name, parameter in gate_parameters(model).items():
            if name in values:
                parameter.copy_(values[name])
            else:
                parameter.zero_()
            parameter.requires_grad_(False)
