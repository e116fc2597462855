"""Response positions of a gated model: their hidden states, and those of base and adapter from the same weights.

λ held at 0 is the base and λ held at 1 the adapter (checked by the parity test before training), so that an anchor needs
no second copy of the model. Where the output head is not one frozen linear map, "states" are full logits (slower).

Shapes: B sequences, S positions, T response tokens of the batch in row order, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from loragate.errors import TrainingError
from loragate.gates import gate_override
from loragate.losses import verify_head
from loragate.losses.causal_head import Head, read_head
from loragate.losses.head import IGNORED, TokenStatistics, head_statistics, statistics_of_logits
from loragate.training.anchor import Anchor, AnchoredLoss, anchored_loss, anchored_loss_of_logits
from loragate.training.sharding import causal_model

Batch = dict[str, torch.Tensor]


def counted(batch: Batch) -> torch.Tensor:
    """bool [B, S-1]: positions whose next token is a response token."""
    return batch["labels"][:, 1:] != IGNORED


class ResponseScorer:
    """Scores the response tokens of batches from the collator.

    Attributes:
        fused: whether the output head is projected in chunks (False: full logits).
    """

    def __init__(self, model: Any, adapter_name: str | None = None, precision: str = "fp32") -> None:
        self.model, self.adapter_name = model, adapter_name
        self.causal = causal_model(model)
        self.fused = verify_head(self.causal)
        self.autocast = precision == "bf16"

    def states(self, batch: Batch) -> torch.Tensor:
        """Final hidden states (or full logits) at the positions that predict a response token, [T, D] (or [T, V])."""
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
        device = batch["input_ids"].device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.autocast):
            if self.fused:
                output = self.causal.base_model(**inputs).last_hidden_state
            else:
                output = self.causal(**inputs).logits
        return output[:, :-1][counted(batch).to(output.device)]

    @torch.no_grad()
    def anchor_states(self, batch: Batch, anchor: Anchor) -> list[torch.Tensor]:
        """The states at each constant λ that the anchor needs."""
        found = []
        for strength in anchor.strengths:
            with gate_override(self.model, constant=strength, adapter_name=self.adapter_name):
                found.append(self.states(batch))
        return found

    def anchored(
        self,
        states: torch.Tensor,
        anchor_states: Sequence[torch.Tensor],
        anchor: Anchor,
        entropy_weight: float,
        kl_weight: float,
    ) -> AnchoredLoss:
        """w_H · H + w_K · KL to the anchor per response token; see `anchored_loss`."""
        if not self.fused:
            return anchored_loss_of_logits(
                states, anchor_states, anchor, entropy_weight=entropy_weight, kl_weight=kl_weight
            )
        head = self.head()
        moved = [other.to(head.weight.device) for other in anchor_states]
        states = states.to(head.weight.device)
        return anchored_loss(states, moved, head, anchor, entropy_weight=entropy_weight, kl_weight=kl_weight)

    def statistics(
        self,
        states: torch.Tensor,
        batch: Batch,
        k: int,
        outputs: tuple[str, ...] = ("log_prob", "topk_entropy"),
        gradients: tuple[str, ...] | None = ("log_prob",),
    ) -> TokenStatistics:
        """Statistics of the response tokens, each [T]; by default log p with a gradient and top-k entropy without."""
        labels_T = batch["labels"][:, 1:][counted(batch)]
        if not self.fused:
            return statistics_of_logits(states, labels_T.to(states.device), k)
        head = self.head()
        device = head.weight.device
        return head_statistics(states.to(device), head, labels_T.to(device), k=k, outputs=outputs, gradients=gradients)

    def head(self) -> Head:
        """The frozen output head; raises TrainingError where it is none any more."""
        head = read_head(self.causal)
        if head is None:
            raise TrainingError("the output head changed during training; it must stay frozen")
        return head
