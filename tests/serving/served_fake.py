"""An OpenAI-compatible server over a tiny model of transformers, honest or with one planted fault; it speaks as vLLM, as
llama-server, or the bare standard."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from loragate.gates.control import as_base, constant_gate
from loragate.models import open_model, resolve

TOP = 5
GATHER_S = 0.02  # in which requests become one batch


class FakeServer:
    """Serves the adapter of a folder as "adapter", others by name, and the base.

    Args:
        adapter: folder.
        others: {name: folder}.
        fault: what is wrong, separated by commas; see the tests.
        dialect: "vllm", "llama" or "plain".
    """

    def __init__(self, adapter, others=None, fault="", dialect="vllm"):
        self.loaded = {"adapter": open_model(resolve(adapter))}
        self.loaded |= {name: open_model(resolve(folder)) for name, folder in (others or {}).items()}
        self.tokenizer = self.loaded["adapter"].tokenizer
        self.faults, self.dialect = fault.split(", "), dialect
        self.lock, self.waiting, self.cache = threading.Lock(), [], {}

    def answer(self, path, body):
        if path == "/v1/models":
            return {"data": [{"id": name} for name in ["base", *self.loaded]]}
        if self.dialect == "vllm" and path.startswith("/v1/models/"):
            return {"id": path.removeprefix("/v1/models/")}
        if path == "/v1/completions":
            return self.complete(body)
        if path == "/v1/chat/completions":
            return {"choices": [{}], "usage": {"prompt_tokens": len(self.chat_ids(body["messages"]))}}
        if self.dialect == "vllm" and path == "/version":
            return {"version": "0.0-fake"}
        if self.dialect == "vllm" and path == "/tokenize":
            return {"tokens": self.chat_ids(body["messages"])}
        if self.dialect == "llama" and path == "/lora-adapters":
            return [{"id": at, "path": f"/models/{name}.gguf", "scale": 1.0} for at, name in enumerate(self.loaded)]
        return None

    def chat_ids(self, messages):
        wrong = "template" in self.faults
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not wrong)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def target(self, body):
        """(adapter or None for the base, strength or None) that a request asks for."""
        if self.dialect == "llama":
            listed = {one["id"]: one["scale"] for one in body.get("lora", [])}
            if not listed:
                return ("adapter", 1.0) if "empty list is full strength" in self.faults else (None, None)
            ((index, scale),) = listed.items()
            return [*self.loaded][index], scale
        name, _, strength = body["model"].partition("@constant=")
        if "adapter ignored" in self.faults or name == "base":
            return None, None
        field = body.get("vllm_xargs", {}).get("lora_scale") if "field ignored" not in self.faults else None
        strength = float(strength) if strength else field
        if "zero is not zero" in self.faults and strength == 0:
            strength = 0.2
        return name, strength

    def complete(self, body):
        prompt = body["prompt"]
        extras = {"return_tokens_as_token_ids", "ignore_eos"} & set(body)
        if self.dialect == "plain" and (extras or not isinstance(prompt, str)):
            raise ValueError("unknown field")
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        name, strength = self.target(body)
        self.waiting.append(name)
        time.sleep(GATHER_S)
        beside = [other for other in self.waiting if other is not None]
        if "last adapter in a batch" in self.faults and name is None and beside:
            name = beside[-1]
        with self.lock:
            found = self.greedy(ids, name, strength, body)
        self.waiting.remove(self.target(body)[0])
        return found

    @contextmanager
    def acting(self, name, strength):
        model = self.loaded[name or "adapter"].model
        context = (
            as_base(model) if name is None else nullcontext() if strength is None else constant_gate(model, strength)
        )
        with context, torch.no_grad():
            yield model

    def greedy(self, ids, name, strength, body):
        shared = {"cache over strengths": name, "cache over adapters": None}.get(self.faults[0], (name, strength))
        with self.acting(name, strength) as model:
            key = (shared, tuple(ids))
            if key not in self.cache:
                self.cache[key] = model(torch.tensor([ids[:-1]]), use_cache=True).past_key_values
            past, own = self.cache[key], list(ids[-1:])
            if (more := past.get_seq_length() - len(ids) + 1) > 0:
                past.crop(-more)
            rows, finish = [], "length"
            endings = {self.tokenizer.eos_token_id} - (
                {self.tokenizer.eos_token_id} if "does not stop" in self.faults else set()
            )
            bias = {int(token): value for token, value in (body.get("logit_bias") or {}).items()}
            for _ in range(body["max_tokens"]):
                logits = model(torch.tensor([own[-1:]]), past_key_values=past, use_cache=True).logits[0, -1]
                for token, value in bias.items():
                    logits[token] += value
                rows.append((int(logits.argmax()), logits.log_softmax(-1)))
                own.append(rows[-1][0])
                if rows[-1][0] in endings and not body.get("ignore_eos"):
                    finish = "stop"
                    break
            count, before = len(rows), []
            if body.get("echo"):
                scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
                before = [(ids[0], None), *((token, scores[at]) for at, token in enumerate(ids[1:]))]
        if "leaves tokens out" in self.faults:
            rows = rows[:1] + rows[2:]
        return {
            "choices": [
                {
                    "text": self.tokenizer.decode([token for token, _ in rows]),
                    "finish_reason": finish,
                    "logprobs": None if "no log-probs" in self.faults else self.logprobs(before + rows),
                }
            ],
            "usage": {"completion_tokens": count, "prompt_tokens": len(ids)},
        }

    def logprobs(self, rows):
        if self.dialect == "llama":
            content = []
            for token, scores in rows:
                top = [{"id": int(i), "logprob": float(scores[i])} for i in scores.topk(TOP).indices]
                content.append({"id": token, "logprob": float(scores[token]), "top_logprobs": top})
            return {"content": content}
        shown = self.tokenizer.convert_ids_to_tokens if self.dialect == "plain" else "token_id:{}".format
        return {
            "tokens": [shown(token) for token, _ in rows],
            "token_logprobs": [None if scores is None else float(scores[token]) for token, scores in rows],
            "top_logprobs": [
                None if scores is None else {shown(int(i)): float(scores[i]) for i in scores.topk(TOP).indices}
                for _, scores in rows
            ],
        }


@contextmanager
def running(server):
    """The URL of the server while it answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(server.answer(self.path, {}))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                self.reply(server.answer(self.path, body))
            except ValueError as error:
                self.reply({"error": str(error)}, 400)

        def reply(self, found, status=200):
            text = json.dumps(found if found is not None else {"error": "no such path"}).encode()
            self.send_response(status if found is not None else 404)
            missing = 9 if "breaks off" in server.faults and self.path == "/v1/completions" else 0
            self.send_header("Content-Length", str(len(text) + missing))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    http = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1"
    finally:
        http.shutdown()
        http.server_close()
