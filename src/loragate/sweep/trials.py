"""Runs trials in one process: the base is loaded once, adapters change on it, gates come and go.

Where base, adapter and questions come from is the caller's knowledge; it arrives as `Materials`, which can be sent to another
process because it holds names, not weights.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from loragate.data import EncodedRows, Rows, find_endings
from loragate.errors import DataError, TrainingError
from loragate.files import write_atomically
from loragate.gates import GateConfig, attach_gates, detach_gates, gate_parameters, save_gates
from loragate.generation import TransformersEngine
from loragate.losses.entropy import support_size
from loragate.selection.probe import Probe, ProbeScores
from loragate.sweep.plan import SweepPlan, Trial
from loragate.sweep.records import (
    FAILED,
    Scored,
    Status,
    TrialResult,
    held,
    note_attempt,
    note_failure,
    read_result,
    trial_folder,
    write_result,
)
from loragate.training import CalibrationResult, CalibrationSettings, calibrate, calibration_rows

GATES = "gates.safetensors"
LOCK_WAIT_S = 60.0


class Materials(Protocol):
    """What trials are made of; every method may be slow, none is called twice for the same thing by one `TrialRunner`."""

    batch_size: int
    system: str

    def load_base(self) -> Any: ...

    def load_adapter(self, base: Any, label: str) -> Any:
        """A PeftModel around the base."""
        ...

    def adapter_source(self, label: str) -> str | None:
        """The folder of the adapter's files, to copy them from."""
        ...

    def adapter_id(self, label: str) -> str | None:
        """Its hub id, where it has one."""
        ...

    def load_tokenizer(self, label: str) -> Any: ...

    def load_rows(self) -> Rows: ...

    def settings(self, trial: Trial) -> CalibrationSettings: ...

    def gates(self, trial: Trial) -> GateConfig: ...

    def probes(self, model: Any, tokenizer: Any) -> tuple[Probe, Probe | None]:
        """Probe and, if there is one, test set."""
        ...


class TrialRunner:
    """Runs trials one after the other.

    Args:
        materials: see `Materials`.
        plan, folder: of the sweep.
    """

    def __init__(self, materials: Materials, plan: SweepPlan, folder: Path) -> None:
        self.materials, self.plan, self.folder = materials, plan, folder
        self.base: Any = None
        self.model: Any = None
        self.label = ""
        self.rows: Rows | None = None
        self.tokenizer: Any = None
        self.probe: Probe | None = None
        self.test: Probe | None = None
        self.encoded: dict[tuple[Any, ...], tuple[Rows, EncodedRows]] = {}
        self.loads = 0

    def run(self, trial: Trial) -> TrialResult:
        """Run a trial, or go on where an earlier attempt was cut off; a finished one is only read.

        Raises:
            KeyboardInterrupt: on Ctrl-C, after a checkpoint.
            Exception: whatever went wrong; it is also kept in failed.json.
        """
        place = trial_folder(self.folder, trial)
        try:
            with held(
                place / "lock", LOCK_WAIT_S, f"{place} is in use by another process; wait for it to end, or stop it"
            ):
                return read_result(self.folder, self.plan, trial) or self._attempt(trial, place)
        except Exception as error:
            note_failure(place, self.plan, error)
            raise

    def _attempt(self, trial: Trial, place: Path) -> TrialResult:
        status = Status(place)
        status("loading")
        (place / FAILED).unlink(missing_ok=True)
        self._open(trial.adapter)
        attempt = note_attempt(place, base_loads=self.loads)
        try:
            result = self._adapter(trial, status) if trial.kind == "adapter" else self._gates(trial, place, status)
        except TrainingError as error:
            if str(error).startswith("stopped by Ctrl-C"):
                raise KeyboardInterrupt from error
            raise
        result.attempt.update(attempt)
        write_result(self.folder, self.plan, result)
        status("finished")
        return result

    def write_best(self, trial: Trial, target: Path, selection: dict[str, Any], base_id: str) -> None:
        """Write the gates of a finished trial as a gated adapter."""
        result = read_result(self.folder, self.plan, trial)
        if result is None:
            raise DataError(f"{trial_folder(self.folder, trial)} is not finished; resume the sweep first")
        training = dict(result.training)
        parity = training.pop("parity", None)
        self._open(trial.adapter)
        attach_gates(self.model, self.materials.gates(trial))
        try:
            values = load_file(str(trial_folder(self.folder, trial) / GATES))
            with torch.no_grad():
                for name, parameter in gate_parameters(self.model).items():
                    parameter.copy_(values[name])
            save_gates(
                self.model,
                target,
                adapter_source=self.materials.adapter_source(trial.adapter),
                k=support_size(self.materials.settings(trial).k, self.model.get_output_embeddings().weight.shape[0]),
                base_id=base_id,
                adapter_id=self.materials.adapter_id(trial.adapter),
                stop_token_ids=find_endings(self.tokenizer, self.model.generation_config).token_ids,
                evidence={"parity": parity, "selection": selection, "training": training},
            )
        finally:
            detach_gates(self.model)
        self.tokenizer.save_pretrained(str(target / "adapter" / "tokenizer"))

    def _open(self, label: str) -> None:
        """Have this adapter on the base; the base is as freshly loaded each time."""
        if self.base is None:
            self.base = self.materials.load_base()
            self.loads += 1
        if self.label == label:
            return
        if self.model is not None:
            self.base, self.model, self.label = self.model.unload(), None, ""
        self.model = self.materials.load_adapter(self.base, label)
        self.tokenizer = self.materials.load_tokenizer(label)
        self.probe, self.test = self.materials.probes(self.model, self.tokenizer)
        self.label = label

    def _adapter(self, trial: Trial, status: Status) -> TrialResult:
        probe, test, seconds = self._score(status)
        return TrialResult(trial, probe, test, seconds=seconds)

    def _gates(self, trial: Trial, place: Path, status: Status) -> TrialResult:
        settings = self.materials.settings(trial)
        rows, encoded = self._rows(settings)
        entropy: float | None = None

        def report(step: Any) -> None:
            nonlocal entropy
            entropy = step.values.get("topk_entropy", entropy)
            status("training", step.step, step.total, entropy)

        status("training")
        trained: CalibrationResult = calibrate(
            self.model,
            self.tokenizer,
            rows,
            self.materials.gates(trial),
            settings,
            encoded=encoded,
            run_folder=place / "run",
            resume=(place / "run" / "run.json").is_file(),
            on_step=report,
        )
        try:
            gates = {name: value.detach().cpu().contiguous() for name, value in gate_parameters(self.model).items()}
            write_atomically(place / GATES, lambda path: save_file(gates, str(path)))
            probe, test, seconds = self._score(status)
        finally:
            detach_gates(self.model)
        record = trained.evidence()
        training = {**record["training"], "parity": record["parity"]}
        return TrialResult(trial, probe, test, training, trained.gates, {"training": trained.seconds, **seconds})

    def _rows(self, settings: CalibrationSettings) -> tuple[Rows, EncodedRows]:
        key = (self.label, settings.seed, settings.max_rows, settings.max_length)
        if key not in self.encoded:
            if self.rows is None:
                self.rows = self.materials.load_rows()
            # rows of another seed or adapter will hardly be asked for again
            self.encoded = {key: calibration_rows(self.rows, self.tokenizer, settings, self.materials.system)}
        return self.encoded[key]

    def _score(self, status: Status) -> tuple[Scored, Scored | None, dict[str, float]]:
        assert self.probe is not None
        engine = TransformersEngine(self.model, self.tokenizer, batch_size=self.materials.batch_size)
        seconds: dict[str, float] = {}

        def score(questions: Probe, stage: str) -> Scored:
            began = time.monotonic()
            status(stage)
            found = questions.score(engine, lambda done, total: status(stage, done, total))
            seconds[stage] = time.monotonic() - began
            return Scored(found.scores, found.signs, answers_sha256(found), questions.fingerprint)

        probe = score(self.probe, "probing")
        return probe, None if self.test is None else score(self.test, "testing"), seconds


def answers_sha256(found: ProbeScores) -> str:
    """SHA-256 over the tokens of all answers."""
    text = json.dumps([[sample.question, sample.sample, list(sample.token_ids)] for sample in found.samples])
    return hashlib.sha256(text.encode()).hexdigest()
