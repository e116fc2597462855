"""How strongly an adapter should act: what the examples need against what the base could do, over strengths and parts.

A strength is λ on the plain adapter's delta, which PEFT, vLLM's plugin, llama.cpp and `loragate export` all take. The target is
the loss on the examples (without examples, what the adapter's own answers lose); retention is what the base's own answers lose.
Differences are paired by row, so that a few hundred tokens tell strengths apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial

import numpy as np

from loragate.analysis.rows import Array, Interval
from loragate.doctor.exam_context import STRENGTHS, ExamContext, Losses, share_right
from loragate.doctor.learned import MATTERS, SHARE_STRONGER, SHARE_WEAKER
from loragate.doctor.record import Point, Strength
from loragate.evaluation.statistics import compare
from loragate.gates.adapter_rules import Finding
from loragate.gates.strength import family_of, layer_bands, lora_paths

PARTIAL = (0.0, 0.5)
"""λ of bands of layers and of kinds of modules, the rest at 1."""
ONE_POINT = 0.01
"""Of accuracy, or of the loss that the adapter saves, that a smaller strength may cost and still keep the target."""
KEPT_NATS = 0.02
"""Nats per token that the adapter's own answers may lose and still be kept; a hundredth of a typical answer's surprise."""


def examine_strength(exam: ExamContext) -> tuple[Strength | None, list[Finding]]:
    """See `Strength`; None where the base cannot be had, without which nothing is retained or lost."""
    if not exam.has_base or not exam.scoring_rows["base"] or not exam.scoring_rows["adapter"]:
        exam.say("strengths are not compared: the base, or an answer of it, cannot be had")
        return None, []
    target = "examples" if "examples" in exam.scoring_rows else "adapter"
    ways = _list_configurations(exam)
    with exam.job("strengths", 2 * len(ways), "passes") as on_progress:
        read: dict[str, dict[str, Losses]] = {target: {}, "base": {}}
        for text, found in read.items():
            for label, (_, _, context) in ways.items():
                found[label] = exam.cached_losses(text, label, context())
                on_progress(sum(map(len, read.values())), 2 * len(ways))
        own = exam.cached_losses("base", "base", exam.acting("base"))
    if not all(np.isfinite(one.sums).all() for found in read.values() for one in found.values()):
        exam.say("strengths are not compared: the model computes no finite predictions at every one of them")
        return None, []
    dev = {} if exam.dev_data is None else exam.score_questions("dev", STRENGTHS)
    retention = {} if exam.retention_data is None else exam.score_questions("retention", STRENGTHS)
    kept = read[target]["1"] if target == "adapter" else None
    points = tuple(
        Point(
            label,
            group,  # type: ignore[arg-type]
            strength,
            read[target][label].mean() if kept is None else read[target][label].paired_difference(kept),
            read["base"][label].paired_difference(own),
            share_right(dev.get(label)),
            share_right(retention.get(label)),
        )
        for label, (group, strength, _) in ways.items()
    )
    judged = dev or None
    if judged is not None and max(judged["0"].mean(), judged["1"].mean()) <= ONE_POINT:
        how = f"task {exam.settings.dev_task}" if exam.settings.dev_task else f"grader {exam.settings.dev_grader}"
        exam.say(
            f"no strength is chosen by the dev set: by the {how} hardly an answer of base or adapter is right; do the questions "
            "ask for the form that it reads, or does another --dev-grader or --dev-task fit?"
        )
        judged = None
    least, best = _choose_strengths(read[target], judged, kept is not None)
    decided = "accuracy" if judged is not None else "kept" if kept is not None else "loss"
    said = _sentences(points, read, least, best, decided, exam)
    return Strength("loss" if kept is None else "kept", "forgetting", decided, points, least, best, said), []  # type: ignore[arg-type]


Way = tuple[str, float | None, Callable[[], AbstractContextManager[None]]]
"""(group, λ, the context in which the model acts so)"""


def _list_configurations(exam: ExamContext) -> dict[str, Way]:
    """By label, scales first."""
    ways: dict[str, Way] = {f"{value:g}": ("scale", value, partial(exam.scaled, value)) for value in STRENGTHS}
    paths = lora_paths(exam.model)
    parts: dict[str, list[str]] = {}
    for path in paths:
        parts.setdefault(family_of(path) or "other", []).append(path)
    groups = (("band", layer_bands(paths)), ("kind", parts))
    for group, members in groups:
        if len(members) < 2:  # all modules are one band: the scales say it
            continue
        for name, chosen in members.items():
            for value in PARTIAL:
                some = dict.fromkeys(chosen, value)
                ways[f"{name} {value:g}"] = (group, value, partial(exam.scaled, some))
    if exam.loaded.kind == "gated":
        ways["gates"] = ("gates", None, partial(exam.acting, "gated"))
    return ways


def _choose_strengths(
    losses: Mapping[str, Losses], scores: Mapping[str, Array] | None, kept: bool
) -> tuple[str | None, str | None]:
    """(least scale below 1 that keeps the target, scale that is better than 1 by more than its interval)."""
    labels = [f"{value:g}" for value in STRENGTHS]
    below = [label for label in labels if float(label) < 1 and label != "0"]
    if scores is not None:
        gaps = {label: compare(scores[label][:, None], scores["1"][:, None]) for label in labels if label != "1"}
        keeps = [label for label in below if gaps[label].mean >= -ONE_POINT]
        better = [label for label in gaps if label != "0" and gaps[label].low > 0]
        return _least(keeps, below), max(better, key=lambda label: gaps[label].mean, default=None)
    costs = {label: losses[label].paired_difference(losses["1"]) for label in labels if label != "1"}
    allowed = KEPT_NATS if kept else ONE_POINT * max(costs["0"].mean, 0.0)
    keeps = [label for label in below if costs[label].mean <= allowed or (not kept and (costs[label].low or 0.0) < 0)]
    better = [label for label in costs if label != "0" and _matters(costs[label], label, costs["0"].mean)]
    return _least(keeps, below), None if kept else min(better, key=lambda label: costs[label].mean, default=None)


def _matters(cost: Interval, label: str, gain: float) -> bool:
    """Whether a strength's loss is so far below that at 1 as `learned` wants for a finding: more is always a little better."""
    share = SHARE_STRONGER if float(label) > 1 else SHARE_WEAKER
    return cost.high is not None and -cost.high > max(MATTERS, share * max(gain, 0.0))


def _least(keeps: list[str], below: list[str]) -> str | None:
    """The least scale from which on all up to 1 keep the target."""
    found = None
    for label in reversed(below):
        if label not in keeps:
            break
        found = label
    return found


def _sentences(
    points: tuple[Point, ...],
    read: Mapping[str, Mapping[str, Losses]],
    least: str | None,
    best: str | None,
    decided: str,
    exam: ExamContext,
) -> tuple[str, ...]:
    """What to do, and what it gives back."""
    by_label = {point.label: point for point in points}
    whole = by_label["1"]
    of = {"loss": "the loss on the examples", "kept": "its own answers", "accuracy": "its score on the dev set"}[
        decided
    ]
    lost = whole.retention
    takes = lost.mean > 0
    moved = lost if takes else Interval(-lost.mean, *(None if end is None else -end for end in (lost.high, lost.low)))
    amount = f"{moved.mean:.3f} nats per token{moved.ends('.3f')}"
    what = (
        f"{amount} from the base's own answers"
        if takes
        else f"nothing from the base's own answers: they became likelier by {amount}"
    )
    said = [f"At its own strength the adapter takes {what}."]
    if best is not None:
        said.append(f"{best} times its strength is better by {of} than its own, by more than the interval.")
    if least is None:
        trade = ": a weaker one gives some of the base back and loses some of what was learned" if takes else ""
        said.append(f"No smaller strength keeps {of}{trade}.")
    else:
        back = read["base"]["1"].paired_difference(read["base"][least])
        gives = " and gives nothing back"
        if takes and back.mean > 0:
            share = 100 * back.mean / lost.mean
            gives = f" and gives {back.mean:.3f} nats per token{back.ends('.3f')} back ({share:.0f} % of it)"
        said.append(f"{least} times its strength keeps {of}{gives}: {exam.format_rescale_command(least)}.")
    if decided == "accuracy" and whole.accuracy is not None:
        base = by_label["0"].accuracy
        if base is not None and base.mean >= whole.accuracy.mean - ONE_POINT:
            said.append(
                f"The base alone scores {100 * base.mean:.0f} % on the dev set and the adapter {100 * whole.accuracy.mean:.0f} %: "
                "these questions do not show what the adapter is for."
            )
    if decided == "kept":
        said.append("Without examples (--data) this says how alike the answers stay, not how right they are.")
    costly, cheap = _parts(points, whole)
    if cheap is not None and costly is not None:
        said.append(
            f"Of the parts, {cheap.label.removesuffix(' 0')} can be switched off at the least cost to the target "
            f"({cheap.target.mean - whole.target.mean:+.3f} nats), {costly.label.removesuffix(' 0')} at the highest "
            f"({costly.target.mean - whole.target.mean:+.3f})."
        )
    return tuple(said)


def _parts(points: tuple[Point, ...], whole: Point) -> tuple[Point | None, Point | None]:
    """(the part whose absence costs the target most, least), of bands and kinds."""
    off = [point for point in points if point.group in ("band", "kind") and point.strength == 0]
    if len(off) < 2:
        return None, None
    return max(off, key=lambda one: one.target.mean), min(off, key=lambda one: one.target.mean)
