"""A small OpenAI-compatible server: /health, /v1/models, /v1/completions, /v1/chat/completions.

For machines without vLLM. It knows HTTP and the shapes of requests and replies; who answers arrives as a callable, and
answers one request at a time. There is no streaming. A field that would be ignored is an error, so that no client
believes in a setting that does nothing.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from loragate.errors import ConfigError, LoragateError, nearest
from loragate.gates.override_names import split_name

logger = logging.getLogger("loragate")
MAX_BODY = 8 << 20
_NUMBERS = {"temperature": 1.0, "top_p": 1.0}
# what a client may send without any effect on the answer
_IDLE = {"user", "metadata", "store", "service_tier"}
_KNOWN = {"model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "seed", "stop", "stream"} | _IDLE
# fields of the protocol that are fine as long as they ask for nothing
_NEUTRAL = {
    "stream": (False, None),
    "logprobs": (False, None),
    "top_logprobs": (0, None),
    "echo": (False, None),
    "best_of": (1, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": ({}, None),
    "suffix": ("", None),
    "tools": ([], None),
    "response_format": ({"type": "text"}, None),
}


@dataclass(frozen=True)
class Asked:
    """The settings of a request; `max_tokens` None leaves the limit to the answerer."""

    model: str
    max_tokens: int | None
    temperature: float
    top_p: float
    n: int
    seed: int
    stop: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """One choice: its text, "stop" or "length", and its length in tokens."""

    text: str
    finish_reason: str
    tokens: int


@dataclass(frozen=True)
class App:
    """What the server serves.

    Attributes:
        models: names that a request may give, alone or with an override of λ behind an @.
        complete: (prompts, settings) -> for each prompt its length in tokens and its `n` answers.
        render: a conversation -> the prompt that its answer follows.
        begin: a plain text -> the prompt it stands for (the tokenizer's begin token before it).
    """

    models: tuple[str, ...]
    complete: Callable[[Sequence[str], Asked], list[tuple[int, list[Answer]]]]
    render: Callable[[list[dict[str, Any]]], str]
    begin: Callable[[str], str]


class RequestError(Exception):
    """An error of the client, with its HTTP status and the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


_ELSEWHERE = (
    "this server listens on this machine alone and answers to localhost or an address, not to another name; have a proxy "
    "send the header Host: localhost, or listen on another address (--host)"
)


def _is_address(host: str) -> bool:
    """Whether a Host header names this machine by an address or as localhost, or is absent."""
    name = (host.rpartition(":")[0] if re.search(r":\d*$", host) else host).lower().rstrip(".")
    try:
        return name in ("", "localhost") or bool(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return False


def make_server(app: App, host: str, port: int) -> ThreadingHTTPServer:
    """A server that is bound and not yet running; port 0 takes a free one.

    Raises:
        LoragateError: if the address cannot be bound.
    """
    lock, began = threading.Lock(), int(time.time())
    private = host == "localhost" or host == "::1" or host.startswith("127.")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60

        def do_GET(self) -> None:
            if not self.is_addressed():
                self.fail(RequestError(403, _ELSEWHERE))
            elif self.path == "/health":
                self.reply(200, {"status": "ok"})
            elif self.path == "/v1/models":
                cards = [{"id": n, "object": "model", "created": began, "owned_by": "loragate"} for n in app.models]
                self.reply(200, {"object": "list", "data": cards})
            else:
                self.fail(
                    RequestError(404, f"{self.path} does not exist; there are /health, /v1/models and /v1/…completions")
                )

        def do_POST(self) -> None:
            try:
                body = self.body()
                if not self.is_addressed():
                    raise RequestError(403, _ELSEWHERE)
                if self.path == "/v1/completions":
                    self.reply(200, completion(app, body, lock))
                elif self.path == "/v1/chat/completions":
                    self.reply(200, chat_completion(app, body, lock))
                else:
                    raise RequestError(
                        404, f"{self.path} does not exist; post to /v1/completions or /v1/chat/completions"
                    )
            except RequestError as error:
                self.fail(error)
            except LoragateError as error:
                # what this protocol calls it
                self.fail(RequestError(400, str(error).replace("max_new_tokens", "max_tokens")))
            except ConnectionError:
                self.close_connection = True
            except Exception as error:
                logger.exception("request failed")
                self.fail(RequestError(500, f"{type(error).__name__}: {error}"))

        def is_addressed(self) -> bool:
            # a page in a browser can have its own name mean this machine, and would be let read the answers
            return not private or _is_address(self.headers.get("Host", ""))

        def body(self) -> dict[str, Any]:
            length = self.headers.get("Content-Length", "")
            if not (length.isascii() and length.isdigit()):
                self.close_connection = True
                raise RequestError(411, "a request needs a Content-Length")
            if int(length) > MAX_BODY:
                self.close_connection = True
                raise RequestError(413, f"the request is larger than {MAX_BODY >> 20} MiB")
            data = self.rfile.read(int(length))
            # a page in a browser may post text anywhere; JSON it may not
            if self.headers.get_content_type() != "application/json":
                raise RequestError(415, "send JSON, with the header Content-Type: application/json")
            try:
                body = json.loads(data)
            except (ValueError, RecursionError) as error:
                raise RequestError(400, f"the request is not valid JSON ({error})") from error
            if not isinstance(body, dict):
                raise RequestError(400, f"the request must be a JSON object, found {type(body).__name__}")
            return body

        def reply(self, status: int, record: dict[str, Any]) -> None:
            # half of a surrogate pair in what was asked must not end in no reply
            data = json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace")
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def fail(self, error: RequestError) -> None:
            kind = "NotFoundError" if error.status == 404 else "BadRequestError"
            kind = "InternalServerError" if error.status >= 500 else kind
            record = {"message": str(error), "type": kind, "param": error.param, "code": error.status}
            self.reply(error.status, {"error": record})

        def log_message(self, format: str, *args: Any) -> None:
            logger.debug(format, *args)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 512  # the standard 5 turns away clients that come together
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    try:
        server = Server((host, port), Handler)
    except OSError as error:
        raise LoragateError(f"{host}:{port} cannot be served from ({error.strerror}); give another --port") from error
    return server


def completion(app: App, body: dict[str, Any], lock: threading.Lock) -> dict[str, Any]:
    """The reply of /v1/completions."""
    asked = _asked(app, body, {"prompt"}, default_tokens=16)
    prompts = body.get("prompt")
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(prompts, list) or not prompts or not all(isinstance(one, str) and one for one in prompts):
        raise RequestError(400, "prompt must be a text or a list of texts, none of them empty", "prompt")
    with lock:
        answered = app.complete([app.begin(prompt) for prompt in prompts], asked)
    choices = [
        {"index": row * asked.n + place, "text": one.text, "finish_reason": one.finish_reason, "logprobs": None}
        for row, (_, answers) in enumerate(answered)
        for place, one in enumerate(answers)
    ]
    return _reply("cmpl", "text_completion", asked, choices, answered)


def chat_completion(app: App, body: dict[str, Any], lock: threading.Lock) -> dict[str, Any]:
    """The reply of /v1/chat/completions."""
    asked = _asked(app, body, {"messages"}, default_tokens=None)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(400, "messages must be a list with at least one message", "messages")
    for place, message in enumerate(messages):
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content"), str)
        ):
            raise RequestError(400, f"message {place} must be an object with role and content as text", "messages")
    with lock:
        answered = app.complete([app.render(messages)], asked)
    choices = [
        {"index": place, "message": {"role": "assistant", "content": one.text}, "finish_reason": one.finish_reason}
        for place, one in enumerate(answered[0][1])
    ]
    return _reply("chatcmpl", "chat.completion", asked, choices, answered)


def _reply(kind: str, what: str, asked: Asked, choices: list[Any], answered: Any) -> dict[str, Any]:
    given = sum(tokens for tokens, _ in answered)
    made = sum(one.tokens for _, answers in answered for one in answers)
    return {
        "id": f"{kind}-{secrets.token_hex(12)}",
        "object": what,
        "created": int(time.time()),
        "model": asked.model,
        "choices": choices,
        "usage": {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made},
    }


def _asked(app: App, body: dict[str, Any], own: set[str], default_tokens: int | None) -> Asked:
    for name, value in body.items():
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise RequestError(400, f"{name} is not supported by this server; leave it out (vLLM has it)", name)
        elif name not in _KNOWN | own:
            raise RequestError(400, f"unknown field {name!r}{nearest(name, _KNOWN | own)}", name)
    model = body.get("model")
    if not _served(app, model):
        known = ", ".join(app.models)
        raise RequestError(404, f"the model {model!r} does not exist; this server has {known}", "model")
    numbers = {name: _number(body, name, default) for name, default in _NUMBERS.items()}
    # a client may send either as null beside the other
    limit = next(
        (_whole(body[name], name, 1) for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None),
        default_tokens,
    )
    seed = _whole(body["seed"], "seed", None) if body.get("seed") is not None else secrets.randbelow(1 << 62)
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > 16 or not all(isinstance(text, str) and text for text in stop):
        raise RequestError(400, "stop must be a text or a list of at most 16 texts", "stop")
    count = _whole(body["n"], "n", 1) if body.get("n") is not None else 1
    if count > 128:
        raise RequestError(400, "n must be at most 128", "n")
    return Asked(str(model), limit, numbers["temperature"], numbers["top_p"], count, seed, tuple(stop))


def _served(app: App, model: Any) -> bool:
    if not isinstance(model, str):
        return False
    if model in app.models:
        return True
    try:
        return split_name(model)[0] in app.models
    except ConfigError as error:
        if model.rpartition("@")[0] in app.models:
            raise RequestError(400, str(error), "model") from error
        return False


def _number(body: dict[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(400, f"{name} must be a number, found {value!r}", name)
    try:
        return float(value)
    except OverflowError:
        raise RequestError(400, f"{name} is too large", name) from None


def _whole(value: Any, name: str, least: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise RequestError(400, f"{name} must be a whole number{bound}, found {value!r}", name)
    return value
