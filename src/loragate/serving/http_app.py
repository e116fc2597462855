"""A small OpenAI-compatible server: /health, /v1/models, /v1/completions, /v1/chat/completions.

For machines without vLLM. It knows HTTP and the shapes of requests and replies; who answers arrives as callables, and
answers one request at a time. There is no streaming. A field that would be ignored is an error, so that no client
believes in a setting that does nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import reprlib
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from loragate.errors import LoragateError, nearest
from loragate.printable import excerpt

logger = logging.getLogger("loragate")
MAX_BODY = 8 << 20

Text = Annotated[str, Field(min_length=1)]
OneOrMore = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


def _refuse(value: Any) -> Any:
    if value:
        raise ValueError("this server does not support it; leave it out (vLLM has it)")
    return value


Unsupported = Annotated[Any, AfterValidator(_refuse)]


class Asked(BaseModel):
    """The settings of a request. Null is the same as leaving a field out; what limits and samples has the backend's own values."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float = 1.0
    n: int = Field(1, ge=1, le=128)
    seed: int = Field(default_factory=lambda: secrets.randbelow(1 << 62))
    stop: Annotated[list[Text], OneOrMore, Field(max_length=16)] = []
    # a client may send these: they change no answer
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    # and these as long as they ask for nothing
    stream: Unsupported = None
    logprobs: Unsupported = None
    prompt_logprobs: Unsupported = None
    top_logprobs: Unsupported = None
    echo: Unsupported = None
    frequency_penalty: Unsupported = None
    presence_penalty: Unsupported = None
    logit_bias: Unsupported = None
    suffix: Unsupported = None
    tools: Unsupported = None
    best_of: Literal[1] = 1
    response_format: dict[Literal["type"], Literal["text"]] = {}

    @model_validator(mode="before")
    @classmethod
    def leave_out_null(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None or name not in cls.model_fields}

    @property
    def limit(self) -> int | None:
        """Tokens of an answer; the protocol has two names for it."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Asked):
    """The body of /v1/completions."""

    prompt: Annotated[list[Text], OneOrMore, Field(min_length=1)]
    max_tokens: int | None = Field(16, ge=1)


class Message(BaseModel):
    """A message of a conversation; what else it carries goes to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Text
    # a bound on the length, which none fails, has pydantic refuse half of a surrogate pair, as tokenizers do
    content: str = Field(min_length=0)


class ChatRequest(Asked):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)


BODIES: dict[str, type[Asked]] = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}


class Answer(NamedTuple):
    """One choice: its text, "stop" or "length", and its length in tokens."""

    text: str
    finish_reason: str
    tokens: int


@dataclass(frozen=True)
class Backend:
    """Who answers."""

    models: tuple[str, ...]  # names that a request may give, alone or with an override of λ behind an @
    # a request -> tokens of its prompts, and `n` answers to each in order; called for one request at a time
    answer: Callable[[CompletionRequest | ChatRequest], tuple[int, list[Answer]]]


class UnknownModel(LoragateError):
    """A request for a model that is not served."""


def make_server(backend: Backend, host: str) -> uvicorn.Server:
    """A server; its `run(sockets=[...])`, with sockets that listen on `host`, lasts until Ctrl-C (KeyboardInterrupt)."""
    settings: dict[str, Any] = {"lifespan": "off", "ws": "none", "access_log": False, "timeout_keep_alive": 60}
    # faults are reported below; a running answer has one second left after Ctrl-C
    settings |= {"log_config": None, "log_level": "critical", "timeout_graceful_shutdown": 1}
    return uvicorn.Server(uvicorn.Config(make_app(backend, host), **settings))


def make_app(backend: Backend, host: str) -> FastAPI:
    """The application, to be served on `host`."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    # one request at a time: which adapter and which override act is a state of the one model
    turn, began = asyncio.Lock(), int(time.time())
    private = host in ("localhost", "::1") or host.startswith("127.")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        cards = [{"id": n, "object": "model", "created": began, "owned_by": "loragate"} for n in backend.models]
        return {"object": "list", "data": cards}

    @app.post("/v1/completions")
    async def completion(asked: CompletionRequest) -> dict[str, Any]:
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion"}
        return head | await reply(asked, lambda text: {"text": text, "logprobs": None})

    @app.post("/v1/chat/completions")
    async def chat_completion(asked: ChatRequest) -> dict[str, Any]:
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": "chat.completion"}
        return head | await reply(asked, lambda text: {"message": {"role": "assistant", "content": text}})

    async def reply(asked: CompletionRequest | ChatRequest, shape: Callable[[str], Any]) -> dict[str, Any]:
        if not {asked.model, asked.model.rpartition("@")[0]} & set(backend.models):
            known = ", ".join(backend.models)
            raise UnknownModel(f"the model {excerpt(asked.model)} does not exist; this server has {known}")
        async with turn:  # the loop is free meanwhile, so that /health answers
            given, answers = await _in_thread(lambda: backend.answer(asked))
        choices = [
            {"index": place, **shape(one.text), "finish_reason": one.finish_reason} for place, one in enumerate(answers)
        ]
        made = sum(one.tokens for one in answers)
        usage = {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
        return {"created": int(time.time()), "model": asked.model, "choices": choices, "usage": usage}

    @app.middleware("http")
    async def guard(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        refused = _refusal(request, private)
        return _problem(*refused) if refused else await go_on(request)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _problem(400, *_explain(error.errors()[0], BODIES[request.url.path]))

    @app.exception_handler(LoragateError)
    async def refused(request: Request, error: LoragateError) -> Response:
        if isinstance(error, UnknownModel):
            return _problem(404, str(error), "model")
        # what this protocol calls it
        return _problem(400, str(error).replace("max_new_tokens", "max_tokens"))

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> Response:
        known = ", ".join(("/health", "/v1/models", *BODIES))
        return _problem(error.status_code, f"{request.method} {request.url.path}: {error.detail}; there are {known}")

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        logger.error("request failed", exc_info=error)
        return _problem(500, f"{type(error).__name__}: {error}")

    return app


async def _in_thread(work: Callable[[], tuple[int, list[Answer]]]) -> tuple[int, list[Answer]]:
    # a daemon, unlike the threads of a pool: an answer that is not finished must not hold up the end of the process
    done: Future[tuple[int, list[Answer]]] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)


def _refusal(request: Request, private: bool) -> tuple[int, str] | None:
    """Status and reason, where the headers are enough to refuse a request."""
    # a page in a browser can have its own name mean this machine, and would be let read the answers
    if private and not _is_address(request.headers.get("host", "")):
        return 403, (
            "this server listens on this machine alone and answers to localhost or an address, not to another name; have a "
            "proxy send the header Host: localhost, or listen on another address (--host)"
        )
    if request.method != "POST":
        return None
    length = request.headers.get("content-length", "")
    if not (length.isascii() and length.isdigit()):
        return 411, "a request needs a Content-Length"
    if int(length) > MAX_BODY:
        return 413, f"the request is larger than {MAX_BODY >> 20} MiB"
    # a page in a browser may post text anywhere; JSON it may not
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return 415, "send JSON, with the header Content-Type: application/json"
    return None


def _is_address(host: str) -> bool:
    """Whether a Host header names this machine by an address or as localhost, or is absent."""
    name = (host.rpartition(":")[0] if re.search(r":\d*$", host) else host).lower().rstrip(".")
    try:
        return name in ("", "localhost") or bool(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return False


def _explain(error: dict[str, Any], body: type[Asked]) -> tuple[str, str | None]:
    """What is wrong with a request, in words that name field and value; and the field."""
    kind, where, value = error["type"], [str(part) for part in error["loc"][1:]], error["input"]
    if kind == "json_invalid":
        return f"the request is not valid JSON ({error['ctx']['error']})", None
    if kind == "model_attributes_type" and not where:
        return f"the request must be a JSON object, found {type(value).__name__}", None
    if kind == "extra_forbidden":
        return f"unknown field {where[0]!r}{nearest(where[0], body.model_fields)}", where[0]
    words = error["msg"].removeprefix("Value error, ")
    found = "" if kind == "missing" else f", found {reprlib.repr(value)}"
    return f"{'.'.join(where) or 'the request'}: {words}{found}", where[0] if where else None


def _problem(status: int, message: str, param: str | None = None) -> Response:
    kind = "NotFoundError" if status == 404 else "InternalServerError" if status >= 500 else "BadRequestError"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)
