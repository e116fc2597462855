"""From a folder to a model that is ready to generate: base, Stage-I adapter and gates in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loragate.errors import ArtifactError
from loragate.gates.artifact import load_gates
from loragate.gates.schema import ADAPTER, CONFIG, read_gate_config


def load_gated(folder: str | Path, *, base: str | Path | None = None, **from_pretrained_kwargs: Any) -> Any:
    """Load base, adapter and gates of an artifact.

    Args:
        folder: what `loragate calibrate --out` or `loragate.save_gates` wrote.
        base: where to find the base instead of the id recorded in the artifact (a hub id or folder).
        **from_pretrained_kwargs: passed to `AutoModelForCausalLM.from_pretrained` (dtype, device_map,
            quantization_config, attn_implementation, ...). `trust_remote_code` stays off unless given.

    Returns:
        A gated PeftModel in eval mode with every parameter frozen; `generate`, KV cache, batches and padding work as
        with any PeftModel.

    Raises:
        ArtifactError: if the artifact is malformed, or belongs to another base or adapter.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = Path(folder)
    record = read_gate_config(folder)
    if not (folder / ADAPTER / "adapter_config.json").is_file():
        raise ArtifactError(f"{folder / ADAPTER}: the Stage-I adapter is missing; the folder is incomplete")
    base_id = str(base) if base is not None else record["base"]["id"]
    if not base_id:
        raise ArtifactError(f"{folder / CONFIG}: key 'base.id' is empty; say which base with base=…")
    if base is None and record["base"].get("revision"):
        from_pretrained_kwargs.setdefault("revision", record["base"]["revision"])
    if base is None and Path(base_id).is_absolute() and not Path(base_id).exists():
        raise ArtifactError(f"{folder / CONFIG}: the base {base_id} is not here; say where it is with base=… (--base)")
    model = AutoModelForCausalLM.from_pretrained(base_id, **from_pretrained_kwargs)
    gated = PeftModel.from_pretrained(model, str(folder / ADAPTER))
    load_gates(gated, folder)
    gated.eval()
    return gated
