"""An extraction on disk: an ordinary PEFT adapter folder, with a record of what it keeps and what it leaves out.

The folder appears whole or not at all. Before it does, PEFT itself is asked on the meta device whether the configuration
selects exactly the layers there are factors for, because it would load a stray factor without a word.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from loragate.conversion.extract import Extraction
from loragate.conversion.extract import extract_adapter as extract_adapter
from loragate.conversion.extract_checkpoint import TRANSPOSED
from loragate.errors import LoragateError
from loragate.files import new_folder, write_json, write_text
from loragate.gates.adapter_files import ADAPTER_CONFIG, PREFIX, read_adapter_config, write_factors
from loragate.gates.eligibility import lora_layers
from loragate.models import Loading, open_tokenizer
from loragate.records import to_json
from loragate.version import __version__

logger = logging.getLogger("loragate")
RECORD = "extract.json"
ENERGIES = (0.5, 0.8, 0.9, 0.95, 0.99)


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
    with torch.device("meta"), warnings.catch_warnings():
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
