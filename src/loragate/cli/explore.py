"""`loragate explore`: type a prompt, compare base, LoRA and gated, move bounds, see tokens change colour."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from loragate.cli.arguments import Command
from loragate.cli.options import ModelOptions
from loragate.cli.preflight import check_loading, quiet_logging
from loragate.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ExploreOptions(ModelOptions):
    """Settings of `loragate explore`.

    Attributes:
        model: gated folder, or owner/name[@revision] of one on the hub.
        port: port on 127.0.0.1; 0 takes a free one.
        prompt: initial text of the prompt box.
        raw: pass the prompt to the model unchanged, without the chat template.
        base: where the base model is, instead of the recorded one.
    """

    WITHHELD: ClassVar[frozenset[str]] = frozenset({"quantization"})

    model: str
    port: int = 7860
    prompt: str = ""
    raw: bool = False
    base: str = ""


def run(options: ExploreOptions) -> int:
    """Load, build the page, serve it until Ctrl-C."""
    from loragate.report.explorer import launch

    launch(explorer_of(options), options.port)
    return 0


def explorer_of(options: ExploreOptions) -> Any:
    """The page for a gated folder, not launched."""
    from loragate.models import open_model, resolve

    how, place = check_loading(options), resolve(options.model, options.base)
    if place.kind != "gated":
        raise ConfigError(
            f"{options.model} is no gated folder (it has no gate_config.json); make one with loragate calibrate, or with "
            "loragate quickstart, which writes runs/quickstart/gated"
        )
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    quiet_logging()
    from loragate.gates import attached_config
    from loragate.gates.attach import gate_modules
    from loragate.gates.recommended import chosen_temperature, sampling_note
    from loragate.report.explorer import build_explorer

    loaded = open_model(place, how)
    model, tokenizer = loaded.model, loaded.tokenizer
    config = attached_config(model)
    session = Session(model, tokenizer, options.raw or tokenizer.chat_template is None, options.system)
    return build_explorer(
        session.respond,
        session.reread,
        lower=config.lower,
        upper=config.upper,
        modules=list(gate_modules(model)),
        prompt=options.prompt,
        temperature=chosen_temperature(place.gates, None),
        note=sampling_note(options.model, place.gates),
    )


class Session:
    """One loaded model that answers the explorer; one request at a time."""

    def __init__(self, model: Any, tokenizer: Any, raw: bool, system: str) -> None:
        from threading import Lock

        self.model, self.tokenizer, self.raw, self.system = model, tokenizer, raw, system
        self.lock = Lock()

    def respond(self, ask: Any) -> dict[str, Any]:
        """A trace record with the answers of base, plain adapter and gated model to one prompt."""
        from loragate.analysis.token_traces import Answer, Question
        from loragate.data import render_prompt
        from loragate.gates import gate_override, gates_disabled
        from loragate.generation import SamplingConfig, TransformersEngine

        prompt = ask.prompt
        if not self.raw:
            prompt = render_prompt([{"role": "user", "content": ask.prompt}], self.tokenizer, system=self.system)
        sampling = SamplingConfig(temperature=ask.temperature, max_new_tokens=ask.max_new_tokens, seed=ask.seed)
        engine = TransformersEngine(self.model, self.tokenizer, batch_size=1)
        ways = {
            "base": self.model.disable_adapter,
            "adapter": lambda: gates_disabled(self.model),
            "gated": lambda: gate_override(self.model, ask.minimum, ask.maximum),
        }
        with self.lock:
            answers = []
            for name, enter in ways.items():
                with enter():
                    answers.append(Answer(name, engine.generate([prompt], sampling)[0]))
            return self._trace(Question("0", prompt, "", answers), ask.minimum, ask.maximum)

    def reread(self, record: dict[str, Any], minimum: float, maximum: float) -> dict[str, Any]:
        """The same answers with λ held to other bounds."""
        from loragate.analysis.token_traces import Answer, Question
        from loragate.generation import Sample

        question = record["questions"][0]
        answers = [
            Answer(name, Sample(0, 0, "", tuple(ids), "stop", None)) for name, ids in record["token_ids"].items()
        ]
        with self.lock:
            return self._trace(Question("0", question["prompt"], "", answers), minimum, maximum)

    def _trace(self, question: Any, minimum: float, maximum: float) -> dict[str, Any]:
        from loragate.analysis.token_traces import trace_answers
        from loragate.gates import gate_override

        with gate_override(self.model, minimum, maximum):
            record = trace_answers(self.model, self.tokenizer, [question], max_tokens=1024)
        # what `reread` needs; a page may hold several conversations, so nothing of one is kept here
        return {**record, "token_ids": {answer.variant: list(answer.sample.token_ids) for answer in question.answers}}


COMMAND = Command(
    name="explore",
    summary="A local page that answers a prompt with base, LoRA and gated model and colours every token.",
    options=ExploreOptions,
    run=run,
    examples=(
        "loragate explore runs/quickstart/gated",
        "loragate explore my-gated-adapter --base path/to/base --port 8000",
    ),
    positional="model",
)
