"""The study at the paper's size: does SCALE help a 0.5B or 1.5B chat model, beside cheaper ways?

    python benchmarks/paper_size/measure.py --model qwen2.5-coder-0.5b --hours 1

The same command goes on where it was stopped, here or on another machine: a unit (one method, one temperature, one slice of a
test) is a file of its own in records/MODEL/CELL/METHOD/, with every answer and verdict; the base's are in records/MODEL/base/, as
it answers alike in all cells. `design.yaml` says what is run and in which order, PROTOCOL.md why, `report.py` makes the tables.
Adapters and gates stay in --out: one machine makes those of a cell, and others take the folder along. Models are fetched with
pip, size and licence said first.

Training needs TRL. vLLM's environment has none: train with --train-only first, then answer with --engine vllm from there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import real_model

from cells import DONE, Asked, Budget, Cell, NotYet, OutOfTime, Record, file_name, read_design
from loragate.evaluation.judging import require_graders
from loragate.evaluation.settings import GradingSettings
from loragate.evaluation.tasks import load_questions, load_task
from loragate.evaluation.tasks.questions import Question
from loragate.evaluation.tasks.task import Task
from loragate.files import write_text
from models import MODELS, model_folder

HERE = Path(__file__).parent
DESIGN, RECORDS = HERE / "design.yaml", HERE / "records"


@dataclass(frozen=True)
class Unit:
    """What is answered at a time, by a method of a cell."""

    situation: str
    seed: int
    method: str
    asked: Asked

    @property
    def cell(self) -> str:
        return f"{self.situation}-{self.seed}"

    def file(self, records: Path) -> Path:
        """Its record; `records` is the folder of the model."""
        place = records / "base" if self.method == "base" else records / self.cell / file_name(self.method)
        return place / f"{self.asked.what.replace(' ', '_').replace('=', '')}.jsonl.gz"


def units_of(design: dict[str, Any], counts: dict[str, int]) -> list[Unit]:
    """All units in the order of running, each once; `counts` are the questions of each test."""
    units: dict[tuple[str, str, str], Unit] = {}
    step = design["asked"]["slice"]
    for cell in design["plan"]:
        for wave in (design["waves"][name] for name in cell["waves"]):
            test = wave["test"]
            for first in range(0, counts[test], step):
                part = (first, min(first + step, counts[test]))
                for heat in wave["temperatures"]:
                    asked = Asked(test, float(heat), design["tests"][test].get("samples", 1), part)
                    for method in wave["methods"]:
                        unit = Unit(cell["situation"], cell["seed"], method, asked)
                        owner = "" if method == "base" else unit.cell
                        units.setdefault((owner, method, asked.what), unit)
    return list(units.values())


class PaperCell(Cell):
    """A cell of this study; `records` is the folder of its model."""

    records = RECORDS

    def task(self, split: str) -> Task:
        name = self.design["tests"][split]["task"]
        return load_task(str(HERE / "tasks" / name) if name.endswith(".yaml") else name)

    def questions(self, split: str) -> list[Question]:
        return load_questions(self.task(split), questions_file(self.design, split), self.limit).questions

    def max_new_tokens(self, split: str) -> int:
        return token_limit(self.design, split, self.smoke)

    def rows_file(self, which: str) -> Path:
        """GSM8K's short solutions, or the base's own right answers to questions of the same pool; every seed has the same.

        Raises:
            NotYet: if the base has not answered enough of the pool.
        """
        path = self.folder.parent / f"{self.name.rsplit('-', 1)[0]}.jsonl"
        if not path.is_file():
            rows = self.own_rows() if path.stem == "own" else self.terse_rows()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return path

    def terse_rows(self) -> list[dict[str, str]]:
        chosen = self.questions("pool")[: self.settings["rows"]]
        return [
            {
                "id": question.id,
                "prompt": question.prompt,
                "response": f"{question.row['solution']}\nThe answer is \\boxed{{{question.gold}}}.",
            }
            for question in chosen
        ]

    def own_rows(self) -> list[dict[str, str]]:
        """The first right and complete answers of the base, in the order of the pool."""
        lines = [
            line for path in (self.records / "base").glob("pool_*.jsonl.gz") for line in Record(path).lines.values()
        ]
        answers = {
            id: texts[0]
            for line in lines
            for id, texts, right, cut in zip(line["questions"], line["texts"], line["correct"], line["cut_off"])
            if right == "1" and cut == "0"
        }
        rows = [
            {"id": question.id, "prompt": question.prompt, "response": answers[question.id].strip()}
            for question in self.questions("pool")
            if question.id in answers
        ]
        wanted = 1 if self.smoke else self.settings["rows"]
        if len(rows) < wanted:
            raise NotYet(f"{self.name}: {len(rows)} right answers of the base to the pool, of {wanted}")
        return rows[: self.settings["rows"]]

    def same_training(self, method: str) -> None:
        """Refuse to add the answers of another training of the cell to those on record, of whichever method.

        Raises:
            SystemExit: naming both.
        """
        own, makers = self.digests(method), self.trained_in(method)
        for path in (self.records / self.name).rglob("*.jsonl.gz"):
            for (who, _), line in Record(path).lines.items():
                theirs = self.trained_in(who)
                for kind, digest in own.items():
                    there = line["by"].get(kind)
                    if theirs.get(kind) == makers[kind] and there != digest:
                        raise SystemExit(
                            f"{path}: {kind} {there}, but {self.folder} holds {digest}, another training of {self.name}. "
                            "Take the folder of --out along from the machine that made it, or measure another cell with --cells."
                        )


def questions_file(design: dict[str, Any], split: str) -> Path:
    return HERE / "questions" / f"{design['tests'][split]['file']}.jsonl.gz"


def count(path: Path) -> int:
    """Questions on a file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return sum(1 for _ in file)


def counts_of(design: dict[str, Any], smoke: bool = False) -> dict[str, int]:
    """{test: number of its questions}."""
    return {test: 4 if smoke else count(questions_file(design, test)) for test in design["tests"]}


def token_limit(design: dict[str, Any], split: str, smoke: bool = False) -> int:
    """Of an answer to a test's questions."""
    return 8 if smoke else design["tests"][split]["max_new_tokens"]


def is_answered(unit: Unit, records: Path, limit: int) -> bool:
    """Whether a unit is on record.

    Raises:
        SystemExit: where it was answered with another token limit.
    """
    path = unit.file(records)
    line = Record(path).lines.get((unit.method, unit.asked.what))
    if line is not None and line["max_new_tokens"] != limit:
        raise SystemExit(
            f"{path}: answered with at most {line['max_new_tokens']} tokens, but {DESIGN.name} says {limit}; "
            "remove the file to have it answered anew, or put the limit back"
        )
    return line is not None


def measure(cells: dict[str, PaperCell], units: list[Unit], budget: Budget, slices: int = 1) -> None:
    """Answer the units in their order; a method that cannot be had here is left out, and why is said once.

    With each unit those of so many slices, itself among them, that are missing of its method, test and temperature.

    Raises:
        OutOfTime: before a step that would not fit.
    """
    left_out: set[tuple[str, str]] = set()
    began, loaded_cell = time.monotonic(), None

    def is_missing(unit: Unit) -> bool:
        cell = cells[unit.cell]
        return not is_answered(unit, cell.records, cell.max_new_tokens(unit.asked.split))

    for number, unit in enumerate(units, 1):
        cell = cells[unit.cell]
        if (unit.cell, unit.method) in left_out or not is_missing(unit):
            continue
        alike = [one for one in units if replace(one, asked=replace(one.asked, part=unit.asked.part)) == unit]
        if loaded_cell not in (None, cell):
            loaded_cell.close()  # a model at a time
        loaded_cell = cell
        if not budget.fits(unit.asked.kind):
            raise OutOfTime
        try:
            with cell.acting(unit.method, budget) as (loaded, engine):
                cell.same_training(unit.method)
                note_training(cell, unit.method)
                print(f"unit {number} of {len(units)}, after {(time.monotonic() - began) / 60:.0f} min:", flush=True)
                missing = [one for one in alike if is_missing(one)][:slices]
                records = {one.asked: Record(one.file(cell.records)) for one in missing}
                cell.fill(records, unit.method, loaded, engine, budget)
        except NotYet as reason:
            left_out.add((unit.cell, unit.method))
            print(f"left out: {reason}", flush=True)


def note_training(cell: PaperCell, method: str) -> None:
    """Keep how a method's training went, and of which adapter it is."""
    if not DONE.keys() & cell.design["methods"][method].keys():
        return
    record = Record(cell.records / cell.name / file_name(method) / "training.jsonl.gz")
    if not record.lines:
        told = {**cell.training(method), "by": cell.digests(method)}
        record.add({"method": method, "what": "training", **told})


def train(cells: dict[str, PaperCell], units: list[Unit], budget: Budget) -> None:
    """Make all adapters and gates of the units, in their order.

    Raises:
        OutOfTime: before a training that would not fit.
    """
    for name, method in dict.fromkeys((unit.cell, unit.method) for unit in units):
        try:
            print(cells[name].made(method, budget), flush=True)
        except NotYet as reason:
            print(f"left out: {reason}", flush=True)


def prime(budget: Budget, records: Path) -> None:
    """Tell the budget how long steps took that are on record, so that the first step of a call is judged too."""
    for path in records.rglob("*.jsonl.gz"):
        for line in Record(path).lines.values():
            if line["what"] == "training":
                for kind in DONE:  # a step of gates and one of an adapter take about as long
                    budget.note(kind, line.get("training_seconds", 0.0))
            else:
                budget.note(line["what"].rsplit(" ", 1)[0], line["seconds"])


def chosen(
    units: list[Unit], cells: str, methods: str, tests: str, temperatures: str = "", first: float = float("inf")
) -> list[Unit]:
    """The units of the named cells, methods, tests and temperatures, all for an empty name, among a test's first questions."""
    return [
        unit
        for unit in units
        if (not cells or unit.cell in cells.split(","))
        and (not methods or unit.method in methods.split(";"))
        and (not tests or unit.asked.split in tests.split(","))
        and (not temperatures or unit.asked.temperature in map(float, temperatures.split(",")))
        and unit.asked.part[1] <= first
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-coder-0.5b")
    parser.add_argument(
        "--models", type=Path, default=Path("runs/models"), help="folder of the models that were fetched"
    )
    parser.add_argument("--base", type=Path, help="folder of a base model in place of that of --models")
    parser.add_argument("--out", type=Path, default=Path("runs/paper-size"), help="rows, adapters and gates")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--cells", default="", help="such as terse-0,own-0; all otherwise")
    parser.add_argument("--methods", default="", help="separated by semicolons; all otherwise")
    parser.add_argument("--tests", default="", help="such as gsm8k,svamp; all otherwise (humaneval needs bubblewrap)")
    parser.add_argument("--temperatures", default="", help="such as 0,1; all otherwise")
    parser.add_argument("--first", type=int, default=float("inf"), help="only slices among so many questions of a test")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--device", default="cpu", help="where transformers draws the answers")
    parser.add_argument("--batch-size", type=int, default=0, help="answers decoded at a time")
    parser.add_argument("--slices", type=int, default=1, help="drawn together: faster, and more is lost at a stop")
    parser.add_argument("--hours", type=float, default=float("inf"), help="begin nothing that would not fit")
    parser.add_argument("--train-only", action="store_true", help="make the adapters and gates and ask nothing")
    parser.add_argument("--list", action="store_true", help="what is done and what is missing, and nothing else")
    parser.add_argument("--smoke", action="store_true", help="two steps, four questions: figures that mean nothing")
    given = parser.parse_args()
    if given.smoke and (given.records == RECORDS or given.out == parser.get_default("out")):
        parser.error("--smoke needs --records and --out of its own")
    design, records = read_design(DESIGN), given.records / given.model
    everything = units_of(design, counts_of(design, given.smoke))
    units = chosen(everything, given.cells, given.methods, given.tests, given.temperatures, given.first)
    if not units:
        parser.error(
            "no unit is of these --cells, --methods, --tests, --temperatures and --first; design.yaml lists them"
        )
    missing = [
        unit for unit in units if not is_answered(unit, records, token_limit(design, unit.asked.split, given.smoke))
    ]
    print(f"{given.model}: {len(units) - len(missing)} of {len(units)} units are on record", flush=True)
    if given.list:
        for unit in missing:
            print(f"{unit.cell} {unit.method}, {unit.asked.what}")
        return
    base = given.base or model_folder(given.model, given.models)
    precision = "bf16" if given.device != "cpu" or real_model.has_bf16() else "fp32"
    cells = {}
    for unit in units:
        if unit.cell not in cells:
            place = given.out / given.model
            drawing = (given.device, given.engine, given.batch_size)
            cells[unit.cell] = PaperCell(
                design, unit.situation, unit.seed, base, place, precision, given.smoke, *drawing
            )
            cells[unit.cell].records = records
    first = next(iter(cells.values()))
    require_graders(
        [first.task(test) for test in dict.fromkeys(unit.asked.split for unit in missing)], GradingSettings()
    )
    budget = Budget(60 * given.hours)
    prime(budget, records)
    try:
        train(cells, units, budget) if given.train_only else measure(cells, units, budget, given.slices)
    except OutOfTime:
        print("the next step would not fit; the same command goes on from here", flush=True)
    finally:
        for cell in cells.values():
            cell.close()


if __name__ == "__main__":
    main()
