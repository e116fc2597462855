"""Evaluation: scores and what may be concluded from them."""

from loragate.evaluation.run import SuiteScores, run_suite
from loragate.evaluation.statistics import Difference, Estimate, average_at_k, compare, holm

__all__ = ["Difference", "Estimate", "SuiteScores", "average_at_k", "compare", "holm", "run_suite"]
