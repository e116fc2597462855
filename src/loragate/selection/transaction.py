"""Find the best way to use an adapter: train gates, ask everything on a probe, and write what is recommended.

The whole of `loragate calibrate`, as one transaction that is resumable at every point; `calibrate` is the call. It ends in
one of three ways: gates, one λ for all, or the base, that do probably better on a probe than the adapter at its best
temperature; the adapter (zero gates) where nothing does; and gates that the user accepted without evidence. Where none can be
had, nothing is trained. What a probe showed is written with the sampling temperature at which it did. Zero gates are
λ = 1 everywhere, bit for bit the adapter, in every program that can load gates. Nothing here prints, and training's own loss
is never looked at.

    folder/                        the gated adapter, written last
    folder/run/candidates/         the study and its trials (`store.py`); majority.json holds answers of the adapter
    folder/run/                    log and checkpoints of gates that are taken without one
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loragate.data import EncodedRows, Rows, encode_rows, load_rows
from loragate.data.loading import RowsGiven
from loragate.errors import ConfigError, GateError
from loragate.files import held
from loragate.gates import GateConfig, adapter_fingerprint
from loragate.gates.artifact import require_free
from loragate.gates.attach import active_adapter, is_gated
from loragate.gates.eligibility import examine_adapter, require_gateable, require_trainable, trains_biases
from loragate.gates.fingerprint import base_weight_samples
from loragate.generation import Engine, OnProgress, TransformersEngine
from loragate.selection.candidate import ADAPTER, Candidate, parse_candidates
from loragate.selection.chosen import CANDIDATES, UNVERIFIED, Chosen
from loragate.selection.comparison import Comparison, settings_on
from loragate.selection.evidence import Evidence, answer_tokens, reward_of
from loragate.selection.guards import Reward
from loragate.selection.probe import Probe
from loragate.selection.questions import Manner, set_aside
from loragate.selection.rulings import HOPEFUL
from loragate.selection.settings import SelectionSettings, require_one_process
from loragate.selection.store import GATED, Store, Study
from loragate.selection.trial import (
    PART_QUESTIONS,
    SHARE,
    Bench,
    OnEvent,
    attach_constant,
    config_of,
    copy_artifact,
    fit,
    put_gates_on,
    save_artifact,
    settings_by_objective,
)
from loragate.training import GateTrainingSettings, training_rows
from loragate.training.rows import encoded_fingerprint
from loragate.training.strategy import process_state

RANGES = "0,1;-6,3;0,6"


def calibrate(
    peft_model: Any,
    tokenizer: Any,
    rows: RowsGiven,
    probe: RowsGiven | None,
    folder: str | Path,
    *,
    ranges: str | Sequence[Candidate] = RANGES,
    config: GateConfig | None = None,
    settings: GateTrainingSettings | None = None,
    asking: SelectionSettings | None = None,
    retention: RowsGiven | None = None,
    heldout: RowsGiven | None = None,
    reward: Reward | None = None,
    system: str = "none",
    unverified: bool = False,
    resume: bool = False,
    on_event: OnEvent | None = None,
    **origin: Any,
) -> Chosen:
    """Find the best way to use an adapter on a probe: as it is, with gates, under one λ, or not at all; and how to sample it.

    The command `loragate calibrate` is this call. Gates are trained in a few ranges, the weaker half of them for a quarter
    of their steps, and the others too where they are behind the adapter by then. Everything is sampled at T = 1, 0.6, 0.3
    and greedily. What is more complicated than the adapter alone is recommended only where it is probably better than the
    best of what is simpler (`recommend.py`). Scores are shares of right answers, 0 to 1.

    Args:
        peft_model: base with a plain LoRA adapter in memory. It is left gated with what was written: λ = 1 everywhere
            where the adapter remains.
        tokenizer: of the base, with a chat template if the rows are conversations.
        rows: prompts and responses to train on, in any known format, or the path or hub id of a file with them.
        probe: at least 32 questions that are not among the rows, better 128: a file, or dicts with "prompt" and "answer", or
            prompts only, which are judged by the adapter's own majority and at one temperature. None sets up to 64 of the
            rows aside for that.
        folder: where the gated adapter is written, and below `run` what a resumed choice goes on from.
        ranges: candidates, "L,U" separated by semicolons, each with "@objective" behind it where it has its own.
        config: of the gates; its range and seed give way to the candidate's. By default the paper's.
        settings: of the training; the paper's values by default.
        asking: how the probe is asked and judged.
        retention: labelled questions of an ability to keep; what clearly loses on them is not recommended.
        heldout: rows that are only measured: entropy before and after.
        reward: (row, answer text, finished) to a number, for the objective reward; by default 1 for a right answer.
        system: "none" leaves out a default system message that the template injects, "keep" keeps it.
        unverified: take the gates of the one range as they come; `probe` must be None.
        resume: go on with what an interrupted call left in `folder`.
        on_event: see `trial.OnEvent`.
        origin: `adapter_source`, `base_id`, `base_revision` and `adapter_id` of `loragate.save_gates`.

    Returns:
        What was chosen, and the record of it that the artifact keeps.

    Raises:
        ConfigError: for settings that cannot be used together, earlier candidates in `folder` that are not to be resumed,
            resuming with other settings, several processes (except with `unverified`), or questions from which no evidence
            can be had.
        DataError: for rows or questions that cannot be used, or a probe that shares questions with the rows.
        DivergenceError: if no range's training stayed finite. One that did not only drops out.
        GateError: if the adapter cannot be gated, or is gated already.
        ArtifactError: if `folder` holds a gated adapter already.
    """
    settings = settings or GateTrainingSettings()
    candidates = parse_candidates(ranges, settings.objective, settings.seed) if isinstance(ranges, str) else ranges
    one = Transaction(
        tokenizer,
        rows,
        probe,
        Path(folder),
        tuple(candidates),
        config or GateConfig(0, 1),
        settings,
        asking or SelectionSettings(),
        retention,
        heldout,
        reward,
        system,
        unverified,
    )
    one.take(peft_model, **origin)
    return one.run(resume=resume, on_event=on_event)


@dataclass
class Transaction:
    """One choice, in three steps: what needs no model is read and checked here; `take` the model; `run`.

    Attributes are the arguments of `calibrate`, and:
        rows_given, probe_given, heldout_given: its `rows`, `probe` and `heldout`, as they were given.
        candidates: gates to train; the first one's range is that of the zero gates where the adapter remains.
        on_progress: of tokenising.
    """

    tokenizer: Any
    rows_given: RowsGiven
    probe_given: RowsGiven | None
    folder: Path
    candidates: tuple[Candidate, ...]
    config: GateConfig
    settings: GateTrainingSettings
    asking: SelectionSettings
    retention: RowsGiven | None = None
    heldout_given: RowsGiven | None = None
    reward: Reward | None = None
    system: str = "none"
    unverified: bool = False
    on_progress: OnProgress | None = None

    def __post_init__(self) -> None:
        self.probe: Probe | None = None
        require_free(self.folder)
        self._check()
        everything = self.given = load_rows(self.rows_given)
        if self.reward is None and any(one.objective == "reward" for one in self.candidates):
            self.reward = reward_of(everything, self.asking.probe_grader)
        spare = None
        if self.probe_given is None and not self.unverified:
            self.given, spare = set_aside(everything.shuffled(self.settings.seed))
        self.evidence = Evidence(everything, self.probe_given, self.retention, spare, self.asking)
        how: dict[str, Any] = {"system": self.system, "on_progress": self.on_progress}
        self.rows, self.encoded = training_rows(self.given, self.tokenizer, self.settings, **how)
        self.heldout: EncodedRows | None = None
        if self.heldout_given is not None:
            limit = self.settings.max_length
            self.heldout = encode_rows(
                load_rows(self.heldout_given), self.tokenizer, max_length=limit, system=self.system
            )

    def _check(self) -> None:
        """Refuse what could not be compared, before anything is read; the ConfigError or GateError names it."""
        if not self.candidates or len({one.slug for one in self.candidates}) != len(self.candidates):
            found = [one.cell for one in self.candidates]
            raise ConfigError(f"candidate ranges must be given, each once; found {found}")
        for one in self.candidates:
            if one.range is None or one.temperature is not None:
                raise ConfigError(
                    f"the candidate {one.cell} is no range to train gates in; the adapter, its base and one λ for all are "
                    "always asked, and every candidate at every temperature"
                )
        if self.unverified and (self.probe_given is not None or len(self.candidates) > 1):
            raise ConfigError("gates are accepted without evidence (unverified) for one range and without a probe")
        if not self.unverified:
            require_one_process()
        for one in self.candidates:
            config_of(self.config, one)
            self.settings_of(one)  # a setting that does not fit shows before any training

    def settings_of(self, one: Candidate) -> GateTrainingSettings:
        """Of the training of a candidate; raises ConfigError for a setting that no candidate reads."""
        objectives = dict.fromkeys((one.objective, *(other.objective for other in self.candidates)))
        return replace(settings_by_objective(self.settings, objectives)[one.objective], seed=one.seed)

    def take(self, peft_model: Any, engine: Engine | None = None, **origin: Any) -> None:
        """The model to gate; `engine` answers with it as it stands, by default 64 at a time."""
        if is_gated(peft_model, active_adapter(peft_model)):
            raise GateError("the model carries gates already; take them off first, with loragate.detach_gates(model)")
        verdicts = examine_adapter(peft_model, active_adapter(peft_model), self.config.target_modules)
        self.gateable = len(require_gateable(verdicts))
        require_trainable(verdicts)
        size = 64
        self.bench = Bench(
            peft_model,
            self.tokenizer,
            engine or TransformersEngine(peft_model, self.tokenizer, batch_size=size),
            self._encoded,
            self.config,
            self.settings_of,
            options=self._options,
            origin=origin,
        )
        self.how = Manner(
            self.tokenizer,
            getattr(peft_model.config.get_text_config(), "max_position_embeddings", None),
            self.settings.seed + 1,
            self.system,
            answer_tokens(self.encoded),
            raw=self.encoded.summary.all_plain,
        )

    def find_probe(self, on_progress: OnProgress | None = None) -> None:
        """Have the probe; without labels the adapter is asked for its majority, or a ConfigError says why it cannot be."""
        kept = self.folder / CANDIDATES / "majority.json"
        engine, limit, whose = self.bench.engine, self.settings.max_length, "".join(self._weights().values())
        self.probe = self.evidence.probe(self.how, engine, limit, kept, on_progress, whose)

    def run(self, *, resume: bool = False, on_event: OnEvent | None = None) -> Chosen:
        """Train and ask what is not finished yet, choose, and write the folder; see `calibrate`."""
        if self.unverified:
            return self._as_given(resume, on_event)

        def progress(done: int, total: int) -> None:
            if on_event is not None:
                on_event(Candidate(None, ADAPTER), "asking", done, total, None)

        if self.probe is None:
            self.find_probe(progress)
        probe = self.bench.probe = self.probe
        assert probe is not None, "it was found"
        retention = self.bench.retention = self.evidence.retention(self.how)
        settings = settings_on(
            probe,
            self.candidates,
            self.asking.probe_temperature,
            can_be_off=gates_all(self.bench.model),
        )
        asked = {
            "probe": probe.fingerprint,
            "retention": None if retention is None else retention.fingerprint,
            "stopping": {"share": SHARE, "questions": PART_QUESTIONS, "hopeful": HOPEFUL},
        }
        store = self._store(settings, asked)
        taken = f"another choice is running in {self.folder}; wait for it to end, or stop it"
        with held(store.folder / "lock", 0.0, taken):
            store.study.begin(store.folder, resume)
            comparison = Comparison(store, self.bench, settings, on_event, self.asking.probe_covers_all)
            if on_event is not None:
                on_event(Candidate(None, ADAPTER), "planned", 0, comparison.most_answers(), None)
            setting = comparison.run().setting
            record = comparison.as_record()
        return self._write(store, setting, record)

    def _write(self, store: Store, setting: Candidate, record: dict[str, Any]) -> Chosen:
        """The folder of what is recommended, and the model as that."""
        if setting.range is not None:
            trial = store.place(setting.model) / GATED
            copy_artifact(trial, self.folder, record, setting.temperature)
            put_gates_on(self.bench, setting, trial)
            return Chosen.of(self.folder, setting)
        if setting.kind == ADAPTER:
            put_gates_on(self.bench, self.candidates[0], None)
        else:
            attach_constant(self.bench.model, setting.fixed)
        k = self.settings.k
        save_artifact(self.bench, self.folder, {"selection": record}, k, setting.temperature)
        return Chosen.of(self.folder, None if setting.kind == ADAPTER else setting)

    def _store(self, candidates: tuple[Candidate, ...], asked: dict[str, Any]) -> Store:
        """The study of these candidates; its identity is what their numbers depend on."""
        named = {one.objective: one for one in self.candidates}
        gates = asdict(self.config)
        identity = {
            **asked,
            "data": self.rows.as_record(),
            "tokens": encoded_fingerprint(self.encoded),
            "heldout": None if self.heldout is None else encoded_fingerprint(self.heldout),
            **self._weights(),
            "training": {name: self.bench.settings(one).as_record() for name, one in named.items()},
            "gates": {name: value for name, value in gates.items() if name not in ("lower", "upper", "seed")},
        }
        return Store(self.folder / CANDIDATES, Study(candidates, identity))

    def _weights(self) -> dict[str, str]:
        """Fingerprints of adapter and base."""
        model = self.bench.model
        return {
            "adapter": adapter_fingerprint(model, active_adapter(model)),
            "base": hashlib.sha256(json.dumps(base_weight_samples(model)).encode()).hexdigest(),
        }

    def _as_given(self, resume: bool, on_event: OnEvent | None) -> Chosen:
        """A range that the user accepted without evidence; on several processes only the main one writes."""
        (one,) = self.candidates

        def tell(stage: str, done: int = 0, total: int = 0, entropy: float | None = None) -> None:
            if on_event is not None and total:
                on_event(one, stage, done, total, entropy)

        result = fit(self.bench, one, self.folder / "run", tell, resume=resume)
        assert one.range is not None, "gates were trained"
        selection = {
            "method": "given by the user",
            "accepted": True,
            "range": [one.range.lower, one.range.upper],
            "reason": UNVERIFIED,
            "evidence": "none: not compared with the adapter",
        }
        evidence = {**result.evidence(), "selection": selection}
        if process_state().is_main_process:
            save_artifact(self.bench, self.folder, evidence)
        return Chosen(self.folder, one, evidence)

    def _encoded(self, settings: GateTrainingSettings) -> tuple[Rows, EncodedRows]:
        if settings.seed == self.settings.seed:
            return self.rows, self.encoded
        return training_rows(self.given, self.tokenizer, settings, self.system)

    def _options(self, settings: GateTrainingSettings) -> dict[str, Any]:
        """What a training with these settings needs beside the rows."""
        return {"heldout": self.heldout}


def gates_all(model: Any) -> bool:
    """Whether λ = 0 everywhere is the base: gates reach all that the adapter trained."""
    name = active_adapter(model)
    copies = getattr(model.peft_config[name], "modules_to_save", None)
    return (
        not copies and not trains_biases(model, name) and all(v.status == "gate" for v in examine_adapter(model, name))
    )
