"""A study of many candidates over several adapters and seeds: what it needs beside them, its benches, and its best.

Where base and adapters come from is the caller's knowledge; it arrives as a `Loader`. A `Sweep` can be sent to another process,
because it holds names and settings, not weights. The base is loaded once in a process, and adapters change on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from loragate.data import EncodedRows, Rows
from loragate.errors import ConfigError
from loragate.evaluation.judging import JudgeSettings
from loragate.gates import GateConfig
from loragate.gates.schema import CONFIG
from loragate.generation import TransformersEngine
from loragate.selection.candidate import Candidate
from loragate.selection.disjoint import prompts_of
from loragate.selection.evidence import Asked, read_asked
from loragate.selection.outcome import Selection
from loragate.selection.probe import MIN_QUESTIONS, Probe
from loragate.selection.settings import ProbeSettings
from loragate.selection.store import FAILED, GATED, Store, read_json
from loragate.selection.study import Study, digest
from loragate.selection.trial import Bench, config_of, copy_artifact, run_trial
from loragate.training import CalibrationSettings, calibration_rows

PROBE_SEED = 1
FIXED = ("seed", "objective", "report_to")  # of the candidate, or without influence on its numbers


class Loader(Protocol):
    """Where base, adapters and rows come from; every method may be slow."""

    def load_base(self) -> Any: ...

    def load_adapter(self, base: Any, label: str) -> Any:
        """A PeftModel around the base."""
        ...

    def load_tokenizer(self, label: str) -> Any: ...

    def load_rows(self) -> Rows: ...

    def origin(self, label: str) -> Mapping[str, Any]:
        """Arguments of `save_gates` that say where base and adapter come from."""
        ...


@dataclass(frozen=True)
class Sweep:
    """What all candidates share.

    Attributes:
        loader: see `Loader`.
        settings: {objective: of the training}; the seed is the candidate's.
        config: of the gates; range and seed are the candidate's.
        asking: how probe and test are asked and judged.
        probe: file of questions that choose; empty for none.
        test: file of further questions for the oracle; empty for none.
        test_samples: per question of the test.
        system: whether a template's own system message is kept.
    """

    loader: Loader
    settings: Mapping[str, CalibrationSettings]
    config: GateConfig
    asking: ProbeSettings
    probe: str = ""
    test: str = ""
    test_samples: int = 4
    system: str = "none"

    def study(self, candidates: Sequence[Candidate], models: Mapping[str, Any]) -> Study:
        """The study, after everything was checked that does not need the base in memory.

        Args:
            models: identity of base and adapters, and of what changes their answers.

        Raises:
            ConfigError, DataError: naming what cannot be used.
        """
        rows = self.loader.load_rows()
        gates = {name: value for name, value in asdict(self.config).items() if name not in ("lower", "upper", "seed")}
        identity: dict[str, Any] = {
            **models,
            "data": {"rows": len(rows), "fingerprint": rows.fingerprint, "system": self.system},
            "training": {
                name: {key: value for key, value in settings.as_record().items() if key not in FIXED}
                for name, settings in self.settings.items()
            },
            "gates": gates,
        }
        self.asking.check_probe()
        taken = [(prompts_of(rows), "the training rows")]
        for name in ("probe", "test"):
            identity[name] = None
            if not (file := getattr(self, name)):
                continue
            asked = read_labelled(file, self.asking, taken)
            if len(asked.questions) < MIN_QUESTIONS:
                raise ConfigError(
                    f"--{name} {file} has {len(asked.questions)} questions; at least {MIN_QUESTIONS} are needed to tell cells "
                    "apart"
                )
            taken.append(([question.prompt for question in asked.questions], "the probe's"))
            identity[name] = {
                "questions": digest([[question.prompt, question.gold, question.row] for question in asked.questions]),
                "task": asked.task.fingerprint if self.asking.probe_task else self.asking.probe_grader,
                "samples": self._samples(name),
                "temperature": self.asking.probe_temperature,
                "max_new_tokens": self.asking.probe_max_new_tokens,
                "batch_size": self.batch_size,
            }
        for one in candidates:
            if one.range is not None:
                config_of(self.config, one)
        return Study(tuple(candidates), identity)

    def questions(self, name: str, model: Any, tokenizer: Any) -> Probe | None:
        """The probe or the test, if there is one."""
        if not (file := getattr(self, name)):
            return None
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        settings = replace(self.asking, probe_samples=self._samples(name))
        asked = read_labelled(file, self.asking)
        return asked.labelled_probe(
            tokenizer, settings, JudgeSettings(), system=self.system, positions=positions, seed=PROBE_SEED
        )

    @property
    def batch_size(self) -> int:
        """Answers that are sampled at a time."""
        return next(iter(self.settings.values())).sampling_batch_size

    def _samples(self, name: str) -> int:
        return self.asking.probe_samples if name == "probe" else self.test_samples


def read_labelled(file: str, settings: ProbeSettings, taken: Sequence[tuple[Sequence[str], str]] = ()) -> Asked:
    """Questions with answers, of a file."""
    asked = read_asked(file, settings.probe_task, settings, taken, JudgeSettings())
    if not asked.labelled:
        raise ConfigError(
            f"{file} has no answers; a sweep compares cells on labelled questions (columns prompt and answer)"
        )
    return asked


class Workshop:
    """The benches of a sweep in one process; the base is as freshly loaded for each adapter."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.base: Any = None
        self.label: str | None = None
        self.current: Bench | None = None
        self.rows: Rows | None = None
        self.encoded: dict[Any, tuple[Rows, EncodedRows]] = {}
        self.loads = 0

    def bench(self, label: str) -> Bench:
        """Have this adapter on the base."""
        loader = self.sweep.loader
        if self.base is None:
            self.base = loader.load_base()
            self.loads += 1
        if self.current is not None and self.label == label:
            return self.current
        if self.current is not None:
            self.base, self.current = self.current.model.unload(), None
        model, tokenizer = loader.load_adapter(self.base, label), loader.load_tokenizer(label)
        self.encoded = {}
        self.label = label
        self.current = Bench(
            model,
            tokenizer,
            TransformersEngine(model, tokenizer, batch_size=self.sweep.batch_size),
            self._encode,
            self.sweep.config,
            lambda one: replace(self.sweep.settings[one.objective], seed=one.seed),
            self.sweep.questions("probe", model, tokenizer),
            self.sweep.questions("test", model, tokenizer),
            origin=loader.origin(label),
            base_loads=self.loads,
        )
        return self.current

    def _encode(self, settings: CalibrationSettings) -> tuple[Rows, EncodedRows]:
        assert self.current is not None, "a bench is open"
        key = (settings.seed, settings.max_rows, settings.max_length)
        if key not in self.encoded:
            if self.rows is None:
                self.rows = self.sweep.loader.load_rows()
            # rows of another seed will hardly be asked for again
            tokenizer = self.current.tokenizer
            self.encoded = {key: calibration_rows(self.rows, tokenizer, settings, self.sweep.system)}
        return self.encoded[key]


def run_in_sequence(sweep: Sweep, store: Store, pending: Sequence[Candidate]) -> None:
    """Run trials one after the other in this process; one that fails is noted in its folder and does not stop the others.

    Raises:
        KeyboardInterrupt: on Ctrl-C, after a checkpoint.
    """
    workshop = Workshop(sweep)
    for one in pending:
        try:
            run_trial(store, one, workshop.bench)
        except Exception:  # noted by the trial, reported by whoever reads the folder
            continue


def failures(store: Store) -> dict[str, str]:
    """{slug: why} of the trials that are neither finished nor diverged."""
    return {
        one.slug: str(read_json(store.place(one) / FAILED).get("error", "its worker was lost, several times"))
        for one in store.pending()
    }


def write_best(store: Store, selection: Selection, target: Path) -> None:
    """Copy the chosen gates to `target`, unless they stand there already."""
    assert selection.written is not None, "the adapter remains"
    record = selection.as_record()
    kept = read_json(target / CONFIG).get("selection") or {}
    if any(kept.get(key) != record[key] for key in ("picked", "written_seed")):
        (target / CONFIG).unlink(missing_ok=True)  # of a choice before a diverged trial was tried again
        copy_artifact(store.place(selection.written.candidate) / GATED, target, record)
