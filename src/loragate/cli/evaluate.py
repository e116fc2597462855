"""`loragate eval`: base, adapter and gated adapter side by side on the same questions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from loragate.cli.arguments import Command, require_given, resolved_yaml
from loragate.cli.display import Display, console, duration
from loragate.cli.evaluation_engines import Engines
from loragate.cli.evaluation_inputs import (
    EvaluationInputs,
    chosen_tasks,
    commits_of,
    files_of,
    harness_questions,
    load_inputs,
    local_file,
    prepare_tasks,
    why_not,
)
from loragate.errors import ConfigError
from loragate.files import write_text
from loragate.gates.recommended import at, sampling_note

BIASES = (
    "the adapter trained biases along, which PEFT leaves in the model when it switches the adapter off: the row of the base has "
    "them too"
)


@dataclass(frozen=True)
class EvalOptions(EvaluationInputs):
    """Settings of `loragate eval`.

    Attributes:
        model: gated folder, PEFT adapter or base model, or its hub id; owner/name@revision for an adapter.
        sweep: folder of `loragate sweep`, in place of model: every finished cell is a row beside the adapter, and heat maps are
            drawn.
        controls: cheap: adapter and gates at lower temperatures and greedy, and one λ; full: random gates too; alone: nothing
            beside the model.
        constants: constant λ of the cheap controls, separated by commas.
    """

    model: str = ""
    sweep: str = ""
    controls: Literal["cheap", "full", "none", "alone"] = "cheap"
    constants: str = "0.5"


def run(options: EvalOptions) -> int:
    """Load, prove that adapter and gates act, sample, judge, tabulate."""
    require_given(COMMAND, replace(options, model=options.model or options.sweep))
    if options.sweep:
        from loragate.cli.evaluate_sweep import run as run_sweep

        return run_sweep(options)
    folder = Path(options.out)
    require_run_folder(folder, options.resume)
    tasks = chosen_tasks(options)
    from loragate.evaluation.judging import JudgeSettings, require_graders

    settings = JudgeSettings(workers=options.workers, timeout_s=options.timeout, sandbox=options.sandbox)
    own = [task for task in tasks if task.engine == "loragate"]
    require_graders(own, options.grader, settings)
    suites = [task.name for task in tasks if task.engine != "loragate"]
    if not own and (options.samples is not None or options.temperature is not None):
        raise ConfigError(
            f"--samples and --temperature have no effect: {', '.join(suites)} are answered greedily, or not generated at all"
        )
    out, display = console(), Display()
    with display.job("loading the model"):
        loaded = load_inputs(options, options.model, options.engine)
        engines = Engines(options, loaded)
    if loaded.note:
        out.print(loaded.note, markup=False)
    with display.job("reading the questions"):
        prepared = prepare_tasks(options, loaded, tasks)
        retention = describe_suites(options, loaded, tasks)
    evaluation = plan(options, folder, loaded, prepared, retention, settings)
    if note := recommended_note(options, loaded, prepared):
        out.print(note, markup=False)
    for warning in dict.fromkeys([*evaluation.notes, *(warning for item in prepared for warning in item.warnings)]):
        out.print(f"warning: {warning}", markup=False)
    out.print(describe_canary(evaluation.canary), markup=False)
    evaluation.begin(options.resume)
    write_text(folder / "config.yaml", resolved_yaml(options))
    rows = ", ".join(variant.name for variant in evaluation.variants)
    out.print(f"rows: {rows}; {evaluation.sample_count:,} answers to sample", markup=False)
    if options.controls == "full":
        for line in trained_controls(loaded):
            out.print(line, markup=False)
    try:
        with closing(engines), progress(display, evaluation.sample_count) as on_event:
            record = evaluation.run(engines, on_event)
    except KeyboardInterrupt:
        out.print(f"stopped; every answer so far is in {folder}. The same command with --resume goes on", markup=False)
        raise
    finish(out, folder, record)
    engines.finish()
    return 0


def recommended_row(options: EvalOptions, loaded: Any, prepared: list[Any]) -> float | None:
    """The recommended temperature, where rows are added for it: the tasks sample at another, and the command line names none."""
    recommended: float | None = loaded.recommended_temperature
    elsewhere = any(item.sampling.temperature != recommended for item in prepared)
    return recommended if elsewhere and options.temperature is None else None


def recommended_note(options: EvalOptions, loaded: Any, prepared: list[Any]) -> str:
    """One sentence on the sampling that the folder recommends and the rows that have it; empty where it recommends none."""
    heat = recommended_row(options, loaded, prepared)
    if heat is None:
        return sampling_note(options.model, loaded.place.gates, options.temperature) if prepared else ""
    return (
        f"{options.model} recommends sampling {at(heat)}: rows of that temperature are among the controls; the first rows are "
        "sampled as their tasks say"
    )


def _notes(loaded: Any) -> list[str]:
    if loaded.model is None or loaded.kind == "base":
        return []
    from loragate.gates.attach import active_adapter
    from loragate.gates.eligibility import trains_biases

    return [BIASES] if trains_biases(loaded.model, active_adapter(loaded.model)) else []


def trained_controls(loaded: Any) -> list[str]:
    """The controls that an evaluation cannot make, each with the command that trains it."""
    if loaded.kind == "base":
        return []
    base, adapter = loaded.names["base"], loaded.names["adapter"]
    gates = f"loragate calibrate --adapter {adapter} --data ROWS --range=L,U --unverified"
    more = f"loragate sft --model {base} --adapter {adapter} --data ROWS"
    of_gates = [
        f"  one λ per module            {gates} --granularity module --out OUT",
        f"  gates trained with CE       {gates} --objective ce --out OUT",
    ]
    return [
        "not run: controls that are trainings of their own. Make them on the gates' rows and score each like this model:",
        *([] if loaded.place.is_dora else of_gates),
        f"  LoRA, same rows again       {more} --out OUT",
        f"  LoRA trained with entropy   {more} --objective entropy --out OUT",
    ]


def plan(
    options: EvalOptions, folder: Path, loaded: Any, prepared: list[Any], retention: dict[str, Any], settings: Any
) -> Any:
    """The evaluation, after the canary has shown that adapter and gates act."""
    from loragate.evaluation.canary import canary
    from loragate.evaluation.evaluate import Evaluation
    from loragate.evaluation.variants import variants_for

    constants = [_number(text) for text in options.constants.split(",") if text.strip()]
    wanted = variants_for(loaded.kind, options.controls, constants, recommended_row(options, loaded, prepared))
    left_out = {variant.name: why for variant in wanted if (why := why_not(loaded, variant))}
    variants = [variant for variant in wanted if variant.name not in left_out]
    figures: dict[str, float] = {}
    if loaded.model is not None:
        prompts = prepared[0].prompts if prepared else ["The quick brown fox jumps over the lazy dog."]
        figures = canary(loaded.model, loaded.tokenizer, prompts, loaded.kind)
    return Evaluation(
        folder,
        prepared,
        variants,
        models=loaded.sources,
        canary=figures,
        notes=_notes(loaded),
        left_out=left_out,
        seed=options.seed,
        identity={
            "engine": options.engine,
            "dtype": loaded.dtype,
            "kind": loaded.kind,
            "limit": options.limit,
            "retention": retention,
            **loaded.told_endings,
        },
        judging=settings,
        grader=options.grader,
        suites=list(retention),
        harness=harness_for(options, loaded) if retention else None,
    )


def describe_suites(options: EvalOptions, loaded: Any, tasks: list[Any]) -> dict[str, Any]:
    """What each retention suite is asked, its rows read and checked before anything is sampled."""
    from loragate.data import template_hash

    rendering = {"chat_template": template_hash(loaded.tokenizer)}
    if options.system != "none":
        rendering["system"] = options.system
    return {name: {**asked, **rendering} for name, asked in harness_questions(options, tasks).items()}


def harness_for(options: EvalOptions, loaded: Any) -> Any:
    """Asks an engine one retention suite."""
    from loragate.evaluation.harness import run_harness

    tasks = chosen_tasks(options)
    files, commits = files_of(options, tasks), commits_of(options, tasks)

    def ask(engine: Any, name: str, on_progress: Any) -> Any:
        return run_harness(
            engine,
            loaded.tokenizer,
            [name],
            positions=loaded.positions,
            limit=options.limit,
            seed=options.seed,
            data={name: local_file(files[name], name)} if name in files else {},
            revisions={name: commits[name]} if name in commits else {},
            max_new_tokens=options.max_new_tokens,
            chat_template=loaded.tokenizer.chat_template is not None,
            system=options.system,
            on_progress=on_progress,
        )[name]

    return ask


def require_run_folder(folder: Path, resume: bool) -> None:
    """Refuse a folder that holds anything but the evaluation to resume.

    Raises:
        ConfigError: naming the folder and what to do.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is a file; give a folder")
    begun = (folder / "eval.json").is_file()
    if resume and not begun:
        raise ConfigError(f"--resume: there is no evaluation in {folder}; run the command without --resume")
    if not resume and begun:
        raise ConfigError(
            f"--out {folder} holds an evaluation already; go on with it with --resume, or give another folder"
        )
    if not resume and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"--out {folder} is not empty; give a new folder")


@contextmanager
def progress(display: Display, total: int) -> Iterator[Any]:
    """An `on_event` that draws one bar over all rows and tasks."""
    finished: dict[tuple[str, str, str], int] = {}
    with display.job("sampling and grading", total, "answer") as job:

        def on_event(stage: str, variant: Any, task: str, done: int, of: int) -> None:
            finished[stage, variant.name, task] = done
            sampled = sum(count for (kind, _, _), count in finished.items() if kind == "sampling")
            job.advance_to(sampled, total, f"{stage} {variant.name} on {task}")

        yield on_event


def describe_canary(figures: dict[str, float]) -> str:
    """One line on the canary."""
    if not figures:
        return "canary: no adapter in memory to test"
    text = f"canary: the adapter moves logits by {figures['adapter_from_base']:.2g}"
    if "gates_from_adapter" in figures:
        text += (
            f", the gates by {figures['gates_from_adapter']:.2g} more; λ = 0 takes every gated delta away, up to "
            f"{figures['zero_from_base']:.1g}, and λ = 1 is the adapter up to {figures['one_from_adapter']:.1g}"
        )
    return text


def finish(out: Any, folder: Path, record: Any, name: str = "results") -> None:
    """Write the record, its tables, and show them."""
    from loragate.evaluation.results import write_record
    from loragate.report.scores import caption, score_markdown, score_tables

    plain = record.to_json()
    write_record(record, folder / f"{name}.json")
    write_text(folder / f"{name}.md", score_markdown(plain))
    for table in score_tables(plain):
        out.print(table)
        out.print()
    out.print(caption(plain), markup=False)
    out.print(f"written to {folder / name}.json and .md in {duration(record.seconds)}", markup=False)
    out.print(next_line(folder, record), markup=False)


def next_line(folder: Path, record: Any) -> str:
    """What to run next: a second opinion where there is one, else a look at the answers."""
    other = {"default": "dft", "dft": "default", "math_verify": "default"}
    for info in record.tasks:
        if info.grader in other:
            return f"next: loragate regrade {folder} --grader {other[info.grader]}"
    best = max(record.results, key=lambda row: row.avg_at_k.mean)
    return f'next: loragate generate --model {record.models.get(best.variant, record.models["base"])} --prompt "…"'


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"--constants {text.strip()}: expected numbers separated by commas, such as -0.5,0.5"
        ) from None


COMMAND = Command(
    name="eval",
    summary="Score base, adapter and gated adapter side by side, with intervals, controls and verdicts.",
    options=EvalOptions,
    run=run,
    needs=("model", "out"),
    examples=(
        "loragate eval --model gated --suite math --out runs/math",
        "loragate eval --model gated --tasks math500 --data math500=test.jsonl --limit 100 --samples 4 --out runs/quick",
        "loragate eval --model gated --suite math --out runs/math --resume",
        "loragate eval --sweep runs/grid --suite math --engine vllm --out runs/grid-math",
    ),
    common=(
        "suite tasks data limit samples temperature max_new_tokens "
        "seed controls sweep engine batch_size base device resume"
    ),
)
