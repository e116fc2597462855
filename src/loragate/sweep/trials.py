"""Runs trials in one process: the base is loaded once, adapters change on it, gates come and go.

Each trained cell leaves a gated adapter of its own, in trials/<slug>/gated: gates of a few MB, and hard links to the one copy of
the adapter's files in adapters/<label>.

Where base, adapter and questions come from is the caller's knowledge; it arrives as `Materials`, which can be sent to another
process because it holds names, not weights.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, Protocol

from loragate.data import EncodedRows, Rows, find_endings
from loragate.errors import TrainingError
from loragate.files import write_json, write_text
from loragate.gates import GateConfig, detach_gates, save_gates
from loragate.gates.card import render_card
from loragate.gates.schema import CARD, CONFIG, read_gate_config
from loragate.generation import TransformersEngine
from loragate.selection.probe import Probe, ProbeScores
from loragate.sweep.plan import SweepPlan, Trial
from loragate.sweep.records import (
    CELL,
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

LOCK_WAIT_S = 60.0


class Materials(Protocol):
    """What trials are made of; every method may be slow, none is called twice for the same thing by one `TrialRunner`."""

    batch_size: int
    system: str
    place_of_base: str

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

    def probes(self, model: Any, tokenizer: Any) -> tuple[Probe | None, Probe | None]:
        """Probe and test set, if there are any."""
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
            evidence = trained.evidence()
            self._keep(trial, place / CELL, evidence)
            probe, test, seconds = self._score(status)
        finally:
            detach_gates(self.model)
        training = {**evidence["training"], "parity": evidence["parity"]}
        return TrialResult(trial, probe, test, training, trained.gates, {"training": trained.seconds, **seconds})

    def _keep(self, trial: Trial, target: Path, evidence: dict[str, Any]) -> None:
        """Write the trained gates as a gated adapter."""
        shutil.rmtree(target, ignore_errors=True)  # of an attempt that was cut off
        save_gates(
            self.model,
            target,
            adapter_source=self.materials.adapter_source(trial.adapter),
            base_id=self.materials.place_of_base,
            adapter_id=self.materials.adapter_id(trial.adapter),
            stop_token_ids=find_endings(self.tokenizer, self.model.generation_config).token_ids,
            evidence={key: evidence[key] for key in ("parity", "training")},
        )
        self.tokenizer.save_pretrained(str(target / "adapter" / "tokenizer"))
        share_files(target / "adapter", self.folder / "adapters" / trial.adapter)

    def _rows(self, settings: CalibrationSettings) -> tuple[Rows, EncodedRows]:
        key = (self.label, settings.seed, settings.max_rows, settings.max_length)
        if key not in self.encoded:
            if self.rows is None:
                self.rows = self.materials.load_rows()
            # rows of another seed or adapter will hardly be asked for again
            self.encoded = {key: calibration_rows(self.rows, self.tokenizer, settings, self.materials.system)}
        return self.encoded[key]

    def _score(self, status: Status) -> tuple[Scored | None, Scored | None, dict[str, float]]:
        engine = TransformersEngine(self.model, self.tokenizer, batch_size=self.materials.batch_size)
        seconds: dict[str, float] = {}

        def score(questions: Probe, stage: str) -> Scored:
            began = time.monotonic()
            status(stage)
            found = questions.score(engine, lambda done, total: status(stage, done, total))
            seconds[stage] = time.monotonic() - began
            return Scored(found.scores, found.signs, answers_sha256(found), questions.fingerprint)

        probe = None if self.probe is None else score(self.probe, "probing")
        return probe, None if self.test is None else score(self.test, "testing"), seconds


def write_best(folder: Path, trial: Trial, target: Path, selection: dict[str, Any]) -> None:
    """Copy a finished trial's gated adapter, with the record of how it was chosen.

    Raises:
        ArtifactError: if the trial has left none.
    """
    source = trial_folder(folder, trial) / CELL
    record = {**read_gate_config(source), "selection": selection}
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(CONFIG, CARD), dirs_exist_ok=True)
    write_text(target / CARD, render_card(target.name, record))
    write_json(target / CONFIG, record)  # last: without it there is no artifact


def share_files(folder: Path, common: Path) -> None:
    """Have equal files of many folders take their room once: a hard link to the first in `common`, where there can be links."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        kept = common / file.relative_to(folder)
        kept.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, kept)
        except FileExistsError:
            if filecmp.cmp(file, kept, shallow=False):
                link = file.with_name(f"{file.name}.link")
                os.link(kept, link)
                link.replace(file)
        except OSError:
            return  # a file system without hard links: every folder keeps its own


def answers_sha256(found: ProbeScores) -> str:
    """SHA-256 over the tokens of all answers."""
    text = json.dumps([[sample.question, sample.sample, list(sample.token_ids)] for sample in found.samples])
    return hashlib.sha256(text.encode()).hexdigest()
