"""Two checkpoints of one architecture, compared parameter by parameter.

What is to be decomposed is read whole; everything else in parts, because an embedding can be the largest tensor of a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from loragate.conversion.extract_checkpoint import Checkpoint
from loragate.conversion.extract_factors import squared_norm
from loragate.conversion.extract_layout import EMBEDDINGS, HEAD, Layout, Sources
from loragate.errors import ConfigError

PART = 1 << 24  # numbers of a tensor that are compared at a time


@dataclass
class Pair:
    """Two checkpoints whose tensors are known by the same parameter names.

    Attributes:
        tuned, start: the fine-tuned checkpoint and its base.
        ours, theirs: where each keeps its parameters.
        device: where differences are taken.
        layout: of the base.
    """

    tuned: Checkpoint
    start: Checkpoint
    ours: Sources
    theirs: Sources
    device: str
    layout: Layout

    def difference(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(difference, base weight) of a parameter that is stored as it is used."""
        ours, theirs = self.ours.of[name][0], self.theirs.of[name][0]
        self._require_shape(name, ours, theirs)
        weight = self.start.read(theirs, self.device)
        delta = self.tuned.read(ours, self.device) - weight
        self._require_finite(name, float(delta.sum()))
        return delta, weight

    def energy(self, name: str) -> float:
        """Sum of squared differences over all that a parameter is stored as; rows beyond the shorter of two vocabularies
        count in full."""
        total = 0.0
        for ours, theirs in zip(self.ours.of[name], self.theirs.of[name], strict=True):
            self._require_shape(name, ours, theirs)
            shape = self.tuned.shape(ours)
            rows = max(1, PART // max(1, math.prod(shape[1:])))
            for begin in range(0, shape[0] if shape else 1, rows):
                new, old = (
                    where.read_rows(tensor, begin, begin + rows, self.device)
                    for where, tensor in ((self.tuned, ours), (self.start, theirs))
                )
                shared = min(len(new), len(old))
                total += squared_norm(new[:shared] - old[:shared]) + squared_norm(new[shared:])
        self._require_finite(name, total)
        return total

    def _require_shape(self, name: str, ours: str, theirs: str) -> None:
        found, expected = self.tuned.shape(ours), self.start.shape(theirs)
        resized = self.layout.kinds[name] in (EMBEDDINGS, HEAD) and found[1:] == expected[1:]
        if found != expected and not resized:
            raise ConfigError(
                f"{name} has shape {found} in {self.tuned.name} and {expected} in {self.start.name}; they are not of one "
                "architecture"
            )

    def _require_finite(self, name: str, total: float) -> None:
        if not math.isfinite(total):
            raise ConfigError(
                f"{name} contains NaN or infinity in {self.tuned.name} or {self.start.name}; one of the two is damaged"
            )

    def notes(self) -> list[str]:
        """What a person should know about how the two are stored, as sentences."""
        found = []
        if self.ours.tied != self.theirs.tied:
            tied, own = ("base", "fine-tuned model") if self.theirs.tied else ("fine-tuned model", "base")
            found.append(
                f"the {own} has an output head of its own, the {tied}'s is its embedding; the head is left out"
            )
        for where, sources in ((self.tuned, self.ours), (self.start, self.theirs)):
            strange = [name for name in sources.foreign if not name.endswith(("inv_freq", "masked_bias", "attn.bias"))]
            if strange:
                found.append(
                    f"{where.name} holds {len(strange)} tensors that are no part of the language model (such as {strange[0]}); "
                    "they were not compared"
                )
        return found
