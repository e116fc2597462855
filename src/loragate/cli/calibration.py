"""The steps of `loragate calibrate` after its flags were understood: load, train, choose, write.

Four endings: gates chosen on a probe; the adapter (zero gates) where nothing beat it; gates that the user accepted without
evidence; and gates that were trained but stay off because there was none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loragate.cli.acceptance import is_unaccepted as is_unaccepted
from loragate.cli.acceptance import keep_unaccepted, put_on, read_unaccepted
from loragate.cli.arguments import comma_list, resolved_yaml
from loragate.cli.calibration_report import (
    report_selection,
    report_training,
    show_data,
    warn_about_endings,
)
from loragate.cli.display import Display, console, next_evaluation
from loragate.cli.launching import loads_into_host
from loragate.cli.rewards import reward_of
from loragate.cli.run_rows import encode_run, keep_rows_record, read_rows
from loragate.cli.selecting import Asked, accept_command, read_files, require_evidence
from loragate.data import EncodedRows, Rows, encode_rows, find_endings, load_rows
from loragate.files import write_text
from loragate.gates import (
    examine_adapter,
    gate_parameters,
    require_gateable,
    save_gates,
)
from loragate.gates.config import GateConfig
from loragate.gates.eligibility import require_trainable
from loragate.gates.range import Range
from loragate.generation import TransformersEngine
from loragate.models import Loading, Place, open_tokenizer, open_weights, resolve
from loragate.selection.candidate import Candidate
from loragate.selection.questions import set_aside
from loragate.selection.transaction import Transaction, load_gate_values, settings_of
from loragate.training import calibrate, calibration_rows
from loragate.training.guards import GuardLimits

UNVERIFIED = "given by the user without a probe; not compared with the plain adapter"
FEW_STEPS = 20
OFF = "trained without evidence, so the gates are off (λ = 1); accept them with --unverified"


@dataclass
class Job:
    """Everything one calibration works with.

    Attributes:
        options, settings, folder: as asked for.
        model, tokenizer: base with the plain adapter.
        rows, encoded: what is trained on.
        heldout: rows of --heldout, which are only measured; None without.
        spare: rows set aside as probe prompts; None where they are not needed.
        asked, retained: questions of --probe and --retention-probe.
        place: base and adapter.
        engine: answers with the model as it stands.
    """

    options: Any
    settings: Any
    folder: Path
    out: Any
    display: Display
    model: Any
    tokenizer: Any
    rows: Rows
    encoded: Any
    heldout: Any
    spare: Rows | None
    asked: Asked | None
    retained: Asked | None
    place: Place
    engine: Any

    @property
    def positions(self) -> int | None:
        """Positions of the model; None where it has no limit."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def calibrate_options(self, settings: Any) -> dict[str, Any]:
        """What a training with these settings needs beside the rows."""
        options: dict[str, Any] = {"heldout": self.heldout}
        if settings.objective == "reward":
            options["reward"] = reward_of(self.options, self.rows)
        if settings.on_policy and self.options.guard:
            options["guard"] = GuardLimits()
        return options


def prepare(options: Any, settings: Any, folder: Path, candidates: list[Candidate]) -> Job:
    """Read and check rows and questions, load the model, show what will be trained on."""
    out, display = console(), Display()
    place = resolve(options.adapter, options.base, expect="adapter")
    options = replace(options, adapter=place.source)
    require_evidence(options)
    rows = read_rows(options)
    if any(candidate.objective == "reward" for candidate in candidates):
        reward_of(options, rows)
    tokenizer = open_tokenizer(place, Loading.of(options))
    spare = None
    with display.job("reading the data") as job:
        everything = rows
        if not options.probe and not options.unverified:
            rows, spare = set_aside(rows.shuffled(settings.seed))
            require_evidence(options, spare)
        given = rows
        rows, encoded = encode_run(
            options, rows, job, lambda **how: calibration_rows(given, tokenizer, settings, options.system, **how)
        )
        heldout = heldout_rows(options, tokenizer)
        asked, retained = read_files(options, everything, raw=encoded.summary.plain == encoded.summary.rows)
    show_data(out, encoded, tokenizer)
    model = load_model(options, place, display)
    warn_about_endings(out, tokenizer, encoded, model.get_base_model())
    verdicts = examine_adapter(model, "default", gate_config(options, Range(0, 1)).target_modules)
    gateable = require_gateable(verdicts)
    require_trainable(verdicts)
    keep_rows_record(options, folder, rows, encoded, settings.max_rows)
    keep_configuration(options, folder)
    drawn = {candidate.objective for candidate in candidates} == {"random"}
    steps = "drawn at random, no training" if drawn else f"{settings.steps(len(encoded))} steps for each range"
    out.print(f"gating {len(gateable)} modules, {steps}")
    if not drawn and settings.steps(len(encoded)) < FEW_STEPS:
        out.print(
            f"note: fewer than {FEW_STEPS} steps hardly move the gates (the paper takes 157); more rows, --epochs or a smaller "
            "--batch-size give more",
            markup=False,
        )
    engine = TransformersEngine(model, tokenizer, batch_size=settings.sampling_batch_size)
    return Job(
        options,
        settings,
        folder,
        out,
        display,
        model,
        tokenizer,
        rows,
        encoded,
        heldout,
        spare,
        asked,
        retained,
        place,
        engine,
    )


def load_model(options: Any, place: Place, display: Display) -> Any:
    """Base with the plain adapter, on its device."""
    with display.job("loading the model"):
        return open_weights(place, Loading.of(options, host_memory=loads_into_host()))


def heldout_rows(options: Any, tokenizer: Any) -> EncodedRows | None:
    """The rows that are only measured, tokenised as those of the training."""
    if not options.heldout and not options.heldout_split:
        return None
    revision = None if options.heldout else options.revision or None
    rows = load_rows(options.heldout or options.data, split=options.heldout_split or None, revision=revision)
    return encode_rows(rows, tokenizer, max_length=options.max_length, system=options.system)


def train(job: Job, candidate: Candidate) -> dict[str, Any]:
    """Train one range into the run folder; returns its record. The model stays gated."""
    settings = settings_of(job.settings, candidate.objective)
    with job.display.job(f"calibrating {candidate.name}") as shown:
        result = calibrate(
            job.model,
            job.tokenizer,
            job.rows,
            gate_config(job.options, candidate.range),
            settings,
            run_folder=job.folder / "run",
            resume=job.options.resume and (job.folder / "run" / "run.json").is_file(),
            encoded=job.encoded,
            on_step=lambda report: shown.advance_to(report.step, report.total, _note(report.values)),
            **job.calibrate_options(settings),
        )
    return result.evidence()


def train_as_given(job: Job, candidate: Candidate) -> int:
    """A range that the user accepted without evidence."""
    evidence = {**train(job, candidate), "selection": _no_evidence(candidate, UNVERIFIED, accepted=True)}
    report_training(job.out, evidence)
    write_artifact(job, evidence)
    return 0


def train_without_evidence(job: Job, candidate: Candidate, why: str) -> int:
    """Train one range and leave it off, because nothing can show whether it helps."""
    job.out.print(f"no evidence can be had here: {why}", markup=False)
    evidence = train(job, candidate)
    report_training(job.out, evidence)
    gates = {name: value.detach().cpu().clone() for name, value in gate_parameters(job.model).items()}
    if is_main_process():
        keep_unaccepted(
            job.model, job.folder, candidate, gate_config(job.options, candidate.range), gates, evidence, why
        )
    load_gate_values(job.model, {})
    evidence["selection"] = {**_no_evidence(candidate, OFF, accepted=False), "why": why}
    write_artifact(job, evidence)
    job.out.print(
        f"the gates of {candidate.name} are trained but off: nothing shows that they help. Give --probe FILE with at least 32 "
        "prompts and answers to have a range chosen. To switch these on as they are:",
        markup=False,
    )
    job.out.print(f"  {accept_command(job.options, candidate)}", markup=False)
    return 0


def accept(options: Any, folder: Path, candidate: Candidate) -> int:
    """Switch on gates that were trained before and left off."""
    place = resolve(options.adapter, options.base, expect="adapter")
    options = replace(options, adapter=place.source)
    record = read_unaccepted(folder, candidate)
    out, display = console(), Display()
    model = load_model(options, place, display)
    put_on(model, folder, record)
    selection = {**_no_evidence(candidate, UNVERIFIED, accepted=True), "why": record["why"]}
    evidence = {**record["evidence"], "selection": selection}
    tokenizer = open_tokenizer(replace(place, folder=folder / "adapter"), Loading.of(options))
    (folder / "gate_config.json").unlink(missing_ok=True)  # written again last; until then nothing can be loaded
    save_gates(
        model,
        folder,
        adapter_source=folder / "adapter",
        **names_for_record(options, place),
        stop_token_ids=find_endings(tokenizer, model.generation_config).token_ids,
        evidence=evidence,
    )
    out.print(f"the gates of {candidate.name} are on; nothing shows that they help", markup=False)
    say_written(out, folder)
    return 0


def choose_and_write(job: Job, probe: Any, retention: Any, candidates: list[Candidate]) -> int:
    """Train every candidate, keep the best on the probe, or the adapter."""
    transaction = Transaction(
        job.model,
        job.tokenizer,
        job.rows,
        job.encoded,
        job.settings,
        lambda bounds: gate_config(job.options, bounds),
        probe,
        job.engine,
        job.folder / "run" / "candidates",
        retention,
        job.calibrate_options,
        job.options.references,
    )
    names = ["adapter", *(candidate.name for candidate in candidates), *(one.name for one in transaction.references)]
    with job.display.job(f"trying {len(candidates)} range{'s' * (len(candidates) > 1)}", len(names)) as shown:

        def on_event(name: str, stage: str, done: int, total: int, note: str) -> None:
            begin, length = {"training": (0.0, 0.8), "probing": (0.8, 0.15), "retention": (0.95, 0.05)}[stage]
            steps = round(1000 * (names.index(name) + begin + length * done / max(total, 1)))
            shown.advance_to(steps, 1000 * len(names), f"{stage} {name} {done}/{total} {note}".rstrip())

        selection = transaction.run(candidates, on_event, resume=job.options.resume)
    report_selection(job.out, selection.as_record())
    transaction.put_on(selection, candidates[0])
    picked = selection.candidate or candidates[0]
    evidence = {"selection": selection.as_record()}
    if selection.candidate is not None:
        evidence = {**selection.outcomes[picked.name].evidence, **evidence}
        report_training(job.out, evidence)
    write_artifact(job, evidence)
    return 0


def write_artifact(job: Job, evidence: dict[str, Any]) -> None:
    """The gated folder, and the line that says what to run next."""
    if is_main_process():
        options = job.options
        save_gates(
            job.model,
            job.folder,
            adapter_source=job.place.adapter,
            # gates that stayed at λ = 1 have no training that would say it
            k=None if "training" in evidence else job.settings.k,
            **names_for_record(options, job.place),
            stop_token_ids=job.engine.endings.token_ids,
            evidence=evidence,
        )
        job.tokenizer.save_pretrained(str(job.folder / "adapter" / "tokenizer"))
        say_written(job.out, job.folder)


def say_written(out: Any, folder: Path) -> None:
    """Where the result is, and what to run next."""
    out.print(f"written to {folder}; its adapter/ is the plain adapter to compare with", markup=False)
    out.print(next_evaluation(folder, f"runs/{folder.name}"), markup=False)


def keep_configuration(options: Any, folder: Path) -> None:
    """The resolved settings, as a file that `--config` reads; a run that goes on keeps the file that it began with."""
    path = folder / "run" / "config.yaml"
    if is_main_process() and not (options.resume and path.is_file()):
        write_text(path, resolved_yaml(options))


def names_for_record(options: Any, place: Place) -> dict[str, Any]:
    """What `save_gates` is told of base and adapter; a revision of the base that was loaded is none of --base-id."""
    base_id = options.base_id or place.base.lasting
    revision = None if options.base_id else place.base.revision or None
    return {"base_id": base_id, "base_revision": revision, "adapter_id": place.hub_id}


def gate_config(options: Any, bounds: Range, seed: int | None = None) -> GateConfig:
    """The `GateConfig` of a command's flags, with another seed than theirs where one is given."""
    return GateConfig(
        bounds.lower,
        bounds.upper,
        tau=options.tau,
        init_scale=options.init_scale,
        seed=options.seed if seed is None else seed,
        detach_input=options.detach_input,
        granularity=options.granularity,
        target_modules=tuple(comma_list(options.gate_modules)) or None,
    )


def is_main_process() -> bool:
    """Whether this process writes results."""
    from loragate.training.strategy import process_state

    return bool(process_state().is_main_process)


def _no_evidence(candidate: Candidate, reason: str, *, accepted: bool) -> dict[str, Any]:
    return {
        "method": "given by the user",
        "accepted": accepted,
        "range": [candidate.range.lower, candidate.range.upper],
        "reason": reason,
        "evidence": "none: not compared with the adapter",
    }


def _note(values: dict[str, Any]) -> str:
    entropy = values.get("topk_entropy")
    return f"entropy {entropy:.3f}" if entropy is not None else ""
