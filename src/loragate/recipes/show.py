"""A recipe on paper: YAML with the source of every value beside it, and the command lines that do the same by hand."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping
from typing import Any

import yaml

from loragate.recipes.recipe import Recipe, Stage

WIDTH = 120


def as_yaml(recipe: Recipe) -> str:
    """The recipe as a YAML file that `recipes run` reads again, each value with its source as a comment."""
    lines = [f"# {recipe.name}: {recipe.title}"]
    if recipe.tables:
        lines.append(f"# in the paper: {recipe.tables}")
    lines += [f"# {line}" for line in _wrapped(recipe.about)]
    lines.append("# beside each value: paper (quoted), unstated (the paper does not say, so ours) or ours")
    lines.append("")
    plan = [stage.name if stage.name == stage.command else {stage.name: stage.command} for stage in recipe.stages]
    lines.append(yaml.safe_dump({"stages": plan}, default_flow_style=None, sort_keys=False).rstrip())
    if recipe.launcher:
        lines.append(_pair("launcher", recipe.launcher))
    if recipe.machine:
        lines.append(_pair("machine", recipe.machine))
    if recipe.architecture:
        lines.append(
            yaml.safe_dump({"architecture": recipe.architecture}, default_flow_style=None, width=WIDTH).rstrip()
        )
    if recipe.needs:
        lines.append(yaml.safe_dump({"needs": recipe.needs}, sort_keys=False, width=1000).rstrip())
    for stage in recipe.stages:
        lines += ["", f"{stage.name}:"]
        missing = [key for key in recipe.missing() if key.startswith(f"{stage.name}.")]
        lines += [f"  # {key.partition('.')[2]}: yours to give: {recipe.needs[key]}" for key in missing]
        pairs = [(_pair(key, value), stage.marks.get(key, "")) for key, value in stage.values.items()]
        wide = min(max((len(pair) for pair, _ in pairs), default=0), 44)
        lines += [f"  {pair:<{wide}}  # {mark}".rstrip() if mark else f"  {pair}" for pair, mark in pairs]
    return "\n".join(lines) + "\n"


def command_lines(
    recipe: Recipe, folder: str, flags: Mapping[str, Mapping[str, bool]], launcher: str = "", evaluator: str = ""
) -> list[str]:
    """One command line per stage.

    Args:
        folder: where the run is to lie.
        flags: command to {option: whether it is a switch}; a switch is written as --name or --no-name.
        launcher: in place of `loragate` for stages that train in several processes.
        evaluator: interpreter of the stages that answer with vLLM.
    """
    start = {True: launcher or recipe.launcher, False: f"{shlex.quote(evaluator)} -m loragate" if evaluator else ""}
    return [
        _line(stage, flags[stage.command], start[is_launched(stage)] if is_launched(stage) or uses_vllm(stage) else "")
        for stage in recipe.placed(folder)
    ]


def uses_vllm(stage: Stage) -> bool:
    """Whether the stage's answers come from vLLM, which may need an environment of its own."""
    return stage.values.get("engine") == "vllm"


def is_launched(stage: Stage) -> bool:
    """Whether the stage may run in several processes; a range is chosen in one."""
    return stage.command == "sft" or (stage.command == "calibrate" and bool(stage.values.get("unverified")))


def plain_command(stage: Stage, switches: Mapping[str, bool]) -> list[str]:
    """The words of a stage's command line after `loragate`."""
    words = [stage.command]
    for key, value in stage.values.items():
        flag = key.replace("_", "-")
        if switches.get(key):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            words.append(f"--{flag}={json.dumps(value)}")
        else:
            words.append(f"--{flag}={_text(value)}")
    return words


def _line(stage: Stage, switches: Mapping[str, bool], start: str) -> str:
    words = [shlex.quote(word) for word in plain_command(stage, switches)]
    lines, line = [], start or "loragate"
    for word in words:
        if len(line) + len(word) > WIDTH:
            lines.append(line + " \\")
            line = "   "
        line += f" {word}"
    return "\n".join([*lines, line])


def _pair(key: str, value: Any) -> str:
    dumped = yaml.safe_dump({key: value}, default_flow_style=False, width=10_000, allow_unicode=True).rstrip()
    if isinstance(value, dict):
        dumped = f"{key}: {yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()}"
    return dumped


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(str(part) for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH - 2)
