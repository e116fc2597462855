"""`loragate eval --sweep`: all cells of a sweep on whole suites, as rows of one evaluation with one base, and their heat maps."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from loragate.cli.arguments import resolved_yaml
from loragate.cli.display import Display, console, duration
from loragate.cli.evaluate import EvalOptions, describe_canary, progress, require_run_folder
from loragate.cli.evaluation_engines import Engines
from loragate.cli.evaluation_inputs import chosen_tasks, load_inputs, prepare_tasks
from loragate.effects import require_effect
from loragate.errors import ConfigError, DataError
from loragate.files import write_json, write_text


def run(options: EvalOptions) -> int:
    """Check, then one evaluation per adapter of the sweep, all on one base."""
    from loragate.evaluation.judging import JudgeSettings, require_graders
    from loragate.selection.store import Store

    require_effect("eval", options, flags=True)
    if options.controls == "full":
        raise ConfigError("--controls full has no effect with --sweep, whose rows are the adapter and the cells")
    sweep, folder = Path(options.sweep), Path(options.out)
    store = Store.open(sweep)
    tasks = chosen_tasks(options)
    asked = [task.name for task in tasks if task.engine != "loragate"]
    if asked:
        raise ConfigError(f"--sweep: {', '.join(asked)} are retention suites, which are scored one model at a time")
    settings = JudgeSettings(workers=options.workers, timeout_s=options.timeout, sandbox=options.sandbox)
    require_graders(tasks, options.grader, settings)
    done = store.finished()
    cells: dict[str, list[Any]] = {}
    for one in store.study.candidates:
        if one.range is not None and one.slug in done:
            cells.setdefault(one.adapter, []).append(one)
    if not cells:
        raise DataError(f"{sweep} has no finished cell yet; go on with the sweep first (loragate sweep … --resume)")
    places = {label: folder if len(cells) == 1 else folder / label for label in cells}
    begun = [place for place in places.values() if (place / "eval.json").is_file()]
    for place in places.values():
        require_run_folder(place, options.resume and (place in begun or not begun))
    for label, place in places.items():
        _evaluate(options, store, label, cells[label], place, tasks, settings)
    return 0


def _evaluate(
    options: EvalOptions,
    store: Any,
    label: str,
    cells: list[Any],
    folder: Path,
    tasks: list[Any],
    settings: Any,
) -> None:
    """The rows of one adapter: itself, and a cell per finished trial."""
    from loragate.evaluation.canary import canary
    from loragate.evaluation.evaluate import Evaluation
    from loragate.evaluation.results import write_record
    from loragate.evaluation.variants import Variant
    from loragate.gates.schema import read_gate_config
    from loragate.report.scores import score_markdown
    from loragate.selection.store import GATED

    out, display = console(), Display()
    places = {trial: store.place(trial) / GATED for trial in cells}
    cell = read_gate_config(places[cells[0]])
    base = cell["base"]
    named = f"{base['id']}@{base['revision']}" if base.get("revision") else base["id"]
    adapter = str(places[cells[0]] / "adapter")
    options = replace(options, model=adapter, base=options.base or named)
    with display.job("loading the model"):
        loaded = load_inputs(options, adapter, options.engine)
        loaded.stop_token_ids = tuple(cell.get("stop_token_ids") or ())
        engines = Engines(options, loaded)
    with display.job("reading the questions"):
        prepared = prepare_tasks(options, loaded, tasks)
    figures = {}
    if loaded.model is not None:
        figures = canary(loaded.model, loaded.tokenizer, prepared[0].prompts, loaded.kind)
    expected = [one for one in store.study.candidates if one.range is not None and one.adapter == label]
    left = [trial.name for trial in expected if trial not in places]
    notes = [f"cells that are not finished, and not scored: {', '.join(left)}"] if left else []
    variants = [Variant("gated", trial.name, gates=str(place)) for trial, place in places.items()]
    evaluation = Evaluation(
        folder,
        prepared,
        [Variant("adapter"), *variants],
        models=loaded.sources,
        canary=figures,
        notes=notes,
        seed=options.seed,
        identity={
            "engine": options.engine,
            "dtype": loaded.dtype,
            "kind": "sweep",
            "limit": options.limit,
            "sweep": store.study.fingerprint,
            **loaded.told_endings,
        },
        judging=settings,
        grader=options.grader,
    )
    for warning in dict.fromkeys([*notes, *(warning for item in prepared for warning in item.warnings)]):
        out.print(f"warning: {warning}", markup=False)
    out.print(describe_canary(figures), markup=False)
    evaluation.begin(options.resume and (folder / "eval.json").is_file())
    write_text(folder / "config.yaml", resolved_yaml(options))
    out.print(f"{label}: {len(cells)} cells, {evaluation.sample_count:,} answers to sample", markup=False)
    try:
        with closing(engines), progress(display, evaluation.sample_count) as on_event:
            record = evaluation.run(engines, on_event)
    except KeyboardInterrupt:
        out.print(f"stopped; every answer so far is in {folder}. The same command with --resume goes on", markup=False)
        raise
    write_record(record, folder / "results.json")
    write_text(folder / "results.md", score_markdown(record.to_json()))
    suites: dict[str, list[str]] = {}
    for task in tasks:
        suites.setdefault(task.suite, []).append(task.name)
    for suite, names in suites.items():
        _maps(out, folder, record, store.study, label, suite, names, _chosen(store.folder, label))
    took = duration(record.seconds)
    out.print(f"written to {folder / 'results.json'}, .md, cells_*.json and heatmap_*.png in {took}", markup=False)
    out.print(f"next: loragate report {folder} --figures {folder}/figures", markup=False)


def _maps(
    out: Any, folder: Path, record: Any, study: Any, label: str, suite: str, tasks: list[str], chosen: dict[str, Any]
) -> None:
    from loragate.report.cells import suite_table
    from loragate.report.heatmap import heat_maps
    from loragate.selection.evaluated import suite_record

    found = suite_record(record, study, label, suite, tasks, chosen)
    write_json(folder / f"cells_{suite}.json", found)
    for name, draw in heat_maps(found).items():
        for suffix in ("png", "svg"):
            draw(folder / f"{name}_{suite}.{suffix}")
    out.print(suite_table(found))


def _chosen(sweep: Path, label: str) -> dict[str, Any]:
    """What the sweep chose on its probe for one adapter; empty without a probe."""
    from loragate.selection.store import read_json

    choices = read_json(sweep / "sweep_results.json").get("choices", [])
    return next((choice for choice in choices if choice["adapter"] == label), {})
