"""A score without labels: how often an answer agrees with the adapter's own cool majority.

The adapter is sampled several times at a low temperature; where its answers agree on something, that answer stands in for
the label. A candidate's samples are then scored against it. The signal rests on the adapter being right more often than
not wherever it is confident; where its majority is systematically wrong, agreement rewards the same mistake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loragate.errors import DataError

MIN_EXTRACTED = 0.5
MIN_QUESTIONS = 32
MIN_VOTES = 2


@dataclass(frozen=True)
class Majority:
    """The adapter's majority answers.

    Attributes:
        answers: the most frequent extracted answer of each question, None where no two samples gave the same one.
        share: mean share of samples that gave the majority answer, over the questions that have one.
        extracted: share of all samples from which an answer could be taken.
    """

    answers: list[str | None]
    share: float
    extracted: float

    @property
    def usable(self) -> list[int]:
        """Indices of the questions that have a majority answer."""
        return [index for index, answer in enumerate(self.answers) if answer is not None]


def majority(extracted: Sequence[Sequence[str | None]]) -> Majority:
    """The majority answer of each question, [questions][samples]; of equally frequent ones the first seen.

    An answer that was given once is no majority: free text, which never comes twice, must not pass for agreement.

    Raises:
        DataError: for no questions, or a question without samples.
    """
    if not extracted or not all(len(row) for row in extracted):
        raise DataError("majority needs at least one question, and at least one sample of each")
    answers: list[str | None] = []
    shares: list[float] = []
    found = total = 0
    for row in extracted:
        given = [answer for answer in row if answer is not None]
        found, total = found + len(given), total + len(row)
        answer, count = Counter(given).most_common(1)[0] if given else ("", 0)
        if count < MIN_VOTES:
            answers.append(None)
            continue
        answers.append(answer)
        shares.append(count / len(row))
    return Majority(answers, sum(shares) / len(shares) if shares else 0.0, found / total)


def why_unusable(found: Majority) -> str | None:
    """Why agreement with this majority cannot select, or None where it can.

    At least half of the adapter's cool samples must hold an answer, and 32 questions must have a majority.
    """
    if found.extracted < MIN_EXTRACTED:
        return (
            f"an answer could be taken from only {100 * found.extracted:.0f} % of the adapter's samples "
            f"(at least {100 * MIN_EXTRACTED:.0f} % are needed)"
        )
    if len(found.usable) < MIN_QUESTIONS:
        return (
            f"only {len(found.usable)} questions have an answer on which samples of the adapter agree (at least "
            f"{MIN_QUESTIONS} are needed)"
        )
    return None
