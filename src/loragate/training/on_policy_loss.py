"""The two losses over sampled answers: entropy with an anchor, and a verifiable reward. Extensions of ours, not SCALE.

Both take the answers as given: the dependence of later prefixes on the gates enters through the policy gradient only.

An anchor is made from two distributions that the gated model carries in itself: the base (λ = 0) and the adapter (λ = 1),
checked by the parity test before training, so that it needs no second copy of the model. Per position the anchored loss is
w_H · H(p) + w_K · KL(p ‖ r) over the full vocabulary, in nats, with p the gated model and r the anchor. With
a = (w_K − w_H) log p − w_K log r the loss is E_p[a] and its slope by the logits p (a − E_p[a]), so that a chunk of fp32
logits gives value and gradient at once and dies with the chunk. At w_H = w_K the term in log p drops out: the loss is the
cross-entropy of p against r, and no longer entropy minimisation. The anchor carries no gradient, and neither does the head.

Shapes: N answers, T response tokens of a batch in row order, D hidden, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from loragate.gates import gate_override
from loragate.losses.projection import Head, Projection
from loragate.losses.tiling import chunks, whole_rows
from loragate.training.rollouts import Answer
from loragate.training.scoring import Batch, ResponseScorer
from loragate.training.settings import CalibrationSettings

_CHUNK_BYTES = 128 << 20


@dataclass(frozen=True)
class Anchor:
    """How an anchor is made.

    Attributes:
        strengths: the constant λ of each forward pass it needs.
        combine: log-probabilities of these passes, each [..., V], to those of the anchor.
    """

    strengths: tuple[float, ...]
    combine: Callable[[Sequence[torch.Tensor]], torch.Tensor]


def _mixture(logs: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.logaddexp(logs[0], logs[1]) - math.log(2.0)


def _product(logs: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.log_softmax((logs[0] + logs[1]) / 2.0, -1)


anchors: dict[str, Anchor] = {
    "base": Anchor((0.0,), lambda logs: logs[0]),
    "adapter": Anchor((1.0,), lambda logs: logs[0]),
    "mixture": Anchor((0.0, 1.0), _mixture),
    "product": Anchor((0.0, 1.0), _product),
}


class AnchoredLoss(NamedTuple):
    """Per position: `loss` [T] with a gradient, `kl` and `entropy` [T] in nats without one."""

    loss: torch.Tensor
    kl: torch.Tensor
    entropy: torch.Tensor


def anchored_loss(
    hidden_TD: torch.Tensor,
    anchor_hidden: Sequence[torch.Tensor],
    head: Head,
    anchor: Anchor,
    *,
    entropy_weight: float = 1.0,
    kl_weight: float = 1.0,
    chunk_tokens: int | None = None,
) -> AnchoredLoss:
    """w_H · H(p) + w_K · KL(p ‖ anchor) per position.

    Args:
        hidden_TD: final hidden states of the gated model, [T, D].
        anchor_hidden: those of the anchor's passes, each [T, D], in the order of `anchor.strengths`.
        head: the frozen output head.
        anchor: how the passes combine.
        entropy_weight, kl_weight: w_H and w_K.
        chunk_tokens: positions per chunk; by default as many as fit 128 MiB of fp32 logits, at most 128 on a CPU.

    Returns:
        `AnchoredLoss`, fp32; differentiable with respect to `hidden_TD` only.
    """
    if chunk_tokens is None:
        chunk_tokens = whole_rows(head.weight.shape[0], hidden_TD.device.type, _CHUNK_BYTES)
    plan = _Plan(head, anchor, entropy_weight, kl_weight, chunk_tokens)
    return AnchoredLoss(*_Anchored.apply(hidden_TD, plan, *[other.detach() for other in anchor_hidden]))


def anchored_loss_of_logits(
    logits_TV: torch.Tensor,
    anchor_logits: Sequence[torch.Tensor],
    anchor: Anchor,
    *,
    entropy_weight: float = 1.0,
    kl_weight: float = 1.0,
) -> AnchoredLoss:
    """The same from full logits [T, V] by plain autograd, in fp32 (fp64 stays fp64): the oracle and the slow path."""

    def normalised(logits: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)

    log_p = normalised(logits_TV)
    log_r = anchor.combine([normalised(logits.detach()) for logits in anchor_logits])
    entropy = -(log_p.exp() * log_p).sum(-1)
    kl = (log_p.exp() * (log_p - log_r)).sum(-1)
    return AnchoredLoss(entropy_weight * entropy + kl_weight * kl, kl.detach(), entropy.detach())


@dataclass(frozen=True)
class _Plan:
    head: Head
    anchor: Anchor
    entropy_weight: float
    kl_weight: float
    chunk: int


class _Anchored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: torch.Tensor, plan: _Plan, *anchor_hidden: torch.Tensor) -> Any:
        with torch.autocast(hidden_TD.device.type, enabled=False):
            projection = plan.head.projection()
            parts = [
                _chunk(
                    projection, plan, hidden_TD[rows], [other[rows] for other in anchor_hidden], hidden_TD.requires_grad
                )
                for rows in chunks(hidden_TD.shape[0], plan.chunk)
            ]
        if not parts:
            nothing = torch.zeros(0, dtype=torch.float32, device=hidden_TD.device)
            parts = [(nothing, nothing, nothing, torch.zeros_like(hidden_TD))]
        loss_T, kl_T, entropy_T, direction_TD = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(direction_TD)
        ctx.dtype = hidden_TD.dtype
        ctx.passes = len(anchor_hidden)
        ctx.mark_non_differentiable(kl_T, entropy_T)
        return loss_T, kl_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss_T: torch.Tensor, *unused: Any) -> Any:
        (direction_TD,) = ctx.saved_tensors
        grad_hidden = (grad_loss_T.unsqueeze(-1) * direction_TD).to(ctx.dtype)
        return (grad_hidden, None, *[None] * ctx.passes)


def _chunk(
    projection: Projection,
    plan: _Plan,
    hidden_CD: torch.Tensor,
    anchor_hidden: Sequence[torch.Tensor],
    wants_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss [C], KL [C], entropy [C], d loss / d hidden [C, D] or [C, 0])."""
    # the projection reuses one buffer: a pass must be normalised into memory of its own before the next is projected
    log_r_CV = plan.anchor.combine([torch.log_softmax(projection.logits(other)[0], -1) for other in anchor_hidden])
    z_CV, slope_CV = projection.logits(hidden_CD)
    log_p_CV = torch.log_softmax(z_CV, -1)
    p_CV = log_p_CV.exp()
    entropy_C = -torch.linalg.vecdot(p_CV, log_p_CV)
    kl_C = torch.linalg.vecdot(p_CV, log_p_CV - log_r_CV)
    loss_C = plan.entropy_weight * entropy_C + plan.kl_weight * kl_C
    if not wants_gradient:
        return loss_C, kl_C, entropy_C, hidden_CD.new_zeros((hidden_CD.shape[0], 0))
    a_CV = (plan.kl_weight - plan.entropy_weight) * log_p_CV - plan.kl_weight * log_r_CV
    gradient_CV = p_CV * (a_CV - loss_C.unsqueeze(-1))
    return loss_C, kl_C, entropy_C, projection.pull_back(gradient_CV, slope_CV)


@torch.no_grad()
def anchor_states(scorer: ResponseScorer, batch: Batch, anchor: Anchor) -> list[torch.Tensor]:
    """The states of a batch at each constant λ that the anchor needs."""
    found = []
    for strength in anchor.strengths:
        with gate_override(scorer.model, constant=strength, adapter_name=scorer.adapter_name):
            found.append(scorer.states(batch))
    return found


def anchored(
    scorer: ResponseScorer,
    states: torch.Tensor,
    references: Sequence[torch.Tensor],
    anchor: Anchor,
    entropy_weight: float,
    kl_weight: float,
) -> AnchoredLoss:
    """w_H · H + w_K · KL to the anchor per response token, through the head or from full logits."""
    if not scorer.fused:
        return anchored_loss_of_logits(states, references, anchor, entropy_weight=entropy_weight, kl_weight=kl_weight)
    head = scorer.head()
    moved = [other.to(head.weight.device) for other in references]
    states = states.to(head.weight.device)
    return anchored_loss(states, moved, head, anchor, entropy_weight=entropy_weight, kl_weight=kl_weight)


@dataclass
class Terms:
    """The loss of one forward pass.

    Attributes:
        losses_T: per response token, with a gradient; summed and divided by `denominator` of the whole step.
        sums: detached sums over the pass's tokens, for the log.
    """

    losses_T: torch.Tensor
    sums: dict[str, float] = field(default_factory=dict)


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
        found = anchored(scorer, scorer.states(batch), references, anchor, 1.0, self.settings.beta)
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
            references = anchor_states(scorer, batch, anchor)
            found = anchored(scorer, states, references, anchor, 0.0, self.settings.reward_kl)
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


OnPolicyLoss = AnchoredEntropy | GroupReward
losses: dict[str, type[OnPolicyLoss]] = {"anchored": AnchoredEntropy, "reward": GroupReward}
