"""`loragate calibrate` at work: the account of the rows, progress, and the outcome in words that promise nothing."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loragate.cli.calibrate import CalibrateOptions, gate_config, taken_from
from loragate.cli.training_report import keep_configuration, say_steps, show_data, warn_about_endings
from loragate.data import load_rows
from loragate.display import Display, Parts, console, duration, next_evaluation, quiet_logging
from loragate.gates import examine_adapter, require_gateable
from loragate.gates.eligibility import require_trainable
from loragate.models import Loading, Place, open_tokenizer, open_weights, resolve
from loragate.report.table import percent, points
from loragate.selection import Candidate, Chosen, SelectionSettings
from loragate.selection.candidate import ADAPTER, BASE, CONSTANT, GATES
from loragate.selection.evidence import require_evidence
from loragate.selection.transaction import Plan, Transaction
from loragate.selection.trial import origin_of
from loragate.selection.unverified import accept_gates, is_unaccepted
from loragate.training import CalibrationSettings
from loragate.training.preflight import require_free_out, require_reporters
from loragate.training.rows import encode_run, keep_rows_record, read_rows
from loragate.training.strategy import launch_of


def calibrate(options: CalibrateOptions, candidates: tuple[Candidate, ...]) -> int:
    """Read and show the rows, load the model, train and ask, write the folder, and say what to use."""
    folder, out = Path(options.out), console()
    accepting = options.unverified and options.resume and is_unaccepted(folder)
    if not accepting:
        require_free_out(folder, options.resume)
        require_reporters(options.report_to)
    quiet_logging()
    place = resolve(options.adapter, options.base, expect="adapter", base_later=accepting)
    options = replace(options, adapter=place.source)
    if accepting:
        bounds = candidates[0].range
        assert bounds is not None, "a range was given"
        chosen = accept_gates(folder, bounds, place.adapter)
    else:
        try:
            chosen = choose(options, place, candidates, out)
        except KeyboardInterrupt as stop:
            if (folder / "run").is_dir():
                out.print(str(stop) or f"stopped; the same command with --resume goes on in {folder}", markup=False)
            raise
    report_choice(out, chosen, accept_line(options, chosen.trained), accepted=accepting)
    return 0


def choose(options: CalibrateOptions, place: Place, candidates: tuple[Candidate, ...], out: Any) -> Chosen:
    """What `loragate.choose_gates` does, with what is read shown before the model is loaded, and progress after."""
    display, folder = Display(), Path(options.out)
    probe, retention = options.probe or None, options.retention_probe or None
    config, asking = gate_config(options), taken_from(options, SelectionSettings)
    require_evidence(asking, probe, retention)
    rows = read_rows(options, options.max_rows, begun=folder / "run" if options.resume else None)
    tokenizer = open_tokenizer(place, Loading.of(options))
    heldout = None
    if options.heldout or options.heldout_split:
        where = None if options.heldout else options.revision or None
        heldout = load_rows(options.heldout or options.data, split=options.heldout_split or None, revision=where)
    plan = Plan(
        candidates,
        config,
        taken_from(options, CalibrationSettings),
        asking,
        retention,
        heldout,
        system=options.system,
        unverified=options.unverified,
    )
    with display.job("reading the data", unit="row") as job:
        one = Transaction(
            tokenizer,
            rows,
            probe,
            folder,
            plan,
            lambda given, encode: encode_run(options, folder, given, encode, job.advance_to),
        )
    show_data(out, one.encoded, tokenizer)
    with display.job("loading the model"):
        model = open_weights(place, Loading.of(options, host_memory=launch_of().sharded))
    warn_about_endings(out, tokenizer, one.encoded, model.get_base_model())
    drawn = {candidate.objective for candidate in candidates} == {"random"}
    show_work(out, model, plan.config.target_modules, drawn)
    if not drawn:
        say_steps(out, plan.settings, len(one.encoded), " for each range")
    keep_rows_record(
        options, plan.settings, plan.settings.max_rows, folder / "run", one.rows, one.encoded, options.resume
    )
    keep_configuration(options, folder)
    one.take(model, **origin_of(place, options.base_id))
    found = None
    if not options.unverified:
        with display.job("preparing the probe", unit="answer") as shown:
            found = one.find_probe(lambda done, total: shown.advance_to(done, total))
        if not options.probe_max_new_tokens:
            out.print(
                f"a probe answer may take {one.answer_tokens} tokens, half more than the longest training answers; "
                "--probe-max-new-tokens sets it",
                markup=False,
            )
        if found[0] is None:
            out.print(f"no evidence can be had here: {found[1]}", markup=False)
    proven = options.unverified or (found is not None and found[0] is not None)
    tried = candidates if proven else (plan.unproven,)
    with display.job(f"trying {len(tried)} range{'s' * (len(tried) > 1)}", unit="step") as shown:
        return one.run(found, resume=options.resume, on_event=news(out, shown, tried))


def news(out: Any, job: Any, tried: Sequence[Candidate]) -> Any:
    """An `on_event` that says how much will be asked, which range is trained, at which step, and then which setting is asked."""
    left_of, numbers = Parts([(one.slug, "training") for one in tried]), {one.slug: n for n, one in enumerate(tried, 1)}
    asked: dict[Candidate, None] = {}

    def on_event(candidate: Candidate, stage: str, done: int, total: int, entropy: float | None) -> None:
        if not total:
            return  # a model is loaded, or a trial written
        if stage == "planned":
            out.print(
                f"at most {total:,} answers will be asked, of all settings together, unless one drops out", markup=False
            )
            return
        if stage != "training":
            asked[candidate] = None
            job.show(
                done / total, f"{len(asked)} settings asked; {candidate.cell}: answer {done:,} of {total:,}", "", ""
            )
            return
        share, left = left_of.at(candidate.slug, stage, done / total)
        which = f"range {numbers[candidate.slug]} of {len(tried)}, {candidate.cell}"
        note = "" if entropy is None else f"entropy {entropy:.3f}"
        job.show(share, f"{which}: {stage}, step {done:,} of {total:,}", note, left)

    return on_event


def accept_line(options: CalibrateOptions, trained: Candidate | None) -> str:
    """The command that switches on what was trained without evidence; empty where nothing was."""
    if trained is None or trained.range is None:
        return ""
    words = ["loragate", "calibrate", "--adapter", options.adapter, "--data", options.data, "--out", options.out]
    return shlex.join([*words, f"--range={trained.range.typed}", "--unverified", "--resume"])


def show_work(out: Any, model: Any, modules: Any, drawn: bool) -> None:
    """What will be gated, after refusing what cannot be; `drawn`: at random."""
    verdicts = examine_adapter(model, "default", modules)
    gateable = require_gateable(verdicts)
    require_trainable(verdicts)
    out.print(f"gating {len(gateable)} modules" + (", drawn at random, no training" if drawn else ""))


def report_choice(out: Any, chosen: Any, accept: str, *, accepted: bool) -> None:
    """What a calibration came to, where it is, and what to run next.

    Args:
        chosen: `loragate.selection.Chosen`.
        accept: the command that switches gates on which stay off.
        accepted: gates that had been trained before were switched on.
    """
    evidence, folder = chosen.evidence, chosen.folder
    if "recommendation" in evidence["selection"]:
        report_selection(out, evidence["selection"])
    if "training" in evidence and not accepted:
        report_training(out, evidence)
    if accepted:
        out.print(f"the gates of {chosen.trained.cell} are on; nothing shows that they help", markup=False)
    out.print(f"written to {folder}; its adapter/ is the plain adapter to compare with", markup=False)
    out.print(next_evaluation(folder, f"runs/{folder.name}"), markup=False)
    if chosen.candidate is None and chosen.trained is not None:
        out.print(
            f"the gates of {chosen.trained.cell} are trained but off: nothing shows that they help. Give --probe FILE with at "
            "least 32 prompts and answers to have a range chosen. To switch these on as they are:",
            markup=False,
        )
        out.print(f"  {accept}", markup=False)


def report_training(out: Any, evidence: dict[str, Any]) -> None:
    """One training: steps, entropy, λ, parity."""
    training, parity = evidence["training"], evidence["parity"]
    total = training["gates"]
    drawn = training["settings"].get("objective") == "random"
    work = "drawn at random, nothing trained" if drawn else f"{training['steps']} steps"
    out.print(
        f"done in {duration(training['seconds'])}: {work}, {training['parameters']:,} gate parameters; "
        "base and adapter unchanged (checked)"
    )
    if training.get("stopped"):
        out.print(f"warning: {training['stopped']}", markup=False)
    out.print(
        f"{entropy_in_words(training['settings']['k'])} on {min(64, training['rows'])} training rows "
        f"{training['entropy_before']:.3f} → {training['entropy_after']:.3f} (normalised). "
        + (
            "Nobody minimised it."
            if drawn
            else "This is the objective, not a score: it falls also where answers get worse."
        )
    )
    out.print(
        f"λ < 0: {100 * total['below_zero']:.1f} %, 0 to 1: {100 * total['zero_to_one']:.1f} %, > 1: "
        f"{100 * total['above_one']:.1f} %; at a bound: {100 * total['saturated']:.1f} %"
    )
    out.print(
        f"step-zero parity: {parity['initial']:.1e} in logits (the adapter's own effect is {parity['delta']:.2g})"
    )


def headline(record: dict[str, Any]) -> str:
    """What to use, and what the other way would have given: by expected scores."""
    found, scores = record["recommendation"], record["recommendation"]["expected"]
    kind, steps = found["kind"], found["steps"]
    words = {
        ADAPTER: "the adapter alone",
        BASE: "the base without the adapter",
        CONSTANT: f"one {record['picked']} for all modules",
        GATES: f"the gates {record['picked']}",
    }
    how = f"at T = {found['temperature']:g}" if found["temperature"] else "greedily"
    text = f"Use {words[kind]}, {how}: {percent(scores[kind]['mean'])} %"
    if confirmation := record.get("confirmation"):
        gain = confirmation["difference"]
        between = f"95 % interval {points(gain['low'])} to {points(gain['high'])}"
        untouched = f"on {confirmation['questions']} questions that chose nothing ({between})"
        if confirmation["confirmed"]:
            return f"{text}; {points(gain['mean'])} points more than {confirmation['against']} {untouched}."
        return f"{text}; {confirmation['setting']} gained {points(gain['mean'])} points {untouched}."
    step = next((step for step in reversed(steps) if kind == GATES or step["kind"] == GATES), None)
    if step is None:
        return f"{text}."
    interval = f"{round(100 * found['level'])} % interval {points(step['low'])} to {points(step['high'])}"
    if kind != GATES:
        gates = f"{percent(scores[GATES]['mean'])} % ({points(step['mean'])} points, {interval})"
        return f"{text}; the gates would have given {gates}."
    other = (words | {CONSTANT: "one λ for all modules"})[step["against"]]
    gained = f"{points(step['mean'])} points for the gates, {interval}"
    return f"{text}; {other} would have given {percent(scores[step['against']]['mean'])} % ({gained})."


def report_selection(out: Any, record: dict[str, Any]) -> None:
    """What is recommended, the scores of all settings that were asked everything, and what speaks against them."""
    probe, found = record["probe"], record["recommendation"]
    labelled = probe["kind"] == "labelled"
    out.print(headline(record), markup=False)
    if not labelled:
        out.print(
            "note: without labels, agreement with the adapter's own majority ranks ranges at one temperature; it cannot compare "
            "temperatures, because a cooler adapter agrees with itself more. On all situations that were measured the adapter "
            "alone at T = 0.3 was better than gates at T = 1. A few dozen questions with answers would tell",
            markup=False,
        )
    against = "the labels" if labelled else "the adapter's own majority at T = 0.3"
    out.print(
        f"{found['tried']} settings were asked {record['cost']['answers']:,} answers in all, these the most questions, scored "
        f"against {against}:",
        markup=False,
    )
    for name, score in record["evidence"].items():
        signs = record["signs"][name]
        mark = "←" if name == found["setting"] else "not eligible" if name in record["vetoed"] else ""
        out.print(
            f"  {name:<18} {percent(score['mean']):>5} % ({percent(score['low'])}–{percent(score['high'])})  "
            f"ended {100 * signs['finished']:.0f} %, {signs['tokens']:.0f} tokens {mark}".rstrip(),
            markup=False,
        )
    for name, reason in record.get("failed", {}).items():
        out.print(f"{name} could not be trained and drops out: {reason}", markup=False)
    for name, stop in record.get("stopped", {}).items():
        out.print(
            f"{name} was stopped after {stop['steps']} steps: {percent(stop['score'])} % then, the others at least "
            f"{percent(stop['weakest_kept'])} %",
            markup=False,
        )
    for name, reason in record["vetoed"].items():
        out.print(f"{name} is not eligible: it {reason}", markup=False)
    for name, phrases in record["warnings"].items():
        for phrase in phrases:
            out.print(f"warning: {phrase if name == ADAPTER else f'{name}: {phrase}'}", markup=False)
    if not record["accepted"]:
        why = "nothing is probably better than the adapter"
        if failed := record.get("confirmation"):
            why = f"{failed['setting']} had no gain on the {failed['questions']} untouched questions"
        out.print(
            f"{why}, so the adapter remains: the folder holds zero gates (λ = 1), which answer exactly as the adapter does",
            markup=False,
        )


def entropy_in_words(k: int) -> str:
    """The entropy of a support of k; 0 is the whole vocabulary."""
    return f"top-{k} entropy" if k else "full entropy"
