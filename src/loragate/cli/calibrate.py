"""`loragate calibrate`: the best way to use a finished adapter, with gates or without. `loragate.choose_gates` is the call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from loragate.cli.arguments import Command, require_given
from loragate.cli.options import RunOptions, taken_from
from loragate.display import console, next_evaluation, quiet_logging
from loragate.effects import require_effect
from loragate.errors import ConfigError
from loragate.selection.candidate import Candidate, parse_candidates
from loragate.selection.settings import SelectionSettings, require_one_process
from loragate.training.preflight import begin, check_loading, require_free_out, require_reporters
from loragate.training.settings import ON_POLICY, CalibrationSettings
from loragate.validate import comma_list

if TYPE_CHECKING:
    from loragate.gates.config import GateConfig


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
        range: "auto" tries the ranges below; or one range as L,U, such as --range=-3,1.
        ranges: candidates of --range auto, separated by semicolons; one may name its objective, as in -6,3@anchored.
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
    from loragate.cli.calibration_report import choose
    from loragate.models import resolve

    settings = taken_from(options, CalibrationSettings)
    if (status := begin(settings, options, options, sampling=not options.unverified)) is not None:
        return status
    folder, out = Path(options.out), console()
    require_free_out(folder, options.resume)
    require_reporters(options.report_to)
    quiet_logging()
    place = resolve(options.adapter, options.base, expect="adapter")
    try:
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
    return found


def gate_config(options: GateOptions) -> GateConfig:
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
        "batch_size micro_batch_size max_rows precision seed resume"
    ),
)
