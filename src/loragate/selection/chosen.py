"""What a choice came to, as a value and in sentences."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate.display import duration, percent, points, stopped_notes
from loragate.gates.schema import EVIDENCE, read_gate_config
from loragate.selection.candidate import ADAPTER, BASE, CONSTANT, GATES, Candidate
from loragate.selection.probe import COOL

CANDIDATES = Path("run") / "candidates"
UNVERIFIED = "given by the user without a probe; not compared with the plain adapter"


@dataclass(frozen=True)
class Chosen:
    """What a choice came to.

    Attributes:
        folder: the gated adapter.
        candidate: whose gates act; None where the adapter remains.
        evidence: as the artifact keeps it: "selection", and of gates that were trained "training" and "parity".
    """

    folder: Path
    candidate: Candidate | None
    evidence: dict[str, Any]

    @classmethod
    def of(cls, folder: Path, candidate: Candidate | None = None) -> Chosen:
        """What stands in a folder that was just written."""
        record = read_gate_config(folder)
        return cls(folder, candidate, {key: record[key] for key in EVIDENCE if record.get(key)})

    def sentences(self) -> list[str]:
        """What to use, the scores of what was asked, what speaks against them, and how the gates were trained."""
        record = self.evidence["selection"]
        compared = [headline(record), *_scores(record), *_remarks(record)] if "recommendation" in record else []
        return [*compared, *(_training(self.evidence) if "training" in self.evidence else [])]


def headline(record: dict[str, Any]) -> str:
    """What to use, and what the other way would have given: by expected scores.

    Args:
        record: `evidence["selection"]` of what was compared.
    """
    found, scores = record["recommendation"], record["recommendation"]["expected"]
    kind, steps = found["kind"], found["steps"]
    words = {
        ADAPTER: "the adapter alone",
        BASE: "the base without the adapter",
        CONSTANT: f"one {record['picked']} for all modules",
        GATES: f"the gates {record['picked']}",
    }
    how = f"at T = {found['temperature']:g}" if found["temperature"] else "greedily"
    text = f"Use {words[kind]}, {how}: {percent(scores[kind]['mean'])} %"
    if confirmation := record.get("confirmation"):
        gain = confirmation["difference"]
        between = f"95 % interval {points(gain['low'])} to {points(gain['high'])}"
        untouched = f"on {confirmation['questions']} questions that chose nothing ({between})"
        if confirmation["confirmed"]:
            text = f"{text}; {points(gain['mean'])} points more than {confirmation['against']} {untouched}"
        else:
            text = f"{text}; {confirmation['setting']} gained {points(gain['mean'])} points {untouched}"
        if any(step["kind"] == GATES and step["taken"] for step in steps):
            return f"{text}."
    step = next((step for step in reversed(steps) if kind == GATES or step["kind"] == GATES), None)
    if step is None:
        behind = {name: stop for name, stop in record.get("stopped", {}).items() if "adapter" in stop}
        if not behind:
            return f"{text}."
        name, stop = max(behind.items(), key=lambda item: item[1]["expected"])
        scores = f"{percent(stop['expected'])} % expected where the adapter had {percent(stop['adapter'])} %"
        return f"{text}; the gates {name} after {stop['steps']} steps had {scores}, and were not trained on."
    interval = f"{round(100 * found['level'])} % interval {points(step['low'])} to {points(step['high'])}"
    if kind != GATES:
        gates = f"{percent(scores[GATES]['mean'])} % ({points(step['mean'])} points, {interval})"
        return f"{text}; the gates would have given {gates}."
    other = (words | {CONSTANT: "one λ for all modules"})[step["against"]]
    gained = f"{points(step['mean'])} points for the gates, {interval}"
    return f"{text}; {other} would have given {percent(scores[step['against']]['mean'])} % ({gained})."


def _scores(record: dict[str, Any]) -> list[str]:
    """The scores of all settings that were asked everything, one a line."""
    lines, against = [], "the labels"
    if record["probe"]["kind"] != "labelled":
        against = "the adapter's own majority at T = 0.3"
        note = (
            "note: without labels, agreement with the adapter's own majority ranks ranges at one temperature; it cannot compare "
            "temperatures, because a cooler adapter agrees with itself more. "
        )
        if record["recommendation"]["temperature"] > COOL:
            note += (
                "The adapter alone at T = 0.3, which needs no gates, was better than gates at T = 1 nearly everywhere. "
            )
        lines.append(f"{note}A few dozen questions with answers would tell")
    found = record["recommendation"]
    lines.append(
        f"{found['tried']} settings were asked {record['cost']['answers']:,} answers in all, these the most questions, scored "
        f"against {against}:"
    )
    for name, score in record["evidence"].items():
        signs = record["signs"][name]
        out = any(f"{name} ".startswith(f"{one} ") for one in record["vetoed"])  # a setting, or all of a model
        mark = "←" if name == found["setting"] else "not eligible" if out else ""
        interval = f"({percent(score['low'])}–{percent(score['high'])})"
        ended = f"ended {100 * signs['finished']:.0f} %, {signs['tokens']:.0f} tokens"
        lines.append(f"  {name:<18} {percent(score['mean']):>5} % {interval}  {ended} {mark}".rstrip())
    return lines


def _remarks(record: dict[str, Any]) -> list[str]:
    """What dropped out, what speaks against the scores, and why the adapter remains where it does."""
    lines = [
        f"{name} could not be trained and drops out: {reason}" for name, reason in record.get("failed", {}).items()
    ]
    lines += stopped_notes(record)
    lines += [f"{name} is not eligible: it {reason}" for name, reason in record["vetoed"].items()]
    for name, phrases in record["warnings"].items():
        lines += [f"warning: {phrase if name == ADAPTER else f'{name}: {phrase}'}" for phrase in phrases]
    if (own := record.get("own_answers")) and own["sampled"]:
        nothing = "; an objective that learns from the adapter's own answers has nothing to learn here"
        most = max(own["sampled"], key=lambda row: row["questions"])
        lines.append(
            f"of {most['questions']} questions that the adapter answers wrongly when greedy, {percent(most['mean'])} % have a "
            f"right answer among {most['samples']} sampled at T = {most['temperature']:g} (95 % interval "
            f"{percent(most['low'])} to {percent(most['high'])} %)"
            f"{nothing if own['nothing_to_learn'] else ''}"
        )
    if not record["accepted"]:
        why = f"nothing {'eligible ' if record['vetoed'] else ''}is probably better than the adapter"
        if failed := record.get("confirmation"):
            why = f"{failed['setting']} had no gain on the {failed['questions']} untouched questions"
        lines.append(
            f"{why}, so the adapter remains: the folder holds zero gates (λ = 1), which answer exactly as the adapter does"
        )
    return lines


def _training(evidence: dict[str, Any]) -> list[str]:
    """One training: steps, entropy, λ, parity."""
    training, parity = evidence["training"], evidence["parity"]
    settings, total = training["settings"], training["gates"]
    drawn = settings.get("objective") == "random"
    work = "drawn at random, nothing trained" if drawn else f"{training['steps']} steps"
    entropy = f"top-{settings['k']} entropy" if settings["k"] else "full entropy"
    apart = f"; λ started {parity['apart']:.0e} from 1" if "apart" in parity else ""  # records of earlier versions
    lesson = "This is the objective, not a score: it falls also where answers get worse."
    return [
        f"done in {duration(training['seconds'])}: {work}, {training['parameters']:,} gate parameters; "
        "base and adapter unchanged (checked)",
        *([f"warning: {training['stopped']}"] if training.get("stopped") else []),
        f"{entropy} on {min(64, training['rows'])} training rows {training['entropy_before']:.3f} → "
        f"{training['entropy_after']:.3f} (normalised). {'Nobody minimised it.' if drawn else lesson}",
        f"λ < 0: {100 * total['below_zero']:.1f} %, 0 to 1: {100 * total['zero_to_one']:.1f} %, > 1: "
        f"{100 * total['above_one']:.1f} %; at a bound: {100 * total['saturated']:.1f} %",
        f"step-zero parity: {parity['initial']:.1e} in logits (the adapter's own effect is {parity['delta']:.2g}{apart})",
    ]
