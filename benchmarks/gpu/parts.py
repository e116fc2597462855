"""The parts of `run.py` that ask whether results are right, and what all parts share.

A part is a function of its `Task`; it keeps what it has after every case, and raises where figures are wrong, so that its state
says so. Models and batches are those of `benchmarks/speed/contestants.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import contestants
import torch
from contestants import Shape, adapter, batch

import loragate as lg
from loragate.files import write_json
from loragate.gates.eligibility import base_module_name
from loragate.losses import StatisticsRequest, add_statistics_forward

TINY = Shape(64, 128, 2, 4, 2, vocabulary=512, rows=2, sequence=32)


class LeftOut(Exception):
    """This machine lacks what the part needs."""


@dataclass
class Task:
    """Where a part runs, whether it only rehearses, and what it has found so far."""

    device: str
    rehearsal: bool
    path: Path
    found: dict[str, Any] = field(default_factory=dict)

    def keep(self, name: str, value: Any) -> None:
        """Write a figure down at once: the part may be stopped before its end."""
        print(name, value, flush=True)
        self.found[name] = value
        write_json(self.path, self.found)


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise LeftOut(f"no {package}")


def require(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """Inside, contestants are made on `device`."""
    before, contestants.DEVICE = contestants.DEVICE, device
    try:
        yield
    finally:
        contestants.DEVICE = before


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error in the 2-norm."""
    found, exact = found.detach().double().cpu(), exact.detach().double().cpu()
    return float((found - exact).norm() / exact.norm())


def mild(model: Any) -> Any:
    """The adapter at a tenth of its strength: under L = -6 a random one drowns bf16 in its own rounding."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.mul_(0.1)
    return model


def shaken(model: Any) -> Any:
    """The adapter with gates that act; what is drawn does not depend on the device."""
    lg.attach_gates(model, lg.GateConfig(-6, 3))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in lg.gate_parameters(model).values():
            weight.copy_(
                torch.randn(weight.shape, generator=draw) * (0.3 if weight.numel() == 1 else weight.numel() ** -0.5)
            )
    return model


def gated_outcome(model: Any, data: dict[str, torch.Tensor], k: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the gradient of every gate of the mean top-k entropy through the token-statistics head."""
    data = {name: value.to(model.device) for name, value in data.items()}
    with torch.no_grad():
        logits = model(input_ids=data["input_ids"]).logits
    add_statistics_forward(model.get_base_model())
    stats = model(**data, statistics=StatisticsRequest(k, ("topk_entropy",), ("topk_entropy",)))
    (stats.topk_entropy.sum() / stats.mask.sum()).backward()
    return logits, {name: value.grad for name, value in lg.gate_parameters(model).items()}


def plain_outcome(
    model: Any, gates: dict[str, torch.Tensor], data: dict[str, torch.Tensor], k: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same in fp64 by plain autograd: λ·(B A x) on the output of each module, entropy of full logits."""
    model = model.double()
    leaves = {name: value.detach().double().requires_grad_() for name, value in gates.items()}
    for name, layer in model.named_modules():
        if not (hasattr(layer, "lora_A") and hasattr(layer, "base_layer")):
            continue

        def forward(x: torch.Tensor, layer: Any = layer, path: str = base_module_name(name)) -> torch.Tensor:
            logit = x.detach() @ leaves[f"{path}.weight"] + leaves[f"{path}.bias"]
            response = torch.tanh(logit)
            lam = 1 + torch.where(response < 0, 7 * response, 2 * response)
            delta = layer.lora_B["default"](layer.lora_A["default"](x)) * layer.scaling["default"]
            return layer.base_layer(x) + lam.unsqueeze(-1) * delta

        layer.forward = forward
    logits = model(input_ids=data["input_ids"]).logits
    lg.topk_entropy(logits[:, :-1][data["labels"][:, 1:] != -100], k).mean().backward()
    return logits, {name: leaf.grad for name, leaf in leaves.items()}


def rounded(shape: Shape, dtype: str = "float32") -> Any:
    """The mild adapter on a base whose weights are those of bf16, kept in `dtype`: the same model in every precision."""
    model = mild(adapter(shape))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" not in name:
                weight.data = weight.bfloat16().to(getattr(torch, dtype))
    return model


def parity(task: Task) -> None:
    """Logits and gate gradients in fp32 and bf16 on the device, against fp64 by plain autograd on the CPU."""
    shape = replace(TINY, k=20)
    for family, size in (("qwen2", 0), ("qwen3", 16), ("llama", 0)):
        shape = replace(shape, family=family, head_size=size)
        gates = {name: value.detach().clone() for name, value in lg.gate_parameters(shaken(rounded(shape))).items()}
        exact = plain_outcome(rounded(shape), gates, batch(shape), shape.k)
        row: dict[str, Any] = {}
        for place, dtype in (("cpu", "bfloat16"), (task.device, "float32"), (task.device, "bfloat16")):
            logits, slopes = gated_outcome(shaken(rounded(shape, dtype)).to(place), batch(shape), shape.k)
            together = torch.cat([slopes[name].flatten().double().cpu() for name in gates])
            true = torch.cat([exact[1][name].flatten() for name in gates])
            row[f"{place} {dtype}"] = {"logits": error(logits, exact[0]), "gradients": error(together, true)}
        task.keep(family, row)
        known = row["cpu bfloat16"]
        for dtype in ("float32", "bfloat16"):
            for what, found in row[f"{task.device} {dtype}"].items():
                limit = 1e-4 if dtype == "float32" else 2 * known[what] + 1e-3
                require(found <= limit, f"{family}: {what} in {dtype} are off by {found:.2g}, allowed {limit:.2g}")
        require(known["logits"] < 0.2, f"{family}: bf16 loses this model, so that nothing is compared: {known}")


def fsdp2(task: Task) -> None:
    """Gates of a model sharded by FSDP2 on one rank: the gradients of the whole model."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from loragate.training.sharding import decoder_layers

    shape = replace(TINY, k=20)
    expected = gated_outcome(shaken(adapter(shape)).to(task.device), batch(shape), shape.k)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    dist.init_process_group("nccl" if task.device == "cuda" else "gloo")
    try:
        mesh = dist.device_mesh.init_device_mesh(task.device, (1,))
        model = shaken(adapter(shape)).to(task.device)
        base = model.get_base_model()
        add_statistics_forward(base)  # the head is compared with full logits before weights are cut
        for layer in decoder_layers(base):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        logits, slopes = gated_outcome(model, batch(shape), shape.k)
        found = {name: error(slope.full_tensor(), expected[1][name]) for name, slope in slopes.items()}
        task.keep("errors", {"logits": error(logits, expected[0]), "gradients": max(found.values())})
        require(all(hasattr(slope, "full_tensor") for slope in slopes.values()), "the gates were not sharded")
        require(max(found.values()) < 1e-4, f"gradients of sharded gates are off by {max(found.values()):.2g}")
    finally:
        dist.destroy_process_group()


def four_bit(task: Task) -> None:
    """Gates on a base in 4 bits: logits and gate gradients of the same base, its weights unpacked."""
    need("bitsandbytes")
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    shape = replace(TINY, k=20, tied=False)

    def gated(base: Any) -> Any:
        torch.manual_seed(0)
        record = LoraConfig(
            r=8, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
        )
        return shaken(get_peft_model(base, record).train())

    with tempfile.TemporaryDirectory() as place:
        AutoModelForCausalLM.from_config(shape.configuration()).save_pretrained(place)
        packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
        small = AutoModelForCausalLM.from_pretrained(
            place, quantization_config=packed, device_map=task.device, dtype=torch.float32
        )
        whole = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    replaced = 0
    for name, layer in small.named_modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            whole.get_submodule(name).weight.data = weight.float().cpu()
            replaced += 1
    require(replaced > 0, "no layer was stored in 4 bits")
    expected = gated_outcome(gated(whole).to(task.device), batch(shape), shape.k)
    logits, slopes = gated_outcome(gated(small), batch(shape), shape.k)
    together = torch.cat([slope.flatten() for slope in slopes.values()])
    true = torch.cat([expected[1][name].flatten() for name in slopes])
    found = {"logits": error(logits, expected[0]), "gradients": error(together, true), "layers": replaced}
    task.keep("errors", found)
    require(found["logits"] < 1e-3 and found["gradients"] < 1e-2, f"4-bit gates differ from the unpacked base: {found}")
