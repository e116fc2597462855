"""What the training commands say: the account of the rows, and the outcome in words that promise nothing."""

from __future__ import annotations

from typing import Any

from loragate.display import duration, next_evaluation
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


def show_work(out: Any, model: Any, modules: Any, drawn: bool) -> None:
    """What will be gated, after refusing what cannot be; `drawn`: at random."""
    from loragate.gates import examine_adapter, require_gateable
    from loragate.gates.eligibility import require_trainable

    verdicts = examine_adapter(model, "default", modules)
    gateable = require_gateable(verdicts)
    require_trainable(verdicts)
    out.print(f"gating {len(gateable)} modules" + (", drawn at random, no training" if drawn else ""))


def report_choice(out: Any, chosen: Any, accept: str, *, accepted: bool) -> None:
    """What a calibration came to, where it is, and what to run next.

    Args:
        chosen: `loragate.selection.Chosen`.
        accept: the command that switches gates on which stay off.
        accepted: gates that had been trained before were switched on.
    """
    evidence, folder = chosen.evidence, chosen.folder
    if "probe" in evidence["selection"]:
        report_selection(out, evidence["selection"])
    if "training" in evidence and not accepted:
        report_training(out, evidence)
    if accepted:
        out.print(f"the gates of {chosen.trained.cell} are on; nothing shows that they help", markup=False)
    out.print(f"written to {folder}; its adapter/ is the plain adapter to compare with", markup=False)
    out.print(next_evaluation(folder, f"runs/{folder.name}"), markup=False)
    if chosen.candidate is None and chosen.trained is not None:
        out.print(
            f"the gates of {chosen.trained.cell} are trained but off: nothing shows that they help. Give --probe FILE with at "
            "least 32 prompts and answers to have a range chosen. To switch these on as they are:",
            markup=False,
        )
        out.print(f"  {accept}", markup=False)


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
    references = record.get("references", {})
    for name, found in {**record["evidence"], **references}.items():
        signs = record["signs"][name]
        mark = "←" if name == record["picked"] else "not eligible" if name in record["vetoed"] else ""
        mark = "for comparison" if name in references else mark
        out.print(
            f"  {name:<16} {percent(found['mean']):>5} % ({percent(found['low'])}–{percent(found['high'])})  "
            f"ended {100 * signs['finished']:.0f} %, {signs['tokens']:.0f} tokens {mark}".rstrip(),
            markup=False,
        )
    for phrase in record["warnings"].get("adapter", ()):
        out.print(f"warning: {phrase}", markup=False)
    for name, reason in record.get("failed", {}).items():
        out.print(f"{name} could not be trained and drops out: {reason}", markup=False)
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
    for name in references:
        for phrase in record["warnings"].get(name, ()):
            out.print(f"note: {phrase}", markup=False)


def entropy_in_words(k: int) -> str:
    """The entropy of a support of k; 0 is the whole vocabulary."""
    return f"top-{k} entropy" if k else "full entropy"
