"""Knowing an adapter and its base again, by hashes and samples of weights; and whether the gated model is what it must be.

An artifact must refuse to load onto another adapter or base. The adapter's factors are hashed whole, in fp32. The base
may come back in another dtype, quantised, or packed by vLLM, so a few of its weights are stored as numbers, half of them of
norms, which stay as they are everywhere: compared exactly in the same dtype, within bf16 rounding otherwise.

Parity is measured on real token batches before and after training: the step-zero difference to the plain adapter run by PEFT's
own code, whether λ ≡ 1 gives the adapter bit for bit, and whether λ ≡ 0 gives the model without the gated deltas bit for bit.
The last two are the canary that the gates act at all.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from loragate.errors import ArtifactError, GateError
from loragate.gates.attach import gate_modules
from loragate.gates.control import gate_override, gates_disabled, record_gates
from loragate.gates.eligibility import active_adapter, base_module_name, lora_layers
from loragate.gates.schema import ADAPTER, CONFIG, FACTORS, GATES, factor_of, lora_scaling
from loragate.gates.strength import scale_adapter
from loragate.modes import evaluation_mode, whole_parameter

_CONFIG_KEYS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "num_experts", "num_local_experts"),
)
_SAMPLED_TENSORS = 24
_SAMPLED_VALUES = 4
_BF16_STEP = 2.0**-7  # relative distance of neighbouring bf16 numbers, at most


def adapter_fingerprint(model: nn.Module, adapter_name: str) -> str:
    """`factors_sha256` of an adapter in memory, its modules_to_save copies included."""
    factors = []
    for path, layer in lora_layers(model, adapter_name):
        groups = {group: _factor(layer, group, adapter_name) for group in FACTORS}
        strength = (layer.r[adapter_name], layer.lora_alpha[adapter_name], float(layer.scaling[adapter_name]))
        factors.append((path, strength, groups))
    copies = []
    for name, module in sorted(model.named_modules(), key=lambda item: item[0]):
        saved = getattr(module, "modules_to_save", None)
        if isinstance(module, AuxiliaryTrainingWrapper) and saved is not None and adapter_name in saved:
            copies.append((base_module_name(name), list(saved[adapter_name].parameters())))
    return factors_sha256(factors, copies)


def _factor(layer: Any, group: str, adapter_name: str) -> list[Tensor]:
    """The tensors of one factor of a LoRA layer; none where the layer has no such factor."""
    held = getattr(layer, group, {})
    if adapter_name not in held:
        return []
    # linear layers hold modules, which lora_bias gives a bias too; embeddings hold bare parameters
    return [held[adapter_name]] if isinstance(held[adapter_name], Tensor) else [*held[adapter_name].parameters()]


def factors_sha256(
    factors: Iterable[tuple[str, tuple[Any, Any, float], Mapping[str, Sequence[Tensor]]]],
    copies: Iterable[tuple[str, Sequence[Tensor]]] = (),
) -> str:
    """sha256 over an adapter's tensors (fp32, sorted by module path) with rank, alpha and scaling of each module.

    Depends on values only, not on file layout or dtype of storage; the artifact's identity of an adapter.

    Args:
        factors: (module path, (rank, alpha, scaling), {name in `FACTORS`: tensors}).
        copies: (module path, tensors) of modules that the adapter replaces whole.
    """
    digest = hashlib.sha256()
    for path, strength, groups in sorted(factors, key=lambda item: item[0]):
        digest.update(json.dumps([path, *strength]).encode())
        for tensor in (tensor for group in FACTORS for tensor in groups.get(group, ())):
            _update(digest, tensor)
    for path, tensors in copies:
        digest.update(path.encode())
        for tensor in tensors:
            _update(digest, tensor)
    return digest.hexdigest()


def factor_widths_and_sha256(config: dict[str, Any], state: dict[str, Tensor]) -> tuple[dict[str, int], str]:
    """Input width of every adapted linear module, and `factors_sha256` of all LoRA factors, of an adapter's files.

    Other tensors do not count.
    """
    factors: dict[str, dict[str, list[Tensor]]] = {}
    for key, tensor in state.items():
        path, group = factor_of(key)
        if group:
            factors.setdefault(path, {})[group] = [tensor]
    # A is [R, D]: its second size is the input's width; convolutions have more dimensions
    first = {path: groups["lora_A"][0] for path, groups in sorted(factors.items()) if "lora_A" in groups}
    sha256 = factors_sha256((path, lora_scaling(config, path), groups) for path, groups in factors.items())
    return {path: tensor.shape[1] for path, tensor in first.items() if tensor.dim() == 2}, sha256


def require_same_adapter(
    folder: Path,
    record: dict[str, Any],
    tensors: dict[str, Tensor],
    widths: dict[str, int],
    sha256: str | None,
    remedy: str = "fetch the artifact again",
) -> None:
    """Refuse gates that are not those of the adapter beside them.

    Args:
        folder, record, tensors: the artifact, its record and its gates.
        widths, sha256: of the adapter's factors, by `factor_widths_and_sha256`; no hash where the files do not hold all of the
            adapter.
        remedy: what to do about another hash.
    """
    recorded = record["adapter"]["sha256"]
    if sha256 is not None and sha256 != recorded:
        raise ArtifactError(
            f"{folder / CONFIG}: these gates belong to another adapter (sha256 {recorded[:12]}…, {folder / ADAPTER} has "
            f"{sha256[:12]}…); {remedy}"
        )
    for name, tensor in tensors.items():
        # a bias has one value; a module that the widths lack is refused, or let be, by the caller
        size = widths.get(name.removesuffix(".weight"), len(tensor)) if name.endswith(".weight") else 1
        if tensor.shape != (size,):
            raise ArtifactError(f"{folder / GATES}: {name} has shape {tuple(tensor.shape)}, expected ({size},)")


def _update(digest: Any, tensor: Tensor) -> None:
    values = whole_parameter(tensor).detach().to(device="cpu", dtype=torch.float32).contiguous()
    digest.update(json.dumps(list(values.shape)).encode())
    digest.update(values.numpy().tobytes())


def config_fingerprint(model: nn.Module) -> str:
    """sha256 over the configuration values that decide the shape of the base model."""
    chosen = {key: getattr(_text_config(model), key, None) for key in _CONFIG_KEYS}
    return hashlib.sha256(json.dumps(chosen, sort_keys=True, default=str).encode()).hexdigest()


def _text_config(model: nn.Module) -> Any:
    """The configuration of a model; of one that also sees, that of the part that writes."""
    config: Any = getattr(model, "config", None)
    getter = getattr(config, "get_text_config", None)
    return getter() if callable(getter) else config


def rope_settings(model: nn.Module) -> dict[str, Any]:
    """How the base tells positions apart (RoPE: rope_type, rope_theta, factor, …), JSON-able; empty for one that names none."""
    found = getattr(_text_config(model), "rope_parameters", None) or {}
    return dict(json.loads(json.dumps(found, default=str)))


def rope_warning(recorded: Mapping[str, Any] | None, found: Mapping[str, Any]) -> str | None:
    """What to tell who loads gates on a base with other positions; None where there is nothing to tell.

    The shape and the weights of such a base are the same. A key that one of the two lacks may be another version's habit.
    """
    differing = [key for key in recorded or {} if key in found and recorded[key] != found[key]]  # type: ignore[index]
    if recorded is None or not differing:
        return None
    then, now = (", ".join(f"{key} = {of[key]}" for key in differing) for of in (recorded, found))
    return (
        f"these gates were made on a base with other positions (RoPE: {then}; here it is {now}), so that answers differ. Load "
        "the base with the recorded settings, or evaluate again before you rely on earlier scores"
    )


def base_weight_samples(model: nn.Module) -> dict[str, Any]:
    """A few numbers out of the base model's unquantised floating-point weights.

    Returns:
        {"dtype": name, "values": {parameter path: [floats]}}; at most 24 tensors × 4 values, 12 of the tensors norms where
        there are so many. A reader compares the paths that a record holds: the choice may differ from version to version.
    """
    # weights on the meta device are offloaded, without numbers here
    parameters = {name: tensor for name, tensor in base_parameters(model) if tensor.device.type != "meta"}
    names = sorted(parameters)
    norms = _spread([name for name in names if is_norm(name, parameters[name])], _SAMPLED_TENSORS // 2)
    others = [name for name in names if not is_norm(name, parameters[name])]
    values: dict[str, list[float]] = {}
    dtypes: set[str] = set()
    for name in sorted([*norms, *_spread(others, _SAMPLED_TENSORS - len(norms))]):
        values[name] = _sampled(parameters[name], _SAMPLED_VALUES).tolist()
        dtypes.add(str(parameters[name].dtype).removeprefix("torch."))
    return {"dtype": "+".join(sorted(dtypes)), "values": values}


def is_norm(name: str, parameter: Tensor) -> bool:
    """Whether a parameter scales the features of a norm: no other weight of a layer has one dimension."""
    return parameter.dim() == 1 and name.endswith(".weight")


def _spread(names: list[str], count: int) -> list[str]:
    """`count` of the names at equal distances, the first and the last among them; all where there are no more."""
    if len(names) <= count:
        return names
    return [names[at * (len(names) - 1) // (count - 1)] for at in range(count)]


def _sampled(tensor: Tensor, count: int) -> Tensor:
    """`count` of a tensor's values, at equal distances, fp32 on the CPU."""
    flat = tensor.detach().reshape(-1)
    at = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64).long().to(flat.device)
    return flat[at].float().cpu()


def compare_base_samples(model: nn.Module, stored: dict[str, Any]) -> str | None:
    """None if the model's weights agree with `stored`, otherwise a sentence on the first that does not."""
    parameters = dict(base_parameters(model))
    compared = 0
    for name, expected in stored["values"].items():
        parameter = parameters.get(name)
        if parameter is None or parameter.device.type == "meta":
            continue
        found, wanted = _sampled(parameter, len(expected)), torch.tensor(expected, dtype=torch.float32)
        # one checkpoint loaded in two dtypes agrees to the bit in the coarser one; a base of several is recorded as
        # "bfloat16+float32". Of bf16 and fp16 neither holds the other's numbers: within rounding then
        dtypes = {str(parameter.dtype).removeprefix("torch."), *stored["dtype"].split("+")}
        if dtypes >= {"bfloat16", "float16"}:
            equal = bool(((found - wanted).abs() <= _BF16_STEP * wanted.abs() + 1e-6).all())
        else:
            coarser = next((half for half in ("bfloat16", "float16") if half in dtypes), "float32")
            equal = torch.equal(*(values.to(getattr(torch, coarser)) for values in (found, wanted)))
        if not equal:
            return f"{name} starts with {found.tolist()[:2]}, but the gates were made on {expected[:2]}"
        compared += 1
    if compared == 0:
        return "none of the weights it was recorded with is present unquantised in this model"
    return None


def base_parameters(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Frozen base weights in floating point, by their own names; adapters, their copies and packed weights excluded."""
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if any(part.startswith("lora_") or part == "modules_to_save" for part in parts):
            continue
        # a tensor that calls itself floating-point may be stored quantised: by bitsandbytes (quant_state), in fp8 (one byte a
        # value), or by torchao (a tensor of others)
        packed = getattr(parameter, "quant_state", None) is not None or parameter.element_size() == 1
        if parameter.is_floating_point() and not packed and not _wraps_others(parameter):
            yield base_module_name(name).replace(".original_module.", "."), parameter


def _wraps_others(tensor: Tensor) -> bool:
    """Whether a tensor stands for several others, as torchao's do; those that FSDP2 shards stand for one."""
    return hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "full_tensor")


def _stored(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that hold a tensor's bits: itself, or those that it stands for."""
    if not _wraps_others(tensor):
        yield name, tensor
        return
    for inner in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from _stored(f"{name}.{inner}", getattr(tensor, inner))


def weights_checksum(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """A checksum over the exact bits of tensors, computed on their own device in bounded memory.

    Position-weighted sums of the raw 8-byte words modulo 2⁶⁴ for each tensor, hashed together with names and shapes: any single
    changed bit changes the result. Meant to prove that frozen weights stayed frozen, not as a defence against forgery.
    """
    digest = hashlib.sha256()
    held = (pair for name, tensor in parameters for pair in _stored(name, tensor))
    for name, tensor in sorted(held, key=lambda item: item[0]):
        raw = whole_parameter(tensor).detach().contiguous().reshape(-1).view(torch.uint8)
        total = 0
        for start in range(0, raw.numel(), 1 << 24):  # 16 MB at a time
            part = raw[start : start + (1 << 24)]
            if part.numel() % 8 or part.storage_offset() % 8:  # a view as words would be refused
                part = torch.nn.functional.pad(part, (0, -part.numel() % 8)).clone()
            words = part.view(torch.int64)
            # Odd weights times an odd factor (that of Knuth's generator): they have inverses modulo 2⁶⁴, so that a word
            # cannot change alone without the sum. int64 products wrap, which is arithmetic modulo 2⁶⁴.
            weight = torch.arange(start, start + words.numel(), device=words.device, dtype=torch.int64) * 2 + 1
            total = (total + int((words * (weight * 0x5851F42D4C957F2D)).sum())) % (1 << 64)
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:{total}".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Parity:
    """Largest absolute differences in logits over the measured batch.

    "Without" is the model without the gated deltas, which is the base where every module is gated.
    """

    initial: float  # gated model as it stands against the plain adapter
    at_one: float  # λ ≡ 1 against the plain adapter (0.0 in fp32 eager mode)
    at_zero: float  # λ ≡ 0 against the model without (0.0 in fp32 eager mode)
    delta: float  # plain adapter against the model without: the size of what is being gated
    logit_scale: float  # largest absolute logit of the plain adapter
    tokens: int  # number of positions measured
    apart: float  # root mean square of λ − 1 over tokens and modules, of the gates as they stand

    def rounding(self, dtype: torch.dtype, share: float = 1e-6) -> float:
        """How far logits may be apart by rounding; `share` of their size in fp32, 2⁻⁶ of it in half precision."""
        return (2.0**-6 if dtype in (torch.bfloat16, torch.float16) else share) * max(self.logit_scale, 1.0)

    def require_acting(self, rounding: float) -> None:
        """Refuse gates under which λ ≡ 1 is not the adapter, or λ ≡ 0 not the model without the gated deltas.

        Raises:
            GateError: with the measured figures.
        """
        # so that NaN is refused, too
        if not (self.at_one <= rounding and self.at_zero <= rounding):
            raise GateError(
                f"the gates do not act as they must: λ = 1 differs from the adapter by {self.at_one:.2g} and λ = 0 from the model "
                f"without the gated deltas by {self.at_zero:.2g} in logits (rounding explains {rounding:.2g}). Another library "
                "may run LoRA layers through its own kernels; load the model without them"
            )


@torch.no_grad()
def measure_parity(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    adapter_name: str | None = None,
) -> Parity:
    """Compare gated, plain-adapter and base logits on one batch, [batch, sequence] token ids; each module's mode is restored.

    Raises:
        GateError: if the adapter's delta is exactly zero on this batch (an untrained adapter leaves nothing to gate).
    """
    name = active_adapter(model, adapter_name)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    kept = mask.bool()

    def logits() -> Tensor:
        # [B, T, V] to [kept, V]: what padding computes may differ and nobody reads it
        return model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits[kept].float()

    with evaluation_mode(model):
        with record_gates(model, name) as recording:
            recording.token_mask = kept
            gated = logits()
        with gates_disabled(model, name):
            adapter = logits()
        with gate_override(model, constant=1.0, adapter_name=name):
            at_one = logits()
        with gate_override(model, constant=0.0, adapter_name=name):
            at_zero = logits()
        # ungated deltas and other adapters stay, as they do at λ ≡ 0
        with scale_adapter(model, dict.fromkeys(gate_modules(model, name), 0.0), name):
            base = logits()
    lam = {"mean": 1.0, "std": 0.0} | recording.total()  # nothing is recorded of experts alone
    parity = Parity(
        initial=_gap(gated, adapter),
        at_one=_gap(at_one, adapter),
        at_zero=_gap(at_zero, base),
        delta=_gap(adapter, base),
        logit_scale=float(adapter.abs().max()),
        tokens=int(kept.sum()),
        apart=math.hypot(lam["mean"] - 1.0, lam["std"]),  # E(λ−1)² = (E λ − 1)² + Var λ
    )
    if parity.delta == 0.0:
        raise GateError(
            f"adapter {name!r} changes no logit on the measured batch: it is not active (set_adapter), its B factors are "
            "still zero (an untrained adapter), or it sits on modules that are not used; there is nothing to gate"
        )
    return parity


def _gap(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())
