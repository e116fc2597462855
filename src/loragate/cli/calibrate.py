"""`loragate calibrate`: gate a finished adapter from prompts and responses (Stage II)."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from loragate.cli.arguments import Command, resolved_yaml
from loragate.cli.display import Display, console, duration
from loragate.cli.models import (
    adapter_folder,
    adapter_record,
    check_batching,
    dtype_argument,
    load_adapter,
    load_base,
    load_tokenizer,
    parse_range,
    pick_device,
    quiet_logging,
    require_free_out,
    require_reporters,
)
from loragate.cli.options import RunOptions
from loragate.errors import ConfigError
from loragate.files import write_text
from loragate.training.settings import CalibrationSettings

logger = logging.getLogger("loragate")


@dataclass(frozen=True)
class CalibrateOptions(RunOptions, CalibrationSettings):
    """Settings of `loragate calibrate`.

    Attributes:
        adapter: finished PEFT LoRA adapter, folder or hub id.
        range: bounds of λ as L,U, for example --range=-3,1. No range is a safe default, so none is assumed.
        base: base model instead of the one the adapter names.
        base_id: name of the base to record in the artifact, where the base was loaded from a local folder.
        tau: gate temperature.
        init_scale: size of the initial perturbation of the gate weights.
        granularity: token, module or global.
        complete_gradient: let the gate's gradient reach its input (a variant; the paper's gate detaches it).
        gate_modules: gate only these modules (names separated by commas); all LoRA linears otherwise.
    """

    adapter: str = ""
    range: str = ""
    base: str = ""
    base_id: str = ""
    tau: float = 1.0
    init_scale: float = 1e-6
    granularity: str = "token"
    complete_gradient: bool = False
    gate_modules: str = ""


def run(options: CalibrateOptions) -> int:
    """Load, show a sample, train, write the artifact."""
    for name in ("adapter", "data", "out"):
        if not getattr(options, name):
            raise ConfigError(f"loragate calibrate needs --{name}; for example: {COMMAND.examples[0]}")
    lower, upper = parse_range(options.range)
    config = gate_config(options, lower, upper)
    folder = Path(options.out)
    settings = CalibrationSettings(
        **{field.name: getattr(options, field.name) for field in fields(CalibrationSettings)}
    )
    require_free_out(folder, options.resume)
    require_reporters(options.report_to)
    check_batching(settings)
    quiet_logging()
    from loragate.data import load_rows
    from loragate.gates import examine_adapter, require_gateable, save_gates
    from loragate.training import calibrate, calibration_rows

    out, display = console(), Display()
    rows = load_rows(options.data, split=options.split or None, revision=options.revision or None)
    record = adapter_record(options.adapter)
    base_name = options.base or record.base_model_name_or_path
    if not base_name:
        raise ConfigError(f"{options.adapter} does not name its base model; say which with --base")
    tokenizer = load_tokenizer(
        [options.adapter, base_name], chat_template=options.chat_template, trust=options.trust_remote_code
    )
    with display.job("reading the data"):
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
    gateable = require_gateable(examine_adapter(model, "default", config.target_modules))
    keep_configuration(options, folder)
    out.print(f"gating {len(gateable)} modules, range [{lower:g}, {upper:g}], {settings.steps(len(encoded))} steps")
    with display.job("calibrating") as job:
        result = calibrate(
            model,
            tokenizer,
            rows,
            config,
            settings,
            run_folder=folder / "run",
            resume=options.resume,
            encoded=encoded,
            on_step=lambda report: job.advance_to(report.step, report.total, _note(report.values)),
        )
    evidence = {
        **result.evidence(),
        "selection": {
            "method": "given by the user",
            "range": [lower, upper],
            "evidence": "none: not compared with the adapter",
        },
    }
    if is_main_process():
        save_gates(
            model,
            folder,
            adapter_source=adapter_folder(options.adapter),
            k=settings.k,
            base_id=options.base_id or lasting_name(base_name),
            evidence=evidence,
            card=model_card(folder.name, base_name, options, result),
        )
        tokenizer.save_pretrained(str(folder / "adapter" / "tokenizer"))
        report_result(out, result, folder)
    return 0


def keep_configuration(options: Any, folder: Path) -> None:
    """The resolved settings, as a file that `--config` reads."""
    if is_main_process():
        write_text(folder / "run" / "config.yaml", resolved_yaml(options))


def lasting_name(base: str) -> str:
    """A hub id as it is; a folder as its absolute path, which still works from another folder."""
    return str(Path(base).resolve()) if Path(base).is_dir() else base


def gate_config(options: Any, lower: float, upper: float) -> Any:
    """The `GateConfig` of the command's flags."""
    from loragate.gates.config import GateConfig

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


def show_data(out: Any, encoded: Any, tokenizer: Any) -> None:
    """The account of the rows, and one row with its response mask coloured."""
    from loragate.data import mask_as_text, preview

    summary = encoded.summary
    out.print(
        f"data: {len(encoded)} rows ({summary.format}), {summary.response_tokens:,} response tokens of "
        f"{summary.response_tokens + summary.prompt_tokens:,}"
        + (
            f"; {summary.dropped} dropped, {summary.truncated} cut by max_length"
            if summary.dropped or summary.truncated
            else ""
        )
    )
    if summary.last_turn_only:
        out.print(f"in {summary.last_turn_only} rows only the last answer counts: the template rewrites earlier turns")
    if summary.plain and tokenizer.chat_template is not None:
        out.print(
            "note: prompt and completion are used as plain text, without the chat template; generate with --raw to match, or "
            "give the rows as messages"
        )
    unknown = tokenizer.unk_token_id
    if unknown is not None:
        share = sum(row["input_ids"].count(unknown) for row in encoded) / max(
            1, summary.response_tokens + summary.prompt_tokens
        )
        if share > 0.01:
            out.print(f"warning: {100 * share:.0f} % of the tokens are unknown to the tokenizer; is it the right one?")
    if out.is_terminal:
        out.print("first row, response bright:")
        out.print(preview(encoded[0], tokenizer))
    else:
        out.print("first row, response between ⟦ and ⟧:")
        out.print(mask_as_text(encoded[0], tokenizer), markup=False)


def warn_about_endings(out: Any, tokenizer: Any, encoded: Any, base: Any) -> None:
    """Say so if trained turns end where generation would not stop."""
    from loragate.data import ending_health

    for problem in ending_health(tokenizer, list(encoded), base.generation_config).problems:
        out.print(f"warning: {problem}", markup=False)


def report_result(out: Any, result: Any, folder: Path) -> None:
    """What happened, in words that promise nothing."""
    total = result.gates_total
    out.print(
        f"done in {duration(result.seconds)}: {result.steps} steps, {result.parameters:,} gate parameters; base and adapter "
        "unchanged (checked)"
    )
    out.print(
        f"top-{result.settings.k} entropy on {min(64, result.rows)} training rows {result.entropy_before:.3f} → "
        f"{result.entropy_after:.3f} (normalised). This is the objective, not a score: it falls also where answers get worse."
    )
    out.print(
        f"λ < 0: {100 * total['below_zero']:.1f} %, 0 to 1: {100 * total['zero_to_one']:.1f} %, > 1: "
        f"{100 * total['above_one']:.1f} %; at a bound: {100 * total['saturated']:.1f} %"
    )
    out.print(
        f"step-zero parity: {result.parity.initial:.1e} in logits (the adapter's own effect is {result.parity.delta:.2g})"
    )
    out.print(f"written to {folder}; its adapter/ is the plain adapter to compare with", markup=False)
    out.print(f'next: loragate generate --model {folder} --prompt "…"', markup=False)


def model_card(name: str, base: str, options: Any, result: Any) -> str:
    """README.md of the artifact."""
    total = result.gates_total
    return (
        f"---\nlibrary_name: loragate\nbase_model: {json.dumps(base)}\ntags: [lora, peft, loragate, scale]\n---\n\n"
        f"# {name}\n\n"
        f"LoRA adapter `{options.adapter}` on `{base}` with entropy gates: for each token and module the adapter's delta is "
        f"scaled by λ in [{result.config.lower:g}, {result.config.upper:g}].\n\n"
        '```python\nimport loragate as lg\n\nmodel = lg.load_gated("path/to/this/folder")\n```\n\n'
        "| | |\n|---|---|\n"
        f"| gate parameters | {result.parameters:,} ({result.config.granularity}) |\n"
        f"| data | {result.data['source']}, {result.rows} rows, {result.response_tokens:,} response tokens |\n"
        f"| steps | {result.steps} of batch {result.settings.batch_size}, learning rate {result.settings.learning_rate:g} |\n"
        f"| top-{result.settings.k} entropy, normalised | {result.entropy_before:.3f} before, {result.entropy_after:.3f} after |\n"
        f"| share of λ < 0 / 0 to 1 / > 1 | {total['below_zero']:.3f} / {total['zero_to_one']:.3f} / {total['above_one']:.3f} |\n"
        "| how the range was chosen | given by the user; not compared with the plain adapter |\n\n"
        "Lower entropy is the training objective and no evidence of better answers. Compare with the plain adapter in "
        "`adapter/`, also at a lower sampling temperature, before relying on it.\n"
    )


def _note(values: dict[str, Any]) -> str:
    entropy = values.get("topk_entropy")
    return f"entropy {entropy:.3f}" if entropy is not None else ""


COMMAND = Command(
    name="calibrate",
    summary="Stage II: gate a finished LoRA adapter by minimising its top-k predictive entropy on response tokens.",
    options=CalibrateOptions,
    run=run,
    examples=(
        "loragate calibrate --adapter path/to/adapter --data train.jsonl --range=0,1 --out gated",
        "loragate calibrate --config calibrate.yaml --range=0,1 --learning-rate 1e-3",
    ),
)
