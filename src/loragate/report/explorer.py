"""The explorer: a local page on which a prompt is answered by base, adapter and gated model side by side.

Only the page lives here. What it asks for arrives as callables: `respond` samples three answers and traces them, `reread`
traces the same answers again with λ held to other bounds, so that moving a bound changes colours without new sampling.
Gradio is imported when the page is built.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from loragate.errors import LoragateError
from loragate.report.page.charts import BLUE, ORANGE, PURPLE, lambda_share

NAMES = {"base": "Base", "adapter": "LoRA", "gated": "Gated"}
ALL = "all modules, mean"
QUANTITIES = {
    "gates": "gate coefficient λ",
    "entropy": "entropy",
    "delta_entropy": "ΔH, LoRA − base",
    "log_prob": "log-probability",
}


@dataclass(frozen=True)
class Ask:
    """What the page asks for: a prompt, how to sample, and the bounds that λ is held to."""

    prompt: str
    temperature: float
    max_new_tokens: int
    seed: int
    minimum: float
    maximum: float


Respond = Callable[[Ask], dict[str, Any]]
Reread = Callable[[dict[str, Any], float, float], dict[str, Any]]
"""Both return a trace record with one question; `Reread` takes the record before."""


def build_explorer(
    respond: Respond,
    reread: Reread,
    *,
    lower: float,
    upper: float,
    modules: Sequence[str],
    prompt: str = "",
    temperature: float = 1.0,
    note: str = "",
    max_new_tokens: int = 128,
) -> Any:
    """The page as `gradio.Blocks`, not launched.

    Args:
        respond, reread: see the module.
        lower, upper: the gates' range, the ends of the sliders.
        modules: paths of the gated modules.
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
        raise LoragateError('the explorer needs gradio; install it with: pip install "loragate[explore]"') from error
    kinds = list(dict.fromkeys(path.rsplit(".", 1)[-1] for path in modules))
    groups = {ALL: list(range(len(modules)))}
    groups |= {f"{kind}, mean": [n for n, path in enumerate(modules) if path.endswith("." + kind)] for kind in kinds}
    groups |= {path: [number] for number, path in enumerate(modules)}

    def paint(record: dict[str, Any] | None, quantity: str, module: str) -> list[str]:
        if not record:
            return ["", "", ""]
        answers = {answer["variant"]: answer for answer in record["questions"][0]["answers"]}
        key = next(name for name, label in QUANTITIES.items() if label == quantity)
        chosen = groups[module]
        return [
            str(answer_spans(answers[name], key, chosen, len(modules), lower, upper))
            if name in answers
            else "no answer"
            for name in NAMES
        ]

    def ask(
        text: str, heat: float, limit: float, seed: float, low: float, high: float, quantity: str, module: str
    ) -> Any:
        if not text.strip():
            raise gradio.Error("Type a prompt first.")
        if low > high:
            raise gradio.Error(f"The lower bound {low:g} is above the upper bound {high:g}.")
        record = respond(Ask(text, heat, int(limit), int(seed), low, high))
        return [record, *paint(record, quantity, module)]

    def bounds(record: dict[str, Any] | None, low: float, high: float, quantity: str, module: str) -> Any:
        if not record or low > high:
            return [record, *paint(record, quantity, module)]
        record = reread(record, low, high)
        return [record, *paint(record, quantity, module)]

    with gradio.Blocks(title="loragate explore", analytics_enabled=False) as page:
        gradio.Markdown(
            "# Base, LoRA and gated, side by side\n"
            f"The gates' range is [{lower:g}, {upper:g}]. Bounds of [0, 1] forbid reversal and extrapolation; [1, 1] is the "
            "plain LoRA, [0, 0] the base. Point at a token for its numbers."
        )
        record = gradio.State(None)
        with gradio.Row():
            box = gradio.Textbox(label="Prompt", value=prompt, lines=3, scale=4)
            button = gradio.Button("Compare", variant="primary", scale=1)
        with gradio.Row():
            low = gradio.Slider(lower, upper, value=lower, step=0.05, label="λ at least")
            high = gradio.Slider(lower, upper, value=upper, step=0.05, label="λ at most")
            heat = gradio.Slider(0, 2, value=temperature, step=0.05, label="Temperature", info=note or None)
            limit = gradio.Slider(1, 1024, value=max_new_tokens, step=1, label="New tokens at most")
            seed = gradio.Number(value=0, precision=0, label="Seed")
        with gradio.Row():
            quantity = gradio.Dropdown(list(QUANTITIES.values()), value=QUANTITIES["gates"], label="Colour")
            module = gradio.Dropdown(list(groups), value=ALL, label="Module")
        columns = []
        with gradio.Row():
            for name in NAMES.values():
                with gradio.Column(min_width=240):
                    gradio.Markdown(f"### {name}")
                    columns.append(gradio.HTML())
        button.click(ask, [box, heat, limit, seed, low, high, quantity, module], [record, *columns], api_name=False)
        for slider in (low, high):
            slider.release(bounds, [record, low, high, quantity, module], [record, *columns], api_name=False)
        for picker in (quantity, module):
            picker.change(paint, [record, quantity, module], columns, api_name=False)
    return page


def lambdas(answer: Mapping[str, Any], modules: int, lower: float, upper: float) -> list[list[float]]:
    """λ of an answer of a trace record, [modules][tokens]."""
    raw = base64.b64decode(answer["gates"])
    tokens = len(raw) // modules
    return [
        [lower + (upper - lower) * raw[module * tokens + at] / 255 for at in range(tokens)] for module in range(modules)
    ]


def answer_spans(
    answer: Mapping[str, Any], quantity: str, chosen: Sequence[int], modules: int, lower: float, upper: float
) -> Markup:
    """One span per token, coloured by `quantity`; λ is the mean over the `chosen` modules. The numbers stand in the title."""
    lam = lambdas(answer, modules, lower, upper)
    parts = []
    for at, text in enumerate(answer["tokens"]):
        value_of = {
            "gates": sum(lam[module][at] for module in chosen) / len(chosen),
            **{name: answer[name][at] for name in ("entropy", "delta_entropy", "log_prob")},
        }
        candidates = ", ".join(f"{token!r} {share:.2f}" for token, share in answer["top"][at])
        title = (
            f"λ {value_of['gates']:.2f} · entropy {value_of['entropy']:.2f} · ΔH {value_of['delta_entropy']:+.2f} · "
            f"log-probability {value_of['log_prob']:.2f} · {candidates}"
        )
        value = value_of[quantity]
        line = "text-decoration:underline wavy 1px;" if quantity == "gates" and value < 0 else ""
        style = f"background-color:{tint(quantity, value, lower, upper)};border-radius:3px;{line}"
        shown = text.replace("\n", "⏎\n") if text else "∅"
        parts.append(Markup('<span style="{}" title="{}">{}</span>').format(style, title, shown))
    return Markup('<div style="white-space:pre-wrap;line-height:2;font-family:monospace">{}</div>').format(
        Markup("").join(parts)
    )


def tint(quantity: str, value: float, lower: float, upper: float) -> str:
    """The background colour of a value as rgba; transparent at λ = 1, ΔH = 0, entropy 0, log-probability 0."""
    if quantity == "gates":
        share, colour = lambda_share(value, lower, upper)
    elif quantity == "delta_entropy":
        share, colour = abs(value) / 2, ORANGE if value > 0 else PURPLE
    else:
        share, colour = value / 3 if quantity == "entropy" else -value / 6, BLUE
    return f"rgba({','.join(map(str, colour))},{0.85 * min(max(share, 0.0), 1.0):.3f})"


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
        prevent_thread_lock=True,
        theme=theme,
        footer_links=[],
    )
    if wait:
        print(f"open {address} in a browser; Ctrl-C stops it", flush=True)
        page.block_thread()
    return str(address)
