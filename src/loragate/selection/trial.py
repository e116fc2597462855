"""Runs one trial: train the candidate's gates, keep them as a gated adapter, ask the probe, write the result.

Each trained candidate leaves a gated adapter of its own, in trials/<slug>/gated: gates of a few MB, and hard links to the one
copy of the adapter's files in adapters/<label>. The model is left as it was found: ungated.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from loragate.data import EncodedRows, Rows, find_endings
from loragate.errors import TrainingError
from loragate.files import held, write_json, write_text
from loragate.gates import GateConfig, attach_gates, detach_gates, gate_parameters, save_gates
from loragate.gates.artifact import write_sampling
from loragate.gates.attach import active_adapter, is_gated
from loragate.gates.card import render_card
from loragate.gates.schema import ADAPTER as ADAPTER_FOLDER
from loragate.gates.schema import CARD, CONFIG, GATES, read_gate_config
from loragate.generation import Engine
from loragate.models import Place
from loragate.selection.candidate import BASE, Candidate
from loragate.selection.probe import Probe
from loragate.selection.store import ADAPTERS, FAILED, GATED, TRAINED, Scored, Status, Store, TrialResult, read_json
from loragate.training import CalibrationSettings, calibrate

LOCK_WAIT_S = 60.0
OnEvent = Callable[[Candidate, str, int, int, float | None], None]
"""Called with (candidate, stage, done, total, entropy); stages are loading, training, probing, retention, testing, finished."""


@dataclass
class Bench:
    """What the trials of one adapter work on, in this process.

    Attributes:
        model, tokenizer: base with the plain adapter, and its tokenizer; gates come and go.
        engine: answers with the model as it stands.
        encode: from settings to the rows of the training and their tokens, in training order.
        config: of the gates; range and seed are the candidate's.
        settings: from a candidate to the settings of its training.
        probe, test, retention: questions; None where there are none.
        options: from settings to further arguments of `calibrate` (heldout, reward, guard, …).
        origin: arguments of `save_gates` that say where base and adapter come from.
        base_loads: how often this process has loaded a base.
    """

    model: Any
    tokenizer: Any
    engine: Engine
    encode: Callable[[CalibrationSettings], tuple[Rows, EncodedRows]]
    config: GateConfig
    settings: Callable[[Candidate], CalibrationSettings]
    probe: Probe | None = None
    test: Probe | None = None
    retention: Probe | None = None
    options: Callable[[CalibrationSettings], Mapping[str, Any]] = lambda _: {}
    origin: Mapping[str, Any] = field(default_factory=dict)
    base_loads: int = 1


def settings_of(settings: CalibrationSettings, objective: str, seed: int | None = None) -> CalibrationSettings:
    """The settings for a candidate's objective; what only other objectives read goes back to its default."""
    given = {name: getattr(settings, name) for name in CalibrationSettings.read_by(objective)}
    return CalibrationSettings(**{**given, "objective": objective, **({} if seed is None else {"seed": seed})})


def config_of(config: GateConfig, candidate: Candidate) -> GateConfig:
    """The gates of a candidate."""
    assert candidate.range is not None, "nothing is trained"
    return replace(config, lower=candidate.range.lower, upper=candidate.range.upper, seed=candidate.seed)


def origin_of(place: Place, base_id: str = "") -> dict[str, Any]:
    """What `save_gates` is told of base and adapter; a revision of the base that was loaded is none of another `base_id`."""
    return {
        "adapter_source": place.adapter,
        "base_id": base_id or place.base.lasting,
        "base_revision": None if base_id else place.base.revision or None,
        "adapter_id": place.hub_id,
    }


def run_trial(
    store: Store, candidate: Candidate, bench_of: Callable[[str], Bench], on_event: OnEvent | None = None
) -> TrialResult:
    """Run a trial, or go on where an earlier attempt was cut off; a finished one is only read.

    Args:
        bench_of: from the adapter's label to what its trials work on; asked only where something is left to do.

    Raises:
        KeyboardInterrupt: on Ctrl-C, after a checkpoint.
        Exception: whatever went wrong; it is also kept in failed.json.
    """
    place = store.place(candidate)
    taken = f"{place} is in use by another process; wait for it to end, or stop it"
    try:
        with held(place / "lock", LOCK_WAIT_S, taken):
            return store.read(candidate) or _attempt(store, candidate, bench_of, on_event)
    except Exception as error:
        store.note_failure(candidate, error)
        raise


def _attempt(
    store: Store, candidate: Candidate, bench_of: Callable[[str], Bench], on_event: OnEvent | None
) -> TrialResult:
    place = store.place(candidate)
    status = Status(place)

    def tell(stage: str, done: int = 0, total: int = 0, entropy: float | None = None) -> None:
        status(stage, done, total, entropy)
        if on_event is not None:
            on_event(candidate, stage, done, total, entropy)

    tell("loading")
    (place / FAILED).unlink(missing_ok=True)
    bench = bench_of(candidate.adapter)
    attempt = store.note_attempt(candidate, base_loads=bench.base_loads)
    trained: dict[str, Any] = {"training": {}, "modules": {}, "seconds": 0.0}
    try:
        if candidate.range is not None:
            trained = _train(store, bench, candidate, tell)
        with _acting(bench.model, candidate):
            found, seconds = _ask(bench, candidate, tell)
    except TrainingError as error:
        if str(error).startswith("stopped by Ctrl-C"):
            raise KeyboardInterrupt(str(error)) from error
        raise
    finally:
        if is_gated(bench.model, active_adapter(bench.model)):  # a training that failed has taken them off
            detach_gates(bench.model)
    if trained["seconds"]:
        seconds = {"training": trained["seconds"], **seconds}
    result = TrialResult(
        candidate, **found, training=trained["training"], modules=trained["modules"], seconds=seconds, attempt=attempt
    )
    store.write(result)
    tell("finished")
    return result


def _train(store: Store, bench: Bench, candidate: Candidate, tell: Callable[..., None]) -> dict[str, Any]:
    """Have the candidate's gates on the model, and return the record of their training; trained ones are only attached."""
    place = store.place(candidate)
    config = config_of(bench.config, candidate)
    if known := read_json(place / TRAINED):
        attach_gates(bench.model, config, active_adapter(bench.model))
        load_gate_values(bench.model, load_file(place / GATED / GATES))
        return known
    settings = bench.settings(candidate)
    rows, encoded = bench.encode(settings)
    entropy: float | None = None

    def report(step: Any) -> None:
        nonlocal entropy
        entropy = step.values.get("topk_entropy", entropy)
        tell("training", step.step, step.total, entropy)

    tell("training")
    result = calibrate(
        bench.model,
        bench.tokenizer,
        rows,
        config,
        settings,
        encoded=encoded,
        run_folder=place / "run",
        resume=(place / "run" / "run.json").is_file(),
        on_step=report,
        **bench.options(settings),
    )
    evidence = result.evidence()
    shutil.rmtree(place / GATED, ignore_errors=True)  # of an attempt that was cut off
    save_artifact(bench, place / GATED, evidence)
    share_files(place / GATED / ADAPTER_FOLDER, store.folder / ADAPTERS / candidate.adapter)
    training = {**evidence["training"], "parity": evidence["parity"]}
    trained = {"training": training, "modules": result.gates, "seconds": result.seconds}
    write_json(place / TRAINED, trained)
    return trained


def _acting(model: Any, candidate: Candidate) -> AbstractContextManager[Any]:
    """Within this context the PEFT model answers as the candidate; gates are attached before."""
    return model.disable_adapter() if candidate.objective == BASE else nullcontext()


def _ask(
    bench: Bench, candidate: Candidate, tell: Callable[..., None]
) -> tuple[dict[str, Scored | None], dict[str, float]]:
    """The candidate's answers to all questions, and the seconds that each set took."""
    asked = {"probe": (bench.probe, "probing"), "test": (bench.test, "testing")}
    if not candidate.is_reference:  # what cannot be picked cannot be vetoed either
        asked["retention"] = (bench.retention, "retention")
    found: dict[str, Scored | None] = {}
    seconds: dict[str, float] = {}
    for name, (probe, stage) in asked.items():
        found[name] = None
        if probe is None:
            continue
        began = time.monotonic()
        tell(stage)
        here = probe.at(candidate.temperature)
        answers = here.score(bench.engine, partial(tell, stage))
        seconds[stage] = time.monotonic() - began
        found[name] = Scored.of(here, answers)
    return found, seconds


def save_artifact(bench: Bench, folder: Path, evidence: dict[str, Any], k: int | None = None) -> None:
    """Write the model's gates as they are as a gated adapter, with its tokenizer.

    Args:
        evidence: what the artifact keeps, see `save_gates`.
        k: of the settings, where `evidence` holds no training.
    """
    endings = find_endings(bench.tokenizer, bench.model.generation_config)
    save_gates(bench.model, folder, k=k, **{**bench.origin, "stop_token_ids": endings.token_ids, "evidence": evidence})
    bench.tokenizer.save_pretrained(str(folder / ADAPTER_FOLDER / "tokenizer"))


def copy_artifact(source: Path, target: Path, selection: dict[str, Any], temperature: float | None = None) -> None:
    """Copy a trial's gated adapter, with the record of how it was chosen, and the sampling that it is recommended at.

    Raises:
        ArtifactError: if the trial has left none.
    """
    record = {**read_gate_config(source), "selection": selection}
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(CONFIG, CARD), dirs_exist_ok=True)
    record |= write_sampling(target, temperature)
    write_text(target / CARD, render_card(target.resolve().name, record))
    write_json(target / CONFIG, record)  # last: without it there is no artifact


def load_gate_values(model: Any, values: Mapping[str, torch.Tensor]) -> None:
    """Copy values into the attached gates; those that are not given become zero (λ = 1)."""
    with torch.no_grad():
        for name, parameter in gate_parameters(model).items():
            if name in values:
                parameter.copy_(values[name])
            else:
                parameter.zero_()
            parameter.requires_grad_(False)


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
