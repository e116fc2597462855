"""Answers of base and adapter to the same prompts: stopping, repetition, language, thinking, forgetting.

Tiny models and models that were never taught to chat ramble, loop and do not stop by themselves. So nearly every finding is about
the adapter against its base, prompt by prompt, and it takes the end of the interval that is kinder to the adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from loragate.analysis.rows import Interval, Row, ratio
from loragate.doctor.exam import Exam, Losses, Prompt, low_end, share_right
from loragate.doctor.record import Answering, AnswerPair, Answers
from loragate.doctor.texts import language_of, loops_at_end, split_thoughts
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
GOING_ON, MORE_TOKENS, UNENDED = 8, 512, 0.5
"""So many answers that the base ends and the adapter does not are carried on so far; long answers end by then."""
FORGETS_NOTE, FORGETS = 0.1, 1.0
"""Nats per token: the base's own words become 10 % less likely each, or e times."""
RETENTION_LOSS = 0.02
"""Share of the retention questions, beyond chance."""


@dataclass(frozen=True)
class Seen:
    """What is seen in one answer.

    Attributes:
        prompt: that was answered.
        text, tokens: of the answer; text is without special tokens.
        cut: it met the length limit.
        loops: it ends in a loop.
        thinks: it begins with a block of thoughts, closed or cut by the limit.
        language: of what stands behind the thoughts; None where that shows none.
    """

    prompt: Prompt
    text: str
    tokens: int
    cut: bool
    loops: bool
    thinks: bool
    language: str | None

    @property
    def strays(self) -> bool:
        """Whether it is in another language than the one that was asked for."""
        return self.prompt.kind in SPOKEN and self.language not in (None, self.prompt.language)

    @property
    def stays(self) -> bool:
        """Whether it is in the language that was asked for, and not only words of it again and again."""
        return self.prompt.kind in SPOKEN and self.language == self.prompt.language and not self.loops


SPOKEN = ("english", "language", "thinking")
"""Kinds of prompts whose answers are prose in the language of the prompt."""


def examine_answers(exam: Exam) -> tuple[Answers, list[Finding]]:
    """See `Answers`."""
    adapter = seen_in(exam, "adapter")
    base = seen_in(exam, "base") if exam.has_base else None
    forgetting, nats = _forgetting(exam) if base else ({}, {})
    kept = {} if exam.retention_data is None else exam.scores("retention")
    findings = [
        *_ends(exam, adapter, base),
        *_loops(adapter, base),
        *_silence(adapter, base),
        *([] if base is None else [*_thoughts(adapter, base), *_languages(adapter, base)]),
        *_forgets(exam, forgetting),
        *_retention_finding(kept),
    ]
    thinks = any(one.thinks for one in (*adapter, *(base or ())))
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
        None if base is None else _answering(base, thinks),
        _answering(adapter, thinks),
        forgetting,
        share_right(kept.get("0")),
        share_right(kept.get("1")),
        pairs,
    )
    return measured, findings


def seen_in(exam: Exam, kind: str) -> list[Seen]:
    """What is seen in the answers of base or adapter, in the order of the prompts."""
    found = []
    for sample in exam.drawn(kind):  # type: ignore[arg-type]
        ids = sample.token_ids
        ended = ids[-1:] and ids[-1] in exam.loaded.endings.token_ids
        # marks of thoughts may be special tokens; the end of the turn says nothing about the language
        said = _decoded(exam, ids[:-1] if ended else ids)
        thoughts, behind = split_thoughts(_decoded(exam, exam.prompt_ids[sample.question][-16:]), said)
        cut = sample.finish_reason == "length"
        found.append(
            Seen(
                exam.prompts[sample.question],
                sample.text,
                len(ids),
                cut,
                loops_at_end(sample.text),
                bool(thoughts) and (cut or behind is not None),
                None if behind is None else language_of(behind),
            )
        )
    return found


def _decoded(exam: Exam, ids: Sequence[int]) -> str:
    text: str = exam.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _answering(seen: Sequence[Seen], thinks: bool) -> Answering:
    foreign = [one.stays for one in seen if one.prompt.kind == "language"]
    return Answering(
        tokens=float(np.mean([one.tokens for one in seen])),
        cut=float(np.mean([one.cut for one in seen])),
        repeats=float(np.mean([one.loops for one in seen])),
        thinking=float(np.mean([one.thinks for one in seen])) if thinks else None,
        languages=float(np.mean(foreign)) if foreign else None,
    )


def _flags(adapter: Seen, base: Seen | None) -> tuple[str, ...]:
    """What is odd about an adapter's answer; see `AnswerPair`."""
    odd = {
        "cut": adapter.cut,
        "repeats": adapter.loops,
        "language": adapter.strays,
        "thinking": base is not None and base.thinks and not adapter.thinks,
    }
    return tuple(name for name, found in odd.items() if found)


def _mean(values: Sequence[float] | np.ndarray) -> Interval:
    """Their mean with its interval over prompts."""
    return ratio(np.asarray(values, dtype=float), np.ones(len(values)))


def _percent(found: Interval | Estimate | Difference) -> str:
    ends = "" if found.low is None or found.high is None else f" ({100 * found.low:.0f} to {100 * found.high:.0f})"
    return f"{100 * found.mean:.0f} %{ends}"


# ---- stopping


@torch.no_grad()
def end_probability(exam: Exam, rows: Sequence[Row]) -> Interval | None:
    """Mean probability of all tokens that end an answer, where rows have one of them; None where fewer than two rows have.

    Of whatever acts on the model at the moment.
    """
    ends = sorted(exam.loaded.endings.token_ids)
    sums, counts = np.zeros(len(rows)), np.zeros(len(rows))
    for batch, rows_T, ids_T in exam.reader.batches(rows, exam.settings.batch_size):
        at = np.isin(ids_T, ends).nonzero()[0]
        if len(at):
            states = exam.reader.states(batch)
            chosen = exam.reader.logits(states[torch.as_tensor(at, device=states.device)]).softmax(-1)[:, ends].sum(-1)
            sums += np.bincount(rows_T[at], chosen.double().cpu().numpy(), minlength=len(rows))
            counts += np.bincount(rows_T[at], minlength=len(rows))
    return ratio(sums, counts) if (counts > 0).sum() > 1 else None


def _ends(exam: Exam, adapter: Sequence[Seen], base: Sequence[Seen] | None) -> list[Finding]:
    """`never-stops`: the end of its own examples is not learned, or answers that the base ends run on and on."""
    limit, count = exam.settings.max_new_tokens, len(adapter)
    cut = sum(one.cut for one in adapter)
    before = None if base is None else [one.cut for one in base]
    evidence = {"prompts": count, "cut": cut, "limit": limit, **({} if before is None else {"base_cut": sum(before)})}
    found = f"{_against([one.cut for one in adapter], before)} met the limit of {limit} tokens"
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
        if one.cut and not before.cut and not (one.thinks and one.language is None)
    ]
    asked = sorted(asked, key=lambda index: base[index].tokens)[:GOING_ON]
    if len(asked) < LEAST:
        return []
    unended, more = _carried_on(exam, asked)
    if unended < UNENDED * len(asked):
        return []
    message = (
        f"The adapter's answers do not end: {found}. {unended} of {len(asked)} that the base ends within "
        f"{max(base[index].tokens for index in asked)} tokens had not ended after {limit + more}"
    )
    return [Finding("never-stops", "warning", message, remedy, {**evidence, "went_on": len(asked), "unended": unended})]


def _carried_on(exam: Exam, asked: Sequence[int]) -> tuple[int, int]:
    """(how many of the adapter's cut answers have still not ended, tokens later)."""
    drawn = exam.drawn("adapter")
    begun = [[*exam.prompt_ids[index], *drawn[index].token_ids] for index in asked]
    room = (exam.loaded.positions or 2**31) - max(map(len, begun))
    more = min(MORE_TOKENS, room)
    if more < 1:
        return len(asked), 0
    samples = exam.draw("adapter", begun, more, "answers-carried-on")
    return sum(one.finish_reason == "length" for one in samples), more


# ---- loops and silence


def _more_often(adapter: Sequence[bool], base: Sequence[bool] | None) -> Interval | None:
    """By how much of all prompts something is seen more often than with the base; None where it is not by `MORE_OFTEN`.

    Without a base it must be seen on half of all prompts.
    """
    before = np.zeros(len(adapter)) if base is None else np.asarray(base, dtype=float)
    more = _mean(np.asarray(adapter, dtype=float) - before)
    return more if low_end(more) > (0.5 if base is None else MORE_OFTEN) else None


def _against(own: Sequence[bool], base: Sequence[bool] | None) -> str:
    share = f"{sum(own)} of {len(own)} answers"
    return share if base is None else f"{share} ({sum(base)} of the base's)"


def _loops(adapter: Sequence[Seen], base: Sequence[Seen] | None) -> list[Finding]:
    own, before = [one.loops for one in adapter], None if base is None else [one.loops for one in base]
    if (more := _more_often(own, before)) is None:
        return []
    example = next(one for one in adapter if one.loops)
    message = (
        f"The adapter repeats itself: {_against(own, before)} end by saying the same words over and over. To "
        f'"{example.prompt.text:.60}" it ends in "…{example.text.strip()[-60:]}"'
    )
    remedy = "train it for fewer steps or at a lower rate, and look for repeated text in its examples; or use it at less strength"
    return [Finding("repeats", "warning", message, remedy, {"loops": sum(own), "prompts": len(own), "more": more.mean})]


def _silence(adapter: Sequence[Seen], base: Sequence[Seen] | None) -> list[Finding]:
    own = [not one.text.strip() for one in adapter]
    before = None if base is None else [not one.text.strip() for one in base]
    if (more := _more_often(own, before)) is None:
        return []
    message = f"The adapter says nothing: {_against(own, before)} are empty"
    remedy = "compare the chat template of its training with the one used here: its prompts may end differently"
    return [
        Finding(
            "empty-answers", "warning", message, remedy, {"empty": sum(own), "prompts": len(own), "more": more.mean}
        )
    ]


# ---- thoughts and languages


def _thoughts(adapter: Sequence[Seen], base: Sequence[Seen]) -> list[Finding]:
    lost = [not one.thinks for one, before in zip(adapter, base, strict=True) if before.thinks]
    share = _mean(lost) if len(lost) >= LEAST else None
    if share is None or low_end(share) <= LOST:
        return []
    message = (
        f"The base thinks before it answers {len(lost)} of {len(base)} prompts; the adapter leaves them out of {sum(lost)} "
        "of these"
    )
    remedy = (
        "if thinking is wanted, train on responses with their block of thoughts, which the base can write; if not, switch it off "
        "in the chat template too (enable_thinking=False or the like), so that prompts look as in training"
    )
    return [Finding("lost-thinking", "warning", message, remedy, {"thinks": len(lost), "lost": sum(lost)})]


def _languages(adapter: Sequence[Seen], base: Sequence[Seen]) -> list[Finding]:
    """Of prompts in English and in other languages apart: either may be lost alone."""
    worst: tuple[float, list[Seen], int] | None = None
    for foreign in (True, False):
        both = [
            one
            for one, before in zip(adapter, base, strict=True)
            if before.stays and (one.prompt.kind == "language") == foreign
        ]
        share = _mean([one.strays for one in both]) if len(both) >= LEAST else None
        if share is not None and low_end(share) > LOST and (worst is None or share.mean > worst[0]):
            worst = share.mean, [one for one in both if one.strays], len(both)
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


def _forgetting(exam: Exam) -> tuple[dict[str, Interval], dict[int, float]]:
    """(nats per token that the base's own answers lose, by λ; of the whole adapter, by prompt)."""
    rows = exam.texts["base"]
    if not rows:
        return {}, {}
    own = exam.losses_as("base", "base", exam.acting("base"))
    read: dict[str, Losses] = {
        label: exam.losses_as("base", label, exam.scaled(float(label))) for label in ("0.5", "1")
    }
    if not all(np.isfinite(one.sums).all() for one in (own, *read.values())):
        return {}, {}
    each = (read["1"].sums - own.sums) / own.tokens
    nats = {int(row["row"]): float(value) for row, value in zip(rows, each, strict=True)}
    return {label: losses.minus(own) for label, losses in read.items()}, nats


def _times(nats: float) -> str:
    factor = float(np.exp(nats))
    return f"{factor:.1f}" if factor < 10 else f"{factor:,.0f}"


def _forgets(exam: Exam, forgetting: dict[str, Interval]) -> list[Finding]:
    if not forgetting or low_end(forgetting["1"]) <= FORGETS_NOTE:
        return []
    whole, half = forgetting["1"], forgetting["0.5"]
    drawn = exam.drawn("base")
    read = [drawn[int(row["row"])] for row in exam.texts["base"]]
    entropy = ratio(
        [(one.entropy or 0.0) * len(one.token_ids) for one in read], [len(one.token_ids) for one in read]
    ).mean
    much = low_end(whole) > FORGETS
    message = (
        f"The base's own answers to {len(read)} everyday prompts lose {whole.mean:.2f} nats per token{whole.ends()} under the "
        f"adapter: on average a token becomes {_times(whole.mean)} times less likely. The base's own uncertainty in them is "
        f"{entropy:.2f} nats. At half the adapter's strength they lose {half.mean:.2f}{half.ends()}"
    )
    remedy = (
        f"see whether half its strength still does its task ({exam.weakened('0.5')}); in training, fewer steps, a lower "
        "rate, or some general examples among its own"
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
        f"Of {len(kept['0'])} retention questions the base answers {_percent(base)} right and the adapter {_percent(adapter)}: "
        f"it loses {_percent(loss)}"
    )
    remedy = "use it at less strength where that keeps its own task, or mix such questions into its training"
    return [
        Finding("forgets", "warning", message, remedy, {"base": base.mean, "adapter": adapter.mean, "loss": loss.mean})
    ]
