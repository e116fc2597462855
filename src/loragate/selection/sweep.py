"""A grid of ranges, learning rates, objectives and seeds: the path of `calibrate` with many trials, on Ray or one after the other.

    <folder>/          a `SelectionRun` (`selection_run.py`): run.json, trials/, dev/, selection.json
    <folder>/selection.md, heatmap*.png
    <folder>/best/     the recommended variant as a gated adapter

A `Sweep` can be sent to another process, because it holds names and settings, not weights. Without a dev set the trials are
trained and nothing is chosen; `loragate eval --sweep` scores them on whole suites (`TrainedCells`), by which nobody may choose:
the best of many on a test is not known to be the best elsewhere.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from loragate.data import Rows
from loragate.errors import ConfigError, DataError, DivergenceError, LoragateError
from loragate.evaluation.evaluate import Evaluation
from loragate.evaluation.prepared import Request
from loragate.evaluation.tasks import Task
from loragate.evaluation.variants import ModelVariant, at_temperatures
from loragate.files import RunFolder, require_empty_folder
from loragate.gates import GateConfig
from loragate.gates.schema import CONFIG, read_gate_config
from loragate.models import Loaded, Loading, ModelSource, explained, load_adapter, open_base, open_tokenizer, resolve
from loragate.selection.calibrate import read_questions, write_recommended
from loragate.selection.selection_run import (
    TRIALS,
    OnEvent,
    OnTrial,
    Open,
    SelectionRun,
    find_failures,
    find_trained_folders,
    no_event,
    no_trial,
)
from loragate.selection.settings import DevSettings
from loragate.selection.trials import Trial, TrialContext, note_failure
from loragate.selection_record import SelectionRecord
from loragate.training import GateTrainingSettings


@dataclass
class Sweep:
    """What all trials share; files are known by their whole paths, for workers in other folders.

    Attributes:
        adapter: as it is typed, folder or hub id; a hub id is then kept with its commit.
        read_examples: gives the examples to train on; like the rest it may be sent to another process.
        settings: of the training; objective and seed are the trial's.
        base: instead of the one that the adapter names.
        loading: base and adapter are loaded.
        config: of the gates; range and seed are the trial's.
        dev: how the dev set is asked and judged.
        dev_data, retention_data: files of questions; empty for none.
        system: whether a template's own system message is kept.

    Raises:
        ConfigError: for a place that holds no adapter, or one that names no base.
    """

    adapter: str
    read_examples: Callable[[], Rows]
    settings: GateTrainingSettings
    base: str = ""
    loading: Loading = field(default_factory=Loading)
    config: GateConfig = field(default_factory=lambda: GateConfig(0, 1))
    dev: DevSettings = field(default_factory=DevSettings)
    dev_data: str = ""
    retention_data: str = ""
    system: str = "none"

    def __post_init__(self) -> None:
        found = resolve(absolute_if_exists(self.adapter), absolute_if_exists(self.base), expect="adapter")
        found.adapter_contents.require_usable("gate")
        self.adapter, self.base = found.record_name, str(replace(found.base, name=found.base.absolute_name))
        self.loading = replace(self.loading, chat_template=absolute_if_exists(self.loading.chat_template))
        self.dev = replace(
            self.dev,
            dev_task=absolute_if_exists(self.dev.dev_task),
            retention_task=absolute_if_exists(self.dev.retention_task),
            exclude=absolute_if_exists(self.dev.exclude),
        )
        self.dev_data, self.retention_data = absolute_if_exists(self.dev_data), absolute_if_exists(self.retention_data)

    def open(self, trials: Sequence[Trial], folder: Path, on_event: OnEvent = no_event) -> SelectionRun:
        """Load base and adapter, for all trials of one process; raises what cannot be used."""
        source = resolve(self.adapter, self.base, expect="adapter")  # as this machine has it
        with explained("base model", source.base.name):
            base = open_base(source.base, self.loading, autocast=self.settings.precision != "fp32")
        context = TrialContext(
            load_adapter(base, source),
            open_tokenizer(source, self.loading),
            self.read_examples(),
            self.config,
            self.settings,
            self.system,
            origin=origin_of(source),
        )
        dev, retention = None, None
        if self.dev_data:
            dev, retention = read_questions(context, self.dev, self.dev_data, self.retention_data or None)
        return SelectionRun(context, tuple(trials), folder, dev, retention, on_event)

    def open_for(self, trials: Sequence[Trial], folder: Path, trial: Trial) -> SelectionRun:
        """`open` in a worker, for one of the trials; what goes wrong is noted in its folder, where the driver finds it."""
        try:
            return self.open(trials, folder)
        except Exception as error:
            note_failure(folder / TRIALS / trial.slug, error)
            raise


def absolute_if_exists(text: str) -> str:
    """The whole path of what exists here; anything else, such as a hub id, as it is."""
    return str(Path(text).resolve()) if text and Path(text).exists() else text


def origin_of(source: ModelSource, base_id: str = "") -> dict[str, Any]:
    """What `save_gates` is told of base and adapter; a revision of the base that was loaded is none of another `base_id`."""
    return {
        "adapter_source": source.adapter,
        "base_id": base_id or source.base.absolute_name,
        "base_revision": None if base_id else source.base.revision or None,
        "adapter_id": source.hub_id,
    }


Runner = Callable[[Open, Sequence[Trial], OnTrial], None]
"""Called with what opens a run (it can be sent to another process) and the trials that are not trained; runs them. A trial that
fails is noted in its folder and does not stop the others."""


def run_in_sequence(open_run: Open, pending: Sequence[Trial], on_trial: OnTrial = no_trial) -> None:
    """Run trials one after the other in this process."""
    for trial in pending:
        try:
            open_run(trial).run_trial(trial)
        except Exception:  # noted by the trial, reported by whoever reads the folder
            on_trial(trial, "failed")
        else:
            on_trial(trial, "finished")


def choose_runner(
    name: str = "auto", workers: int = 0, cpus: int = 1, gpus: float | None = None, device: str = "auto"
) -> tuple[str, Runner]:
    """(what runs the trials, in words, and the function that does it).

    Args:
        name: "ray", "sequential", or "auto" for Ray if it is installed.
        workers: parallel trials; 0 takes as many as fit.
        cpus, gpus: of one trial; None takes a GPU if there is one.

    Raises:
        ConfigError: for "ray" without Ray.
    """
    where = "one after the other in this process"
    if name != "sequential":
        try:
            from loragate.selection.on_ray import Resources, run_on_ray
        except ConfigError:
            if name == "ray":
                raise
            where += '; Ray is not installed (pip install ".[sweep]" in a checkout for several at a time)'
        else:
            resources = Resources.detect(workers, cpus, gpus, device)
            return resources.describe(), functools.partial(run_on_ray, resources=resources)
    return where, run_in_sequence


@dataclass(frozen=True)
class SweepResult:
    """What a sweep came to.

    Attributes:
        selection: what `selection.json` holds; None where nothing was chosen: without a dev set, or with trials that failed.
        best: the recommended variant's folder; None where nothing was chosen.
        failures: {trial: why} of trials whose last attempt failed, for another reason than a training that diverged.
    """

    selection: SelectionRecord | None
    best: Path | None
    failures: Mapping[str, str]


def run_sweep(
    sweep: Sweep,
    trials: Sequence[Trial],
    folder: str | Path,
    *,
    resume: bool = False,
    runner: Runner = run_in_sequence,
    on_trial: OnTrial = no_trial,
    on_event: OnEvent = no_event,
) -> SweepResult:
    """Train what is not trained, evaluate, choose, and write `selection.json` and the recommended variant.

    Args:
        trials: of `trials.make_trials`.
        folder: new, or that of the sweep to go on with.
        resume: whether to go on.
        runner: runs the trials, as `choose_runner` gives it.

    Raises:
        ConfigError, DataError: before anything is trained, for what cannot be used or a folder that holds something else.
        DivergenceError: if no trial's training stayed finite.
        KeyboardInterrupt: on Ctrl-C, after a checkpoint.
    """
    folder = Path(folder)
    if not resume and not (folder / RunFolder.RECORD).exists():
        require_empty_folder(folder, "lock")  # all that a refused grader leaves
    run = sweep.open(trials, folder, on_event)
    with run.hold_folder(resume):
        if run.dev is not None:
            run.check_grader_reads_answers()
        if pending := run.find_pending_trials():
            if runner is run_in_sequence:
                run_in_sequence(lambda _: run, pending, on_trial)
            else:
                run.context.model = None  # its room is the workers', on a GPU too
                gc.collect()
                torch.cuda.empty_cache()

                def ended(trial: Trial, how: str, run: SelectionRun = run) -> None:
                    run.report_progress("training", run.trial_label(trial), run.steps, how)  # a worker reports no step
                    on_trial(trial, how)

                runner(functools.partial(sweep.open_for, tuple(trials), folder.resolve()), pending, ended)
                run = sweep.open(trials, folder, on_event)
        if run.find_pending_trials():
            known = find_failures(folder, trials, diverged=False)
            lost = {one.name: "its worker was lost, several times" for one in run.find_pending_trials()}
            return SweepResult(None, None, {**lost, **known})
        if not run.gated:
            raise DivergenceError(
                "no trial's training stayed finite; lower --learning-rate or train in fp32, in a new --out"
            )
        if run.dev is None:
            return SweepResult(None, None, {})
        record, best = run.choose(), folder / "best"
        if not (best / CONFIG).is_file():  # else it is of this very choice, as the folder is that of the same sweep
            write_recommended(run, record, best)
        return SweepResult(record, best, {})


@dataclass(frozen=True)
class TrainedCells:
    """The trained cells of a sweep, which are variants of one evaluation beside its adapter.

    Attributes:
        trials: {trial: its gated folder}, of those that are trained.
        unfinished: the others, which are not scored.
        request: of the evaluation: its model is the adapter of the cells.
        tasks: what is asked.
        stop_token_ids: that end an answer, as the cells record them.
    """

    trials: dict[Trial, Path]
    unfinished: tuple[Trial, ...]
    request: Request
    tasks: list[Task]
    stop_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, sweep: Path, request: Request) -> TrainedCells:
        """Those of a sweep with a trained cell (DataError); ConfigErrors as of `Request.check`, and for retention suites."""
        begun = RunFolder(sweep, DataError).read()
        if begun.get("kind") != "selection":
            raise DataError(f"{sweep} is not the folder of a sweep; give the --out of `loragate sweep`")
        every = tuple(map(Trial.from_record, begun["trials"]))
        trials = find_trained_folders(sweep, every)
        if not trials:
            raise DataError(f"{sweep} has no finished cell yet; go on with the sweep first (loragate sweep … --resume)")
        first = next(iter(trials.values()))
        gates = read_gate_config(first)
        base, revision = gates["base"]["id"], gates["base"].get("revision")
        own = replace(
            request,
            model=str(first / "adapter"),
            base=request.base or (f"{base}@{revision}" if revision else base),
        )
        tasks = own.check()
        if asked := [task.name for task in tasks if task.harness is not None]:
            raise ConfigError(f"--sweep: {', '.join(asked)} are retention suites, which are scored one model at a time")
        endings = tuple(gates.get("stop_token_ids") or ())
        left = tuple(one for one in every if one not in trials)
        return cls(trials, left, own, tasks, endings)

    def evaluation(self, loaded: Loaded) -> Evaluation:
        """The adapter and a variant for each cell, at every temperature that was given."""
        names = ", ".join(one.name for one in self.unfinished)
        notes = [f"trials that are not finished, and not scored: {names}"] if names else []
        rows = [ModelVariant("gated", trial.name, gates=str(place)) for trial, place in self.trials.items()]
        prepared = self.request.prepare(self.tasks, loaded)
        variants = at_temperatures([ModelVariant("adapter"), *rows], self.request.tasks.temperatures[1:])
        return Evaluation.from_request(self.request, prepared, loaded, variants, notes=notes)


def raise_failures(swept: SweepResult, count: int) -> None:
    """Refuse a sweep with failed trials (LoragateError)."""
    if swept.failures:
        raise LoragateError(
            f"{len(swept.failures)} of {count} trials are not finished, so nothing was chosen; repeat the command with --resume "
            "to try them again"
        )
