"""Which tasks are asked, and a task made ready for one model: prompts rendered, limits settled, and written down so that
grading can be repeated."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError, DataError, nearest
from loragate.evaluation.settings import TaskSettings
from loragate.evaluation.tasks import (
    Question,
    Questions,
    Task,
    load_questions,
    load_task,
    suite,
    task_names,
)
from loragate.evaluation.tasks.questions import files_in, render_questions
from loragate.files import write_text
from loragate.generation import SamplingConfig
from loragate.records import read_lines
from loragate.validate import validate


def chosen_tasks(settings: TaskSettings) -> list[Task]:
    """The tasks of `suite` and `tasks`, each once.

    Raises:
        ConfigError: if neither is given, or two files define a task of one name.
    """
    if not settings.suite and not settings.tasks:
        raise ConfigError(
            "say what to evaluate: --suite math, retention, code, arithmetic, tiny or all; or --tasks NAME,FILE.yaml with "
            f"any of {', '.join(task_names())}"
        )
    tasks = suite(settings.suite) if settings.suite else []
    for name in filter(None, map(str.strip, settings.tasks.split(","))):
        task = load_task(name)
        same = [other for other in tasks if other.name == task.name]
        if same and same[0].fingerprint != task.fingerprint:
            raise ConfigError(f"--tasks {name}: a task called {task.name} is in the list already; rename one of them")
        tasks += [] if same else [task]
    for task in tasks:
        built_in = task.name in task_names() and load_task(task.name).fingerprint == task.fingerprint
        if task.harness is not None and not built_in:
            raise ConfigError(
                f"{task.path}: tasks with engine: lm-eval are built in, as their rows are checked here; leave the engine out "
                "and name an extractor and a grader"
            )
    return tasks


def questions_of(settings: TaskSettings, task: Task, tasks: Sequence[Task]) -> Questions:
    """The questions of one of `tasks`, from the file or commit that the settings name for it.

    Raises:
        ConfigError: for a file or a commit of no task.
        DataError: for rows that cannot be read or used.
    """
    names = [one.name for one in tasks]
    file = _files(settings.data, names).get(task.name)
    commit = _assignments(settings.revision, "--revision", names).get(task.name)
    return load_questions(task, file, settings.limit, settings.seed, commit)


def _files(data: str, names: list[str]) -> dict[str, str]:
    """Local files by task, from `--data`."""
    if not data or "=" in data:
        return _assignments(data, "--data", names)
    folder = Path(data)
    if folder.is_file() and len(names) == 1:
        return {names[0]: data}
    if not folder.is_dir():
        raise ConfigError(f"--data {data}: expected TASK=FILE, or a folder that holds TASK.jsonl files")
    found = {name: data for name in names if files_in(folder, name)}
    if not found:
        raise ConfigError(
            f"--data {data}: the folder holds a file of none of the tasks; expected {names[0]}.jsonl, .json or .parquet, and "
            "so on"
        )
    return found


def _assignments(text: str, flag: str, known: list[str]) -> dict[str, str]:
    """{task: value} of "TASK=VALUE,TASK=VALUE"."""
    found: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = part.partition("=")
        if not value:
            raise ConfigError(f"{flag} {part}: expected TASK=VALUE")
        if name not in known:
            raise ConfigError(
                f"{flag} {part}: {name} is not among the tasks{nearest(name, known)} ({', '.join(known)})"
            )
        found[name] = value
    return found


@dataclass(frozen=True)
class Prepared:
    """A task with its questions, rendered and limited to what the model can hold.

    Attributes:
        task, questions: as loaded.
        prompts: rendered prompts.
        sampling: the task's, after overrides.
        warnings: what a reader of the score should know.
    """

    task: Task
    questions: Questions
    prompts: tuple[str, ...]
    sampling: SamplingConfig
    warnings: tuple[str, ...] = ()

    @property
    def prompts_sha256(self) -> str:
        """SHA-256 (hex) over the rendered prompts in their order, chat template included."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """What must be the same for a run to be resumed."""
        return {
            "task": self.task.name,
            "version": self.task.version,
            "fingerprint": self.task.fingerprint,
            "questions": self.questions.fingerprint,
            "source": self.questions.source,
            "revision": self.questions.revision,
            "prompts_sha256": self.prompts_sha256,
            "sampling": asdict(self.sampling),
            "warnings": list(self.warnings),
        }


def prepare(
    task: Task,
    questions: Questions,
    tokenizer: Any,
    settings: TaskSettings,
    positions: int | None = None,
    system: str = "none",
) -> Prepared:
    """Render a task's prompts and settle how its answers are sampled.

    Args:
        settings: their samples, temperature and token limit stand in place of the task's own.
        positions: of the model; answers to prompts that leave fewer than the token limit get what is left, with a warning.
        system: as of `render_questions`.

    Raises:
        ConfigError: for settings that cannot be used, such as several greedy samples.
        DataError: if a prompt leaves no room for an answer.
    """
    own = task.generation
    prompts = render_questions(task, questions.questions, tokenizer, system)
    limit = settings.max_new_tokens or own.max_new_tokens
    warnings = list(questions.warnings)
    lengths = [len(ids) for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"]]
    short = [] if positions is None else [positions - length for length in lengths if length + limit > positions]
    if short and min(short) < 1:
        place = questions.questions[lengths.index(max(lengths))].place
        raise DataError(f"{place}: the prompt has {max(lengths)} tokens, the model only {positions} positions")
    if short:
        warnings.append(
            f"{task.name}: the prompts of {len(short)} of {len(prompts)} questions leave fewer than {limit} tokens of the "
            f"model's {positions} positions; their answers end there, the shortest after {min(short)} tokens"
        )
    heat = own.temperature if settings.temperature is None else settings.temperature
    sampling = SamplingConfig(
        temperature=heat,
        top_p=own.top_p,
        max_new_tokens=limit,
        samples=settings.samples or (1 if heat == 0 else own.samples),
        seed=settings.seed,
        stop=own.stop,
    )
    return Prepared(task, questions, tuple(prompts), sampling, tuple(warnings))


def write_questions(folder: Path, prepared: Prepared) -> None:
    """What was asked, so that samples can be judged again without the data set or the tokenizer."""
    lines = []
    for question, prompt in zip(prepared.questions.questions, prepared.prompts, strict=True):
        record = {"id": question.id, "prompt": prompt, "gold": question.gold, "row": question.row}
        lines.append(json.dumps(record, ensure_ascii=False, default=str))
    write_text(folder / "questions" / f"{prepared.task.name}.jsonl", "\n".join(lines) + "\n")


def read_questions(folder: Path, task: str) -> list[Question]:
    """The questions of a stored evaluation; `prompt` is the rendered text.

    Raises:
        DataError: naming the line that is not a question.
    """
    path = folder / "questions" / f"{task}.jsonl"
    if not path.is_file():
        raise DataError(f"found no {path}; {folder} is not the folder of an evaluation")
    remedy = "run the evaluation again"
    return [
        replace(validate(Question, row, where, DataError, remedy), place=where)
        for where, row in read_lines(path, remedy)
    ]
