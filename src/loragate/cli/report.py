"""`loragate report`: one self-contained HTML file out of any runs, or figures out of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loragate.cli.arguments import Command
from loragate.display import console
from loragate.errors import ConfigError
from loragate.files import write_text


@dataclass(frozen=True)
class ReportOptions:
    """Settings of `loragate report`.

    Attributes:
        runs: folders or records of evaluations, calibrations, sweeps, diagnoses, or of a quickstart.
        out: HTML file to write.
        title: heading of the report.
        figures: folder for the figures as SVG and PDF, in place of the report.
        overwrite: replace an existing report, or existing figures.
    """

    runs: tuple[str, ...] = ()
    out: str = "report.html"
    title: str = ""
    figures: str = ""
    overwrite: bool = False


def run(options: ReportOptions) -> int:
    """Find the records, write the page."""
    if not options.runs:
        raise ConfigError(f"loragate report needs at least one RUN; for example: {COMMAND.examples[0]}")
    path = Path(options.out)
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {path}: a report is an HTML file; end its name in .html")
    if path.exists() and not (options.overwrite or options.figures):
        raise ConfigError(f"--out {path} exists; choose another name, or give --overwrite")
    from loragate.report.page import draw_figures, page
    from loragate.report.sources import all_sources

    sources, out = all_sources(options.runs), console()
    if options.figures:
        for path in draw_figures(sources, Path(options.figures), overwrite=options.overwrite):
            out.print(f"written {path}")
        return 0
    text = page(sources, options.title or f"loragate report: {Path(options.runs[0]).resolve().name}")
    write_text(path, text)
    for source in sources:
        out.print(f"• {source.kind}: {source.path}")
    out.print(f"{path} ({len(text.encode()) / 1e6:.2f} MB) opens in any browser, without a network")
    return 0


COMMAND = Command(
    name="report",
    options=ReportOptions,
    run=run,
    examples=(
        "loragate report runs/quickstart",
        "loragate report evaluation gated diagnosis --out report.html",
        "loragate report runs/quickstart --figures figures",
    ),
    positional="runs",
)
