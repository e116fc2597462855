"""The strict verifier: a response counts when it is right, in the agreed form, and finished.

It reads decoded text only, so it judges a model's samples and a demonstration alike. It does not look at the steps: a
response that reaches the right digit by two errors passes, as it would with any answer checker.
"""

from __future__ import annotations

from loragate.world.problems import Problem
from loragate.world.vocabulary import EOS

WORKED_KINDS = ("arithmetic", "commands")


def verify(problem: Problem, response_text: str, finished: bool) -> bool:
    """True if the response is right and complete.

    Args:
        problem: what was asked.
        response_text: the decoded response; text from the first `<eos>` on is ignored.
        finished: whether the model itself ended the response with `<eos>` rather than running into a length limit.

    Arithmetic and commands pass when the last two words are `answer` and the right digit or letter; a retention item passes
    when the whole response is the answer.
    """
    if not finished:
        return False
    words = response_text.split()
    if EOS in words:
        words = words[: words.index(EOS)]
    if problem.kind in WORKED_KINDS:
        return words[-2:] == ["answer", problem.answer]
    return words == problem.answer.split()
