"""The last decoder layer computed only where something reads it.

What the last layer's query projection, output projection and MLP give at a position goes into that position's final hidden
state and nowhere else, and the loss reads the hidden states of response positions alone. Keys and values stay whole. The
rows travel as a keyword of the layer's call, so that a layer recomputed for the backward pass (gradient checkpointing) sees
the rows of its own forward pass; where transformers recomputes the layer with its hooks, as its older versions do, the rows are
laid out for the hooks again. A layer of another form is left as it is, and whether the saving is exact is measured on
the model itself before it is used.

Shapes: B batch, S sequence, N rows, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from loragate.errors import ConfigError
from loragate.gates.control import Recorder
from loragate.gates.gate import SignedGate
from loragate.losses import StatisticsRequest
from loragate.modes import evaluation_mode
from loragate.training.sharding import decoder_layers

_KEYWORD = "loragate_rows"
_ATTENTION = "self_attn"
_PER_POSITION = ("self_attn.q_proj", "self_attn.o_proj", "mlp")
_ROUTED = ("experts", "router", "gate")
_RECOMPUTE = "_gradient_checkpointing_func"  # of transformers, on every layer that is to be recomputed


class LastLayer:
    """The hooks on one decoder layer; without `reading` they change nothing.

    Attributes:
        reason: why the layer runs whole, None where it can run on some rows.
    """

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason
        self.layer: nn.Module | None = None
        self.modules: list[nn.Module] = []
        self.handles: list[Any] = []
        self.asked: torch.Tensor | None = None  # by the forward pass that begins
        self.rows: torch.Tensor | None = None  # of the layer call that runs
        self.shape: torch.Size = torch.Size()
        self.arrived = False

    def install(self, layer: nn.Module) -> None:
        """Put the hooks on a layer; `reason` says why where its form is not known."""
        parts = dict(layer.named_modules())
        self.modules = [parts[name] for name in _PER_POSITION if name in parts]
        if _ATTENTION not in parts or "mlp" not in parts:
            self.reason = f"{type(layer).__name__} has no {_ATTENTION} and mlp"
        elif any(hasattr(parts["mlp"], name) for name in _ROUTED):
            self.reason = f"the mlp of {type(layer).__name__} routes its tokens"
        elif any(isinstance(module, nn.Dropout) and module.p > 0 for module in layer.modules()):
            self.reason = "dropout would draw other numbers for fewer positions"
        if self.reason is not None:
            return
        self.layer = layer
        self.handles = [
            layer.register_forward_pre_hook(self._hand_over, with_kwargs=True),
            parts[_ATTENTION].register_forward_pre_hook(self._receive, with_kwargs=True),
        ]
        for module in self.modules:
            self.handles.append(module.register_forward_pre_hook(self._select))
            self.handles.append(module.register_forward_hook(self._spread))

    def remove(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    @contextmanager
    def reading(self, labels_BS: torch.Tensor) -> Iterator[None]:
        """Forward passes inside the context serve the positions that predict a label or carry one, and no others.

        Those that carry one are kept for `record_gates`, which counts them.
        """
        if self.reason is not None:
            yield
            return
        rows = read_rows(labels_BS)
        if 0 < rows.numel() < labels_BS.numel():
            self.asked = rows
        recorders = [
            gate.recorder
            for module in self.modules
            for gate in module.modules()
            if isinstance(gate, SignedGate) and isinstance(gate.recorder, Recorder)
        ]
        for recorder in recorders:
            recorder.positions = self.asked
        try:
            with self._recomputed_alike():
                yield
        finally:
            self.asked = None
            for recorder in recorders:
                recorder.positions = None

    @contextmanager
    def _recomputed_alike(self) -> Iterator[None]:
        """A layer called inside the context is recomputed with the rows of this context."""
        # set on the instance, by transformers, once the layer is to be recomputed
        recompute = vars(self.layer).get(_RECOMPUTE) if self.layer is not None else None
        if recompute is None:
            yield
            return
        rows = self.asked  # of this forward pass; when its backward pass comes, another may have been made

        def again(function: Any, *args: Any, **kwargs: Any) -> Any:
            def with_rows(*inputs: Any, **more: Any) -> Any:
                before, self.asked = self.asked, rows
                try:
                    return function(*inputs, **more)
                finally:
                    self.asked = before

            return recompute(with_rows, *args, **kwargs)

        setattr(self.layer, _RECOMPUTE, again)
        try:
            yield
        finally:
            setattr(self.layer, _RECOMPUTE, recompute)

    def _hand_over(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return None if self.asked is None else (args, {**kwargs, _KEYWORD: self.asked})

    def _receive(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        # attention is handed all keywords of its layer, before the projections inside it and the MLP after it are called
        self.rows = kwargs.pop(_KEYWORD, None)
        self.arrived |= self.rows is not None
        return args, kwargs

    def _select(self, module: nn.Module, args: Any) -> Any:
        if self.rows is None:
            return None
        inner, *rest = args
        self.shape = inner.shape[:-1]  # [B, S]
        chosen_ND = inner.reshape(-1, inner.shape[-1]).index_select(0, self.rows.to(inner.device))
        return (chosen_ND.unsqueeze(0), *rest)  # [1, N, D] in place of [B, S, D]

    def _spread(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if self.rows is None:
            return None
        width = output.shape[-1]
        # zeros where nothing reads: the residual stream passes there
        whole = output.new_zeros(self.shape.numel(), width)
        return whole.index_copy(0, self.rows.to(output.device), output.reshape(-1, width)).view(*self.shape, width)


def read_rows(labels_BS: torch.Tensor) -> torch.Tensor:
    """Flat positions [N] that predict a label (the next position has one) or carry one, in order."""
    carries = labels_BS != -100
    read = carries.clone()
    read[:, :-1] |= carries[:, 1:]
    return read.reshape(-1).nonzero().squeeze(-1)


@contextmanager
def read_positions_only(model: Any, causal: Any) -> Iterator[LastLayer]:
    """Hooks on the last decoder layer inside the context, once they have proved exact on this model.

    Args:
        model: what is called with `statistics=`, wrappers included.
        causal: the causal LM inside it.
    """
    found = LastLayer()
    try:
        try:
            found.install(decoder_layers(causal)[-1])
        except ConfigError as error:
            found.reason = str(error)
        if found.reason is None:
            found.reason = _difference(model, causal, found)
            if found.reason is not None:
                found.remove()
        yield found
    finally:
        found.remove()


@torch.no_grad()
def _difference(model: Any, causal: Any, last: LastLayer) -> str | None:
    """None if a few tokens get the same log-probabilities with and without the saving, else what was found."""
    weight = causal.get_input_embeddings().weight
    size = causal.config.get_text_config().vocab_size
    # twelve tokens spread over the vocabulary
    ids = (torch.arange(1, 13, device=weight.device) * max(1, size // 13) % size).view(2, 6)
    labels = ids.clone()
    labels[0, [0, 1, 2, 4]] = labels[1, [0, 2, 3, 5]] = -100
    request = StatisticsRequest(2, ("log_prob",), ())
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "statistics": request}
    try:
        with evaluation_mode(model):
            whole = model(**batch).log_prob
            with last.reading(labels):
                some = model(**batch).log_prob
    except TypeError as error:
        return f"the layer does not take a keyword: {error}"
    if not last.arrived:
        return "the layer does not hand its keywords on"
    half = weight.dtype in (torch.bfloat16, torch.float16)
    limit = (2e-2 if half else 1e-4) * max(1.0, float(whole.abs().max()))
    gap = float((whole - some).abs().max())
    return None if gap <= limit else f"log-probabilities would differ by {gap:.2g}"
