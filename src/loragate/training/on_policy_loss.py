"""The two losses over sampled answers: entropy with an anchor, and a verifiable reward. Extensions of ours, not SCALE.

Both take the answers as given: the dependence of later prefixes on the gates enters through the policy gradient only.

An anchor is made from two distributions that the gated model carries in itself: the base (λ = 0) and the adapter (λ = 1),
checked by the parity test before training, so that it needs no second copy of the model. Per position the anchored loss is
H(p) + β · KL(p ‖ r) over the full vocabulary, in nats, with p the gated model and r the anchor. At β = 1 the term in log p
drops out: the loss is the cross-entropy of p against r, and no longer entropy minimisation.

Shapes: N answers, T response tokens of a batch in row order, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loragate.gates import gate_override
from loragate.losses.divergence import Combine
from loragate.training.rollouts import Answer
from loragate.training.scoring import Batch, ResponseScorer
from loragate.training.settings import CalibrationSettings


@dataclass(frozen=True)
class Anchor:
    """How an anchor is made.

    Attributes:
        strengths: the constant λ of each forward pass it needs.
        combine: log-probabilities of these passes, each [..., V], to those of the anchor.
    """

    strengths: tuple[float, ...]
    combine: Combine


anchors: dict[str, Anchor] = {
    "base": Anchor((0.0,), lambda logs: logs[0]),
    "adapter": Anchor((1.0,), lambda logs: logs[0]),
    "mixture": Anchor((0.0, 1.0), lambda logs: torch.logaddexp(logs[0], logs[1]) - math.log(2.0)),
    "product": Anchor((0.0, 1.0), lambda logs: torch.log_softmax((logs[0] + logs[1]) / 2.0, -1)),
}


# per response token, with a gradient; detached sums over the tokens, for the log
Terms = tuple[torch.Tensor, dict[str, float]]


@torch.no_grad()
def anchor_states(scorer: ResponseScorer, batch: Batch, anchor: Anchor) -> list[torch.Tensor]:
    """The states of a batch at each constant λ that the anchor needs."""
    found = []
    for strength in anchor.strengths:
        with gate_override(scorer.model, constant=strength, adapter_name=scorer.adapter_name):
            found.append(scorer.states(batch))
    return found


@dataclass(frozen=True)
class AnchoredEntropy:
    """H + β · KL(gated ‖ anchor) over the full vocabulary, in nats, mean over the response tokens of the step."""

    settings: CalibrationSettings

    def denominator(self, answers: Sequence[Answer]) -> int:
        """What the summed loss of a step is divided by."""
        return max(1, sum(len(answer.token_ids) for answer in answers))

    def useful(self, answers: Sequence[Answer]) -> list[int]:
        """Indices of the answers whose gradient is not zero beforehand."""
        return list(range(len(answers)))

    def terms(
        self, scorer: ResponseScorer, batch: Batch, answers: Sequence[Answer], before_T: torch.Tensor | None
    ) -> Terms:
        """The loss of a batch; `before_T` are log-probabilities at the time of sampling, where they differ."""
        anchor = anchors[self.settings.anchor]
        references = anchor_states(scorer, batch, anchor)
        found = scorer.against(scorer.states(batch), batch, references, anchor.combine)
        assert found.kl is not None
        sums = {"entropy": float(found.entropy.detach().sum()), "kl": float(found.kl.detach().sum())}
        return found.entropy + self.settings.beta * found.kl, sums


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
            references = anchor_states(scorer, batch, anchor)
            kl_T = scorer.against(states, batch, references, anchor.combine).kl
            assert kl_T is not None
            losses_T = losses_T + self.settings.reward_kl * kl_T
            sums["kl"] = float(kl_T.detach().sum())
        return losses_T, sums


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


OnPolicyLoss = AnchoredEntropy | GroupReward
losses: dict[str, type[OnPolicyLoss]] = {"anchored": AnchoredEntropy, "reward": GroupReward}
