"""`loragate sweep`: any grid of ranges × learning rates × objectives × seeds, in sequence or on Ray, and what is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from loragate.cli.arguments import Command, resolved_yaml
from loragate.cli.calibrate import AdapterOptions
from loragate.cli.options import RARE_WITH_GATES, extract_settings, require_files
from loragate.display import Display, console, format_next_command
from loragate.errors import ConfigError
from loragate.files import write_text
from loragate.gates.range import parse_ranges
from loragate.selection.settings import DevSettings
from loragate.training.settings import GateTrainingSettings
from loragate.validate import NonNegativeFloat, NonNegativeInt, PositiveInt, comma_list

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class SweepOptions(AdapterOptions):
    """Settings of `loragate sweep`.

    Attributes:
        ranges: "grid" for the paper's 42, or ranges separated by semicolons, as in --ranges="-3,1;0,1;-6,3".
        seeds: seeds of gates and example order, separated by commas.
        objectives: entropy or ce; separated by commas.
        learning_rates: peak learning rates, separated by commas, in place of --learning-rate.
        runner: auto takes Ray if it is installed.
        workers: parallel trials on this machine; 0 takes as many as fit, on a cluster on the nodes that it has at the start.
        gpus_per_trial: GPUs of one trial on Ray; 0.5 lets two trials share one. By default 1 if there is a GPU.
        cpus_per_trial: CPUs, and threads, of one trial on Ray.
    """

    WITHHELD: ClassVar[frozenset[str]] = frozenset(
        {"seed", "objective"}  # seeds, objectives
        | {"strategy", "processes"}  # a trial is one process
    )

    seeds: str = "42"
    objectives: str = "entropy"
    learning_rates: str = ""
    runner: Literal["auto", "ray", "sequential"] = "auto"
    workers: NonNegativeInt = 0
    gpus_per_trial: NonNegativeFloat | None = None
    cpus_per_trial: PositiveInt = 1


def run(options: SweepOptions) -> int:
    """Plan, train what is not finished, evaluate, choose, write the best."""
    require_files(options)
    seeds = _numbers("--seeds", options.seeds, int, "whole numbers separated by commas, such as 0,1,2")
    rates = _numbers(
        "--learning-rates", options.learning_rates, float, "numbers separated by commas, such as 1e-4,5e-4"
    )
    from loragate.report.selection import selection_table, write_selection
    from loragate.selection.selection_run import progress_callback
    from loragate.selection.sweep import Sweep, absolute_if_exists, choose_runner, raise_failures, run_sweep
    from loragate.selection.trials import Trial, make_trials
    from loragate.training.rows import read_rows

    trials = make_trials(parse_ranges(options.ranges), comma_list(options.objectives), seeds, rates or (None,))
    sweep = Sweep(
        options.adapter,
        partial(read_rows, replace(options, data=absolute_if_exists(options.data)), options.max_rows),
        replace(extract_settings(options, GateTrainingSettings), seed=seeds[0]),
        base=options.base,
        loading=options,
        config=options.gate_config(),
        dev=extract_settings(options, DevSettings),
        dev_data=options.dev_data,
        retention_data=options.retention_data,
        system=options.system,
    )
    where, runner = choose_runner(
        options.runner, options.workers, options.cpus_per_trial, options.gpus_per_trial, options.device
    )
    folder, out, display = Path(options.out), console(), Display()
    out.print(f"{len(trials)} trials, {where}")
    with display.job("sweeping") as job:

        def on_trial(trial: Trial, ended: str) -> None:
            display.out.print(f"{trial.name}: {ended}")

        try:
            how = {"resume": options.resume, "runner": runner, "on_trial": on_trial, "on_event": progress_callback(job)}
            swept = run_sweep(sweep, trials, folder, **how)  # type: ignore[arg-type]
        except KeyboardInterrupt:
            out.print(f"stopped; the same command with --resume goes on in {folder}")
            raise
    write_text(folder / "config.yaml", resolved_yaml(options))
    for name, why in list(swept.failures.items())[:3]:
        out.print(f"failed: {name}: {why}")
    raise_failures(swept, len(trials))
    if swept.selection is None:
        out.print("nothing was chosen, as there was no --dev-data; every trial's gates are in trials/*/gated")
        out.print(f"next: loragate eval --sweep {folder} --suite math --engine vllm --out {folder}-eval")
        return 0
    maps = write_selection(swept.selection, folder)
    for line in swept.selection.sentences():
        out.print(line)
    out.print(selection_table(swept.selection))
    drawn = " and heatmap*.png" if maps else ""
    out.print(f"written to {folder}: best/, selection.json, .md{drawn}")
    out.print(format_next_command(folder / "best", "runs/best", options.dev_task, options.system))
    return 0


def _numbers(flag: str, text: str, kind: Callable[[str], Number], expected: str) -> list[Number]:
    try:
        return [kind(part) for part in comma_list(text)]
    except ValueError:
        raise ConfigError(f"{flag}: expected {expected}, found {text!r}") from None


COMMAND = Command(
    name="sweep",
    options=SweepOptions,
    run=run,
    required_at_run=("adapter", "data", "out"),
    examples=(
        'loragate sweep --adapter adapter --data train.jsonl --ranges="-3,1;0,1" --dev-data dev.jsonl --out few',
        "loragate sweep --adapter adapter --data train.jsonl --ranges grid --dev-data dev.jsonl --out runs/grid",
        "loragate sweep --config grid.yaml --seeds 0,1,2 --gpus-per-trial 0.5 --resume",
    ),
    common=(
        "ranges seeds objectives learning_rates dev_data dev_task retention_data learning_rate batch_size runner workers resume"
    ),
    rare=RARE_WITH_GATES,
)
