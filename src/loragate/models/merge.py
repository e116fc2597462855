"""An adapter merged into its base: a plain model folder for programs that cannot serve the adapter, such as vLLM with DoRA.

PEFT merges, in fp32, and the result is rounded once, to the dtype that is served. Head and embedding are tied no longer where
the adapter changes one of them. What was written is loaded and compared with the adapter on its base.
"""

from __future__ import annotations

import gc
import math
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from loragate.errors import ConfigError, LoragateError
from loragate.gates.eligibility import EIGHT_BIT, FOUR_BIT, NONE, describe_storage, quantization_of_config
from loragate.gates.schema import read_adapter_config
from loragate.models.loading import DEFAULT_LOADING, base_config, base_weights, explained, open_base
from loragate.models.output_difference import (
    OutputDifference,
    compare,
    compute_log_probs,
    make_probe_prompts,
    require_agreement,
)
from loragate.models.peft_loading import load_peft
from loragate.models.settings import Loading
from loragate.models.source import ModelRef


def merge_and_save(
    base: ModelRef, adapter: Path, folder: Path, how: Loading = DEFAULT_LOADING, *, called: str = ""
) -> OutputDifference:
    """Write base and adapter as one model to a new or empty folder, load it again, and compare it with the adapter on its base.

    A base that is stored in 8 or 4 bits is unpacked, as packed weights would round the adapter away. The limit holds against the
    adapter on the unpacked base; how far the written model is from the adapter on the packed one is a figure beside it.

    Args:
        how: dtype of the written weights ("auto" is the base's own) and trust; with a quantization, the plain base is also loaded
            in 8 or 4 bits for that figure.
        called: name of the adapter in errors, where `adapter` is a temporary folder.

    A ConfigError for a packed base without a dtype of 16 bits or more; a LoragateError where the written model does not compute
    what the adapter does on its base, or loses most of it by rounding, or the disk has no room for it.
    """
    trust, named = how.trust_remote_code, called or str(adapter)
    with explained("base model", base.name):
        stored = quantization_of_config(base_config(base, trust))
    if stored not in (NONE, EIGHT_BIT, FOUR_BIT):
        raise ConfigError(
            f"{base} is {describe_storage(stored)}, which is not unpacked here; name the plain one with --base"
        )
    if stored != NONE and how.dtype == "auto":
        raise ConfigError(
            f"{base} is {describe_storage(stored)}, whose packed weights would round a merged adapter away in part: say in which "
            "dtype the merged model is written, --dtype bfloat16"
        )
    packed = how.quantization if stored == NONE else stored
    on_packed = None
    if packed != NONE:  # a model of its own, as an adapter may change the base's tensors
        with explained("base model", base.name):
            reference = open_base(base, replace(how, dtype="auto"))
        with explained("adapter", named):
            reference = load_peft(reference, adapter)
        on_packed = compute_log_probs(reference, make_probe_prompts(reference.config, read_adapter_config(adapter)))
        del reference
        gc.collect()
    with explained("base model", base.name):
        model = base_weights(base, dtype="auto", trust_remote_code=trust)
    if stored != NONE:
        model = model.dequantize()
    output_dtype = model.dtype if how.dtype == "auto" else getattr(torch, how.dtype)
    prompts = make_probe_prompts(model.config, read_adapter_config(adapter))
    unadapted = compute_log_probs(model.float(), prompts)
    with explained("adapter", named):
        adapted = load_peft(model, adapter)
    expected = compute_log_probs(adapted, prompts)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(layer, BaseTunerLayer):  # its delta must not reach the layer that it is tied to
            own = layer.get_base_layer()
            own.weight = torch.nn.Parameter(own.weight.detach().clone())
    try:
        merged = adapted.merge_and_unload(safe_merge=True).to(output_dtype)
    except (RuntimeError, ValueError) as error:  # such as a bias of B where the base has none
        raise LoragateError(
            f"{named} cannot be merged into {base}: {error}. Generate and evaluate with the adapter unmerged"
        ) from error
    inputs, head = merged.get_input_embeddings(), merged.get_output_embeddings()
    if head is not None and head.weight is not inputs.weight:  # or the head would be saved, and read, as the embedding
        merged.config.tie_word_embeddings = merged.config.get_text_config().tie_word_embeddings = False
    size = sum(parameter.numel() for parameter in merged.parameters()) * output_dtype.itemsize
    # the disk is that of the nearest folder that exists
    there = next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
    free = shutil.disk_usage(there).free
    if free < size * 1.02:  # a fiftieth more than the weights
        raise LoragateError(
            f"{folder}: {named} merged into {base} takes {size / 1e9:.3g} GB and {free / 1e9:.3g} GB are free; make room, or "
            "choose an --out on a larger disk"
        )
    # unpacked weights have no way back to the names of packed ones
    merged.save_pretrained(str(folder), save_original_format=stored == NONE)
    del model, adapted, merged, inputs, head
    gc.collect()
    # in fp32, so that what is compared is the weights as they were rounded once
    written = base_weights(ModelRef(str(folder)), dtype=torch.float32, trust_remote_code=trust).eval()
    moved = compare(expected, unadapted, output_dtype).mean_difference
    found_log_probs = compute_log_probs(written, prompts)
    found = replace(compare(expected, found_log_probs, output_dtype), adapter_effect=moved)
    if on_packed is not None:
        apart = compare(on_packed, found_log_probs, output_dtype).mean_difference
        found = replace(found, storage=packed, packed_difference=apart)
    require_agreement(found, f"{named} merged into {base}", "the adapter on its base")
    # what fp32 rounds is nothing, even of an adapter that moves nothing
    if found.mean_difference > max(moved / 2, math.sqrt(torch.finfo(torch.float32).eps)):
        raise LoragateError(
            f"{named} merged into {base} loses half of what the adapter does or more, as its deltas are smaller than the steps "
            f"of {found.dtype}: {found}. Nothing was kept; merge with --dtype float32, or serve the adapter unmerged"
        )
    return found
