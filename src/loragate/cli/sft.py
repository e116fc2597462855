"""`loragate sft`: train a LoRA or DoRA adapter with a token objective (Stage I)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from loragate.cli.arguments import Command, require_given
from loragate.cli.display import Display, console, duration, next_evaluation
from loragate.cli.launching import begin, loads_into_host
from loragate.cli.options import RunOptions
from loragate.cli.preflight import check_loading, quiet_logging, require_free_out, require_reporters
from loragate.effects import require_effect
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
    from loragate.models import explained, open_base, open_tokenizer, resolve

    place = resolve(options.model, expect="base")
    settings, note = with_adapter(settings)
    quiet_logging()
    from loragate.cli.calibration_report import show_data, warn_about_endings
    from loragate.cli.run_rows import encode_run, keep_configuration, keep_rows_record, read_rows, say_steps
    from loragate.data import encode_rows
    from loragate.gates.artifact import write_adapter
    from loragate.training import train_adapter
    from loragate.training.run import require_mask_column
    from loragate.training.stage_one import objective_of
    from loragate.training.strategy import process_state

    objective = objective_of(settings)
    other = reference_of(options)
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
            resume=options.resume,
            encoded=encoded,
            reference_model=reference,
            on_step=lambda report: job.advance_to(
                report.step, report.total, f"nll {report.values['nll']:.3f}" if "nll" in report.values else ""
            ),
        )
    if process_state().is_main_process:
        config = result.model.peft_config["default"]
        config.base_model_name_or_path = place.base.lasting
        config.revision = place.base.commit() or None
        write_adapter(result.model, "default", folder)
        tokenizer.save_pretrained(str(folder))
        first, last = (
            next((r["nll"] for r in order if "nll" in r), None) for order in (result.history, result.history[::-1])
        )
        fall = f"; log loss per token {first:.3f} → {last:.3f}" if first is not None and last is not None else ""
        out.print(f"done in {duration(result.seconds)}: {result.steps} steps of {settings.objective}{fall}")
        out.print(f"written to {folder}")
        out.print(next_line(folder, options.data, result.settings.dora), markup=False)
    return 0


def with_adapter(settings: StageOneSettings) -> tuple[StageOneSettings, str]:
    """The settings with those of the adapter to continue, and the line that says so.

    Raises:
        ConfigError: for what is no adapter, or a flag that contradicts it.
    """
    if not settings.adapter:
        return settings, ""
    from loragate.models import resolve
    from loragate.training.stage_one import adapter_settings

    place = resolve(settings.adapter, expect="adapter", base_later=True)
    settings = replace(settings, adapter=place.source)
    settings = adapter_settings(settings, place.peft_config())
    warmup = "no new warm-up" if not settings.warmup else f"a warm-up of {100 * settings.warmup:g} % of the steps"
    kind = "DoRA" if settings.dora else "LoRA"
    return settings, (
        f"going on from {settings.adapter}, which is only read: {kind}, rank {settings.rank}, α {settings.alpha:g}; {warmup}"
    )


def reference_of(options: SftOptions) -> Any:
    """The place of --reference, refused where it would have no effect; None where the base itself serves."""
    require_effect("sft", options, flags=True)
    if not options.reference:
        return None
    from loragate.models import resolve

    return resolve(options.reference, expect="base", what="reference model")


def next_line(folder: Path, data: str, dora: bool) -> str:
    """What to run next; a DoRA adapter cannot be gated."""
    if dora:
        return next_evaluation(folder, f"runs/{folder.name}")
    return f"next: loragate calibrate --adapter {folder} --data {data} --probe FILE --out {folder}-gated"


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
