"""`loragate quickstart`: the whole method on the tiny world, offline, with its controls and an honest reading."""

from __future__ import annotations

import json
import os
import platform
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from loragate.cli.arguments import Command
from loragate.cli.display import Display, Job, console, duration
from loragate.cli.preflight import quiet_logging
from loragate.errors import ConfigError
from loragate.gates.range import parse_ranges
from loragate.version import __version__

NOT_RUN = (
    "one λ per module, trained",
    "random gates",
    "gates trained with CE",
    "LoRA, same rows again",
    "LoRA trained with entropy",
)
INTERVENTIONS: dict[str, dict[str, Any]] = {
    "no reversal, max(λ,0)": {"minimum": 0.0},
    "no extrapolation, min(λ,1)": {"maximum": 1.0},
    "unit interval, clip(λ,0,1)": {"minimum": 0.0, "maximum": 1.0},
}


@dataclass(frozen=True)
class QuickstartOptions:
    """Settings of `loragate quickstart`.

    Attributes:
        out: run folder; a number is appended if it exists.
        seed: seed of data, training and sampling.
        base_seed: train a fresh tiny base from this seed instead of taking the shipped one (a few minutes more).
        ranges: ranges to calibrate, separated by semicolons.
        questions: test questions.
        samples: samples per test question.
        controls: cheap runs those that need no training; full also trains the others.
        threads: CPU threads; models this small are fastest with one.
    """

    out: str = "runs/quickstart"
    seed: int = 0
    base_seed: int | None = None
    ranges: str = "-3,1;0,1;-6,3"
    questions: int = 200
    samples: int = 16
    controls: Literal["cheap", "full"] = "cheap"
    threads: int = 1


def run(options: QuickstartOptions) -> int:
    """Run the study, print the table and its reading, write the run folder."""
    ranges = parse_ranges(options.ranges)
    if options.questions < 2 or options.samples < 1:
        raise ConfigError("loragate quickstart needs at least two questions and one sample per question")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    quiet_logging()
    import torch

    from loragate.cli.tiny_controls import TrainedControls
    from loragate.cli.tiny_study import CONSTANTS, Study

    torch.set_num_threads(options.threads)
    folder = free_folder(Path(options.out))
    names = {str(one): one for one in ranges}
    study = Study(options.seed, options.questions, options.samples)
    size = options.questions * options.samples / 3200
    wanted = NOT_RUN if options.controls == "full" else ()
    rows = 7 + len(names) + 1 + len(INTERVENTIONS) + len(wanted)
    plan = [
        ("taking the tiny base", 1 if options.base_seed is None else 150),
        ("training LoRA (sft)", 10),
        ("training LoRA (dft)", 10),
        *[(f"calibrating {name}", 9) for name in names],
        ("choosing on the development questions", 1.5 * (1 + len(names) + len(CONSTANTS))),
        *[(f"control: {name}", 0.1 if name == "random gates" else 9) for name in wanted],
        ("sampling the test questions", rows * 6 * size),
        ("drawing", 4),
    ]
    display = Display(plan)
    folder.mkdir(parents=True)
    with display.job(plan[0][0]) as job:
        study.take_base(options.base_seed, lambda step, total, loss: job.advance_to(step, total, f"loss {loss:.2f}"))
        write_inputs(study, folder)
    for objective in ("sft", "dft"):
        with display.job(f"training LoRA ({objective})", unit="step") as job:
            study.train_stage_one(objective, folder / "adapters" / objective, _steps(job, "nll"))
    for name, bounds in names.items():
        with display.job(f"calibrating {name}", unit="step") as job:
            study.calibrate_range(name, bounds, _steps(job, "topk_entropy"))
            result = study.calibrations[name]
            job.close_with(f"top-100 entropy {result.entropy_before:.3f} → {result.entropy_after:.3f}")
    with display.job("choosing on the development questions") as job:
        candidates = ["adapter", *names, *[f"λ={value:g}" for value in CONSTANTS]]
        for index, candidate in enumerate(candidates):
            study.score_dev(candidate)
            job.advance_to(index + 1, len(candidates), candidate)
        choice = study.choose_range()
        picked = choice.name if choice.accepted else max(names, key=lambda name: study.dev_scores[name].scores.mean())
        job.close_with(f"picked {choice.name if choice.accepted else 'the plain adapter'}")
    controls = TrainedControls(study, picked, folder / "adapters" / "sft")
    for name in wanted:
        with display.job(f"control: {name}") as job:
            job.close_with(controls.train(name, _steps(job, "topk_entropy")))
    with display.job("sampling the test questions") as job:
        statistics = score_everything(study, picked, job, rows, controls)
    with display.job("drawing"):
        results = collect(options, study, choice, picked, statistics, controls)
        save_artifact(study, folder, picked, results)
        draw(study, folder, statistics, results)
    show(study, folder, results)
    return 0


def score_everything(study: Any, picked: str, job: Job, rows: int, controls: Any) -> dict[str, dict[str, float]]:
    """Every row of the table in order; returns the realised λ of the picked gates."""
    from loragate.gates import gate_override

    done = 0

    def score(name: str, group: str, context: Any = None, **options: Any) -> None:
        nonlocal done
        with context or nullcontext():
            study.score_test(name, group, **options)
        done += 1
        accuracy = study.table[-1]["accuracy"]["mean"]
        job.advance_to(done, rows, f"{name}: {100 * accuracy:.1f} %")

    constant = study.best_constant()
    score("base", "control", model=study.base)
    score("LoRA", "baseline")
    score("LoRA, T = 0.6", "control", temperature=0.6)
    score("LoRA, T = 0.3", "control", temperature=0.3)
    score("LoRA, greedy", "control", temperature=0)
    score(f"LoRA, one λ = {constant:g}", "control", study.scaled(constant))
    for name in controls.records:
        controls.score(name, score)
    score("DFT", "baseline", model=study.dft)
    for name in study.calibrations:
        with study.gated(name):
            score(f"SCALE {name}", "scale")
            if name == picked:
                statistics = study.realised_gates(f"SCALE {name}")
                score(f"SCALE {name}, T = 0.3", "scale", temperature=0.3)
    widest = max(study.calibrations, key=lambda name: _width(study.calibrations[name].config, name == picked))
    with study.gated(widest):
        for name, limits in INTERVENTIONS.items():
            score(f"{widest} {name}", "intervention", gate_override(study.model, **limits))
    study.compare_with("LoRA", f"SCALE {picked}")
    for name in (name for name in NOT_RUN if name not in controls.records):
        study.table.append({"name": name, "group": "control", "accuracy": None, "retention": None, "not_run": True})
    return statistics


def _width(config: Any, picked: bool) -> tuple[bool, bool, float]:
    """Orders ranges for the interventions: one that can reverse and extrapolate, the picked one if it can, the widest."""
    both = config.lower < 0 and config.upper > 1
    return both, both and picked, config.upper - config.lower


def collect(
    options: QuickstartOptions, study: Any, choice: Any, picked: str, statistics: Any, controls: Any
) -> dict[str, Any]:
    """results.json: settings, selection, calibrations, table and reading."""
    import torch
    import transformers

    from loragate.report.reading import read_results

    evidence = asdict(choice)
    reading = read_results(study.table, adapter_name="LoRA", gated_name=f"SCALE {picked}")
    reading += controls.reading()
    if not choice.accepted:
        reading.insert(
            0, "On the development questions no range beat the plain LoRA, so the choice is to keep the LoRA."
        )
    return {
        "schema": 1,
        "loragate": __version__,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "settings": asdict(options),
        "selection": {"picked": evidence.pop("name"), **evidence},
        "picked": picked,
        "constant_lambda": {
            name: float(scores.scores.mean()) for name, scores in study.dev_scores.items() if name.startswith("λ=")
        },
        "calibrations": {
            name: {**result.evidence(), "history": result.history} for name, result in study.calibrations.items()
        },
        "controls": controls.records,
        "realised_gates": statistics,
        "table": study.table,
        "reading": reading,
    }


def write_inputs(study: Any, folder: Path) -> None:
    """The base and the demonstrations, so that every command can be tried on them."""
    from loragate.files import write_text
    from loragate.world.base import save_base

    save_base(study.base, study.tokenizer, folder / "base")
    study.base.name_or_path = str((folder / "base").resolve())
    study.base.config._name_or_path = study.base.name_or_path
    write_text(folder / "data" / "demonstrations.jsonl", "".join(json.dumps(row) + "\n" for row in study.rows))


def save_artifact(study: Any, folder: Path, picked: str, results: dict[str, Any]) -> None:
    """The gated adapter and results.json."""
    from loragate.data import find_endings
    from loragate.files import write_json
    from loragate.gates import save_gates

    evidence = {
        **study.calibrations[picked].evidence(),
        "selection": {"method": "best of a few ranges on labelled development questions", **results["selection"]},
    }
    with study.gated(picked):
        save_gates(
            study.model,
            folder / "gated",
            adapter_source=folder / "adapters" / "sft",
            stop_token_ids=find_endings(study.tokenizer, study.model.generation_config).token_ids,
            evidence=evidence,
        )
    write_json(folder / "results.json", results)


def draw(study: Any, folder: Path, statistics: Any, results: dict[str, Any]) -> None:
    """The figures and the table as text."""
    from loragate.files import write_text
    from loragate.report.figures import accuracy_bars, entropy_curve, lambda_map
    from loragate.report.table import results_markdown

    accuracy_bars(study.table, folder / "figures" / "accuracy.png")
    entropy_curve(
        {name: result.history for name, result in study.calibrations.items()}, folder / "figures" / "entropy.png"
    )
    lambda_map(statistics, folder / "figures" / "lambda.png")
    text = results_markdown(study.table) + "\n\n" + "\n".join(f"- {line}" for line in results["reading"]) + "\n"
    write_text(folder / "results.md", text)


def show(study: Any, folder: Path, results: dict[str, Any]) -> None:
    """Table, reading and the next command."""
    from loragate.report.table import results_table

    out = console()
    out.print(results_table(study.table))
    for line in results["reading"]:
        out.print(f"• {line}", markup=False)
    total = sum(result.seconds for result in study.calibrations.values())
    runs = f"{len(study.calibrations)} calibration{'s' if len(study.calibrations) > 1 else ''}"
    out.print(f"{runs} took {duration(total)}; everything is in {folder}", markup=False)
    question = study.test.items[0].prompt
    out.print(f'next: loragate generate --model {folder / "gated"} --prompt "{question}"', markup=False)


def free_folder(wanted: Path) -> Path:
    """`wanted`, or with the next free number if it exists and is not empty."""
    if not wanted.exists():
        return wanted
    if not wanted.is_dir():
        raise ConfigError(f"--out {wanted} is a file; give a folder")
    return next(
        candidate
        for number in range(2, 10_000)
        if not (candidate := wanted.with_name(f"{wanted.name}-{number}")).exists()
    )


def _steps(job: Job, key: str) -> Any:
    def on_step(report: Any) -> None:
        value = report.values.get(key)
        job.advance_to(report.step, report.total, "" if value is None else f"{key.replace('_', ' ')} {value:.3f}")

    return on_step


COMMAND = Command(
    name="quickstart",
    summary="The whole method on a tiny synthetic world, offline, in a few minutes on two CPU cores.",
    options=QuickstartOptions,
    run=run,
    examples=(
        "loragate quickstart",
        "loragate quickstart --seed 1 --out runs/second",
        "loragate quickstart --base-seed 5",
        "loragate quickstart --controls full",
    ),
)
