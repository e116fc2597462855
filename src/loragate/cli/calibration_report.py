"""What the training commands say: the account of the rows, the outcome in words that promise nothing, the model card."""

from __future__ import annotations

import json
from typing import Any

from loragate.cli.display import duration
from loragate.report.table import percent


def show_data(out: Any, encoded: Any, tokenizer: Any) -> None:
    """The account of the rows, and one row with its response mask coloured."""
    from loragate.data import mask_as_text, preview

    summary = encoded.summary
    out.print(
        f"data: {len(encoded)} rows ({summary.format}), {summary.response_tokens:,} response tokens of "
        f"{summary.response_tokens + summary.prompt_tokens:,}"
        + (
            f"; {summary.dropped} dropped, {summary.truncated} cut by max_length"
            if summary.dropped or summary.truncated
            else ""
        )
        + (f"; {summary.empty} without a response left out" if summary.empty else "")
        + ("; tokens read from the cache" if summary.cached else "")
    )
    if summary.last_turn_only:
        out.print(f"in {summary.last_turn_only} rows only the last answer counts: the template rewrites earlier turns")
    if summary.plain and tokenizer.chat_template is not None:
        out.print(
            "note: prompt and completion are used as plain text, without the chat template; generate with --raw to match, or "
            "give the rows as messages"
        )
    unknown = tokenizer.unk_token_id
    if unknown is not None:
        share = sum(row["input_ids"].count(unknown) for row in encoded) / max(
            1, summary.response_tokens + summary.prompt_tokens
        )
        if share > 0.01:
            out.print(f"warning: {100 * share:.0f} % of the tokens are unknown to the tokenizer; is it the right one?")
    if out.is_terminal:
        out.print("first row, response bright:")
        out.print(preview(encoded[0], tokenizer))
    else:
        out.print("first row, response between ⟦ and ⟧:")
        out.print(mask_as_text(encoded[0], tokenizer), markup=False)


def warn_about_endings(out: Any, tokenizer: Any, encoded: Any, base: Any) -> None:
    """Say so if trained turns end where generation would not stop."""
    from loragate.data import ending_health

    for problem in ending_health(tokenizer, list(encoded), base.generation_config).problems:
        out.print(f"warning: {problem}", markup=False)


def report_training(out: Any, evidence: dict[str, Any]) -> None:
    """One training: steps, entropy, λ, parity."""
    training, parity = evidence["training"], evidence["parity"]
    total = training["gates"]
    drawn = training["settings"].get("objective") == "random"
    work = "drawn at random, nothing trained" if drawn else f"{training['steps']} steps"
    out.print(
        f"done in {duration(training['seconds'])}: {work}, {training['parameters']:,} gate parameters; "
        "base and adapter unchanged (checked)"
    )
    if training.get("stopped"):
        out.print(f"warning: {training['stopped']}", markup=False)
    out.print(
        f"{entropy_in_words(training['settings']['k'])} on {min(64, training['rows'])} training rows "
        f"{training['entropy_before']:.3f} → {training['entropy_after']:.3f} (normalised). "
        + (
            "Nobody minimised it."
            if drawn
            else "This is the objective, not a score: it falls also where answers get worse."
        )
    )
    out.print(
        f"λ < 0: {100 * total['below_zero']:.1f} %, 0 to 1: {100 * total['zero_to_one']:.1f} %, > 1: "
        f"{100 * total['above_one']:.1f} %; at a bound: {100 * total['saturated']:.1f} %"
    )
    out.print(
        f"step-zero parity: {parity['initial']:.1e} in logits (the adapter's own effect is {parity['delta']:.2g})"
    )


def report_selection(out: Any, record: dict[str, Any]) -> None:
    """The candidates on the probe, what speaks against them, and what remains."""
    probe = record["probe"]
    against = "the labels" if probe["kind"] == "labelled" else "the adapter's own majority at T = 0.3"
    out.print(f"on {probe['questions']} probe questions × {probe['samples']}, scored against {against}:", markup=False)
    for name, found in record["evidence"].items():
        signs = record["signs"][name]
        mark = "←" if name == record["picked"] else "not eligible" if name in record["vetoed"] else ""
        out.print(
            f"  {name:<16} {percent(found['mean']):>5} % ({percent(found['low'])}–{percent(found['high'])})  "
            f"ended {100 * signs['finished']:.0f} %, {signs['tokens']:.0f} tokens {mark}".rstrip(),
            markup=False,
        )
    for phrase in record["warnings"].get("adapter", ()):
        out.print(f"warning: {phrase}", markup=False)
    for name, reason in record["vetoed"].items():
        out.print(f"{name} is not eligible: it {reason}", markup=False)
    if record["accepted"]:
        out.print(f"picked {record['picked']}", markup=False)
        lead = record["evidence"][record["picked"]]["mean"] - record["evidence"]["adapter"]["mean"]
        out.print(
            f"  {100 * lead:+.1f} points over the adapter on the questions it was picked on, so a little flattered"
        )
        for phrase in record["warnings"].get(record["picked"], ()):  # the adapter's own stand above
            out.print(f"warning: {record['picked']}: {phrase}", markup=False)
    else:
        out.print(
            "nothing beat the adapter on the probe, so the adapter remains: the folder holds zero gates (λ = 1), which answer "
            "exactly as the adapter does"
        )


def model_card(name: str, base: str, adapter: str, gate: Any, evidence: dict[str, Any]) -> str:
    """README.md of the artifact."""
    rows = [f"| how the range was chosen | {how_chosen(evidence['selection'])} |"]
    training = evidence.get("training")
    if training:
        total, settings = training["gates"], training["settings"]
        rows = [
            f"| gate parameters | {training['parameters']:,} ({gate.granularity}) |",
            f"| data | {training['data']['source']}, {training['rows']} rows, {training['response_tokens']:,} response tokens |",
            f"| objective | {objective_in_words(settings)} |",
            f"| steps | {steps_in_words(training)} |",
            f"| {entropy_in_words(settings['k'])}, normalised | {training['entropy_before']:.3f} before, "
            f"{training['entropy_after']:.3f} after |",
            f"| share of λ < 0 / 0 to 1 / > 1 | {total['below_zero']:.3f} / {total['zero_to_one']:.3f} / "
            f"{total['above_one']:.3f} |",
            *rows,
        ]
    table = "\n".join(rows)
    return (
        f"---\nlibrary_name: loragate\nbase_model: {json.dumps(base)}\ntags: [lora, peft, loragate, scale]\n---\n\n"
        f"# {name}\n\n"
        f"LoRA adapter `{adapter}` on `{base}` {acting(gate, evidence)}\n\n"
        '```python\nimport loragate as lg\n\nmodel = lg.load_gated("path/to/this/folder")\n```\n\n'
        f"| | |\n|---|---|\n{table}\n\n"
        f"{candidates_table(evidence['selection'])}"
        "Lower entropy is the training objective and no evidence of better answers. Compare with the plain adapter in "
        "`adapter/`, also at a lower sampling temperature, before relying on it.\n"
    )


def acting(gate: Any, evidence: dict[str, Any]) -> str:
    """What the gates do, or that they do nothing."""
    if evidence["selection"]["accepted"]:
        objective = (evidence.get("training") or {}).get("settings", {}).get("objective", "entropy")
        kind = {"entropy": "entropy gates", "random": "random gates (a control)"}.get(objective, f"gates ({objective})")
        where = {"token": "each token and module", "module": "each module", "global": "all modules together"}
        return (
            f"with {kind}: for {where[gate.granularity]} the adapter's delta is scaled by λ in "
            f"[{gate.lower:g}, {gate.upper:g}]."
        )
    return "with gates that are off: λ = 1 everywhere, so this folder answers exactly as the plain adapter does."


def entropy_in_words(k: int) -> str:
    """The entropy of a support of k; 0 is the whole vocabulary."""
    return f"top-{k} entropy" if k else "full entropy"


def steps_in_words(training: dict[str, Any]) -> str:
    """Steps, batch and learning rate, or that there was no training."""
    settings = training["settings"]
    if settings.get("objective") == "random":
        return f"none: drawn with seed {settings['seed']} and standard deviation {settings['random_scale']:g}"
    return f"{training['steps']} of batch {settings['batch_size']}, learning rate {settings['learning_rate']:g}"


def objective_in_words(settings: dict[str, Any]) -> str:
    """The objective, with extensions named as such."""
    objective = settings.get("objective", "entropy")
    return {
        "entropy": f"{entropy_in_words(settings['k'])} (SCALE)",
        "random": "none: random gates (a control)",
        "ce": "cross-entropy (the paper's ablation)",
        "anchored": "anchored entropy on its own answers (an extension of loragate, not SCALE)",
        "reward": "verifiable reward (an extension of loragate, not SCALE)",
    }[objective]


def how_chosen(selection: dict[str, Any]) -> str:
    """One sentence."""
    if "probe" not in selection:
        why = f" ({selection['why']})" if selection.get("why") else ""
        return (selection.get("reason") or "given by the user; not compared with the plain adapter") + why
    probe = selection["probe"]
    against = "labels" if probe["kind"] == "labelled" else "the adapter's own majority answers, without labels"
    outcome = (
        f"picked {selection['picked']}" if selection["accepted"] else "nothing beat the adapter, which remains (λ = 1)"
    )
    return (
        f"{outcome}; {selection['cost']['trainings']} candidates and the adapter on {probe['questions']} questions × "
        f"{probe['samples']} against {against}"
    )


def candidates_table(selection: dict[str, Any]) -> str:
    """The evidence as Markdown; nothing where there is none."""
    if "probe" not in selection:
        return ""
    retained = selection.get("retention", {}).get("evidence", {})
    head, rule = "| candidate | score on the probe, % | 95 % interval |", "|---|---:|---:|"
    lines = [head + " retention, % |", rule + "---:|"] if retained else [head, rule]
    for name, found in selection["evidence"].items():
        line = f"| {name} | {percent(found['mean'])} | {percent(found['low'])}–{percent(found['high'])} |"
        lines.append(line + (f" {percent(retained[name]['mean'])} |" if retained else ""))
    notes = [f"{name} was not eligible: it {reason}." for name, reason in selection["vetoed"].items()]
    if selection["accepted"]:
        notes += [f"Warning: {phrase}." for phrase in selection["warnings"].get(selection["picked"], ())]
        notes.append("The picked candidate's score is flattered by the choice.")
    return "\n".join(lines) + "\n\n" + "".join(f"{note}\n\n" for note in notes)
