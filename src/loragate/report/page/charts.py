"""Line charts as SVG with the page's own colours, so that they follow dark mode; and the colours of λ.

A chart is drawn once, when the page is built; the table beside it carries the same numbers for those who cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup, escape

WIDTH, HEIGHT = 680, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 40
PURPLE, ORANGE, NEUTRAL = (123, 77, 160), (214, 118, 20), (236, 236, 236)


def line_chart(curves: Mapping[str, Sequence[tuple[float, float]]], *, x_label: str, y_label: str) -> Markup:
    """An SVG of one line per curve; the classes line-0, line-1, … take colour and dash from the style sheet.

    The vertical axis starts at zero where all values are positive, so that a small change does not look large. Values that are
    not finite, as of a training that diverged, are left out.
    """
    curves = {name: [point for point in curve if math.isfinite(point[1])] for name, curve in curves.items()}
    points = [point for curve in curves.values() for point in curve]
    x_low, x_high = min((x for x, _ in points), default=0.0), max((x for x, _ in points), default=1.0)
    y_low, y_high = min([0.0, *(y for _, y in points)]), max([0.0, *(y for _, y in points)])
    y_high = y_high if y_high > y_low else y_low + 1.0
    x_high = x_high if x_high > x_low else x_low + 1.0

    def across(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" class="chart">').format(
            WIDTH, HEIGHT, f"{y_label} over {x_label}: {', '.join(curves)}"
        )
    ]
    for value in ticks(y_low, y_high):
        at = f"{down(value):.1f}"
        parts.append(Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(LEFT, WIDTH - RIGHT, at, at))
        parts.append(Markup('<text class="tick end" x="{}" y="{}" dy="4">{:g}</text>').format(LEFT - 7, at, value))
    for value in ticks(x_low, x_high):
        parts.append(
            Markup('<text class="tick middle" x="{:.1f}" y="{}">{:g}</text>').format(
                across(value), HEIGHT - BOTTOM + 17, value
            )
        )
    parts.append(
        Markup('<text class="tick middle" x="{}" y="{}">{}</text>').format(
            (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, x_label
        )
    )
    for number, (name, curve) in enumerate(curves.items()):
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in curve)
        parts.append(
            Markup('<polyline class="line line-{}" points="{}"><title>{}</title></polyline>').format(
                number % 6, path, name
            )
        )
        if len(curve) == 1:
            parts.append(
                Markup('<circle class="dot line-{}" cx="{:.1f}" cy="{:.1f}" r="3"/>').format(
                    number % 6, across(curve[0][0]), down(curve[0][1])
                )
            )
    parts.append(Markup("</svg>"))
    legend = Markup("").join(
        Markup(
            '<li><svg viewBox="0 0 28 8" aria-hidden="true"><line class="line line-{}" x1="0" x2="28" y1="4" y2="4"/></svg>{}</li>'
        ).format(number % 6, escape(name))
        for number, name in enumerate(curves)
    )
    return Markup("").join(parts) + Markup('<ul class="legend">{}</ul>').format(legend)


def column_chart(edges: Sequence[float], counts: Sequence[float], label: str) -> Markup:
    """A histogram: one column per pair of neighbouring edges, the share of all counts as its height."""
    total = sum(counts) or 1
    high = max([*(count / total for count in counts), 1e-12])
    low_x, high_x = edges[0], edges[-1]

    def across(x: float) -> float:
        return LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)

    floor = HEIGHT - BOTTOM
    parts = [
        Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" class="chart">').format(
            WIDTH, HEIGHT, f"Histogram of {label}"
        )
    ]
    for value in ticks(0, 100 * high):
        at = f"{floor - value / (100 * high) * (floor - TOP):.1f}"
        parts.append(Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(LEFT, WIDTH - RIGHT, at, at))
        parts.append(Markup('<text class="tick end" x="{}" y="{}" dy="4">{:g} %</text>').format(LEFT - 7, at, value))
    for start, end, count in zip(edges, edges[1:], counts, strict=False):
        height = count / total / high * (floor - TOP)
        parts.append(
            Markup('<rect class="column" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
                across(start), floor - height, max(across(end) - across(start) - 1, 0.5), height
            )
        )
    for value in ticks(low_x, high_x, 8):
        parts.append(
            Markup('<text class="tick middle" x="{:.1f}" y="{}">{:g}</text>').format(across(value), floor + 17, value)
        )
    parts.append(
        Markup('<text class="tick middle" x="{}" y="{}">{}</text>').format(
            (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, label
        )
    )
    return Markup("").join([*parts, Markup("</svg>")])


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from low to high, about so many."""
    span = high - low
    step = 10 ** math.floor(math.log10(span / about))
    step = next(step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= about)
    first = math.ceil(low / step - 1e-9)
    return [round((first + n) * step, 10) for n in range(int((high - first * step) / step + 1e-9) + 1)]


def lambda_colour(value: float, lower: float, upper: float) -> tuple[str, str]:
    """(background, ink) of a λ: grey at 1, purple below by its distance in units of 1 − L, orange above likewise."""
    if value >= 1:
        share, towards = (value - 1) / (upper - 1) if upper > 1 else 0.0, ORANGE
    else:
        share, towards = (1 - value) / (1 - lower) if lower < 1 else 0.0, PURPLE
    return _mixed(share, towards)


def difference_colour(value: float, reach: float) -> tuple[str, str]:
    """(background, ink) of a difference to the adapter: orange is worse, purple better, as in the drawn heat map."""
    return _mixed(abs(value) / reach if reach else 0.0, PURPLE if value > 0 else ORANGE)


def _mixed(share: float, towards: tuple[int, int, int]) -> tuple[str, str]:
    share = min(max(share, 0.0), 1.0)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(NEUTRAL, towards, strict=True))
    # relative luminance of WCAG 2, enough to choose between black and white ink
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (red / 255, green / 255, blue / 255)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    dark = (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05)
    return f"#{red:02x}{green:02x}{blue:02x}", "#000" if dark else "#fff"
