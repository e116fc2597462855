"""The forms of answers: what is left of them without their numbers, and whether a model has come to prefer others.

Gates, and other ways to make a model surer, may gain on a probe by giving one form of answer to everything, which costs
wherever another form is needed; a probe of one kind of questions does not show it (docs/real-study.md has it measured). The
forms show it without any other questions, and without labels.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

SHIFTED, FEWER = 0.25, 0.6
"""Share of the answers that have gone to other forms, and ratio of the numbers of forms, from which it is told."""

REPEATING = 2
"""Answers that a form must have on average for forms to mean anything: solutions in prose are all different ones."""

_LONGEST = 80
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def form_of(text: str) -> str:
    """An answer with "n" for every number and one space for every gap, cut off where it is long."""
    form = _NUMBER.sub("n", " ".join(text.split()))
    return form if len(form) <= _LONGEST else f"{form[: _LONGEST - 1]}…"


def forms_of(texts: Iterable[str]) -> dict[str, int]:
    """How many answers have each form, the most frequent ones first."""
    return dict(Counter(map(form_of, texts)).most_common())


def spread(forms: Mapping[str, int]) -> float:
    """Over how many forms answers spread: the exponential of the entropy of their shares."""
    total = sum(forms.values())
    return math.exp(-sum(count / total * math.log(count / total) for count in forms.values()))


def other_forms(forms: Mapping[str, int], own: Mapping[str, int]) -> dict[str, Any]:
    """How a model's forms lie apart from the adapter's.

    Args:
        forms, own: counts of `forms_of` for one answer to each of the same questions, the model's and the adapter's; where one
            was asked more of them, shares are compared.

    Returns:
        answers: how many the adapter gave; shifted: the share that would have to take another form for the two to be alike
        (total variation); spread, adapter_spread: see `spread`; form: the one that gained the largest share, share and
        adapter_share its shares; told: whether that is much. Empty where the adapter's forms seldom repeat, or one of the two
        was asked nothing.
    """
    answers, theirs = sum(own.values()), sum(forms.values())
    if not (answers and theirs) or answers < REPEATING * len(own):
        return {}
    gained = {form: forms.get(form, 0) / theirs - own.get(form, 0) / answers for form in {**own, **forms}}
    form = max(gained, key=lambda one: gained[one])
    shifted = sum(gain for gain in gained.values() if gain > 0)
    here, there = spread(forms), spread(own)
    return {
        "answers": answers,
        "shifted": shifted,
        "spread": here,
        "adapter_spread": there,
        "form": form,
        "share": forms.get(form, 0) / theirs,
        "adapter_share": own.get(form, 0) / answers,
        "told": shifted >= SHIFTED or here < FEWER * there,
    }


def said_of(found: Mapping[str, Any]) -> str:
    """That in a phrase."""
    return (
        f"greedily {100 * found['shifted']:.0f} % of the answers have gone to other forms, numbers aside: {found['form']!r} has "
        f"{100 * found['share']:.0f} % of them, {100 * found['adapter_share']:.0f} % (the adapter); they spread over "
        f"{found['spread']:.1f} forms, {found['adapter_spread']:.1f} (the adapter). Questions of a kind that the probe lacks may "
        "need a form that was given up"
    )
