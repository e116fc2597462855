"""The memory of a training step, from one that runs without data.

A few decoder layers of the model, with LoRA and gates, run forward, through the token-statistics head and backward on fake
tensors: every storage that the real step would allocate is made and freed at the same moments, but holds nothing. So biases,
experts, autocast, gradient checkpointing and the head's chunks need no formula. The peak is linear in layers, so two small
traces give it for all of them. The fused attention of a CPU keeps what that of a GPU keeps: q, k, v, the output, one number
per query, the mask.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from loragate.analysis.counts import base_dtype, build_on_meta
from loragate.analysis.settings import Request
from loragate.losses import StatisticsRequest, add_statistics_forward
from loragate.training.model_state import start_recomputing

# attention over rows of one length needs no mask, but transformers cannot see from a tensor without data that it may leave it out
UNPADDED = "loragate_unpadded"
AttentionInterface.register(UNPADDED, sdpa_attention_forward)
AttentionMaskInterface.register(UNPADDED, lambda *_, **__: None)


def with_layers(config: Any, layers: int) -> Any:
    """The same configuration with fewer (or more) decoder layers."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == text.num_hidden_layers:  # an entry for each layer
            setattr(text, name, [value[at % len(value)] for at in range(layers)])
    text.num_hidden_layers = layers
    return changed


def layer_period(config: Any) -> int:
    """After how many decoder layers their kinds repeat (1 where all are alike)."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or [""]
    periods = range(1, len(kinds) + 1)
    return next(period for period in periods if all(kind == kinds[at % period] for at, kind in enumerate(kinds)))


@dataclass(frozen=True)
class Step:
    """A pass over rows of one model, as a plan runs it.

    Attributes:
        way: the training; its model, GPUs and strategy do not count.
        padded: rows of different lengths share the pass, so that attention needs a mask.
        response_share: share of the tokens that are response tokens.
    """

    config: Any
    way: Request
    padded: bool
    response_share: float = 0.75

    def peak(self) -> float:
        """Bytes at the worst moment, beyond weights and what trained parameters, their gradients and the optimiser hold."""
        few = max(2, layer_period(self.config))  # the first layer of all needs no gradient of its input
        first, second = self.trace(few), self.trace(2 * few)
        # second − first is what `few` layers more take, of which the model has layers / few − 1 times as many
        return first + (second - first) * (self.config.get_text_config().num_hidden_layers / few - 1)

    def trace(self, layers: int) -> float:
        """The same of a model with so many layers, run on fake tensors."""
        way, reduced = self.way, with_layers(self.config, layers)
        softcapped = getattr(reduced.get_text_config(), "attn_logit_softcapping", None) is not None
        reduced._attn_implementation = "eager" if softcapped else "sdpa" if self.padded else UNPADDED
        wanted = ("topk_entropy",) if way.stage == "calibrate" else ("log_prob",)
        asked = StatisticsRequest(way.k, outputs=wanted, gradients=wanted)
        precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(way.precision)
        with warnings.catch_warnings(action="ignore"):  # of libraries, about a model that never runs
            dtype = base_dtype(self.config, way.dtype)
            model = build_on_meta(reduced, way.stage, way.rank, way.target_modules, dtype)
            model.train()
            if way.recomputes:
                start_recomputing(model)
                model.enable_input_require_grads()
            add_statistics_forward(model.get_base_model(), verified=True)
            with FakeTensorMode():
                materialise(model)
                ids, mask = (torch.empty((way.micro_batch, way.seq), dtype=torch.int64) for _ in range(2))
                trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
                for parameter in trained:  # as an earlier pass left them
                    parameter.grad = torch.empty_like(parameter)
                gradients = [parameter.grad for parameter in trained]
                # weights, gradients and the batch itself are no activations
                tracker = StorageTracker([*model.parameters(), *model.buffers(), *gradients, ids, mask])
                with tracker, KnownSelection(max(1, int(self.response_share * ids.numel()))):
                    with torch.autocast("cpu", dtype=precision) if precision else nullcontext():
                        stats = model(input_ids=ids, attention_mask=mask, labels=ids, statistics=asked)
                    loss = getattr(stats, wanted[0]).sum()
                    del stats  # as in training, where only the loss outlives the forward pass
                    loss.backward()
        return tracker.peak


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
        # by address of the storage, which views share; an address can come again once its storage is gone
        self.sizes: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in owned}

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
