"""The losses on trial, in plain PyTorch, and the choices of answers that they learn from.

None of them is an objective of `calibrate`: what is here waits for evidence, and goes where there is none. Every function
takes tensors or verdicts and knows neither a model nor a task.

Shapes: P pairs, G answers to one prompt, T response tokens, V vocabulary, M members of a population, C coordinates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

GREEDY = -1


class Pair(NamedTuple):
    """A better and a worse answer to one prompt: indices of its samples, or GREEDY; and what the pair counts."""

    better: int
    worse: int
    weight: float


def flip_pair(greedy_right: bool, others: Mapping[int, float]) -> Pair:
    """The pair that would turn a wrong greedy answer right, or keep a right one.

    Args:
        greedy_right: the verdict on the greedy answer.
        others: samples of the other verdict, one at least, by index, and their log-probability under the adapter. Of right
            ones the least likely is the better answer; of wrong ones the likeliest is the worse.
    """
    if greedy_right:
        return Pair(GREEDY, max(others, key=others.__getitem__), 0.5)
    return Pair(min(others, key=others.__getitem__), GREEDY, 1.0)


def vote(answers: Sequence[str | None]) -> tuple[str | None, float]:
    """The most frequent answer and its share; unfinished answers (None) count as answers that nobody else gives."""
    given = Counter(answer for answer in answers if answer is not None)
    if not given:
        return None, 0.0
    answer, count = given.most_common(1)[0]
    return answer, count / len(answers)


def leave_one_out(rewards_G: torch.Tensor) -> torch.Tensor:
    """Each reward minus the mean of the others; all zero where all rewards are equal."""
    others = (rewards_G.sum() - rewards_G) / (len(rewards_G) - 1)
    return rewards_G - others


def preference(
    better_P: torch.Tensor,
    worse_P: torch.Tensor,
    better_mean_P: torch.Tensor,
    weight_P: torch.Tensor,
    beta: float = 0.1,
    alpha: float = 1.0,
) -> torch.Tensor:
    """w (−log σ(β [Δ(y⁺) − Δ(y⁻)]) − α log π(y⁺)/|y⁺|), mean over pairs.

    Args:
        better_P, worse_P: Δ, log-probability of the whole answer minus that under the adapter.
        better_mean_P: log π(y⁺)/|y⁺|.
        weight_P: w.
    """
    return (weight_P * (-F.logsigmoid(beta * (better_P - worse_P)) - alpha * better_mean_P)).mean()


def policy_gradient(log_prob_N: torch.Tensor, advantage_N: torch.Tensor) -> torch.Tensor:
    """−A log π(y) of whole answers [N], mean over those whose advantage is not zero."""
    used = advantage_N != 0
    return -(advantage_N * log_prob_N).sum() / used.sum().clamp(min=1)


def margin(logits_TV: torch.Tensor, reference_T: torch.Tensor, near: float = 2.0, wanted: float = 0.5) -> torch.Tensor:
    """max(0, wanted − m) where |m| < near, else 0, [T]; m is the reference's logit minus the largest of the others."""
    own_T1 = reference_T.unsqueeze(-1)
    m_T = (logits_TV.gather(-1, own_T1) - logits_TV.scatter(-1, own_T1, float("-inf")).amax(-1, keepdim=True)).squeeze(
        -1
    )
    return torch.where(m_T.abs() < near, (wanted - m_T).clamp(min=0), torch.zeros_like(m_T))


def entropy_at(logits_TV: torch.Tensor, temperature: float, k: int = 100) -> torch.Tensor:
    """Entropy of softmax(z/T) over the k largest logits, [T], in nats; at T = 1 the paper's loss."""
    top = logits_TV.topk(min(k, logits_TV.shape[-1]), dim=-1).values
    log_p = torch.log_softmax(top / temperature, -1)
    return -(log_p.exp() * log_p).sum(-1)


def kl_from(reference_TV: torch.Tensor, logits_TV: torch.Tensor) -> torch.Tensor:
    """KL(reference ‖ model) per token, [T], in nats, both given as logits; the reference carries no gradient."""
    log_r, log_p = torch.log_softmax(reference_TV.detach(), -1), torch.log_softmax(logits_TV, -1)
    return (log_r.exp() * (log_r - log_p)).sum(-1)


def recombined(points_MC: torch.Tensor, scores_M: torch.Tensor) -> torch.Tensor:
    """The next centre of an evolution strategy: the better half of the points, weighted by log-rank; [C]."""
    half = max(1, len(points_MC) // 2)
    best = torch.argsort(scores_M, descending=True, stable=True)[:half]
    weights = torch.log(torch.tensor(half + 0.5)) - torch.log(torch.arange(1, half + 1, dtype=torch.float))
    return (weights / weights.sum()) @ points_MC[best]
