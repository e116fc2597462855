"""Answers of base and adapter to the same prompts: stopping, repetition, language, thinking, forgetting.

Tiny models and models that were never taught to chat ramble, loop and do not stop by themselves. So nearly every finding is about
the adapter against its base, prompt by prompt, and it takes the end of the interval that is kinder to the adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from loragate.analysis.rows import Interval, Row, bootstrap_ratio, distinct
from loragate.display import pluralize
from loragate.doctor.exam_context import ExamContext, Losses, Prompt, low_end, share_right
from loragate.doctor.record import Answering, AnswerPair, Answers
from loragate.doctor.texts import detect_language, loops_at_end, split_reasoning
from loragate.evaluation.statistics import Difference, Estimate, average_at_k, compare
from loragate.gates.adapter_rules import Finding

MORE_OFTEN = 0.15
"""By so much of all prompts an adapter must loop or fall silent more often than its base."""
LOST = 0.4
"""Of the prompts that the base answers in the asked language, or with thoughts, so many must be lost, and there must be
`LEAST` of them: a base that hardly speaks a language has nothing to lose."""
LEAST = 6
NEVER_ENDS = 0.15
"""Probability of the end of a turn where the examples end theirs; adapters that learned it give 0.5 and more."""
CONTINUED_ANSWERS, CONTINUATION_TOKENS, UNFINISHED_SHARE = 8, 512, 0.5
"""So many answers that the base ends and the adapter does not are carried on so far; long answers end by then."""
FORGETS_NOTE, FORGETS = 0.1, 1.0
"""Nats per token: the base's own words become 10 % less likely each, or e times."""
RETENTION_LOSS = 0.02
"""Share of the retention questions, beyond chance."""


@dataclass(frozen=True)
class AnswerTraits:
    """What is seen in one answer.

    Attributes:
        prompt: that was answered.
        text, tokens: of the answer; text is without special tokens.
        is_truncated: it met the length limit.
        ends_in_loop: it ends in a loop.
        has_reasoning: it begins with a block of thoughts, closed or cut by the limit.
        language: of what stands behind the thoughts; None where that shows none.
    """

    prompt: Prompt
    text: str
    tokens: int
    is_truncated: bool
    ends_in_loop: bool
    has_reasoning: bool
    language: str | None

    @property
    def is_wrong_language(self) -> bool:
        """Whether it is in another language than the one that was asked for."""
        return self.prompt.kind in PROSE_PROMPT_KINDS and self.language not in (None, self.prompt.language)

    @property
    def is_expected_language(self) -> bool:
        """Whether it is in the language that was asked for, and not only words of it again and again."""
        return (
            self.prompt.kind in PROSE_PROMPT_KINDS and self.language == self.prompt.language and not self.ends_in_loop
        )


PROSE_PROMPT_KINDS = ("english", "language", "thinking")
"""Kinds of prompts whose answers are prose in the language of the prompt."""


def examine_answers(exam: ExamContext) -> tuple[Answers, list[Finding]]:
    """See `Answers`."""
    adapter = extract_answer_traits(exam, "adapter")
    base = extract_answer_traits(exam, "base") if exam.has_base else None
    forgetting, nats = _measure_forgetting(exam) if base else ({}, {})
    kept = {} if exam.retention_data is None else exam.score_questions("retention")
    if len(kept) > 1 and max(kept["0"].mean(), kept["1"].mean()) <= RETENTION_LOSS:
        exam.say(
            "the retention set says nothing: by the grader default hardly an answer of base or adapter is right; do the questions "
            "ask for the form that it reads?"
        )
    findings = [
        *_check_stopping(exam, adapter, base),
        *_check_repetition(adapter, base),
        *_check_empty_answers(adapter, base),
        *([] if base is None else [*_thoughts(adapter, base), *_languages(adapter, base)]),
        *_check_forgetting(exam, forgetting),
        *_retention_finding(kept),
    ]
    thinks = any(one.has_reasoning for one in (*adapter, *(base or ())))
    pairs = tuple(
        AnswerPair(
            one.prompt.text,
            one.prompt.kind,
            base[index].text if base else "",
            one.text,
            nats.get(index),
            _flags(one, base[index] if base else None),
        )
        for index, one in enumerate(adapter)
    )
    measured = Answers(
        exam.settings.max_new_tokens,
        None if base is None else _summarize_answers(base, thinks),
        _summarize_answers(adapter, thinks),
        forgetting,
        share_right(kept.get("0")),
        share_right(kept.get("1")),
        pairs,
    )
    return measured, findings


def extract_answer_traits(exam: ExamContext, kind: str) -> list[AnswerTraits]:
    """What is seen in the answers of base or adapter, in the order of the prompts."""
    found = []
    for sample in exam.greedy_answers(kind):  # type: ignore[arg-type]
        ids = sample.token_ids
        ended = ids[-1:] and ids[-1] in exam.loaded.endings.token_ids
        # marks of thoughts may be special tokens; the end of the turn says nothing about the language
        said = _decoded(exam, ids[:-1] if ended else ids)
        thoughts, behind = split_reasoning(_decoded(exam, exam.prompt_ids[sample.question][-16:]), said)
        cut = sample.finish_reason == "length"
        found.append(
            AnswerTraits(
                exam.prompts[sample.question],
                sample.text,
                len(ids),
                cut,
                loops_at_end(sample.text),
                bool(thoughts) and (cut or behind is not None),
                None if behind is None else detect_language(behind),
            )
        )
    return found


def _decoded(exam: ExamContext, ids: Sequence[int]) -> str:
    text: str = exam.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _summarize_answers(seen: Sequence[AnswerTraits], thinks: bool) -> Answering:
    foreign = [one.is_expected_language for one in seen if one.prompt.kind == "language"]
    return Answering(
        tokens=float(np.mean([one.tokens for one in seen])),
        cut=float(np.mean([one.is_truncated for one in seen])),
        repeats=float(np.mean([one.ends_in_loop for one in seen])),
        thinking=float(np.mean([one.has_reasoning for one in seen])) if thinks else None,
        languages=float(np.mean(foreign)) if foreign else None,
    )


def _flags(adapter: AnswerTraits, base: AnswerTraits | None) -> tuple[str, ...]:
    """What is odd about an adapter's answer; see `AnswerPair`."""
    odd = {
        "cut": adapter.is_truncated,
        "repeats": adapter.ends_in_loop,
        "language": adapter.is_wrong_language,
        "thinking": base is not None and base.has_reasoning and not adapter.has_reasoning,
    }
    return tuple(name for name, found in odd.items() if found)


def _bootstrap_mean(values: Sequence[float] | np.ndarray) -> Interval:
    """Their mean with its interval over prompts."""
    return bootstrap_ratio(np.asarray(values, dtype=float), np.ones(len(values)))


def _percent(found: Interval | Estimate | Difference) -> str:
    ends = "" if found.low is None or found.high is None else f" ({100 * found.low:.0f} to {100 * found.high:.0f})"
    return f"{100 * found.mean:.0f} %{ends}"


# ---- stopping


@torch.no_grad()
def end_probability(exam: ExamContext, rows: Sequence[Row]) -> Interval | None:
    """Mean probability of all tokens that end an answer, where rows have one of them; None where fewer than two texts have.

    Of whatever acts on the model at the moment.
    """
    ends = sorted(exam.loaded.endings.token_ids)
    sums, counts, texts = np.zeros(len(rows)), np.zeros(len(rows)), distinct(rows)
    for batch, rows_T, ids_T in exam.reader.batches(rows, exam.settings.batch_size):
        at = np.isin(ids_T, ends).nonzero()[0]
        if len(at):
            states = exam.reader.states(batch)
            chosen = exam.reader.logits(states[torch.as_tensor(at, device=states.device)]).softmax(-1)[:, ends].sum(-1)
            sums += np.bincount(texts[rows_T[at]], chosen.double().cpu().numpy(), minlength=len(rows))
            counts += np.bincount(texts[rows_T[at]], minlength=len(rows))
    return bootstrap_ratio(sums, counts) if (counts > 0).sum() > 1 else None


def _check_stopping(
    exam: ExamContext, adapter: Sequence[AnswerTraits], base: Sequence[AnswerTraits] | None
) -> list[Finding]:
    """`never-stops`: the end of its own examples is not learned, or answers that the base ends run on and on."""
    limit, count = exam.settings.max_new_tokens, len(adapter)
    cuts = [one.is_truncated for one in adapter]
    cut = sum(cuts)
    before = None if base is None else [one.is_truncated for one in base]
    evidence = {"prompts": count, "cut": cut, "limit": limit, **({} if before is None else {"base_cut": sum(before)})}
    found = f"{_format_counts(cuts, before)} met the limit of {pluralize(limit, 'token')}"
    remedy = (
        "train it with the end of the turn among the labels: each response ends as the chat template ends it, and padding is "
        "another token than the end. Until then set a limit of tokens, or a stop text"
    )
    if 2 * cut < count:
        return []
    with exam.acting("adapter"):
        learned = end_probability(exam, exam.rows) if exam.rows else None
    if learned is not None and learned.high is not None and learned.high < NEVER_ENDS:
        at = f"where its own examples end, it gives the end of the turn {_percent(learned)} probability; expected is 50 % and more"
        message = f"The adapter did not learn to end its answers: {at}. {found}"
        return [Finding("never-stops", "warning", message, remedy, {**evidence, "end_probability": learned.mean})]
    if base is None:
        return []
    if 10 * evidence["base_cut"] >= 9 * count:
        message = f"Neither the adapter nor its base ends its answers: {found}"
        return [Finding("never-stops", "note", message, "give a limit of tokens, or a stop text", evidence)]
    asked = [
        index
        for index, (one, before) in enumerate(zip(adapter, base, strict=True))
        if one.is_truncated and not before.is_truncated and not (one.has_reasoning and one.language is None)
    ]
    asked = sorted(asked, key=lambda index: base[index].tokens)[:CONTINUED_ANSWERS]
    if len(asked) < LEAST:
        return []
    unended, more = _continue_answers(exam, asked)
    if unended < UNFINISHED_SHARE * len(asked):
        return []
    message = (
        f"The adapter's answers do not end: {found}. {unended} of {len(asked)} that the base ends within "
        f"{pluralize(max(base[index].tokens for index in asked), 'token')} had not ended after {limit + more}"
    )
    return [Finding("never-stops", "warning", message, remedy, {**evidence, "went_on": len(asked), "unended": unended})]


def _continue_answers(exam: ExamContext, asked: Sequence[int]) -> tuple[int, int]:
    """(how many of the adapter's cut answers have still not ended, tokens later)."""
    drawn = exam.greedy_answers("adapter")
    begun = [[*exam.prompt_ids[index], *drawn[index].token_ids] for index in asked]
    room = (exam.loaded.max_positions or 2**31) - max(map(len, begun))
    more = min(CONTINUATION_TOKENS, room)
    if more < 1:
        return len(asked), 0
    samples = exam.generate_greedy("adapter", begun, more, "answers-carried-on")
    return sum(one.finish_reason == "length" for one in samples), more


# ---- loops and silence


def _excess_rate(adapter: Sequence[bool], base: Sequence[bool] | None) -> Interval | None:
    """By how much of all prompts something is seen more often than with the base; None where it is not by `MORE_OFTEN`.

    Without a base it must be seen on half of all prompts.
    """
    before = np.zeros(len(adapter)) if base is None else np.asarray(base, dtype=float)
    more = _bootstrap_mean(np.asarray(adapter, dtype=float) - before)
    return more if low_end(more) > (0.5 if base is None else MORE_OFTEN) else None


def _format_counts(own: Sequence[bool], base: Sequence[bool] | None) -> str:
    share = f"{sum(own)} of {pluralize(len(own), 'answer')}"
    return share if base is None else f"{share} ({sum(base)} of the base's)"


def _check_repetition(adapter: Sequence[AnswerTraits], base: Sequence[AnswerTraits] | None) -> list[Finding]:
    own, before = [one.ends_in_loop for one in adapter], None if base is None else [one.ends_in_loop for one in base]
    if (more := _excess_rate(own, before)) is None:
        return []
    example = next(one for one in adapter if one.ends_in_loop)
    message = (
        f"The adapter repeats itself: {_format_counts(own, before)} end by saying the same words over and over. To "
        f'"{example.prompt.text:.60}" it ends in "…{example.text.strip()[-60:]}"'
    )
    remedy = "train it for fewer steps or at a lower rate, and look for repeated text in its examples; or use it at less strength"
    return [Finding("repeats", "warning", message, remedy, {"loops": sum(own), "prompts": len(own), "more": more.mean})]


def _check_empty_answers(adapter: Sequence[AnswerTraits], base: Sequence[AnswerTraits] | None) -> list[Finding]:
    own = [not one.text.strip() for one in adapter]
    before = None if base is None else [not one.text.strip() for one in base]
    if (more := _excess_rate(own, before)) is None:
        return []
    message = f"The adapter says nothing: {_format_counts(own, before)} are empty"
    remedy = "compare the chat template of its training with the one used here: its prompts may end differently"
    return [
        Finding(
            "empty-answers", "warning", message, remedy, {"empty": sum(own), "prompts": len(own), "more": more.mean}
        )
    ]


# ---- thoughts and languages


def _lost_share(lost: Sequence[bool]) -> float | None:
    """The share that is lost of what the base does; None where that is not clearly more than `LOST`, or too few to say."""
    share = _bootstrap_mean(lost) if len(lost) >= LEAST else None
    return None if share is None or low_end(share) <= LOST else share.mean


def _thoughts(adapter: Sequence[AnswerTraits], base: Sequence[AnswerTraits]) -> list[Finding]:
    lost = [not one.has_reasoning for one, before in zip(adapter, base, strict=True) if before.has_reasoning]
    if _lost_share(lost) is None:
        return []
    message = (
        f"The base thinks before it answers {len(lost)} of {pluralize(len(base), 'prompt')}; the adapter leaves them out of "
        f"{sum(lost)} of these"
    )
    remedy = (
        "if thinking is wanted, train on responses with their block of thoughts, which the base can write; if not, switch it off "
        "in the chat template too (enable_thinking=False or the like), so that prompts look as in training"
    )
    return [Finding("lost-thinking", "warning", message, remedy, {"thinks": len(lost), "lost": sum(lost)})]


def _languages(adapter: Sequence[AnswerTraits], base: Sequence[AnswerTraits]) -> list[Finding]:
    """Of prompts in English and in other languages apart: either may be lost alone."""
    worst: tuple[float, list[AnswerTraits], int] | None = None
    for foreign in (True, False):
        both = [
            one
            for one, before in zip(adapter, base, strict=True)
            if before.is_expected_language and (one.prompt.kind == "language") == foreign
        ]
        share = _lost_share([one.is_wrong_language for one in both])
        if share is not None and (worst is None or share > worst[0]):
            worst = share, [one for one in both if one.is_wrong_language], len(both)
    if worst is None:
        return []
    _, strays, of = worst
    message = (
        f"The adapter answers in another language than it is asked in: {len(strays)} of {of} prompts that the base answers in "
        f'their own language, such as "{strays[0].prompt.text:.60}" ({strays[0].prompt.language}) in {strays[0].language}'
    )
    remedy = (
        "if that is not what it was trained for, mix examples in the languages that you need into its training, or use it at "
        "less strength"
    )
    evidence = {"strays": len(strays), "of": of, "languages": sorted({str(one.language) for one in strays})}
    return [Finding("language-drift", "warning", message, remedy, evidence)]


# ---- forgetting


def _measure_forgetting(exam: ExamContext) -> tuple[dict[str, Interval], dict[int, float]]:
    """(nats per token that the base's own answers lose, by λ; of the whole adapter, by prompt)."""
    rows = exam.scoring_rows["base"]
    if not rows:
        return {}, {}
    own = exam.cached_losses("base", "base", exam.acting("base"))
    read: dict[str, Losses] = {
        label: exam.cached_losses("base", label, exam.scaled(float(label))) for label in ("0.5", "1")
    }
    if not all(np.isfinite(one.sums).all() for one in (own, *read.values())):
        return {}, {}
    each = (read["1"].sums - own.sums) / own.tokens
    nats = {int(row["row"]): float(value) for row, value in zip(rows, each, strict=True)}
    return {label: losses.paired_difference(own) for label, losses in read.items()}, nats


def _times(nats: float) -> str:
    factor = float(np.exp(nats))
    return f"{factor:.1f}" if factor < 10 else f"{factor:,.0f}"


def _check_forgetting(exam: ExamContext, forgetting: dict[str, Interval]) -> list[Finding]:
    if not forgetting or low_end(forgetting["1"]) <= FORGETS_NOTE:
        return []
    whole, half = forgetting["1"], forgetting["0.5"]
    drawn = exam.greedy_answers("base")
    read = [drawn[int(row["row"])] for row in exam.scoring_rows["base"]]
    entropy = bootstrap_ratio(
        [(one.entropy or 0.0) * len(one.token_ids) for one in read], [len(one.token_ids) for one in read]
    ).mean
    much = low_end(whole) > FORGETS
    message = (
        f"The base's own answers to {pluralize(len(read), 'everyday prompt')} lose {whole.mean:.2f} nats per token{whole.ends()} "
        f"under the adapter: on average a token becomes {_times(whole.mean)} times less likely. The base's own uncertainty in "
        f"them is {entropy:.2f} nats. At half the adapter's strength they lose {half.mean:.2f}{half.ends()}"
    )
    remedy = (
        f"see whether half its strength still does its task ({exam.format_rescale_command('0.5')}); in training, fewer steps, a "
        "lower rate, or some general examples among its own"
        if much
        else "an adapter for one task forgets some of the rest by design; less strength gives it back"
    )
    evidence = {"nats": whole.mean, "low": whole.low, "high": whole.high, "half": half.mean, "entropy": entropy}
    return [Finding("forgets", "warning" if much else "note", message, remedy, evidence)]


def _retention_finding(kept: dict[str, np.ndarray]) -> list[Finding]:
    if len(kept) < 2:
        return []
    base, adapter = average_at_k(kept["0"][:, None]), average_at_k(kept["1"][:, None])
    loss = compare(kept["0"][:, None], kept["1"][:, None])
    if loss.low <= RETENTION_LOSS:
        return []
    message = (
        f"Of {pluralize(len(kept['0']), 'retention question')} the base answers {_percent(base)} right and the adapter "
        f"{_percent(adapter)}: it loses {_percent(loss)}"
    )
    remedy = "use it at less strength where that keeps its own task, or mix such questions into its training"
    return [
        Finding("forgets", "warning", message, remedy, {"base": base.mean, "adapter": adapter.mean, "loss": loss.mean})
    ]
