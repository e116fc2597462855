"""What one training step keeps in memory, found by running the step itself on tensors without data.

A few decoder layers of the model run forward, through the token-statistics head and backward on fake tensors: every storage
that the real step would allocate is made and freed at the same moments, but holds nothing. So LoRA, gates, autocast, gradient
checkpointing and the head's chunks need no formula of their own. Memory is linear in layers and in rows, so two sizes of each
give the rest. The fused attention of a CPU keeps what that of a GPU keeps: q, k, v, the output, one number per query, the mask.
"""

from __future__ import annotations

import math
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from loragate.analysis.plan_model import build_on_meta, layer_period, with_layers
from loragate.losses import token_statistics
from loragate.losses.causal_head import read_head
from loragate.losses.tiling import tiling
from loragate.training.model_state import start_recomputing

# attention over rows of one length needs no mask, but transformers cannot see from a tensor without data that it may leave it out
UNPADDED = "loragate_unpadded"
AttentionInterface.register(UNPADDED, sdpa_attention_forward)
AttentionMaskInterface.register(UNPADDED, lambda *_, **__: None)


@dataclass(frozen=True)
class Workload:
    """One forward and backward pass on one device.

    Attributes:
        stage, rank, targets, k: as in the request of a plan.
        sequence, rows: tokens per row, and rows per pass (the micro-batch).
        response_share: share of the tokens that are response tokens.
        dtype: dtype of the base.
        autocast: "bf16", "fp16" or "" for none.
        checkpointing: recompute activations of each decoder layer in the backward pass.
        padded: rows of different lengths share a pass, so that attention needs an explicit mask.
        device: "cuda" or "cpu"; the head's chunk sizes differ.
        accumulating: gradients of an earlier pass are in memory (gradient accumulation).
    """

    stage: str
    sequence: int
    rows: int = 1
    response_share: float = 0.75
    rank: int = 16
    targets: str = "all-linear"
    k: int = 100
    dtype: torch.dtype = torch.bfloat16
    autocast: str = "bf16"
    checkpointing: bool = False
    padded: bool = False
    device: str = "cuda"
    accumulating: bool = False

    def chunk(self, vocabulary: int, width: int) -> int:
        """Tokens per chunk of the head on this device, on which the traced tensors do not lie."""
        widened = self.device == "cpu" and self.dtype.itemsize < 4
        return tiling(vocabulary, width, self.device, widened=widened).tokens


class Footprint(NamedTuple):
    """Bytes of one pass beyond weights, trained parameters and optimiser; each is linear in layers and rows.

    Attributes:
        saved: activations that are alive when the backward pass begins.
        forward, head: peaks while the body, and the head, run forward.
        head_backward, backward: peaks until the gradient has left the head, and after that.
    """

    saved: float
    forward: float
    head: float
    head_backward: float
    backward: float

    @property
    def temporary(self) -> float:
        """What the worst moment needs beyond what is kept."""
        return max(self) - self.saved


class Tracer:
    """Footprints of one model for any number of rows and all of its layers, from small traces."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.known: dict[tuple[Workload, int], Footprint] = {}

    def footprint(self, workload: Workload) -> Footprint:
        """Of a pass through all layers."""
        text = self.config.get_text_config()
        chunk = workload.chunk(text.vocab_size, text.hidden_size)
        # the head's chunks grow with the rows until one is full; memory is linear from there on
        full = math.ceil(chunk / (workload.response_share * workload.sequence))
        if workload.rows <= full:
            return self._all_layers(workload)
        first, second = (self._all_layers(replace(workload, rows=full + more)) for more in (0, 1))
        return _beyond(first, second, workload.rows - full)

    def _all_layers(self, workload: Workload) -> Footprint:
        few = layer_period(self.config)
        for layers in (few, 2 * few):
            if (workload, layers) not in self.known:
                self.known[workload, layers] = trace_step(self.config, workload, layers)
        distance = self.config.get_text_config().num_hidden_layers / few - 1
        return _beyond(self.known[workload, few], self.known[workload, 2 * few], distance)


def _beyond(first: Footprint, second: Footprint, distance: float) -> Footprint:
    """The straight line through two footprints, `distance` steps beyond the first."""
    return Footprint(*(max(0.0, low + (high - low) * distance) for low, high in zip(first, second, strict=True)))


def trace_step(config: Any, workload: Workload, layers: int) -> Footprint:
    """Run one pass through the first `layers` layers on fake tensors and read off the footprint."""
    reduced = with_layers(config, layers)
    if getattr(reduced.get_text_config(), "attn_logit_softcapping", None) is not None:
        reduced._attn_implementation = "eager"
    else:
        reduced._attn_implementation = "sdpa" if workload.padded else UNPADDED
    with warnings.catch_warnings(action="ignore"):  # of libraries, about a model that never runs
        model = build_on_meta(reduced, workload.stage, workload.rank, workload.targets, workload.dtype)
        model.train()
        if workload.checkpointing:
            start_recomputing(model)
            model.enable_input_require_grads()
        with FakeTensorMode():
            materialise(model)
            return _run(model, workload)


def _run(model: Any, workload: Workload) -> Footprint:
    ids, mask = (torch.empty((workload.rows, workload.sequence), dtype=torch.int64) for _ in range(2))
    causal = model.get_base_model()
    head = read_head(causal)
    if head is None:
        raise NotImplementedError("the output head is not one frozen linear map")
    # on a GPU low-precision weights are multiplied as they are; a widened copy exists on a CPU only
    weight = head.weight if workload.device == "cpu" else torch.empty(head.weight.shape, dtype=torch.float32)
    wanted = ("topk_entropy",) if workload.stage == "calibrate" else ("log_prob",)
    owned = [*model.parameters(), *model.buffers(), weight, ids, mask]
    if workload.accumulating:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
                owned.append(parameter.grad)
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(workload.autocast)
    tracker = StorageTracker(owned)
    with tracker, KnownSelection(max(1, int(workload.response_share * ids.numel()))):
        with torch.autocast("cpu", dtype=precision) if precision else nullcontext():
            hidden = causal.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            forward = tracker.restart()
            past_head: list[float] = []
            hidden.register_hook(lambda gradient: past_head.append(tracker.restart()))
            stats = token_statistics(
                hidden[:, :-1],
                weight,
                ids[:, 1:],
                k=workload.k,
                bias=head.bias,
                scale=head.scale,
                softcap=head.softcap,
                outputs=wanted,
                gradients=wanted,
                chunk_tokens=workload.chunk(*weight.shape),
            )
        del hidden
        loss = getattr(stats, wanted[0]).sum()
        del stats
        saved = tracker.live
        on_head = tracker.restart()
        loss.backward()
        return Footprint(saved, forward, on_head, past_head[0], tracker.peak)


def materialise(model: nn.Module) -> None:
    """Meta parameters and buffers become fake ones that look like CPU memory, which autocast and autograd accept."""
    made: dict[int, nn.Parameter] = {}  # shared parameters stay shared
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                fake = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made.setdefault(id(parameter), fake)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


class StorageTracker(TorchDispatchMode):
    """Bytes of all storages alive, and the most there ever were; `owned` tensors do not count."""

    def __init__(self, owned: list[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0.0
        self.sizes: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in owned}

    def restart(self) -> float:
        """The peak so far; the next one is counted from what is alive now."""
        peak, self.peak = self.peak, self.live
        return peak

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._drop, storage._cdata)
        return out

    def _drop(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0)


class KnownSelection(TorchFunctionMode):
    """`tensor[mask]` with a mask that selects a known number of positions: fake tensors cannot count them."""

    def __init__(self, selected: int) -> None:
        super().__init__()
        self.selected = selected

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool:
            flat = args[0].flatten(0, args[1].dim() - 1)
            return flat.index_select(0, torch.empty(min(self.selected, flat.shape[0]), dtype=torch.int64))
        return function(*args, **(kwargs or {}))
