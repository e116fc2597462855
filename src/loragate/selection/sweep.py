"""A study of many candidates over ranges, seeds and objectives: what it needs beside them, its bench, and its best.

`run_sweep` is what `loragate sweep` does. A `Sweep` can be sent to another process, because it holds names and settings, not
weights. The base is loaded once in a process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from loragate.data import EncodedRows, Rows
from loragate.errors import ConfigError, DivergenceError, LoragateError, nearest
from loragate.files import held, read_json, require_new, write_json
from loragate.gates import GateConfig
from loragate.gates.schema import CONFIG
from loragate.generation import TransformersEngine
from loragate.models import Loading, ModelSource, explained, load_adapter, open_base, open_tokenizer, resolve
from loragate.selection.candidate import Candidate, label_of
from loragate.selection.evidence import answer_tokens
from loragate.selection.outcome import best_record, summarise, written_of
from loragate.selection.probe import Probe
from loragate.selection.questions import Manner, prompts_of, read_probe
from loragate.selection.settings import ProbeSettings
from loragate.selection.store import GATED, RECORD, Store, Study, TrialResult, digest
from loragate.selection.trial import (
    Bench,
    OnEvent,
    config_of,
    copy_artifact,
    origin_of,
    run_trial,
    settings_by_objective,
)
from loragate.training import GateTrainingSettings, training_rows

OBJECTIVES = ("entropy", "ce", "anchored")
PROBE_SEED = 1
FIXED = ("seed", "objective", "report_to")  # of the candidate, or without influence on its numbers


@dataclass
class Sweep:
    """What all candidates share; files are known by their whole paths, for workers in other folders.

    Attributes:
        adapter: as it is typed, folder or hub id; a hub id is then kept with its commit.
        read_rows: gives the rows to train on; like the rest it may be sent to another process.
        settings: {objective: of the training}; the seed is the candidate's.
        base: instead of the one that the adapter names.
        how: base and adapter are loaded.
        config: of the gates; range and seed are the candidate's.
        asking: how the probe is asked and judged.
        probe: file of questions that choose; empty for none.
        system: whether a template's own system message is kept.

    Raises:
        ConfigError: for a place that holds no adapter, or one that names no base.
    """

    adapter: str
    read_rows: Callable[[], Rows]
    settings: Mapping[str, GateTrainingSettings]
    base: str = ""
    how: Loading = field(default_factory=Loading)
    config: GateConfig = field(default_factory=lambda: GateConfig(0, 1))
    asking: ProbeSettings = field(default_factory=ProbeSettings)
    probe: str = ""
    system: str = "none"

    def __post_init__(self) -> None:
        found = resolve(absolute(self.adapter), absolute(self.base), expect="adapter")
        self.label = label_of(absolute(self.adapter))  # as the candidates name it
        self.adapter, self.base = found.source, str(replace(found.base, name=found.base.lasting))
        self.how = replace(self.how, chat_template=absolute(self.how.chat_template))
        self.asking = replace(self.asking, probe_task=absolute(self.asking.probe_task))
        self.probe = absolute(self.probe)

    @property
    def place(self) -> ModelSource:
        """The adapter on its base, as this machine has it."""
        return resolve(self.adapter, self.base, expect="adapter")

    def study(self, candidates: Sequence[Candidate]) -> Study:
        """The study; a ConfigError or DataError names what cannot be used, as far as that needs no base in memory."""
        rows = self.read_rows()
        gates = {name: value for name, value in asdict(self.config).items() if name not in ("lower", "upper", "seed")}
        base = resolve(self.base, expect="base")
        template = Path(self.how.chat_template).read_text("utf-8") if self.how.chat_template else None
        identity: dict[str, Any] = {
            "base": {"name": base.folder.name if base.folder.exists() else base.source, "files": base.fingerprint},
            "adapters": {self.label: self.place.fingerprint},
            "dtype": self.how.dtype,
            **({} if self.how.quantization == "none" else {"quantization": self.how.quantization}),
            "chat_template": None if template is None else digest(template),
            "data": {"rows": len(rows), "fingerprint": rows.fingerprint, "system": self.system},
            "training": {
                name: {key: value for key, value in settings.as_record().items() if key not in FIXED}
                for name, settings in self.settings.items()
            },
            "gates": gates,
            "probe": None,
        }
        if self.probe:
            taken = [(prompts_of(rows), "the training rows")]
            found = read_probe(self.probe, self.asking.probe_task, self.asking, taken, need_answers=True)
            identity["probe"] = {
                "questions": digest([[question.prompt, question.gold, question.row] for question in found.questions]),
                "task": found.task.fingerprint if self.asking.probe_task else self.asking.probe_grader,
                "samples": self.asking.probe_samples,
                "temperature": 1.0 if self.asking.probe_temperature is None else self.asking.probe_temperature,
                "max_new_tokens": self.asking.probe_max_new_tokens,
                "batch_size": self.batch_size,
            }
        for one in candidates:
            if one.range is not None:
                config_of(self.config, one)
        return Study(tuple(candidates), identity)

    def questions(self, model: Any, tokenizer: Any, encoded: EncodedRows) -> Probe:
        """The probe, put to the model as the training rows are."""
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        found = read_probe(self.probe, self.asking.probe_task, self.asking, need_answers=True)
        answer, raw = answer_tokens(encoded), encoded.summary.all_plain
        return found.put(Manner(tokenizer, positions, PROBE_SEED, self.system, answer, raw))

    @property
    def batch_size(self) -> int:
        """Answers that are sampled at a time."""
        return 64


def absolute(text: str) -> str:
    """The whole path of what exists here; anything else, such as a hub id, as it is."""
    return str(Path(text).resolve()) if text and Path(text).exists() else text


def settings_of_each(options: Any, objectives: Sequence[str]) -> dict[str, GateTrainingSettings]:
    """{objective: its training settings}, for objectives that a sweep can have; see `settings_by_objective`."""
    for name in objectives:
        if name not in OBJECTIVES:
            more = "; a reward is a Python callable, see loragate.train_gates" if name == "reward" else ""
            raise ConfigError(
                f"--objectives: {name!r} is none of {', '.join(OBJECTIVES)}{nearest(name, OBJECTIVES)}{more}"
            )
    return settings_by_objective(options, objectives)


def open_bench(sweep: Sweep) -> Bench:
    """Load base and adapter, for all trials of a sweep in one process."""
    place, read_rows = sweep.place, functools.cache(sweep.read_rows)
    with explained("base model", place.base.name):
        base = open_base(place.base, sweep.how)
    model, tokenizer = load_adapter(base, place), open_tokenizer(place, sweep.how)
    kept: dict[Any, tuple[Rows, EncodedRows]] = {}

    def encode(settings: GateTrainingSettings) -> tuple[Rows, EncodedRows]:
        key = (settings.seed, settings.max_rows, settings.max_length)
        if key not in kept:
            kept.clear()  # rows of another seed will hardly be asked for again
            kept[key] = training_rows(read_rows(), tokenizer, settings, sweep.system)
        return kept[key]

    probe = None
    if sweep.probe:
        _, encoded = encode(next(iter(sweep.settings.values())))
        probe = sweep.questions(model, tokenizer, encoded)
    return Bench(
        model,
        tokenizer,
        TransformersEngine(model, tokenizer, batch_size=sweep.batch_size),
        encode,
        sweep.config,
        lambda one: replace(sweep.settings[one.objective], seed=one.seed),
        probe,
        origin=origin_of(place),
    )


Execute = Callable[..., None]
"""Called with what opens a bench (it can be sent to another process), the store, the candidates that are not finished and
perhaps an `OnEvent`; runs them. A trial that fails is noted in its folder."""


def run_in_sequence(
    open_bench: Callable[[], Bench],
    store: Store,
    pending: Sequence[Candidate],
    on_event: OnEvent | None = None,
) -> None:
    """Run trials one after the other in this process; one that fails is noted in its folder and does not stop the others."""
    bench = functools.cache(open_bench)  # the base is loaded where a trial asks for it first
    for one in pending:
        try:
            run_trial(store, one, bench, on_event)
        except Exception:  # noted by the trial, reported by whoever reads the folder
            continue


def choose_runner(
    name: str = "auto",
    workers: int = 0,
    cpus: int = 1,
    gpus: float | None = None,
    device: str = "auto",
) -> tuple[str, Execute]:
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
            where += '; Ray is not installed (pip install "loragate[sweep]" for several at a time)'
        else:
            resources = Resources.found(workers, cpus, gpus, device)
            return resources.describe(), functools.partial(run_on_ray, resources=resources)
    return where, run_in_sequence


@dataclass(frozen=True)
class Swept:
    """What a sweep came to.

    Attributes:
        study: what was tried.
        results: {slug: result} of the finished trials.
        diverged, failures: {slug: why} of the others.
        summary: content of `sweep_results.json`; None for a sweep without a probe, which chooses nothing.
        best: folder of the chosen gates; None where the adapter remains.
    """

    study: Study
    results: Mapping[str, TrialResult]
    diverged: Mapping[str, str]
    failures: Mapping[str, str]
    summary: dict[str, Any] | None
    best: Path | None

    def check(self) -> None:
        """Refuse a sweep with failed trials (LoragateError), or none whose training stayed finite (DivergenceError)."""
        if self.failures:
            raise LoragateError(
                f"{len(self.failures)} of {len(self.study.candidates)} trials are not finished, so nothing was chosen; repeat "
                "the command with --resume to try them again"
            )
        trained = any(one.range is not None and one.slug in self.results for one in self.study.candidates)
        if not trained or (self.summary is not None and not any(one["candidates"] for one in self.summary["choices"])):
            raise DivergenceError(
                "no cell's training stayed finite in all its seeds; lower --learning-rate or train in fp32, in a new --out"
            )


def run_sweep(
    sweep: Sweep,
    candidates: Sequence[Candidate],
    folder: str | Path,
    *,
    resume: bool = False,
    execute: Execute = run_in_sequence,
) -> Swept:
    """Train and score what is not finished, choose, and write `sweep_results.json` and the best gates.

    Args:
        candidates: of `grid`.
        folder: new, or that of the sweep to go on with.
        resume: whether to go on.
        execute: runs the trials, as `choose_runner` gives it.

    Raises:
        ConfigError, DataError: before anything is loaded, for what cannot be used or a folder that holds something else.
        KeyboardInterrupt: on Ctrl-C, after a checkpoint.
    """
    folder = Path(folder)
    begun = (folder / RECORD).is_file()
    if resume and not begun:
        raise ConfigError(f"--resume: there is no sweep in {folder}; run the command without --resume")
    if not begun:
        require_new(folder)
    study = sweep.study(candidates)
    store = Store(folder, study)
    with held(folder / "lock", 0.0, f"another sweep is running in {folder}; wait for it to end, or stop it"):
        study.begin(folder, resume)
        execute(functools.partial(open_bench, sweep), store, store.pending())
        return _conclude(store)


def _conclude(store: Store) -> Swept:
    """Choose among what is finished; nothing is chosen without a probe, or while trials are missing."""
    folder, study, results = store.folder, store.study, store.finished()
    diverged = store.diverged()
    # neither finished nor diverged
    failures = {
        one.slug: str(store.failure(one).get("error", "its worker was lost, several times")) for one in store.pending()
    }
    if study.identity["probe"] is None:
        return Swept(study, results, diverged, failures, None, None)
    summary = summarise(study, results) | {"diverged": diverged, "failures": failures}
    write_json(folder / "sweep_results.json", summary)
    best = None
    if not failures and any(one["candidates"] for one in summary["choices"]):
        (choice,) = summary["choices"]
        if (one := written_of(study, choice)) is not None:
            best, probe = folder / "best", results[one.slug].probe
            assert probe is not None, "it was chosen on one"
            record, kept = (
                best_record(study, summary, choice, probe.about),
                read_json(best / CONFIG).get("selection") or {},
            )
            if any(kept.get(key) != record[key] for key in ("picked", "written_seed")):
                (best / CONFIG).unlink(missing_ok=True)  # of a choice before a diverged trial was tried again
                copy_artifact(store.place(one) / GATED, best, record, probe.about.get("temperature"))
    return Swept(study, results, diverged, failures, summary, best)
