"""All steps of the quickstart in their order: what is trained, chosen, scored, written and shown."""

from __future__ import annotations

import json
import platform
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from loragate.data import find_endings
from loragate.display import Display, Job, console, duration, quiet_logging
from loragate.errors import ConfigError
from loragate.files import write_json, write_text
from loragate.gates import GateConfig, constant_gate, gate_override, save_gates
from loragate.gates.range import parse_ranges
from loragate.quickstart import QuickstartSettings
from loragate.quickstart.study import CONSTANTS, CONTROLS, RANDOM, OnStep, Study, control_statements
from loragate.report.figures import accuracy_bars, entropy_curve, lambda_map
from loragate.report.reading import read_results
from loragate.report.table import results_table
from loragate.selection import choose
from loragate.version import __version__
from loragate.world.base import save_base

INTERVENTIONS: dict[str, dict[str, Any]] = {
    "no reversal, max(λ,0)": {"minimum": 0.0},
    "no extrapolation, min(λ,1)": {"maximum": 1.0},
    "unit interval, clip(λ,0,1)": {"minimum": 0.0, "maximum": 1.0},
}


def run_quickstart(settings: QuickstartSettings) -> Path:
    """Run the study; returns its folder, which no run before has used."""
    quiet_logging()
    torch.set_num_threads(settings.threads)
    ranges = {str(one): one for one in parse_ranges(settings.ranges)}
    wanted = CONTROLS if settings.controls == "full" else ()
    candidates = ["adapter", *ranges, *(f"λ={value:g}" for value in CONSTANTS)]
    rows = 7 + len(ranges) + 1 + len(INTERVENTIONS) + len(wanted)
    base, choosing, sampling = (
        "taking the tiny base",
        "choosing on the development questions",
        "sampling the test questions",
    )
    display = Display(
        [
            (base, 1),
            ("training LoRA (sft)", 10),
            ("training LoRA (dft)", 10),
            *[(f"calibrating {name}", 9) for name in ranges],
            (choosing, 1.5 * len(candidates)),
            *[(f"control: {name}", 0.1 if name == RANDOM else 9) for name in wanted],
            (sampling, rows * 6 * settings.questions * settings.samples / 3200),
            ("drawing", 4),
        ]
    )
    wanted_folder = Path(settings.out)
    if wanted_folder.is_file():
        raise ConfigError(f"--out {wanted_folder} is a file; give a folder")
    numbered = (wanted_folder.with_name(f"{wanted_folder.name}-{number}") for number in range(2, 10_000))
    folder = next(one for one in (wanted_folder, *numbered) if not one.exists())
    folder.mkdir(parents=True)
    study = Study(settings.seed, settings.questions, settings.samples)
    with display.job(base):
        study.take_base()
        # the base and the demonstrations, so that every command can be tried on them
        save_base(study.base, study.tokenizer, folder / "base")
        study.base.name_or_path = study.base.config._name_or_path = str((folder / "base").resolve())
        write_text(folder / "data" / "demonstrations.jsonl", "".join(json.dumps(row) + "\n" for row in study.rows))
    for objective in ("sft", "dft"):
        with display.job(f"training LoRA ({objective})", unit="step") as job:
            study.train_stage_one(objective, folder / "adapters" / objective, _steps(job, "nll"))
    for name, bounds in ranges.items():
        with display.job(f"calibrating {name}", unit="step") as job:
            config = GateConfig(bounds.lower, bounds.upper, seed=settings.seed)
            result = study.train_gates(name, config, "entropy", _steps(job, "topk_entropy"))
            study.calibrations[name] = result
            job.close_with(f"top-100 entropy {result.entropy_before:.3f} → {result.entropy_after:.3f}")
    with display.job(choosing) as job:
        for index, candidate in enumerate(candidates):
            study.score_dev(candidate)
            job.advance_to(index + 1, len(candidates), candidate)
        choice = choose({name: study.dev_scores[name].scores for name in ("adapter", *ranges)}, "adapter")
        picked = choice.name if choice.accepted else max(ranges, key=lambda name: study.dev_scores[name].scores.mean())
        job.close_with(f"picked {choice.name if choice.accepted else 'the plain adapter'}")
    for name in wanted:
        with display.job(f"control: {name}") as job:
            job.close_with(study.train_control(name, picked, folder / "adapters" / "sft", _steps(job, "topk_entropy")))
    with display.job(sampling) as job:
        statistics = score_everything(study, picked, job, rows)
    with display.job("drawing"):
        results = collect(settings, study, choice, picked, statistics)
        write(study, folder, results)
    show(study, folder, results["reading"])
    return folder


def score_everything(study: Study, picked: str, job: Job, rows: int) -> dict[str, dict[str, float]]:
    """Every row of the table in order; returns the realised λ of the picked gates."""

    def score(name: str, group: str, context: AbstractContextManager[None] | None = None, **how: Any) -> None:
        with context or nullcontext():
            study.score_test(name, group, **how)
        job.advance_to(len(study.table), rows, f"{name}: {100 * study.table[-1]['accuracy']['mean']:.1f} %")

    score("base", "control", model=study.base)
    score("LoRA", "baseline")
    for label, temperature in (("T = 0.6", 0.6), ("T = 0.3", 0.3), ("greedy", 0.0)):
        score(f"LoRA, {label}", "control", temperature=temperature)
    study.at_best("LoRA", {1.0: "LoRA", 0.6: "LoRA, T = 0.6", 0.3: "LoRA, T = 0.3", 0.0: "LoRA, greedy"})
    constant = max(CONSTANTS, key=lambda value: float(study.dev_scores[f"λ={value:g}"].scores.mean()))
    score(f"LoRA, one λ = {constant:g}", "control", constant_gate(study.model, constant))
    for name in study.controls:
        if name in study.models:
            score(name, "control", model=study.models[name])
        else:
            score(name, "control", study.gated(name))
    score("DFT", "baseline", model=study.dft)
    statistics: dict[str, dict[str, float]] = {}
    for name in study.calibrations:
        with study.gated(name):
            score(f"SCALE {name}", "scale")
            if name == picked:
                statistics = study.realised_gates(f"SCALE {name}")
                score(f"SCALE {name}, T = 0.3", "scale", temperature=0.3)
                study.at_best(f"SCALE {name}", {1.0: f"SCALE {name}", 0.3: f"SCALE {name}, T = 0.3"})

    def reach(name: str) -> tuple[bool, bool, float]:
        """Orders ranges for the interventions: one that can reverse and extrapolate, the picked one if it can, the widest."""
        config = study.calibrations[name].config
        both = config.lower < 0 and config.upper > 1
        return both, both and name == picked, config.upper - config.lower

    widest = max(study.calibrations, key=reach)
    with study.gated(widest):
        for name, limits in INTERVENTIONS.items():
            score(f"{widest} {name}", "intervention", gate_override(study.model, **limits))
    study.compare_with("LoRA", f"SCALE {picked}")
    for name in (name for name in CONTROLS if name not in study.controls):
        study.table.append({"name": name, "group": "control", "accuracy": None, "retention": None, "not_run": True})
    return statistics


def collect(settings: QuickstartSettings, study: Study, choice: Any, picked: str, statistics: Any) -> dict[str, Any]:
    """results.json: settings, selection, calibrations, table and reading."""
    evidence = asdict(choice)
    reading = read_results(study.table, f"SCALE {picked}")
    reading += control_statements(study.table, f"SCALE {picked}")
    if not choice.accepted:
        reading.insert(
            0, "On the development questions no range beat the plain LoRA, so the choice is to keep the LoRA."
        )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    scores = {name: float(one.scores.mean()) for name, one in study.dev_scores.items()}
    return {
        "schema": 1,
        "loragate": __version__,
        "versions": {**versions, "python": platform.python_version()},
        "settings": asdict(settings),
        "selection": {"picked": evidence.pop("name"), **evidence},
        "picked": picked,
        "constant_lambda": {name: score for name, score in scores.items() if name.startswith("λ=")},
        "calibrations": {
            name: {**result.evidence(), "history": result.history} for name, result in study.calibrations.items()
        },
        "controls": study.controls,
        "realised_gates": statistics,
        "table": study.table,
        "reading": reading,
    }


def write(study: Study, folder: Path, results: dict[str, Any]) -> None:
    """The gated adapter, results.json, the figures and the table as text."""
    selection = {"method": "best of a few ranges on labelled development questions", **results["selection"]}
    with study.gated(results["picked"]):
        save_gates(
            study.model,
            folder / "gated",
            adapter_source=folder / "adapters" / "sft",
            stop_token_ids=find_endings(study.tokenizer, study.model.generation_config).token_ids,
            evidence={**study.calibrations[results["picked"]].evidence(), "selection": selection},
        )
    write_json(folder / "results.json", results)
    histories = {name: result.history for name, result in study.calibrations.items()}
    accuracy_bars(study.table, folder / "figures" / "accuracy.png")
    entropy_curve(histories, folder / "figures" / "entropy.png")
    lambda_map(results["realised_gates"], folder / "figures" / "lambda.png")
    reading = "\n".join(f"- {line}" for line in results["reading"])
    write_text(folder / "results.md", f"{results_table(study.table).markdown()}\n\n{reading}\n")


def show(study: Study, folder: Path, reading: list[str]) -> None:
    """Table, reading and the next command."""
    out = console()
    out.print(results_table(study.table))
    for line in reading:
        out.print(f"• {line}", markup=False)
    seconds = sum(result.seconds for result in study.calibrations.values())
    runs = f"{len(study.calibrations)} calibration{'s' if len(study.calibrations) > 1 else ''}"
    out.print(f"{runs} took {duration(seconds)}; everything is in {folder}", markup=False)
    question = study.test.items[0].prompt
    out.print(f'next: loragate generate --model {folder / "gated"} --prompt "{question}"', markup=False)


def _steps(job: Job, key: str) -> OnStep:
    def on_step(report: Any) -> None:
        value = report.values.get(key)
        job.advance_to(report.step, report.total, "" if value is None else f"{key.replace('_', ' ')} {value:.3f}")

    return on_step
