"""The steps of `loragate calibrate` after its flags were understood: load, train, choose, write.

Four endings: gates chosen on a probe; the adapter (zero gates) where nothing beat it; gates that the user accepted without
evidence; and gates that were trained but stay off because there was none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from loragate.cli.arguments import resolved_yaml
from loragate.cli.calibration_report import (
    model_card,
    report_selection,
    report_training,
    show_data,
    warn_about_endings,
)
from loragate.cli.display import Display, console
from loragate.cli.models import (
    adapter_folder,
    adapter_record,
    dtype_argument,
    load_adapter,
    load_base,
    load_tokenizer,
    pick_device,
)
from loragate.cli.selecting import accept_command
from loragate.data import Rows, load_rows
from loragate.errors import ConfigError
from loragate.files import write_atomically, write_json, write_text
from loragate.gates import attach_gates, examine_adapter, gate_parameters, require_gateable, save_gates
from loragate.gates.config import GateConfig
from loragate.gates.schema import read_gate_config
from loragate.generation import TransformersEngine
from loragate.selection.candidate import Candidate
from loragate.selection.questions import set_aside
from loragate.selection.transaction import Transaction, load_gate_values
from loragate.training import calibrate, calibration_rows

UNVERIFIED = "given by the user without a probe; not compared with the plain adapter"
OFF = "trained without evidence, so the gates are off (λ = 1); accept them with --unverified"


@dataclass
class Job:
    """Everything one calibration works with.

    Attributes:
        options, settings, folder: as asked for.
        model, tokenizer: base with the plain adapter.
        rows, encoded: what is trained on.
        spare: rows set aside as probe prompts; None where they are not needed.
        base_name: as it was loaded.
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
    spare: Rows | None
    base_name: str
    engine: Any

    @property
    def calibrate_options(self) -> dict[str, Any]:
        """What the objective needs beside the rows."""
        return {"reward": reward_of(self.options, self.rows)} if self.settings.objective == "reward" else {}


def prepare(options: Any, settings: Any, folder: Path, *, aside: bool) -> Job:
    """Read the rows, load the model, show what will be trained on."""
    out, display = console(), Display()
    rows = load_rows(options.data, split=options.split or None, revision=options.revision or None)
    record = adapter_record(options.adapter)
    base_name = options.base or record.base_model_name_or_path
    if not base_name:
        raise ConfigError(f"{options.adapter} does not name its base model; say which with --base")
    tokenizer = load_tokenizer(
        [options.adapter, base_name], chat_template=options.chat_template, trust=options.trust_remote_code
    )
    spare = None
    with display.job("reading the data"):
        if aside:
            rows, spare = set_aside(rows.shuffled(settings.seed))
        rows, encoded = calibration_rows(rows, tokenizer, settings, options.system)
    show_data(out, encoded, tokenizer)
    device = pick_device(options.device)
    with display.job("loading the model"):
        base = load_base(
            base_name,
            revision=record.revision or "",
            dtype=dtype_argument(options.dtype, device),
            device=device,
            trust=options.trust_remote_code,
        )
        model = load_adapter(base, options.adapter)
    warn_about_endings(out, tokenizer, encoded, base)
    gateable = require_gateable(examine_adapter(model, "default", gate_config(options, 0, 1).target_modules))
    keep_configuration(options, folder)
    out.print(f"gating {len(gateable)} modules, {settings.steps(len(encoded))} steps for each range")
    engine = TransformersEngine(model, tokenizer, batch_size=settings.sampling_batch_size)
    return Job(options, settings, folder, out, display, model, tokenizer, rows, encoded, spare, base_name, engine)


def train(job: Job, candidate: Candidate) -> dict[str, Any]:
    """Train one range into the run folder; returns its record. The model stays gated."""
    with job.display.job(f"calibrating {candidate.name}") as shown:
        result = calibrate(
            job.model,
            job.tokenizer,
            job.rows,
            gate_config(job.options, candidate.lower, candidate.upper),
            job.settings,
            run_folder=job.folder / "run",
            resume=job.options.resume,
            encoded=job.encoded,
            on_step=lambda report: shown.advance_to(report.step, report.total, _note(report.values)),
            **job.calibrate_options,
        )
    return result.evidence()


def train_as_given(job: Job, candidate: Candidate) -> int:
    """A range that the user accepted without evidence."""
    evidence = {**train(job, candidate), "selection": _no_evidence(candidate, UNVERIFIED, accepted=True)}
    report_training(job.out, evidence)
    write_artifact(job, candidate, evidence)
    return 0


def train_without_evidence(job: Job, candidate: Candidate, why: str) -> int:
    """Train the most cautious range and leave it off, because nothing can show whether it helps."""
    job.out.print(f"no evidence can be had here: {why}", markup=False)
    evidence = train(job, candidate)
    report_training(job.out, evidence)
    kept = job.folder / "run" / "unaccepted"
    gates = {name: value.detach().cpu().clone() for name, value in gate_parameters(job.model).items()}
    if is_main_process():
        write_atomically(kept / "gates.safetensors", lambda path: save_file(gates, path))
        write_json(kept / "evidence.json", {"range": [candidate.lower, candidate.upper], **evidence})
    load_gate_values(job.model, {})
    evidence["selection"] = {**_no_evidence(candidate, OFF, accepted=False), "why": why}
    write_artifact(job, candidate, evidence)
    job.out.print(
        f"the gates of {candidate.name} are trained but off: nothing shows that they help. Give --probe FILE with at least 32 "
        "prompts and answers to have a range chosen. To switch these on as they are:",
        markup=False,
    )
    job.out.print(f"  {accept_command(job.options, candidate)}", markup=False)
    return 0


def is_unaccepted(folder: Path) -> bool:
    """Whether the folder holds gates that were trained and left off."""
    return (folder / "gate_config.json").is_file() and (folder / "run" / "unaccepted" / "evidence.json").is_file()


def accept(job: Job, candidate: Candidate) -> int:
    """Switch on gates that were trained before and left off."""
    kept = job.folder / "run" / "unaccepted"
    stored = json.loads((kept / "evidence.json").read_text(encoding="utf-8"))
    lower, upper = stored.pop("range")
    trained = Candidate(float(lower), float(upper), candidate.objective)
    if trained != candidate:
        raise ConfigError(f"{job.folder} holds gates of {trained.name}, not of {candidate.name}; give another --out")
    attach_gates(job.model, gate_config(job.options, candidate.lower, candidate.upper))
    load_gate_values(job.model, load_file(kept / "gates.safetensors"))
    before = read_gate_config(job.folder)["selection"]
    evidence = {**stored, "selection": {**_no_evidence(candidate, UNVERIFIED, accepted=True), "why": before.get("why")}}
    write_artifact(job, candidate, evidence, overwrite=True)
    return 0


def choose_and_write(job: Job, probe: Any, candidates: list[Candidate]) -> int:
    """Train every candidate, keep the best on the probe, or the adapter."""
    transaction = Transaction(
        job.model,
        job.tokenizer,
        job.rows,
        job.encoded,
        job.settings,
        lambda lower, upper: gate_config(job.options, lower, upper),
        probe,
        job.engine,
        job.folder / "run" / "candidates",
        **job.calibrate_options,
    )
    names = ["adapter", *(candidate.name for candidate in candidates)]
    with job.display.job(f"trying {len(candidates)} ranges", len(names)) as shown:

        def on_event(name: str, stage: str, done: int, total: int, note: str) -> None:
            share = (done / max(total, 1)) * (0.8 if stage == "training" else 0.2) + (0.8 if stage == "probing" else 0)
            steps = round(1000 * (names.index(name) + share))
            shown.advance_to(steps, 1000 * len(names), f"{stage} {name} {done}/{total} {note}".rstrip())

        selection = transaction.run(candidates, on_event, resume=job.options.resume)
    report_selection(job.out, selection)
    transaction.put_on(selection, candidates[0])
    picked = selection.candidate or candidates[0]
    evidence = {"selection": selection.as_record()}
    if selection.candidate is not None:
        evidence = {**selection.outcomes[picked.name].evidence, **evidence}
        report_training(job.out, evidence)
    write_artifact(job, picked, evidence)
    return 0


def write_artifact(job: Job, candidate: Candidate, evidence: dict[str, Any], *, overwrite: bool = False) -> None:
    """The gated folder, and the line that says what to run next."""
    if is_main_process():
        save_gates(
            job.model,
            job.folder,
            adapter_source=None if overwrite else adapter_folder(job.options.adapter),
            k=job.settings.k,
            base_id=job.options.base_id or lasting_name(job.base_name),
            evidence=evidence,
            card=model_card(
                job.folder.name,
                job.base_name,
                job.options.adapter,
                gate_config(job.options, candidate.lower, candidate.upper),
                evidence,
            ),
        )
        job.tokenizer.save_pretrained(str(job.folder / "adapter" / "tokenizer"))
        job.out.print(f"written to {job.folder}; its adapter/ is the plain adapter to compare with", markup=False)
        job.out.print(
            f"next: loragate eval --model {job.folder} --suite math --out runs/{job.folder.name}", markup=False
        )


def reward_of(options: Any, rows: Rows) -> Any:
    """Reward 1 for a right answer: rows must carry an answer, judged by the probe's grader.

    Raises:
        ConfigError: if a row has no answer.
    """
    from loragate.evaluation import grade_math
    from loragate.evaluation.judging import MATH
    from loragate.evaluation.tasks.extractors import grade_choice, grade_exact
    from loragate.evaluation.tasks.tiny import grade_tiny
    from loragate.selection.questions import ANSWERS

    def answer(row: Any) -> Any:
        return next((row[name] for name in ANSWERS if row.get(name) is not None), None)

    missing = [index for index in range(len(rows)) if answer(rows[index]) is None]
    if missing:
        raise ConfigError(
            f"{rows.where(missing[0])}: --objective reward needs an answer in every row ({', '.join(ANSWERS)}), to compare "
            "sampled answers with"
        )

    def reward(row: Any, text: str, finished: bool) -> float:
        gold = str(answer(row))
        if options.probe_grader == "tiny":
            return float(grade_tiny(row, text, finished).correct)
        if not finished:
            return 0.0
        if options.probe_grader in MATH:
            return float(grade_math(text, gold, options.probe_grader).correct)
        grade = grade_choice(text, gold) if options.probe_grader == "choice" else grade_exact(text, gold)
        return float(grade.correct)

    return reward


def keep_configuration(options: Any, folder: Path) -> None:
    """The resolved settings, as a file that `--config` reads."""
    if is_main_process():
        write_text(folder / "run" / "config.yaml", resolved_yaml(options))


def lasting_name(base: str) -> str:
    """A hub id as it is; a folder as its absolute path, which still works from another folder."""
    return str(Path(base).resolve()) if Path(base).is_dir() else base


def gate_config(options: Any, lower: float, upper: float) -> GateConfig:
    """The `GateConfig` of the command's flags."""
    targets = tuple(name.strip() for name in options.gate_modules.split(",") if name.strip())
    return GateConfig(
        lower,
        upper,
        tau=options.tau,
        init_scale=options.init_scale,
        seed=options.seed,
        detach_input=not options.complete_gradient,
        granularity=options.granularity,
        target_modules=targets or None,
    )


def is_main_process() -> bool:
    """Whether this process writes results."""
    from accelerate import PartialState

    return bool(PartialState().is_main_process)


def _no_evidence(candidate: Candidate, reason: str, *, accepted: bool) -> dict[str, Any]:
    return {
        "method": "given by the user",
        "accepted": accepted,
        "range": [candidate.lower, candidate.upper],
        "reason": reason,
        "evidence": "none: not compared with the adapter",
    }


def _note(values: dict[str, Any]) -> str:
    entropy = values.get("topk_entropy")
    return f"entropy {entropy:.3f}" if entropy is not None else ""
