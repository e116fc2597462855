"""`loragate sweep`: any grid of ranges × seeds × objectives, and what the probe makes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from loragate.cli.arguments import Command, require_given, resolved_yaml
from loragate.cli.options import GateOptions, RunOptions, taken_from
from loragate.display import Display, Job, console, duration, next_evaluation
from loragate.effects import require_effect
from loragate.errors import ConfigError
from loragate.files import write_text
from loragate.gates.range import parse_ranges
from loragate.selection.candidate import grid
from loragate.selection.settings import ProbeSettings
from loragate.training.preflight import check_loading
from loragate.training.settings import GateTrainingSettings
from loragate.validate import Amount, Count, Size, comma_list

if TYPE_CHECKING:
    from loragate.selection import Candidate
    from loragate.selection.store import Store
    from loragate.selection.sweep import Sweep


@dataclass(frozen=True)
class SweepOptions(RunOptions, GateTrainingSettings, ProbeSettings, GateOptions):
    """Settings of `loragate sweep`.

    Attributes:
        adapter: finished PEFT LoRA adapter, folder or hub id.
        base: base model instead of the one the adapter names.
        ranges: "grid" for the paper's 42, or ranges separated by semicolons, as in --ranges="-3,1;0,1;-6,3".
        seeds: seeds of gates and row order, separated by commas.
        objectives: entropy, ce, anchored; separated by commas.
        probe: questions that choose the range, at least 32: .jsonl, .json or .parquet with prompt and
            answer. Without it the cells are
            trained and none is chosen; score them with `loragate eval --sweep`.
        runner: auto takes Ray if it is installed.
        workers: parallel trials on this machine; 0 takes as many as fit, on a cluster on the nodes that it has at the start.
        gpus_per_trial: GPUs of one trial on Ray; 0.5 lets two trials share one. By default 1 if there is a GPU.
        cpus_per_trial: CPUs, and threads, of one trial on Ray.
        save_steps: number of steps between two checkpoints; a killed trial resumes from the last one.
    """

    WITHHELD: ClassVar[frozenset[str]] = frozenset(
        {"seed", "objective"}  # seeds, objectives
        | {"reward_kl", "advantage", "clip_ratio", "random_scale"}  # of objectives that no cell has
        | {"strategy", "processes"}  # a trial is one process
    )

    select: Literal["first", "shuffled"] = "shuffled"
    adapter: str = ""
    base: str = ""
    ranges: str = "0,1;-6,3;0,6"
    seeds: str = "0"
    objectives: str = "entropy"
    probe: str = ""
    runner: Literal["auto", "ray", "sequential"] = "auto"
    workers: Size = 0
    gpus_per_trial: Amount | None = None
    cpus_per_trial: Count = 1
    save_steps: int = 25

    def __post_init__(self) -> None:
        """Each objective's settings are checked when they are made (`settings_of_each`), not their union."""


def run(options: SweepOptions) -> int:
    """Plan, run what is not finished, choose, write the best."""
    require_given(COMMAND, options)
    require_effect("sweep", options, flags=True)
    check_loading(options)
    from loragate.report.selection import read_selection, selection_table, write_selection
    from loragate.selection.sweep import choose_runner, run_sweep

    folder, out = Path(options.out), console()

    def say(text: str) -> None:
        out.print(text, markup=False)

    sweep, candidates = prepare(options)
    where, execute = choose_runner(
        options.runner, options.workers, options.cpus_per_trial, options.gpus_per_trial, options.device
    )

    # `run_sweep` calls it when the folder is found fit and the trials that are left are known
    def watched(open_bench: Any, store: Any, pending: Any) -> None:
        write_text(folder / "config.yaml", resolved_yaml(options))
        done = len(store.finished())
        say(f"{len(candidates)} trials{f', {done} of them finished before' if done else ''}; {where}")
        try:
            with Display().job("trials") as job:
                execute(open_bench, store, pending, Trials(job, store).hear)
        except KeyboardInterrupt:
            say(
                f"stopped; {len(store.finished())} of {len(candidates)} trials are finished and the others keep their "
                f"checkpoints in {folder}. The same command with --resume goes on"
            )
            raise

    swept = run_sweep(sweep, candidates, folder, resume=options.resume, execute=watched)
    summary = swept.summary
    if summary is not None:
        maps = write_selection(summary, folder)
        for view in read_selection(summary):
            out.print(selection_table(view))
        spent = duration(sum(summary["seconds"].values()))
        drawn = " and heatmap*.png" if maps else ""
        say(f"written to {folder / 'sweep_results.json'}, .md{drawn}; {spent} of work")
    for kind, reasons in (("diverged", swept.diverged), ("failed", swept.failures)):
        for slug, error in list(reasons.items())[:3]:
            say(f"{kind}: {slug}: {error}")
    swept.check()
    if swept.diverged:
        say(
            f"{len(swept.diverged)} of {len(candidates)} trials diverged and take no part, nor does a cell that lacks a seed "
            "for it"
        )
    if summary is None:
        say("nothing was chosen, as there was no --probe; every cell's gates are in trials/*/gated")
        say(f"next: loragate eval --sweep {folder} --suite math --engine vllm --out {folder}-eval")
        return 0
    (choice,) = summary["choices"]
    for view in read_selection(summary):
        say(view.sentence())
    if swept.best is None:
        say(next_evaluation(sweep.adapter, "runs/adapter"))
    else:
        say(f"written to {swept.best} (seed {choice['seed']})")
        say(next_evaluation(swept.best, "runs/best"))
    return 0


class Trials:
    """The line about the trials while they run: "12 of 43 finished, 1 failed, about 8 min left", and what runs here."""

    def __init__(self, job: Job, store: Store) -> None:
        self.job, self.every = job, len(store.study.candidates)
        self.finished, self.failed = len(store.finished()), len(store.diverged())
        # the plain adapter is not trained and takes no time that tells anything of the others
        self.ahead, self.trained = sum(one.range is not None for one in store.pending()), 0
        self.show("")

    def hear(self, one: Candidate, stage: str, done: int, total: int, entropy: float | None) -> None:
        """Take in what a trial is at; see `trial.OnEvent`."""
        if stage in ("finished", "failed"):
            self.finished, self.failed = self.finished + (stage == "finished"), self.failed + (stage == "failed")
            self.ahead -= one.range is not None
            self.trained += one.range is not None and stage == "finished"
        measured = "" if entropy is None else f", entropy {entropy:.3f}"
        self.show(f"{one.name}: {stage}" + (f" {done:,} of {total:,}" if total else "") + measured)

    def show(self, at: str) -> None:
        """Draw the line."""
        counted = f"{self.finished} of {self.every} finished" + (f", {self.failed} failed" if self.failed else "")
        # judged from trainings alone: the share of them that is done
        left = self.job.left(self.trained / (self.trained + self.ahead)) if self.ahead else ""
        self.job.show((self.finished + self.failed) / self.every, ", ".join(filter(None, (counted, left))), at)
        self.job.close_with(counted)


def prepare(options: SweepOptions) -> tuple[Sweep, tuple[Candidate, ...]]:
    """What was typed, as `run_sweep` takes it.

    Raises:
        ConfigError: for seeds or objectives that there cannot be, and an adapter that cannot be used.
    """
    from loragate.selection.sweep import Sweep, absolute, settings_of_each
    from loragate.training.rows import read_rows

    objectives = comma_list(options.objectives)
    try:
        seeds = [int(part) for part in comma_list(options.seeds)]
    except ValueError:
        raise ConfigError(
            f"--seeds: expected whole numbers separated by commas, such as 0,1,2, found {options.seeds!r}"
        ) from None
    sweep = Sweep(
        options.adapter,
        partial(read_rows, replace(options, data=absolute(options.data)), options.max_rows),
        settings_of_each(options, objectives),
        base=options.base,
        how=options,
        probe=options.probe,
        config=options.gate_config(),
        asking=taken_from(options, ProbeSettings),
        system=options.system,
    )
    return sweep, grid(sweep.label, parse_ranges(options.ranges), seeds, objectives)


COMMAND = Command(
    name="sweep",
    options=SweepOptions,
    run=run,
    needs=("adapter", "data", "out"),
    examples=(
        'loragate sweep --adapter path/to/adapter --data train.jsonl --ranges="-3,1;0,1;-6,3" --probe probe.jsonl '
        "--out runs/sweep",
        "loragate sweep --adapter path/to/adapter --data train.jsonl --ranges grid --seeds 0,1,2 --probe probe.jsonl "
        "--gpus-per-trial 0.5 --out runs/grid",
        "loragate sweep --adapter path/to/adapter --data train.jsonl --ranges grid --seeds 0,1,2 --probe probe.jsonl "
        "--gpus-per-trial 0.5 --out runs/grid --resume",
    ),
    common=(
        "ranges seeds objectives probe probe_task learning_rate "
        "epochs batch_size per_device_train_batch_size runner workers resume"
    ),
)
