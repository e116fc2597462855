"""The forms of answers: what is left of them without their numbers, and what they tell of a model and of its probe.

What makes a model surer may have it give one form of answer to everything. A probe of one kind of questions may not show that,
or even reward it, while questions that need another form are lost (docs/real-study.md has it measured). The forms show it
without other questions, and without labels. They also show such a probe: its answers have far fewer forms than the rows.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

SHIFTED, FEWER = 0.25, 0.6
"""Share of the answers that have other forms, and ratio of the numbers of forms, from which it is told."""

CHANCE = 2.0
"""Times what chance would shift between two sets of answers of the same forms, which a shift must exceed as well."""

REPEATING = 2
"""Answers that a form must have on average for forms to mean anything: solutions in prose are all different ones."""

DRAWS = 100
"""Sets of responses, as many as there are answers, of which none may spread over as few forms: a chance of one in a hundred."""

_LONGEST = 80
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def form_of(text: str) -> str:
    """An answer with "n" for every number and one space for every gap, cut off after 80 characters."""
    form = _NUMBER.sub("n", " ".join(text.split()))
    return form if len(form) <= _LONGEST else f"{form[: _LONGEST - 1]}…"


def spread(counts: Mapping[str, int]) -> float:
    """Over how many forms answers spread: the exponential of the entropy of their shares."""
    total = sum(counts.values())
    return math.exp(-sum(count / total * math.log(count / total) for count in counts.values()))


def other_forms(forms: Sequence[str], own: Sequence[str], *, labels: bool = False) -> dict[str, Any]:
    """How a model's forms lie apart from the adapter's.

    Args:
        forms, own: `form_of` each answer to the same questions, the model's and the adapter's.
        labels: whether an answer is a label and nothing else, as a letter is: then other ones are no other form, and only few
            different ones tell anything.

    Returns:
        answers: how many each gave; shifted: the share of them that would have to take another form for the two to be alike
        (total variation), and by_chance the share that chance would shift; spread, adapter_spread: see `spread`; gained, lost:
        the form whose share grew most, and the one whose share fell most, each with (share, the adapter's); told: whether that
        is much. Empty where the numbers differ, as in records of earlier versions, or the adapter's forms seldom repeat.
    """
    answers, now, before = len(own), Counter(forms), Counter(own)
    if not answers or len(forms) != answers or answers < REPEATING * len(before):
        return {}
    shares = {form: (now[form] / answers, before[form] / answers) for form in {**before, **now}}
    gains = {form: here - there for form, (here, there) in shares.items()}
    gained, lost = max(gains, key=lambda one: gains[one]), min(gains, key=lambda one: gains[one])
    shifted = sum(gain for gain in gains.values() if gain > 0)
    # E|a − b| of two shares of n answers each, √(4 p (1 − p) / π n), halved and summed over the forms
    middle = [(here + there) / 2 for here, there in shares.values()]
    by_chance = sum(math.sqrt(share * (1 - share) / (math.pi * answers)) for share in middle)
    spread_now, spread_before = spread(now), spread(before)
    return {
        "answers": answers,
        "shifted": shifted,
        "by_chance": by_chance,
        "spread": spread_now,
        "adapter_spread": spread_before,
        "gained": [gained, *shares[gained]],
        "lost": [lost, *shares[lost]],
        "told": spread_now < FEWER * spread_before or (not labels and shifted >= max(SHIFTED, CHANCE * by_chance)),
    }


def said_of(found: Mapping[str, Any]) -> str:
    """That in a phrase."""
    (more, share, before), (less, left, had) = found["gained"], found["lost"]
    return (
        f"{100 * found['shifted']:.0f} % of the answers have another form than the adapter's, numbers aside: "
        f'"{less}" falls from {100 * had:.0f} to {100 * left:.0f} % of all, "{more}" rises from {100 * before:.0f} to '
        f"{100 * share:.0f} %; they spread over {found['spread']:.1f} forms, {found['adapter_spread']:.1f} (the adapter), and "
        "questions that the probe lacks may need one that was given up"
    )


def missing_kinds(forms: Sequence[str], responses: Sequence[str]) -> dict[str, Any]:
    """Whether answers to the probe have so few of the forms of the rows that the probe seems to lack kinds of questions.

    Args:
        forms: `form_of` each of the adapter's answers.
        responses: `form_of` the responses of the rows, in any order.

    Returns:
        answers: how many are compared; spread: of them, see `spread`; rows_spread: mean over `DRAWS` sets of as many responses;
        missing: the form whose share fell most, with (its share of the answers, of the responses); told: whether the answers
        spread over fewer than 0.6 times as many forms, and over fewer than any of the sets. Empty where there are none, or
        where the forms of the responses seldom repeat.
    """
    count, every, draw = min(len(forms), len(responses)), Counter(responses), random.Random(0)
    if not count or len(responses) < REPEATING * len(every):
        return {}
    given = Counter(forms[:count])
    own, drawn = spread(given), [spread(Counter(draw.sample(responses, count))) for _ in range(DRAWS)]
    rows_spread = sum(drawn) / DRAWS
    missing = max(every, key=lambda form: every[form] / len(responses) - given[form] / count)
    return {
        "answers": count,
        "spread": own,
        "rows_spread": rows_spread,
        "missing": [missing, given[missing] / count, every[missing] / len(responses)],
        "told": own < min(FEWER * rows_spread, *drawn),
    }


def said_of_kinds(found: Mapping[str, Any]) -> str:
    """That in a phrase."""
    form, share, of_rows = found["missing"]
    return (
        f"the adapter's answers to the probe spread over {found['spread']:.1f} forms, numbers aside, and as many responses of the "
        f'rows over {found["rows_spread"]:.1f} ("{form}": {100 * share:.0f} % of the answers, {100 * of_rows:.0f} % of the '
        "responses): the probe seems to lack kinds of questions that the rows have; give it some of every kind that you will ask"
    )
