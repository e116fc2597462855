"""`loragate calibrate`: the best way to use a finished adapter, with gates or without. `loragate.calibrate` is the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from loragate import models
from loragate.cli.arguments import Command, require_given
from loragate.cli.options import GateOptions, RunOptions, taken_from
from loragate.display import Display, console, next_evaluation
from loragate.effects import require_effect
from loragate.errors import ConfigError
from loragate.selection.candidate import Candidate, parse_candidates
from loragate.selection.settings import SelectionSettings, require_one_process
from loragate.training.preflight import begin, check_loading, require_free_out, require_reporters
from loragate.training.settings import GateTrainingSettings
from loragate.training.strategy import launch_of

if TYPE_CHECKING:
    from loragate.selection import Chosen


@dataclass(frozen=True)
class CalibrateOptions(RunOptions, GateTrainingSettings, SelectionSettings, GateOptions):
    """Settings of `loragate calibrate`.

    Attributes:
        adapter: finished PEFT LoRA adapter, folder or hub id.
        base: base model instead of the one the adapter names.
        base_id: hub id of the base to record in the artifact, if the base was loaded from a local folder.
        heldout: rows that neither stage trains on, a file or hub id: entropy is measured on them too, before and after.
        heldout_split: split of --heldout, or of --data, with the held-out rows.
        range: "auto" tries the ranges below; or one range as L,U, such as --range=-3,1.
        ranges: candidates of --range auto, separated by semicolons; one may name its objective, as in -6,3@ce.
        probe: questions that choose, at least 32 and better 128: .jsonl, .json or .parquet with prompt and answer, or
            prompts only.
        retention_probe: labelled questions of an ability to keep; what clearly loses on them is not recommended.
        unverified: accept the gates of --range=L,U without a probe.
    """

    select: Literal["first", "shuffled"] = "shuffled"
    adapter: str = ""
    base: str = ""
    base_id: str = ""
    heldout: str = ""
    heldout_split: str = ""
    range: str = "auto"
    ranges: str = "0,1;-6,3;0,6"
    probe: str = ""
    retention_probe: str = ""
    unverified: bool = False


def run(options: CalibrateOptions) -> int:
    """Refuse what cannot work, start further processes where they are asked for, choose, and say what to use."""
    require_given(COMMAND, options)
    candidates = candidates_of(options)
    check_loading(options)
    settings = taken_from(options, GateTrainingSettings)
    if (status := begin(settings, options, options, sampling=not options.unverified)) is not None:
        return status
    folder, out = Path(options.out), console()
    require_free_out(folder, options.resume)
    require_reporters(options.report_to)
    place = models.resolve(options.adapter, options.base, expect="adapter")
    try:
        # the place's own name: an adapter of the hub is recorded with the commit that it has now
        chosen = choose(replace(options, adapter=place.source), settings, place, candidates, out)
    except KeyboardInterrupt as stop:
        if (folder / "run").is_dir():
            out.print(str(stop) or f"stopped; the same command with --resume goes on in {folder}", markup=False)
        raise
    for line in chosen.sentences():
        out.print(line, markup=False)
    out.print(f"written to {folder}; its adapter/ is the plain adapter to compare with", markup=False)
    out.print(next_evaluation(folder, f"runs/{folder.name}"), markup=False)
    return 0


def candidates_of(options: CalibrateOptions) -> tuple[Candidate, ...]:
    """The candidates: of `--ranges`, or the one range that was given.

    Raises:
        ConfigError: for what is no range, a range without evidence that was not accepted, a flag without effect, or
            several processes.
    """
    automatic = options.range.strip().lower() == "auto"
    if options.unverified and options.probe:
        raise ConfigError("--unverified accepts gates without a probe; leave out one of --unverified and --probe")
    if automatic and options.unverified:
        raise ConfigError("--unverified accepts one range, as in --range=0,1 --unverified; --range auto needs evidence")
    found = parse_candidates(options.ranges if automatic else options.range, options.objective, options.seed)
    if not automatic and not options.probe and not options.unverified:
        raise ConfigError(
            f"nothing would show that --range={options.range} helps: on small worlds the paper's [-6,3] ended below the adapter "
            "it started from in 5 of 18 situations while its training loss fell as it should. Give --probe FILE (at least 32 "
            "prompts with answers), leave --range out to have it chosen, or accept the gates as they come with --unverified"
        )
    if not options.unverified:
        require_one_process(options.processes)
    require_effect("calibrate", options, flags=True, range="auto" if automatic else options.range)
    plain_retention = options.retention_probe and not options.retention_task
    if not plain_retention:
        require_effect("probe grader", options, flags=True)
    return found


def choose(
    options: CalibrateOptions,
    settings: GateTrainingSettings,
    place: models.ModelSource,
    candidates: tuple[Candidate, ...],
    out: Any,
) -> Chosen:
    """What `loragate.calibrate` does, with what is read shown before the model is loaded, and progress after."""
    from loragate.cli.training_report import keep_configuration, say_steps, show_data, warn_about_endings
    from loragate.selection.evidence import require_evidence
    from loragate.selection.rulings import stopped_of
    from loragate.selection.transaction import Transaction
    from loragate.selection.trial import SHARE, origin_of
    from loragate.training.rows import read_rows

    display, folder = Display(), Path(options.out)
    asking = taken_from(options, SelectionSettings)
    # first of all, as rows may be many, and on the hub
    require_evidence(asking, options.probe, options.retention_probe, set_aside=options.range == "auto")
    rows = read_rows(options, options.max_rows)
    tokenizer = models.open_tokenizer(place, options)
    heldout = None
    if options.heldout or options.heldout_split:
        # a split alone is one of --data, at its revision; all of the held-out rows are taken
        data, revision = (options.heldout, "") if options.heldout else (options.data, options.revision)
        apart = replace(options, data=data, revision=revision, split=options.heldout_split, select_seed=None)
        heldout = read_rows(apart, 0)
    with display.job("reading the data", unit="row") as job:
        one = Transaction(
            tokenizer,
            rows,
            options.probe or None,
            folder,
            candidates,
            options.gate_config(),
            settings,
            asking,
            options.retention_probe or None,
            heldout,
            system=options.system,
            unverified=options.unverified,
            on_progress=job.advance_to,
        )
    show_data(out, one.encoded, tokenizer)
    with display.job("loading the model"):
        model = models.open_weights(place, options, host_memory=launch_of().sharded)
    warn_about_endings(out, tokenizer, one.encoded, model.get_base_model())
    one.take(model, **origin_of(place, options.base_id))
    drawn = {candidate.objective for candidate in candidates} == {"random"}
    out.print(f"gating {one.gateable} modules" + (", drawn at random, no training" if drawn else ""))
    if not drawn:
        say_steps(out, settings, len(one.encoded), " for each range")
    keep_configuration(options, folder)
    if not options.unverified:
        with display.job("preparing the probe", unit="answer") as shown:
            one.find_probe(shown.advance_to)
        if not options.probe_max_new_tokens:
            out.print(
                f"a probe answer may take {one.how.answer} tokens, half more than the longest training answers; "
                "--probe-max-new-tokens sets it",
                markup=False,
            )
    # the weaker ranges are stopped after a part of their steps (`SHARE`), so that a choice takes fewer than a training for each
    trainings = len(candidates) - (1 - SHARE) * stopped_of(len(candidates))
    with display.job(f"trying {len(candidates)} range{'s' * (len(candidates) > 1)}", unit="step") as shown:
        return one.run(resume=options.resume, on_event=news(out, shown, candidates, trainings))


def news(out: Any, job: Any, tried: Sequence[Candidate], trainings: float) -> Any:
    """An `on_event` that says how much will be asked, which range is trained, at which step, and then which setting is asked.

    Args:
        trainings: how many whole trainings all the steps of all ranges together amount to.
    """
    numbers = {one.slug: number for number, one in enumerate(tried, 1)}
    trained = dict.fromkeys(numbers, 0.0)  # the share of its own steps that each range has done
    asked: dict[Candidate, None] = {}  # an ordered set: settings that have been asked anything

    def named(candidate: Candidate) -> str:
        return f"range {numbers[candidate.slug]} of {len(tried)}, {candidate.cell}"

    def on_event(candidate: Candidate, stage: str, done: int, total: int, entropy: float | None) -> None:
        if not total:
            return  # a model is loaded, or a trial written
        if stage == "planned":
            out.print(
                f"at most {total:,} answers will be asked, of all settings together, unless one drops out", markup=False
            )
        elif stage == "training":
            trained[candidate.slug] = done / total
            share = min(1.0, sum(trained.values()) / trainings)
            note = "" if entropy is None else f"entropy {entropy:.3f}"
            job.show(share, f"{named(candidate)}: {stage}, step {done:,} of {total:,}", note, job.left(share))
        elif candidate.slug in numbers:
            job.show(done / total, f"{named(candidate)}, after a part of its steps: answer {done:,} of {total:,}")
        else:
            asked[candidate] = None
            job.show(done / total, f"{len(asked)} settings asked; {candidate.cell}: answer {done:,} of {total:,}")

    return on_event


COMMAND = Command(
    name="calibrate",
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
        "batch_size per_device_train_batch_size max_rows precision seed resume"
    ),
)
