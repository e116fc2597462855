"""Stage II as a plain loop: the method in one page, and the oracle the trainer is tested against.

No accelerate, no TRL, one process. Read this first; use `calibrate` for real runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from loragate.data import Collator
from loragate.gates import active_adapter, gate_parameters, train_gates_only
from loragate.losses import topk_entropy
from loragate.training.settings import GateTrainingSettings


def cosine_factor(step: int, warmup: int, total: int) -> float:
    """Learning-rate factor of optimiser step `step` (from 0): linear warm-up, then half a cosine to zero."""
    if step < warmup:
        return step / max(1, warmup)
    progress = (step - warmup) / max(1, total - warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def response_entropies(model: nn.Module, batch: dict[str, torch.Tensor], k: int) -> torch.Tensor:
    """Normalised top-k entropy at each response token of a batch, [tokens]; full logits, plain autograd."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    counted = batch["labels"][:, 1:] != -100
    return topk_entropy(logits[:, :-1][counted], k)


def reference_loop(
    model: nn.Module,
    encoded: Sequence[dict[str, Any]],
    settings: GateTrainingSettings,
    pad_token_id: int,
    adapter_name: str | None = None,
) -> list[float]:
    """Train the gates of a model for one pass over tokenised rows (or `max_steps`), in order; returns the loss of every step.

    The schedule must be cosine; `adapter_name` None is the active adapter.
    """
    name = active_adapter(model, adapter_name)
    train_gates_only(model, name)
    parameters = list(gate_parameters(model, name).values())
    optimizer = torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=1e-8,
        weight_decay=settings.weight_decay,
    )
    collate = Collator(pad_token_id)
    settings = settings.fitted(len(encoded))
    total = settings.steps(len(encoded))
    warmup = round(settings.warmup_ratio * total)
    losses: list[float] = []
    model.train()
    while len(losses) < total:
        for at in range(0, len(encoded), settings.batch_size):
            if len(losses) == total:
                break
            rows = encoded[at : at + settings.batch_size]
            # the denominator counts the whole batch, not each forward pass
            tokens = sum(sum(label != -100 for label in row["labels"][1:]) for row in rows)
            step_loss = 0.0
            for start in range(0, len(rows), settings.per_device_train_batch_size):
                batch = collate(rows[start : start + settings.per_device_train_batch_size])
                loss = response_entropies(model, batch, settings.k).sum() / max(tokens, 1)
                loss.backward()
                step_loss += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * cosine_factor(len(losses), warmup, total)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(step_loss)
    return losses
