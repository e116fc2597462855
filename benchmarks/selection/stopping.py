"""What does it cost that `loragate calibrate` stops the weaker ranges after a quarter of their steps?

    python benchmarks/selection/stopping.py --cache CACHE [--situations a,b]     # measures what is not on file
    python benchmarks/selection/stopping.py [--seed 23] [--out FILE]              # judges what is

In each situation (`benchmarks/worlds/situations.py`) the adapter is trained, then the three default ranges as calibrate trains
them. They pause after a quarter and after half of their steps, where their answers to a pool of development questions are
kept, and go on to the end. Every setting that calibrate compares answers the pool, and test questions. The verdicts are
committed (benchmarks/results/selection_stopping.jsonl.gz).

To judge, 128 questions of the pool are dealt as a probe, 200 times in each situation. The part's questions are the first ones
of a deal, as in calibrate, and the package's own functions rank, halve and recommend. Each rule of stopping is compared with
training all ranges to the end, on the same deals: how often the recommendation is the same setting, what it loses on the
test questions, how often it is harmful (`recommending.py` says what that is), and what it costs in steps and answers.
Everything after the measurement depends on --seed alone and takes some minutes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, which holds worlds/ and selection/

import numpy as np
import torch
from scipy.special import ndtr

from loragate.files import write_json
from loragate.gates import GateConfig
from loragate.generation import TransformersEngine
from loragate.selection import trial
from loragate.selection.candidate import ADAPTER, GATES, Candidate, parse_candidates
from loragate.selection.comparison import TEMPERATURES, settings_on
from loragate.selection.probe import Probe, Scored
from loragate.selection.recommend import SURE, believe
from loragate.selection.rulings import HOPEFUL, prospects, stronger
from loragate.selection.settings import SelectionSettings
from loragate.selection.store import PART, Store, Study
from loragate.selection.transaction import RANGES, Transaction, gates_all
from loragate.selection.trial import PART_QUESTIONS, SHARE, run_trial, train_part, train_trial
from loragate.training import GateTrainingSettings
from selection.measure import BATCH, Bench
from selection.recommending import DEALS, PROBE, SAMPLES, Scores, dealt, halved, score
from worlds.situations import SITUATIONS, Questions, Situation, questions, situation_named

VERDICTS = Path("benchmarks/results/selection_stopping.jsonl.gz")
POOL, TEST = 256, 160
SHARES = (SHARE, 0.5)
HEATS = (max(TEMPERATURES), min(TEMPERATURES))  # at which a part is asked
WORSE = 1.0  # points of test score from which a recommendation counts as worse
USES = {"any temperature": TEMPERATURES, "T = 1 only": (1.0,)}
Row = dict[str, Any]
Parts = dict[Candidate, Scores]
"""{gates: {gates at a temperature: what they answered after a share of their steps}}."""


@dataclass(frozen=True)
class WholePool(Probe):
    """A probe that is asked everything whatever was wanted, and keeps the scores by temperature."""

    kept: dict[float, np.ndarray] = field(default_factory=dict)

    def score(self, engine: Any, on_progress: Any = None, start: int = 0, stop: int | None = None) -> Scored:
        scored = super().score(engine, on_progress)
        self.kept[self.sampling.temperature] = scored.scores
        return scored


def measure(situation: Situation, cache_folder: Path) -> list[Row]:
    """Train and ask everything of one situation, with what calibrate would choose by itself for as many rows."""
    one = Bench(situation, cache_folder)
    settings = GateTrainingSettings(max_length=128).fitted(len(one.rows))
    settings = replace(
        settings, per_device_train_batch_size=settings.batch_size
    )  # the same steps, in one forward pass each
    with tempfile.TemporaryDirectory(dir=cache_folder) as folder:
        transaction = Transaction(
            one.tokenizer,
            one.rows,
            as_rows(questions(situation, "dev", POOL)),
            Path(folder) / "gated",
            parse_candidates(RANGES, seed=settings.seed),
            GateConfig(0, 1),
            settings,
            SelectionSettings(probe_grader="tiny"),
            retention=as_rows(questions(situation, "test", TEST)),
        )
        engine = partial(TransformersEngine, one.model, one.tokenizer, batch_size=BATCH)
        transaction.take(one.model, engine())
        transaction.find_probe()
        probe, how, bench = transaction.probe, transaction.how, transaction.bench
        assert probe is not None
        assert transaction.evidence.retention_questions is not None
        test = transaction.evidence.retention_questions.put(replace(how, seed=how.seed + 1))
        bench.probe, bench.retention = probe, test
        compared = settings_on(probe, transaction.candidates, can_be_off=gates_all(one.model))
        store = Store(Path(folder) / "study", Study(compared, {"probe": probe.fingerprint}))
        about = {"situation": situation.name}
        found: list[Row] = [
            {**about, "split": situation.split, "rows": len(one.rows), "batch": settings.batch_size}
            | {"steps": settings.steps(len(one.rows))}
        ]
        for gates in transaction.candidates:
            for share in SHARES:
                pool = WholePool(**vars(probe))
                (store.place(gates) / PART).unlink(missing_ok=True)  # of the smaller share, whose checkpoint stays
                with patch.object(trial, "SHARE", share):
                    # an engine of its own: the other share's weights have left it read prompts
                    train_part(store, gates, replace(bench, probe=pool, engine=engine()), HEATS, POOL)
                for heat, scores in pool.kept.items():
                    setting = replace(gates, temperature=heat)
                    found.append({**about, "setting": setting.as_record(), "share": share, "dev": bits(scores)})
            train_trial(store, gates, bench)
        for setting in compared:
            result = run_trial(store, setting, lambda: bench, retention=True)
            assert result.probe is not None
            assert result.retention is not None
            verdicts = {"dev": bits(result.probe.scores), "test": bits(result.retention.scores)}
            found.append({**about, "setting": setting.as_record(), "share": 1.0, **verdicts})
            right = " ".join(f"{split} {100 * np.mean([*map(int, text)]):5.1f}" for split, text in verdicts.items())
            print(f"{situation.name:16} {setting.cell:16} {right}", flush=True)
    return found


def as_rows(asked: Questions) -> list[Row]:
    """Questions as a probe's rows."""
    return [vars(item) for item in asked.items]


def bits(scores: np.ndarray) -> str:
    return "".join(str(int(verdict)) for verdict in scores.ravel())


def read(path: Path = VERDICTS) -> list[Row]:
    if not path.is_file():
        return []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write(rows: Iterable[Row], path: Path = VERDICTS) -> None:
    """The rows as one file; the same rows, the same bytes."""
    lines = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))


@dataclass
class Verdicts:
    """What was measured on one situation.

    Attributes:
        name, split: of the situation.
        steps: of a whole training.
        dev, test: {setting: scores [questions, samples]}.
        parts: {share of the steps: {gates at a temperature: scores on the pool}}.
    """

    name: str
    split: str
    steps: int
    dev: Scores = field(default_factory=dict)
    test: Scores = field(default_factory=dict)
    parts: dict[float, Scores] = field(default_factory=dict)


def unpack(rows: Iterable[Row]) -> dict[str, Verdicts]:
    """{situation: its verdicts}."""
    found: dict[str, Verdicts] = {}
    for row in rows:
        if "steps" in row:
            found[row["situation"]] = Verdicts(row["situation"], row["split"], row["steps"])
            continue
        one, setting = found[row["situation"]], Candidate.from_record(row["setting"])
        tables = {
            split: np.array([*map(float, row[split])]).reshape(-1, SAMPLES if setting.temperature else 1)
            for split in ("dev", "test")
            if split in row
        }
        if row["share"] < 1:
            one.parts.setdefault(row["share"], {})[setting] = tables["dev"]
        else:
            one.dev[setting], one.test[setting] = tables["dev"], tables["test"]
    return found


@dataclass(frozen=True)
class Deal:
    """A probe that was dealt from a pool, as calibrate meets it.

    Attributes:
        verdicts: of the situation.
        order: the probe's questions.
        number: of the deal.
        heats: temperatures at which settings are compared.
    """

    verdicts: Verdicts
    order: np.ndarray
    number: int
    heats: tuple[float, ...]

    @property
    def ranges(self) -> list[Candidate]:
        """The gates, in the order in which they are trained."""
        return list(dict.fromkeys(one.model for one in self.verdicts.dev if one.kind == GATES))

    def part(self, share: float, times: int) -> Parts:
        """What the ranges answered after a share of their steps, on `times` as many first questions as calibrate asks."""
        asked: Parts = {one: {} for one in self.ranges}
        for setting, scores in self.verdicts.parts[share].items():
            if setting.temperature in self.heats:
                count = times * PART_QUESTIONS * SAMPLES // scores.shape[1]
                asked[setting.model][setting] = scores[self.order[:count]]
        return asked

    def scores(self, kept: Iterable[Candidate]) -> Scores:
        """What every setting answers to the probe, where these gates were trained to the end."""
        going = set(kept)
        return {
            setting: scores[self.order]
            for setting, scores in self.verdicts.dev.items()
            if setting.temperature in self.heats and (setting.kind != GATES or setting.model in going)
        }


def strongest(deal: Deal, parts: Parts, count: int = 0) -> list[Candidate]:
    """The ranges that did best: as many as calibrate keeps, or `count`."""
    means = {
        one: {"scores": {setting.temperature: float(scores.mean()) for setting, scores in asked.items()}}
        for one, asked in parts.items()
    }
    going, stopping = stronger(means, len(means))
    return [*going, *stopping][: count or len(going)]


def hopeful(deal: Deal, parts: Parts, limit: float = HOPEFUL) -> list[Candidate]:
    """Those of `strongest` that have a chance of at least `limit` of being better than the adapter."""
    asked = {
        one: {setting.temperature or 0.0: rows for setting, rows in parts[one].items()}
        for one in strongest(deal, parts)
    }
    counts = {heat: len(rows) for heat, rows in next(iter(asked.values())).items()}
    adapter = Candidate(None, ADAPTER)
    alone = {heat: deal.verdicts.dev[replace(adapter, temperature=heat)][deal.order[:n]] for heat, n in counts.items()}
    return [one for one, row in prospects(asked, alone).items() if row["chance"] >= limit]


def not_clearly_worse(deal: Deal, parts: Parts) -> list[Candidate]:
    """The ranges that are as good as the best with a probability of at least 1 − SURE, at either temperature."""
    belief = believe({setting: scores for asked in parts.values() for setting, scores in asked.items()})
    top = int(np.argmax(belief.mean))
    behind = [belief.difference(i, top) for i in range(len(belief.settings))]
    hopeful = {
        setting.model
        for setting, (mean, spread) in zip(belief.settings, behind, strict=True)
        if ndtr(mean / spread) >= 1 - SURE
    }
    return [one for one in deal.ranges if one in hopeful]


def by_lot(deal: Deal, parts: Parts) -> list[Candidate]:
    return [deal.ranges[deal.number % len(deal.ranges)]]


@dataclass(frozen=True)
class Rule:
    """A rule of stopping.

    Attributes:
        keep: which ranges are trained to the end.
        share: of the steps after which it decides; 0 for before the training.
        times: how many times as many questions as by calibrate a part is asked.
    """

    keep: Callable[[Deal, Parts], list[Candidate]]
    share: float = 0.0
    times: int = 1


ALL = "all to the end"
TODAY = "the best of three after a quarter, unless behind the adapter"
UNCLEAR = "not clearly worse after a quarter"
RULES = {
    ALL: Rule(lambda deal, parts: deal.ranges),
    TODAY: Rule(hopeful, SHARE),
    **{
        f"the same with a chance of {limit:g}": Rule(partial(hopeful, limit=limit), SHARE)
        for limit in (0.2, 0.3, 0.4, 0.6)
    },
    "the best of three after a quarter": Rule(strongest, SHARE),
    "the same, four times the questions": Rule(strongest, SHARE, 4),
    "the best of three after half": Rule(strongest, 0.5),
    "the best two after a quarter": Rule(partial(strongest, count=2), SHARE),
    "the best two after half": Rule(partial(strongest, count=2), 0.5),
    UNCLEAR: Rule(not_clearly_worse, SHARE),
    "not clearly worse after half": Rule(not_clearly_worse, 0.5),
    "one by lot": Rule(by_lot),
    **{
        f"always [{bounds}]": Rule(lambda deal, parts, number=number: [deal.ranges[number]])
        for number, bounds in enumerate(RANGES.split(";"))
    },
}


def judge(verdicts: Verdicts, orders: Sequence[np.ndarray], heats: tuple[float, ...]) -> dict[str, list[Row]]:
    """{rule: what it came to in each deal}, beside training all ranges to the end."""
    truth = {setting: float(table.mean()) for setting, table in verdicts.test.items() if setting.temperature in heats}
    found: dict[str, list[Row]] = {name: [] for name in RULES}
    for number, order in enumerate(orders):
        deal = Deal(verdicts, order, number, heats)

        @cache
        def advice(kept: frozenset[Candidate], deal: Deal = deal) -> tuple[Candidate, int]:
            recommendation, asked = halved(deal.scores(kept))
            return recommendation.setting, asked

        whole, _ = advice(frozenset(deal.ranges))
        best = {one: max(truth[setting] for setting in truth if setting.model == one) for one in deal.ranges}
        alone = max(score for setting, score in truth.items() if setting.kind == ADAPTER)
        for name, rule in RULES.items():
            parts = deal.part(rule.share, rule.times) if rule.share else {}
            kept = rule.keep(deal, parts)
            pick, asked = advice(frozenset(kept))
            regret, _, harm = score(pick, truth)
            part = math.ceil(rule.share * verdicts.steps)
            steps = len(deal.ranges) * part + len(kept) * (verdicts.steps - part)
            asked += sum(scores.size for tables in parts.values() for scores in tables.values())
            found[name].append(
                {
                    "same": pick == whole,
                    "same model": pick.model == whole.model,
                    "stopped": whole.kind == GATES and whole.model not in kept,
                    "lost": truth[whole] - truth[pick],
                    "harm": harm,
                    "regret": regret,
                    # the adapter stands in where no range was trained to the end
                    "gates lost": max(best.values()) - max((best[one] for one in kept), default=alone),
                    "none": not kept,
                    "trainings": steps / verdicts.steps,
                    "answers": asked,
                }
            )
    return found


def summary(deals: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over deals: scores in points, shares in percent, trainings in whole ones."""
    columns = {key: np.array([float(deal[key]) for deal in deals]) for key in deals[0]}
    lost, same = 100 * columns["lost"], columns["same"] > 0
    return {
        "same_percent": round(100 * float(same.mean()), 1),
        "same_model_percent": round(100 * float(columns["same model"].mean()), 1),
        "best_stopped_percent": round(100 * float(columns["stopped"].mean()), 1),
        "worse_percent": round(100 * float((lost > WORSE).mean()), 1),
        "lost_mean": round(float(lost.mean()), 2),
        "lost_where_different": round(float(lost[~same].mean()), 2) if not same.all() else 0.0,
        "lost_worst": round(float(lost.max()), 1),
        "harmful_percent": round(100 * float(columns["harm"].mean()), 1),
        "regret_mean": round(100 * float(columns["regret"].mean()), 2),
        "best_gates_lost": round(100 * float(columns["gates lost"].mean()), 2),
        "none_percent": round(100 * float(columns["none"].mean()), 1),
        "trainings": round(float(columns["trainings"].mean()), 2),
        "answers": round(float(columns["answers"].mean())),
    }


def report(measured: Mapping[str, Verdicts], seed: int) -> dict[str, Any]:
    """{use: {rule: {split, and for some rules situation: summary}}}."""
    result: dict[str, Any] = {}
    for use, heats in USES.items():
        tables = {name: judge(one, [probe for probe, _ in dealt(POOL, seed)], heats) for name, one in measured.items()}
        splits = dict.fromkeys(one.split for one in measured.values())
        groups = {split: [name for name, one in measured.items() if one.split == split] for split in splits}
        groups |= {"all": list(measured), **{name: [name] for name in measured}}
        result[use] = {
            rule: {
                group: summary([deal for name in names for deal in tables[name][rule]])
                for group, names in groups.items()
                if group not in measured or rule in (TODAY, UNCLEAR)
            }
            for rule in RULES
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="measure, with bases and adapters kept here")
    parser.add_argument("--situations", default="", help="names separated by commas; all otherwise")
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/selection_stopping.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.situations.split(",") if options.situations else [one.name for one in SITUATIONS]
    rows = read()
    if options.cache:
        options.cache.mkdir(parents=True, exist_ok=True)
        for name in names:
            if name not in {row["situation"] for row in rows}:
                rows += measure(situation_named(name), options.cache)
                write(rows)
        return
    measured = unpack(rows)
    head = {"seed": options.seed, "deals": DEALS, "probe": PROBE, "pool": POOL, "test": TEST, "part": PART_QUESTIONS}
    about = {name: {"split": one.split, "steps": one.steps} for name, one in measured.items()}
    result = {**head, "situations": about, **report(measured, options.seed)}
    write_json(options.out, result)
    for use in USES:
        for rule, groups in result[use].items():
            for group, row in groups.items():
                print(f"{use:16s} {rule:36s} {group:16s}", *(f"{key} {value:g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
