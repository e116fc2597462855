"""`loragate calibrate`: the best way to use a finished adapter, with gates or without. `loragate.calibrate` is the call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from loragate import models
from loragate.cli.arguments import Command
from loragate.cli.options import RARE_WITH_GATES, GateOptions, RunOptions, extract_settings, require_files
from loragate.display import Display, console, format_next_command
from loragate.selection.settings import DevSettings, require_one_process
from loragate.selection_record import DEV_SET_CAVEAT
from loragate.training.preflight import relaunch_if_requested, require_free_out, require_reporters
from loragate.training.settings import GateTrainingSettings
from loragate.training.strategy import detect_launch

if TYPE_CHECKING:
    from loragate.selection import Calibrated, Trial


@dataclass(frozen=True)
class AdapterOptions(RunOptions, GateTrainingSettings, DevSettings, GateOptions):
    """Settings of `calibrate` and `sweep`.

    Attributes:
        adapter: finished PEFT LoRA adapter, folder or hub id.
        base: base model instead of the one the adapter names.
        ranges: of λ to train gates in, L,U separated by semicolons.
        dev_data: dev set that chooses: prompt and answer, 32 questions or better 128, of every kind.
        retention_data: such a file of an ability to keep; what clearly loses on it is not recommended.
    """

    select: Literal["first", "shuffled"] = "shuffled"
    adapter: str = ""
    base: str = ""
    ranges: str = "0,1;-6,3;0,6"
    dev_data: str = ""
    retention_data: str = ""


@dataclass(frozen=True)
class CalibrateOptions(AdapterOptions):
    """Settings of `loragate calibrate`.

    Attributes:
        base_id: hub id of the base to record in the artifact, if the base was loaded from a local folder.
        eval_data: examples that nothing trains on, a file or hub id: entropy is measured on them too, before and after.
        eval_split: split of eval_data, or of --data, with those examples.
        skip_selection: take the gates of one range as they come, without a dev set.
    """

    base_id: str = ""
    eval_data: str = ""
    eval_split: str = ""
    skip_selection: bool = False


def run(options: CalibrateOptions) -> int:
    """Refuse what cannot work, start further processes where they are asked for, choose, and say what to use."""
    require_files(options)
    from loragate.selection.calibrate import parse_trials, require_evidence

    trials = parse_trials(options.ranges, options)
    require_evidence(trials, options.dev_data, options.skip_selection)
    if not options.skip_selection:
        require_one_process(options.processes)
    settings = extract_settings(options, GateTrainingSettings)
    if (status := relaunch_if_requested(settings, options, options, sampling=not options.skip_selection)) is not None:
        return status
    folder, out = Path(options.out), console()
    require_free_out(folder, options.resume)
    require_reporters(options.report_to)
    source = models.resolve(options.adapter, options.base, expect="adapter")
    source.adapter_contents.require_usable("gate")
    try:
        calibrated = run_selection(replace(options, adapter=source.record_name), settings, source, trials, out)
    except KeyboardInterrupt as stop:
        if (folder / "run").is_dir():
            # a training that wrote a checkpoint says at which step
            out.print(str(stop) if stop.__cause__ else f"stopped; the same command with --resume goes on in {folder}")
        raise
    for line in calibrated.sentences():
        out.print(line)
    out.print(f"written to {folder}; its adapter/ is the plain adapter to compare with")
    out.print(format_next_command(folder, f"runs/{folder.name}", options.dev_task, options.system))
    return 0


def run_selection(
    options: CalibrateOptions,
    settings: GateTrainingSettings,
    source: models.ModelSource,
    trials: tuple[Trial, ...],
    out: Any,
) -> Calibrated:
    """What `loragate.calibrate` does, with what is read shown before the model is loaded, and progress after."""
    from loragate.cli.training_report import keep_configuration, say_steps, show_data, warn_about_endings
    from loragate.selection.calibrate import encode_heldout, read_questions, run_calibration, train_without_selection
    from loragate.selection.dev import ADVISED, read_dev
    from loragate.selection.selection_run import SelectionRun, count_gateable_modules, progress_callback
    from loragate.selection.sweep import origin_of
    from loragate.selection.trials import TrialContext
    from loragate.training.rows import read_rows

    display, folder, dev = Display(), Path(options.out), extract_settings(options, DevSettings)
    if options.dev_data:  # first of all, as examples may be many, and on the hub
        read_dev(options.dev_data, dev)
    tokenizer, heldout = models.open_tokenizer(source, options), None
    if options.eval_data or options.eval_split:
        # a split alone is one of --data, at its revision; all of its examples are taken
        data, revision = (options.eval_data, "") if options.eval_data else (options.data, options.revision)
        heldout = read_rows(
            replace(options, data=data, revision=revision, split=options.eval_split, select_seed=None), 0
        )
    context = TrialContext(
        None,
        tokenizer,
        read_rows(options, options.max_rows),
        options.gate_config(),
        settings,
        options.system,
        encode_heldout(heldout, tokenizer, settings, options.system),
        origin_of(source, options.base_id),
    )
    dev_set, retention = None, None
    if options.dev_data:
        dev_set, retention = read_questions(context, dev, options.dev_data, options.retention_data or None)
    with display.job("reading the data", unit="example") as job:
        context.on_encoding = job
        _, encoded = context.encoded(settings.seed)
    show_data(out, encoded, tokenizer)
    with display.job("loading the model"):
        context.model = models.open_weights(source, options, host_memory=detect_launch().is_sharded)
    warn_about_endings(out, tokenizer, encoded, context.model.get_base_model())
    count = count_gateable_modules(context, trials)
    out.print("; ".join(filter(None, [f"gating {count} modules", models.unreached_note(source)])))
    say_steps(out, settings, len(encoded), " for each range" if len(trials) > 1 else "")
    keep_configuration(options, folder)
    if dev_set is None:
        with display.job("calibrating") as shown:
            return train_without_selection(
                context, trials[0], folder, resume=options.resume, on_event=progress_callback(shown)
            )
    questions = len(dev_set.questions.questions)
    few = f" (fewer than {ADVISED}: differences of several points may be chance)" if questions < ADVISED else ""
    out.print(f"choosing on {questions} dev questions{few}; {DEV_SET_CAVEAT}")
    run = SelectionRun(context, trials, folder / "run", dev_set, retention)
    for name, asked in run.tasks.items():
        for warning in asked.warnings:
            out.print(f"warning, {name} set: {warning}")
    task = run.tasks["dev"]
    if not options.dev_max_new_tokens:
        out.print(
            f"a dev answer may take {task.sampling.max_new_tokens} tokens, well above what 99 % of the training answers take; "
            "--dev-max-new-tokens sets it"
        )
    with display.job("calibrating") as shown:
        run.on_event = progress_callback(shown)
        return run_calibration(run, folder, options.resume)


COMMAND = Command(
    name="calibrate",
    options=CalibrateOptions,
    run=run,
    required_at_run=("adapter", "data", "out"),
    examples=(
        "loragate calibrate --adapter path/to/adapter --data train.jsonl --dev-data dev.jsonl --out gated",
        "loragate calibrate --adapter path/to/adapter --data train.jsonl --ranges=0,1 --skip-selection --out gated",
        "loragate calibrate --config calibrate.yaml --learning-rate 1e-3",
    ),
    common=(
        "base ranges dev_data dev_task dev_grader retention_data skip_selection learning_rate num_train_epochs "
        "batch_size max_rows resume"
    ),
    rare=f"{RARE_WITH_GATES} base_id eval_data eval_split report_to split",
)
