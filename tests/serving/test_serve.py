"""`loragate serve` as a user runs it: a process that answers, says how to be called, and ends on Ctrl-C."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import loragate as lg
from loragate.cli.main import main
from loragate.cli.serve import ServeOptions
from loragate.data import Chat
from loragate.errors import ConfigError
from loragate.gates.override import parse_override
from loragate.generation import SamplingConfig, TransformersEngine
from loragate.models import open_tokenizer
from loragate.serving.settings import ServerSettings
from loragate.serving.vllm_server import (
    free_port,
    further_endings,
    serve,
    served_adapters,
    server_command,
    template_for_vllm,
    verify_command,
    vllm_arguments,
)
from tiny import (
    TURN_END,
    chatml_tokenizer,
    ending_base,
    shake,
    tiny_adapter,
    tiny_base,
    tiny_tokenizer,
    write_adapter,
    write_base,
)

SHAPE = {"hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": 128, "initializer_range": 0.1}
SEEDS = {"gated": 1, "second": 2}
PROMPTS = ["w5 w9 w20", "w7 w7", "w100 w3 w50 w51"]
NEW_TOKENS = 16
ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}


def vllm_only(test: Any) -> Any:
    absent = importlib.util.find_spec("vllm") is None
    missing = pytest.mark.skipif(absent, reason="vllm is not installed (scripts/vllm_cpu_env.sh)")
    return pytest.mark.slow("vLLM")(missing(test))


def model_of(name: str) -> Any:
    base = tiny_base(**SHAPE)
    if name == "base":
        return base
    seed = SEEDS.get(name, SEEDS["gated"])
    model = tiny_adapter(seed=seed, base=base, lora_alpha=2)
    if name in SEEDS:
        shake(lg.attach_gates(model, lg.GateConfig(lower=-3, upper=2)), 0.3, seed)
    return model


def talkative_tokenizer() -> Any:
    """A template that slips in a system message where a conversation has none."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'system' %}<unk> w91 w92 {% endif %}"
        "{% for m in messages %}{% if m['role'] == 'system' %}<unk> {{ m['content'] }} "
        "{% elif m['role'] == 'user' %}<user> {{ m['content'] }} {% else %}<assistant> {{ m['content'] }} <eos> {% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    return tokenizer


def greedy(model: Any) -> list[str]:
    samples = TransformersEngine(model, tiny_tokenizer()).generate(PROMPTS, SamplingConfig(0, 1, NEW_TOKENS))
    return [sample.text for sample in samples]


def expected(name: str) -> list[str]:
    return greedy(model_of(name))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("serve")
    write_base(place / "base", tokenizer=talkative_tokenizer(), **SHAPE)
    for name, temperature in (("gated", 0.0), ("second", None)):
        lg.save_gates(model_of(name), place / name, base_id=str(place / "base"), temperature=temperature)
    return place


class Running:
    """A server process and what it printed."""

    def __init__(self, *arguments: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        environment = {**os.environ, **ON_CPU, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "loragate", "serve", *arguments, "--port", str(self.port)]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # a shell lets what it starts in the background ignore Ctrl-C, and children inherit that
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.lines: list[str] = []
        self.ready = threading.Event()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(line)
            if line.startswith("print(client"):
                self.ready.set()
        self.ready.set()

    def wait(self, seconds: float) -> Running:
        assert self.ready.wait(seconds), "".join(self.lines)[-4000:]
        assert self.process.poll() is None, "".join(self.lines)[-4000:]
        return self

    def call(self, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=120) as reply:
                text = reply.read()
                status = reply.status
        except urllib.error.HTTPError as error:
            text, status = error.read(), error.code
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text.decode()

    def complete(self, model: str, prompt: str) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
        status, reply = self.call("/v1/completions", body)
        assert status == 200, reply
        return str(reply["choices"][0]["text"])

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(90)


@pytest.fixture(scope="module")
def vllm_server(folders: Path) -> Iterator[Running]:
    server = Running(
        *(str(folders / "gated"), "--dtype", "float32", "--dynamic", "--adapters", f"same={folders / 'gated'}"),
        *("--vllm-args", "--enable-scale-out"),  # for /inference/v1/generate
    )
    yield server.wait(2400)
    server.end()


@vllm_only
def test_vllm_server(vllm_server: Running) -> None:
    """Every name answers as its own model, alone and among others."""
    status, reply = vllm_server.call("/v1/models")
    assert status == 200
    assert [card["id"] for card in reply["data"]] == ["base", "gated", "adapter", "same"]
    names = ["base", "adapter", "gated"]
    right = {name: expected(name) for name in names}
    for name in names:
        assert [vllm_server.complete(name, prompt).strip() for prompt in PROMPTS] == right[name], name
    jobs = [(name, place) for _ in range(4) for place in range(len(PROMPTS)) for name in names]
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda job: vllm_server.complete(job[0], PROMPTS[job[1]]).strip(), jobs))
    assert texts == [right[name][place] for name, place in jobs]
    printed = "".join(vllm_server.lines)
    assert f"curl http://127.0.0.1:{vllm_server.port}/v1/chat/completions" in printed
    assert f'OpenAI(base_url="http://127.0.0.1:{vllm_server.port}/v1"' in printed


@vllm_only
@pytest.mark.parametrize("by", ["auto", "lora_scale"])
def test_verify_passes(vllm_server: Running, by: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the line that the server printed, with both ways to say a strength."""
    (line,) = [line for line in vllm_server.lines if line.startswith("to check it: loragate ")]
    command = shlex.split(line)[4:]
    assert command[-2:] == ["--dtype", "float32"], "as the server was started"
    assert main([*command, "--strength-by", by, "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert all(one["figure"] <= 1e-4 for one in checks if one["unit"] == "nats" and one["figure"] is not None), checks
    measured = {(one["name"], one["of"]) for one in checks if one["verdict"] == "passes"}
    assert measured >= {("zero is the base", "adapter at 0"), ("parity with transformers", "adapter at 0.5")}


@vllm_only
def test_vllm_samples_as_the_folder_recommends(vllm_server: Running) -> None:
    body: dict[str, Any] = {"model": "gated", "prompt": PROMPTS[0], "max_tokens": NEW_TOKENS}
    printed = "".join(vllm_server.lines)
    assert "sampling greedily, as gated recommends" in printed
    assert "is recommended" not in printed
    for name in ("gated", "same", "gated"):
        asked = {**body, "model": name}
        assert vllm_server.call("/v1/completions", asked)[1]["choices"][0]["text"].strip() == expected("gated")[0]
    talk = {"model": "gated", "messages": [{"role": "user", "content": "w5"}], "max_tokens": NEW_TOKENS}
    one = vllm_server.call("/v1/chat/completions", talk)[1]["choices"][0]["message"]["content"]
    batch = vllm_server.call("/v1/chat/completions/batch", {**talk, "messages": [talk["messages"]] * 8})[1]["choices"]
    assert {choice["message"]["content"] for choice in batch} == {one}
    tokens = {"model": "gated", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": NEW_TOKENS}}
    drawn = [str(vllm_server.call("/inference/v1/generate", tokens)[1]["choices"][0]["token_ids"]) for _ in range(3)]
    assert len({*drawn}) == 1
    status, reply = vllm_server.call("/v1/completions", {**body, "n": 2})
    assert (status, "n = 2 without a temperature" in json.dumps(reply)) == (400, True)
    assert vllm_server.call("/v1/completions", {**body, "model": "gated@no_such=0.5", "stream": True})[0] == 400
    for name in ("base", "adapter", "gated@unit"):
        warm = {**body, "model": name, "seed": 5}
        texts = [
            vllm_server.call("/v1/completions", {**warm, **more})[1]["choices"][0]["text"]
            for more in ({}, {"temperature": 1.0}, {"temperature": 0.0})
        ]
        assert texts[0] == texts[1] != texts[2], f"{name} was not asked when the temperature was found"
    for _ in range(2):
        assert vllm_server.call("/v1/completions", {**body, "temperature": 2.0})[0] == 200
    assert "".join(vllm_server.lines).count("sampling at temperature 2, but gated is recommended greedily") == 1


@vllm_only
def test_vllm_server_stops_at_the_end_of_the_turn(tmp_path: Path) -> None:
    """The base's EOS is another token than the one that ends a turn of its chat template."""
    write_base(tmp_path / "base", ending_base(**SHAPE), chatml_tokenizer())
    model = lg.attach_gates(tiny_adapter(base=ending_base(**SHAPE), lora_alpha=1), lg.GateConfig(lower=-3, upper=2))
    lg.save_gates(model, tmp_path / "gated", base_id=str(tmp_path / "base"))
    server = Running(str(tmp_path / "gated"), "--dtype", "float32").wait(600)
    try:
        for name in ("base", "adapter", "gated"):
            body = {"model": name, "max_tokens": 60, "messages": [{"role": "user", "content": PROMPTS[0]}], "n": 4}
            status, reply = server.call("/v1/chat/completions", body)
            assert status == 200, reply
            assert [choice["finish_reason"] for choice in reply["choices"]] == ["stop"] * 4
        assert server.end() == 0, "Ctrl-C"
        assert "stopped" in "".join(server.lines[-5:])
    finally:
        server.end()


@vllm_only
def test_adapters_come_and_go_while_the_server_runs(vllm_server: Running, folders: Path, tmp_path: Path) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert vllm_server.call(load, {"lora_name": "second", "lora_path": str(folders / "second")})[0] == 200
    assert [vllm_server.complete("second", prompt).strip() for prompt in PROMPTS] == expected("second")
    assert vllm_server.call(unload, {"lora_name": "second"})[0] == 200
    assert vllm_server.call("/v1/completions", {"model": "second", "prompt": "w1"})[0] == 404
    status, reply = vllm_server.call(load, {"lora_name": "none", "lora_path": str(tmp_path / "none")})
    assert status == 404, reply
    (tmp_path / "gate_config.json").write_text('{"format": "loragate", "schema_version": 99}')
    status, reply = vllm_server.call(load, {"lora_name": "bad", "lora_path": str(tmp_path)})
    assert status == 400
    assert "schema version 99 is not known" in json.dumps(reply)
    assert "Call to" not in json.dumps(reply)
    assert vllm_server.complete("gated", PROMPTS[0]).strip() == expected("gated")[0]


def overridden(text: str) -> list[str]:
    """Greedy answers of transformers under an override; the adapter of "gated" is "adapter"."""
    model, override = model_of("gated"), parse_override(text)
    with lg.gate_override(model, override):
        return greedy(model)


@vllm_only
def test_a_request_says_how_strongly_an_adapter_acts(vllm_server: Running) -> None:
    """At the top of the body or among vLLM's own arguments, for gated and plain adapters, streamed or not."""
    body = {"prompt": PROMPTS, "max_tokens": NEW_TOKENS, "temperature": 0}
    weaker = overridden("constant=-0.5")
    for name in ("gated", "adapter"):
        for fields in ({"lora_scale": -0.5}, {"vllm_xargs": {"lora_scale": -0.5}}):
            status, reply = vllm_server.call("/v1/completions", {"model": name, **body, **fields})
            assert status == 200, reply
            assert [choice["text"].strip() for choice in reply["choices"]] == weaker
            assert reply["model"] == name
        assert [vllm_server.complete(f"{name}@constant=-0.5", prompt).strip() for prompt in PROMPTS] == weaker
    unit = vllm_server.call("/v1/completions", {"model": "gated", "lora_gates": "unit", **body})[1]
    assert [one["text"].strip() for one in unit["choices"]] == overridden("unit")
    assert [vllm_server.complete("gated@unit", prompt).strip() for prompt in PROMPTS] == overridden("unit")
    zero = vllm_server.call("/v1/completions", {"model": "adapter", "lora_scale": 0, **body})[1]
    assert [one["text"].strip() for one in zero["choices"]] == expected("base")
    talk = {"model": "gated", "max_tokens": 4, "messages": [{"role": "user", "content": "w5"}], "temperature": 0}
    texts = {
        vllm_server.call("/v1/chat/completions", {**talk, "lora_scale": scale})[1]["choices"][0]["message"]["content"]
        for scale in (-3, 0, 3)
    }
    assert len(texts) > 1
    status, streamed = vllm_server.call(
        "/v1/completions", {"model": "gated", "stream": True, "lora_scale": -0.5, **body}
    )
    assert status == 200
    parts = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    first = "".join(part["choices"][0]["text"] for part in parts if part["choices"][0]["index"] == 0)
    assert first.strip() == weaker[0]
    wait_for(vllm_server, "adapter gated, strength constant=-0.5, ")
    vllm_server.complete("base", PROMPTS[0])
    wait_for(vllm_server, f"model base, adapter none, strength none, {len(PROMPTS[0].split())} prompt tokens")


def wait_for(server: Running, text: str) -> None:
    """Until the server's output holds `text`: a log line may come after the answer."""
    until = time.monotonic() + 20
    while text not in "".join(server.lines):
        assert time.monotonic() < until, "".join(server.lines)[-3000:]
        time.sleep(0.2)


@vllm_only
@pytest.mark.parametrize("stream", [False, True])
def test_a_strength_that_cannot_be_is_a_bad_request(vllm_server: Running, stream: bool) -> None:
    for model, fields, message in (
        ("gated", {"lora_scale": "strong"}, "lora_scale takes a finite number, found 'strong'"),
        ("gated", {"lora_scale": float("nan")}, "lora_scale takes a finite number, found nan"),
        ("gated", {"lora_gates": "unti"}, "did you mean 'unit'"),
        ("gated@unti", {}, "did you mean 'unit'"),
        ("gated", {"vllm_xargs": {"lora_scael": 1}}, "did you mean 'lora_scale'"),
        ("gated@unit", {"lora_scale": 1}, "carries an override of λ in its name"),
        ("base", {"lora_scale": 1}, "a base has no strength"),
    ):
        status, reply = vllm_server.call(
            "/v1/completions", {"model": model, "prompt": "w1", "max_tokens": 2, "stream": stream, **fields}
        )
        assert status == 400, (model, fields, reply)
        assert message in reply["error"]["message"]


@vllm_only
def test_the_clients_of_the_documentation(vllm_server: Running) -> None:
    """The curl command and the program for OpenAI's client on the page about serving, against this server."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    page = page.replace("127.0.0.1:8000", f"127.0.0.1:{vllm_server.port}")
    (shell,) = re.findall(r"```sh\n(curl .*?)```", page, re.DOTALL)
    (program,) = re.findall(r"```python\n(from openai .*?)```", page, re.DOTALL)
    environment = {**os.environ, "NO_PROXY": "*", "no_proxy": "*"}
    for command in (["bash", "-c", shell], [sys.executable, "-c", program]):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert '"text_completion"' in done.stdout or done.stdout.endswith("\ngated\n")


@vllm_only
def test_one_model_s_card(vllm_server: Running) -> None:
    for name in ("base", "gated", "gated@unit", "gated@constant=0.3"):
        status, card = vllm_server.call(f"/v1/models/{name}")
        assert (status, card["id"], card["object"]) == (200, name, "model")
    status, reply = vllm_server.call("/v1/models/gatde")
    assert status == 404
    assert "did you mean 'gated'" in reply["error"]["message"]
    status, reply = vllm_server.call("/v1/models/gated@unti")
    assert status == 400
    assert "did you mean 'unit'" in reply["error"]["message"]


@vllm_only
def test_a_folder_written_anew_is_another_adapter(vllm_server: Running, folders: Path, tmp_path: Path) -> None:
    """Its next request is answered by what the folder holds now, and nothing of the prefix cache is taken for it."""
    load = {"lora_name": "moving", "lora_path": str(tmp_path / "moving")}
    for name in ("gated", "second", "gated"):
        shutil.rmtree(tmp_path / "moving", ignore_errors=True)
        shutil.copytree(folders / name, tmp_path / "moving")
        if "moving" not in [card["id"] for card in vllm_server.call("/v1/models")[1]["data"]]:
            assert vllm_server.call("/v1/load_lora_adapter", load)[0] == 200
        assert [vllm_server.complete("moving", prompt).strip() for prompt in PROMPTS] == expected(name)
    (tmp_path / "moving" / "gates.safetensors").write_bytes(b"nothing")
    status, reply = vllm_server.call("/v1/completions", {"model": "moving", "prompt": "w1"})
    assert status == 400
    assert "its sha256" in reply["error"]["message"]
    assert vllm_server.complete("gated", PROMPTS[0]).strip() == expected("gated")[0]


@vllm_only
def test_chat_is_rendered_as_training_renders(vllm_server: Running) -> None:
    """The template of this base slips in a system message; ours does not, and neither does the server."""
    body = {"model": "gated", "max_tokens": NEW_TOKENS, "temperature": 0}
    talk = [{"role": "user", "content": PROMPTS[0]}]
    status, reply = vllm_server.call("/v1/chat/completions", {**body, "messages": talk})
    assert status == 200, reply
    rendered = f"<user> {PROMPTS[0]} <assistant> "
    assert reply["usage"]["prompt_tokens"] == len(tiny_tokenizer()(rendered)["input_ids"])
    text = vllm_server.call("/v1/completions", {**body, "prompt": rendered})[1]["choices"][0]["text"]
    assert reply["choices"][0]["message"]["content"].strip() == text.strip()
    own = [{"role": "system", "content": "w90"}, *talk]
    longer = vllm_server.call("/v1/chat/completions", {**body, "messages": own})[1]
    assert longer["usage"]["prompt_tokens"] == reply["usage"]["prompt_tokens"] + 2


@vllm_only
def test_sigterm_ends_a_server_that_is_streaming_within_8_seconds(vllm_server: Running) -> None:
    body = {"model": "gated", "prompt": "w1", "max_tokens": 100, "ignore_eos": True, "stream": True, "n": 8}
    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(vllm_server.call, "/v1/completions", {**body, "temperature": 1})
        time.sleep(0.5)
        began = time.monotonic()
        vllm_server.process.send_signal(signal.SIGTERM)
        assert vllm_server.process.wait(60) == 0
        # with more processes than processors, each waits for its turn
        assert time.monotonic() - began < 8 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert "stopped" in "".join(vllm_server.lines[-5:])
    with pytest.raises(urllib.error.URLError):
        vllm_server.call("/health")


@vllm_only
def test_a_killed_worker_ends_the_server_with_a_message(folders: Path) -> None:
    server = Running(str(folders / "gated"), "--dtype", "float32").wait(1200)
    try:

        def pids(*how: str) -> list[int]:
            found = subprocess.run(["pgrep", *how], capture_output=True, text=True, check=True).stdout
            return [int(pid) for pid in found.split()]

        (child,) = pids("-P", str(server.process.pid))  # which leads a session of its own
        workers = pids("-s", str(child), "-f", "EngineCore")
        os.kill(workers[0], signal.SIGKILL)
        assert server.process.wait(120) == 1
        server.reader.join(10)
        assert "loragate: vLLM ended by itself" in "".join(server.lines[-30:])
    finally:
        server.end()


def test_settings_that_cannot_be(folders: Path, fails: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = folders / "gated"
    with monkeypatch.context() as patch:
        patch.setattr("loragate.generation.vllm_engine.require_vllm", lambda: None)
        assert "does not exist" in fails("serve", tmp_path / "none")
        assert "vllm serve" in fails("serve", folders / "base"), "a base alone needs no plugin"
        assert "--vllm-args" in fails("serve", gated, "--quantization", "4bit")
        told = fails("serve", gated, "--device", "cuda:1")
        assert "--device cuda:1 has no effect" in told
        assert "CUDA_VISIBLE_DEVICES=1" in told
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = fails("serve", gated)
    assert 'pip install ".[vllm]"' in told
    assert "loragate generate" in told


def test_names_and_places_that_are_served(folders: Path, tmp_path: Path, fails: Any) -> None:
    gated, second = folders / "gated", folders / "second"
    options = ServeOptions(model=str(gated), adapters=f"math={second}, calm={second}@unit")
    place, adapters = served_adapters(options)
    assert place.base.name == str(folders / "base")
    assert {name: adapter.path_with_override for name, adapter in adapters.items()} == {
        "gated": str(gated),
        "adapter": str(gated / "adapter"),
        "math": str(second),
        "calm": f"{second}@unit",
    }
    for wrong, message in (
        ({"adapters": "math"}, "expected NAME=FOLDER"),
        ({"adapters": f"math={tmp_path}"}, "expected NAME=FOLDER"),
        ({"adapters": f"gated={second}"}, "the name gated is taken"),
        ({"adapters": f"math={second}@unti"}, "did you mean 'unit'"),
    ):
        with pytest.raises(ConfigError, match=message):
            served_adapters(ServeOptions(model=str(gated), **wrong))


def test_a_further_adapter_for_another_base_template_or_end_is_told(tmp_path: Path, capsys: Any) -> None:
    """One server has one base and renders by one template."""
    served = chatml_tokenizer()
    served.chat_template = tiny_tokenizer().chat_template  # which ends no turn with <|im_end|>
    for name in ("base", "moved"):
        write_base(tmp_path / name, tokenizer=served, **SHAPE)
    write_adapter(tmp_path / "same", tmp_path / "base", tiny_adapter(base=tiny_base(**SHAPE)))
    write_adapter(tmp_path / "style", tmp_path / "moved", tiny_adapter(base=tiny_base(**SHAPE)))
    chatml_tokenizer().save_pretrained(tmp_path / "style")

    def told(**given: Any) -> tuple[str, list[str]]:
        options = ServeOptions(model=str(tmp_path / "same"), vllm_memory=0.5, **given)
        source, adapters = served_adapters(options)
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        arguments = vllm_arguments(options, "none", source, adapters, open_tokenizer(source, options), scratch)
        return " ".join(capsys.readouterr().out.split()), arguments

    assert "warning" not in told(adapters=f"again={tmp_path / 'same'}")[0]
    text, arguments = told(adapters=f"style={tmp_path / 'style'},half={tmp_path / 'style'}@constant=0.5")
    assert "--adapters style" in text
    assert f"was made for the base {tmp_path / 'moved'}, and is served on {tmp_path / 'base'}" in text
    assert text.count("its chat template is not the one of") == 1, "once for each tokenizer"
    told_to_stop = Path(arguments[arguments.index("--generation-config") + 1]) / "generation_config.json"
    assert TURN_END in json.loads(told_to_stop.read_text())["eos_token_id"]
    assert "was made for the base" not in told(adapters=f"style={tmp_path / 'style'}", base=str(tmp_path / "base"))[0]
    # a served tokenizer in which that id is another word
    assert further_endings("style", chatml_tokenizer(), tiny_tokenizer(), None) == set()
    assert "its answers end with '<|im_end|>'" in " ".join(capsys.readouterr().out.split())


def test_the_template_for_vllm() -> None:
    """Wrapped where a system message is slipped in, left alone where none is."""
    assert template_for_vllm(tiny_tokenizer()) is None
    tokenizer = talkative_tokenizer()
    ours = Chat(tokenizer, "none")
    for start, end in (("", ""), ("\n", "\n"), ("{%- set x = 'y' -%}\n", "{# over #}\n\n")):
        tokenizer.chat_template = start + talkative_tokenizer().chat_template + end
        ours = Chat(tokenizer, "none")
        wrapped = tiny_tokenizer()
        wrapped.chat_template = template_for_vllm(tokenizer)
        for talk in (
            [{"role": "user", "content": 'say "x"\nö'}],
            [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}],
        ):
            expected = ours.render(talk, generation_prompt=True)
            assert wrapped.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) == expected


def test_a_port_in_use_is_named_before_vllm_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}"):
            free_port("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1: it cannot be served from"):
        free_port("192.0.2.1", 0)  # an address of documents, which no machine has
    assert free_port("127.0.0.1", 0) > 0


def test_a_server_that_is_stopped_while_it_starts_shows_no_traceback(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def stopped(process: Any, url: str) -> None:
        assert process.stdout is None
        time.sleep(2)  # until Python has begun
        raise KeyboardInterrupt

    starts = [sys.executable, "-c", "import time; time.sleep(60)"]
    for name, value in (
        ("check_servable", lambda *_: 8),
        ("server_command", lambda *_, **__: starts),
        ("vllm_arguments", lambda *_: []),
        ("wait_until_healthy", stopped),
    ):
        monkeypatch.setattr(f"loragate.serving.vllm_server.{name}", value)
    assert serve(ServeOptions(model=str(folders / "gated"), port=0)) == 0
    out, err = capfd.readouterr()
    assert "stopped" in out + err
    assert "Traceback" not in err


def test_the_line_that_checks_a_server_says_how_to_load_its_reference() -> None:
    url = "http://127.0.0.1:1"
    assert verify_command(ServerSettings(model="my gated"), url) == f"loragate verify 'my gated' --endpoint {url}/v1"
    settings = ServerSettings(model="g", base="b", dtype="float16", chat_template="c.jinja", trust_remote_code=True)
    more = " --base b --dtype float16 --chat-template c.jinja --trust-remote-code"
    assert verify_command(settings, url) == f"loragate verify g --endpoint {url}/v1{more}"


def test_the_command_line_of_vllm() -> None:
    places = {"gated": "/g", "adapter": "/g/adapter", "half": "/g@constant=0.5"}
    command = server_command("b", places, host="::1", port=81, max_lora_rank=16)
    assert " ".join(command[1:-3]) == (
        "-m vllm.entrypoints.cli.main serve b --served-model-name base --host ::1 --port 81 --enable-lora --max-lora-rank 16 "
        "--max-loras 2 --lora-modules"
    ), "one slot for all that is laid over the λ of a folder"
    assert [tuple(json.loads(one).values()) for one in command[-3:]] == [*places.items()]
