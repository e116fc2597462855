"""The explorer: a local page on which a prompt is answered by base, adapter and gated model side by side.

Only the page lives here. What it asks for arrives as callables: `respond` samples three answers and traces them, `reread`
traces the same answers again with λ held to other bounds, so that moving a bound changes colours without new sampling. The
answers are shown by the report's token view. Gradio is imported when the page is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from loragate.errors import LoragateError
from loragate.report.blocks import Section, build_page, tokens_block


@dataclass(frozen=True)
class ExplorerRequest:
    """What the page asks for: a prompt, how to sample, and the bounds that λ is held to."""

    prompt: str
    temperature: float
    max_new_tokens: int
    seed: int
    minimum: float
    maximum: float


Respond = Callable[[ExplorerRequest], dict[str, Any]]
Reread = Callable[[dict[str, Any], float, float], dict[str, Any]]
"""Both return a trace record with one question; `Reread` takes the record before."""


def build_explorer(
    respond: Respond,
    reread: Reread,
    *,
    lower: float,
    upper: float,
    prompt: str = "",
    temperature: float = 1.0,
    note: str = "",
    max_new_tokens: int = 128,
) -> Any:
    """The page as `gradio.Blocks`, not launched.

    Args:
        respond, reread: see the module.
        lower, upper: the gates' range, the ends of the sliders.
        prompt: initial text of the prompt box.
        temperature: what stands there at first.
        note: a sentence about it.
        max_new_tokens: what stands in the token limit at first.

    Raises:
        LoragateError: if gradio is not installed.
    """
    try:
        import gradio
    except ImportError as error:
        raise LoragateError(
            'the explorer needs gradio; install it with: pip install ".[explore]" in a checkout'
        ) from error

    def compare(text: str, temperature: float, limit: float, seed: float, low: float, high: float) -> Any:
        if not text.strip():
            raise gradio.Error("Type a prompt first.")
        if low > high:
            raise gradio.Error(f"The lower bound {low:g} is above the upper bound {high:g}.")
        record = respond(ExplorerRequest(text, temperature, int(limit), int(seed), low, high))
        return record, answers(record)

    def bounds(record: dict[str, Any] | None, low: float, high: float) -> Any:
        if not record or low > high:
            return record, gradio.skip()
        record = reread(record, low, high)
        return record, answers(record)

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
