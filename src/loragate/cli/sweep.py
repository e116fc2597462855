"""`loragate sweep`: any grid of ranges × seeds × adapters × objectives, and what the probe makes of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from loragate.cli.arguments import Command, require_given, resolved_yaml
from loragate.cli.calibrate import GateOptions, gate_config, taken_from
from loragate.cli.options import RunOptions
from loragate.display import console, duration, next_evaluation, quiet_logging
from loragate.effects import require_effect
from loragate.errors import ConfigError, DivergenceError, LoragateError
from loragate.files import held, write_json, write_text
from loragate.gates.range import parse_ranges
from loragate.selection.candidate import grid, label_adapters
from loragate.selection.settings import ProbeSettings
from loragate.training.preflight import check_loading
from loragate.training.settings import CalibrationSettings
from loragate.validate import Amount, Count, Size, comma_list


@dataclass(frozen=True)
class SweepOptions(RunOptions, CalibrationSettings, ProbeSettings, GateOptions):
    """Settings of `loragate sweep`.

    Attributes:
        adapter: finished PEFT LoRA adapter, folder or hub id; or several with --adapters.
        adapters: several adapters on one base, separated by commas, instead of adapter.
        base: base model instead of the one the adapter names.
        ranges: "grid" for the paper's 42, or ranges separated by semicolons, as in --ranges="-3,1;0,1;-6,3".
        seeds: seeds of gates and row order, separated by commas.
        objectives: entropy, ce, anchored; separated by commas.
        probe: questions that choose the range, at least 32: .jsonl, .json or .parquet with prompt and
            answer. Without it the cells are
            trained and none is chosen; score them with `loragate eval --sweep`.
        test: further questions of the same kind, which every cell answers for the oracle; never used to choose.
        test_samples: samples per test question; 0 takes probe_samples.
        runner: auto takes Ray if it is installed.
        workers: parallel trials on this machine; 0 takes as many as fit. On a cluster 0 leaves the number to Ray.
        gpus_per_trial: GPUs of one trial on Ray; 0.5 lets two trials share one. By default 1 if there is a GPU.
        cpus_per_trial: CPUs, and threads, of one trial on Ray.
        save_steps: number of steps between two checkpoints; a killed trial resumes from the last one.
    """

    WITHHELD: ClassVar[frozenset[str]] = frozenset(
        {"seed", "objective"}  # seeds, objectives
        | {"reward_kl", "advantage", "clip_ratio", "random_scale"}  # of objectives that no cell has
        | {"strategy", "processes", "cache", "data_workers"}  # a trial is one process, which tokenises the rows once
    )

    select: Literal["first", "shuffled"] = "shuffled"
    adapter: str = ""
    adapters: str = ""
    base: str = ""
    ranges: str = "0,1;-6,3;0,6"
    seeds: str = "0"
    objectives: str = "entropy"
    probe: str = ""
    test: str = ""
    test_samples: Size = 0
    runner: Literal["auto", "ray", "sequential"] = "auto"
    workers: Size = 0
    gpus_per_trial: Amount | None = None
    cpus_per_trial: Count = 1
    save_steps: int = 25

    def __post_init__(self) -> None:
        """Each objective's settings are checked when they are made (`settings_of_each`), not their union."""


def run(options: SweepOptions) -> int:
    """Plan, run what is not finished, choose, write the best."""
    check(options)
    check_loading(options)
    folder = Path(options.out)
    require_sweep_folder(folder, options.resume)
    from loragate.selection.store import Store
    from loragate.selection.watch import live_table

    quiet_logging()
    out = console()
    sweep, study = prepare(options)
    describe, execute = choose_runner(options, out)
    store = Store(folder, study)
    with held(folder / "lock", 0.0, f"another sweep is running in {folder}; wait for it to end, or stop it"):
        study.begin(folder, options.resume)
        write_text(folder / "config.yaml", resolved_yaml(options))
        done, many = len(store.finished()), len(study.candidates)
        again = f", {done} of them finished before" if done else ""
        out.print(f"{many} trials{again}; {describe}", markup=False)
        try:
            with live_table(store):
                execute(sweep, store, store.pending())
            return finish(out, store, sweep)
        except KeyboardInterrupt:
            out.print(
                f"stopped; {len(store.finished())} of {many} trials are finished and the others keep their checkpoints in "
                f"{folder}. The same command with --resume goes on",
                markup=False,
            )
            raise


def check(options: SweepOptions) -> None:
    """Refuse what can be seen to be wrong before anything is loaded."""
    require_given(COMMAND, replace(options, adapter=options.adapter or options.adapters))
    if options.adapter and options.adapters:
        raise ConfigError("give --adapter for one adapter or --adapters for several, not both")
    require_effect("sweep", options, flags=True)
    for name in ("data", "probe", "test"):
        value = getattr(options, name)
        looks_local = value.endswith((".jsonl", ".json", ".parquet", ".gz"))
        if value and (name != "data" or looks_local) and not Path(value).is_file():
            raise ConfigError(f"--{name} {value}: no such file")


def require_sweep_folder(folder: Path, resume: bool) -> None:
    """Refuse a folder that holds anything but the sweep to resume.

    Raises:
        ConfigError: naming the folder and what to do.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is a file; give a folder")
    begun = (folder / "sweep.json").is_file()
    if resume and not begun:
        raise ConfigError(f"--resume: there is no sweep in {folder}; run the command without --resume")
    if not resume and begun:
        raise ConfigError(f"--out {folder} holds a sweep already; go on with it with --resume, or give another folder")
    present = sorted(path.name for path in folder.iterdir() if path.name != "lock") if folder.is_dir() else []
    if not resume and present:
        raise ConfigError(f"--out {folder} is not empty (it holds {', '.join(present[:3])}); choose another folder")


def prepare(options: SweepOptions) -> tuple[Any, Any]:
    """The sweep and its study, after everything was checked that does not need the base in memory.

    Raises:
        ConfigError, DataError: naming what cannot be used.
    """
    from loragate.models import Loading, resolve
    from loragate.selection.sweep import Sweep, common_base, settings_of_each
    from loragate.training.rows import read_rows

    options = with_absolute_paths(options)
    labels = label_adapters(comma_list(options.adapters or options.adapter))
    adapters = {label: resolve(place, expect="adapter", base_later=True).source for label, place in labels.items()}
    objectives = comma_list(options.objectives)
    candidates = grid(adapters, parse_ranges(options.ranges), numbers(options.seeds), objectives)
    sweep = Sweep(
        adapters,
        common_base(list(adapters.values()), options.base),
        Loading.of(options),
        partial(read_rows, options, options.max_rows),
        settings_of_each(options, objectives),
        gate_config(options),
        taken_from(options, ProbeSettings),
        options.probe,
        options.test,
        options.test_samples or options.probe_samples,
        options.system,
    )
    return sweep, sweep.study(candidates)


def with_absolute_paths(options: SweepOptions) -> SweepOptions:
    """The options as they hold in a worker, whatever its working directory."""
    changed: dict[str, Any] = {
        name: str(Path(getattr(options, name)).resolve())
        for name in ("adapter", "base", "data", "probe", "test", "chat_template", "probe_task")
        if getattr(options, name) and Path(getattr(options, name)).exists()
    }
    if options.adapters:
        places = [str(Path(p).resolve()) if Path(p).exists() else p for p in comma_list(options.adapters)]
        changed["adapters"] = ",".join(places)
    return replace(options, **changed)


def numbers(text: str) -> list[int]:
    """Seeds: whole numbers separated by commas."""
    try:
        return [int(part) for part in comma_list(text)]
    except ValueError:
        raise ConfigError(
            f"--seeds: expected whole numbers separated by commas, such as 0,1,2, found {text!r}"
        ) from None


def choose_runner(options: SweepOptions, out: Any) -> tuple[str, Any]:
    """(what runs the trials, the function that does it); "auto" says so where Ray is absent.

    Raises:
        ConfigError: for --runner ray without Ray.
    """
    from loragate.selection.sweep import run_in_sequence

    in_sequence = "one after the other in this process", run_in_sequence
    if options.runner == "sequential":
        return in_sequence
    try:
        from loragate.selection.ray_tune import Resources, run_on_ray
    except ConfigError:
        if options.runner == "ray":
            raise
        out.print(
            'Ray is not installed, so the trials run one after the other (pip install "loragate[sweep]" for several at a time)',
            markup=False,
        )
        return in_sequence
    found = Resources.found(options.workers, options.cpus_per_trial, options.gpus_per_trial, options.device)
    return found.describe(), partial(run_on_ray, resources=found)


def finish(out: Any, store: Any, sweep: Any) -> int:
    """Choose, write results, table, heat maps and the best gates; without a probe nothing is chosen. Say what comes next."""
    from loragate.selection.outcome import selections
    from loragate.selection.sweep import failures, write_best

    folder, study, results = store.folder, store.study, store.finished()
    dropped, failed = store.diverged(), failures(store)
    scored = study.identity["probe"] is not None
    summary = scores(out, store, results, {"diverged": dropped, "failures": failed}) if scored else {}
    for kind, reasons in (("diverged", dropped), ("failed", failed)):
        for slug, error in list(reasons.items())[:3]:
            out.print(f"{kind}: {slug}: {error}", markup=False)
    if failed:
        raise LoragateError(
            f"{len(failed)} of {len(study.candidates)} trials are not finished, so nothing was chosen; repeat the command with "
            "--resume to try them again"
        )
    if dropped:
        out.print(
            f"{len(dropped)} of {len(study.candidates)} trials diverged and take no part, nor does a cell that lacks a seed for "
            "it",
            markup=False,
        )
    trained = any(one.range is not None for one in study.candidates if one.slug in results)
    if not trained or (scored and not any(choice["candidates"] for choice in summary["choices"])):
        raise DivergenceError(
            "no cell's training stayed finite in all its seeds; lower --learning-rate or train in fp32, in a new --out"
        )
    if not scored:
        out.print("nothing was chosen, as there was no --probe; every cell's gates are in trials/*/gated", markup=False)
        out.print(f"next: loragate eval --sweep {folder} --suite math --engine vllm --out {folder}-eval", markup=False)
        return 0
    from loragate.report.cells import choice_sentence

    chosen = selections(study, results, dropped)
    for choice in summary["choices"]:
        selection = chosen[choice["adapter"]]
        out.print(choice_sentence(summary, choice), markup=False)
        if selection.written is None:
            out.print(next_evaluation(sweep.adapters[choice["adapter"]], "runs/adapter"), markup=False)
            continue
        best = folder / "best" if len(chosen) == 1 else folder / "best" / choice["adapter"]
        write_best(store, selection, best)
        out.print(f"written to {best} (seed {choice['seed']})", markup=False)
        out.print(next_evaluation(best, "runs/best"), markup=False)
    return 0


def scores(out: Any, store: Any, results: Any, states: dict[str, Any]) -> dict[str, Any]:
    """Write and show the probe's results: JSON, Markdown, tables, heat maps."""
    from loragate.report.cells import sweep_markdown, sweep_tables
    from loragate.report.heatmap import heat_maps
    from loragate.selection.outcome import summarise

    folder = store.folder
    summary = summarise(store.study, results) | states
    write_json(folder / "sweep_results.json", summary)
    write_text(folder / "sweep_results.md", sweep_markdown(summary))
    maps = heat_maps(summary)
    for name, draw in maps.items():
        for suffix in ("png", "svg"):
            draw(folder / f"{name}.{suffix}")
    for table in sweep_tables(summary):
        out.print(table)
    spent = sum(summary["seconds"].values())
    out.print(
        f"written to {folder / 'sweep_results.json'}, .md{' and heatmap*.png' if maps else ''}; {duration(spent)} of work",
        markup=False,
    )
    return summary


COMMAND = Command(
    name="sweep",
    summary="Calibrate over a grid of ranges, seeds, adapters and objectives, score every cell on a probe, and keep the best.",
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
        "adapters ranges seeds objectives probe probe_task test learning_rate "
        "epochs batch_size micro_batch_size runner workers resume"
    ),
)
