"""Looking at gates and runs: what they cost, what they did."""

from loragate.analysis.cost import StepCost, step_cost

__all__ = ["StepCost", "step_cost"]
