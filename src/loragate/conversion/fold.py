"""Gates whose λ is one number per module, folded into a plain LoRA adapter that any PEFT-reading runtime serves.

λ·(α/r)·B(Ax) is (α/r)·(λB)(Ax): where a gate has a bias only, or one λ is laid over all, B takes it up and nothing of the
gates is left. A gate that reads the token cannot be folded: no single B equals it. Works on files; no base is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from loragate.errors import ArtifactError, GateError
from loragate.files import write_atomically, write_json
from loragate.gates import GateConfig, gate_coefficient
from loragate.gates.gate import Override
from loragate.gates.operation import overridden_coefficient
from loragate.models.adapter_files import PREFIX, read_adapter, strength_of

_FACTORS = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")


def constant_coefficients(
    config: GateConfig,
    weights: Mapping[str, torch.Tensor],
    biases: Mapping[str, torch.Tensor],
    override: Override | None = None,
) -> dict[str, float]:
    """λ of every gated module, where it is the same for all tokens.

    Args:
        config: range, τ and granularity.
        weights: {module path: [d_in]}; empty for module and global granularity.
        biases: {module path: [1]}.
        override: λ replaced by a constant, which folds any gates, or clipped.

    Raises:
        GateError: for gates that read the token.
    """
    moving = [path for path, weight in weights.items() if bool(weight.any())]
    if moving and (override is None or override.constant is None):
        raise GateError(
            f"λ differs from token to token in {len(moving)} of {len(biases)} modules ({moving[0]} is the first), so no plain "
            "adapter equals these gates. Serve the folder as it is (loragate serve, or vLLM with loragate's plugin), load it "
            "with loragate.load_gated, or fold one λ for all modules instead of the gates: --constant 0.5. Gates that can be "
            "folded are trained with loragate calibrate --granularity module"
        )
    found = {}
    for path, bias in biases.items():
        lam = gate_coefficient(bias.float(), config.lower, config.upper, config.tau)
        if override is not None:
            lam = overridden_coefficient(lam, override.minimum, override.maximum, override.constant)
        found[path] = float(lam)
    return found


def fold_adapter(
    adapter: str | Path, coefficients: Mapping[str, float], out: str | Path, *, uniform: bool = False
) -> dict[str, Any]:
    """Write the adapter with λ folded into its B factors.

    Args:
        adapter: folder of a plain PEFT LoRA adapter.
        coefficients: {module path: λ}; a module that is not named keeps its strength.
        out: folder for adapter_config.json and adapter_model.safetensors.
        uniform: write one rank and one scale of 1 for all modules (smaller ranks are padded with zeros), for runtimes that
            read `r` and `lora_alpha` alone and neither rank_pattern, alpha_pattern nor use_rslora.

    Returns:
        The configuration that was written. Factors that λ does not touch keep bits and dtype; B is fp32 where it does.

    Raises:
        ArtifactError: for a file that cannot be read, or a module that the adapter does not have.
    """
    from safetensors.torch import save_file

    config, state = read_adapter(Path(adapter))
    known = {_module(key) for key in state} - {None}
    if unknown := sorted(set(coefficients) - known):
        raise ArtifactError(f"{adapter}: there is no factor of {unknown[0]} into which its λ could be folded")
    folded = {key: _scaled(key, tensor, coefficients) for key, tensor in state.items()}
    if uniform:
        config, folded = _uniform(config, folded)
    out = Path(out)
    write_atomically(
        out / "adapter_model.safetensors", lambda path: save_file(folded, str(path), metadata={"format": "pt"})
    )
    write_json(out / "adapter_config.json", config)
    return config


def needs_uniform(config: Mapping[str, Any]) -> list[str]:
    """The keys of an adapter's configuration that say more than one rank and one α/r; empty for the plainest adapters."""
    return [key for key in ("rank_pattern", "alpha_pattern", "use_rslora") if config.get(key)]


def _scaled(key: str, tensor: torch.Tensor, coefficients: Mapping[str, float]) -> torch.Tensor:
    lam = coefficients.get(_module(key) or "", 1.0)
    if lam == 1.0 or not key.endswith(".lora_B.weight"):
        return tensor.contiguous()
    return (tensor.float() * lam).contiguous()


def _uniform(config: dict[str, Any], state: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """One rank R and α = R, so that α/r is 1: each module's own scale goes into its B."""
    ranks = [tensor.shape[0] for key, tensor in state.items() if key.endswith((".lora_A.weight", ".lora_embedding_A"))]
    largest = max(ranks)
    found = {}
    for key, tensor in state.items():
        path = _module(key)
        if path is None:
            found[key] = tensor
        elif key.endswith((".lora_A.weight", ".lora_embedding_A")):
            found[key] = _padded(tensor, 0, largest)
        else:
            found[key] = _padded(tensor.float() * strength_of(config, path)[2], 1, largest)
    plain = {"r": largest, "lora_alpha": largest, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}
    return {**config, **plain}, found


def _padded(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    missing = size - tensor.shape[dim]
    if missing == 0:
        return tensor.contiguous()
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim).contiguous()


def _module(key: str) -> str | None:
    """The module path of a factor's key; None for any other tensor."""
    suffix = next((suffix for suffix in _FACTORS if key.endswith(suffix)), None)
    return None if suffix is None else key.removesuffix(suffix).removeprefix(PREFIX)
