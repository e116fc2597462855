"""An extraction on disk: an ordinary PEFT adapter folder, with a record of what it keeps and what it leaves out.

The folder appears whole or not at all. Before it does, PEFT itself is asked on the meta device whether the configuration
selects exactly the layers there are factors for, because it would load a stray factor without a word.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from loragate.conversion.extract import Extraction
from loragate.conversion.extract_layout import TRANSPOSED
from loragate.errors import ConfigError, LoragateError
from loragate.files import describe_os_error, write_atomically, write_json, write_text
from loragate.gates.eligibility import lora_layers
from loragate.version import __version__

RECORD = "extract.json"
ENERGIES = (0.5, 0.8, 0.9, 0.95, 0.99)


def write_adapter_folder(
    extraction: Extraction,
    folder: str | Path,
    *,
    model: str,
    base: str,
    base_revision: str = "",
    also: Callable[[Path], None] | None = None,
) -> Path:
    """Write the adapter.

    Args:
        extraction: what `extract_adapter` returned.
        folder: new, or empty.
        model: name of the fine-tuned model, for the record.
        base, base_revision: recorded as the adapter's base.
        also: writes more files (a tokenizer) into the folder before it gets its name.

    Returns:
        The folder: adapter_config.json, adapter_model.safetensors, extract.json, README.md.

    Raises:
        ConfigError: if the folder holds anything.
        LoragateError: if it cannot be written; nothing is left behind.
    """
    folder = Path(folder)
    require_new(folder)
    config = LoraConfig(
        r=extraction.rank,
        lora_alpha=extraction.rank,
        lora_dropout=0.0,
        target_modules=target_names(extraction),
        fan_in_fan_out=_transposed(extraction),
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=base,
        revision=base_revision or None,
    )
    _require_exact(extraction, config)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".partial"))
    except OSError as error:
        raise LoragateError(describe_os_error(folder, error)) from error
    try:
        _write_adapter(extraction, config, partial)
        write_json(partial / RECORD, as_record(extraction, model, base))
        write_text(partial / "README.md", _card(extraction, model, base))
        if also is not None:
            also(partial)
        mask = os.umask(0)
        os.umask(mask)
        partial.chmod(0o777 & ~mask)
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
    except OSError as error:
        raise LoragateError(describe_os_error(folder, error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def require_new(folder: Path) -> None:
    """Refuse a folder that holds anything; nothing is ever overwritten."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is a file; give a folder")
    if folder.is_dir() and (present := sorted(path.name for path in folder.iterdir())):
        raise ConfigError(f"--out {folder} is not empty (it holds {', '.join(present[:3])}); choose another folder")


def target_names(extraction: Extraction) -> list[str]:
    """PEFT's target_modules: last names where they select exactly the extracted layers, full paths otherwise."""
    chosen = set(extraction.factors)
    ends = {path.rsplit(".", 1)[-1] for path in chosen}
    matched = {path for path, _ in extraction.layout.model.named_modules() if path.rsplit(".", 1)[-1] in ends}
    return sorted(ends if matched == chosen else chosen)


def as_record(extraction: Extraction, model: str, base: str) -> dict[str, Any]:
    """The figures of an extraction as JSON values; energies are sums of squared differences."""
    return {
        "loragate_version": __version__,
        "model": model,
        "base": base,
        "rank": extraction.rank,
        "energy_kept": extraction.kept,
        "energy_left_out": extraction.left_share,
        "relative_size": (extraction.energy / extraction.base_energy) ** 0.5 if extraction.base_energy else None,
        "rank_for_energy": {str(share): extraction.rank_for(share) for share in ENERGIES},
        "left_out": {
            kind: {"tensors": part.tensors, "energy": part.energy, "largest": part.largest}
            for kind, part in extraction.left_out.items()
        },
        "unchanged_linear_layers": extraction.unchanged,
        "notes": extraction.notes,
        "modules": {
            module.path: {
                "d_in": module.d_in,
                "d_out": module.d_out,
                "energy": module.energy,
                "kept": module.kept,
                "decomposition": "full" if module.complete else "randomised",
            }
            for module in extraction.modules
        },
    }


def _transposed(extraction: Extraction) -> bool:
    return any(extraction.layout.kinds[f"{path}.weight"] == TRANSPOSED for path in extraction.factors)


def _require_exact(extraction: Extraction, config: LoraConfig) -> None:
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(extraction.layout.model, LoraConfig(**{**config.to_dict(), "inference_mode": False}))
        placed = {
            path: (tuple(layer.lora_A["default"].weight.shape), tuple(layer.lora_B["default"].weight.shape))
            for path, layer in lora_layers(model, "default")
        }
        model.unload()
    held = {path: (tuple(a.shape), tuple(b.shape)) for path, (a, b) in extraction.factors.items()}
    if placed != held:
        odd = sorted(set(placed.items()) ^ set(held.items()))[0][0]
        raise LoragateError(f"PEFT would not place the factors of {odd} as they were extracted; nothing was written")


def _write_adapter(extraction: Extraction, config: LoraConfig, folder: Path) -> None:
    tensors = {}
    for path, (lora_a_RD, lora_b_OR) in extraction.factors.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = lora_a_RD.contiguous()
        tensors[f"base_model.model.{path}.lora_B.weight"] = lora_b_OR.contiguous()
    write_atomically(
        folder / "adapter_model.safetensors", lambda path: save_file(tensors, str(path), metadata={"format": "pt"})
    )
    config.save_pretrained(str(folder))
    # PEFT keeps the targets as a set, whose order differs from run to run
    written = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    write_json(folder / "adapter_config.json", {**written, "target_modules": target_names(extraction)})


def _card(extraction: Extraction, model: str, base: str) -> str:
    return (
        f"# LoRA adapter extracted from {Path(model).name}\n\n"
        f"Rank {extraction.rank}, {len(extraction.factors)} linear layers, base `{base}`. It holds {extraction.kept:.1%} of the "
        f"energy (sum of squares) of the linear layers' difference; {extraction.left_share:.1%} of the whole difference lies "
        f"elsewhere and is left out. `{RECORD}` has the figures of every layer.\n"
    )
