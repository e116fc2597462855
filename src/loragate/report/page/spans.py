"""Tokens as coloured spans, for places where the page's script does not run (the explorer).

The same colours as the token view: grey-free at λ = 1, purple below, orange above, a wavy line below zero.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

QUANTITIES = {
    "gates": "gate coefficient λ",
    "entropy": "entropy",
    "delta_entropy": "ΔH, LoRA − base",
    "log_prob": "log-probability",
}
_PURPLE, _ORANGE, _BLUE = "123,77,160", "214,118,20", "47,120,190"


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
        if value >= 1:
            share, colour = (value - 1) / (upper - 1) if upper > 1 else 0.0, _ORANGE
        else:
            share, colour = (1 - value) / (1 - lower) if lower < 1 else 0.0, _PURPLE
    elif quantity == "delta_entropy":
        share, colour = abs(value) / 2, _ORANGE if value > 0 else _PURPLE
    elif quantity == "entropy":
        share, colour = value / 3, _BLUE
    else:
        share, colour = -value / 6, _BLUE
    return f"rgba({colour},{0.85 * min(max(share, 0.0), 1.0):.3f})"
