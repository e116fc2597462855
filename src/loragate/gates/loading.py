"""From a folder, or a hub id, to a model that is ready to generate: base, Stage-I adapter and gates in one call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loragate.errors import ArtifactError
from loragate.gates.artifact import load_gates
from loragate.gates.hub import gated_folder, is_hub_id, split_base
from loragate.gates.schema import ADAPTER, CONFIG, read_gate_config

# PEFT's names of tasks whose models have another class and other outputs
_OTHER_TASKS = ("SEQ_CLS", "SEQ_2_SEQ_LM", "TOKEN_CLS", "QUESTION_ANS")


def load_gated(
    folder: str | Path,
    *,
    base: str | Path | None = None,
    revision: str | None = None,
    base_revision: str | None = None,
    **from_pretrained_kwargs: Any,
) -> Any:
    """Load base, adapter and gates of an artifact.

    Args:
        folder: what `loragate calibrate --out` or `loragate.save_gates` wrote, or its hub id ("owner/name", also
            "owner/name@revision"), which is downloaded.
        base: where to find the base instead of the id recorded in the artifact: a folder, "owner/name" or
            "owner/name@revision".
        revision: branch, tag or commit of the artifact's repository on the hub.
        base_revision: the same of the base; the recorded one where `base` is not given.
        **from_pretrained_kwargs: passed to `AutoModelForCausalLM.from_pretrained` (dtype, device_map,
            quantization_config, attn_implementation, ...). `trust_remote_code` stays off unless given.

    Returns:
        A gated PeftModel in eval mode with every parameter frozen; `generate`, KV cache, batches and padding work as
        with any PeftModel. `loragate.gates.train_gates_only(model)` has the gates train again.

    Raises:
        ArtifactError: if the artifact is malformed, belongs to another base or adapter, or it or the base is not to be had.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = gated_folder(folder, revision)
    record = read_gate_config(folder)
    if not (folder / ADAPTER / "adapter_config.json").is_file():
        raise ArtifactError(f"{folder / ADAPTER}: the Stage-I adapter is missing; the folder is incomplete")
    if (task := _task_type(folder / ADAPTER / "adapter_config.json")) in _OTHER_TASKS:
        raise ArtifactError(_other_class(folder, f"the adapter's task_type is {task}"))
    base_id = str(base) if base is not None else record["base"]["id"]
    if not base_id:
        raise ArtifactError(f"{folder / CONFIG}: key 'base.id' is empty; say which base with base=…")
    if base is None and not base_revision:
        base_revision = record["base"].get("revision")
    base_id, base_revision = split_base(base_id, base_revision)
    if base_revision:
        from_pretrained_kwargs["revision"] = base_revision
    if base is None and Path(base_id).is_absolute() and not Path(base_id).exists():
        raise ArtifactError(f"{folder / CONFIG}: the base {base_id} is not here; say where it is with base=… (--base)")
    try:
        model = AutoModelForCausalLM.from_pretrained(base_id, **from_pretrained_kwargs)
    except (OSError, ValueError) as error:
        holds_no_model = Path(base_id).is_dir() and not (Path(base_id) / "config.json").is_file()
        if isinstance(error, ValueError) and str(error).startswith("Unrecognized configuration class"):
            found = str(error).split(" for this kind", 1)[0].removeprefix("Unrecognized configuration class ")
            raise ArtifactError(_other_class(folder, f"{base_id} has the configuration {found}")) from error
        if isinstance(error, ValueError) and not holds_no_model:
            raise  # about an argument, such as trust_remote_code or quantization_config
        where = None if base is not None else folder / CONFIG
        raise ArtifactError(_without_base(base_id, where, error)) from error
    try:
        gated = PeftModel.from_pretrained(model, str(folder / ADAPTER))
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        raise ArtifactError(_other_size(folder, base_id, error)) from error
    load_gates(gated, folder)
    gated.eval()
    return gated


def _task_type(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("task_type")
    except (OSError, ValueError, AttributeError):
        return None  # PEFT reads the file next, and says what is wrong with it


def _other_class(folder: Path, reason: str) -> str:
    """What to do where the base is no causal language model of transformers."""
    return (
        f"{folder}: load_gated loads causal language models (AutoModelForCausalLM), and {reason}. Load the base with its own "
        f'class, then PeftModel.from_pretrained(base, "{folder / ADAPTER}") and loragate.load_gates(model, "{folder}")'
    )


def _other_size(folder: Path, base: str, error: Exception) -> str:
    """What to do where the adapter's tensors have other shapes than the base's, most often for added tokens."""
    detail = next(line.strip() for line in str(error).splitlines() if "size mismatch" in line)
    return (
        f"{folder / ADAPTER} does not fit the base {base} ({detail[:300]}). Either it was made for another base (base=…), or "
        "tokens were added before it was trained: then load the base, base.resize_token_embeddings(SIZE), "
        f'PeftModel.from_pretrained(base, "{folder / ADAPTER}") and loragate.load_gates(model, "{folder}"); or save such a base '
        "once and name it with base=…"
    )


def _without_base(base: str, recorded_in: Path | None, error: Exception) -> str:
    """What to do about a base that transformers could not load; `recorded_in` names it, unless it was given."""
    named = f"the base {base}" if recorded_in is None else f"{recorded_in}: the recorded base {base}"
    said = (str(error).splitlines() or [type(error).__name__])[0]
    if Path(base).exists():
        return f"{named} cannot be loaded ({said})"
    if recorded_in is None:
        return f"{named} is no folder here, and cannot be had from the hub either ({said})"
    if is_hub_id(base):
        lost = f"is no folder here (a relative path counts from the working folder), and cannot be had from the hub ({said})"
    else:
        lost = "is a relative path that leads to no folder from the working folder"
    return f"{named} {lost}; say where the base is with base=… (--base)"
