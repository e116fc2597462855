"""Line charts as SVG with the page's own colours, so that they follow dark mode; and the colours of λ.

A chart is drawn once, when the page is built; the table beside it carries the same numbers for those who cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

WIDTH, HEIGHT = 680, 300
LEFT, RIGHT, TOP, FLOOR = 58, 12, 12, HEIGHT - 40
PURPLE, ORANGE, BLUE, NEUTRAL = (123, 77, 160), (214, 118, 20), (47, 120, 190), (236, 236, 236)


class _Axes:
    """The frame of a chart: a grid line for each tick of y, ticks of x, the label below; `parts` is its SVG so far."""

    def __init__(
        self,
        x: tuple[float, float],
        y: tuple[float, float],
        x_label: str,
        said: str,
        *,
        unit: str = "",
        x_ticks: int = 5,
    ) -> None:
        self.x, self.y = x, y
        self.parts = [
            Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}" class="chart">').format(WIDTH, HEIGHT, said)
        ]
        for value in ticks(*y):
            at = f"{self.down(value):.1f}"
            self.add('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>', LEFT, WIDTH - RIGHT, at, at)
            self.add('<text class="tick end" x="{}" y="{}" dy="4">{:g}{}</text>', LEFT - 7, at, value, unit)
        for value in ticks(*x, x_ticks):
            self.add('<text class="tick middle" x="{:.1f}" y="{}">{:g}</text>', self.across(value), FLOOR + 17, value)
        middle = (LEFT + WIDTH - RIGHT) / 2
        self.add('<text class="tick middle" x="{}" y="{}">{}</text>', middle, HEIGHT - 5, x_label)

    def across(self, x: float) -> float:
        return LEFT + (x - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)

    def down(self, y: float) -> float:
        return FLOOR - (y - self.y[0]) / (self.y[1] - self.y[0]) * (FLOOR - TOP)

    def add(self, form: str, *values: object) -> None:
        """An element with these values, which are escaped."""
        self.parts.append(Markup(form).format(*values))

    def done(self) -> Markup:
        return Markup("").join([*self.parts, Markup("</svg>")])


def line_chart(curves: Mapping[str, Sequence[tuple[float, float]]], *, x_label: str, y_label: str) -> Markup:
    """An SVG of one line per curve; the classes line-0, line-1, … take colour and dash from the style sheet.

    The vertical axis starts at zero where all values are positive, so that a small change does not look large. Values that are
    not finite, as of a training that diverged, are left out.
    """
    curves = {name: [point for point in curve if math.isfinite(point[1])] for name, curve in curves.items()}
    points = [point for curve in curves.values() for point in curve]
    x_low, x_high = min((x for x, _ in points), default=0.0), max((x for x, _ in points), default=1.0)
    y_low, y_high = min([0.0, *(y for _, y in points)]), max([0.0, *(y for _, y in points)])
    x = x_low, x_high if x_high > x_low else x_low + 1.0
    y = y_low, y_high if y_high > y_low else y_low + 1.0
    axes = _Axes(x, y, x_label, f"{y_label} over {x_label}: {', '.join(curves)}")
    legend = []
    for number, (name, curve) in enumerate(curves.items()):
        style = f"line-{number % 6}"
        path = " ".join(f"{axes.across(x):.1f},{axes.down(y):.1f}" for x, y in curve)
        axes.add('<polyline class="line {}" points="{}"><title>{}</title></polyline>', style, path, name)
        for x_only, y_only in curve if len(curve) == 1 else ():
            at = axes.across(x_only), axes.down(y_only)
            axes.add('<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="3"/>', style, *at)
        sample = '<svg viewBox="0 0 28 8" aria-hidden="true"><line class="line {}" x1="0" x2="28" y1="4" y2="4"/></svg>'
        legend.append(Markup(f"<li>{sample}{{}}</li>").format(style, name))
    return axes.done() + Markup('<ul class="legend">{}</ul>').format(Markup("").join(legend))


def column_chart(edges: Sequence[float], counts: Sequence[float], label: str) -> Markup:
    """A histogram: one column per pair of neighbouring edges, the share of all counts as its height."""
    shares = [100 * count / (sum(counts) or 1) for count in counts]
    x, y = (edges[0], edges[-1]), (0.0, max([*shares, 1e-10]))
    axes = _Axes(x, y, label, f"Histogram of {label}", unit=" %", x_ticks=8)
    for start, end, share in zip(edges, edges[1:], shares, strict=False):
        left, top = axes.across(start), axes.down(share)
        width = max(axes.across(end) - left - 1, 0.5)
        axes.add(
            '<rect class="column" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>', left, top, width, FLOOR - top
        )
    return axes.done()


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from low to high, about so many."""
    span = high - low
    step = 10 ** math.floor(math.log10(span / about))
    step = next(step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= about)
    first = math.ceil(low / step - 1e-9)
    return [round((first + n) * step, 10) for n in range(int((high - first * step) / step + 1e-9) + 1)]


def lambda_share(value: float, lower: float, upper: float) -> tuple[float, tuple[int, int, int]]:
    """How far λ is from 1 towards an end of its range, as a share, and that end's colour: purple below 1, orange above."""
    if value >= 1:
        return (value - 1) / (upper - 1) if upper > 1 else 0.0, ORANGE
    return (1 - value) / (1 - lower) if lower < 1 else 0.0, PURPLE


def lambda_colour(value: float, lower: float, upper: float) -> tuple[str, str]:
    """(background, ink) of a λ: grey at 1."""
    return _mixed(*lambda_share(value, lower, upper))


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
