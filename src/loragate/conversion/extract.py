"""A fine-tuned checkpoint minus its base, as a plain LoRA adapter of chosen rank.

Weights are read in pairs, one parameter at a time, straight from the safetensors shards, so neither model is ever in memory:
what is held are the adapter's own factors. Each linear layer's difference is replaced by its best approximation of the
given rank (`extract_factors`); what no LoRA can hold (embeddings, norms, biases, fused experts) is measured and named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from loragate.conversion.extract_checkpoint import open_checkpoint
from loragate.conversion.extract_factors import Factors, low_rank_factors, squared_norm
from loragate.conversion.extract_layout import (
    HEAD,
    LINEAR,
    TRANSPOSED,
    Layout,
    changed_settings,
    find_sources,
    read_layout,
    require_same_architecture,
)
from loragate.conversion.extract_pair import Pair
from loragate.errors import ConfigError

OnModule = Callable[[int, int, str], None]


@dataclass(frozen=True)
class ModuleDelta:
    """The difference of one linear layer.

    Attributes:
        path: the base model's own name of the module.
        d_in, d_out: its widths.
        energy: ‖Δ‖², the sum of squared differences.
        kept: share of it that the adapter holds, 0 to 1.
        singular: the largest singular values of Δ, descending; all of them where `complete`.
    """

    path: str
    d_in: int
    d_out: int
    energy: float
    kept: float
    singular: torch.Tensor = field(repr=False)
    complete: bool = True

    @property
    def lost(self) -> float:
        """Energy that the adapter does not hold."""
        return self.energy * (1.0 - self.kept)


@dataclass(frozen=True)
class LeftOut:
    """What no LoRA holds, of one kind: number of changed parameters, their energy, and the one that changed most."""

    tensors: int
    energy: float
    largest: str


@dataclass(frozen=True)
class Extraction:
    """An adapter in memory, with what it keeps.

    Attributes:
        rank: R of every module; alpha is equal to it, so the scaling is 1.
        layout: of the base.
        factors: {module path: (A [R, d_in], B [d_out, R])}, fp32; for a transposed layer (GPT-2) B·A is Δ of the layer
            as PEFT sees it.
        modules: the linear layers that changed, in model order.
        unchanged: number of linear layers that did not.
        base_energy: ‖W‖² of the base's linear layers.
        left_out: {kind: what is not held}.
        notes: sentences a person should read.
    """

    rank: int
    layout: Layout
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    modules: list[ModuleDelta]
    unchanged: int
    base_energy: float
    left_out: dict[str, LeftOut]
    notes: list[str]

    @property
    def energy(self) -> float:
        """‖Δ‖² of all linear layers."""
        return sum(module.energy for module in self.modules)

    @property
    def kept(self) -> float:
        """Share of the linear layers' energy that the adapter holds."""
        return 1.0 - sum(module.lost for module in self.modules) / self.energy

    @property
    def left_share(self) -> float:
        """Share of the whole difference's energy that lies outside the linear layers."""
        left = sum(part.energy for part in self.left_out.values())
        return left / (left + self.energy)

    def kept_at(self, rank: int) -> float:
        """At least this share of the linear layers' energy is held at another rank.

        Exact up to the rank whose singular values are known in every module.
        """
        held = sum(float(module.singular[:rank].square().sum()) for module in self.modules)
        return min(held / self.energy, 1.0)

    def rank_for(self, energy: float) -> int | None:
        """The smallest rank, the same for all modules, that keeps this share; None if it lies beyond what is known."""
        longest = max(len(module.singular) for module in self.modules)
        low, high = 1, longest
        if self.kept_at(longest) < energy * (1.0 - 1e-9):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.kept_at(middle) >= energy * (1.0 - 1e-9) else (middle + 1, high)
        return low


def extract_adapter(
    model: str,
    base: str,
    rank: int,
    *,
    revision: str = "",
    base_revision: str = "",
    device: str = "cpu",
    seed: int = 0,
    ignore_resized_vocabulary: bool = False,
    trust_remote_code: bool = False,
    on_module: OnModule | None = None,
) -> Extraction:
    """Decompose the difference of two checkpoints.

    Args:
        model: the fine-tuned checkpoint, folder or hub id, in safetensors.
        base: what it was fine-tuned from.
        rank: of the adapter.
        revision, base_revision: of the two, on the hub.
        device: where the arithmetic runs (fp32 differences, fp64 or randomised fp32 decompositions).
        seed: seed of the randomised decompositions.
        ignore_resized_vocabulary: go on where the vocabularies differ in size, leaving embeddings and head out.
        trust_remote_code: allow the base's own model code to run.
        on_module: called with (parameters done, parameters in all, name).

    Returns:
        `Extraction`; `loragate.conversion.extract_writing.write_adapter_folder` puts it on disk.

    Raises:
        ConfigError: for checkpoints that cannot be read or compared, that do not differ, or not in a linear layer.
    """
    from transformers import AutoConfig

    if rank < 1:
        raise ConfigError(f"rank must be at least 1, found {rank}")
    tuned = open_checkpoint(model, revision, trust_remote_code)
    start = open_checkpoint(base, base_revision, trust_remote_code)
    ours, theirs = (
        AutoConfig.from_pretrained(str(place.folder), trust_remote_code=trust_remote_code) for place in (tuned, start)
    )
    require_same_architecture(ours, theirs, model, base)
    layout = read_layout(theirs, trust_remote_code)
    sizes = (ours.get_text_config().vocab_size, theirs.get_text_config().vocab_size)
    if sizes[0] != sizes[1] and not ignore_resized_vocabulary:
        raise ConfigError(
            f"{model} has a vocabulary of {sizes[0]}, its base {base} one of {sizes[1]}. New tokens need embeddings, which a "
            "LoRA on linear layers cannot hold. If the base's tokens are enough, or the rest is padding, add "
            "--ignore-resized-vocabulary (ignore_resized_vocabulary=True): embeddings and head are then left out"
        )
    pair = Pair(
        tuned,
        start,
        find_sources(tuned, layout, bool(ours.get_text_config().tie_word_embeddings)),
        find_sources(start, layout, bool(theirs.get_text_config().tie_word_embeddings)),
        device,
        layout,
    )
    found = _Found()
    names = sorted(layout.kinds, key=lambda name: str(start.files[pair.theirs.of[name][0]]))
    for done, name in enumerate(names):
        if on_module is not None:
            on_module(done, len(names), name)
        kind = layout.kinds[name]
        if kind in (LINEAR, TRANSPOSED) and name not in pair.ours.converted | pair.theirs.converted:
            _take_linear(found, pair, name, kind, rank, seed)
        elif not (kind == HEAD and pair.ours.tied and pair.theirs.tied):
            _measure(found, pair, name, kind)
    notes = [*changed_settings(ours, theirs), *pair.notes()]
    return found.conclude(rank, layout, notes, model, base)


@dataclass
class _Found:
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    modules: dict[str, ModuleDelta] = field(default_factory=dict)
    left: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    unchanged: int = 0
    base_energy: float = 0.0

    def conclude(self, rank: int, layout: Layout, notes: list[str], model: str, base: str) -> Extraction:
        left_out = {}
        for kind, parts in self.left.items():
            changed = [part for part in parts if part[0] > 0]
            if changed:
                left_out[kind] = LeftOut(len(changed), sum(energy for energy, _ in changed), max(changed)[1])
        if not self.modules and not left_out:
            raise ConfigError(
                f"{model} and {base} hold the same weights; there is no difference to extract. Check which of the two is "
                "the fine-tuned model"
            )
        if not self.modules:
            raise ConfigError(
                f"{model} and {base} differ only in what no LoRA on linear layers can hold ({', '.join(left_out)}); "
                "there is nothing to extract"
            )
        paths = [name.removesuffix(".weight") for name in layout.kinds]
        return Extraction(
            rank,
            layout,
            {path: self.factors[path] for path in paths if path in self.factors},
            [self.modules[path] for path in paths if path in self.modules],
            self.unchanged,
            self.base_energy,
            dict(sorted(left_out.items(), key=lambda item: -item[1].energy)),
            notes,
        )


def _take_linear(found: _Found, pair: Pair, name: str, kind: str, rank: int, seed: int) -> None:
    path = name.removesuffix(".weight")
    delta, weight = pair.difference(name)
    found.base_energy += squared_norm(weight)
    del weight
    # Conv1D keeps its weight as [d_in, d_out]; PEFT's B·A is the transpose of it
    delta_OD = delta.T if kind == TRANSPOSED else delta
    if not bool(delta_OD.any()):
        found.unchanged += 1
        return
    own_seed = int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:7], "little")
    result: Factors = low_rank_factors(delta_OD, rank, own_seed)
    found.factors[path] = (result.lora_a_RD, result.lora_b_OR)
    found.modules[path] = ModuleDelta(
        path,
        delta_OD.shape[1],
        delta_OD.shape[0],
        result.energy,
        result.kept,
        result.singular_K,
        result.complete,
    )


def _measure(found: _Found, pair: Pair, name: str, kind: str) -> None:
    ours, theirs = pair.ours.of[name], pair.theirs.of[name]
    same = name not in pair.ours.converted | pair.theirs.converted or ours == theirs
    if not same:
        raise ConfigError(
            f"{name} is stored in another layout in {pair.tuned.name} ({ours[0]}) than in {pair.start.name} ({theirs[0]}). "
            "Write both anew with one version of transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    found.left.setdefault(kind, []).append((pair.energy(name), name))
