"""The two losses over sampled answers: entropy with an anchor, and a verifiable reward. Extensions of ours, not SCALE.

Both take the answers as given: the dependence of later prefixes on the gates enters through the policy gradient only.

Shapes: T response tokens of a batch in row order, N answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from loragate.training.anchor import anchors
from loragate.training.rollouts import Answer
from loragate.training.scoring import Batch, ResponseScorer
from loragate.training.settings import CalibrationSettings


@dataclass
class Terms:
    """The loss of one forward pass.

    Attributes:
        losses_T: per response token, with a gradient; summed and divided by `denominator` of the whole step.
        sums: detached sums over the pass's tokens, for the log.
    """

    losses_T: torch.Tensor
    sums: dict[str, float] = field(default_factory=dict)


class OnPolicyLoss(Protocol):
    """Loss of sampled answers."""

    def denominator(self, answers: Sequence[Answer]) -> int:
        """What the summed loss of a step is divided by."""
        ...

    def useful(self, answers: Sequence[Answer]) -> list[int]:
        """Indices of the answers whose gradient is not zero beforehand."""
        ...

    def terms(
        self, scorer: ResponseScorer, batch: Batch, answers: Sequence[Answer], before_T: torch.Tensor | None
    ) -> Terms:
        """The loss of a batch; `before_T` are log-probabilities at the time of sampling, where they differ."""
        ...


@dataclass(frozen=True)
class AnchoredEntropy:
    """H + β · KL(gated ‖ anchor) over the full vocabulary, in nats, mean over the response tokens of the step."""

    settings: CalibrationSettings

    def denominator(self, answers: Sequence[Answer]) -> int:
        return max(1, sum(len(answer.token_ids) for answer in answers))

    def useful(self, answers: Sequence[Answer]) -> list[int]:
        return list(range(len(answers)))

    def terms(
        self, scorer: ResponseScorer, batch: Batch, answers: Sequence[Answer], before_T: torch.Tensor | None
    ) -> Terms:
        anchor = anchors[self.settings.anchor]
        references = scorer.anchor_states(batch, anchor)
        found = scorer.anchored(scorer.states(batch), references, anchor, 1.0, self.settings.beta)
        return Terms(found.loss, {"entropy": float(found.entropy.sum()), "kl": float(found.kl.sum())})


@dataclass(frozen=True)
class GroupReward:
    """Policy gradient with the group's mean as baseline, optionally with a KL to the anchor.

    The loss of a step is its sum over tokens divided by the number of answers, so that its expectation over samples is
    the gradient of the expected reward (times (G − 1)/G, as an answer is part of its own baseline).
    """

    settings: CalibrationSettings

    def denominator(self, answers: Sequence[Answer]) -> int:
        return max(1, len(answers))

    def useful(self, answers: Sequence[Answer]) -> list[int]:
        if self.settings.reward_kl > 0:
            return list(range(len(answers)))
        return [index for index, answer in enumerate(answers) if answer.advantage != 0.0]

    def terms(
        self, scorer: ResponseScorer, batch: Batch, answers: Sequence[Answer], before_T: torch.Tensor | None
    ) -> Terms:
        states = scorer.states(batch)
        stats = scorer.statistics(states, batch, self.settings.k)
        log_prob_T = stats.log_prob
        advantages = [answer.advantage for answer in answers for _ in answer.token_ids]
        advantage_T = torch.tensor(advantages, dtype=log_prob_T.dtype, device=log_prob_T.device)
        losses_T, clipped_T = policy_loss(log_prob_T, advantage_T, before_T, self.settings.clip_ratio)
        sums = {"topk_entropy": float(stats.topk_entropy.sum()), "clipped": float(clipped_T.sum())}
        if self.settings.reward_kl > 0:
            anchor = anchors[self.settings.anchor]
            found = scorer.anchored(states, scorer.anchor_states(batch, anchor), anchor, 0.0, self.settings.reward_kl)
            losses_T = losses_T + found.loss
            sums["kl"] = float(found.kl.sum())
        return Terms(losses_T, sums)


def policy_loss(
    log_prob_T: torch.Tensor, advantage_T: torch.Tensor, before_T: torch.Tensor | None, clip_ratio: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """−min(ρ A, clip(ρ, 1 ± ε) A) per token with ρ = p / p at sampling time.

    Args:
        log_prob_T: log p of the sampled tokens, with a gradient.
        advantage_T: advantage of the answer a token belongs to.
        before_T: log p at sampling time; None for "the same", when the gradient is −A ∇ log p.
        clip_ratio: ε.

    Returns:
        (loss [T], bool [T]: the clipped side was taken, so that the token has no gradient).
    """
    before_T = log_prob_T.detach() if before_T is None else before_T.to(log_prob_T.device)
    ratio_T = torch.exp(log_prob_T - before_T)
    free_T = ratio_T * advantage_T
    bounded_T = ratio_T.clamp(1.0 - clip_ratio, 1.0 + clip_ratio) * advantage_T
    return -torch.minimum(free_T, bounded_T), (bounded_T < free_T).detach()


losses: dict[str, Callable[[CalibrationSettings], OnPolicyLoss]] = {"anchored": AnchoredEntropy, "reward": GroupReward}
