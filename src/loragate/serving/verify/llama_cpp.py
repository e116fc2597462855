"""llama.cpp in this process, through llama-cpp-python, as a runtime to check: a GGUF base and a GGUF LoRA file.

The library sets an adapter's strength when a model is opened, so every strength is a model of its own, with a cache of its
own. A strength is not changed on an open context: llama.cpp would keep what it has computed with the old one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loragate.display import pluralize
from loragate.errors import ConfigError, LoragateError
from loragate.serving.settings import VerifySettings
from loragate.serving.verify.checks import SHARED_TOKENS
from loragate.serving.verify.endpoint import BIAS, STRENGTHS, TOP
from loragate.serving.verify.served import ADAPTER, BASE, Answer, Prompt, Step, Target

TEMPLATE_TOKENS = 512  # of what a chat template adds to a short conversation


class LlamaCpp:
    """See `Runtime`.

    Raises:
        ConfigError: without llama-cpp-python, or for files that are not there.
    """

    parallel = False
    scales_all_modules = True

    def __init__(self, settings: VerifySettings, prompt_tokens: int = SHARED_TOKENS) -> None:
        if importlib.util.find_spec("llama_cpp") is None:
            raise ConfigError(
                "--llama-cpp needs llama-cpp-python: pip install llama-cpp-python, which compiles llama.cpp"
            )
        for flag, path in (("--llama-cpp", settings.llama_cpp), ("--lora", settings.lora)):
            if not Path(path).is_file():
                raise ConfigError(f"{flag} {path or '(missing)'}: expected a GGUF file, of the base and of the adapter")
        self._library = importlib.import_module("llama_cpp")
        self._settings, self._room = settings, prompt_tokens + settings.tokens + TEMPLATE_TOKENS
        self._models: dict[float | None, Any] = {}
        self.label = f"llama-cpp-python {self._library.__version__}"
        self.targets = [Target(BASE), Target(ADAPTER), *(Target(ADAPTER, strength) for strength in STRENGTHS)]

    def complete(
        self,
        target: Target,
        prompt: Prompt,
        tokens: int,
        *,
        forced: int | None = None,
        with_prompt_logprobs: bool = False,
    ) -> Answer:
        """See `Runtime`; token by token, with the log-probs of all tokens of the vocabulary behind each."""
        try:
            model, ids = self._model(target), list(prompt.ids)
            if forced is not None:
                reply = model.create_completion(ids, max_tokens=tokens, temperature=0.0, logit_bias={forced: BIAS})
                count = reply["usage"]["completion_tokens"]
                return Answer((), None, (), reply["choices"][0]["finish_reason"] or "", count)
            steps: list[Step] = []
            scores: tuple[float, ...] = ()
            for token in model.generate(ids, temp=0.0, repeat_penalty=1.0):
                logprobs_V = _log_softmax(model.scores[model.n_tokens - 1])
                if not steps and with_prompt_logprobs:
                    scores = tuple(float(_log_softmax(model.scores[at])[ids[at + 1]]) for at in range(len(ids) - 1))
                best = np.argsort(logprobs_V)[-TOP:]
                top = {f"token_id:{index}": float(logprobs_V[index]) for index in best}
                steps.append(Step(f"token_id:{token}", float(logprobs_V[token]), top))
                if len(steps) == tokens:
                    break
        except (RuntimeError, ValueError, IndexError) as error:  # of llama.cpp, and of the library's buffers
            raise LoragateError(
                f"llama.cpp fails with {self._settings.llama_cpp} on a prompt of "
                f"{pluralize(len(prompt.ids), 'token')} ({error}); --tokens asks for shorter answers"
            ) from error
        token_ids = tuple(int(step.token.removeprefix("token_id:")) for step in steps)
        return Answer(tuple(steps), token_ids, scores, "length", len(steps))

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int] | int:
        """The number of tokens alone: the library shows no more."""
        model = self._model(Target(ADAPTER))
        try:
            reply = model.create_chat_completion([dict(one) for one in messages], max_tokens=1, temperature=0.0)
        except Exception as error:  # templates are programs that came with the file; they raise anything
            raise LoragateError(f"the template in {self._settings.llama_cpp} fails: {error}") from error
        return int(reply["usage"]["prompt_tokens"])

    def _model(self, target: Target) -> Any:
        scale = None if target.name == BASE else 1.0 if target.strength is None else target.strength
        if scale not in self._models:
            more = {} if scale is None else {"lora_path": self._settings.lora, "lora_scale": scale}
            try:
                self._models[scale] = self._library.Llama(
                    self._settings.llama_cpp, n_ctx=self._room, logits_all=True, verbose=False, **more
                )
            except (RuntimeError, ValueError) as error:
                raise LoragateError(f"llama.cpp cannot open {self._settings.llama_cpp} ({error})") from error
        return self._models[scale]


def _log_softmax(logits_V: Any) -> Any:
    """[V] in fp64."""
    shifted_V = logits_V.astype(np.float64) - logits_V.max()
    return shifted_V - np.log(np.exp(shifted_V).sum())
