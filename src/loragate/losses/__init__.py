"""Objectives over next-token distributions: top-k entropy, the token-statistics head, Stage-I objectives."""

from loragate.losses.causal_head import StatisticsRequest, add_statistics_forward, verify_head
from loragate.losses.entropy import topk_entropy
from loragate.losses.head import TokenStatistics, statistics_of_logits, token_statistics
from loragate.losses.objectives import ObjectiveContext, WeightedCrossEntropy, objectives

__all__ = [
    "ObjectiveContext",
    "StatisticsRequest",
    "TokenStatistics",
    "WeightedCrossEntropy",
    "add_statistics_forward",
    "objectives",
    "statistics_of_logits",
    "token_statistics",
    "topk_entropy",
    "verify_head",
]
