"""What a training step costs, counted from shapes before anything is run.

Multiplications and additions of matrix products are counted (2 per weight and token); element-wise work is not. The
frozen base needs no weight gradients, so a Stage-II step is one forward and one activation backward of the body, plus
one projection of the response positions.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepCost:
    """Floating-point operations per token of a sequence, and parameters that train.

    Attributes:
        stage_two: FLOPs per token of a gate-training step with the sparse-backward head.
        stage_one: FLOPs per token of a LoRA step with full logits, for comparison.
        gate_parameters: Σ (d_in + 1) over the gated modules.
        lora_parameters: Σ r (d_in + d_out).
        body_forward: FLOPs per token of one forward of the body, which gradient checkpointing adds to either step.
        stage_one_head: FLOPs per token of a LoRA step with this package's head, which projects response positions only.
    """

    stage_two: float
    stage_one: float
    gate_parameters: int
    lora_parameters: int
    body_forward: float
    stage_one_head: float

    @property
    def ratio(self) -> float:
        """FLOPs of a Stage II step divided by those of a LoRA step."""
        return self.stage_two / self.stage_one

    def per_token(self, stage: str, recompute: bool = False) -> float:
        """FLOPs per token of a step as this package runs it.

        Args:
            stage: "sft" or "calibrate".
            recompute: with gradient checkpointing, which runs the body's forward twice.
        """
        step = self.stage_two if stage == "calibrate" else self.stage_one_head
        return step + (self.body_forward if recompute else 0.0)


def step_cost(
    modules: list[tuple[int, int, int]],
    body_parameters: int,
    head_parameters: int,
    *,
    attention_width: int = 0,
    layers: int = 0,
    sequence: int = 512,
    response_share: float = 0.75,
    k: int = 100,
    hidden: int = 0,
) -> StepCost:
    """Count a step.

    Args:
        modules: (d_in, d_out, rank) of every gated module.
        body_parameters: weights of the body's linear layers that one token uses.
        head_parameters: vocabulary × hidden.
        attention_width, layers, sequence: heads × head size, layers and tokens per sequence, for attention scores.
        response_share: share of tokens that are response tokens.
        k, hidden: support and width, for the sparse backward.
    """
    lora = sum(rank * (d_in + d_out) for d_in, d_out, rank in modules)
    gates = sum(d_in + 1 for d_in, _, _ in modules)
    # scores and weighted values, two products each over the whole sequence (full attention, no causal saving)
    attention = layers * 4 * attention_width * sequence
    forward = 2 * body_parameters + attention + 2 * lora
    activation_backward = 2 * body_parameters + 2 * attention + 2 * lora
    sparse_head = response_share * (2 * head_parameters + 2 * k * hidden)
    stage_two = forward + activation_backward + sparse_head + 2 * gates + 2 * gates
    stage_one = forward + activation_backward + 2 * lora + 4 * head_parameters
    stage_one_head = forward + activation_backward + 2 * lora + response_share * 4 * head_parameters
    return StepCost(
        float(stage_two),
        float(stage_one),
        gates,
        lora,
        float(forward),
        float(stage_one_head),
    )
