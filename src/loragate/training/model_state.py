"""What a run switches on in the model that it is given, and takes back: statistics, dropout, gradient checkpointing, mode.

Newer versions of transformers call gradient checkpointing activation checkpointing and warn at every use of the old name, which
is the only one that older versions know. Which of the two holds is read off the model or the class, never off a version
number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from loragate.errors import ConfigError, SetupError
from loragate.gates.eligibility import output_head
from loragate.losses import add_statistics_forward
from loragate.losses.causal_head import causal_model
from loragate.modes import restore_training_modes

_NEW, _OLD = "activation_checkpointing", "gradient_checkpointing"


def require_causal_model(model: Any, what: str, otherwise: str) -> None:
    """Refuse (SetupError) a model that predicts no next token from logits [batch, sequence, vocabulary].

    `what` would be trained, in the plural; `otherwise` is a sentence that says how it can be.
    """
    base = causal_model(model)
    encoder = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    if encoder or output_head(base) is None:
        has = "an encoder and a decoder" if encoder else "no output head over the vocabulary"
        raise SetupError(
            f"{what} are trained on causal language models, and {type(base).__name__} has {has}. {otherwise}"
        )


@contextmanager
def preserve_model_state(model: Any, checkpointing: bool) -> Iterator[None]:
    """Give a model back as it came: modes, forward (autocast wraps it) and gradient checkpointing.

    accelerate marks a model that it has wrapped and wraps it no second time: with the mark left on it, the next training in this
    process would compute in fp32 whatever its precision is.
    """
    kind = _NEW if hasattr(model, f"is_{_NEW}") else _OLD
    added = checkpointing and not getattr(model, f"is_{kind}", False)
    kept = {name: model.__dict__.get(name) for name in ("forward", "_original_forward", "_is_accelerate_prepared")}
    try:
        with restore_training_modes(model):
            yield
    finally:
        # in the instance's own dictionary: what was not there before must not hide the class's method afterwards
        for name, value in kept.items():
            model.__dict__.pop(name, None)
            if value is not None:
                model.__dict__[name] = value
        if added:
            getattr(model, f"{kind}_disable")()
            if hasattr(model, "disable_input_require_grads"):
                model.disable_input_require_grads()


@contextmanager
def statistics_forward(model: Any) -> Iterator[bool]:
    """The model answers `statistics=` inside the context; its own forward is restored afterwards.

    Yields:
        Whether the fused head is used (False: full logits, slower).
    """
    causal = causal_model(model)
    before = causal.__dict__.get("forward")
    had = "_loragate_statistics" in causal.__dict__
    try:
        yield add_statistics_forward(causal, getattr(causal, "_loragate_verified_head", None))
    finally:
        if not had:
            for name in ("_loragate_statistics", "_loragate_forward", "forward"):
                causal.__dict__.pop(name, None)
            if before is not None:
                causal.forward = before


def train_in_fp32(model: Any) -> None:
    """Trainable parameters of half precision become fp32: an optimiser's small steps are lost in bf16.

    PEFT does so with factors. Norms, heads and embeddings that an adapter saves whole have the base's precision; they then
    compute in fp32, between casts of what they read and give. A ConfigError for a module that multiplies by a frozen weight too.
    """
    trained = {id(p): p for p in model.parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)}
    holders = []
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        names = [name for name, parameter in own.items() if id(parameter) in trained]
        if names and any(not parameter.requires_grad for parameter in own.values()):
            raise ConfigError(
                f"the adapter trains {names[0]!r} of {path}, which is in half precision beside a frozen weight: the two must be "
                "of one precision, and small steps are lost in half precision. Load the base in fp32 (--dtype float32)"
            )
        if names:
            holders.append((module, own[names[0]].dtype))
    for parameter in trained.values():
        parameter.data = parameter.data.float()
    for module, dtype in holders:
        module.register_forward_pre_hook(_in_own_precision, with_kwargs=True)
        module.register_forward_hook(lambda _, args, output, dtype=dtype: _cast(output, dtype))


def _in_own_precision(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast((args, kwargs), next(module.parameters(recurse=False)).dtype)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors, in whatever they are nested, in another precision."""
    return pytree.tree_map_only(
        torch.Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, values
    )


def iter_dropouts(model: torch.nn.Module) -> Iterator[tuple[Any, str, float]]:
    """(module or its config, attribute, share) of every dropout that may act in training."""
    # the modules of transformers also keep plain numbers (hidden_dropout, resid_pdrop, layerdrop); Falcon reads its config's
    holders = (holder for module in model.modules() for holder in (module, vars(module).get("config")))
    for holder in {id(holder): holder for holder in holders}.values():
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            share = "drop" in name or (name == "p" and isinstance(holder, torch.nn.Dropout))
            if share and isinstance(value, float) and 0 < value <= 1:
                yield holder, name, value


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """No dropout inside the context: Stage II trains on the function that will be served."""
    changed = list(iter_dropouts(model))
    for holder, name, _ in changed:
        setattr(holder, name, 0.0)
    try:
        yield
    finally:
        for holder, name, value in changed:
            setattr(holder, name, value)
