"""What one training step keeps in memory, found by running the step itself on tensors without data.

A few decoder layers of the model run forward, through the token-statistics head and backward on fake tensors: every
storage that the real step would allocate is made and freed at the same moments, but holds nothing. So LoRA, gates,
autocast, gradient checkpointing and the head's chunks need no formula of their own. Memory is linear in layers and in
sequences, so two sizes of each give the rest.

Only attention on a GPU needs a stand-in, since its fused kernels are chosen there: it keeps what they keep.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loragate.analysis.plan_model import build_on_meta, layer_period, with_layers
from loragate.losses import token_statistics
from loragate.losses.causal_head import read_head
from loragate.losses.tiling import tiling
from loragate.training.model_state import start_recomputing


@dataclass(frozen=True)
class Workload:
    """One forward and backward pass on one device.

    Attributes:
        stage: "sft" or "calibrate".
        sequence: tokens per row.
        rows: rows per pass (the micro-batch).
        response_share: share of the tokens that are response tokens.
        rank, targets: of the LoRA adapter.
        k: support of the top-k entropy (Stage II).
        dtype: dtype of the base.
        autocast: "bf16", "fp16" or "" for none.
        checkpointing: recompute activations of each decoder layer in the backward pass.
        padded: rows of different lengths share a pass, so that attention needs an explicit mask.
        device: "cuda" or "cpu"; kernels and chunk sizes differ.
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


@dataclass(frozen=True)
class Footprint:
    """Bytes beyond weights, trained parameters and optimiser, of one pass.

    Attributes:
        saved: activations that are alive when the backward pass begins.
        forward: peak while the body runs forward.
        head: peak while the head runs forward.
        head_backward: peak until the gradient has left the head.
        backward: peak of the rest of the backward pass, with the parameters' gradients as they appear.

    Each is linear in layers and rows, which their maximum is not.
    """

    saved: float
    forward: float
    head: float
    head_backward: float
    backward: float

    @property
    def head_workspace(self) -> float:
        """What the head needs for a moment, beyond what is kept."""
        return max(0.0, self.head - self.saved, self.head_backward - self.saved)

    @property
    def temporary(self) -> float:
        """What the body needs for a moment, forward or backward, beyond what is kept."""
        return max(0.0, self.forward - self.saved, self.backward - self.saved)


class Traces:
    """Footprints of one model and workload for any number of rows, from at most four small traces."""

    def __init__(self, config: Any, workload: Workload) -> None:
        self.config, self.workload = config, workload
        self.layers = config.get_text_config().num_hidden_layers
        self.few = layer_period(config)
        self.corners: dict[tuple[int, int], Footprint] = {}

    def at(self, rows: int) -> Footprint:
        """The footprint of a pass over `rows` rows through all layers."""
        one = self._through_all_layers(1)
        if rows == 1:
            return one
        two = self._through_all_layers(2)
        line = _extended(one, two, rows - 1)
        response = self.workload.response_share * self.workload.sequence
        text = self.config.get_text_config()
        full = _chunk(self.workload, text.vocab_size, text.hidden_size) / response
        if not 1 <= full < rows:
            return line
        # chunks grow with the rows until one is full; after that only what is collected from all chunks does
        first = one.head - one.saved
        grown = two.head - two.saved - first
        size = text.hidden_size * self.workload.dtype.itemsize
        collected = 8 * self.workload.k if self.workload.stage == "calibrate" else 4 * text.hidden_size
        later = min(grown, response * (size + collected))
        return replace(line, head=line.saved + first + grown * (full - 1) + later * (rows - full))

    def _through_all_layers(self, rows: int) -> Footprint:
        few, more = (self._corner(layers, rows) for layers in (self.few, 2 * self.few))
        return _extended(few, more, self.layers / self.few - 1)

    def _corner(self, layers: int, rows: int) -> Footprint:
        if (layers, rows) not in self.corners:
            self.corners[layers, rows] = trace_step(self.config, replace(self.workload, rows=rows), layers)
        return self.corners[layers, rows]


def _extended(first: Footprint, second: Footprint, distance: float) -> Footprint:
    """The straight line through two footprints, `distance` steps beyond the first."""
    values = {}
    for field in fields(Footprint):
        low, high = getattr(first, field.name), getattr(second, field.name)
        values[field.name] = max(0.0, low + (high - low) * distance)
    return Footprint(**values)


def trace_step(config: Any, workload: Workload, layers: int) -> Footprint:
    """Run one pass through the first `layers` layers on fake tensors and read off the footprint."""
    reduced = with_layers(config, layers)
    reduced._attn_implementation = _attention(reduced, workload)
    model = build_on_meta(
        reduced, stage=workload.stage, rank=workload.rank, targets=workload.targets, dtype=workload.dtype
    )
    model.train()
    if workload.checkpointing:
        start_recomputing(model)
        model.enable_input_require_grads()
    with FakeTensorMode():
        materialise(model)
        return _run(model, workload)


def _run(model: Any, workload: Workload) -> Footprint:
    shape = (workload.rows, workload.sequence)
    ids, mask = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)
    causal = model.get_base_model()
    head = read_head(causal)
    if head is None:
        raise NotImplementedError("the output head is not one frozen linear map")
    weight = head.weight
    if workload.device == "cuda":
        # on a GPU low-precision weights are multiplied as they are; a widened copy exists on a CPU only
        weight = torch.empty(weight.shape, dtype=torch.float32)
    response = max(1, int(workload.response_share * workload.rows * workload.sequence))
    wanted = ("topk_entropy",) if workload.stage == "calibrate" else ("log_prob",)
    owned = [*model.parameters(), *model.buffers(), weight, ids, mask]
    if workload.accumulating:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
                owned.append(parameter.grad)
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(workload.autocast)
    tracker = _Tracker(owned)
    with tracker, _KnownMask(response):
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
                chunk_tokens=_chunk(workload, *weight.shape),
            )
        del hidden
        loss = getattr(stats, wanted[0]).sum()
        del stats
        saved = tracker.live
        on_head = tracker.restart()
        loss.backward()
        return Footprint(saved, forward, on_head, past_head[0], tracker.peak)


def _chunk(workload: Workload, vocabulary: int, width: int) -> int:
    """Tokens per chunk of the head on the workload's device, which the traced tensors do not lie on."""
    widened = workload.device == "cpu" and workload.dtype.itemsize < 4
    return tiling(vocabulary, width, workload.device, widened=widened).tokens


def materialise(model: nn.Module) -> None:
    """Meta parameters and buffers become fake ones that look like CPU memory, which autocast and autograd accept."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


class _Tracker(TorchDispatchMode):
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
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0)


class _KnownMask(TorchFunctionMode):
    """`tensor[mask]` with a mask that selects a known number of positions: fake tensors cannot count them."""

    def __init__(self, selected: int) -> None:
        super().__init__()
        self.selected = selected

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool:
            flat = args[0].flatten(0, args[1].dim() - 1)
            index = torch.empty(min(self.selected, flat.shape[0]), dtype=torch.int64)
            return flat.index_select(0, index)
        return function(*args, **(kwargs or {}))


class _FusedAttention(torch.autograd.Function):
    """Keeps what flash and memory-efficient attention keep: q, k, v, the output, one number per query, and the bias."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, bias: Any) -> Any:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32), bias)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _attention(config: Any, workload: Workload) -> str:
    """Register the attention and the mask of a workload with transformers, and return their name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        return "eager"

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        if workload.device == "cpu":
            return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        bias = None
        if mask is not None:
            groups = getattr(module, "num_key_value_groups", 1)
            key, value = repeat_kv(key, groups), repeat_kv(value, groups)
            bias = torch.empty(mask.shape, dtype=query.dtype)
        return _FusedAttention.apply(query, key, value, bias).transpose(1, 2).contiguous(), None

    def mask(*args: Any, **kwargs: Any) -> Any:
        return sdpa_mask(*args, **kwargs) if workload.padded else None

    name = f"loragate_plan_{workload.device}_{'padded' if workload.padded else 'plain'}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings of libraries about a model that never runs."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
