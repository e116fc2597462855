"""The small OpenAI-compatible server over a tiny gated model: names, seeds, stops, counts, and what bad requests get."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import loragate as lg
from loragate.cli.serve_transformers import transformers_app
from loragate.errors import LoragateError
from loragate.generation import SamplingConfig, TransformersEngine
from loragate.serving.http_app import App, make_server
from tiny import tiny_adapter, tiny_base, tiny_tokenizer

PROMPT = "w5 w9 w20"


def gated() -> Any:
    base = tiny_base(max_position_embeddings=128)
    model = lg.attach_gates(tiny_adapter(base=base), lg.GateConfig(lower=-3, upper=2))
    torch.manual_seed(3)
    for parameter in lg.gate_parameters(model).values():
        parameter.data.normal_(0, 0.5)
    return model


def serving(app: App) -> Iterator[str]:
    server = make_server(app, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    yield from serving(transformers_app(gated(), tiny_tokenizer(), "gated"))


def call(url: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def complete(url: str, **body: Any) -> dict[str, Any]:
    asked = {"model": "gated", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **body}
    status, reply = call(f"{url}/v1/completions", asked)
    assert status == 200, reply
    return reply


def test_health_and_models(url: str) -> None:
    assert call(f"{url}/health") == (200, {"status": "ok"})
    status, reply = call(f"{url}/v1/models")
    assert status == 200
    assert [card["id"] for card in reply["data"]] == ["base", "adapter", "gated"]


def test_each_name_answers_as_its_own_model(url: str) -> None:
    engines = {
        "base": tiny_base(max_position_embeddings=128),
        "adapter": tiny_adapter(base=tiny_base(max_position_embeddings=128)),
        "gated": gated(),
    }
    greedy = SamplingConfig(0, max_new_tokens=12)
    texts = {}
    for name, model in engines.items():
        expected = TransformersEngine(model, tiny_tokenizer()).generate([PROMPT], greedy)[0]
        reply = complete(url, model=name)
        texts[name] = reply["choices"][0]["text"]
        assert texts[name] == expected.text
        assert reply["model"] == name
        assert reply["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": len(expected.token_ids),
            "total_tokens": 3 + len(expected.token_ids),
        }
    assert len(set(texts.values())) == 3


OVERRIDES: dict[str, dict[str, float]] = {
    "unit": {"minimum": 0.0, "maximum": 1.0},
    "off": {"constant": 1.0},
    "noreverse": {"minimum": 0.0},
    "clip=-1:0.5": {"minimum": -1.0, "maximum": 0.5},
    "constant=-0.5": {"constant": -0.5},
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_behind_the_name_acts_on_this_request_alone(url: str, name: str) -> None:
    before = complete(url)["choices"][0]["text"]
    model = gated()
    with lg.gate_override(model, **OVERRIDES[name]):
        expected = TransformersEngine(model, tiny_tokenizer()).generate([PROMPT], SamplingConfig(0, max_new_tokens=12))
    reply = complete(url, model=f"gated@{name}")
    assert reply["choices"][0]["text"] == expected[0].text
    assert reply["model"] == f"gated@{name}"
    assert complete(url)["choices"][0]["text"] == before


def test_overrides_of_what_has_no_gates(url: str) -> None:
    constant = complete(url, model="adapter@constant=-0.5")["choices"][0]["text"]
    assert constant == complete(url, model="gated@constant=-0.5")["choices"][0]["text"]
    for name, status, message in (
        ("adapter@unit", 400, "adapter has no gates"),
        ("base@off", 400, "base has no gates"),
        ("gated@unti", 400, "did you mean 'unit'"),
        ("other@unit", 404, "this server has base, adapter, gated"),
        ("gated@", 400, "no known override"),
    ):
        found, reply = call(f"{url}/v1/completions", {"model": name, "prompt": PROMPT})
        assert found == status, name
        assert message in reply["error"]["message"]


def test_a_plain_adapter_takes_a_constant() -> None:
    base = tiny_base(max_position_embeddings=128)
    for url in serving(transformers_app(tiny_adapter(base=base), tiny_tokenizer(), "adapter")):
        found = complete(url, model="adapter@constant=-0.5")["choices"][0]["text"]
        plain = complete(url, model="adapter")["choices"][0]["text"]
        model = gated()
        with lg.gate_override(model, constant=-0.5):
            expected = TransformersEngine(model, tiny_tokenizer()).generate(
                [PROMPT], SamplingConfig(0, max_new_tokens=12)
            )
        assert found == expected[0].text != plain


def test_seeds_and_several_choices(url: str) -> None:
    first = complete(url, temperature=1, seed=5, n=3)
    assert [one["index"] for one in first["choices"]] == [0, 1, 2]
    assert len({one["text"] for one in first["choices"]}) > 1
    assert complete(url, temperature=1, seed=5, n=3)["choices"] == first["choices"]
    assert complete(url, temperature=1, seed=6, n=3)["choices"] != first["choices"]
    assert complete(url, temperature=1)["choices"] != complete(url, temperature=1)["choices"]
    both = complete(url, prompt=["w1 w2", PROMPT])
    assert [one["index"] for one in both["choices"]] == [0, 1]
    assert both["choices"][1]["text"] == complete(url)["choices"][0]["text"]


def test_a_stop_text_ends_the_answer_and_is_not_in_it(url: str) -> None:
    words = complete(url)["choices"][0]["text"].split()
    reply = complete(url, stop=f" {words[4]}")["choices"][0]
    assert reply["finish_reason"] == "stop"
    assert words[4] not in reply["text"]
    assert complete(url, max_tokens=3)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("limit", [{"max_tokens": 3, "max_completion_tokens": None}, {"max_completion_tokens": 3}])
def test_the_limit_has_two_names_and_either_may_be_null(url: str, limit: dict[str, Any]) -> None:
    asked = {"model": "gated", "prompt": PROMPT, "temperature": 0, **limit}
    status, reply = call(f"{url}/v1/completions", asked)
    assert status == 200
    assert reply["usage"]["completion_tokens"] == 3


def test_chat(url: str) -> None:
    body = {"model": "gated", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
    status, reply = call(f"{url}/v1/chat/completions", body)
    assert status == 200
    rendered = complete(url, prompt=f"<user> {PROMPT} <assistant> ", max_tokens=8)
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": rendered["choices"][0]["text"]}
    assert reply["object"] == "chat.completion"
    del body["max_tokens"]
    assert call(f"{url}/v1/chat/completions", body)[1]["usage"]["total_tokens"] <= 128


BAD = {
    "model": ({"model": "gatd"}, 404, "this server has base, adapter, gated"),
    "stream": ({"stream": True}, 400, "stream is not supported"),
    "unknown": ({"temprature": 1}, 400, "did you mean 'temperature'"),
    "penalty": ({"frequency_penalty": 0.5}, 400, "frequency_penalty is not supported"),
    "temperature": ({"temperature": "hot"}, 400, "temperature must be a number"),
    "negative": ({"temperature": -1}, 400, "temperature is -1"),
    "tokens": ({"max_tokens": 0}, 400, "whole number of at least 1"),
    "positions": ({"max_tokens": 500}, 400, "the model's 128 positions: set max_tokens to 125 or less"),
    "prompt": ({"prompt": [1, 2]}, 400, "prompt must be a text"),
    "empty": ({"prompt": ""}, 400, "none of them empty"),
    "stop": ({"stop": [""]}, 400, "stop must be"),
    "seed": ({"seed": 1.5}, 400, "seed must be a whole number"),
    "greedy n": ({"n": 2}, 400, "temperature 0 decodes greedily"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_gets_a_reason(url: str, name: str) -> None:
    change, status, message = BAD[name]
    asked = {"model": "gated", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, **change}
    found, reply = call(f"{url}/v1/completions", asked)
    assert found == status
    assert message in reply["error"]["message"]
    assert reply["error"]["code"] == status


def test_what_is_no_request_at_all(url: str) -> None:
    for body, status in ((b"{", 400), (b"[]", 400), (b"\xff", 400), (b"[" * 100_000, 400)):
        assert call(f"{url}/v1/completions", body)[0] == status
    assert call(f"{url}/v1/completions", b"{}", **{"Content-Type": "text/plain"})[0] == 415
    assert call(f"{url}/v1/completions", b"", **{"Content-Length": str(9 << 20)})[0] == 413
    assert call(f"{url}/v1/embeddings", {})[0] == 404
    assert call(f"{url}/v2")[0] == 404
    for messages in (None, [], ["hi"], [{"role": "user"}], [{"role": "user", "content": []}]):
        assert call(f"{url}/v1/chat/completions", {"model": "base", "messages": messages})[0] == 400
    assert call(f"{url}/health")[0] == 200


def test_many_clients_get_what_one_client_gets(url: str) -> None:
    """Base, adapter and gated asked for at the same time do not leak into one another."""
    jobs = [(name, f"w{index} w{index + 2}") for index in range(8) for name in ("base", "adapter", "gated")]

    def ask(job: tuple[str, str]) -> str:
        return complete(url, model=job[0], prompt=job[1])["choices"][0]["text"]

    alone = [ask(job) for job in jobs]
    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(ask, jobs)) == alone


def test_a_fault_of_the_server_is_a_500_and_it_lives_on() -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("broken")

    for url in serving(App(("base",), fail, lambda messages: "w1", lambda prompt: prompt)):
        status, reply = call(f"{url}/v1/completions", {"model": "base", "prompt": "w1"})
        assert status == 500
        assert reply["error"]["type"] == "InternalServerError"
        assert call(f"{url}/health")[0] == 200


def test_a_taken_port_is_named() -> None:
    for url in serving(App(("base",), lambda *_: [], lambda _: "", lambda _: "")):
        with pytest.raises(LoragateError, match="cannot be served from"):
            make_server(App((), lambda *_: [], lambda _: "", lambda _: ""), "127.0.0.1", int(url.rsplit(":", 1)[1]))


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
def test_a_page_whose_name_means_this_machine_gets_nothing(url: str, host: str, status: int) -> None:
    body = {"model": "gated", "prompt": PROMPT, "max_tokens": 1}
    assert call(f"{url}/v1/completions", body, Host=host)[0] == status
    assert call(f"{url}/v1/models", Host=host)[0] == status


def test_requests_that_cannot_be_written_back_get_a_reply(url: str) -> None:
    status, reply = call(f"{url}/v1/completions", b'{"model": "gated", "prompt": "a", "\\ud800": 1}')
    assert status == 400
    assert "unknown field" in reply["error"]["message"]
    status, reply = call(f"{url}/v1/completions", {"model": "gated", "prompt": "a", "temperature": 10**400})
    assert (status, reply["error"]["param"]) == (400, "temperature")
