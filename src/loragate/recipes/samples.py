"""Tiny stand-ins on which any recipe runs in seconds: the shipped base, and rows in the columns of the hub's data sets.

The rows are made up here, from the tiny world; only their schema is that of the data sets.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from loragate.files import write_text
from loragate.recipes.recipe import Recipe, Stage
from loragate.world.base import shipped_base_folder
from loragate.world.demonstrations import demonstrations
from loragate.world.problems import problems

ROWS, QUESTIONS = 40, 32
TINY: dict[str, dict[str, Any]] = {
    "sft": {
        "max_rows": 24,
        "max_steps": 2,
        "batch_size": 8,
        "micro_batch_size": 8,
        "max_length": 96,
        "precision": "fp32",
        "save_steps": 0,
    },
    "mask": {"max_rows": 24, "max_length": 96, "micro_batch_size": 8},
    "eval": {
        "suite": "",
        "tasks": "tiny",
        "limit": 2,
        "samples": 1,
        "max_new_tokens": 6,
        "controls": "none",
        "engine": "transformers",
    },
    "asking": {"probe_grader": "tiny", "probe_samples": 1, "probe_max_new_tokens": 6},
}
TINY["diagnose"] = {key: value for key, value in TINY["eval"].items() if key != "controls"}
TINY["calibrate"] = TINY["sft"]
TINY["sweep"] = {**TINY["sft"], "ranges": "0,1;-1,2", "seeds": "0", "runner": "sequential"}


def numina_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows in the columns of AI-MO/NuminaMath-CoT: source, problem, solution, messages."""
    rows = []
    for row in demonstrations(count, seed):
        ask, answer = row["messages"]
        rows.append({"source": "tiny", "problem": ask["content"], "solution": answer["content"], **row})
    return rows


def magicoder_rows(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Rows in the columns of ise-uiuc/Magicoder-OSS-Instruct-75K: lang, raw_index, index, seed, …, problem, solution."""
    rows = []
    for index, row in enumerate(demonstrations(count, seed)):
        ask, answer = row["messages"]
        fixed = {"lang": "python", "raw_index": index, "index": index, "seed": "solve", "openai_fingerprint": None}
        rows.append({**fixed, "problem": ask["content"], "solution": answer["content"]})
    return rows


SCHEMAS = {"math": numina_rows, "code": magicoder_rows}


def write_samples(folder: Path, rows: int = ROWS) -> None:
    """base/, one parquet file per domain, and probe.jsonl with labelled questions."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(shipped_base_folder(), folder / "base", dirs_exist_ok=True)
    for domain, make in SCHEMAS.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(make(rows)), folder / f"{domain}.parquet")
    asked = [dataclasses.asdict(problem) for problem in problems("dev", QUESTIONS)]
    write_text(folder / "probe.jsonl", "".join(json.dumps(row) + "\n" for row in asked))


def tiny(recipe: Recipe, folder: Path, domain: str) -> Recipe:
    """The recipe on the stand-ins in `folder`: its own stages and objectives, a few steps on a few rows."""
    return dataclasses.replace(recipe, stages=tuple(_tiny(stage, folder, domain) for stage in recipe.stages))


def _tiny(stage: Stage, folder: Path, domain: str) -> Stage:
    values: dict[str, Any] = {**stage.values, **TINY.get(stage.command, {}), "device": "cpu"}
    values.pop("chat_template", None)
    if stage.command == "calibrate" and values.get("range") == "auto":
        values |= {"ranges": "0,1;-1,2", "probe": str(folder / "probe.jsonl"), **TINY["asking"]}
    if values.get("run"):
        values = {key: value for key, value in values.items() if key not in TINY["diagnose"]}
    if stage.command == "sweep" and values.get("probe"):
        values |= {"probe": str(folder / "probe.jsonl"), **TINY["asking"]}
    if "{" not in str(values.get("model", "{")):
        values["model"] = str(folder / "base")
    if "data" in values and "{" not in str(values["data"]):
        values["data"] = str(folder / f"{domain if domain in SCHEMAS else 'math'}.parquet")
        if values.pop("heldout_split", None):
            values["heldout"] = values["data"]
        for key in ("revision", "split"):
            values.pop(key, None)
    return dataclasses.replace(stage, values={key: value for key, value in values.items() if value != ""})
