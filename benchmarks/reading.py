"""What the reports of the studies on real models share: verdicts of records, and best against best.

A temperature or a setting that is picked by the answers that it is then scored by flatters whoever has more of them. So it is
picked on one half of the questions and scored on the other, and the reverse.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loragate.evaluation.statistics import Difference, compare_out_of_fold
from loragate.files import write_text


def scores(line: Mapping[str, Any]) -> np.ndarray:
    """The verdicts of a line, [questions, samples], 0 or 1."""
    return np.array([int(one) for one in line["correct"]], dtype=float).reshape(-1, line["samples"])


def points(value: float) -> str:
    return f"{100 * value:+.1f}"


def interval(gap: Difference) -> str:
    """A difference in points, with its interval."""
    return f"{points(gap.mean)} ({points(gap.low)} to {points(gap.high)})"


def best_by_halves(settings: Sequence[np.ndarray]) -> np.ndarray:
    """Score per question [Q] of the setting that is best on the other half of the questions; of equals the first.

    Args:
        settings: mean score of each question [Q] under each setting.
    """
    means = np.stack(list(settings))  # [settings, Q]
    half = means.shape[1] // 2
    first, second = means[:, :half], means[:, half:]
    return np.concatenate([first[np.argmax(second.mean(axis=1))], second[np.argmax(first.mean(axis=1))]])


def gap_of_best(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> Difference:
    """Of two families' best by halves, the difference on the mean over seeds, with its 95 % interval over questions.

    Args:
        one, other: of each seed, the score of each question under each setting, [settings, Q].
    """
    return compare_out_of_fold(*(np.mean([best_by_halves(seed) for seed in side], axis=0) for side in (one, other)))


def report_command(
    description: str | None,
    records: Path,
    results: Path,
    page: Callable[[Path], str],
    draw: Callable[[Path, Path], object] | None = None,
) -> None:
    """The command line of a report: print the page of a folder of records, write it, or tell whether it is up to date.

    `draw` puts the page's pictures of those records into the folder of the page.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=records)
    parser.add_argument("--write", action="store_true", help="write the page; without it the tables are printed")
    parser.add_argument("--check", action="store_true", help="change nothing; the exit status tells")
    given = parser.parse_args()
    found = page(given.records)
    if given.check:
        sys.exit(results.read_text(encoding="utf-8") != found)
    if given.write:
        write_text(results, found)
        if draw:
            draw(given.records, results.parent)
    else:
        print(found)
