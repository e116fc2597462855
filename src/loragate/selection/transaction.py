"""Gate an adapter: train candidates, probe them, keep the best or fall back to the adapter, and write the folder.

The whole of `loragate calibrate`, as one transaction that is resumable at every point; `choose_gates` is the call. It ends in
one of four ways: gates chosen on a probe; the adapter (zero gates) where nothing beat it; gates that were trained but stay off
because there was no evidence; and gates that the user accepted without any. Zero gates are λ = 1 everywhere, bit for bit the
adapter, in every program that can load gates. Nothing here prints, and training's own loss is never looked at.

    folder/                        the gated adapter, written last
    folder/run/candidates/         the study and its trials (`store.py`); majority.json holds answers of the adapter
    folder/run/                    log and checkpoints of gates that are taken without one
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from loragate.data import EncodedRows, Rows, encode_rows, load_rows
from loragate.data.loading import RowsGiven
from loragate.errors import ArtifactError, ConfigError, DivergenceError, GateError
from loragate.files import held
from loragate.gates import GateConfig, adapter_fingerprint, attach_gates
from loragate.gates.attach import active_adapter, is_gated
from loragate.gates.eligibility import trains_biases
from loragate.gates.fingerprint import base_weight_samples
from loragate.gates.range import Range
from loragate.gates.schema import CONFIG, GATES, read_gate_config
from loragate.generation import Engine, OnProgress, TransformersEngine
from loragate.selection.candidate import ADAPTER, Candidate, parse_candidates
from loragate.selection.evidence import Evidence, answer_tokens, require_evidence, reward_of
from loragate.selection.outcome import Selection, selections
from loragate.selection.probe import Probe
from loragate.selection.questions import set_aside
from loragate.selection.references import references_of
from loragate.selection.settings import SelectionSettings
from loragate.selection.store import GATED, Store
from loragate.selection.study import Study
from loragate.selection.trial import (
    Bench,
    OnEvent,
    config_of,
    copy_artifact,
    load_gate_values,
    run_trial,
    save_artifact,
    settings_of,
)
from loragate.selection.unverified import CANDIDATES, OFF, UNVERIFIED, Chosen, chosen_in, without_evidence
from loragate.training import CalibrationSettings, calibrate, calibration_rows
from loragate.training.guards import GuardLimits
from loragate.training.rollouts import Reward
from loragate.training.run import encoded_fingerprint
from loragate.training.strategy import launch_of, process_state

RANGES = "0,1;-6,3;0,6"
CAUTIOUS = Range(0, 1)

Encode = Callable[[Rows, Callable[..., tuple[Rows, EncodedRows]]], tuple[Rows, EncodedRows]]


def choose_gates(
    peft_model: Any,
    tokenizer: Any,
    rows: RowsGiven,
    probe: RowsGiven | None,
    folder: str | Path,
    *,
    ranges: str | Sequence[Candidate] = RANGES,
    config: GateConfig | None = None,
    settings: CalibrationSettings | None = None,
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
    """Gate an adapter: train a few ranges, compare them with the adapter on a probe, keep the best or the adapter.

    The command `loragate calibrate` is this call. Training takes one pass for each range; scores are shares of right answers,
    0 to 1, over questions × samples, and intervals are 95 % over questions.

    Args:
        peft_model: base with a plain LoRA adapter in memory. It is left gated with what was written: λ = 1 everywhere
            where the adapter remains.
        tokenizer: of the base, with a chat template if the rows are conversations.
        rows: prompts and responses to train on, in any known format, or the path or hub id of a file with them.
        probe: at least 32 questions that are not among the rows: a file, or dicts with "prompt" and "answer", or prompts
            only, which are judged by the adapter's own majority. None sets up to 64 of the rows aside for that.
        folder: where the gated adapter is written, and below `run` what a resumed choice goes on from.
        ranges: candidates, "L,U" separated by semicolons, each with "@objective" behind it where it has its own.
        config: of the gates; its range and seed give way to the candidate's. By default the paper's.
        settings: of the training; the paper's values by default.
        asking: how the probe is asked and judged.
        retention: labelled questions of an ability to keep; a range that clearly loses on them is not picked.
        heldout: rows that are only measured: entropy before and after.
        reward: (row, answer text, finished) to a number, for the objective reward; by default 1 for a right answer.
        system: "none" leaves out a default system message that the template injects, "keep" keeps it.
        unverified: take the gates of the one range as they come; `probe` must be None.
        resume: go on with what an interrupted call left in `folder`.
        on_event: called with (candidate, stage, done, total, entropy).
        origin: `adapter_source`, `base_id`, `base_revision` and `adapter_id` of `loragate.save_gates`.

    Returns:
        What was chosen, and the record of it that the artifact keeps.

    Raises:
        ConfigError: for settings that cannot be used together, earlier candidates in `folder` that are not to be resumed,
            resuming with other settings, or several processes (except with `unverified`).
        DataError: for rows or questions that cannot be used, or a probe that shares questions with the rows.
        DivergenceError: if no range's training stayed finite. One that did not only drops out.
        GateError: if the adapter cannot be gated, or is gated already.
        ArtifactError: if `folder` holds a gated adapter already.
    """
    settings = settings or CalibrationSettings()
    candidates = parse_candidates(ranges, settings.objective, settings.seed) if isinstance(ranges, str) else ranges
    one = Transaction(
        tokenizer,
        rows,
        probe,
        folder,
        candidates,
        config or GateConfig(CAUTIOUS.lower, CAUTIOUS.upper),
        settings,
        asking or SelectionSettings(),
        retention=retention,
        heldout=heldout,
        reward=reward,
        system=system,
        unverified=unverified,
    )
    one.take(peft_model, **origin)
    return one.run(resume=resume, on_event=on_event)


class Transaction:
    """One choice, in three steps: what needs no model is read and checked here; `take` the model; `run`.

    Args:
        tokenizer, rows, probe, folder: see `choose_gates`.
        candidates: what is tried; the first one's range is that of the zero gates where the adapter remains.
        config, settings, asking, retention, heldout, reward, system, unverified: see `choose_gates`.
        encode: from (rows, function) to what the function gives; it may add the function's cache, processes and on_progress.
    """

    def __init__(
        self,
        tokenizer: Any,
        rows: RowsGiven,
        probe: RowsGiven | None,
        folder: str | Path,
        candidates: Sequence[Candidate],
        config: GateConfig,
        settings: CalibrationSettings,
        asking: SelectionSettings,
        *,
        retention: RowsGiven | None = None,
        heldout: RowsGiven | None = None,
        reward: Reward | None = None,
        system: str = "none",
        unverified: bool = False,
        encode: Encode = lambda _, encode: encode(),
    ) -> None:
        self.tokenizer, self.folder, self.candidates = tokenizer, Path(folder), tuple(candidates)
        self.config, self.settings, self.asking, self.system = config, settings, asking, system
        self.unverified = unverified
        self._require_usable(probe)
        everything = self.given = load_rows(rows)
        if reward is None and any(one.objective == "reward" for one in self.candidates):
            reward = reward_of(everything, asking.probe_grader)
        self.reward = reward
        require_evidence(asking, probe, retention)
        spare = None
        if probe is None and not unverified:
            self.given, spare = set_aside(everything.shuffled(settings.seed))
            require_evidence(asking, probe, retention, spare)
        self.rows, self.encoded = encode(
            self.given, lambda **how: calibration_rows(self.given, tokenizer, settings, system, **how)
        )
        self.answer_tokens = asking.probe_max_new_tokens or answer_tokens(self.encoded)
        self.heldout = None
        if heldout is not None:
            self.heldout = encode_rows(load_rows(heldout), tokenizer, max_length=settings.max_length, system=system)
        plain = self.encoded.summary.plain == self.encoded.summary.rows
        self.evidence = Evidence(everything, probe, retention, spare, asking, raw=plain)

    def _require_usable(self, probe: RowsGiven | None) -> None:
        """Refuse candidates that could not be compared, before anything is read."""
        if (self.folder / CONFIG).exists():
            raise ArtifactError(
                f"{self.folder} already holds a gated adapter; choose another folder or remove it first"
            )
        if not self.candidates or len({one.slug for one in self.candidates}) != len(self.candidates):
            found = [one.cell for one in self.candidates]
            raise ConfigError(f"candidate ranges must be given, each once; found {found}")
        if self.unverified and (probe is not None or len(self.candidates) > 1):
            raise ConfigError("gates are accepted without evidence (unverified) for one range and without a probe")
        if not self.unverified and (processes := launch_of().processes) > 1:
            raise ConfigError(
                f"ranges are chosen in one process, and this is one of {processes}; start loragate without a distributed "
                "launcher, or train one range on all of them with --range=L,U --unverified"
            )
        for one in self.candidates:
            config_of(self.config, one)
            settings_of(self.settings, one.objective, one.seed)  # a setting that does not fit shows before any training

    def take(self, peft_model: Any, engine: Engine | None = None, **origin: Any) -> None:
        """The model to gate.

        Args:
            peft_model: base with the plain adapter.
            engine: answers with the model as it stands; by default with transformers, `sampling_batch_size` at a time.
            origin: see `choose_gates`.
        """
        if is_gated(peft_model, active_adapter(peft_model)):
            raise GateError(
                "the model carries gates already, so the plain adapter could not be scored; take them off with "
                "loragate.detach_gates(model)"
            )
        size = self.settings.sampling_batch_size
        self.bench = Bench(
            peft_model,
            self.tokenizer,
            engine or TransformersEngine(peft_model, self.tokenizer, batch_size=size),
            self._encoded,
            self.config,
            lambda one: settings_of(self.settings, one.objective, one.seed),
            options=self._options,
            origin=origin,
        )
        self.positions = getattr(peft_model.config.get_text_config(), "max_position_embeddings", None)

    def find_probe(self, on_progress: OnProgress | None = None) -> tuple[Probe | None, str]:
        """(probe, "") or (None, why no evidence can be had); without labels the adapter is asked for its majority."""
        return self.evidence.probe(
            self.tokenizer,
            self.bench.engine,
            system=self.system,
            positions=self.positions,
            max_length=self.settings.max_length,
            max_new_tokens=self.answer_tokens,
            seed=self.settings.seed + 1,
            kept=self.folder / CANDIDATES / "majority.json",
            on_progress=on_progress,
        )

    def run(
        self, found: tuple[Probe | None, str] | None = None, *, resume: bool = False, on_event: OnEvent | None = None
    ) -> Chosen:
        """Train and probe what is not finished yet, choose, and write the folder.

        Args:
            found: of `find_probe`, where that has been called.
            resume, on_event: see `choose_gates`, and for what is raised.
        """
        if self.unverified:
            return self._as_given(resume, on_event)

        def progress(done: int, total: int) -> None:
            if on_event is not None:
                on_event(Candidate(None, ADAPTER), "asking", done, total, None)

        probe, why = found or self.find_probe(progress)
        if probe is None:
            return self._left_off(why, resume, on_event)
        self.bench.probe = probe
        self.bench.retention = self.evidence.retention(
            self.tokenizer, system=self.system, positions=self.positions, seed=self.settings.seed + 1
        )
        selection = self._select(probe, resume, on_event)
        written, record = selection.written, selection.as_record()
        if written is None:
            self._write_zero({"selection": record}, k=self.settings.k)
            return chosen_in(self.folder)
        trial = self.folder / CANDIDATES / "trials" / written.candidate.slug / GATED
        copy_artifact(trial, self.folder, record)
        self._put_on(written.candidate, trial)
        return chosen_in(self.folder, written.candidate)

    def _select(self, probe: Probe, resume: bool, on_event: OnEvent | None) -> Selection:
        model = self.bench.model
        references: tuple[Candidate, ...] = ()
        if self.asking.references:
            references = references_of(probe, not trains_biases(model, active_adapter(model)))
        compared = (Candidate(None, ADAPTER), *self.candidates)
        retention = self.bench.retention
        asked = {"probe": probe.fingerprint, "retention": None if retention is None else retention.fingerprint}
        store = self._store((*compared, *references), asked)
        with self._begun(store, resume):
            self._try(store, compared, on_event)
            diverged = store.diverged()
            if all(one.slug in diverged for one in self.candidates):
                raise DivergenceError(diverged[self.candidates[-1].slug])
            self._try(store, references, on_event)
            return selections(store.study, store.finished(), diverged)[""]

    def _try(self, store: Store, candidates: Sequence[Candidate], on_event: OnEvent | None) -> None:
        """Run trials one after the other; one whose training diverges drops out."""
        diverged = store.diverged()
        for one in candidates:
            if one.slug not in diverged:
                try:
                    run_trial(store, one, lambda _: self.bench, on_event)
                except DivergenceError:
                    continue

    def _store(self, candidates: tuple[Candidate, ...], asked: dict[str, Any]) -> Store:
        """The study of these candidates; its identity is what their numbers depend on."""
        model = self.bench.model
        named = {one.objective: one for one in self.candidates}
        guarded = self.asking.guard and any(self.bench.settings(one).on_policy for one in self.candidates)
        gates = asdict(self.config)
        identity = {
            **asked,
            "data": self.rows.fingerprint,
            "tokens": encoded_fingerprint(self.encoded),
            "heldout": None if self.heldout is None else encoded_fingerprint(self.heldout),
            "adapter": adapter_fingerprint(model, active_adapter(model)),
            "base": hashlib.sha256(json.dumps(base_weight_samples(model)).encode()).hexdigest(),
            "training": {name: self.bench.settings(one).as_record() for name, one in named.items()},
            "gates": {name: value for name, value in gates.items() if name not in ("lower", "upper", "seed")},
            "guard": asdict(GuardLimits()) if guarded else None,
        }
        return Store(self.folder / CANDIDATES, Study(candidates, identity))

    @contextmanager
    def _begun(self, store: Store, resume: bool) -> Iterator[None]:
        taken = f"another choice is running in {self.folder}; wait for it to end, or stop it"
        with held(store.folder / "lock", 0.0, taken):
            store.study.begin(store.folder, resume)
            yield

    def _left_off(self, why: str, resume: bool, on_event: OnEvent | None) -> Chosen:
        """Train one range and leave it off, because nothing can show whether it helps."""
        (first, *others) = self.candidates
        one = first if not others else Candidate(CAUTIOUS, self.settings.objective, self.settings.seed)
        store = self._store((one,), {"probe": None, "why": why})
        with self._begun(store, resume):
            self._try(store, [one], on_event)
        if one.slug in (diverged := store.diverged()):
            raise DivergenceError(diverged[one.slug])
        trained = read_gate_config(store.place(one) / GATED)
        evidence = {key: trained[key] for key in ("training", "parity")}
        self._write_zero({**evidence, "selection": {**without_evidence(one, OFF, accepted=False), "why": why}}, one)
        return chosen_in(self.folder, None, one)

    def _as_given(self, resume: bool, on_event: OnEvent | None) -> Chosen:
        """A range that the user accepted without evidence; on several processes only the main one writes."""
        (one,) = self.candidates
        settings, run = self.bench.settings(one), self.folder / "run"

        def report(step: Any) -> None:
            if on_event is not None:
                on_event(one, "training", step.step, step.total, step.values.get("topk_entropy"))

        result = calibrate(
            self.bench.model,
            self.tokenizer,
            self.rows,
            config_of(self.config, one),
            settings,
            run_folder=run,
            resume=resume and (run / "run.json").is_file(),
            encoded=self.encoded,
            on_step=report,
            **self._options(settings),
        )
        evidence = {**result.evidence(), "selection": without_evidence(one, UNVERIFIED, accepted=True)}
        if process_state().is_main_process:
            save_artifact(self.bench, self.folder, evidence)
        return Chosen(self.folder, one, one, evidence)

    def _encoded(self, settings: CalibrationSettings) -> tuple[Rows, EncodedRows]:
        if settings.seed == self.settings.seed:
            return self.rows, self.encoded
        return calibration_rows(self.given, self.tokenizer, settings, self.system)

    def _options(self, settings: CalibrationSettings) -> dict[str, Any]:
        """What a training with these settings needs beside the rows."""
        options: dict[str, Any] = {"heldout": self.heldout}
        if settings.objective == "reward":
            options["reward"] = self.reward
        if settings.on_policy and self.asking.guard:
            options["guard"] = GuardLimits()
        return options

    def _put_on(self, one: Candidate, gated: Path | None) -> None:
        """Attach a candidate's gates as they are in a folder, or zero gates in its range."""
        attach_gates(self.bench.model, config_of(self.config, one), active_adapter(self.bench.model))
        load_gate_values(self.bench.model, {} if gated is None else load_file(gated / GATES))

    def _write_zero(self, evidence: dict[str, Any], one: Candidate | None = None, k: int | None = None) -> None:
        self._put_on(one or self.candidates[0], None)
        save_artifact(self.bench, self.folder, evidence, k)
