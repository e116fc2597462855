"""Models whose weights FSDP2 spreads over processes, and the gates outside of its shards.

A sharded run works on a twin of the model: same modules, own parameters over the same memory, the gate modules shared
with the original. The twin is sharded layer by layer; the gates are left out of every group, stay whole and fp32 on every
process, and their gradients are averaged by one all-reduce per optimiser step (`average_gradients`). The original is not touched
until the end, when what trained is written back into it. It therefore lies in host memory while the twin's shards lie on the
device (`host_memory` of `open_base`).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from loragate.errors import ConfigError
from loragate.gates.gate import SignedGate
from loragate.losses.causal_head import causal_model, verify_head
from loragate.modes import whole_parameter
from loragate.training.strategy import detect_launch, process_state


def target_device(model: nn.Module) -> torch.device:
    """Where this process computes: its own device under a launcher that shards, else where the model is."""
    launch = detect_launch()
    if not launch.is_sharded:
        return next(model.parameters()).device
    if launch.cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", launch.local_rank)


def make_sharded_copy(model: Any) -> Any:
    """The model to train: a sharded twin where the launcher asks for FSDP2, else the model itself.

    Every process must call this, and run the same forward passes with the twin. Gates move to the twin's device.
    """
    if detect_launch().strategy != "fsdp2":
        return model
    process_state()
    # asked while the weights are whole: on shards the check would need a gathered head and every process
    verified = verify_head(causal_model(model))
    twin = fsdp_copy(model)
    causal_model(twin)._loragate_verified_head = verified
    gates = [module for module in twin.modules() if isinstance(module, SignedGate)]
    device = target_device(model)
    move_gates(twin, device)
    shard(twin, device, {parameter for gate in gates for parameter in gate.parameters()})
    return twin


def move_gates(model: Any, device: torch.device) -> None:
    """Put all gates of a model on a device: under FSDP2 they are the twin's too, and the original lies in host memory."""
    for module in model.modules():
        if isinstance(module, SignedGate):
            module.to(device)


def is_sharded(model: Any) -> bool:
    """Whether FSDP2 has sharded a model."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def fsdp_copy(model: Any) -> Any:
    """A second set of modules over the same tensors, with the same gates: sharding it frees nothing of the original."""
    memo: dict[int, Any] = {}  # what deepcopy takes for copied already
    for module in model.modules():
        if isinstance(module, SignedGate):
            memo[id(module)] = module
            memo.update({id(parameter): parameter for parameter in module.parameters()})
    # tied weights are one parameter here, and one again in the twin
    for parameter in model.parameters():
        if id(parameter) not in memo:
            memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def shard(model: Any, device: torch.device, ignored: set[nn.Parameter]) -> None:
    """FSDP2 in place: one group for each decoder layer, one for an untied input embedding, and the root's.

    The output head is in the root group, which is gathered once per forward pass and kept to the end of its backward pass:
    the token-statistics head finds its weight whole.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh, "ignored_params": ignored}
    # whether weights are freed between a layer's forward and its backward pass: the launch configuration's choice
    freed = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false"
    causal = causal_model(model)
    for layer in decoder_layers(causal):
        fully_shard(layer, reshard_after_forward=freed, **options)
    embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    if embedding is not None and getattr(head, "weight", None) is not embedding.weight:
        fully_shard(embedding, reshard_after_forward=freed, **options)
    fully_shard(model, **options)


def decoder_layers(causal: Any) -> list[nn.Module]:
    """The repeated layers by the class names that the model gives, else its longest module list; a ConfigError without any."""
    names = set(getattr(causal, "_no_split_modules", None) or ())
    layers = [module for module in causal.modules() if type(module).__name__ in names]
    if not layers:
        lists = [module for module in causal.modules() if isinstance(module, nn.ModuleList)]
        layers = list(max(lists, key=len, default=[]))
    if not layers:
        raise ConfigError(
            f"{type(causal).__name__} has no repeated layers that FSDP2 could shard one by one; launch with the ddp "
            "configuration instead"
        )
    return layers


def average_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    """Average the gradients of parameters that every process holds whole, by one all-reduce over one flat buffer.

    FSDP2 reduces what it shards and nothing else. A gate that saw no token on this process counts with zeros. Sharded
    parameters are passed over.
    """
    whole = [parameter for parameter in parameters.values() if not hasattr(parameter, "full_tensor")]
    if not whole:
        return
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).to(torch.float32) for p in whole])
    torch.distributed.all_reduce(flat)
    flat /= torch.distributed.get_world_size()
    for parameter, values in zip(whole, flat.split([p.numel() for p in whole]), strict=True):
        parameter.grad = values.view_as(parameter).to(parameter.dtype)


@torch.no_grad()
def gathered_values(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's full values on the CPU; where it is sharded, every process must ask."""
    return whole_parameter(parameter).detach().cpu().contiguous()


@torch.no_grad()
def copy_into_parameter(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Write full values into a parameter, whole or sharded by FSDP2."""
    parameter.copy_(_spread_like(parameter, values).to(parameter.dtype))


def _spread_like(parameter: Any, values: torch.Tensor) -> torch.Tensor:
    """Full values as FSDP2 has sharded a parameter; as they are for one that is whole."""
    if not hasattr(parameter, "full_tensor"):
        return values
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values.to(parameter.device), parameter.device_mesh, parameter.placements)


def full_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimiser's state dict with full CPU tensors; every process must ask. It has no trace of the sharding left."""
    state: dict[str, Any] = optimizer.state_dict()
    whole = {
        index: {
            key: gathered_values(value) if isinstance(value, torch.Tensor) else value
            for key, value in sorted(values.items())
        }
        for index, values in sorted(state["state"].items())
    }
    return {**state, "state": whole}


def load_whole_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `full_optimizer_state` returned, under whatever sharding the optimiser's parameters have now."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in sorted(state["state"].items()):
        parameter = parameters[index]
        for key, value in sorted(values.items()):
            # AdamW's moments, not its count of steps
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                values[key] = _spread_like(parameter, value)
    optimizer.load_state_dict(state)


def write_back(twin: Any, model: Any) -> None:
    """What trained in the twin, into the model it was made from. Parameters they share are left as they are."""
    own = dict(model.named_parameters())
    for name, parameter in twin.named_parameters():
        if parameter.requires_grad and parameter is not own[name]:
            copy_into_parameter(own[name], gathered_values(parameter).to(own[name].device))
