"""`loragate calibrate`: gate a finished adapter from prompts and responses (Stage II)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from loragate.cli.arguments import Command, require_given
from loragate.cli.launching import begin
from loragate.cli.options import RunOptions
from loragate.cli.preflight import check_loading, quiet_logging, require_free_out, require_reporters
from loragate.cli.selecting import SelectionOptions, build_probe, build_retention, candidates_of, cautious_candidate
from loragate.training.settings import CalibrationSettings


@dataclass(frozen=True)
class CalibrateOptions(RunOptions, CalibrationSettings, SelectionOptions):
    """Settings of `loragate calibrate`.

    Attributes:
        adapter: finished PEFT LoRA adapter, folder or hub id.
        base: base model instead of the one the adapter names.
        base_id: hub id of the base to record in the artifact, if the base was loaded from a local folder.
        tau: gate temperature.
        init_scale: size of the initial perturbation of the gate weights.
        granularity: unit that has its own λ: token (each token in each module), module (each module, whatever the
            token) or global (one λ for all).
        detach_input: the gate reads its input without a gradient (the paper's semi-gradient); --no-detach-input gives the
            complete gradient, a variant.
        heldout: rows that neither stage trains on, a file or hub id: entropy is measured on them too, before and after.
        heldout_split: split of --heldout, or of --data, with the held-out rows.
        gate_modules: gate only these modules (names separated by commas); by default all LoRA linears.
    """

    select: Literal["first", "shuffled"] = "shuffled"
    adapter: str = ""
    base: str = ""
    base_id: str = ""
    tau: float = 1.0
    init_scale: float = 1e-6
    granularity: str = "token"
    detach_input: bool = True
    gate_modules: str = ""
    heldout: str = ""
    heldout_split: str = ""


def run(options: CalibrateOptions) -> int:
    """Load, show a sample, train what is to be tried, keep the best or the adapter, write the artifact."""
    require_given(COMMAND, options)
    candidates = candidates_of(options)
    from loragate.cli import calibration

    for candidate in candidates:
        calibration.gate_config(options, candidate.range)
    folder = Path(options.out)
    settings = CalibrationSettings(
        **{field.name: getattr(options, field.name) for field in fields(CalibrationSettings)}
    )
    check_loading(options)
    if (status := begin(options, settings, sampling=not options.unverified)) is not None:
        return status
    accepting = options.unverified and options.resume and calibration.is_unaccepted(folder)
    if accepting:
        quiet_logging()
        return calibration.accept(options, folder, candidates[0])
    require_free_out(folder, options.resume)
    require_reporters(options.report_to)
    quiet_logging()
    job = calibration.prepare(options, settings, folder, candidates)
    if options.unverified:
        return calibration.train_as_given(job, candidates[0])
    with job.display.job("preparing the probe") as shown:
        retention = build_retention(job)
        probe, why = build_probe(job, lambda done, total: shown.advance_to(done, total))
    if probe is None:
        return calibration.train_without_evidence(job, cautious_candidate(options, candidates), why)
    return calibration.choose_and_write(job, probe, retention, candidates)


COMMAND = Command(
    name="calibrate",
    summary="Stage II: gate a finished LoRA adapter by minimising its top-k predictive entropy on response tokens.",
    options=CalibrateOptions,
    run=run,
    needs=("adapter", "data", "out"),
    examples=(
        "loragate calibrate --adapter path/to/adapter --data train.jsonl --probe probe.jsonl --out gated",
        "loragate calibrate --adapter path/to/adapter --data train.jsonl --range=0,1 --unverified --out gated",
        "loragate calibrate --config calibrate.yaml --learning-rate 1e-3",
    ),
    common=(
        "range ranges probe probe_task unverified objective learning_rate epochs "
        "batch_size micro_batch_size max_rows precision seed resume"
    ),
)
