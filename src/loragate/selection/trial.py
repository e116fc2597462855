"""Runs one trial: train the candidate's gates, keep them as a gated adapter, ask the probe, write the result.

Each trained candidate leaves a gated adapter of its own, in trials/<slug>/gated: gates of a few MB, and hard links to the one
copy of the adapter's files in adapters/<label>. The model is left as it was found: ungated.
"""

from __future__ import annotations

import filecmp
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from loragate.data import EncodedRows, Rows, find_endings
from loragate.effects import acting
from loragate.errors import TrainingError
from loragate.files import held, read_json, write_json, write_text
from loragate.gates import GateConfig, attach_gates, detach_gates, gate_parameters, save_gates
from loragate.gates.artifact import write_sampling
from loragate.gates.attach import active_adapter, is_gated
from loragate.gates.card import render_card
from loragate.gates.range import Range
from loragate.gates.schema import ADAPTER as ADAPTER_FOLDER
from loragate.gates.schema import CARD, CONFIG, read_gate_config
from loragate.gates.schema import GATES as GATES_FILE
from loragate.generation import Engine, TransformersEngine
from loragate.models import ModelSource
from loragate.selection.candidate import ADAPTER, GATES, Candidate
from loragate.selection.probe import Probe, Scored
from loragate.selection.store import ADAPTERS, FAILED, GATED, PART, TRAINED, Store, TrialResult
from loragate.training import GateTrainingResult, GateTrainingSettings, train_gates
from loragate.training.callbacks import StepReport
from loragate.training.gate_training import check_start

LOCK_WAIT_S = 60.0
SHARE, PART_QUESTIONS = 0.25, 24
"""Of its steps that a candidate is trained before the weaker ones stop, and questions that it is asked then."""

CONSTANT_RANGE = Range(-1, 2)
"""In which one λ for all is written; the values that are tried lie well inside."""
OnEvent = Callable[[Candidate, str, int, int, float | None], None]
"""Called with (candidate, stage, done, total, entropy); stages are asking (the adapter, for its majority), planned (total: the
most answers that will be asked), loading, training, probing, retention, finished, failed."""


@dataclass
class Bench:
    """What trials work on, in this process.

    Attributes:
        model, tokenizer: base with the plain adapter, and its tokenizer; gates come and go.
        engine: answers with the model as it stands.
        encode: from settings to the rows of the training and their tokens, in training order.
        config: of the gates; range and seed are the candidate's.
        settings: from a candidate to the settings of its training.
        probe, retention: questions; None where there are none.
        options: from settings to further arguments of `calibrate` (heldout, reward, guard, …).
        origin: arguments of `save_gates` that say where base and adapter come from.
    """

    model: Any
    tokenizer: Any
    engine: Engine
    encode: Callable[[GateTrainingSettings], tuple[Rows, EncodedRows]]
    config: GateConfig
    settings: Callable[[Candidate], GateTrainingSettings]
    probe: Probe | None = None
    retention: Probe | None = None
    options: Callable[[GateTrainingSettings], Mapping[str, Any]] = lambda _: {}
    origin: Mapping[str, Any] = field(default_factory=dict)


def settings_by_objective(options: GateTrainingSettings, objectives: Iterable[str]) -> dict[str, GateTrainingSettings]:
    """{objective: its training settings}: those of the options that it reads; a ConfigError for one that none reads."""
    given = {field.name: getattr(options, field.name) for field in fields(GateTrainingSettings)}
    own = {name: set(acting("calibration", given, objective=name)) for name in objectives}
    somewhere = set().union(*own.values())
    unread = {key: value for key, value in given.items() if key not in somewhere}
    found = {}
    for name, read in own.items():
        GateTrainingSettings(**{**unread, "objective": name})  # says which setting has no effect
        mine = {key: value for key, value in given.items() if key in read}
        found[name] = GateTrainingSettings(**{**mine, "objective": name})
    return found


def config_of(config: GateConfig, candidate: Candidate) -> GateConfig:
    """The gates of a candidate; raises ConfigError for some that no training moves."""
    assert candidate.range is not None, "nothing is trained"
    own = replace(config, lower=candidate.range.lower, upper=candidate.range.upper, seed=candidate.seed)
    check_start(own, candidate.objective)
    return own


def origin_of(place: ModelSource, base_id: str = "") -> dict[str, Any]:
    """What `save_gates` is told of base and adapter; a revision of the base that was loaded is none of another `base_id`."""
    return {
        "adapter_source": place.adapter,
        "base_id": base_id or place.base.lasting,
        "base_revision": None if base_id else place.base.revision or None,
        "adapter_id": place.hub_id,
    }


def run_trial(
    store: Store,
    candidate: Candidate,
    bench_of: Callable[[], Bench],
    on_event: OnEvent | None = None,
    *,
    questions: int | None = None,
    retention: bool = False,
) -> TrialResult:
    """Run a trial, or go on where an earlier attempt was cut off; what is finished is only read.

    Args:
        bench_of: gives what the trials work on; asked only where something is left to do.
        questions: of the probe that it is asked at least, the first ones; None for all. More can be asked later.
        retention: whether it is asked the retention probe as well.

    What goes wrong is raised and kept in failed.json; Ctrl-C is a KeyboardInterrupt after a checkpoint.
    """
    with _alone(store, candidate, on_event) as tell:
        known = store.read(candidate)
        asked = 0 if known is None or known.probe is None else len(known.probe.scores)
        if known is not None and asked >= (questions or 0) and (known.retention is not None or not retention):
            return known
        tell("loading")
        bench = bench_of()
        with _acting(store, bench, candidate, tell) as trained:
            result = _ask(bench, known or TrialResult(candidate, None), questions, retention, tell)
        if candidate == candidate.model and trained["seconds"]:  # at several temperatures it is trained once
            seconds = {"training": trained["seconds"], **result.seconds}
            result = replace(result, training=trained["training"], modules=trained["modules"], seconds=seconds)
        store.write(result)
        tell("finished")
        return result


def train_trial(store: Store, one: Candidate, bench: Bench, on_event: OnEvent | None = None) -> None:
    """Have the gates of a candidate trained and kept, so that it can be asked at any temperature; raises as `run_trial`."""
    with _alone(store, one, on_event) as tell:
        if not read_json(store.place(one) / TRAINED):
            with _acting(store, bench, one, tell):
                pass


def train_part(
    store: Store,
    one: Candidate,
    bench: Bench,
    temperatures: Sequence[float],
    most: int,
    on_event: OnEvent | None = None,
) -> dict[str, Any]:
    """Train the first `SHARE` of a candidate's steps, ask what came of it, and leave a checkpoint that `train_trial` goes on from.

    Args:
        temperatures: at which it is asked, each as many answers as `PART_QUESTIONS` questions have.
        most: questions that may be asked, the first ones.

    Returns:
        steps, seconds of training and asking, answers, {temperature: mean score} and {temperature: scores [questions, samples]};
        what is finished is only read. Raises as `run_trial`.
    """
    place, probe = store.place(one), bench.probe
    with _alone(store, one, on_event) as tell:
        if found := read_json(place / PART):
            return found
        assert probe is not None, "there is evidence"
        with _acting(store, bench, one, tell, part=True) as trained:
            scores, verdicts, answers, began = {}, {}, 0, time.monotonic()
            for heat in temperatures:
                here = probe.at(heat)
                count = PART_QUESTIONS * probe.sampling.samples // here.sampling.samples
                scored = here.score(bench.engine, partial(tell, "probing"), 0, min(count, most))
                scores[f"{heat:g}"], verdicts[str(heat)] = float(scored.scores.mean()), scored.scores.tolist()
                answers += scored.scores.size
            seconds = {"seconds": trained["seconds"], "asking": time.monotonic() - began}
        steps = {key: trained["training"][key] for key in ("steps", "training_seconds")}
        found = {**steps, **seconds, "answers": answers, "scores": scores, "verdicts": verdicts}
        write_json(place / PART, found)
        return found


@contextmanager
def _alone(store: Store, candidate: Candidate, on_event: OnEvent | None) -> Iterator[Callable[..., None]]:
    """Have a trial's folder to oneself, and a function that tells how far it is; what goes wrong is kept there."""
    place = store.place(candidate)

    def tell(stage: str, done: int = 0, total: int = 0, entropy: float | None = None) -> None:
        if on_event is not None:
            on_event(candidate, stage, done, total, entropy)

    try:
        with held(place / "lock", LOCK_WAIT_S, f"{place} is in use by another process; wait for it to end, or stop it"):
            yield tell
    except Exception as error:
        store.note_failure(candidate, error)
        tell("failed")
        raise


@contextmanager
def _acting(
    store: Store, bench: Bench, candidate: Candidate, tell: Callable[..., None], *, part: bool = False
) -> Iterator[dict[str, Any]]:
    """Within this context the model answers as the candidate, trained if it was not yet; yields the training's record.

    Args:
        part: it is trained the first `SHARE` of its steps only, and nothing but a checkpoint is kept.
    """
    trained: dict[str, Any] = {"training": {}, "modules": {}, "seconds": 0.0}
    (store.place(candidate) / FAILED).unlink(missing_ok=True)  # of an earlier attempt
    try:
        if candidate.kind == GATES:
            trained = _train(store, bench, candidate.model, tell, part)
        elif candidate.kind != ADAPTER:
            attach_constant(bench.model, candidate.fixed)
        engine, weights = bench.engine, (candidate.model, part)
        again = part or candidate.temperature is not None  # asked at several temperatures
        with engine.keeping_prompts(weights) if again and isinstance(engine, TransformersEngine) else nullcontext():
            yield trained
    except TrainingError as error:
        if str(error).startswith("stopped by Ctrl-C"):
            raise KeyboardInterrupt(str(error)) from error
        raise
    finally:
        if is_gated(bench.model, active_adapter(bench.model)):  # a training that failed has taken them off
            detach_gates(bench.model)


def _train(store: Store, bench: Bench, candidate: Candidate, tell: Callable[..., None], part: bool) -> dict[str, Any]:
    """Have the candidate's gates on the model, and return the record of their training; trained ones are only attached."""
    place = store.place(candidate)
    if known := read_json(place / TRAINED):
        put_gates_on(bench, candidate, place / GATED)
        return known
    result = fit(bench, candidate, place / "run", tell, part=part)
    evidence = result.evidence()
    if earlier := read_json(place / PART):  # this training went on from there
        for key in ("seconds", "training_seconds"):
            evidence["training"][key] = round(evidence["training"][key] + earlier[key], 1)
    if part:
        return {"training": evidence["training"], "modules": {}, "seconds": result.seconds}
    shutil.rmtree(place / GATED, ignore_errors=True)  # of an attempt that was cut off
    save_artifact(bench, place / GATED, evidence)
    share_files(place / GATED / ADAPTER_FOLDER, store.folder / ADAPTERS / candidate.adapter)
    training = {**evidence["training"], "parity": evidence["parity"]}
    trained = {"training": training, "modules": result.gates, "seconds": result.seconds}
    write_json(place / TRAINED, trained)
    return trained


def fit(
    bench: Bench, candidate: Candidate, run: Path, tell: Callable[..., None], *, part: bool = False, resume: bool = True
) -> GateTrainingResult:
    """Train the candidate's gates on the model, from where an earlier training in this run folder was cut off.

    Args:
        tell: told the stage "training", the step, how many there are, and the entropy.
        part: stop after the first `SHARE` of the steps, with a checkpoint.
        resume: whether what lies in the folder may be gone on with.
    """
    settings = bench.settings(candidate)
    rows, encoded = bench.encode(settings)
    entropy: float | None = None

    def report(step: StepReport) -> None:
        nonlocal entropy
        entropy = step.values.get("topk_entropy", entropy)
        tell("training", step.step, step.total, entropy)

    tell("training")
    return train_gates(
        bench.model,
        bench.tokenizer,
        rows,
        config_of(bench.config, candidate),
        settings,
        encoded=encoded,
        run_folder=run,
        resume=resume and (run / "run.json").is_file(),
        on_step=report,
        **bench.options(settings),
    )


def _ask(
    bench: Bench, known: TrialResult, questions: int | None, retention: bool, tell: Callable[..., None]
) -> TrialResult:
    """The result with the answers that it lacks."""
    found: dict[str, Scored | None] = {"probe": known.probe, "retention": known.retention}
    seconds = dict(known.seconds)
    asked = {"probe": (bench.probe, "probing", questions)}
    if retention:
        asked["retention"] = (bench.retention, "retention", None)
    for name, (probe, stage, stop) in asked.items():
        before = found[name]
        start = 0 if before is None else len(before.scores)
        if probe is None or start >= (stop or len(probe.questions)):
            continue
        began = time.monotonic()
        tell(stage)
        more = probe.at(known.candidate.temperature).score(bench.engine, partial(tell, stage), start, stop)
        seconds[stage] = seconds.get(stage, 0.0) + time.monotonic() - began
        found[name] = more if before is None else before.with_more(more)
    return replace(known, **found, seconds=seconds)  # type: ignore[arg-type]


def put_gates_on(bench: Bench, candidate: Candidate, gated: Path | None) -> None:
    """Attach the candidate's gates as they are in a folder, or zero gates in its range."""
    attach_gates(bench.model, config_of(bench.config, candidate), active_adapter(bench.model))
    load_gate_values(bench.model, {} if gated is None else load_file(gated / GATES_FILE))


def attach_constant(model: Any, scale: float) -> None:
    """Attach one λ for all modules and tokens: gates without weights whose biases are `scale` on `CONSTANT_RANGE`."""
    config = GateConfig(CONSTANT_RANGE.lower, CONSTANT_RANGE.upper, granularity="module")
    attach_gates(model, config, active_adapter(model))
    reach = CONSTANT_RANGE.upper - 1 if scale > 1 else 1 - CONSTANT_RANGE.lower
    logit = torch.tensor([math.atanh((scale - 1) / reach)])
    load_gate_values(model, dict.fromkeys(gate_parameters(model), logit))


def save_artifact(
    bench: Bench, folder: Path, evidence: dict[str, Any], k: int | None = None, temperature: float | None = None
) -> None:
    """Write the model's gates as they are as a gated adapter, with its tokenizer.

    Args:
        evidence: what the artifact keeps, see `save_gates`.
        k: of the settings, where `evidence` holds no training.
        temperature: the recommended sampling; None for nothing to recommend.
    """
    endings = find_endings(bench.tokenizer, bench.model.generation_config)
    more = {"stop_token_ids": endings.token_ids, "evidence": evidence, "temperature": temperature}
    save_gates(bench.model, folder, k=k, **{**bench.origin, **more})
    bench.tokenizer.save_pretrained(str(folder / ADAPTER_FOLDER / "tokenizer"))


def copy_artifact(source: Path, target: Path, selection: dict[str, Any], temperature: float | None = None) -> None:
    """Copy a trial's gated adapter, with the record of how it was chosen, and the sampling that it is recommended at."""
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
