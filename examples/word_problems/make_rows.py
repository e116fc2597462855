"""Makes the rows of this folder from the sources that README.md names: `python make_rows.py --svamp FILE --gsm8k FILE`.

A row is a story with a question that one operation answers; what is learned is the formula, as papers on SVAMP do it: small
models choose an operation far better than they calculate, and the graders calculate.

SVAMP's 1,000 questions are variations of about a hundred stories: the same peaches with other numbers or another question.
A random split would put variations of one story on both sides, so whole stories are dealt out: a story is for the test,
for the dev set or for the training. GSM8K's questions fill the training up. The same sources always give the same files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import operator
import re
from fractions import Fraction
from pathlib import Path

TEST, DEV, TRAIN = 300, 128, 400  # rows
SAME_STORY = 0.4  # share of common content words from which two SVAMP questions tell one story
ASK = "Put the formula that gives the answer in \\boxed{}."
# words that any story may have
COMMON = """a an the of in on at to for with and or if then there were was is are be been had have has did do does he she
they it his her their him them how many much more than less left now after before each that those this these from out up some
all other one two who which would will when into by as not but so get got you your"""


def main() -> None:
    """Write train.jsonl, dev.jsonl and test.jsonl beside this file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--svamp", required=True, help="SVAMP.json of arkilpatel/SVAMP")
    parser.add_argument("--gsm8k", required=True, help="train.jsonl of openai/grade-school-math")
    given = parser.parse_args()
    stories = by_story(read_svamp(Path(given.svamp)))
    test, rest = dealt(stories, TEST)
    dev, rest = dealt(rest, DEV)
    train = [row for story in rest for row in story]
    others = sorted(read_gsm8k(Path(given.gsm8k)), key=shuffle_key)
    train = sorted([*train, *others[: TRAIN - len(train)]], key=shuffle_key)
    here = Path(__file__).parent
    write(here / "train.jsonl", train, ("id", "prompt", "response"))
    write(here / "dev.jsonl", dev, ("id", "prompt", "answer"))
    write(here / "test.jsonl", test, ("id", "prompt", "answer"))


def read_svamp(path: Path) -> list[dict]:
    """SVAMP's questions of one operation whose equation gives the answer."""
    rows = []
    for row in json.loads(path.read_text(encoding="utf-8")):
        story, question = row["Body"].strip(), row["Question"].strip()
        # a story that ends without a full stop goes on in its question: "If Jill has 5 peaches, how many ..."
        goes_on = not story.endswith((".", "?", "!"))
        joined = f"{story.rstrip(',')}, {question[:1].lower()}{question[1:]}" if goes_on else f"{story} {question}"
        equation = re.fullmatch(r"\( ([\d.]+) ([-+*/]) ([\d.]+) \)", row["Equation"].strip())
        if equation and operated(*equation.groups()) == Fraction(str(row["Answer"])):
            rows.append(one_row(f"svamp/{row['ID']}", joined, *equation.groups()))
    return rows


def read_gsm8k(path: Path) -> list[dict]:
    """GSM8K's questions whose solution has one calculator annotation, which gives the answer."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        answer = row["answer"].split("####")[1].strip().replace(",", "")
        found = [
            re.fullmatch(r"([\d.]+)([-+*/])([\d.]+)=[\d.]+", text) for text in re.findall(r"<<(.*?)>>", row["answer"])
        ]
        if len(found) == 1 and found[0] and operated(*found[0].groups()) == Fraction(answer):
            rows.append(one_row(f"gsm8k/train/{number}", row["question"].strip(), *found[0].groups()))
    return rows


def operated(left: str, sign: str, right: str) -> Fraction | None:
    """What the formula gives; None for a division by zero."""
    if sign == "/" and Fraction(right) == 0:
        return None
    work = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}[sign]
    return work(Fraction(left), Fraction(right))


def one_row(name: str, question: str, left: str, sign: str, right: str) -> dict:
    """One row with all that any of the files holds."""
    formula = f"{shown(Fraction(left))} {sign} {shown(Fraction(right))}"
    return {
        "id": name,
        "prompt": f"{question} {ASK}",
        "response": f"The answer is \\boxed{{{formula}}}.",
        "answer": shown(operated(left, sign, right)),
        "words": content(question),
    }


def shown(value: Fraction) -> str:
    """A number as one writes it: whole, or with its decimals."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):g}"


def by_story(rows: list[dict]) -> list[list[dict]]:
    """The rows in groups that tell one story: two rows with SAME_STORY of their words in common, and what hangs on them."""
    words = [row["words"] for row in rows]
    group = list(range(len(rows)))
    for one in range(len(rows)):
        for other in range(one):
            union = words[one] | words[other]
            if group[one] != group[other] and union and len(words[one] & words[other]) / len(union) >= SAME_STORY:
                old, new = group[one], group[other]
                group = [new if mark == old else mark for mark in group]
    stories: dict[int, list[dict]] = {}
    for row, mark in zip(rows, group):
        stories.setdefault(mark, []).append(row)
    return sorted(stories.values(), key=lambda story: shuffle_key(story[0]))


def content(text: str) -> set[str]:
    """The words that make a story: no numbers, no common words, no endings of the plural."""
    words = re.findall(r"[a-z]+", text.lower())
    return {re.sub(r"(ies|es|s)$", "", word) for word in words if word not in COMMON.split() and len(word) > 2}


def dealt(stories: list[list[dict]], wanted: int) -> tuple[list[dict], list[list[dict]]]:
    """`wanted` questions out of the first stories, and the stories that none was taken from."""
    taken: list[dict] = []
    for used, story in enumerate(stories):
        if len(taken) >= wanted:
            return taken[:wanted], stories[used:]
        taken += story
    raise SystemExit(f"the sources hold {len(taken)} questions where {wanted} are wanted")


def shuffle_key(row: dict) -> str:
    """An order that has nothing to do with the sources' and is the same everywhere."""
    return hashlib.sha256(row["id"].encode()).hexdigest()


def write(path: Path, rows: list[dict], keys: tuple[str, ...]) -> None:
    """One JSON object a line."""
    lines = [json.dumps({key: row[key] for key in keys}, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path.name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
