"""Top-k predictive entropy in plain PyTorch: the definition that every fast path is held to."""

from __future__ import annotations

import math
from numbers import Integral

import torch

from loragate.errors import ConfigError


def support_size(k: int, vocabulary: int) -> int:
    """k limited to the vocabulary, 0 for the whole of it; a ConfigError for k = 1 (of entropy 0), below 0 or no whole number."""
    if not isinstance(k, Integral) or k < 0 or k == 1:
        raise ConfigError(
            f"k must be an integer of at least 2, or 0 for the whole vocabulary, found {k!r}; the paper uses 100, EAFT 20"
        )
    return min(k, vocabulary) if k else vocabulary


def topk_entropy(logits: torch.Tensor, k: int = 100, normalize: bool = True) -> torch.Tensor:
    """Entropy of the softmax over the k largest logits (eq:rw-topk), differentiable by autograd.

    Args:
        logits: [..., V], any floating dtype; computed in fp32 (fp64 stays fp64). Logits of −inf add nothing.
        k: support size; k ≥ V, or 0, gives the full entropy.
        normalize: divide by log k (by log V where k ≥ V), so that the result lies in [0, 1].

    Returns:
        [...] in nats, or as a share of the maximum when normalised.
    """
    working = logits if logits.dtype == torch.float64 else logits.float()
    k = support_size(k, logits.shape[-1])
    log_q = torch.log_softmax(torch.topk(working, k, dim=-1).values, dim=-1)
    # a logit of −inf (a token that is masked) adds nothing, and 0 · log 0 would be NaN, in the gradient too
    entropy = -(log_q.exp() * log_q.masked_fill(log_q == -torch.inf, 0.0)).sum(-1)
    return entropy / math.log(k) if normalize else entropy
