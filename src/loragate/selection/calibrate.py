"""Find the best way to use an adapter: train gates in a few ranges, evaluate all variants on a dev set, choose, and write.

`calibrate` is the whole of `loragate calibrate`. It ends in one of three ways: gates, one λ for all modules, or the base,
where one of them beats the greedily decoded adapter on the dev set (`select`); the adapter where nothing does; and gates that
the user took without evidence. Zero gates are λ = 1 everywhere, bit for bit the adapter. A recommendation is written with the
temperature at which it was shown.

    <out>/       the gated adapter, written last
    <out>/run/   what a resumed call goes on from (`selection_run.py`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from loragate.data import Chat, EncodedRows, encode_rows, load_rows
from loragate.data.rows import RowsGiven
from loragate.errors import ConfigError
from loragate.evaluation.grader_checks import check_system_message
from loragate.evaluation.variants import ModelVariant
from loragate.gates import GateConfig
from loragate.gates.artifact import require_no_artifact
from loragate.gates.range import parse_ranges
from loragate.gates.schema import EVIDENCE, read_gate_config
from loragate.selection.dev import DevSet, collect_excluded_prompts, read_dev
from loragate.selection.selection_run import OnEvent, SelectionRun, count_gateable_modules, no_event
from loragate.selection.settings import DevSettings
from loragate.selection.trials import (
    Trial,
    TrialContext,
    attach_constant,
    attach_trained,
    copy_artifact,
    make_trials,
    report_steps,
    save_artifact,
)
from loragate.selection_record import SelectionRecord, is_selection, read_selection_record
from loragate.training import GateTrainingSettings
from loragate.training.strategy import process_state

RANGES = "0,1;-6,3;0,6"
SKIPPED = "taken by the user without a dev set; not compared with the plain adapter"
NO_DEV = (
    "without a dev set nothing can be shown to be better than the adapter: use it as it is, decoded greedily. To compare gates, "
    "one λ and temperatures, give --dev-data FILE with at least 32 prompts and answers (better 128, of every kind that will be "
    "asked); to take the gates of one range as they come, give --ranges=L,U --skip-selection"
)


@dataclass(frozen=True)
class Calibrated:
    """What a calibration came to.

    Attributes:
        folder: the gated adapter.
        variant: what is recommended; its gates are the folder's.
        evidence: as the artifact keeps it: "selection", and of gates that were trained "training" and "parity".
    """

    folder: Path
    variant: ModelVariant
    evidence: dict[str, Any]

    def sentences(self) -> list[str]:
        """What to use, what the alternatives scored, what speaks against relying on it, and how the gates were trained."""
        selection, training = self.evidence["selection"], self.evidence.get("training")
        chosen = is_selection(selection)
        said = read_selection_record(selection).sentences() if chosen else [f"The gates were {SKIPPED}."]
        if training:
            said.append(
                f"Gates: {training['steps']} steps on {training['rows']:,} examples, top-k entropy "
                f"{training['entropy_before']:.3f} → {training['entropy_after']:.3f} (lower is the training's aim, no evidence of "
                "better answers)."
            )
        return said


def calibrate(
    model: Any,
    tokenizer: Any,
    train_dataset: RowsGiven,
    dev_dataset: RowsGiven | None,
    out: str | Path,
    *,
    ranges: str | Sequence[Trial] = RANGES,
    config: GateConfig | None = None,
    settings: GateTrainingSettings | None = None,
    dev: DevSettings | None = None,
    retention_dataset: RowsGiven | None = None,
    eval_dataset: RowsGiven | None = None,
    system: str = "none",
    skip_selection: bool = False,
    resume: bool = False,
    on_event: OnEvent = no_event,
    adapter_source: str | Path | None = None,
    base_id: str | None = None,
    base_revision: str | None = None,
    adapter_id: str | None = None,
) -> Calibrated:
    """Find the best way to use an adapter: as it is, with gates, under one λ, or not at all; and at which temperature.

    The command `loragate calibrate` is this call. Gates are trained in each range; adapter, base, five constant λ, two more
    for each third of the layers and all gates are evaluated on the dev set, and `select` chooses. Scores are shares of right
    answers, 0 to 1.

    Args:
        model: base with a plain LoRA adapter in memory. It is left gated with what was written: λ = 1 everywhere where the
            adapter remains.
        tokenizer: of the base, with a chat template if the examples are conversations.
        train_dataset: prompts and responses, in any known format, or the path or hub id of a file with them. No labels are needed.
        dev_dataset: at least 32 questions that are not among the examples, better 128, of every kind that will be asked: a file,
            or dicts with "prompt" and "answer". None with `skip_selection` alone.
        out: where the gated adapter is written, and below `run` what a resumed call goes on from.
        ranges: "L,U" separated by semicolons, or trials.
        config: of the gates; its range and seed give way to the trial's. By default the paper's.
        settings: of the training; the paper's values by default.
        dev: how the dev set is asked and judged.
        retention_dataset: questions with answers, of an ability to keep; what clearly loses on them is not recommended.
        eval_dataset: examples that are only measured: entropy before and after.
        system: "none" leaves out a default system message that the template injects, "keep" keeps it.
        skip_selection: take the gates of the one range as they come.
        resume: go on with what an interrupted call left in `out`.
        on_event: progress, see `OnEvent`.
        adapter_source, base_id, base_revision, adapter_id: where base and adapter come from, as in `loragate.save_gates`.

    Raises:
        ConfigError: for settings that cannot be used together, work in `out` that is not to be resumed, resuming with other
            settings, several processes (except with `skip_selection`), or a dev set from which nothing can be learnt.
        DataError: for examples or questions that cannot be used, or that share a question.
        DivergenceError: if no range's training stayed finite. One that did not only drops out.
        GateError: if the adapter cannot be gated, or is gated already.
        ArtifactError: if `out` holds a gated adapter already.
    """
    settings = settings or GateTrainingSettings()
    trials = parse_trials(ranges, settings) if isinstance(ranges, str) else tuple(ranges)
    origin = {
        "adapter_source": adapter_source,
        "base_id": base_id,
        "base_revision": base_revision,
        "adapter_id": adapter_id,
    }
    context = TrialContext(
        model,
        tokenizer,
        load_rows(train_dataset),
        config or GateConfig(0, 1),
        settings,
        system,
        encode_heldout(eval_dataset, tokenizer, settings, system),
        origin,
    )
    dev = dev or DevSettings()
    require_evidence(trials, dev_dataset, skip_selection)
    if dev_dataset is None:
        return train_without_selection(context, trials[0], Path(out), resume=resume, on_event=on_event)
    questions = read_questions(context, dev, dev_dataset, retention_dataset)
    return run_calibration(SelectionRun(context, trials, Path(out) / "run", *questions, on_event), Path(out), resume)


def run_calibration(run: SelectionRun, out: Path, resume: bool = False) -> Calibrated:
    """Do what is not done yet of a run, and write the recommended variant to `out`."""
    require_no_artifact(out, run.context.origin.get("adapter_source"))
    with run.hold_folder(resume):
        run.check_grader_reads_answers()
        run.train()
        record = run.choose()
    return write_recommended(run, record, out)


def write_recommended(run: SelectionRun, record: SelectionRecord, out: Path) -> Calibrated:
    """The folder of what is recommended, and the model as that."""
    chosen, context = record.recommendation, run.context
    temperature = chosen.temperature
    trial = next((one for one in run.trials if one.slug == chosen.trial), None)
    if trial is not None:
        copy_artifact(run.gated[trial], out, record.to_json(), temperature)
        attach_trained(context, trial, run.gated[trial])
        variant = ModelVariant("gated", run.trial_label(trial), gates=str(out))
    else:
        scale = 0.0 if chosen.weights == "base" else 1.0 if chosen.scale is None else chosen.scale
        if scale == 1:
            attach_trained(context, run.trials[0], None)
        else:
            attach_constant(context.model, scale, chosen.part)
        save_artifact(context, out, {"selection": record.to_json()}, context.settings.k, temperature)
        plain = ModelVariant("base" if scale == 0 else "adapter")
        variant = ModelVariant.scaled(scale, chosen.part) if chosen.weights == "scale" else plain
    kept = read_gate_config(out)
    evidence = {key: kept[key] for key in EVIDENCE if kept.get(key)}
    return Calibrated(out, variant.with_temperature(temperature), evidence)


def parse_trials(ranges: str, settings: GateTrainingSettings) -> tuple[Trial, ...]:
    """Trials in ranges as typed, with the objective and seed of the settings; a ConfigError names what is none."""
    return make_trials(parse_ranges(ranges), (settings.objective,), (settings.seed,))


def require_evidence(trials: Sequence[Trial], dev_dataset: RowsGiven | None, skip_selection: bool) -> None:
    """Refuse (ConfigError) several ranges or none without a dev set, and one with gates that are taken as they come."""
    if skip_selection and (dev_dataset or len(trials) != 1):
        raise ConfigError(
            "--skip-selection takes the gates of one range as they come, as in --ranges=0,1 --skip-selection, without a dev set"
        )
    if not skip_selection and not dev_dataset:
        raise ConfigError(NO_DEV)


def encode_heldout(
    given: RowsGiven | None, tokenizer: Any, settings: GateTrainingSettings, system: str
) -> EncodedRows | None:
    """Tokenised examples that are only measured; None where none are given."""
    if given is None:
        return None
    return encode_rows(load_rows(given), tokenizer, max_length=settings.max_length, system=system)


def read_questions(
    context: TrialContext, dev: DevSettings, dev_dataset: RowsGiven, retention_dataset: RowsGiven | None
) -> tuple[DevSet, DevSet | None]:
    """Dev and retention set, neither of which shares a question with the examples; raises as `read_dev`."""
    taken = collect_excluded_prompts(context.examples, dev)
    retention = None if retention_dataset is None else read_dev(retention_dataset, dev, "retention", taken)
    found = read_dev(dev_dataset, dev, "dev", taken)
    own = Chat(context.tokenizer, context.system).default_system
    warnings = (*found.questions.warnings, *check_system_message(found.task, context.examples, own))
    return replace(found, questions=replace(found.questions, warnings=warnings)), retention


def train_without_selection(
    context: TrialContext, trial: Trial, out: Path, *, resume: bool = False, on_event: OnEvent = no_event
) -> Calibrated:
    """Train one range and write it without evidence; on several processes only the main one writes."""
    require_no_artifact(out, context.origin.get("adapter_source"))
    count_gateable_modules(context, [trial])
    on_step = report_steps(partial(on_event, "training", trial.cell))
    evidence = context.fit(trial, out / "run", on_step, resume=resume)
    evidence["selection"] = {"range": [trial.range.lower, trial.range.upper], "reason": SKIPPED}
    if process_state().is_main_process:
        save_artifact(context, out, evidence)
    return Calibrated(out, ModelVariant("gated", trial.cell, gates=str(out)), evidence)
