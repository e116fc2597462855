"""A fine-tuned checkpoint minus its base, as a plain LoRA adapter of chosen rank.

Weights are read in pairs, one parameter at a time, straight from the safetensors shards, so neither model is ever in memory:
what is held are the adapter's own factors. Each linear layer's difference is replaced by its best approximation of the
given rank (`extract_factors`); what no LoRA can hold (embeddings, norms, biases, fused experts) is measured and named.

On disk it is an ordinary PEFT adapter folder, with a record of what it keeps and what it leaves out. The folder appears whole or
not at all. Before it does, PEFT itself is asked on the meta device whether the configuration selects exactly the layers there
are factors for, because it would load a stray factor without a word.
"""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from loragate.conversion.extract_checkpoint import (
    EMBEDDINGS,
    HEAD,
    LINEAR,
    TRANSPOSED,
    Checkpoint,
    Layout,
    Sources,
    changed_settings,
    find_sources,
    open_checkpoint,
    read_layout,
    require_same_architecture,
)
from loragate.conversion.extract_factors import Factors, low_rank_factors, squared_norm
from loragate.errors import ConfigError, LoragateError
from loragate.files import new_folder, write_json, write_text
from loragate.gates.adapter_files import ADAPTER_CONFIG, PREFIX, read_adapter_config, write_factors
from loragate.gates.eligibility import lora_layers
from loragate.models import Loading, ModelSource, open_tokenizer, resolve, torch_device
from loragate.records import to_json
from loragate.version import __version__

PART = 1 << 24  # numbers of a tensor that are compared at a time
logger = logging.getLogger("loragate")
RECORD = "extract.json"
ENERGIES = (0.5, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class LeftOut:
    """What no LoRA holds, of one kind: number of changed parameters, their energy, and the one that changed most."""

    tensors: int
    energy: float
    largest: str


@dataclass(frozen=True)
class Extraction:
    """An adapter in memory, with what it keeps."""

    model: ModelSource  # the fine-tuned model
    base: ModelSource  # what it was compared with
    rank: int  # R of every module; alpha is equal to it, so the scaling is 1
    layout: Layout  # of the base
    # of the linear layers that changed, in model order; for a transposed layer (GPT-2) B·A is Δ of the layer as PEFT sees it
    modules: dict[str, Factors]
    unchanged: int  # number of linear layers that did not change
    base_energy: float  # ‖W‖² of the base's linear layers
    left_out: dict[str, LeftOut]  # {kind: what is not held}
    notes: list[str]  # sentences a person should read

    @property
    def energy(self) -> float:
        """‖Δ‖² of all linear layers."""
        return sum(factors.energy for factors in self.modules.values())

    @property
    def kept(self) -> float:
        """Share of the linear layers' energy that the adapter holds."""
        return 1.0 - sum(factors.lost for factors in self.modules.values()) / self.energy

    @property
    def left_share(self) -> float:
        """Share of the whole difference's energy that lies outside the linear layers."""
        left = sum(part.energy for part in self.left_out.values())
        return left / (left + self.energy)

    def rank_for(self, energy: float) -> int | None:
        """The smallest rank, the same for all modules, that keeps this share; None if it lies beyond what is known."""
        known = [factors.singular_K.square().cumsum(0) for factors in self.modules.values()]
        longest = max(len(sums) for sums in known)
        # energy that is held at the ranks 1, 2, … of all modules together; a module's own spectrum may end before
        held = torch.stack([torch.cat([sums, sums[-1:].expand(longest - len(sums))]) for sums in known]).sum(0)
        # all of the energy (1.0) is reached by a sum of squares up to rounding only
        enough = (held >= energy * (1.0 - 1e-9) * self.energy).nonzero()
        return int(enough[0]) + 1 if len(enough) else None


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
    on_module: Callable[[int, int, str], None] | None = None,
) -> Extraction:
    """Decompose the difference of two checkpoints.

    Args:
        model: the fine-tuned checkpoint, folder or hub id, in safetensors.
        base: what it was fine-tuned from.
        rank: of the adapter.
        revision, base_revision: of the two, on the hub.
        device: where the arithmetic runs (fp32 differences, fp64 or randomised fp32 decompositions); auto, cpu, cuda, cuda:1.
        seed: seed of the randomised decompositions.
        ignore_resized_vocabulary: go on where the vocabularies differ in size, leaving embeddings and head out.
        trust_remote_code: allow the base's own model code to run.
        on_module: called with (parameters done, parameters in all, name).

    Returns:
        `Extraction`; `write_adapter_folder` puts it on disk.

    Raises:
        ConfigError: for checkpoints that cannot be read or compared, that do not differ, or not in a linear layer.
        ArtifactError: for one that cannot be downloaded.
    """
    if rank < 1:
        raise ConfigError(f"rank must be at least 1, found {rank}")
    if device == "mps":
        raise ConfigError("--device mps: it has no double precision, which decompositions need; use --device cpu")
    device = torch_device(Loading(device=device)).replace("mps", "cpu")  # "auto" may find Apple's GPU
    tuned = open_checkpoint(resolve(model, expect="base", what="model", revision=revision or None), trust_remote_code)
    start = open_checkpoint(resolve(base, expect="base", revision=base_revision or None), trust_remote_code)
    require_same_architecture(tuned, start)
    layout = read_layout(start.config, trust_remote_code)
    if tuned.text.vocab_size != start.text.vocab_size and not ignore_resized_vocabulary:
        raise ConfigError(
            f"{model} has a vocabulary of {tuned.text.vocab_size}, its base {base} one of {start.text.vocab_size}. New "
            "tokens need embeddings, which a LoRA on linear layers cannot hold. If the base's tokens are enough, or the rest is "
            "padding, add --ignore-resized-vocabulary (ignore_resized_vocabulary=True): embeddings and head are then left out"
        )
    pair = Pair(tuned, start, find_sources(tuned, layout), find_sources(start, layout), layout, device)
    modules: dict[str, Factors] = {}
    left: dict[str, list[tuple[float, str]]] = defaultdict(list)
    unchanged, base_energy = 0, 0.0
    # in the order of the shards, of which one at a time is open
    names = sorted(layout.kinds, key=lambda name: str(start.files[pair.theirs.of[name][0]]))
    for done, name in enumerate(names):
        if on_module is not None:
            on_module(done, len(names), name)
        kind, path = layout.kinds[name], name.removesuffix(".weight")
        if kind in (LINEAR, TRANSPOSED) and name not in pair.converted:
            delta, energy = pair.difference(name)
            base_energy += energy
            # Conv1D keeps its weight as [d_in, d_out]; PEFT's B·A is the transpose of it
            delta_OD = delta.T if kind == TRANSPOSED else delta
            if bool(delta_OD.any()):
                # a layer's factors must not depend on which other layers there are, or in which order they come
                own_seed = int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:7], "little")
                modules[path] = low_rank_factors(delta_OD, rank, own_seed)
            else:
                unchanged += 1
        # a head that is the embedding in both has been counted with it
        elif not (kind == HEAD and pair.ours.tied and pair.theirs.tied) and (energy := pair.energy(name)) > 0:
            left[kind].append((energy, name))
    if not modules:
        raise ConfigError(
            f"{model} and {base} differ only in what no LoRA on linear layers can hold ({', '.join(left)}); there is nothing to "
            "extract"
            if left
            else f"{model} and {base} hold the same weights; there is no difference to extract. Check which of the two is the "
            "fine-tuned model"
        )
    found = {kind: LeftOut(len(parts), sum(one for one, _ in parts), max(parts)[1]) for kind, parts in left.items()}
    paths = [name.removesuffix(".weight") for name in layout.kinds]
    return Extraction(
        tuned.place,
        start.place,
        rank,
        layout,
        {path: modules[path] for path in paths if path in modules},
        unchanged,
        base_energy,
        dict(sorted(found.items(), key=lambda item: -item[1].energy)),
        [*changed_settings(tuned, start), *pair.notes()],
    )


@dataclass(frozen=True)
class Pair:
    """Two checkpoints whose tensors are known by the same parameter names."""

    tuned: Checkpoint
    start: Checkpoint  # its base
    ours: Sources  # where the fine-tuned checkpoint keeps its parameters
    theirs: Sources  # and the base
    layout: Layout  # of the base
    device: str  # where differences are taken

    @property
    def converted(self) -> frozenset[str]:
        """Parameters that one of the two does not store as they are used."""
        return self.ours.converted | self.theirs.converted

    def difference(self, name: str) -> tuple[torch.Tensor, float]:
        """(difference, ‖base weight‖²) of a parameter that is stored as it is used."""
        ours, theirs = self.ours.of[name][0], self.theirs.of[name][0]
        self._require_shape(name, ours, theirs)
        weight = self.start.read(theirs, self.device)
        delta = self.tuned.read(ours, self.device) - weight
        self._require_finite(name, float(delta.sum()))
        return delta, squared_norm(weight)

    def energy(self, name: str) -> float:
        """Sum of squared differences over all that a parameter is stored as, in parts: an embedding can be the largest tensor
        of a model. Rows beyond the shorter of two vocabularies count in full."""
        stored = self.ours.of[name], self.theirs.of[name]
        if name in self.converted and stored[0] != stored[1]:
            raise ConfigError(
                f"{name} is stored in another layout in {self.tuned} ({stored[0][0]}) than in {self.start} ({stored[1][0]}). "
                "Write both anew with one version of transformers: "
                "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
            )
        total = 0.0
        for ours, theirs in zip(*stored, strict=True):
            self._require_shape(name, ours, theirs)
            shape = self.tuned.shape(ours)
            rows = max(1, PART // max(1, math.prod(shape[1:])))
            for begin in range(0, shape[0] if shape else 1, rows):
                part = slice(begin, begin + rows)
                # a parameter that is one number is one row
                new, old = (
                    torch.atleast_1d(where.read(tensor, self.device, part))
                    for where, tensor in ((self.tuned, ours), (self.start, theirs))
                )
                shared = min(len(new), len(old))
                total += squared_norm(new[:shared] - old[:shared]) + squared_norm(new[shared:])
        self._require_finite(name, total)
        return total

    def _require_shape(self, name: str, ours: str, theirs: str) -> None:
        found, expected = self.tuned.shape(ours), self.start.shape(theirs)
        resized = self.layout.kinds[name] in (EMBEDDINGS, HEAD) and found[1:] == expected[1:]
        if found != expected and not resized:  # a vocabulary may differ in its rows, which `energy` counts
            raise ConfigError(
                f"{name} has shape {found} in {self.tuned} and {expected} in {self.start}; they are not of one architecture"
            )

    def _require_finite(self, name: str, total: float) -> None:
        if not math.isfinite(total):
            raise ConfigError(
                f"{name} contains NaN or infinity in {self.tuned} or {self.start}; one of the two is damaged"
            )

    def notes(self) -> list[str]:
        """What a person should know about how the two are stored, as sentences."""
        found = []
        if self.ours.tied != self.theirs.tied:
            tied, own = ("base", "fine-tuned model") if self.theirs.tied else ("fine-tuned model", "base")
            found.append(
                f"the {own} has an output head of its own, the {tied}'s is its embedding; the head is left out"
            )
        for where, sources in ((self.tuned, self.ours), (self.start, self.theirs)):
            strange = [name for name in sources.foreign if not name.endswith(("inv_freq", "masked_bias", "attn.bias"))]
            if strange:
                found.append(
                    f"{where} holds {len(strange)} tensors that are no part of the language model (such as {strange[0]}); "
                    "they were not compared"
                )
        return found


def write_adapter_folder(extraction: Extraction, folder: str | Path, *, trust_remote_code: bool = False) -> Path:
    """Write the adapter, with the fine-tuned model's own tokenizer and chat template, which often differ from the base's.

    Args:
        extraction: what `extract_adapter` returned.
        folder: new, or empty.
        trust_remote_code: allow the tokenizer's own code to run.

    Returns:
        The folder: adapter_config.json, adapter_model.safetensors, extract.json, README.md and the tokenizer.

    Raises:
        ConfigError: if the folder holds anything.
        LoragateError: if it cannot be written; nothing is left behind.
    """
    folder = Path(folder)
    base = extraction.base.ref
    config = LoraConfig(
        r=extraction.rank,
        lora_alpha=extraction.rank,
        lora_dropout=0.0,
        target_modules=target_names(extraction),
        fan_in_fan_out=any(extraction.layout.kinds[f"{path}.weight"] == TRANSPOSED for path in extraction.modules),
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=base.lasting,
        revision=base.revision or None,
    )
    _require_exact(extraction, config)
    tensors = {}
    for path, factors in extraction.modules.items():
        tensors[f"{PREFIX}{path}.lora_A.weight"] = factors.lora_a_RD.contiguous()
        tensors[f"{PREFIX}{path}.lora_B.weight"] = factors.lora_b_OR.contiguous()
    with new_folder(folder) as partial:
        write_factors(partial, tensors)
        config.save_pretrained(str(partial))
        # PEFT keeps the targets as a set, whose order differs from run to run
        written = read_adapter_config(partial)
        write_json(partial / ADAPTER_CONFIG, {**written, "target_modules": target_names(extraction)})
        write_json(partial / RECORD, as_record(extraction))
        write_text(
            partial / "README.md",
            f"# LoRA adapter extracted from {Path(extraction.model.ref.name).name}\n\n"
            f"Rank {extraction.rank}, {len(extraction.modules)} linear layers, base `{base.lasting}`. It holds "
            f"{extraction.kept:.1%} of the energy (sum of squares) of the linear layers' difference; {extraction.left_share:.1%} "
            f"of the whole difference lies elsewhere and is left out. `{RECORD}` has the figures of every layer.\n",
        )
        try:
            open_tokenizer(extraction.model, Loading(trust_remote_code=trust_remote_code)).save_pretrained(str(partial))
        except LoragateError as error:
            logger.warning("no tokenizer was copied, the base's will be used: %s", error)
    return folder


def target_names(extraction: Extraction) -> list[str]:
    """PEFT's target_modules: last names where they select exactly the extracted layers, full paths otherwise."""
    chosen = set(extraction.modules)
    ends = {path.rsplit(".", 1)[-1] for path in chosen}
    matched = {path for path, _ in extraction.layout.model.named_modules() if path.rsplit(".", 1)[-1] in ends}
    return sorted(ends if matched == chosen else chosen)


def as_record(extraction: Extraction) -> dict[str, Any]:
    """The figures of an extraction as JSON values; energies are sums of squared differences."""
    return {
        "loragate_version": __version__,
        "model": extraction.model.ref.lasting,
        "base": extraction.base.ref.lasting,
        "rank": extraction.rank,
        "energy_kept": extraction.kept,
        "energy_left_out": extraction.left_share,
        "relative_size": (extraction.energy / extraction.base_energy) ** 0.5 if extraction.base_energy else None,
        "rank_for_energy": {str(share): extraction.rank_for(share) for share in ENERGIES},
        "left_out": to_json(extraction.left_out),
        "unchanged_linear_layers": extraction.unchanged,
        "notes": extraction.notes,
        "modules": {
            path: {
                "d_in": factors.lora_a_RD.shape[1],
                "d_out": factors.lora_b_OR.shape[0],
                "energy": factors.energy,
                "kept": factors.kept,
                "decomposition": "full" if factors.complete else "randomised",
            }
            for path, factors in extraction.modules.items()
        },
    }


def _require_exact(extraction: Extraction, config: LoraConfig) -> None:
    with torch.device("meta"), warnings.catch_warnings():  # shapes alone, without memory
        warnings.simplefilter("ignore")
        model = get_peft_model(extraction.layout.model, LoraConfig(**{**config.to_dict(), "inference_mode": False}))
        placed = {
            path: (tuple(layer.lora_A["default"].weight.shape), tuple(layer.lora_B["default"].weight.shape))
            for path, layer in lora_layers(model, "default")
        }
        model.unload()
    held = {
        path: (tuple(factors.lora_a_RD.shape), tuple(factors.lora_b_OR.shape))
        for path, factors in extraction.modules.items()
    }
    if placed != held:
        odd = sorted(set(placed.items()) ^ set(held.items()))[0][0]
        raise LoragateError(f"PEFT would not place the factors of {odd} as they were extracted; nothing was written")
