"""The study: its statistics against plain formulas, and the page that quotes it against the committed verdicts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

from tiny import scripts_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "study.md"


@pytest.fixture(scope="module")
def report() -> Iterator[ModuleType]:
    with scripts_of(ROOT / "benchmarks" / "study") as load:
        yield load("report")


def cell(report: ModuleType, base: int, seed: int, /, **verdicts: list[list[int]]):
    tables = {name: {"test": np.array(rows), "dev": np.array(rows)} for name, rows in verdicts.items()}
    return report.Cell(f"{base}-{seed}", "arithmetic", base, seed, tables)


def test_interval_is_students_over_the_means_of_bases(report):
    rng = np.random.default_rng(3)
    cells = [cell(report, base, seed) for base in (1, 2, 3, 4) for seed in (0, 1, 2)]
    values = rng.normal(2.0, 5.0, len(cells))
    found = report.over_bases(cells, list(values))
    means = values.reshape(4, 3).mean(axis=1)
    low, high = stats.t.interval(0.95, 3, means.mean(), stats.sem(means))
    assert found["mean"] == pytest.approx(means.mean())
    assert (found["low"], found["high"]) == pytest.approx((low, high))
    assert found["above"] == (values > 0).sum()
    assert (found["cells"], found["bases"]) == (12, 4)
    assert found["worst"] == values.min()


def test_rule_picks_by_development_questions_and_prefers_the_adapter_in_a_tie(report):
    equal = cell(report, 1, 0, **{"LoRA": [[1, 0]], "SCALE [0,1]": [[0, 1]]})
    assert report.pick(equal, ("LoRA", "SCALE [0,1]")) == "LoRA"
    better = cell(report, 1, 0, **{"LoRA": [[1, 0]], "SCALE [0,1]": [[1, 1]]})
    assert report.pick(better, ("LoRA", "SCALE [0,1]")) == "SCALE [0,1]"
    assert report.pick(better, ("LoRA",)) == "LoRA"


def test_regret_and_harm_by_hand(report):
    right, wrong = [[1, 1], [1, 1], [1, 1], [1, 1]], [[0, 0], [0, 0], [0, 0], [0, 0]]
    verdicts = dict.fromkeys(report.PLAIN, wrong) | {"LoRA": right, "base": [[1, 0], [0, 0], [0, 0], [0, 0]]}
    cells = [cell(report, base, 0, **verdicts) for base in (1, 2)]
    found = report.rules(cells)
    assert found["always [-6,3]"]["gain"]["mean"] == -100
    assert found["always [-6,3]"]["harmed"] == 2
    assert found["always [-6,3]"]["regret"]["mean"] == 100
    assert found["automatic: all four ranges"]["picks"] == {"LoRA": 2}
    assert found["automatic: all four ranges"]["regret_fair"]["mean"] == 0
    assert "automatic: one λ for all" not in found  # its candidates were not measured
    assert found["automatic: adapter on or off"]["picks"] == {"LoRA": 2}
    assert found["always LoRA"]["versus_base"]["mean"] == pytest.approx(87.5)


def test_p_is_students_and_the_claims_are_counted_with_and_without_adjustment(report):
    cells = [cell(report, base, 0) for base in (1, 2, 3, 4)]
    values = [1.0, 2.0, 4.0, 8.0]
    found = report.over_bases(cells, values)
    assert found["p"] == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert report.over_bases(cells, [2.0] * 4)["p"] == 0
    assert report.over_bases(cells, [0.0] * 4)["p"] == 1
    from tables import adjusted

    gaps = {str(i): {"p": p, "bases": 5} for i, p in enumerate((0.001, 0.01, 0.03, 0.04, 0.2))}
    said = adjusted({"one": {"claims": gaps | {"few": {"p": 0.001, "bases": 2}}}})
    assert said.startswith("Of the 5 claims with an interval over bases, 4 leave zero out.")
    assert "for 5 comparisons 2 would" in said
    assert said.endswith("(Benjamini and Hochberg) 4.")


def test_pack_and_load_give_the_verdicts_back(report, tmp_path):
    folder = tmp_path / "answers" / "arithmetic-31-0"
    folder.mkdir(parents=True)
    (folder / "cell.json").write_text(
        json.dumps({"name": "arithmetic-31-0", "world": "arithmetic", "base_seed": 31, "sft_seed": 0})
    )
    split = {"correct": [[1, 0], [0, 0], [1, 1]], "ended": 1.0, "tokens": 9.5}
    (folder / "LoRA.json").write_text(json.dumps({"name": "LoRA", "temperature": 1.0, "test": split, "dev": split}))
    file = tmp_path / "verdicts.jsonl.gz"
    report.pack(report.from_cache(tmp_path), file)
    (one,) = report.load(file)
    assert one.score("LoRA") == pytest.approx(50)
    assert one.verdicts["LoRA"]["dev"].tolist() == split["correct"]
    before = file.read_bytes()
    report.pack(report.from_cache(tmp_path), file)
    assert file.read_bytes() == before


def test_files_are_joined_by_cell_and_method_and_one_base_shows_its_mean_alone(report):
    def row(world, cell, method, tokens):
        return {"world": world, "cell": cell, "method": method, "tokens": tokens}

    first = [row("english", "english-51-0", "LoRA", 1), row("arithmetic", "arithmetic-31-0", "LoRA", 2)]
    found = report.joined(
        [first, [row("english", "english-51-0", "LoRA", 3), row("commands", "commands-41-0", "base", 4)]]
    )
    assert [(one["world"], one["tokens"]) for one in found] == [("arithmetic", 2), ("commands", 4), ("english", 3)]
    from tables import interval

    assert interval(report.over_bases([cell(report, 1, 0)], [3.0])) == "+3.0 [+3.0, +3.0]"


def test_every_seed_of_the_study_is_fresh():
    """No base of the study was seen when a default was chosen."""
    from worlds.situations import SITUATIONS

    with gzip.open(ROOT / "benchmarks" / "results" / "study_verdicts.jsonl.gz", "rt", encoding="utf-8") as lines:
        bases = {(row["world"], row["base"]) for row in map(json.loads, lines)}
    assert bases
    assert not bases & {(one.world, one.base_seed) for one in SITUATIONS}


@pytest.mark.slow("documents")
def test_the_page_shows_what_the_committed_verdicts_give(report):
    page = PAGE.read_text(encoding="utf-8")
    shown = report.filled(page, report.study(report.load(report.VERDICTS)))
    assert shown == page, "run `python benchmarks/study/report.py --docs docs/study.md`"
