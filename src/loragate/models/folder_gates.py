"""The gates of a folder as a server or an export needs them: read from files alone, checked before anything is activated.

`loragate.gates` ties gates to the adapter and base of a model in memory. A server holds the base in shards and packs
modules, so the same identity is checked here against the adapter's files: its hash, its modules and its sizes. An override
of λ makes a virtual adapter with the same tensors.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from loragate.errors import ArtifactError, GateError
from loragate.gates.adapter_rules import find_adapted_parameters, split_factor_key
from loragate.gates.eligibility import base_change_reason
from loragate.gates.gate import GateConfig
from loragate.gates.identity import factor_widths_and_sha256, require_same_adapter
from loragate.gates.override import Override
from loragate.gates.recommended import SAMPLING
from loragate.gates.schema import (
    ADAPTER,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    GATES,
    GLOBAL_BIAS,
    KEYS_NEEDING_MODEL,
    factor_of,
    read_adapter,
    read_gate_config,
    read_tensors,
)
from loragate.gates.signed_map import CONSTANT_RANGE, range_around
from loragate.gates.strength import describe_unreached, overrides_by_module
from loragate.models.source import ModelSource, is_gated, plain_adapter

# PEFT nests the layers of several parameters of one module: the second is at experts.base_layer. Single experts (experts.0.w1)
# and routers that are linear layers, as transformers 4 had them, are parameters when their adapter is loaded.
# From the second line on, whole paths: inside a layer, such names are not those of heads (tests/contract/test_heads.py)
_NEVER_GATED = re.compile(
    r"(?:.*\.)?(?:lm_head|embed_tokens|wte|experts(?:\.base_layer)*|experts\.\d+\..*|(?:mlp|block_sparse_moe)\.gate)|"
    r"head|output|output_projection|decoder|proj_out|embed_out|lm_loss|generator_lm_head|"
    r"cls\.predictions\.decoder|lm_head\.decoder|pred_layer\.proj"
)


@dataclass(frozen=True)
class FolderGates:
    """The checked gates of one folder; those of an override for a part are one constant per module."""

    folder: Path  # the artifact
    adapter: Path  # the plain PEFT adapter inside
    config: GateConfig
    weights: dict[str, torch.Tensor]  # {module path: [d_in] fp32}; empty for module and global granularity
    biases: dict[str, torch.Tensor]  # {module path: [1] fp32}, one for every gated module
    base: dict[str, Any]  # the record's identity of the base; empty for a plain adapter
    digest: str  # changes whenever gates or adapter do; empty for a plain adapter
    override: Override | None = None  # what is laid over λ; None for the gates as they are
    ungated_modules: tuple[str, ...] = ()  # modules of the adapter without λ, at full strength under any override


def read_gates(
    folder: str | Path, override: Override | None = None, *, allow_extra_tensors: bool = False
) -> FolderGates:
    """Read and check a gated folder, or a plain adapter under one constant λ: it has no gates.

    A constant for a part is returned as gates without weights whose biases are that constant, with no override over them, so
    that whoever knows gates serves it. `allow_extra_tensors` takes adapters that change more than A and B, too, which no server
    with gates does; those of `KEYS_NEEDING_MODEL` are then not known again by their hash.

    An ArtifactError names the file and what is wrong: schema, hash, module, shape, dtype, a number that is not finite, gates of
    another adapter, or an override that a plain adapter cannot have.
    """
    folder = Path(folder)
    if not is_gated(folder) and override is not None:
        return _expand_partial_override(_make_constant_gates(folder, override, allow_extra_tensors))
    record = read_gate_config(folder)
    config = GateConfig(**record["gate"])
    tensors = read_tensors(folder, record)
    widths, sha256, adapted, gateable = _read_factors(folder / ADAPTER, allow_extra_tensors)
    require_same_adapter(folder, record, tensors, widths, sha256)
    modules = record["modules"]
    if config.target_modules is None:
        left = [path for path in gateable if path not in modules]
        if left:
            _fail(folder / CONFIG, f"no gate for module {left[0]}, which the adapter adapts")
    for path in modules:
        if path not in widths:
            _fail(folder / CONFIG, f"a gate for {path}, which the adapter does not adapt")
    # the settings too: other bounds make other λ out of the same tensors
    identity = [record["gates_sha256"], record["adapter"]["sha256"], record["gate"]]
    found = FolderGates(
        folder=folder,
        adapter=folder / ADAPTER,
        config=config,
        weights={name.removesuffix(".weight"): t for name, t in tensors.items() if name.endswith(".weight")},
        biases={path: tensors[GLOBAL_BIAS if config.granularity == "global" else f"{path}.bias"] for path in modules},
        base=record["base"],
        digest=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
        override=override,
        ungated_modules=tuple(path for path in adapted if path not in modules),
    )
    return _expand_partial_override(found)


def is_never_gated(path: str) -> bool:
    """Whether attachment leaves a module at full strength (gates.eligibility), told by its path: no model tells its class."""
    return _NEVER_GATED.fullmatch(path) is not None


def unreached_note(place: ModelSource) -> str:
    """What no λ reaches of the adapter of a place, in one sentence and from its files; empty where λ reaches all of it."""
    if place.kind == "base":
        return ""
    contents = place.adapter_contents
    adapted = {path: False for key in contents.tensors if (path := split_factor_key(key)[0])}
    for key, (_, shape) in contents.tensors.items():
        path, factor = split_factor_key(key)
        if factor == "lora_A" and len(shape) == 2:
            adapted[path] = not (is_never_gated(path) or find_adapted_parameters(contents.config, path))
    gated = None if place.gates is None else place.gates["modules"]
    kept = [path for path, linear in adapted.items() if not (linear if gated is None else path in gated)]
    return describe_unreached([*kept, *contents.non_lora_changes])


def stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Size and time of change of every file that is served, to notice that a folder was written anew."""
    files = [folder / CONFIG, folder / GATES, folder / SAMPLING, *sorted(plain_adapter(folder).glob("adapter_*"))]
    known = []
    for file in files:
        with suppress(OSError):  # a folder may be written anew at this moment
            status = file.stat()
            known.append((file.name, status.st_size, status.st_mtime_ns))
    return tuple(known)


def _read_factors(folder: Path, beside: bool) -> tuple[dict[str, int], str | None, list[str], list[str]]:
    """`factor_widths_and_sha256` of an adapter, without the hash where the files do not tell it, all modules that it adapts,
    embeddings and convolutions too, and those that λ can reach; refused where λ = 0 is not the base.

    Without `allow_extra_tensors`, an adapter that has other tensors than A and B is refused as well.
    """
    config, state = read_adapter(folder)
    if changed := base_change_reason(config.get("init_lora_weights")):
        _fail(folder / ADAPTER_CONFIG, changed)
    widths, sha256 = factor_widths_and_sha256(config, state)
    adapted = list(dict.fromkeys(path for key in state if (path := factor_of(key)[0])))
    gateable = [path for path in widths if not (is_never_gated(path) or find_adapted_parameters(config, path))]
    needing = [key for key in KEYS_NEEDING_MODEL if config.get(key)]
    if beside:
        return widths, None if needing else sha256, adapted, gateable
    if needing:
        _fail(folder / ADAPTER_CONFIG, f"{needing[0]} is set; such adapters are not served with gates")
    for key in state:
        # PEFT saves the base's own embedding beside an adapter on it, and vLLM skips it
        if not factor_of(key)[1] and not key.endswith(
            (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
        ):
            _fail(folder / ADAPTER_WEIGHTS, f"{key} is not a tensor of a plain LoRA adapter")
    return widths, sha256, adapted, gateable


def _make_constant_gates(folder: Path, override: Override, beside: bool) -> FolderGates:
    """A plain adapter under one λ: gates that say 1 everywhere, and the constant over them."""
    if override.constant is None:
        _fail(
            folder,
            "a plain adapter has no gates whose λ could be clipped; it takes @constant=C alone, or @lower=C for a part of it",
        )
    _, _, adapted, reached = _read_factors(folder, beside)
    if not reached:
        _fail(
            folder / ADAPTER_WEIGHTS,
            f"λ = {override.constant:g} would reach no module: embeddings, output heads, convolutions and experts keep full "
            f"strength, and the adapter has {', '.join(adapted[:3]) or 'no factors'}; use it as it is",
        )
    return FolderGates(
        folder=folder,
        adapter=folder,
        config=GateConfig(
            CONSTANT_RANGE.lower, CONSTANT_RANGE.upper, granularity="module"
        ),  # any: the constant replaces λ
        weights={},
        biases={path: torch.zeros(1) for path in reached},
        base={},
        digest="",  # there are no gates that could have changed, and vLLM knows a plain adapter by its folder
        override=override,
        ungated_modules=tuple(path for path in adapted if path not in reached),
    )


def _expand_partial_override(gates: FolderGates) -> FolderGates:
    """Gates of one constant per module in place of an override for a part; other gates as they are."""
    override = gates.override
    if override is None or override.part is None or override.constant is None:
        return gates
    try:
        laid = overrides_by_module(override, gates.biases)
    except GateError as error:
        _fail(gates.folder, str(error))
    bounds = range_around(override.constant)
    config = GateConfig(bounds.lower, bounds.upper, granularity="module")
    logits = {path: config.signed_map.logit(one.limits[0]) for path, one in laid.items()}
    biases = {path: torch.tensor([logit]) for path, logit in logits.items()}
    return replace(gates, config=config, weights={}, biases=biases, override=None)


def _fail(path: Path, message: str) -> NoReturn:
    raise ArtifactError(f"{path}: {message}")
