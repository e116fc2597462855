"""Judge ideas for a better choice on the tune situations: one training used many times, and rules without labels.

    python benchmarks/selection/compare_ideas.py [--out FILE.json]

reads the committed verdicts and answers (benchmarks/results/selection_verdicts.jsonl.gz, selection_answers.jsonl.gz);
`--cache CACHE --pack FILE` writes the latter from a measurement of your own. Bootstraps, regret and cost are those of
`compare_rules.py`.

Rules without labels give each question of the probe a reference answer and a weight, and pick the candidate whose answers
at T = 1 agree best with the reference. They differ in where the reference comes from:

- cool majority: the adapter's most frequent answer of 8 at T = 0.3 (what `loragate calibrate` does);
- weighted by votes: the same, each question weighted by the share of that answer;
- base agrees: only questions where the base's cool majority is the same answer;
- base differs: only questions where it is another one (all questions, where fewer than 16 are left);
- moved: the answer that the adapter gives more often than the base, by the largest margin, over all samples of both;
- pooled: the most frequent answer at T = 1 of all other candidates together;
- own agreement: no reference; the chance that two samples of the candidate itself agree (low entropy of answers).
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from compare_rules import DEFAULT, PLAIN, VERDICTS, Pick, Situation, best_on_probe, judge, load

from loragate.files import write_json
from loragate.selection.probe import majority
from worlds.situations import SITUATIONS

ANSWERS = VERDICTS.with_name("selection_answers.jsonl.gz")
FEW = 16
BOUNDS = tuple(f"[-6,3] as {name}" for name in ("[-3,1]", "[0,1]", "[-1,2]", "[0,3]", "[0,6]"))
BOUNDS_06 = tuple(f"[0,6] as {name}" for name in ("[0,1]", "[0,3]", "[-1,2]"))
WITHOUT = tuple(f"without {part}" for part in ("attention", "mlp", "layer 0", "layer 1", "layer 2"))
PARTS = (*(f"[-6,3] {what}" for what in WITHOUT), "[-6,3] no reversal in attention", "[-6,3] no reversal in mlp")
PARTS_06 = tuple(f"[0,6] {what}" for what in WITHOUT)
CLIPS = ("[-6,3] no reversal", "[-6,3] no extrapolation", "[-6,3] unit")

REUSE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default: [0,1] [-6,3] [0,6]": (DEFAULT, DEFAULT),
    "[-6,3] alone": (("[-6,3]",), ("[-6,3]",)),
    "[-6,3] and its clips": (("[-6,3]", *CLIPS), ("[-6,3]",)),
    "[-6,3] under other bounds": (("[-6,3]", *BOUNDS), ("[-6,3]",)),
    "[-6,3] in part of the modules": (("[-6,3]", *PARTS), ("[-6,3]",)),
    "[-6,3], clips, bounds and parts": (("[-6,3]", *CLIPS, *BOUNDS, *PARTS), ("[-6,3]",)),
    "[0,6] alone": (("[0,6]",), ("[0,6]",)),
    "[0,6] under other bounds": (("[0,6]", *BOUNDS_06), ("[0,6]",)),
    "[0,6] in part of the modules": (("[0,6]", *PARTS_06), ("[0,6]",)),
    "[-6,3] and [0,6]": (("[-6,3]", "[0,6]"), ("[-6,3]", "[0,6]")),
    "[-6,3] and [0,6] under other bounds": (
        ("[-6,3]", "[0,6]", *BOUNDS, *BOUNDS_06),
        ("[-6,3]", "[0,6]"),
    ),
    "[-6,3] and [0,6], bounds, clips and parts": (
        ("[-6,3]", "[0,6]", *CLIPS, *BOUNDS, *BOUNDS_06, *PARTS, *PARTS_06),
        ("[-6,3]", "[0,6]"),
    ),
    "default, under other bounds as well": ((*DEFAULT, *BOUNDS, *BOUNDS_06), DEFAULT),
    "default, in part of the modules as well": ((*DEFAULT, *PARTS, *PARTS_06), DEFAULT),
}
"""{rule: (candidates, trainings)}, all picked on a labelled probe, the adapter among the candidates."""


@dataclass(frozen=True)
class Answers:
    """What was answered on the pool of one situation; one character each, "-" where nothing could be read.

    Attributes:
        cool: {"adapter" or "base": [questions, 8]} at T = 0.3.
        warm: {candidate: [questions, 4]} at T = 1, adapter and base among them.
        gold: [questions].
    """

    cool: dict[str, np.ndarray]
    warm: dict[str, np.ndarray]
    gold: np.ndarray

    def majority(self, who: str) -> np.ndarray:
        """The cool majority as the package takes it; "-" where there is none."""
        rows = [[None if answer == "-" else answer for answer in row] for row in self.cool[who]]
        return np.array([answer or "-" for answer in majority(rows).answers])


Scores = Callable[[Answers, str, Sequence[str]], tuple[np.ndarray, np.ndarray]]
"""(answers, candidate, all candidates) to score and weight of each question."""


def _agreement(answers: Answers, name: str, reference: np.ndarray) -> np.ndarray:
    return (answers.warm[name] == reference[:, None]).mean(axis=1)


def cool_majority(answers: Answers, name: str, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    reference = answers.majority("adapter")
    return _agreement(answers, name, reference), (reference != "-").astype(float)


def weighted(answers: Answers, name: str, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    score, weight = cool_majority(answers, name, names)
    votes = (answers.cool["adapter"] == answers.majority("adapter")[:, None]).mean(axis=1)
    return score, weight * votes


def base_agrees(answers: Answers, name: str, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    score, weight = cool_majority(answers, name, names)
    return score, weight * (answers.majority("adapter") == answers.majority("base"))


def base_differs(answers: Answers, name: str, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    score, weight = cool_majority(answers, name, names)
    apart = weight * (answers.majority("adapter") != answers.majority("base"))
    return score, apart if apart.sum() >= FEW else weight


def moved(answers: Answers, name: str, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    reference = []
    for row in range(len(answers.gold)):
        counts: Counter[str] = Counter()
        for who, sign in (("adapter", 1), ("base", -1)):
            for given in (*answers.cool[who][row], *answers.warm[who][row]):
                counts[given] += sign
        counts.pop("-", None)
        best = counts.most_common(1)
        reference.append(best[0][0] if best and best[0][1] >= 2 else "-")
    found = np.array(reference)
    return _agreement(answers, name, found), (found != "-").astype(float)


def pooled(answers: Answers, name: str, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    others = np.concatenate([answers.warm[other] for other in names if other != name], axis=1)
    reference = []
    for row in others:
        best = Counter(answer for answer in row if answer != "-").most_common(1)
        reference.append(best[0][0] if best and best[0][1] >= 2 else "-")
    found = np.array(reference)
    return _agreement(answers, name, found), (found != "-").astype(float)


def own_agreement(answers: Answers, name: str, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    given = answers.warm[name]
    count = given.shape[1]
    same = (given[:, :, None] == given[:, None, :]) & (given != "-")[:, :, None]
    pairs = (same.sum(axis=(1, 2)) - (given != "-").sum(axis=1)) / (count * (count - 1))
    return pairs, np.ones(len(pairs))


WITHOUT_LABELS: dict[str, Scores] = {
    "cool majority": cool_majority,
    "weighted by votes": weighted,
    "base agrees": base_agrees,
    "base differs": base_differs,
    "moved": moved,
    "pooled": pooled,
    "own agreement": own_agreement,
}


def without_labels(scores: Scores, answers: dict[str, Answers], candidates: tuple[str, ...]) -> Pick:
    """Highest weighted mean on the probe; the adapter wins ties and remains where no question has weight."""
    names = ("adapter", *candidates)

    def pick(situation: Situation, drawn: np.ndarray) -> list[str]:
        found = [scores(answers[situation.name], name, names) for name in names]
        value = np.stack([score * weight for score, weight in found])[:, drawn].sum(axis=2)
        weight = np.stack([weight for _, weight in found])[:, drawn].sum(axis=2)
        best = np.where(weight > 0, value / np.maximum(weight, 1e-9), 0.0).argmax(axis=0)
        return [names[index] for index in best]

    return pick


def pack(cache: Path, path: Path) -> None:
    """Write the answers of adapter, base and plain ranges to the pool, one line of JSON per situation, gzipped.

    Situations that are not on the list, those of `wrong_majority.py`, have their verdicts on the test questions as well.
    """

    def letters(rows: list[list[str | None]]) -> str:
        return "".join("-" if a is None else a if len(a) == 1 else "?" for row in rows for a in row)

    listed = [known.name for known in SITUATIONS]
    made = sorted(folder.name for folder in (cache / "answers").iterdir() if folder.name not in listed)
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as file:
        for name in (*listed, *made):
            folder = cache / "answers" / name
            if not all((folder / f"{file}.json").is_file() for file in ("base majority", *DEFAULT)):
                continue
            cool = {
                who: json.loads((folder / f"{who} majority.json").read_text("utf-8")) for who in ("adapter", "base")
            }
            files = {who: folder / f"{who}.json" for who in ("adapter", "base", *PLAIN)}
            warm = {who: json.loads(file.read_text("utf-8")) for who, file in files.items() if file.is_file()}
            row = {
                "situation": name,
                "gold": "".join(gold.split()[-1] for gold in cool["adapter"]["gold"]),
                "cool": {who: letters(record["answers"]) for who, record in cool.items()},
                "warm": {who: letters(record["dev"]["answers"]) for who, record in warm.items()},
            }
            if name in made:
                row["test"] = {
                    who: ["".join(map(str, bits)) for bits in record["test"]["correct"]] for who, record in warm.items()
                }
            file.write((json.dumps(row) + "\n").encode())


def read_answers(path: Path) -> tuple[dict[str, Answers], list[Situation]]:
    """What `pack` wrote, by situation; and the situations that were made to break a rule."""
    found, made = {}, []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            gold = np.array(list(row["gold"]))
            tables = {
                key: {name: np.array(list(text)).reshape(len(gold), -1) for name, text in row[key].items()}
                for key in ("cool", "warm")
            }
            found[row["situation"]] = Answers(tables["cool"], tables["warm"], gold)
            if "test" in row:
                one = Situation(row["situation"], "made", cost=dict.fromkeys(PLAIN, 1.0))
                one.dev = {name: (given == gold[:, None]).astype(float) for name, given in tables["warm"].items()}
                one.test = {
                    name: np.array([[float(bit) for bit in bits] for bits in table])
                    for name, table in row["test"].items()
                }
                made.append(one)
    return found, made


def show(results: dict[str, dict[str, Any]], apart: dict[str, dict[str, Any]]) -> None:
    """A table of rules; `apart` holds what they do on the made situations."""
    made = list(next(iter(apart.values()))["situations"]) if apart else []
    print("| rule | n | cost | mean regret | worst | mean gain | harmful | " + "".join(f"{name} | " for name in made))
    print("|---|" + "---:|" * (6 + len(made)))
    for name, found in results.items():
        low, high = found["regret_interval"]
        rows = [apart[name]["situations"][one] for one in made] if name in apart else []
        more = "".join(f"{row['gain']:+.1f}, {100 * row['harmful']:.0f} % | " for row in rows)
        print(
            f"| {name} | {len(found['situations'])} | {found['cost']:.1f} | {found['mean_regret']:.1f} ({low:.1f} to "
            f"{high:.1f}) | {found['worst_regret']:.1f} | {found['mean_gain']:+.1f} | {100 * found['harmful']:.1f} % | {more}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--split", default="tune", choices=("tune", "test", "test2"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.pack:
        pack(options.cache, options.pack)
    situations = load(VERDICTS, options.split)
    reused = [one for one in situations if all(name in one.dev for name in (*BOUNDS, *BOUNDS_06, *PARTS, *PARTS_06))]
    reuse = {name: judge(best_on_probe(names), reused, cost) for name, (names, cost) in REUSE.items()} if reused else {}
    if reuse:
        show(reuse, {})
    answers, made = read_answers(ANSWERS)
    answered = [one for one in situations if one.name in answers]
    rules: dict[str, tuple[Pick, tuple[str, ...]]] = {}
    for kind, candidates in (("default", DEFAULT), ("all 7", PLAIN)):
        rules[f"labels, {kind}"] = (best_on_probe(candidates), candidates)
        for name, scores in WITHOUT_LABELS.items():
            rules[f"{name}, {kind}"] = (without_labels(scores, answers, candidates), candidates)
    label_free = {name: judge(rule, answered, cost) for name, (rule, cost) in rules.items()}
    # the made situations have the default's candidates and a few more
    broken = {name: judge(rules[name][0], made, rules[name][1]) for name in rules if name.endswith("default") and made}
    print()
    show(label_free, broken)
    right = {
        one.name: {
            who: float(np.mean(answers[one.name].majority(who) == answers[one.name].gold))
            for who in ("adapter", "base")
        }
        for one in (*answered, *made)
    }
    for name, shares in right.items():
        print(
            f"{name}: cool majority right, adapter {100 * shares['adapter']:.0f} %, base {100 * shares['base']:.0f} %"
        )
    if options.out:
        write_json(
            options.out,
            {
                "split": options.split,
                "one_training": reuse,
                "without_labels": label_free,
                "without_labels_made": broken,
                "made_scores": {one.name: {name: one.score(name) for name in one.test} for one in made},
                "majority_right": right,
            },
        )


if __name__ == "__main__":
    main()
