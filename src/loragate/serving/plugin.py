"""The vLLM plugin: `LoRARequest(name, id, GATED_FOLDER)` and `--lora-modules name=GATED_FOLDER` are served with gates.

vLLM calls `register` in every process it starts. Linear LoRA layers get gates beside A and B; loading an adapter reads
the gates that lie beside it; activating it fills its slot. Plain adapters, and the base, keep their numbers. On a CPU the
vocabulary's head is mended for adapters of every kind (`serving.head`). Where the plugin cannot work (another vLLM version, a
hook that moved) gated folders are refused with the reason and everything else is left alone. Without the plugin, vLLM finds no
adapter at the top of a gated folder and refuses it too.

`GATED_FOLDER@unit` is a virtual adapter: the same tensors with λ clipped (`gates.override_names`). vLLM takes it for another
adapter, with a name, an id and a place in the prefix cache of its own, so nothing computed under one λ is reused under another.

Here is what decides whether gates can be served at all; `serving.hooks` has what then takes the place of vLLM's own.
"""

from __future__ import annotations

import functools
import logging

from loragate.serving.hooks import install, refuse, take_over
from loragate.serving.versions import missing_hook, vllm_version, why_unsupported
from loragate.version import __version__

logger = logging.getLogger("vllm.loragate")
MARK = "loragate_gates"
"""Attribute of vLLM's WorkerLoRAManager: "" where gates are served, otherwise the reason why not."""


def register() -> None:
    """Entry point of `vllm.general_plugins`; may be called many times, and never raises."""
    try:
        from vllm.lora.worker_manager import WorkerLoRAManager

        if hasattr(WorkerLoRAManager, MARK):
            return
        reason = why_unsupported(vllm_version())
        if reason is None and (hook := missing_hook()) is not None:
            reason = (
                f"this build of vLLM {vllm_version()} differs from the one that loragate {__version__} knows ({hook}); "
                "gates cannot be served in it"
            )
        if reason is None:
            install()
        elif hasattr(WorkerLoRAManager, "_load_adapter"):
            take_over(WorkerLoRAManager, "_load_adapter", functools.partial(refuse, reason))
        setattr(WorkerLoRAManager, MARK, reason or "")
    except Exception:
        # an exception here would end vLLM for those who serve no gates; without hooks it refuses gated folders itself
        logger.exception("the loragate plugin could not be set up; gated adapters will be refused")
