"""Answers for `serving.http_app` from a model in memory: base, plain adapter and gated adapter by name.

Lives here and not in serving/, because it needs data (chat templates), generation and evaluation's variants, which serving
does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loragate.errors import ConfigError
from loragate.serving.http_app import Answer, App, Asked

NAMES = {"base": ("base",), "adapter": ("base", "adapter"), "gated": ("base", "adapter", "gated")}


def transformers_app(model: Any, tokenizer: Any, kind: str, *, system: str = "none", batch_size: int = 16) -> App:
    """The app over a loaded model.

    Args:
        model: base, PeftModel or gated PeftModel.
        tokenizer: its tokenizer.
        kind: "base", "adapter" or "gated"; decides the names that can be asked for.
        system: "none" renders without an injected default system message, "keep" as the template does.
        batch_size: sequences generated at a time.
    """
    from loragate.data import prompt_ids, render_prompt
    from loragate.evaluation.variants import Variant, acting
    from loragate.generation import SamplingConfig, TransformersEngine

    engine = TransformersEngine(model, tokenizer, batch_size=batch_size)

    def complete(prompts: Sequence[str], asked: Asked) -> list[tuple[int, list[Answer]]]:
        from loragate.cli.generate import room_for_answers

        limit = asked.max_tokens or room_for_answers(model, tokenizer, list(prompts))
        config = SamplingConfig(asked.temperature, asked.top_p, limit, asked.n, asked.seed, asked.stop)
        with acting(model, Variant(asked.model), kind):  # type: ignore[arg-type]
            samples = engine.generate(prompts, config)
        found: list[tuple[int, list[Answer]]] = [
            (len(ids), []) for ids in tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
        ]
        for one in samples:
            reason = "length" if one.finish_reason == "length" else "stop"
            found[one.question][1].append(Answer(one.text, reason, len(one.token_ids)))
        return found

    def begin(prompt: str) -> str:
        start = tokenizer.bos_token_id
        starts = start is not None and start in prompt_ids(prompt, tokenizer)[:1]
        return tokenizer.bos_token + prompt if starts and not prompt.startswith(tokenizer.bos_token) else prompt

    def render(messages: list[dict[str, Any]]) -> str:
        if tokenizer.chat_template is None:
            raise ConfigError(
                "the tokenizer has no chat template; start with --chat-template FILE, or use /v1/completions"
            )
        return render_prompt(messages, tokenizer, system=system)

    return App(NAMES[kind], complete, render, begin)
