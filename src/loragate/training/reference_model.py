"""The frozen model that an objective holds the trained one near: the base under its own adapter, or another model.

Either answers a batch with its next-token distributions at the labelled positions (`Reference`), in eval mode and without
a gradient, once per forward pass of the training.
"""

from __future__ import annotations

from typing import Any

import torch

from loragate.errors import ConfigError
from loragate.gates.fingerprint import base_weight_samples, config_fingerprint
from loragate.losses import add_statistics_forward
from loragate.losses.causal_head import ReferenceRequest
from loragate.losses.divergence import Reference
from loragate.training.sharding import causal_model


class BaseReference:
    """The base of a PeftModel, its adapter switched off for the pass; no second copy of the weights."""

    @torch.no_grad()
    def __call__(self, model: Any, inputs: dict[str, Any]) -> Reference:
        """The base's distributions on a batch of the trainer."""
        inner = getattr(model, "module", model)
        was_training = model.training
        model.eval()
        try:
            with inner.disable_adapter():
                answer: Reference = model(**inputs, statistics=ReferenceRequest())
        finally:
            model.train(was_training)
        return answer


class OtherReference:
    """A model of its own, kept in memory beside the one that trains.

    Raises:
        ConfigError: if its vocabulary is not that of `trained`.
    """

    def __init__(self, reference: Any, trained: Any) -> None:
        sizes = [causal_model(model).get_output_embeddings().weight.shape[0] for model in (reference, trained)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"the reference model has a vocabulary of {sizes[0]} and the model one of {sizes[1]}; a KL between them is "
                "not defined. Take a reference of the same family with the same tokenizer and padding"
            )
        self.model = reference.eval().requires_grad_(False)
        add_statistics_forward(causal_model(reference))

    @torch.no_grad()
    def __call__(self, model: Any, inputs: dict[str, Any]) -> Reference:
        """The reference's distributions on a batch of the trainer."""
        device = next(self.model.parameters()).device
        chosen = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
        }
        answer: Reference = self.model(**chosen, statistics=ReferenceRequest())
        return answer

    def identity(self) -> dict[str, Any]:
        """What makes it this model, for run.json."""
        causal = causal_model(self.model)
        return {"config": config_fingerprint(causal), "weights": base_weight_samples(causal)}
