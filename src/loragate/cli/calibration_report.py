"""`loragate calibrate` at work: what is shown between the steps of a `Transaction`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loragate.cli.calibrate import CalibrateOptions, gate_config
from loragate.cli.options import taken_from
from loragate.cli.training_report import keep_configuration, say_steps, show_data, warn_about_endings
from loragate.data import load_rows
from loragate.display import Display
from loragate.models import Place, open_tokenizer, open_weights
from loragate.selection import Candidate, Chosen, SelectionSettings
from loragate.selection.comparison import stopped_of
from loragate.selection.evidence import require_evidence
from loragate.selection.transaction import Transaction
from loragate.selection.trial import SHARE, origin_of
from loragate.training import CalibrationSettings
from loragate.training.rows import read_rows
from loragate.training.strategy import launch_of


def choose(
    options: CalibrateOptions, settings: CalibrationSettings, place: Place, candidates: tuple[Candidate, ...], out: Any
) -> Chosen:
    """What `loragate.choose_gates` does, with what is read shown before the model is loaded, and progress after."""
    display, folder = Display(), Path(options.out)
    asking = taken_from(options, SelectionSettings)
    # rows may be many, and on the hub
    require_evidence(asking, options.probe, options.retention_probe, set_aside=options.range == "auto")
    rows = read_rows(options, options.max_rows)
    tokenizer = open_tokenizer(place, options)
    heldout = None
    if options.heldout or options.heldout_split:
        where = None if options.heldout else options.revision or None
        heldout = load_rows(options.heldout or options.data, split=options.heldout_split or None, revision=where)
    with display.job("reading the data", unit="row") as job:
        one = Transaction(
            tokenizer,
            rows,
            options.probe or None,
            folder,
            candidates,
            gate_config(options),
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
        model = open_weights(place, options, host_memory=launch_of().sharded)
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
    with display.job(f"trying {len(candidates)} range{'s' * (len(candidates) > 1)}", unit="step") as shown:
        return one.run(resume=options.resume, on_event=news(out, shown, candidates))


def news(out: Any, job: Any, tried: Sequence[Candidate]) -> Any:
    """An `on_event` that says how much will be asked, which range is trained, at which step, and then which setting is asked."""
    numbers = {one.slug: number for number, one in enumerate(tried, 1)}
    whole = len(tried) - (1 - SHARE) * stopped_of(len(tried))  # in trainings: the weaker ones stop early
    trained = dict.fromkeys(numbers, 0.0)
    asked: dict[Candidate, None] = {}

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
            share = min(1.0, sum(trained.values()) / whole)
            note = "" if entropy is None else f"entropy {entropy:.3f}"
            job.show(share, f"{named(candidate)}: {stage}, step {done:,} of {total:,}", note, job.left(share))
        elif candidate.slug in numbers:
            job.show(done / total, f"{named(candidate)}, after a part of its steps: answer {done:,} of {total:,}")
        else:
            asked[candidate] = None
            job.show(done / total, f"{len(asked)} settings asked; {candidate.cell}: answer {done:,} of {total:,}")

    return on_event
