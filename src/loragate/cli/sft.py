"""`loragate sft`: train a LoRA or DoRA adapter with a token objective (Stage I)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loragate.cli.arguments import Command
from loragate.cli.options import RARE, RunOptions, extract_settings, require_files
from loragate.display import Display, console, duration, format_next_command
from loragate.training.preflight import relaunch_if_requested, require_free_out, require_reporters
from loragate.training.settings import FineTuningSettings
from loragate.training.strategy import process_state
from loragate.validate import NonNegativeInt


@dataclass(frozen=True)
class SftOptions(RunOptions, FineTuningSettings):
    """Settings of `loragate sft`.

    Attributes:
        model: base model, folder or hub id.
        max_rows: number of rows to use (0: all); see select.
        overwrite: remove what an earlier training left in the out folder, and begin anew.
    """

    model: str = ""
    max_rows: NonNegativeInt = 0
    overwrite: bool = False


def run(options: SftOptions) -> int:
    """What `loragate.make_adapter` does, with what is read shown before the model is loaded, and progress."""
    require_files(options)
    from loragate.cli.training_report import keep_configuration, say_steps, show_data, warn_about_endings
    from loragate.training.fine_tuning import AdapterRun

    folder = Path(options.out)
    settings = extract_settings(options, FineTuningSettings)
    require_free_out(folder, options.resume, options.overwrite, settings.adapter)
    # with --processes this process only starts the others and waits
    if (status := relaunch_if_requested(settings, options, options)) is not None:
        return status
    require_reporters(options.report_to)
    out, display = console(), Display()
    with display.job("reading the data", unit="row") as job:
        training = AdapterRun(
            options.model,
            options,
            folder,
            settings,
            options.max_rows,
            options,
            options.system,
            options.resume,
            options.overwrite,
        )
        training.read(job)
    settings, encoded = training.settings, training.encoded
    show_data(out, encoded, training.tokenizer)
    if "keep_mask" in encoded[0] and "keep_mask" not in training.objective.requires:
        out.print(f"note: the keep_mask column is not read by the objective {settings.objective}")
    if settings.adapter:
        warmup = (
            f"a warm-up of {100 * settings.warmup_ratio:g} % of the steps"
            if settings.warmup_ratio
            else "no new warm-up"
        )
        out.print(
            f"going on from {options.adapter}, which is only read: {'DoRA' if settings.dora else 'LoRA'}, rank {settings.rank}, "
            f"α {settings.alpha:g}; {warmup}"
        )
    with display.job("loading the model"):
        training.load()
    warn_about_endings(out, training.tokenizer, encoded, training.base)
    keep_configuration(options, folder)
    say_steps(out, settings, len(encoded))
    if options.learning_rate == FineTuningSettings.learning_rate:
        out.print(
            f"learning rate {options.learning_rate:g}, the paper's for 1.5B parameters: halve it where the loss jumps or rises, "
            "double it where it hardly falls"
        )
    with display.job(f"training ({settings.objective})", unit="step") as job:
        result = training.train(
            lambda report: job(
                report.step, report.total, f"nll {report.values['nll']:.3f}" if "nll" in report.values else ""
            )
        )
    if process_state().is_main_process:
        logged = [record["nll"] for record in result.history if "nll" in record]
        fall = f"; log loss per token {logged[0]:.3f} → {logged[-1]:.3f}" if logged else ""
        out.print(f"done in {duration(result.seconds)}: {result.steps} steps of {settings.objective}{fall}")
        out.print(f"written to {folder}")
        gating = (
            f"next: loragate calibrate --adapter {folder} --data {options.data} --dev-data FILE"
            f"{' --system keep' if options.system == 'keep' else ''} --out {folder}-gated"
        )
        # a DoRA adapter cannot be gated
        out.print(format_next_command(folder, f"runs/{folder.name}", "", options.system) if settings.dora else gating)
    return 0


COMMAND = Command(
    name="sft",
    options=SftOptions,
    run=run,
    required_at_run=("model", "data", "out"),
    examples=(
        "loragate sft --model path/to/base --data train.jsonl --out adapter",
        "loragate sft --config sft.yaml --objective dft --out adapter-dft",
        "loragate sft --model path/to/base --adapter adapter --data gate-rows.jsonl --out adapter-longer",
    ),
    common=(
        "objective adapter target_modules rank alpha learning_rate num_train_epochs batch_size max_rows "
        "max_length precision seed resume"
    ),
    rare=RARE,
)
