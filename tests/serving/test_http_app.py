"""The small OpenAI-compatible server over a tiny gated model: names, seeds, stops, counts, and what bad requests get."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient

import loragate as lg
from loragate.errors import DataError
from loragate.generation import Sample, SamplingConfig, TransformersEngine
from loragate.serving.backend import transformers_backend
from loragate.serving.http_app import Answer, Backend, make_app, make_server
from loragate.serving.server import listen
from tiny import shake, tiny_adapter, tiny_base, tiny_tokenizer

PROMPT = "w5 w9 w20"


def gated() -> Any:
    base = tiny_base(max_position_embeddings=128)
    return shake(lg.attach_gates(tiny_adapter(base=base), lg.GateConfig(lower=-3, upper=2)), 0.5, 3)


def client_of(backend: Backend, host: str = "127.0.0.1") -> TestClient:
    return TestClient(make_app(backend, host), "http://localhost", raise_server_exceptions=False)


@pytest.fixture(scope="module")
def backend() -> Backend:
    return transformers_backend(gated(), tiny_tokenizer(), "gated")


@pytest.fixture(scope="module")
def client(backend: Backend) -> Iterator[TestClient]:
    with client_of(backend) as found:
        yield found


def call(client: Any, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
    if body is None:
        reply = client.get(path, headers=headers)
    else:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = client.post(path, content=data, headers={"Content-Type": "application/json", **headers})
    return reply.status_code, reply.json()


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    asked = {"model": "gated", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **body}
    status, reply = call(client, "/v1/completions", asked)
    assert status == 200, reply
    return reply


def greedy(model: Any) -> Sample:
    """What the engine answers without a server."""
    return TransformersEngine(model, tiny_tokenizer()).generate([PROMPT], SamplingConfig(0, max_new_tokens=12))[0]


def test_health_and_models(client: TestClient) -> None:
    assert call(client, "/health") == (200, {"status": "ok"})
    status, reply = call(client, "/v1/models")
    assert status == 200
    assert [card["id"] for card in reply["data"]] == ["base", "adapter", "gated"]


def test_each_name_answers_as_its_own_model(client: TestClient) -> None:
    bases, texts = [tiny_base(max_position_embeddings=128) for _ in range(2)], {}
    for name, model in (("base", bases[0]), ("adapter", tiny_adapter(base=bases[1])), ("gated", gated())):
        expected, reply = greedy(model), complete(client, model=name)
        texts[name] = reply["choices"][0]["text"]
        assert (texts[name], reply["model"]) == (expected.text, name)
        drawn = len(expected.token_ids)
        assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": drawn, "total_tokens": 3 + drawn}
    assert len(set(texts.values())) == 3


OVERRIDES: dict[str, dict[str, float]] = {
    "unit": {"minimum": 0.0, "maximum": 1.0},
    "clip=-1:0.5": {"minimum": -1.0, "maximum": 0.5},
    "constant=-0.5": {"constant": -0.5},
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_behind_the_name_acts_on_this_request_alone(client: TestClient, name: str) -> None:
    before = complete(client)["choices"][0]["text"]
    with lg.gate_override(model := gated(), **OVERRIDES[name]):
        expected = greedy(model).text
    reply = complete(client, model=f"gated@{name}")
    assert (reply["choices"][0]["text"], reply["model"]) == (expected, f"gated@{name}")
    assert complete(client)["choices"][0]["text"] == before


def test_overrides_of_what_has_no_gates(client: TestClient) -> None:
    constant = complete(client, model="adapter@constant=-0.5")["choices"][0]["text"]
    assert constant == complete(client, model="gated@constant=-0.5")["choices"][0]["text"]
    for name, status, message in (
        ("adapter@unit", 400, "adapter has no gates"),
        ("base@off", 400, "base has no gates"),
        ("gated@unti", 400, "did you mean 'unit'"),
        ("other@unit", 404, "this server has base, adapter, gated"),
        ("gated@", 400, "no known override"),
    ):
        found, reply = call(client, "/v1/completions", {"model": name, "prompt": PROMPT})
        assert found == status, name
        assert message in reply["error"]["message"]


def test_seeds_and_several_choices(client: TestClient) -> None:
    first = complete(client, temperature=1, seed=5, n=3)
    assert [one["index"] for one in first["choices"]] == [0, 1, 2]
    assert len({one["text"] for one in first["choices"]}) > 1
    assert complete(client, temperature=1, seed=5, n=3)["choices"] == first["choices"]
    assert complete(client, temperature=1, seed=6, n=3)["choices"] != first["choices"]
    assert complete(client, temperature=1)["choices"] != complete(client, temperature=1)["choices"]
    both = complete(client, prompt=["w1 w2", PROMPT])
    assert [one["index"] for one in both["choices"]] == [0, 1]
    assert both["choices"][1]["text"] == complete(client)["choices"][0]["text"]


def test_a_stop_text_ends_the_answer_and_is_not_in_it(client: TestClient) -> None:
    words = complete(client)["choices"][0]["text"].split()
    reply = complete(client, stop=f" {words[4]}")["choices"][0]
    assert reply["finish_reason"] == "stop"
    assert words[4] not in reply["text"]
    assert complete(client, max_tokens=3)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("limit", [{"max_tokens": 3, "max_completion_tokens": None}, {"max_completion_tokens": 3}])
def test_the_limit_has_two_names_and_either_may_be_null(client: TestClient, limit: dict[str, Any]) -> None:
    asked = {"model": "gated", "prompt": PROMPT, "temperature": 0, **limit}
    status, reply = call(client, "/v1/completions", asked)
    assert status == 200
    assert reply["usage"]["completion_tokens"] == 3


def test_chat(client: TestClient) -> None:
    body = {"model": "gated", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
    status, reply = call(client, "/v1/chat/completions", body)
    assert status == 200
    rendered = complete(client, prompt=f"<user> {PROMPT} <assistant> ", max_tokens=8)
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": rendered["choices"][0]["text"]}
    assert reply["object"] == "chat.completion"
    del body["max_tokens"]
    assert call(client, "/v1/chat/completions", body)[1]["usage"]["total_tokens"] <= 128


BAD: dict[str, tuple[dict[str, Any], int, str | None, str]] = {
    "model": ({"model": "gatd"}, 404, "model", "this server has base, adapter, gated"),
    "no model": ({"model": None}, 400, "model", "required"),
    "number for model": ({"model": 3}, 400, "model", "found 3"),
    "stream": ({"stream": True}, 400, "stream", "does not support"),
    "unknown": ({"temprature": 1}, 400, "temprature", "did you mean 'temperature'"),
    "unknown null": ({"temprature": None}, 400, "temprature", "did you mean 'temperature'"),
    "field of chats": ({"messages": []}, 400, "messages", "unknown field"),
    "prompt log-probs": ({"prompt_logprobs": 1}, 400, "prompt_logprobs", "does not support"),
    "penalty": ({"frequency_penalty": 0.5}, 400, "frequency_penalty", "does not support"),
    "tools": ({"tools": [{"type": "function"}]}, 400, "tools", "does not support"),
    "best_of": ({"best_of": 2}, 400, "best_of", "found 2"),
    "format": ({"response_format": {"type": "json_object"}}, 400, "response_format", "found 'json_object'"),
    "temperature": ({"temperature": "hot"}, 400, "temperature", "valid number"),
    "true": ({"temperature": True}, 400, "temperature", "valid number"),
    "negative": ({"temperature": -1}, 400, None, "found -1"),
    "tokens": ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1, found 0"),
    "positions": ({"max_tokens": 500}, 400, None, "the model's 128 positions: set max_tokens to 125 or less"),
    "prompt": ({"prompt": [1, 2]}, 400, "prompt", "prompt.0"),
    "no prompt": ({"prompt": None}, 400, "prompt", "required"),
    "empty": ({"prompt": ""}, 400, "prompt", "at least 1 character"),
    "no prompts": ({"prompt": []}, 400, "prompt", "at least 1 item"),
    "stop": ({"stop": [""]}, 400, "stop", "at least 1 character"),
    "stops": ({"stop": ["w1"] * 17}, 400, "stop", "at most 16"),
    "seed": ({"seed": 1.5}, 400, "seed", "valid integer"),
    "many": ({"n": 129}, 400, "n", "128"),
    "greedy n": ({"n": 2}, 400, None, "temperature 0 decodes greedily"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_gets_a_reason(client: TestClient, name: str) -> None:
    change, status, param, message = BAD[name]
    asked = {"model": "gated", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, **change}
    found, reply = call(client, "/v1/completions", asked)
    assert found == status
    assert message in reply["error"]["message"]
    kind = "NotFoundError" if status == 404 else "BadRequestError"
    assert reply["error"] == {**reply["error"], "type": kind, "param": param, "code": status}


def test_what_asks_for_nothing_is_fine(client: TestClient) -> None:
    """Clients fill in the protocol's defaults, and null for what they leave out."""
    nothing = {"stream": False, "logprobs": None, "echo": False, "best_of": 1, "presence_penalty": 0.0}
    nothing |= {"logit_bias": {}, "user": "me", "suffix": "", "tools": [], "stop": None, "seed": None}
    nothing |= {"response_format": {"type": "text"}}
    assert complete(client, **nothing)["choices"] == complete(client)["choices"]


def test_what_is_no_request_at_all(client: TestClient) -> None:
    for body, status in ((b"{", 400), (b"[]", 400), (b"\xff", 400), (b"[" * 100_000, 400)):
        assert call(client, "/v1/completions", body)[0] == status
    assert call(client, "/v1/completions", b"{}", **{"Content-Type": "text/plain"})[0] == 415
    assert call(client, "/v1/completions", b"", **{"Content-Length": str(9 << 20)})[0] == 413
    assert call(client, "/v1/embeddings", {})[0] == 404
    assert call(client, "/v2")[0] == 404
    assert call(client, "/v1/completions")[0] == 405
    assert client.post("/v1/completions", content=iter([b"{}"])).status_code == 411
    for messages in (None, [], ["hi"], [{"role": "user"}], [{"role": "user", "content": []}]):
        assert call(client, "/v1/chat/completions", {"model": "base", "messages": messages})[0] == 400
    assert call(client, "/health")[0] == 200


@pytest.fixture
def url(backend: Backend) -> Iterator[str]:
    """The server on a socket, as `loragate serve` runs it."""
    server = make_server(backend, "127.0.0.1")
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def test_many_clients_get_what_one_client_gets(url: str, client: TestClient) -> None:
    """Base, adapter and gated asked for at the same time do not leak into one another."""
    jobs = [(name, f"w{index} w{index + 2}") for index in range(8) for name in ("base", "adapter", "gated")]

    def ask(client: Any, job: tuple[str, str]) -> str:
        return complete(client, model=job[0], prompt=job[1])["choices"][0]["text"]

    alone = [ask(client, job) for job in jobs]
    with ThreadPoolExecutor(24) as pool, httpx2.Client(base_url=url, trust_env=False, timeout=60) as many:
        assert list(pool.map(lambda job: ask(many, job), jobs)) == alone


def test_requests_wait_for_one_another_and_health_does_not() -> None:
    running, most, entered, leave = 0, 0, threading.Event(), threading.Event()

    def answer(asked: Any) -> tuple[int, list[Answer]]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        entered.set()
        leave.wait(30)
        running -= 1
        return 1, [Answer("w2", "stop", 1)]

    body = {"model": "base", "prompt": "w1"}
    with client_of(Backend(("base",), answer)) as client, ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(call, client, "/v1/completions", body) for _ in range(4)]
        assert entered.wait(30)
        assert call(client, "/health")[0] == 200
        leave.set()
        assert [one.result()[0] for one in waiting] == [200] * 4
    assert most == 1


@pytest.fixture
def heeding_ctrl_c() -> Iterator[None]:
    """SIGINT as in a foreground process; the jobs of a background shell ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeding_ctrl_c")
def test_ctrl_c_does_not_wait_for_a_long_answer() -> None:
    leave = threading.Event()

    def answer(asked: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        leave.wait(30)

    def ask(port: int) -> None:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
            status, reply = call(client, "/v1/completions", {"model": "base", "prompt": "w1"})
            assert status == 500, reply

    with listen("127.0.0.1", 0) as listening, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, listening.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            make_server(Backend(("base",), answer), "127.0.0.1").run(sockets=[listening])
        assert time.monotonic() - began < 20
        leave.set()
        asking.exception(30)


def test_a_fault_of_the_server_is_a_500_and_it_lives_on(caplog: pytest.LogCaptureFixture) -> None:
    def fail(asked: Any) -> Any:
        raise DataError("max_new_tokens=9 is wrong") if asked.n == 2 else RuntimeError("broken")

    with client_of(Backend(("base",), fail)) as client:
        status, reply = call(client, "/v1/completions", {"model": "base", "prompt": "w1"})
        assert status == 500
        told = {"message": "RuntimeError: broken", "type": "InternalServerError", "param": None, "code": 500}
        assert reply["error"] == told
        assert "request failed" in caplog.text
        status, reply = call(client, "/v1/completions", {"model": "base", "prompt": "w1", "n": 2})
        assert (status, reply["error"]["message"]) == (400, "max_tokens=9 is wrong")
        assert call(client, "/health")[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("LOCALHOST.:8000", 200),
        ("[::1]:80", 200),
        ("page.example:8000", 403),
        ("localhost.page.example", 403),
    ],
)
def test_a_page_whose_name_means_this_machine_gets_nothing(client: TestClient, host: str, status: int) -> None:
    body = {"model": "gated", "prompt": PROMPT, "max_tokens": 1}
    assert call(client, "/v1/completions", body, Host=host)[0] == status
    assert call(client, "/v1/models", Host=host)[0] == status


def test_a_server_for_the_network_answers_to_any_name(backend: Backend) -> None:
    with client_of(backend, "0.0.0.0") as client:
        assert call(client, "/v1/models", Host="page.example")[0] == 200


def test_requests_that_cannot_be_written_back_get_a_reply(client: TestClient) -> None:
    status, reply = call(client, "/v1/completions", b'{"model": "gated", "prompt": "a", "\\ud800": 1}')
    assert status == 400
    assert r"found '\ud800'" in reply["error"]["message"]
    status, reply = call(client, "/v1/completions", b'{"model": "gated", "prompt": "\\ud800"}')
    assert (status, reply["error"]["param"]) == (400, "prompt")
    status, reply = call(client, "/v1/completions", b'{"model": "\\ud800", "prompt": "a"}')
    assert (status, reply["error"]["param"]) == (404, "model")
    body = b'{"model": "gated", "messages": [{"role": "user", "content": "\\ud800"}]}'
    assert call(client, "/v1/chat/completions", body)[0] == 400
    status, reply = call(client, "/v1/completions", {"model": "gated", "prompt": "a", "temperature": 10**400})
    assert (status, reply["error"]["param"]) == (400, "temperature")
