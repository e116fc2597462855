"""`loragate sweep`: any grid of ranges × seeds × adapters × objectives, and what the probe makes of it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from loragate.cli.arguments import Command, flag_of, require_given, resolved_yaml
from loragate.cli.display import console, duration, next_evaluation
from loragate.cli.options import RunOptions
from loragate.cli.preflight import check_loading
from loragate.errors import ConfigError, DivergenceError, LoragateError
from loragate.files import write_json, write_text
from loragate.training.settings import CalibrationSettings


@dataclass(frozen=True)
class SweepOptions(RunOptions, CalibrationSettings):
    """Settings of `loragate sweep`.

    Attributes:
        adapter: finished PEFT LoRA adapter, folder or hub id; or several with --adapters.
        adapters: several adapters on one base, separated by commas, instead of adapter.
        ranges: "grid" for the paper's 42, or ranges separated by semicolons, as in --ranges="-3,1;0,1;-6,3".
        seeds: seeds of gates and row order, separated by commas.
        objectives: entropy, ce, anchored; separated by commas.
        probe: questions that choose the range, at least 32: .jsonl, .json or .parquet with prompt and
            answer. Without it the cells are
            trained and none is chosen; score them with `loragate eval --sweep`.
        probe_task: task (name or file) whose prompt, columns and grader the probe and the test use.
        probe_grader: how answers are judged without a task: default (math), math_verify, dft, exact, choice or tiny.
        probe_samples: samples per probe question.
        probe_temperature: sampling temperature of probe and test; set the one that you will use.
        probe_max_new_tokens: token limit of an answer to probe or test; 0 takes 512. The model's last position ends it, too.
        test: further questions of the same kind, which every cell answers for the oracle; never used to choose.
        test_samples: samples per test question; 0 takes probe_samples.
        runner: auto takes Ray if it is installed.
        workers: parallel trials on this machine; 0 takes as many as fit. On a cluster 0 leaves the number to Ray.
        gpus_per_trial: GPUs of one trial on Ray; 0.5 lets two trials share one. By default 1 if there is a GPU.
        cpus_per_trial: CPUs, and threads, of one trial on Ray.
        base: base model instead of the one the adapter names.
        tau: gate temperature.
        init_scale: size of the initial perturbation of the gate weights.
        granularity: unit that has its own λ: token (each token in each module), module (each module, whatever the
            token) or global (one λ for all).
        detach_input: the gate reads its input without a gradient (the paper's semi-gradient); --no-detach-input gives the
            complete gradient, a variant.
        gate_modules: gate only these modules (names separated by commas); by default all LoRA linears.
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
    ranges: str = "0,1;-6,3;0,6"
    seeds: str = "0"
    objectives: str = "entropy"
    probe: str = ""
    probe_task: str = ""
    probe_grader: str = "default"
    probe_samples: int = 4
    probe_temperature: float = 1.0
    probe_max_new_tokens: int = 0
    test: str = ""
    test_samples: int = 0
    runner: Literal["auto", "ray", "sequential"] = "auto"
    workers: int = 0
    gpus_per_trial: float | None = None
    cpus_per_trial: int = 1
    base: str = ""
    tau: float = 1.0
    init_scale: float = 1e-6
    granularity: str = "token"
    detach_input: bool = True
    gate_modules: str = ""
    save_steps: int = 25

    def __post_init__(self) -> None:
        """Each objective's settings are checked when they are made (`sweep_materials.py`), not their union."""


def run(options: SweepOptions) -> int:
    """Plan, run what is not finished, choose, write the best."""
    check(options)
    check_loading(options)
    folder = Path(options.out)
    require_sweep_folder(folder, options.resume)
    from loragate.cli.preflight import quiet_logging
    from loragate.cli.sweep_display import live_table
    from loragate.cli.sweep_materials import prepare
    from loragate.sweep.records import diverged, finished, held

    quiet_logging()
    out = console()
    materials, plan = prepare(options)
    backend = choose_backend(options, out)
    with held(folder / "lock", 0.0, f"another sweep is running in {folder}; wait for it to end, or stop it"):
        plan.begin(folder, options.resume)
        write_text(folder / "config.yaml", resolved_yaml(options))
        done = finished(folder, plan)
        final = {*done, *diverged(folder, plan)}
        pending = [trial for trial in plan.trials if trial.slug not in final]
        again = f", {len(done)} of them finished before" if done else ""
        out.print(f"{len(plan.trials)} trials{again}; {backend.describe()}", markup=False)
        try:
            with backend:
                with live_table(folder, plan):
                    backend.run(materials, plan, folder, pending)
                return finish(out, folder, plan, materials)
        except KeyboardInterrupt:
            count = len(finished(folder, plan))
            out.print(
                f"stopped; {count} of {len(plan.trials)} trials are finished and the others keep their checkpoints in {folder}. "
                "The same command with --resume goes on",
                markup=False,
            )
            raise


def check(options: SweepOptions) -> None:
    """Refuse what can be seen to be wrong before anything is loaded."""
    require_given(COMMAND, replace(options, adapter=options.adapter or options.adapters))
    if options.adapter and options.adapters:
        raise ConfigError("give --adapter for one adapter or --adapters for several, not both")
    if options.workers < 0 or options.cpus_per_trial < 1 or (options.gpus_per_trial or 0) < 0:
        raise ConfigError("--workers and --gpus-per-trial must not be negative, and --cpus-per-trial at least 1")
    if options.test_samples and not options.test:
        raise ConfigError("--test-samples has no effect without --test FILE")
    for field in fields(SweepOptions):
        asks = field.name.startswith("probe_") or field.name == "test"
        if asks and not options.probe and getattr(options, field.name) != field.default:
            raise ConfigError(f"{flag_of(field.name)} has no effect without --probe FILE")
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


def choose_backend(options: SweepOptions, out: Any) -> Any:
    """What runs the trials; "auto" says so where Ray is absent.

    Raises:
        ConfigError: for --runner ray without Ray.
    """
    from loragate.cli.sweep_backends import OnRay, Sequential

    if options.runner == "sequential":
        return Sequential()
    try:
        return OnRay(options)
    except ConfigError:
        if options.runner == "ray":
            raise
        out.print(
            'Ray is not installed, so the trials run one after the other (pip install "loragate[sweep]" for several at a time)',
            markup=False,
        )
        return Sequential()


def finish(out: Any, folder: Path, plan: Any, materials: Any) -> int:
    """Choose, write results, table, heat maps and the best gates; without a probe nothing is chosen. Say what comes next."""
    from loragate.sweep.records import FAILED, diverged, finished, read_json, trial_folder

    results = finished(folder, plan)
    dropped = diverged(folder, plan)
    failures = {}
    for trial in plan.trials:
        if trial.slug not in results and trial.slug not in dropped:
            note = read_json(trial_folder(folder, trial) / FAILED)
            failures[trial.slug] = str(note.get("error", "its worker was lost, several times"))
    scored = plan.identity["probe"] is not None
    summary = scores(out, folder, plan, results, {"diverged": dropped, "failures": failures}) if scored else {}
    for slug, error in list(dropped.items())[:3]:
        out.print(f"diverged: {slug}: {error}", markup=False)
    for slug, error in list(failures.items())[:3]:
        out.print(f"failed: {slug}: {error}", markup=False)
    if failures:
        raise LoragateError(
            f"{len(failures)} of {len(plan.trials)} trials are not finished, so nothing was chosen; repeat the command with "
            "--resume to try them again"
        )
    if dropped:
        out.print(
            f"{len(dropped)} of {len(plan.trials)} trials diverged and take no part, nor does a cell that lacks a seed for it",
            markup=False,
        )
    trained = any(trial.kind == "gates" for trial in plan.trials if trial.slug in results)
    if not trained or (scored and not any(choice["candidates"] for choice in summary["choices"])):
        raise DivergenceError(
            "no cell's training stayed finite in all its seeds; lower --learning-rate or train in fp32, in a new --out"
        )
    for choice in summary.get("choices", ()):
        conclude(out, folder, plan, materials, summary, choice)
    if not scored:
        out.print("nothing was chosen, as there was no --probe; every cell's gates are in trials/*/gated", markup=False)
        out.print(f"next: loragate eval --sweep {folder} --suite math --engine vllm --out {folder}-eval", markup=False)
    return 0


def scores(out: Any, folder: Path, plan: Any, results: Any, states: dict[str, Any]) -> dict[str, Any]:
    """Write and show the probe's results: JSON, Markdown, tables, heat maps."""
    from loragate.report.cells import sweep_markdown, sweep_tables
    from loragate.report.heatmap import heat_maps
    from loragate.sweep.outcome import summarise

    summary = summarise(plan, results) | states
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


def conclude(out: Any, folder: Path, plan: Any, materials: Any, summary: Any, choice: Any) -> None:
    """Write the chosen gates of one adapter, or say that it remains."""
    from loragate.report.cells import choice_sentence
    from loragate.sweep.outcome import selection_record
    from loragate.sweep.records import read_json
    from loragate.sweep.trials import write_best

    out.print(choice_sentence(summary, choice), markup=False)
    source = materials.adapters[choice["adapter"]]
    if not choice["accepted"]:
        out.print(next_evaluation(source, "runs/adapter"), markup=False)
        return
    trial = next(
        trial
        for trial in plan.trials
        if (trial.adapter, trial.lower, trial.upper, trial.objective, trial.seed)
        == tuple(choice[name] for name in ("adapter", "lower", "upper", "objective", "seed"))
    )
    best = folder / "best" if len(summary["choices"]) == 1 else folder / "best" / choice["adapter"]
    kept = read_json(best / "gate_config.json").get("selection") or {}
    if (kept.get("picked"), kept.get("written_seed")) != (choice["picked"], choice["seed"]):
        (best / "gate_config.json").unlink(missing_ok=True)  # of a choice before a diverged trial was tried again
        record = selection_record(summary, choice)
        write_best(folder, trial, best.resolve(), record)
    out.print(f"written to {best} (seed {choice['seed']})", markup=False)
    out.print(next_evaluation(best, "runs/best"), markup=False)


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
