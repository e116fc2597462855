"""A gated folder behind the explorer's page: one prompt, three models, λ held to bounds."""

from __future__ import annotations

import threading
from typing import Any

from loragate.analysis.token_traces import Answer, Question, trace_answers
from loragate.data import render_prompt
from loragate.errors import ConfigError
from loragate.gates import attached_config, gate_override, gates_disabled
from loragate.gates.control import as_base
from loragate.gates.recommended import chosen_temperature, sampling_note
from loragate.generation import Sample, SamplingConfig, TransformersEngine
from loragate.models import Loading, open_model, resolve
from loragate.report.explorer import ExplorerRequest, build_explorer


def explorer_of(
    model: str, how: Loading, *, base: str = "", prompt: str = "", raw: bool = False, system: str = "none"
) -> Any:
    """The page of `report.explorer` for a gated folder, not launched.

    Args:
        model, how, base: gated folder or its hub id, how it is loaded, and where the base is if not where the folder says.
        prompt: initial text of the prompt box.
        raw: pass prompts to the model unchanged, without the chat template.
        system: "none" leaves out a default system message of the template.

    Raises:
        ConfigError: for anything but a gated folder.
    """
    source = resolve(model, base)
    if source.kind != "gated":
        raise ConfigError(
            f"{model} is no gated folder (it has no gate_config.json); make one with loragate calibrate, or with loragate "
            "quickstart, which writes runs/quickstart/gated"
        )
    loaded = open_model(source, how)
    config = attached_config(loaded.model)
    session = Session(loaded.model, loaded.tokenizer, raw or loaded.tokenizer.chat_template is None, system)
    return build_explorer(
        session.respond,
        session.reread,
        lower=config.lower,
        upper=config.upper,
        prompt=prompt,
        temperature=chosen_temperature(source.sampling, None),
        note=sampling_note(model, source.sampling),
    )


class Session:
    """One loaded model that answers the explorer; one request at a time."""

    def __init__(self, model: Any, tokenizer: Any, raw: bool, system: str) -> None:
        self.model, self.tokenizer, self.raw, self.system = model, tokenizer, raw, system
        self.lock = threading.Lock()

    def respond(self, request: ExplorerRequest) -> dict[str, Any]:
        """A trace record with the answers of base, plain adapter and gated model to one prompt."""
        prompt = request.prompt
        if not self.raw:
            prompt = render_prompt([{"role": "user", "content": request.prompt}], self.tokenizer, system=self.system)
        sampling = SamplingConfig(
            temperature=request.temperature, max_new_tokens=request.max_new_tokens, seed=request.seed
        )
        engine = TransformersEngine(self.model, self.tokenizer, batch_size=1)
        ways = {
            "base": lambda: as_base(self.model),
            "adapter": lambda: gates_disabled(self.model),
            "gated": lambda: gate_override(self.model, request.minimum, request.maximum),
        }
        with self.lock:  # all three on one model, whose state they change
            answers = []
            for name, enter in ways.items():
                with enter():
                    answers.append(Answer(name, engine.generate([prompt], sampling)[0]))
            return self._trace(Question("0", prompt, "", answers), request.minimum, request.maximum)

    def reread(self, record: dict[str, Any], minimum: float, maximum: float) -> dict[str, Any]:
        """The same answers with λ held to other bounds."""
        question = record["questions"][0]
        answers = [
            Answer(name, Sample(0, 0, "", tuple(ids), "stop", None)) for name, ids in record["token_ids"].items()
        ]
        with self.lock:
            return self._trace(Question("0", question["prompt"], "", answers), minimum, maximum)

    def _trace(self, question: Any, minimum: float, maximum: float) -> dict[str, Any]:
        with gate_override(self.model, minimum, maximum):
            record = trace_answers(self.model, self.tokenizer, [question], max_tokens=1024)
        # what `reread` needs; a page may hold several conversations, so nothing of one is kept here
        return {**record, "token_ids": {answer.variant: list(answer.sample.token_ids) for answer in question.answers}}
