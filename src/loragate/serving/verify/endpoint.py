"""An OpenAI-compatible server as a runtime to check: vLLM, llama-server, or any other that answers `/v1/completions`.

What a server takes beyond the standard is found out by asking, once: prompts as token ids, log-probs of the prompt, tokens by id,
answers that go on after their end. It knows three ways to say a strength: behind the name and in `lora_scale`, which loragate's
plugin takes, and in llama-server's `lora` list.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from loragate.errors import ConfigError, LoragateError, nearest
from loragate.models.source import ModelSource
from loragate.printable import excerpt
from loragate.serving.settings import VerifySettings
from loragate.serving.verify.served import ADAPTER, BASE, Answer, Prompt, Step, Target

PATIENCE_S = 600.0  # for one answer; a server on a CPU compiles at the first
TOP = 5  # most likely tokens that are asked for with each
BIAS = 100.0  # the most that the API takes
STRENGTHS = (0.0, 0.5, 1.0)
KEY = "OPENAI_API_KEY"


@dataclass(frozen=True)
class RequestFormat:
    """What a server takes beyond the standard."""

    ids: bool  # prompts as token ids, and fields that vLLM and llama-server know
    echo: bool  # the prompt again, with log-probs


REQUEST_FORMATS = (RequestFormat(True, True), RequestFormat(True, False), RequestFormat(False, False))


class Endpoint:
    """A server at a URL; see `Runtime`.

    Args:
        settings: with `endpoint`.
        place: of the adapter.
        others: names of further served adapters.
        tokenizer: of the adapter, to tell tokens from text where the server gives no ids.
        probe: a prompt to find out with what the server takes.

    Raises:
        ConfigError: for names that are not served.
        LoragateError: for a server that does not answer.
    """

    parallel = True

    def __init__(
        self, settings: VerifySettings, place: ModelSource, others: Sequence[str], tokenizer: Any, probe: Prompt
    ) -> None:
        self._place = place
        self.url = settings.endpoint.rstrip("/").removesuffix("/v1")
        if urllib.parse.urlsplit(self.url).scheme not in ("http", "https"):
            raise ConfigError(f"--endpoint {settings.endpoint}: expected a URL such as http://127.0.0.1:8000/v1")
        # a proxy of the environment is for the outside, not for this machine
        local = urllib.parse.urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")
        self._opener = urllib.request.build_opener(*[urllib.request.ProxyHandler({})] * local)
        self._tokenizer = tokenizer
        served = [one for one in self._ask("/v1/models").get("data") or [] if isinstance(one, dict)]
        if not served:
            raise LoragateError(f"{self.url}/v1/models lists no model; is it an OpenAI-compatible server?")
        files = self._optional("/lora-adapters")
        self.label = self._label()
        self._strength_method: str
        if isinstance(files, list):  # llama-server
            self._strength_method, self._names = "lora", self._adapter_ids(settings, files, others)
        else:
            self._names = self._served_names(settings, served, others)
            self._strength_method = settings.strength_by if settings.strength_by != "auto" else self._strength_by()
        named = sorted(self._names, key=lambda name: (name != BASE, name != ADAPTER))
        strengths = () if self._strength_method == "none" else STRENGTHS
        self.scales_all_modules = self._strength_method == "lora"  # as llama.cpp does it
        self.targets = [*map(Target, named), *(Target(ADAPTER, strength) for strength in strengths)]
        self._form = self._detect_request_format(probe)

    def complete(
        self,
        target: Target,
        prompt: Prompt,
        tokens: int,
        *,
        forced: int | None = None,
        with_prompt_logprobs: bool = False,
    ) -> Answer:
        """See `Runtime`; raises LoragateError where the server refuses."""
        form = self._form
        given: Any = list(prompt.ids) if form.ids else prompt.text
        body = {"model": self._model(target), "prompt": given, "max_tokens": tokens, "temperature": 0}
        body |= {"logprobs": TOP, **self._extra_fields(target)}
        if form.echo and with_prompt_logprobs:
            body["echo"] = True
        if forced is not None:
            body["logit_bias"] = {str(forced): BIAS}
        if form.ids:
            body |= {"return_tokens_as_token_ids": True, "ignore_eos": forced is None}
        reply = self._ask("/v1/completions", body)
        try:
            return self._answer(reply, prompt, tokens)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise LoragateError(
                f"{self.url}/v1/completions answered in another form than OpenAI's ({type(error).__name__}: {error}): "
                f"{excerpt(json.dumps(reply), 300)}"
            ) from error

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int] | int | None:
        """See `Runtime`; by `/tokenize` where there is one."""
        model = self._model(Target(ADAPTER))
        asked = {"model": model, "messages": list(messages), "add_generation_prompt": True}
        if self._strength_method == "lora":  # llama-server tokenizes text alone
            text = self._optional("/apply-template", {"messages": list(messages)})
            if isinstance(text, dict) and "prompt" in text:
                asked = {"content": text["prompt"], "add_special": True, "parse_special": True}
        found = self._optional("/tokenize", asked)
        if isinstance(found, dict) and isinstance(found.get("tokens"), list):
            return [int(token) for token in found["tokens"]]
        body = {"model": model, "messages": list(messages), "max_tokens": 1, "temperature": 0}
        usage = self._ask("/v1/chat/completions", {**body, **self._extra_fields(Target(ADAPTER))}).get("usage")
        count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        return count if isinstance(count, int) else None

    def _label(self) -> str:
        found = self._optional("/version")
        if isinstance(found, dict) and found.get("version"):
            return f"vLLM {found['version']}"
        found = self._optional("/props")
        if isinstance(found, dict) and found.get("build_info"):
            return f"llama-server {found['build_info']}"
        return self.url

    def _strength_by(self) -> str:
        """By name where the server knows the adapter's name with a strength behind it, which it need not list."""
        if self._place.ref.override:
            return "none"  # a name takes one override
        name = f"{self._names[ADAPTER]}@constant=0"
        found = self._optional(f"/v1/models/{urllib.parse.quote(name, safe='@=')}")
        return "name" if isinstance(found, dict) and found.get("id") == name else "none"

    def _served_names(
        self, settings: VerifySettings, served: Sequence[Mapping[str, Any]], others: Sequence[str]
    ) -> dict[str, str]:
        """{name of a target: what the server calls it}."""
        names = [str(one.get("id")) for one in served]
        folder = PurePath(settings.adapter).name
        # vLLM names an adapter's folder as its root
        likely = [
            str(one.get("id"))
            for one in served
            if str(one.get("root")) in (settings.adapter, self._place.path_with_override)
        ]
        candidates = [settings.served_adapter] if settings.served_adapter else [*likely, self._place.kind, folder]
        found = {ADAPTER: next((name for name in candidates if name in names), "")}
        if not found[ADAPTER]:
            asked = settings.served_adapter or folder
            raise ConfigError(
                f"{self.url} serves no model {asked!r}, it serves {', '.join(names)}{nearest(asked, names)}; name the "
                "adapter's with --served-adapter"
            )
        # vLLM names an adapter's base as its parent
        roots = [str(one.get("id")) for one in served if one.get("parent") is None and "@" not in str(one.get("id"))]
        candidates = [settings.served_base] if settings.served_base else [BASE, *roots]
        base = next((name for name in candidates if name in names and name != found[ADAPTER]), "")
        if settings.served_base and not base:
            raise ConfigError(f"--served-base {settings.served_base}: {self.url} serves {', '.join(names)}")
        found |= {BASE: base} if base else {}
        for name in others:
            if name not in names:
                raise ConfigError(f"--adapters {name}=…: {self.url} serves {', '.join(names)}{nearest(name, names)}")
        return found | {name: name for name in others}

    def _adapter_ids(
        self, settings: VerifySettings, files: Sequence[Mapping[str, Any]], others: Sequence[str]
    ) -> dict[str, str]:
        """{name of a target: the id of the adapter in llama-server's list}; "" for the base."""
        listed = [(str(one.get("id")), PurePath(str(one.get("path")))) for one in files]
        known = ", ".join(f"{path} (id {index})" for index, path in listed)
        own = settings.served_adapter or (listed[0][0] if len(listed) == 1 else PurePath(settings.adapter).name)
        found: dict[str, str] = {BASE: ""}
        for name, asked, flag in [(ADAPTER, own, "--served-adapter"), *((one, one, "--adapters") for one in others)]:
            # files of one name are usual: each export of loragate is called alike
            meant = [index for index, path in listed if asked in (index, path.stem, str(path))]
            if len(meant) != 1:
                number = "several LoRA files" if meant else "no LoRA file"
                raise ConfigError(
                    f"{self.url} has {number} called {asked}, it has {known}; name one by its id with {flag}"
                )
            found[name] = meant[0]
        return found

    def _model(self, target: Target) -> str:
        if self._strength_method == "lora":
            return target.name  # llama-server has one model
        name = self._names[target.name]
        return (
            name
            if self._strength_method != "name" or target.strength is None
            else f"{name}@constant={target.strength:g}"
        )

    def _extra_fields(self, target: Target) -> dict[str, Any]:
        if self._strength_method == "lora":
            index, scale = self._names[target.name], 1.0 if target.strength is None else target.strength
            # an adapter that the list leaves out has strength 0, says llama-server's manual
            return {"lora": [{"id": int(index), "scale": scale}] if index else []}
        if self._strength_method == "lora_scale" and target.strength is not None:
            return {"vllm_xargs": {"lora_scale": target.strength}}
        return {}

    def _detect_request_format(self, probe: Prompt) -> RequestFormat:
        """The first of `REQUEST_FORMATS` that the server takes, without what it passes over."""
        said = ""
        for form in REQUEST_FORMATS:
            self._form = form
            try:
                answer = self.complete(Target(ADAPTER), probe, 2, with_prompt_logprobs=True)
            except LoragateError as error:
                said = str(error)
                continue
            return RequestFormat(form.ids, form.echo and bool(answer.prompt_logprobs))
        raise LoragateError(said)

    def _answer(self, reply: Mapping[str, Any], prompt: Prompt, tokens: int) -> Answer:
        choice = reply["choices"][0]
        steps = _steps(choice.get("logprobs") or {})
        count = (reply.get("usage") or {}).get("completion_tokens")
        before: list[Step] = []
        if len(steps) > tokens:  # echo puts the prompt's tokens in front
            before, steps = steps[: len(prompt.ids)], steps[len(prompt.ids) :]
        if steps and count is not None and len(steps) < count and choice.get("finish_reason") != "stop":
            steps = []  # llama-server leaves out tokens that end within a character: nothing tells which
        given = choice.get("token_ids")
        ids = _token_ids(steps, given)
        if ids is None and steps:
            ids = self._ids_of_text(prompt, str(choice.get("text") or ""), len(steps))
        finish = str(choice.get("finish_reason") or "")
        scores = tuple(step.logprob for step in before[1:])
        return Answer(tuple(steps), ids, scores, finish, None if count is None else int(count))

    def _ids_of_text(self, prompt: Prompt, text: str, count: int) -> tuple[int, ...] | None:
        """The answer's ids where its text, behind the prompt, is tokenized into as many tokens as the server wrote."""
        for whole in (prompt.text + text, f"{prompt.text} {text}"):
            ids = self._tokenizer(whole)["input_ids"]
            if tuple(ids[: len(prompt.ids)]) == prompt.ids and len(ids) == len(prompt.ids) + count:
                return tuple(ids[len(prompt.ids) :])
        return None

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        found = self._call(path, body)
        if not isinstance(found, dict) or found.get("error"):  # which some proxies send with status 200
            raise LoragateError(
                f"{self.url}{path} answered with an error, or no object: {excerpt(json.dumps(found), 300)}"
            )
        return found

    def _optional(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """What a path answers that not every server has; None without it."""
        try:
            return self._call(path, body)
        except LoragateError:
            return None

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with self._opener.open(urllib.request.Request(self.url + path, data, headers), timeout=PATIENCE_S) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            said = excerpt(error.read().decode(errors="replace"), 300)
            hint = f"; give its key in the environment variable {KEY}" if error.code in (401, 403) else ""
            raise LoragateError(f"{self.url}{path} answered with status {error.code}: {said}{hint}") from error
        except http.client.IncompleteRead as error:
            raise LoragateError(
                f"{self.url}{path} broke off its answer ({error}); is the server, or a proxy before it, still running? Its log "
                "says why"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise LoragateError(f"{self.url}{path} does not answer ({error}); is the server running?") from error
        except ValueError as error:
            raise LoragateError(
                f"{self.url}{path} did not answer in JSON; is it an OpenAI-compatible server?"
            ) from error


def _steps(logprobs: Mapping[str, Any]) -> list[Step]:
    """Of completions (four lists) or of chat (a list of objects), as llama-server gives them in both.

    Raises ValueError for a token without a finite log-prob.
    """
    steps = _parse_steps(logprobs)
    if lost := next((one for one in steps if not math.isfinite(one.logprob)), None):
        raise ValueError(f"the log-prob of token {lost.token!r} is {lost.logprob}")
    return steps


def _parse_steps(logprobs: Mapping[str, Any]) -> list[Step]:
    if isinstance(content := logprobs.get("content"), list):
        return [
            Step(
                _key(one),
                float(one["logprob"]),
                {_key(other): float(other["logprob"]) for other in one.get("top_logprobs") or ()},
            )
            for one in content
        ]
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs.get("tokens") or ())
    return [
        # the first token of a prompt has no log-prob
        Step(
            str(token),
            0.0 if value is None else float(value),
            {str(key): float(one) for key, one in (top or {}).items()},
        )
        for token, value, top in zip(logprobs.get("tokens") or (), logprobs.get("token_logprobs") or (), tops)
    ]


def _key(one: Mapping[str, Any]) -> str:
    return f"token_id:{one['id']}" if "id" in one else str(one.get("token"))


def _token_ids(steps: Sequence[Step], given: Any) -> tuple[int, ...] | None:
    if isinstance(given, list) and len(given) == len(steps):
        return tuple(map(int, given))
    found = [step.token.removeprefix("token_id:") for step in steps if step.token.startswith("token_id:")]
    return tuple(map(int, found)) if len(found) == len(steps) else None
