"""What the studies on real models share: cells, their methods, and the records of who answered what.

A cell is one situation and one training seed. Its methods (`methods` of a study's design.yaml) are trained by the commands `sft`
and `calibrate` when they are first asked for; constant λ, a part of the layers, random gates and gates whose λ is limited at
inference need no training. Answers are drawn and judged by the library's engines and graders. A study says which rows a cell has,
what is asked, and in which order; everything goes on where it was stopped.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from loragate.evaluation.engines import EngineProvider, load
from loragate.evaluation.judging import grade_samples, resolve_grader
from loragate.evaluation.settings import EngineSettings
from loragate.evaluation.tasks.questions import Question, render_questions
from loragate.evaluation.tasks.task import Task
from loragate.evaluation.variants import ModelVariant
from loragate.files import file_lock, write_atomically
from loragate.generation import Engine, Sample, SamplingConfig
from loragate.models import Loaded, Loading
from loragate.records import package_versions

BATCH, BATCH_GPU = 128, 1024  # answers decoded at a time
DONE = {"sft": "adapter_model.safetensors", "calibrate": "gate_config.json"}


def read_design(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


class Record:
    """Finished lines on one file: {(method, what): line}.

    The file is written anew after each line, whole or not at all, with what other processes have added to it meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = self.read()

    def read(self) -> dict[tuple[str, str], dict[str, Any]]:
        """What is on file now."""
        if not self.path.is_file():
            return {}
        with gzip.open(self.path, "rt", encoding="utf-8") as file:
            return {(line["method"], line["what"]): line for line in map(json.loads, file)}

    def add(self, line: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = self.path.with_name(f".{self.path.name}.lock")
        with file_lock(lock, 300, f"{self.path} has been locked by another process for five minutes"):
            self.lines = {**self.read(), (line["method"], line["what"]): line}
            self.write()

    def write(self) -> None:
        text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in self.lines.values())
        write_atomically(self.path, lambda path: path.write_bytes(gzip.compress(text.encode(), mtime=0)))


@dataclass(frozen=True)
class Asked:
    """One line that a record is to hold: answers to a set of questions, or to a part of them, at a temperature.

    Attributes:
        split: name of the set.
        temperature: 0 is greedy; None for what is measured without drawing answers.
        samples: answers to each question.
        part: first question and the one after the last; None for all.
    """

    split: str
    temperature: float | None = 0.0
    samples: int = 1
    part: tuple[int, int] | None = None

    @property
    def kind(self) -> str:
        """The set and the temperature, by which the time of a part is foreseen."""
        return self.split + ("" if self.temperature is None else f" T={self.temperature:g}")

    @property
    def what(self) -> str:
        """The name of the line."""
        return self.kind + (f" {self.part[0]}-{self.part[1]}" if self.part else "")


class Budget:
    """Minutes to spend; a step is begun only if the longest of its kind so far would still fit."""

    def __init__(self, minutes: float) -> None:
        self.ends = time.monotonic() + 60 * minutes
        self.longest: dict[str, float] = {}

    def fits(self, kind: str, steps: int = 1) -> bool:
        return time.monotonic() + steps * self.longest.get(kind, 0.0) < self.ends

    def note(self, kind: str, seconds: float) -> None:
        """A step of this kind took so long."""
        self.longest[kind] = max(self.longest.get(kind, 0.0), seconds)

    @contextmanager
    def spent(self, kind: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.note(kind, time.monotonic() - began)


class OutOfTime(Exception):
    """The next step would not fit."""


class NotYet(Exception):
    """What a method needs is not there and cannot be made here; the message says why."""


class Cell(ABC):
    """One situation and training seed: rows, adapters and gates, made when they are asked for.

    A study gives `rows_file`, `task`, `questions` and `max_new_tokens`.

    Args:
        design: the study's design.yaml.
        situation: its name.
        seed: of rows, initialisation and order.
        base: folder of the base model.
        out: where the cell's folder is.
        precision: bf16 or fp32, of training and answers.
        smoke: two steps and four questions, to see that everything runs.
        device: where answers are drawn, as `Loading` has it; training takes a GPU where there is one.
        engine: "transformers" or "vllm", which draws the answers.
        batch: answers decoded at a time; 0 for the usual number.
    """

    def __init__(
        self,
        design: dict[str, Any],
        situation: str,
        seed: int,
        base: Path,
        out: Path,
        precision: str,
        smoke: bool,
        device: str = "cpu",
        engine: str = "transformers",
        batch: int = 0,
    ) -> None:
        self.design, self.seed, self.base, self.precision, self.smoke = design, seed, base, precision, smoke
        self.settings = design["situations"][situation]
        self.name = f"{situation}-{seed}"
        self.folder = out / self.name
        self.limit = 4 if smoke else None
        dtype = "bfloat16" if precision == "bf16" else "float32"
        self.how = Loading(dtype=dtype, device=device)
        self.engine = EngineSettings(engine=engine, batch_size=batch or (BATCH if device == "cpu" else BATCH_GPU))
        self._kept: tuple[Path, Loaded, EngineProvider] | None = None  # what is loaded, by its folder

    @abstractmethod
    def rows_file(self, which: str) -> Path:
        """Rows to train on, by the name that methods call them."""

    @abstractmethod
    def task(self, split: str) -> Task:
        """How a set of questions is asked and judged."""

    @abstractmethod
    def questions(self, split: str) -> list[Question]:
        """The questions of a set, in their order."""

    @abstractmethod
    def max_new_tokens(self, split: str) -> int:
        """Token limit of an answer."""

    # models

    def made(self, method: str, budget: Budget) -> Path:
        """The folder of a trained method, trained now if it is not there; of what needs no training, that of what it acts on.

        Raises:
            OutOfTime: if the training would not fit.
            NotYet: if nothing is trained in this environment, or its rows are not there.
        """
        spec = self.design["methods"][method]
        kind = next((kind for kind in DONE if kind in spec), None)
        if kind is None:
            known = self.gates_of(method) or ("LoRA" if "constant" in spec else "")
            return self.made(known, budget) if known else self.base
        folder = self.folder / file_name(method)
        if (folder / DONE[kind]).is_file():
            return folder
        words = [kind, "--data", str(self.rows_file(spec.get("rows", "own"))), "--out", str(folder)]
        common = {"precision": self.precision, "seed": self.seed, "max_length": 512}
        if kind == "sft":
            options = {**common, **self.design["adapter"], **self.settings.get("adapter", {}), **spec["sft"]}
            words += ["--model", str(self.base)]
            if "from" in spec:
                words += ["--adapter", str(self.made(spec["from"], budget))]
        else:
            options = {**common, **self.design["gates"], **spec["calibrate"]}
            words += ["--adapter", str(self.made("LoRA", budget)), "--skip-selection"]
        if self.smoke:
            options |= {"max_steps": 2}
        words += [flag for key, value in options.items() if (flag := as_flag(key, value))]
        if (folder / "run" / "run.json").is_file():
            words.append("--resume")
        if importlib.util.find_spec("trl") is None:
            raise NotYet(f"{self.name}, {method}: not trained yet, and TRL is not installed here")
        if not budget.fits(kind):
            raise OutOfTime
        self.close()  # a model at a time
        print(f"{self.name}: loragate {' '.join(words)}", flush=True)
        with budget.spent(kind):
            run(words)
        return folder

    def gates_of(self, method: str) -> str:
        """The method whose training made a method's gates, or those that its own are drawn or limited by; empty without gates."""
        spec = self.design["methods"][method]
        return spec.get("random") or spec.get("limited") or (method if "calibrate" in spec else "")

    def variant(self, method: str, budget: Budget) -> tuple[Path, ModelVariant]:
        """(folder of the base or adapter to load, what it is then) of a method; gates go on their adapter as loaded."""
        spec, folder = self.design["methods"][method], self.made(method, budget)
        if "constant" in spec:
            return folder, ModelVariant.scaled(spec["constant"], spec.get("part"))
        if self.gates_of(method):
            variant = ModelVariant("gated", gates=str(folder), override=spec.get("override"))
            return self.made("LoRA", budget), replace(variant, random=self.seed) if "random" in spec else variant
        if "sft" in spec:
            return folder, ModelVariant("adapter")
        if self._kept:  # any adapter's, where one is loaded
            return self._kept[0], ModelVariant("base")
        adapter = self.folder / "LoRA"  # which the next methods need
        return (adapter if (adapter / DONE["sft"]).is_file() else folder), ModelVariant("base")

    @contextmanager
    def acting(self, method: str, budget: Budget) -> Iterator[tuple[Loaded, Engine]]:
        """The method's model, and the engine that answers as it. What is loaded stays so for the next method."""
        place, variant = self.variant(method, budget)
        if variant.random is not None and self.engine.engine == "vllm":
            raise NotYet(f"{self.name}, {method}: vLLM serves no random gates")
        if self._kept is None or self._kept[0] != place:
            self.close()
            base = "" if place == self.base else str(self.base)
            loaded = load(str(place), base, self.how, self.engine.engine)
            self._kept = place, loaded, EngineProvider(self.engine, str(place), base, loaded, self.folder)
        _, loaded, engines = self._kept
        with engines(variant) as engine:
            yield loaded, engine

    def close(self) -> None:
        """Forget the loaded model."""
        if self._kept is not None:
            self._kept[2].close()
            self._kept = None

    def training(self, method: str) -> dict[str, Any]:
        """How a trained method's training went: the gates' entropy and λ on training rows, or the adapter's last logged step."""
        folder = self.made(method, Budget(0))  # which is there
        if (folder / DONE["calibrate"]).is_file():
            told = json.loads((folder / DONE["calibrate"]).read_text(encoding="utf-8"))["training"]
            return {
                name: told[name] for name in ("entropy_before", "entropy_after", "gates", "steps", "training_seconds")
            }
        *_, last = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return json.loads(last)

    def digests(self, method: str) -> dict[str, str]:
        """Of the adapter and the gates of a method, 12 hex digits each. Who shares them answers with the same training."""
        place, variant = self.variant(method, Budget(0))
        found = {}
        if variant.weights != "base":
            found["adapter"] = hashlib.sha256((place / DONE["sft"]).read_bytes()).hexdigest()[:12]
        if variant.gates:
            told = json.loads((Path(variant.gates) / DONE["calibrate"]).read_text(encoding="utf-8"))
            found["gates"] = told["gates_sha256"][:12]
        return found

    def trained_in(self, method: str) -> dict[str, str]:
        """The methods that a method's adapter and gates are made by, under the names of `digests`."""
        spec = self.design["methods"][method]
        gates = self.gates_of(method)
        return {"adapter": method if "sft" in spec else "LoRA"} | ({"gates": gates} if gates else {})

    # answers

    def found(self, loaded: Loaded, engine: Engine, asked: Sequence[Asked]) -> list[dict[str, Any]]:
        """What a record holds of parts of one set of questions at one temperature: answers, drawn together, and verdicts."""
        one = asked[0]
        task, questions = self.task(one.split), self.questions(one.split)
        config = SamplingConfig(
            temperature=one.temperature or 0.0,
            max_new_tokens=self.max_new_tokens(one.split),
            samples=one.samples,
            seed=self.design["asked"]["seeds"][one.split],
        )
        # a question's random stream is that of its place in the whole set, however the set is cut
        parts = [range(*(part.part or (0, len(questions)))) for part in asked]
        pending = {(place, index) for part in parts for place in part for index in range(one.samples)}
        drawn = engine.generate(render_questions(task, questions, loaded.tokenizer), config, pending=pending)
        lines = []
        for part in parts:
            own = [replace(each, question=each.question - part.start) for each in drawn if each.question in part]
            chosen = questions[part.start : part.stop]
            texts: list[list[str]] = [[] for _ in chosen]
            for sample in own:  # in the order of questions and samples
                texts[sample.question].append(sample.text)
            line = {
                "questions": [question.id for question in chosen],
                "samples": one.samples,
                "max_new_tokens": config.max_new_tokens,
                "texts": texts,
                "cut_off": "".join(str(int(sample.finish_reason == "length")) for sample in own),
                "tokens": sum(len(sample.token_ids) for sample in own),
            }
            lines.append(line | judged(task, chosen, own))
        return lines

    def fill(
        self, records: Mapping[Asked, Record], method: str, loaded: Loaded, engine: Engine, budget: Budget
    ) -> None:
        """Ask a method one thing, or parts of one set together, unless their records have them.

        Raises:
            OutOfTime: if it would not fit.
        """
        missing = [one for one, record in records.items() if (method, one.what) not in record.lines]
        if not missing:
            return
        kind = missing[0].kind
        if not budget.fits(kind, len(missing)):
            raise OutOfTime
        began = time.monotonic()
        lines = self.found(loaded, engine, missing)
        seconds = round((time.monotonic() - began) / len(missing), 1)
        budget.note(kind, seconds)
        by = {
            "precision": self.precision,
            "engine": self.engine.engine,
            **self.digests(method),
            **gpu_of(loaded),
            **package_versions(("loragate", "torch", "transformers", "peft")),
        }
        for one, found in zip(missing, lines, strict=True):
            records[one].add({"method": method, "what": one.what, **found, "seconds": seconds, "by": by})
            score = f"{100 * found['correct'].count('1') / len(found['correct']):.1f} %" if "correct" in found else ""
            print(f"{self.name} {method}, {one.what}: {score} {seconds:.0f} s", flush=True)


def judged(task: Task, questions: list[Question], samples: list[Sample]) -> dict[str, Any]:
    """The verdicts of answers; with several to a question, also what was taken from each, by which a majority is found."""
    grades = grade_samples(task, questions, samples, resolve_grader(task))
    verdicts: dict[str, Any] = {"correct": "".join(str(int(grade.correct)) for grade in grades)}
    if len(samples) > 2 * len(questions):
        verdicts["extracted"] = [grade.extracted for grade in grades]
    return verdicts


def file_name(method: str) -> str:
    """A method's name in a form that a folder can have."""
    return re.sub(r"[^\w-]+", "_", method.replace("λ", "lambda")).strip("_")


def as_flag(key: str, value: Any) -> str:
    name = f"--{key.replace('_', '-')}"
    return (name if value else "") if isinstance(value, bool) else f"{name}={value}"


def run(words: list[str]) -> None:
    """One command of the library, in this process."""
    from loragate.cli.main import main as command

    if status := command(words):
        raise SystemExit(f"loragate {' '.join(words)} ended with {status}")


def gpu_of(loaded: Loaded) -> dict[str, str]:
    """{"gpu": its name} if the model is on one."""
    device = loaded.model.device if loaded.model is not None else torch.device("cpu")
    return {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
