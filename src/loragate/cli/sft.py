"""`loragate sft`: train a LoRA or DoRA adapter with a token objective (Stage I)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from loragate.cli.arguments import Command
from loragate.cli.display import Display, console, duration
from loragate.cli.models import (
    check_batching,
    dtype_argument,
    load_base,
    load_tokenizer,
    pick_device,
    quiet_logging,
    require_free_out,
    require_not_an_adapter,
    require_place,
    require_reporters,
)
from loragate.cli.options import RunOptions
from loragate.errors import ConfigError
from loragate.training.settings import StageOneSettings


@dataclass(frozen=True)
class SftOptions(RunOptions, StageOneSettings):
    """Settings of `loragate sft`.

    Attributes:
        model: base model, folder or hub id.
        max_rows: use the first so many rows (0: all).
    """

    model: str = ""
    max_rows: int = 0


def run(options: SftOptions) -> int:
    """Load, show a sample, train, write the adapter."""
    for name in ("model", "data", "out"):
        if not getattr(options, name):
            raise ConfigError(f"loragate sft needs --{name}; for example: {COMMAND.examples[0]}")
    folder = Path(options.out)
    settings = StageOneSettings(**{field.name: getattr(options, field.name) for field in fields(StageOneSettings)})
    require_free_out(folder, options.resume)
    require_reporters(options.report_to)
    check_batching(settings)
    require_place("base model", options.model)
    require_not_an_adapter(options.model)
    quiet_logging()
    from loragate.cli.calibration import is_main_process, keep_configuration, lasting_name
    from loragate.cli.calibration_report import show_data, warn_about_endings
    from loragate.data import encode_rows, load_rows
    from loragate.gates.artifact import write_adapter
    from loragate.training import train_adapter
    from loragate.training.stage_one import objective_of

    objective_of(settings)
    out, display = console(), Display()
    rows = load_rows(
        options.data, split=options.split or None, revision=options.revision or None, limit=options.max_rows or None
    )
    tokenizer = load_tokenizer([options.model], chat_template=options.chat_template, trust=options.trust_remote_code)
    with display.job("reading the data"):
        rows = rows.shuffled(settings.seed)
        encoded = encode_rows(rows, tokenizer, max_length=settings.max_length, system=options.system)
    show_data(out, encoded, tokenizer)
    device = pick_device(options.device)
    with display.job("loading the model"):
        base = load_base(
            options.model,
            dtype=dtype_argument(options.dtype, device),
            device=device,
            trust=options.trust_remote_code,
        )
    warn_about_endings(out, tokenizer, encoded, base)
    keep_configuration(options, folder)
    with display.job(f"training ({settings.objective})") as job:
        result = train_adapter(
            base,
            tokenizer,
            rows,
            settings,
            run_folder=folder / "run",
            resume=options.resume,
            encoded=encoded,
            on_step=lambda report: job.advance_to(
                report.step, report.total, f"nll {report.values['nll']:.3f}" if "nll" in report.values else ""
            ),
        )
    if is_main_process():
        result.model.peft_config["default"].base_model_name_or_path = lasting_name(options.model)
        write_adapter(result.model, "default", folder)
        tokenizer.save_pretrained(str(folder))
        first, last = (
            next((r["nll"] for r in order if "nll" in r), None) for order in (result.history, result.history[::-1])
        )
        fall = f"; log loss per token {first:.3f} → {last:.3f}" if first is not None and last is not None else ""
        out.print(f"done in {duration(result.seconds)}: {result.steps} steps of {settings.objective}{fall}")
        out.print(f"written to {folder}")
        out.print(
            f"next: loragate calibrate --adapter {folder} --data {options.data} --probe FILE --out {folder}-gated",
            markup=False,
        )
    return 0


COMMAND = Command(
    name="sft",
    summary="Stage I: train a LoRA or DoRA adapter with sft, dft, profit, eaft, talr or an offline token mask.",
    options=SftOptions,
    run=run,
    examples=(
        "loragate sft --model path/to/base --data train.jsonl --out adapter",
        "loragate sft --config sft.yaml --objective dft --out adapter-dft",
    ),
)
