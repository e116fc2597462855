"""Response positions of a model: their hidden states, and token statistics there.

Where the output head is not one frozen linear map, "states" are full logits (slower).

Shapes: B sequences, S positions, T response tokens of the batch in row order, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from loragate.errors import TrainingError
from loragate.losses import verify_head
from loragate.losses.causal_head import Head, read_head
from loragate.losses.divergence import Combine, Reference, reference_statistics
from loragate.losses.head import IGNORED, TokenStatistics, head_statistics, statistics_of_logits
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

    def against(
        self, states: torch.Tensor, batch: Batch, passes: Sequence[torch.Tensor], combine: Combine
    ) -> TokenStatistics:
        """Statistics with the KL to a reference that is made of other `states` of the batch; all with a gradient."""
        labels_T, together = batch["labels"][:, 1:][counted(batch)], torch.stack(list(passes))
        if not self.fused:
            log_r_TV = Reference(together, None, combine).log_probs(states.shape[-1])
            return statistics_of_logits(states, labels_T.to(states.device), 0, log_r_TV)
        head = self.head()
        device = head.weight.device
        return reference_statistics(states.to(device), head, labels_T.to(device), Reference(together, head, combine))

    def head(self) -> Head:
        """The frozen output head; raises TrainingError where it is none any more."""
        head = read_head(self.causal)
        if head is None:
            raise TrainingError("the output head changed during training; it must stay frozen")
        return head
