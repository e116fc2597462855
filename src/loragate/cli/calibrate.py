"""`loragate calibrate`: gate a finished adapter from prompts and responses (Stage II). `loragate.choose_gates` is the call."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from loragate.cli.arguments import Command, require_given
from loragate.cli.options import RunOptions
from loragate.display import quiet_logging
from loragate.effects import require_effect
from loragate.errors import ConfigError
from loragate.selection.candidate import ADAPTER, BASE, Candidate, parse_candidates
from loragate.selection.settings import SelectionSettings, require_one_process
from loragate.training.launching import begin, loads_into_host
from loragate.training.preflight import check_loading, require_free_out, require_reporters
from loragate.training.settings import ON_POLICY, CalibrationSettings
from loragate.validate import comma_list


@dataclass(frozen=True)
class GateOptions:
    """How the gates are made.

    Attributes:
        tau: gate temperature.
        init_scale: size of the initial perturbation of the gate weights.
        granularity: unit that has its own λ: token (each token in each module), module (each module, whatever the
            token) or global (one λ for all).
        detach_input: the gate reads its input without a gradient (the paper's semi-gradient); --no-detach-input gives the
            complete gradient, a variant.
        gate_modules: gate only these modules (names separated by commas); by default all LoRA linears.
    """

    tau: float = 1.0
    init_scale: float = 1e-6
    granularity: Literal["token", "module", "global"] = "token"
    detach_input: bool = True
    gate_modules: str = ""


@dataclass(frozen=True)
class CalibrateOptions(RunOptions, CalibrationSettings, SelectionSettings, GateOptions):
    """Settings of `loragate calibrate`.

    Attributes:
        adapter: finished PEFT LoRA adapter, folder or hub id.
        base: base model instead of the one the adapter names.
        base_id: hub id of the base to record in the artifact, if the base was loaded from a local folder.
        heldout: rows that neither stage trains on, a file or hub id: entropy is measured on them too, before and after.
        heldout_split: split of --heldout, or of --data, with the held-out rows.
        range: "auto" tries the ranges below and keeps the best, or the adapter; or one range as L,U, such as --range=-3,1.
        ranges: candidates of --range auto, separated by semicolons; one may name its objective, as in -6,3@anchored.
        probe: questions that choose the range, at least 32: .jsonl, .json or .parquet with prompt and answer, or
            prompts only.
        retention_probe: labelled questions of an ability to keep; a range that clearly loses on them is not picked.
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
    """Read and show the rows, load the model, train what is to be tried, keep the best or the adapter, write the artifact."""
    require_given(COMMAND, options)
    candidates = candidates_of(options)
    gate_config(options)
    folder, settings = Path(options.out), taken_from(options, CalibrationSettings)
    check_loading(options)
    if (status := begin(options, settings, sampling=not options.unverified)) is not None:
        return status
    from loragate.cli.calibration_report import report_choice
    from loragate.display import console
    from loragate.models import resolve
    from loragate.selection.unverified import accept_gates, is_unaccepted

    accepting = options.unverified and options.resume and is_unaccepted(folder)
    if not accepting:
        require_free_out(folder, options.resume)
        require_reporters(options.report_to)
    quiet_logging()
    out = console()
    place = resolve(options.adapter, options.base, expect="adapter", base_later=accepting)
    options = replace(options, adapter=place.source)
    if accepting:
        bounds = candidates[0].range
        assert bounds is not None, "a range was given"
        chosen = accept_gates(folder, bounds, place.adapter)
    else:
        try:
            chosen = choose(options, place, settings, candidates, out)
        except KeyboardInterrupt as stop:
            if (folder / "run").is_dir():
                out.print(str(stop) or f"stopped; the same command with --resume goes on in {folder}", markup=False)
            raise
    report_choice(out, chosen, accept_line(options, chosen.trained), accepted=accepting)
    return 0


def choose(
    options: CalibrateOptions, place: Any, settings: CalibrationSettings, candidates: tuple[Candidate, ...], out: Any
) -> Any:
    """What `loragate.choose_gates` does, with what is read shown before the model is loaded, and progress after."""
    from loragate.cli.calibration_report import show_data, show_work, warn_about_endings
    from loragate.cli.run_rows import encode_run, keep_configuration, keep_rows_record, read_rows, say_steps
    from loragate.data import load_rows
    from loragate.display import Display
    from loragate.models import Loading, open_tokenizer, open_weights
    from loragate.selection.evidence import require_evidence
    from loragate.selection.transaction import Transaction
    from loragate.selection.trial import origin_of

    display, folder = Display(), Path(options.out)
    asking = taken_from(options, SelectionSettings)
    probe, retention = options.probe or None, options.retention_probe or None
    require_evidence(asking, probe, retention)
    rows = read_rows(options)
    tokenizer = open_tokenizer(place, Loading.of(options))
    heldout = None
    if options.heldout or options.heldout_split:
        where = None if options.heldout else options.revision or None
        heldout = load_rows(options.heldout or options.data, split=options.heldout_split or None, revision=where)
    with display.job("reading the data", unit="row") as job:
        one = Transaction(
            tokenizer,
            rows,
            probe,
            folder,
            candidates,
            gate_config(options),
            settings,
            asking,
            retention=retention,
            heldout=heldout,
            system=options.system,
            unverified=options.unverified,
            encode=lambda given, encode: encode_run(options, given, job, encode),
        )
    show_data(out, one.encoded, tokenizer)
    with display.job("loading the model"):
        model = open_weights(place, Loading.of(options, host_memory=loads_into_host()))
    warn_about_endings(out, tokenizer, one.encoded, model.get_base_model())
    drawn = {candidate.objective for candidate in candidates} == {"random"}
    show_work(out, model, one.config.target_modules, drawn)
    if not drawn:
        say_steps(out, settings, len(one.encoded), " for each range")
    keep_rows_record(options, folder, one.rows, one.encoded, settings.max_rows)
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
    probing = found is not None and found[0] is not None
    tried = candidates if probing else candidates[:1]
    with display.job(f"trying {len(tried)} range{'s' * (len(tried) > 1)}", unit="step") as shown:
        told = news(shown, tried, references=options.references, retention=bool(retention)) if probing else alone(shown)
        return one.run(found, resume=options.resume, on_event=told)


def alone(job: Any) -> Any:
    """An `on_event` for one training without a probe."""

    def on_event(candidate: Candidate, stage: str, done: int, total: int, entropy: float | None) -> None:
        job.advance_to(done, total, "" if entropy is None else f"entropy {entropy:.3f}")

    return on_event


def news(job: Any, tried: Sequence[Candidate], *, references: bool, retention: bool) -> Any:
    """An `on_event` that says which range a job is at, at which step or answer, and how long is left.

    Args:
        job: of the display.
        tried: the candidates, which come after the adapter.
        references, retention: whether there are rows for comparison, which come last, and a retention probe.
    """
    from loragate.display import Parts
    from loragate.selection.references import COOL

    asked = ["probing", *["retention"] * retention]
    last = [Candidate(None, BASE), Candidate(None, ADAPTER, temperature=COOL)] if references else []
    parts = [(ADAPTER, stage) for stage in asked]
    parts += [(one.cell, stage) for one in tried for stage in ("training", *asked)]
    parts += [(one.cell, "probing") for one in last]
    left_of, numbers = Parts(parts), {one.cell: number for number, one in enumerate(tried, 1)}

    def on_event(candidate: Candidate, stage: str, done: int, total: int, entropy: float | None) -> None:
        if not total or (candidate.cell, stage) not in parts:
            return  # a model is loaded, or a trial written
        share, left = left_of.at(candidate.cell, stage, done / total)
        number = numbers.get(candidate.cell)
        which = candidate.cell if number is None else f"range {number} of {len(tried)}, {candidate.cell}"
        unit, note = "step" if stage == "training" else "answer", "" if entropy is None else f"entropy {entropy:.3f}"
        job.show(share, f"{which}: {stage}, {unit} {done:,} of {total:,}", note, left)

    return on_event


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
    if not automatic and not options.probe and not options.unverified:
        raise ConfigError(
            f"nothing would show that --range={options.range} helps: on small worlds the paper's [-6,3] ended below the adapter "
            "it started from in 5 of 18 situations while its training loss fell as it should. Give --probe FILE (at least 32 "
            "prompts with answers), leave --range out to have it chosen, or accept the gates as they come with --unverified"
        )
    if not options.unverified:
        require_one_process()
    found = parse_candidates(options.ranges if automatic else options.range, options.objective, options.seed)
    sampled = next((one.objective for one in found if one.objective in ON_POLICY), found[0].objective)
    require_effect("calibrate", options, flags=True, range="auto" if automatic else options.range, objective=sampled)
    plain_retention = options.retention_probe and not options.retention_task
    if not plain_retention and not any(one.objective == "reward" for one in found):
        require_effect("probe grader", options, flags=True)
    options.check_probe()
    return found


def taken_from(options: Any, kind: type) -> Any:
    """The settings of one kind out of a command's options, which have all of its fields."""
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})


def gate_config(options: Any) -> Any:
    """The `GateConfig` of a command's flags; range and seed are a candidate's."""
    from loragate.gates.config import GateConfig

    return GateConfig(
        0,
        1,
        tau=options.tau,
        init_scale=options.init_scale,
        detach_input=options.detach_input,
        granularity=options.granularity,
        target_modules=tuple(comma_list(options.gate_modules)) or None,
    )


def accept_line(options: CalibrateOptions, trained: Candidate | None) -> str:
    """The command that switches on what was trained without evidence; empty where nothing was."""
    if trained is None or trained.range is None:
        return ""
    words = ["loragate", "calibrate", "--adapter", options.adapter, "--data", options.data, "--out", options.out]
    return shlex.join([*words, f"--range={trained.range.typed}", "--unverified", "--resume"])


COMMAND = Command(
    name="calibrate",
    summary="Stage II: gate a finished LoRA adapter by minimising its top-k predictive entropy on response tokens.",
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
        "batch_size micro_batch_size max_rows precision seed resume"
    ),
)
