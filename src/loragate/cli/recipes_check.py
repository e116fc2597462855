"""`loragate recipes check`: every recipe against the commands' options, and each method for real on tiny stand-ins."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from loragate.cli.display import console, duration
from loragate.cli.recipes import validate
from loragate.errors import ConfigError, LoragateError

TAIL = 12  # lines of a failed command that are shown


def check(options: Any, shelf: Any, wanted: str) -> int:
    """Both checks; returns 0, or 1 where a recipe does not pass."""
    if options.jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, found {options.jobs}")
    out, began = console(), time.monotonic()
    names = check_schema(shelf, wanted)
    took = duration(time.monotonic() - began)
    out.print(f"schema: {len(names)} of {len(names)} fit the commands' options ({took})", markup=False)
    if options.quick:
        return 0
    chosen = one_of_each(shelf, names)
    with place(options.out) as folder:
        from loragate.recipes.samples import write_samples

        write_samples(folder)
        began, failed = time.monotonic(), []
        for done, (name, seconds, error) in enumerate(results(shelf, chosen, folder, options.jobs), 1):
            out.print(f"[{done}/{len(chosen)}] {name}: {error or f'ran in {seconds:.1f} s'}", markup=False)
            failed += [name] if error else []
        kept = f"; the logs are in {folder}" if options.out else ""
    took = duration(time.monotonic() - began)
    if failed:
        raise LoragateError(f"{len(failed)} of {len(chosen)} recipes did not run: {', '.join(failed)}{kept}")
    out.print(
        f"run: {len(chosen)} of {len(chosen)}, one for each method and domain, on stand-ins in {took}{kept}",
        markup=False,
    )
    return 0


def check_schema(shelf: Any, wanted: str = "") -> list[str]:
    """The names of all recipes (or one of the user's own), each of whose stages its command accepts.

    Raises:
        ConfigError: for the first that does not fit, naming recipe, stage and key.
    """
    from loragate.recipes import every_name, read_recipe

    own = wanted.endswith((".yaml", ".yml"))
    names = [wanted] if own else [name for name in every_name(shelf) if wanted in name]
    if not names:
        raise ConfigError(f"no recipe's name contains '{wanted}'; loragate recipes list shows all of them")
    for name in names:
        recipe = read_recipe(name, shelf)
        for stage in recipe.placed("out"):
            validate(stage, name, deep=True)
    return names


def one_of_each(shelf: Any, names: list[str]) -> list[str]:
    """One recipe for each domain and method, on the first backbone of the paper where there is one."""
    preferred = [name for name in shelf.names("backbone") if shelf.read("backbone", name).get("paper")]
    chosen: dict[tuple[str, str], str] = {}
    for name in names:
        parts = name.split("/")
        if name.endswith((".yaml", ".yml")):
            chosen[name, ""] = name
        elif len(parts) == 3 and (parts[1] in preferred[:1] or (parts[0], parts[2]) not in chosen):
            chosen[parts[0], parts[2]] = name
    return list(chosen.values())


def results(shelf: Any, names: list[str], folder: Path, jobs: int) -> Iterator[tuple[str, float, str]]:
    """(name, seconds, what went wrong) of each tiny run."""
    if jobs == 1:
        yield from (tiny_run(shelf, name, folder) for name in names)
        return
    with ProcessPoolExecutor(min(jobs, len(names)), get_context("spawn")) as pool:
        futures = [pool.submit(tiny_run, shelf, name, folder) for name in names]
        yield from (future.result() for future in futures)


def tiny_run(shelf: Any, name: str, folder: Path) -> tuple[str, float, str]:
    """Run every stage of a recipe on the stand-ins; equal stages of several recipes run once."""
    import torch

    from loragate.recipes import read_recipe
    from loragate.recipes.recipe import TRAINS, filled
    from loragate.recipes.samples import tiny

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    began, outputs = time.monotonic(), dict[str, str]()
    own = name.endswith((".yaml", ".yml"))
    recipe = tiny(read_recipe(name, shelf), folder, "" if own else name.split("/")[0])
    for stage in recipe.stages:
        values = {key: filled(value, lambda ref: outputs[ref]) for key, value in stage.values.items()}
        digest = hashlib.sha256(json.dumps([stage.command, values], sort_keys=True).encode()).hexdigest()[:16]
        target = folder / f"{stage.command}-{digest}"
        if error := run_once(stage.command, values, target):
            return name, time.monotonic() - began, f"stage '{stage.name}' failed\n{error}"
        outputs[stage.name] = f"{target}.jsonl" if stage.command == "mask" else str(target)
        if stage.command in TRAINS:
            outputs["last"] = outputs[stage.name]
    return name, time.monotonic() - began, ""


def run_once(command: str, values: dict[str, Any], target: Path) -> str:
    """Run a command unless an equal one has run; returns the end of its output where it fails."""
    import yaml

    from loragate.cli.main import main
    from loragate.files import write_text
    from loragate.sweep.records import held

    log, done = target.with_suffix(".log"), target.with_suffix(".done")
    with held(target.with_suffix(".lock"), 600.0, f"{target} is being made by another process for ten minutes"):
        if done.is_file():
            return ""
        config = target.with_suffix(".yaml")
        out = f"{target}.jsonl" if command == "mask" else str(target)
        write_text(config, yaml.safe_dump({**values, "out": out}))
        with (
            log.open("w", encoding="utf-8") as file,
            contextlib.redirect_stdout(file),
            contextlib.redirect_stderr(file),
        ):
            status = main([command, "--config", str(config)])
        if status:
            return "\n".join(log.read_text(encoding="utf-8").splitlines()[-TAIL:])
        done.touch()
    return ""


@contextlib.contextmanager
def place(out: str) -> Iterator[Path]:
    """--out, new or empty; or a temporary folder."""
    if not out:
        with tempfile.TemporaryDirectory(prefix="loragate-recipes-") as name:
            yield Path(name)
        return
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {folder} is not an empty folder; choose another one")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
