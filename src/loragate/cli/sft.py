"""`loragate sft`: train a LoRA or DoRA adapter with a token objective (Stage I)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

from loragate.cli.arguments import Command, require_given
from loragate.cli.options import RunOptions
from loragate.display import Display, console, duration, next_evaluation, quiet_logging
from loragate.effects import require_effect
from loragate.training.launching import begin, loads_into_host
from loragate.training.preflight import check_loading, require_free_out, require_reporters
from loragate.training.settings import StageOneSettings


@dataclass(frozen=True)
class SftOptions(RunOptions, StageOneSettings):
    """Settings of `loragate sft`.

    Attributes:
        model: base model, folder or hub id.
        reference: frozen model for the KL of eksft, folder or hub id; by default the base itself, adapter off.
        max_rows: number of rows to use (0: all); see select.
    """

    model: str = ""
    reference: str = ""
    max_rows: int = 0


def run(options: SftOptions) -> int:
    """Load, show a sample, train, write the adapter."""
    require_given(COMMAND, options)
    folder = Path(options.out)
    settings = StageOneSettings(**{field.name: getattr(options, field.name) for field in fields(StageOneSettings)})
    require_free_out(folder, options.resume)
    how = check_loading(options)
    if (status := begin(options, settings, reference=bool(options.reference))) is not None:
        return status
    require_reporters(options.report_to)
    quiet_logging()
    from loragate.cli.calibration_report import show_data, warn_about_endings
    from loragate.cli.run_rows import encode_run, keep_configuration, keep_rows_record, read_rows, say_steps
    from loragate.data import encode_rows
    from loragate.models import explained, open_base, open_tokenizer, resolve
    from loragate.training.run import require_mask_column
    from loragate.training.run_folder import RECORD
    from loragate.training.stage_one import adapter_settings, objective_of, train_adapter
    from loragate.training.strategy import process_state

    place = resolve(options.model, expect="base")
    note = ""
    if settings.adapter:
        adapter = resolve(settings.adapter, expect="adapter", base_later=True)
        settings = adapter_settings(replace(settings, adapter=adapter.source), adapter.peft_config())
        warmup = f"a warm-up of {100 * settings.warmup:g} % of the steps" if settings.warmup else "no new warm-up"
        note = (
            f"going on from {options.adapter}, which is only read: {'DoRA' if settings.dora else 'LoRA'}, rank {settings.rank}, "
            f"α {settings.alpha:g}; {warmup}"
        )
    objective = objective_of(settings)
    require_effect("sft", options, flags=True)
    other = resolve(options.reference, expect="base", what="reference model") if options.reference else None
    out, display = console(), Display()
    rows = read_rows(options, settings.seed)
    tokenizer = open_tokenizer(place, how)
    with display.job("reading the data", unit="row") as job:
        rows = rows.shuffled(settings.seed)
        encoded = encode_run(
            options,
            rows,
            job,
            lambda **how: encode_rows(rows, tokenizer, max_length=settings.max_length, system=options.system, **how),
        )
    require_mask_column(objective, encoded, rows)
    show_data(out, encoded, tokenizer)
    if "keep_mask" in encoded[0] and "keep_mask" not in objective.requires:
        out.print(f"note: the keep_mask column is not read by the objective {settings.objective}", markup=False)
    if note:
        out.print(note, markup=False)
    with display.job("loading the model"), explained("base model", options.model):
        base = open_base(place.base, replace(how, host_memory=loads_into_host()))
        reference = open_base(other.base, how) if other else None
    warn_about_endings(out, tokenizer, encoded, base)
    keep_rows_record(options, folder, rows, encoded, options.max_rows)
    keep_configuration(options, folder)
    say_steps(out, settings, len(encoded))
    if options.learning_rate == StageOneSettings.learning_rate:
        out.print(
            f"learning rate {options.learning_rate:g}, the paper's for 1.5B parameters: halve it where the loss jumps or rises, "
            "double it where it hardly falls",
            markup=False,
        )
    with display.job(f"training ({settings.objective})", unit="step") as job:
        result = train_adapter(
            base,
            tokenizer,
            rows,
            settings,
            run_folder=folder / "run",
            # stopped before its first step, a run has its configuration and nothing to go on with
            resume=options.resume and (folder / "run" / RECORD).is_file(),
            encoded=encoded,
            reference_model=reference,
            on_step=lambda report: job.advance_to(
                report.step, report.total, f"nll {report.values['nll']:.3f}" if "nll" in report.values else ""
            ),
        )
    if process_state().is_main_process:
        result.save(folder, tokenizer, place.base)
        first, last = (
            next((r["nll"] for r in order if "nll" in r), None) for order in (result.history, result.history[::-1])
        )
        fall = f"; log loss per token {first:.3f} → {last:.3f}" if first is not None and last is not None else ""
        out.print(f"done in {duration(result.seconds)}: {result.steps} steps of {settings.objective}{fall}")
        out.print(f"written to {folder}")
        gating = f"next: loragate calibrate --adapter {folder} --data {options.data} --probe FILE --out {folder}-gated"
        # a DoRA adapter cannot be gated
        out.print(next_evaluation(folder, f"runs/{folder.name}") if settings.dora else gating, markup=False)
    return 0


COMMAND = Command(
    name="sft",
    summary="Stage I: train a LoRA or DoRA adapter with a token objective, or go on training a finished one.",
    options=SftOptions,
    run=run,
    needs=("model", "data", "out"),
    examples=(
        "loragate sft --model path/to/base --data train.jsonl --out adapter",
        "loragate sft --config sft.yaml --objective dft --out adapter-dft",
        "loragate sft --model path/to/base --adapter adapter --data gate-rows.jsonl --out adapter-longer",
    ),
    common=(
        "objective adapter target_modules rank alpha learning_rate epochs "
        "batch_size micro_batch_size max_rows max_length precision seed resume"
    ),
)
