"""The explorer: a local page on which a prompt is answered by base, adapter and gated model side by side.

Moving a bound that λ is held to traces the same answers again, so that colours change without new sampling. The answers are
shown by the report's token view. Gradio is imported when the page is built.
"""

from __future__ import annotations

import threading
from typing import Any

from markupsafe import Markup

from loragate.analysis.token_traces import Answer, Question, trace_answers
from loragate.data import render_prompt
from loragate.errors import ConfigError, LoragateError
from loragate.gates import attached_config, gate_override, gates_disabled
from loragate.gates.control import as_base
from loragate.gates.recommended import chosen_temperature, sampling_note
from loragate.generation import Sample, SamplingConfig, TransformersEngine
from loragate.models import Loading, open_model, resolve
from loragate.report.blocks import Section, build_page, tokens_block


def explorer_of(
    model: str, how: Loading, *, base: str = "", prompt: str = "", raw: bool = False, system: str = "none"
) -> Any:
    """The page for a gated folder, not launched.

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
    session = Session(loaded.model, loaded.tokenizer, raw or loaded.tokenizer.chat_template is None, system)
    return build_explorer(
        session,
        prompt=prompt,
        temperature=chosen_temperature(source.sampling, None),
        note=sampling_note(model, source.sampling),
    )


class Session:
    """One loaded model that answers the explorer; one request at a time."""

    def __init__(self, model: Any, tokenizer: Any, raw: bool, system: str) -> None:
        self.model, self.tokenizer, self.raw, self.system = model, tokenizer, raw, system
        self.lock = threading.Lock()

    def respond(
        self, prompt: str, temperature: float, max_new_tokens: int, seed: int, minimum: float, maximum: float
    ) -> dict[str, Any]:
        """A trace record with the answers of base, plain adapter and gated model, λ held to bounds, to one prompt."""
        if not self.raw:
            prompt = render_prompt([{"role": "user", "content": prompt}], self.tokenizer, system=self.system)
        sampling = SamplingConfig(temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
        engine = TransformersEngine(self.model, self.tokenizer, batch_size=1)
        ways = {
            "base": lambda: as_base(self.model),
            "adapter": lambda: gates_disabled(self.model),
            "gated": lambda: gate_override(self.model, minimum=minimum, maximum=maximum),
        }
        with self.lock:  # all three on one model, whose state they change
            answers = []
            for name, enter in ways.items():
                with enter():
                    answers.append(Answer(name, engine.generate([prompt], sampling)[0]))
            return self._trace(Question("0", prompt, "", answers), minimum, maximum)

    def reread(self, record: dict[str, Any], minimum: float, maximum: float) -> dict[str, Any]:
        """The same answers with λ held to other bounds."""
        question = record["questions"][0]
        answers = [
            Answer(one["variant"], Sample(0, 0, "", tuple(ids), one["finish_reason"], None))
            for one in question["answers"]
            for ids in (record["token_ids"][one["variant"]],)
        ]
        with self.lock:
            return self._trace(Question("0", question["prompt"], "", answers), minimum, maximum)

    def _trace(self, question: Any, minimum: float, maximum: float) -> dict[str, Any]:
        with gate_override(self.model, minimum=minimum, maximum=maximum):
            record = trace_answers(self.model, self.tokenizer, [question], max_tokens=1024)
        # what `reread` needs; a page may hold several conversations, so nothing of one is kept here
        return {**record, "token_ids": {answer.variant: list(answer.sample.token_ids) for answer in question.answers}}


def build_explorer(
    session: Session, *, prompt: str = "", temperature: float = 1.0, note: str = "", max_new_tokens: int = 128
) -> Any:
    """The page as `gradio.Blocks`, not launched; raises LoragateError if gradio is not installed.

    Args:
        session: what answers; its gates' range gives the ends of the sliders.
        prompt: initial text of the prompt box.
        temperature: what stands there at first.
        note: a sentence about it.
        max_new_tokens: what stands in the token limit at first.
    """
    try:
        import gradio
    except ImportError as error:
        raise LoragateError(
            'the explorer needs gradio; install it with: pip install ".[explore]" in a checkout'
        ) from error

    def check(low: float, high: float) -> None:
        if low > high:
            raise gradio.Error(f"The lower bound {low:g} is above the upper bound {high:g}.")

    def compare(text: str, temperature: float, limit: float, seed: float | None, low: float, high: float) -> Any:
        if not text.strip():
            raise gradio.Error("Type a prompt first.")
        check(low, high)
        record = session.respond(text, temperature, int(limit), int(seed or 0), low, high)
        return record, answers(record)

    def bounds(record: dict[str, Any] | None, low: float, high: float) -> Any:
        check(low, high)
        if not record:
            return record, gradio.skip()
        record = session.reread(record, low, high)
        return record, answers(record)

    config = attached_config(session.model)
    lower, upper = config.lower, config.upper
    with gradio.Blocks(title="loragate explore", analytics_enabled=False) as page:
        gradio.Markdown(
            "# Base, LoRA and gated, side by side\n"
            f"The gates' range is [{lower:g}, {upper:g}]. Bounds of [0, 1] forbid reversal and extrapolation; [1, 1] is the "
            "plain LoRA, [0, 0] the base."
        )
        record = gradio.State(None)
        with gradio.Row():
            box = gradio.Textbox(label="Prompt", value=prompt, lines=3, scale=4)
            button = gradio.Button("Compare", variant="primary", scale=1)
        with gradio.Row():
            low = gradio.Slider(lower, upper, value=lower, step=0.05, label="λ at least")
            high = gradio.Slider(lower, upper, value=upper, step=0.05, label="λ at most")
            temperature_slider = gradio.Slider(
                0, 2, value=temperature, step=0.05, label="Temperature", info=note or None
            )
            limit = gradio.Slider(1, 1024, value=max_new_tokens, step=1, label="New tokens at most")
            seed = gradio.Number(value=0, precision=0, label="Seed")
        shown = gradio.HTML()
        button.click(compare, [box, temperature_slider, limit, seed, low, high], [record, shown], api_name=False)
        for slider in (low, high):
            slider.release(bounds, [record, low, high], [record, shown], api_name=False)
    return page


def answers(record: dict[str, Any]) -> str:
    """The token view of a trace record, as a document of its own inside the page."""
    inside = build_page("Answers", None, [Section("tokens", "Token by token", [tokens_block(record)])])
    frame = '<iframe title="Answers" srcdoc="{}" style="width:100%;height:44rem;border:0"></iframe>'
    return str(Markup(frame).format(inside))


def launch(page: Any, port: int, *, wait: bool = True) -> str:
    """Serve the page on 127.0.0.1 and return its address; nothing is shared and nothing is loaded from elsewhere.

    Args:
        page: from `build_explorer`.
        port: 0 takes a free one.
        wait: return only when the server is stopped (Ctrl-C).
    """
    import gradio

    theme = gradio.themes.Default(
        font=["system-ui", "DejaVu Sans", "sans-serif"], font_mono=["ui-monospace", "DejaVu Sans Mono", "monospace"]
    )
    _, address, _ = page.launch(
        server_name="127.0.0.1",
        server_port=port or None,
        share=False,
        quiet=True,
        prevent_thread_lock=True,  # it returns the address; `block_thread` waits
        theme=theme,
        footer_links=[],
    )
    if wait:
        print(f"open {address} in a browser; Ctrl-C stops it", flush=True)
        page.block_thread()
    return str(address)
