"""A training step as a plan sees it: the model's real modules without weights, counted, and one step run without data.

The model is built on the meta device from its configuration, with LoRA and gates on it, so a 70B model takes a second or two.
Then a few of its decoder layers run forward, through the token-statistics head and backward on fake tensors: every storage that
the real step would allocate is made and freed at the same moments, but holds nothing. So biases, experts, autocast, gradient
checkpointing and the head's chunks need no formula. Memory is linear in layers and in rows, so two sizes of each give the rest.
The fused attention of a CPU keeps what that of a GPU keeps: q, k, v, the output, one number per query, the mask.
"""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.pytorch_utils import Conv1D

from loragate.analysis.settings import Request
from loragate.errors import ConfigError
from loragate.gates.attach import gate_layer
from loragate.gates.config import GateConfig
from loragate.gates.eligibility import examine_adapter, lora_layers
from loragate.losses import token_statistics
from loragate.losses.causal_head import read_head
from loragate.losses.tiling import tiling
from loragate.training.model_state import start_recomputing
from loragate.training.sharding import decoder_layers
from loragate.validate import comma_list

LINEAR = (nn.Linear, Conv1D)  # GPT-2 keeps the weights of its linear layers transposed
# attention over rows of one length needs no mask, but transformers cannot see from a tensor without data that it may leave it out
UNPADDED = "loragate_unpadded"
AttentionInterface.register(UNPADDED, sdpa_attention_forward)
AttentionMaskInterface.register(UNPADDED, lambda *_, **__: None)


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, and the shapes that cost and memory follow from.

    Attributes:
        gates: 0 for Stage I.
        linear: weights of the base's linear layers and experts, without the output head: what is quantised.
        active: of these, the weights that one token passes through (fewer than `linear` with experts).
        block, root: parameters of the largest decoder layer, and outside the decoder layers (embeddings, head, final norm).
        largest_linear: weights of the largest single linear layer.
        widest: d_in + 4 d_out of an adapted layer, at most: bytes of a token's input and product in 8 bits.
        attention: layers × heads × head size.
    """

    base: int
    lora: int
    gates: int
    linear: int
    active: int
    head: int
    block: int
    root: int
    largest_linear: int
    widest: int
    hidden: int
    attention: int

    def trained(self, stage: str) -> int:
        """Parameters that get gradients and optimiser state."""
        return self.gates if stage == "calibrate" else self.lora

    def flops(
        self, stage: str, sequence: int, *, response_share: float = 0.75, k: int = 100, recompute: bool = False
    ) -> float:
        """Floating-point operations per token of a training step on rows of `sequence` tokens.

        Matrix products are counted, 2 per weight and token. The frozen base needs no weight gradients, so a step is a forward
        and an activation backward of the body, what the trained parameters take, and the head on the response positions alone,
        whose backward is sparse for the top-k entropy. "sft" with response_share 1 is a plain LoRA step with full logits;
        `recompute` runs the body's forward twice (gradient checkpointing).
        """
        # scores and weighted values, two products each over the whole sequence (full attention, no causal saving)
        attention = 4 * self.attention * sequence
        forward = 2 * self.active + attention + 2 * self.lora
        backward = 2 * self.active + 2 * attention + 2 * self.lora
        if stage == "calibrate":
            own, head = 4 * self.gates, 2 * self.head + 2 * k * self.hidden
        else:
            own, head = 2 * self.lora, 4 * self.head
        return float(forward + backward + own + response_share * head + recompute * forward)


def base_dtype(config: Any, dtype: str = "auto") -> torch.dtype:
    """The dtype the base is loaded in: the checkpoint's own for "auto"."""
    chosen = getattr(config.get_text_config(), "dtype", None) if dtype == "auto" else getattr(torch, dtype)
    if isinstance(chosen, str):
        chosen = getattr(torch, chosen)
    return chosen or torch.float32


def build_on_meta(
    config: Any, stage: str, rank: int = 16, targets: str = "all-linear", dtype: torch.dtype | None = None
) -> Any:
    """A PeftModel on the meta device with LoRA factors, and for Stage II gates; only what trains requires a gradient."""
    names: Any = targets if targets == "all-linear" else comma_list(targets)
    record = LoraConfig(r=rank, lora_alpha=rank, target_modules=names, task_type="CAUSAL_LM")
    try:
        with torch.device("meta"):
            base = AutoModelForCausalLM.from_config(config, dtype=dtype or base_dtype(config))
            model: Any = get_peft_model(base, record)
    except ValueError as error:
        raise ConfigError(f"the model cannot be planned: {str(error).splitlines()[0][:300]}") from error
    if stage == "calibrate":
        # `attach_gates` refuses a model without weights, rightly; a plan needs the modules only
        paths = {verdict.path for verdict in examine_adapter(model, "default") if verdict.status == "gate"}
        model.requires_grad_(False)
        for path, layer in lora_layers(model, "default"):
            if path in paths:
                gate_layer(layer, path, GateConfig(-1.0, 2.0), "default")
                layer.lora_gate.requires_grad_(True)
    return model


def count_parameters(model: Any, config: Any) -> Parameters:
    """Counts of a model made by `build_on_meta`."""
    text, causal = config.get_text_config(), model.get_base_model()
    head = causal.get_output_embeddings()

    def size(module: nn.Module, *kinds: str) -> int:
        """Parameters of these parts of adapters; without one, those of the base."""
        named = module.named_parameters()
        return sum(
            p.numel() for name, p in named if (any(kind in name for kind in kinds) if kinds else ".lora_" not in name)
        )

    linears = [
        module.weight
        for name, module in causal.named_modules()
        if isinstance(module, LINEAR) and module is not head and ".lora_" not in name
    ]
    # fused experts are 3-dimensional parameters; a token passes only the experts it is routed to
    fused = [p for name, p in causal.named_parameters() if ".lora_" not in name and p.dim() == 3]
    linear, in_experts = (sum(weight.numel() for weight in weights) for weights in (linears, fused))
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    blocks: list[int] = []
    with suppress(ConfigError):  # without repeated layers everything is in the root
        blocks = [size(layer) for layer in decoder_layers(causal)]
    adapted = [layer for _, layer in lora_layers(model, "default") if isinstance(layer.get_base_layer(), LINEAR)]
    heads = getattr(text, "num_attention_heads", 0)
    return Parameters(
        base=size(model),
        lora=size(model, ".lora_A.", ".lora_B."),
        gates=size(model, ".lora_gate."),
        linear=linear + in_experts,
        active=linear + in_experts * getattr(text, "num_experts_per_tok", 1) // experts,
        head=head.weight.numel(),
        block=max(blocks, default=0),
        root=size(model) - sum(blocks),
        largest_linear=max((weight.numel() for weight in [*linears, *fused]), default=0),
        widest=max((layer.in_features + 4 * layer.out_features for layer in adapted), default=0),
        hidden=text.hidden_size,
        attention=text.num_hidden_layers * heads * head_size(text) if heads else 0,
    )


def head_size(text: Any) -> int:
    """Width of one attention head, by the text configuration of a model."""
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def with_layers(config: Any, layers: int) -> Any:
    """The same configuration with fewer (or more) decoder layers."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    before = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before and before > 1:
            setattr(text, name, [value[index % before] for index in range(layers)])
    text.num_hidden_layers = layers
    return changed


def layer_period(config: Any) -> int:
    """After how many decoder layers their kinds repeat (1 where all are alike)."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or [""]
    periods = range(1, len(kinds) + 1)
    return next(period for period in periods if all(kind == kinds[at % period] for at, kind in enumerate(kinds)))


class Footprint(NamedTuple):
    """Bytes of one pass beyond weights, trained parameters and optimiser; each is linear in layers and rows.

    `saved` are activations that are alive when the backward pass begins; the others are peaks: while body and head run forward,
    until the gradient has left the head, and after that.
    """

    saved: float
    forward: float
    head: float
    head_backward: float
    backward: float

    def beyond(self, other: Footprint, distance: float) -> Footprint:
        """On the straight line through this and another one, `distance` steps beyond this one."""
        return Footprint(*(max(0.0, low + (high - low) * distance) for low, high in zip(self, other, strict=True)))


class Tracer:
    """Footprints of one model for any number of rows and all of its layers, from small traces.

    Args:
        response_share: share of the tokens that are response tokens.
        device: "cuda" or "cpu"; the head's chunk sizes differ.
    """

    def __init__(self, config: Any, *, response_share: float = 0.75, device: str = "cuda") -> None:
        self.config, self.response_share, self.device = config, response_share, device
        self.known: dict[tuple[Any, ...], Footprint] = {}

    def chunk(self, vocabulary: int, width: int, dtype: torch.dtype) -> int:
        """Tokens per chunk of the head on the device, on which the traced tensors do not lie."""
        widened = self.device == "cpu" and dtype.itemsize < 4
        return tiling(vocabulary, width, self.device, widened=widened).tokens

    def footprint(self, way: Request, *, padded: bool) -> Footprint:
        """Of a pass through all layers; where rows of different lengths share it (padded), attention needs a mask."""
        text, rows = self.config.get_text_config(), way.micro_batch
        chunk = self.chunk(text.vocab_size, text.hidden_size, base_dtype(self.config, way.dtype))
        # the head's chunks grow with the rows until one is full; memory is linear from there on
        full = math.ceil(chunk / (self.response_share * way.seq))
        if rows <= full:
            return self._all_layers(way, rows, padded)
        return self._all_layers(way, full, padded).beyond(self._all_layers(way, full + 1, padded), rows - full)

    def _all_layers(self, way: Request, rows: int, padded: bool) -> Footprint:
        few = layer_period(self.config)
        first, second = (self.trace(way, rows, layers, padded) for layers in (few, 2 * few))
        return first.beyond(second, self.config.get_text_config().num_hidden_layers / few - 1)

    def trace(self, way: Request, rows: int, layers: int, padded: bool) -> Footprint:
        """Run one pass through the first `layers` layers on fake tensors and read off the footprint."""
        key = (way.stage, way.seq, way.recomputes, way.accumulates, rows, layers, padded)
        if key not in self.known:
            reduced = with_layers(self.config, layers)
            softcapped = getattr(reduced.get_text_config(), "attn_logit_softcapping", None) is not None
            reduced._attn_implementation = "eager" if softcapped else "sdpa" if padded else UNPADDED
            with warnings.catch_warnings(action="ignore"):  # of libraries, about a model that never runs
                dtype = base_dtype(self.config, way.dtype)
                model = build_on_meta(reduced, way.stage, way.rank, way.target_modules, dtype)
                model.train()
                if way.recomputes:
                    start_recomputing(model)
                    model.enable_input_require_grads()
                with FakeTensorMode():
                    materialise(model)
                    self.known[key] = self._run(model, way, rows)
        return self.known[key]

    def _run(self, model: Any, way: Request, rows: int) -> Footprint:
        ids, mask = (torch.empty((rows, way.seq), dtype=torch.int64) for _ in range(2))
        causal = model.get_base_model()
        head = read_head(causal)
        if head is None:
            raise NotImplementedError("the output head is not one frozen linear map")
        # on a GPU low-precision weights are multiplied as they are; a widened copy exists on a CPU only
        weight = head.weight if self.device == "cpu" else torch.empty(head.weight.shape, dtype=torch.float32)
        wanted = ("topk_entropy",) if way.stage == "calibrate" else ("log_prob",)
        owned = [*model.parameters(), *model.buffers(), weight, ids, mask]
        if way.accumulates:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)
                    owned.append(parameter.grad)
        precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(way.precision)
        tracker = StorageTracker(owned)
        with tracker, KnownSelection(max(1, int(self.response_share * ids.numel()))):
            with torch.autocast("cpu", dtype=precision) if precision else nullcontext():
                hidden = causal.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
                forward = tracker.restart()
                past_head: list[float] = []
                hidden.register_hook(lambda gradient: past_head.append(tracker.restart()))
                stats = token_statistics(
                    hidden[:, :-1],
                    weight,
                    ids[:, 1:],
                    k=way.k,
                    bias=head.bias,
                    scale=head.scale,
                    softcap=head.softcap,
                    outputs=wanted,
                    gradients=wanted,
                    chunk_tokens=self.chunk(weight.shape[0], weight.shape[1], base_dtype(self.config, way.dtype)),
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
