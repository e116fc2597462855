"""What becomes of a request in vLLM's front end: its adapter, how strongly it acts, what is refused, and what the log says.

What a request lays over λ is put behind its adapter's folder (`gates.override`). vLLM carries the folder through scheduler, prefix
cache and worker, so that two strengths of an adapter are kept apart wherever two adapters are, and share its slot.

Each function of a method's signature takes the place of one of vLLM's (`serving.hooks`) and is given the original first. What
needs PEFT, which vLLM does without, is imported on first use.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import logging
import re
import time
from collections.abc import AsyncGenerator, Collection, Mapping
from http import HTTPStatus
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from loragate import models
from loragate.errors import ConfigError, LoragateError, nearest
from loragate.gates.override import FIELDS, Override, parse_slot_override, requested_override, split_folder, split_name
from loragate.gates.recommended import generation_settings, recommended_temperature, warn_other_temperature
from loragate.models.source import is_gated, read_sampling_record

log = logging.getLogger("loragate.requests")
"""One line for each request of a server."""


def split_gated_path(path: str) -> tuple[Path, Override | None] | None:
    """(folder, override) of a request for which λ has to be computed; None for a plain adapter, and for what is not here."""
    named, override = split_folder(path)
    folder = Path(named).expanduser()
    return (folder, override) if override is not None or is_gated(folder) else None


def require_unchanged(owner: Any, lora_request: Any, digest: str) -> None:
    """Refuse other gates under a name and folder that were served before.

    The keys of vLLM's prefix cache hold the adapter's name and path, not its values: blocks of the old gates would be
    taken for the new ones'.
    """
    known, key = owner.__dict__.setdefault("_loragate_digests", {}), (lora_request.lora_name, lora_request.lora_path)
    if key not in known:
        _remember(known, key, digest)
    if known[key] != digest:
        raise LoragateError(
            f"{lora_request.lora_path}: the folder has changed since it was served as {lora_request.lora_name!r}. vLLM's "
            "prefix cache cannot tell the two apart: put the new gates into a folder of their own, or load them under "
            "another name"
        )


KEPT = 4096
"""Adapters of which something is kept: a folder that is written again and again is another one each time."""


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value, and let go of the oldest one of too many."""
    known[key] = value
    if len(known) > KEPT:
        del known[next(iter(known))]


def assign_adapter_id(lora_request: Any) -> Any:
    """The adapter of a server's request under the number of what its folder holds now: one slot for all names of a folder.

    A folder that was written anew is another adapter: it has another number, and so another name, by which vLLM's prefix cache
    and its batches tell adapters apart. Several API servers share these, so that both follow from folder and files alone.
    """
    folder = split_folder(lora_request.lora_path)[0]
    slot = parse_slot_override(lora_request.lora_path)[0]
    digest = hashlib.sha256(repr((slot, models.stamp(Path(folder).expanduser()))).encode()).digest()
    other = copy.copy(lora_request)  # a msgspec struct
    # the lower half is vLLM's, which counts from 1, and the workers hold 32 bits
    other.lora_int_id = 2**30 + int.from_bytes(digest[:8], "big") % 2**30
    other.lora_name = f"{lora_request.lora_name}#{other.lora_int_id}"
    return other


async def add_adapter(original: Any, self: Any, lora_request: Any) -> bool:
    """A server's `add_lora`, under the number of `assign_adapter_id`."""
    other = assign_adapter_id(lora_request)
    lora_request.lora_int_id = other.lora_int_id  # the server keeps this very object for the name
    try:
        added: bool = await original(self, other)
    except Exception as error:
        if other.lora_name not in str(error):
            raise
        # by the client's name for it, at which vLLM tells a folder that is not there from a fault of its own
        raise RuntimeError(str(error).replace(other.lora_name, lora_request.lora_name)) from error
    _remember(self.__dict__.setdefault("_loragate_loaded", {}), other.lora_int_id, True)
    return added


async def load_adapter(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """A server's answer to a client that loads an adapter: what the engine refuses is the client's error, not the server's."""
    found = await original(self, request, *args, **kwargs)
    error = getattr(found, "error", None)
    if error is not None and error.code == HTTPStatus.INTERNAL_SERVER_ERROR and not self.engine_client.errored:
        error.code, error.type = HTTPStatus.BAD_REQUEST.value, "BadRequestError"
        error.message = _reason(error.message)
    return found


def _reason(message: str) -> str:
    """What an engine's process says, without which of its calls said it."""
    message = message.removeprefix("Call to add_lora method failed: ")
    inner = re.fullmatch(r"Worker failed with error '(.*)', please check the\s*stack trace.*", message, re.DOTALL)
    return inner[1] if inner else message


def validate_request(original: Any, self: Any, lora_request: Any) -> None:
    """The front end's check of a request."""
    original(self, lora_request)
    if lora_request is not None:
        check_adapter(self, lora_request)


def check_adapter(processor: Any, lora_request: Any) -> None:
    """Raises ValueError for what is wrong with a request's folder and override: the request's error, not the engine's.

    Args:
        processor: vLLM's `InputProcessor`; what was checked is kept on it, as is whose gates are served.
    """
    # limits of λ are those of a text's tokens, and what an encoder made of a picture is kept by the adapter's name
    if processor.lora_config.enable_tower_connector_lora and parse_slot_override(lora_request.lora_path)[1] is not None:
        raise ValueError(
            f"{lora_request.lora_name}: a strength, and an override of λ, reaches a text's tokens alone; with "
            "--enable-tower-connector-lora an adapter is served as it is, or by a name with a part (@lower=0.5)"
        )
    try:
        found = split_gated_path(lora_request.lora_path)
        if found is None or not found[0].is_dir():
            return
        folder, override = found
        checked = processor.__dict__.setdefault("_loragate_checked", {})
        # of all overrides, a plain adapter takes some and not others
        kind = None if override is None else (override.constant is None, override.part)
        name, (slot, over) = lora_request.lora_name, parse_slot_override(lora_request.lora_path)
        if over is not None:  # asked for by name: the files are the same at every strength
            name = name.replace(lora_request.lora_path[len(slot) :], "")
        now, key = models.stamp(folder), (name, str(folder), kind)
        if checked.get(key) != now:
            moved = copy.copy(lora_request)
            moved.lora_name, moved.lora_path = name, str(folder)
            gates = models.read_gates(folder, override)
            require_unchanged(processor, moved, gates.digest)
            _remember(checked, key, now)
    except LoragateError as error:
        raise ValueError(str(error)) from error


def apply_strength_fields(lora_request: Any, fields: Mapping[str, Any] | None, where: str) -> Any:
    """The adapter of a request with the override behind its folder that the request's fields ask for.

    The folder is what vLLM carries through scheduler, prefix cache and worker: it keeps two strengths of an adapter apart, and
    tells the worker what to lay over λ.

    Raises:
        ValueError: for fields that cannot be (`requested_override`), or that have no effect on this model.
    """
    try:
        asked = requested_override(fields or {})
    except LoragateError as error:
        raise ValueError(str(error)) from error
    if asked is None:
        return lora_request
    if lora_request is None:
        raise ValueError(f"{where}: no adapter is asked for, and a base has no strength; name an adapter as the model")
    if split_folder(lora_request.lora_path)[1] is not None:
        raise ValueError(
            f"{where}: {lora_request.lora_name} carries an override of λ in its name; ask for the adapter without it"
        )
    folder = Path(lora_request.lora_path).expanduser()
    if "lora_scale" in (fields or {}) and folder.is_dir():
        try:
            unreached = _unreached(folder, models.stamp(folder))
        except LoragateError as error:
            raise ValueError(str(error)) from error
        if unreached:
            raise ValueError(
                f"{where}: lora_scale does not reach {len(unreached)} of the adapter's modules ({unreached[0]}), which have no λ: "
                f"0 would not be the base; {lora_request.lora_name}@{asked} scales the others"
            )
    other = copy.copy(lora_request)
    other.lora_path = f"{lora_request.lora_path}@{asked}"
    return other


@functools.lru_cache(maxsize=1024)
def _unreached(folder: Path, stamp: Any) -> tuple[str, ...]:
    """The modules of an adapter that no scale reaches, while its files have this stamp; in vLLM experts are one fused layer."""
    found = models.read_gates(folder, Override(constant=0.0))
    return *found.ungated_modules, *(path for path in found.biases if ".experts." in path)


def apply_fields(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`process_inputs`, through which every request goes, with the fields among `SamplingParams.extra_args` applied."""
    given = inspect.signature(original).bind(self, *args, **kwargs)
    fields = getattr(given.arguments["params"], "extra_args", None)
    given.arguments["lora_request"] = apply_strength_fields(given.arguments.get("lora_request"), fields, "extra_args")
    return original(*given.args, **given.kwargs)


async def check_model(original: Any, self: Any, request: Any) -> Any:
    """The server's check that a model is served: NAME@OVERRIDE of a served adapter is, whether or not it was loaded so.

    Every endpoint asks it first. So what a request leaves open is set here, before sampling parameters are made of it, and
    what cannot be streamed is refused here, before a stream's status is sent.
    """
    try:
        lora_request = _named_override(self.models, request.model)
        if lora_request is None:
            if (refused := await original(self, request)) is not None:
                error = getattr(refused, "error", None)
                if error is not None and error.code == HTTPStatus.NOT_FOUND:
                    # vLLM lists the names of the base alone
                    names = [*(one.name for one in self.models.base_model_paths), *self.models.lora_requests]
                    error.message = _unknown_model(request.model, names)
                return refused
            lora_request = self.models.lora_requests.get(request.model)
        if lora_request is None:
            return None
        for fields in _strength_fields(request):
            lora_request = apply_strength_fields(lora_request, fields, request.model)
        sample_as_recommended(request, lora_request)
        # a server that only renders has no engine
        if getattr(request, "stream", False) and (engine := getattr(self, "engine_client", None)) is not None:
            await ensure_loaded(engine, lora_request)
    except (LoragateError, ValueError) as error:
        return self.create_error_response(str(error), param="model")
    return None


def find_adapter(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """The server's look-up of a request's adapter, with what name and fields lay over its λ."""
    try:
        lora_request = _named_override(self.models, request.model)
    except LoragateError as error:
        raise ValueError(str(error)) from error
    if lora_request is None:
        lora_request = original(self, request, *args, **kwargs)
    for fields in _strength_fields(request):
        lora_request = apply_strength_fields(lora_request, fields, request.model or "base")
        for name in FIELDS:  # taken out, as it is applied here
            fields.pop(name, None)
    # here too, for an adapter that is found by the request's pictures and not by its name
    sample_as_recommended(request, lora_request)
    return lora_request


def _strength_fields(request: Any) -> list[dict[str, Any]]:
    """Where a request may say a strength: at the top, for OpenAI's clients, or where vLLM expects what it does not know."""
    sampling = getattr(request, "sampling_params", None)
    places = (
        getattr(request, "model_extra", None),
        getattr(request, "vllm_xargs", None),
        getattr(sampling, "extra_args", None),
    )
    return [fields for fields in places if fields]


def sample_as_recommended(request: Any, lora_request: Any) -> None:
    """Set what a request leaves open of its sampling as its adapter's folder recommends.

    vLLM's own defaults are one for all names, and base and plain adapter keep those.

    Raises:
        ValueError: for several answers to be drawn greedily, which nobody has asked for.
    """
    # /inference/v1/generate takes the parameters themselves, where what was left open has vLLM's default
    sampling = getattr(request, "sampling_params", None) or request

    def is_open(key: str) -> bool:
        if sampling is request:
            return getattr(request, key, "none there") is None
        return hasattr(sampling, key) and not request.is_sampling_param_provided(key)

    if lora_request is None or not is_open("temperature"):
        return
    temperature = recommended_temperature(_sampling(lora_request.lora_path))
    if temperature is None:
        return
    count = getattr(sampling, "n", None) or 1
    if temperature == 0 and count > 1 and not getattr(request, "use_beam_search", False):
        raise ValueError(
            f"n = {count} without a temperature: {lora_request.lora_name} is recommended greedily, where all answers are the "
            "same; send a temperature above 0 to draw several, or leave n out"
        )
    # vLLM reads no do_sample: greedy decoding is a temperature of 0 there
    for key, value in {**generation_settings(temperature), "temperature": temperature}.items():
        if is_open(key):
            setattr(sampling, key, value)


def _named_override(served: Any, name: str | None) -> Any:
    """The adapter of NAME@OVERRIDE where NAME is served and the whole is not; None for any other name.

    Raises:
        LoragateError: for an override that is not known, or a second one.
    """
    head, _, text = (name or "").rpartition("@")
    found = None if name in served.lora_requests else served.lora_requests.get(head)
    if name is None or found is None:
        return None
    split_name(name)
    if split_folder(found.lora_path)[1] is not None:
        raise ConfigError(f"{name}: {head} carries an override of λ already")
    other = copy.copy(found)
    other.lora_name, other.lora_path = name, f"{found.lora_path}@{text}"
    return other


async def ensure_loaded(engine: Any, lora_request: Any) -> Any:
    """`assign_adapter_id`, in the engine before its request is: what is refused is the request's error.

    vLLM makes an error of the server, without the reason, of what is refused only when it takes the request.
    """
    now = assign_adapter_id(lora_request)
    if now.lora_int_id not in engine.__dict__.setdefault("_loragate_loaded", {}):
        try:
            await engine.add_lora(copy.copy(lora_request))
        except Exception as error:
            if engine.errored:
                raise
            raise ValueError(_reason(str(error))) from error
    check_adapter(engine.input_processor, now)
    return now


async def answer(original: Any, self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
    """A server's `generate`, and its `encode`, which embeds or classifies a text, with one line of the log for each request.

    It warns where an adapter is sampled at another temperature than its folder recommends, and loads a folder again that was
    written anew since it was served.
    """
    given = inspect.signature(original).bind(self, *args, **kwargs)
    sampling, adapter = (given.arguments.get(name) for name in ("sampling_params", "lora_request"))
    name = adapter.lora_name if adapter else "none"
    if adapter:
        if sampling:
            warn_other_temperature(
                name, _sampling(adapter.lora_path), sampling.temperature, logging.getLogger("loragate")
            )
        adapter = given.arguments["lora_request"] = await ensure_loaded(self, adapter)
    began, tokens, last = time.monotonic(), 0, None
    try:
        async for last in original(*given.args, **given.kwargs):
            made = sum(len(one.token_ids) for one in last.outputs) if sampling else 0
            # a stream's parts hold what is new; otherwise the last one holds all
            tokens = tokens + made if sampling and getattr(sampling.output_kind, "name", "") == "DELTA" else made
            yield last
    finally:
        override = adapter and str(adapter.lora_path)[len(split_folder(adapter.lora_path)[0]) + 1 :]
        log.info(
            "request %s: model %s, adapter %s, strength %s, %d prompt tokens (%d cached), %d tokens, %.2f s%s",
            given.arguments["request_id"],
            self.model_config.served_model_name,
            name,
            override or ("as it is" if adapter else "none"),
            len(getattr(last, "prompt_token_ids", None) or ()),
            getattr(last, "num_cached_tokens", None) or 0,
            tokens,
            time.monotonic() - began,
            "" if getattr(last, "finished", False) else ", not finished",
        )


def _sampling(path: str) -> dict[str, Any]:
    """The record of an adapter's folder as it is served, see `read_sampling_record`; {} for a folder that will be refused."""
    try:
        named, override = split_folder(path)
        folder = Path(named).expanduser()
        return _sampling_of(folder, models.stamp(folder)) if override is None else {}
    except LoragateError:
        return {}


@functools.lru_cache(maxsize=1024)
def _sampling_of(folder: Path, stamp: Any) -> dict[str, Any]:
    """`read_sampling_record` a folder, while its files have this stamp."""
    return read_sampling_record(folder)


def open_log() -> None:
    """Show `log` whatever vLLM shows: `loragate serve` lets it show errors alone."""
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%m-%d %H:%M:%S"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def add_routes(router: Any) -> None:
    """`/v1/models/NAME`, which OpenAI's clients ask for, beside vLLM's list of all models."""
    request_class, reply = resolve_name("fastapi:Request"), resolve_name("fastapi.responses:JSONResponse")

    async def show_model(name: str, raw_request: Any) -> Any:
        served = raw_request.app.state.openai_serving_models
        cards = {card.id: card for card in (await served.show_available_models()).data}
        try:
            if name not in cards and _named_override(served, name) is not None:
                head = name.rpartition("@")[0]
                return reply({**cards[head].model_dump(), "id": name, "parent": head})
        except LoragateError as error:
            return reply(_error(str(error)), HTTPStatus.BAD_REQUEST)
        if name in cards:
            return reply(cards[name].model_dump())
        return reply(_error(_unknown_model(name, cards), HTTPStatus.NOT_FOUND), HTTPStatus.NOT_FOUND)

    # as types, not as the names of types that FastAPI would look for in this module
    show_model.__annotations__ = {"name": str, "raw_request": request_class}
    router.get("/v1/models/{name:path}", response_model=None)(show_model)


def _unknown_model(name: str, served: Collection[str]) -> str:
    return f"The model `{name}` does not exist{nearest(name, served)}; served are {', '.join(served)}"


def _error(message: str, code: HTTPStatus = HTTPStatus.BAD_REQUEST) -> dict[str, Any]:
    kind = "NotFoundError" if code == HTTPStatus.NOT_FOUND else "BadRequestError"
    return {"error": {"message": message, "type": kind, "param": "model", "code": code.value}}
