"""The vLLM plugin: `LoRARequest(name, id, GATED_FOLDER)` and `--lora-modules name=GATED_FOLDER` are served with gates.

vLLM calls `register` in every process it starts. Linear LoRA layers get gates beside A and B; loading an adapter reads
the gates that lie beside it; activating it fills its slot. Plain adapters, and the base, keep their numbers. On a CPU the
vocabulary's head is mended for adapters of every kind (`serving.head`). Where the plugin cannot work (another vLLM version, a
hook that moved) gated folders are refused with the reason and everything else is left alone. Without the plugin, vLLM finds no
adapter at the top of a gated folder and refuses it too.

`GATED_FOLDER@unit` is a virtual adapter: the same tensors with λ clipped (`gates.override`). vLLM takes it for another
adapter, with a name, an id and a place in the prefix cache of its own, so nothing computed under one λ is reused under another.

The methods that take the place of vLLM's stand here; `serving.hooks`, which needs vLLM to be imported, puts them there.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loragate.errors import LoragateError
from loragate.gates.override import Override, split_folder
from loragate.gates.recommended import generation_settings, recommended_temperature, warn_elsewhere
from loragate.models.place import is_gated, sampling_of
from loragate.serving.versions import missing_hook, vllm_version, why_unsupported
from loragate.version import __version__

logger = logging.getLogger("vllm.loragate")
ADAPTERS = "LORAGATE_ADAPTERS"
"""Environment variable: JSON {served name: folder}, whose NAME@OVERRIDE are loaded when a client first asks for one."""
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
            from loragate.serving.hooks import install

            install()
        elif hasattr(WorkerLoRAManager, "_load_adapter"):
            take_over(WorkerLoRAManager, "_load_adapter", functools.partial(_refuse, reason))
        setattr(WorkerLoRAManager, MARK, reason or "")
    except Exception:
        # an exception here would end vLLM for those who serve no gates; without hooks it refuses gated folders itself
        logger.exception("the loragate plugin could not be set up; gated adapters will be refused")


def _needs_lambda(path: str) -> tuple[Path, Override | None] | None:
    """(folder, override) of a request for which λ has to be computed; None for a plain adapter, and for what is not here."""
    named, override = split_folder(path)
    folder = Path(named).expanduser()
    return (folder, override) if override is not None or is_gated(folder) else None


def take_over(owner: Any, name: str, method: Callable[..., Any]) -> None:
    """Put `method` in the place of one of vLLM's; it is given the original before what that is given."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def taken(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(original, self, *args, **kwargs)

    setattr(owner, name, taken)


def load(original: Any, self: Any, lora_request: Any) -> Any:
    """`_load_adapter` that reads gates beside the adapter, and refuses them before anything is activated."""
    from vllm.lora.utils import get_adapter_absolute_path

    # they need PEFT, which vLLM does without
    from loragate.models.folder_gates import read_gates
    from loragate.serving.placing import place_gates

    try:
        named, override = split_folder(lora_request.lora_path)
        folder = Path(get_adapter_absolute_path(named))  # a hub id is downloaded
        if override is None and not is_gated(folder):
            _remember(self, lora_request, "")
            return original(self, lora_request)
        gates = read_gates(folder, override)
        _remember(self, lora_request, gates.digest)
        placed = place_gates(gates, self._adapter_manager)
    except LoragateError as error:
        raise ValueError(str(error)) from error
    moved = copy.copy(lora_request)  # a msgspec struct
    moved.lora_path = str(gates.adapter)
    lora = original(self, moved)
    lora.loragate, lora.loragate_folder = placed, lora_request.lora_path
    return lora


def add(original: Any, self: Any, lora_request: Any) -> bool:
    """`add_adapter` that notices an id given to another folder; vLLM would go on with the one it has."""
    held = self._adapter_manager.list_adapters().get(lora_request.lora_int_id)
    if held is not None:
        before = getattr(held, "loragate_folder", None)
        changed = before != lora_request.lora_path
        if changed and (before is not None or _needs_lambda(lora_request.lora_path)):
            self._adapter_manager.remove_adapter(lora_request.lora_int_id)
    added: bool = original(self, lora_request)
    return added


def check_request(original: Any, self: Any, lora_request: Any) -> None:
    """The front end's check of a request: what is wrong with a gated folder is this request's error, not the engine's."""
    original(self, lora_request)
    if lora_request is None:
        return
    try:
        found = _needs_lambda(lora_request.lora_path)
        if found is None or not found[0].is_dir():
            return
        from loragate.models.folder_gates import read_gates, stamp

        checked = self.__dict__.setdefault("_loragate_checked", {})
        now, key = stamp(found[0]), (lora_request.lora_name, lora_request.lora_path)
        if checked.get(key) != now:
            _remember(self, lora_request, read_gates(*found).digest)
            checked[key] = now
    except LoragateError as error:
        raise ValueError(str(error)) from error


def recommend(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """The server's look-up of a request's adapter; what the request leaves open is sampled as the adapter's folder recommends.

    vLLM's own defaults are one for all names, and base and plain adapter keep those.
    """
    lora_request = original(self, request, *args, **kwargs)
    if lora_request is None or getattr(request, "temperature", 0.0) is not None:
        return lora_request
    temperature = recommended_temperature(_sampling(lora_request.lora_path))
    if temperature is not None:
        # vLLM reads no do_sample: greedy decoding is a temperature of 0 there
        for key, value in {**generation_settings(temperature), "temperature": temperature}.items():
            if getattr(request, key, value) is None:
                setattr(request, key, value)
    return lora_request


def warn(
    original: Any, self: Any, prompt: Any, sampling_params: Any, *args: Any, lora_request: Any = None, **kwargs: Any
) -> Any:
    """A server's `generate` that warns where an adapter is sampled at another temperature than its folder recommends."""
    if lora_request is not None:
        told = logging.getLogger("loragate")
        # in servers that `loragate serve` starts, vLLM's loggers and the root tell of errors alone
        told.setLevel(logging.WARNING)
        record = _sampling(lora_request.lora_path)
        warn_elsewhere(lora_request.lora_name, record, sampling_params.temperature, told)
    return original(self, prompt, sampling_params, *args, lora_request=lora_request, **kwargs)


@functools.lru_cache(maxsize=1024)
def _sampling(path: str) -> dict[str, Any]:
    """The record of an adapter's folder as it is served, see `sampling_of`; {} for a folder that will be refused."""
    try:
        named, override = split_folder(path)
        return sampling_of(Path(named).expanduser()) if override is None else {}
    except LoragateError:
        return {}


def compile_key(original: Any, self: Any, *args: Any, **kwargs: Any) -> str:
    """The key of vLLM's compile cache with the plugin in it: a graph made without gates must not be taken for one with."""
    text = f"{original(self, *args, **kwargs)}:loragate {__version__}"
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _refuse(reason: str, original: Any, self: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
    """`_load_adapter` that names the reason when a gated folder comes; plain adapters are vLLM's own affair."""
    if _needs_lambda(getattr(lora_request, "lora_path", "")):
        raise ValueError(reason)
    return original(self, lora_request, *args, **kwargs)


def _remember(owner: Any, lora_request: Any, digest: str) -> None:
    """Refuse other gates under a name and folder that were served before.

    The keys of vLLM's prefix cache hold the adapter's name and path, not its values: blocks of the old gates would be
    taken for the new ones'.
    """
    known = owner.__dict__.setdefault("_loragate_digests", {})
    before = known.setdefault((lora_request.lora_name, lora_request.lora_path), digest)
    if before != digest:
        raise LoragateError(
            f"{lora_request.lora_path}: the folder has changed since it was served as {lora_request.lora_name!r}. vLLM's "
            "prefix cache cannot tell the two apart: put the new gates into a folder of their own, or load them under "
            "another name"
        )
