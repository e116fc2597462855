"""A task made ready for one model: prompts rendered, limits settled, and written down so that grading can be repeated."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loragate.errors import DataError
from loragate.evaluation.tasks import Question, Questions, Task, prompts_hash
from loragate.evaluation.tasks.questions import render_questions
from loragate.files import write_text
from loragate.generation import SamplingConfig


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
        """Hash over all rendered prompts."""
        return prompts_hash(list(self.prompts))

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
    *,
    seed: int,
    positions: int | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    system: str = "none",
) -> Prepared:
    """Render a task's prompts and settle how its answers are sampled.

    Args:
        positions: of the model; answers to prompts that leave fewer than the token limit get what is left, with a warning.
        samples, temperature, max_new_tokens: in place of the task's own.

    Raises:
        ConfigError: for settings that cannot be used, such as several greedy samples.
        DataError: if a prompt leaves no room for an answer.
    """
    own = task.generation
    prompts = render_questions(task, questions.questions, tokenizer, system)
    limit = own.max_new_tokens if max_new_tokens is None else max_new_tokens
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
    heat = own.temperature if temperature is None else temperature
    count = samples if samples is not None else 1 if heat == 0 else own.samples
    sampling = SamplingConfig(
        temperature=heat, top_p=own.top_p, max_new_tokens=limit, samples=count, seed=seed, stop=own.stop
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
    questions = []
    # not splitlines: a prompt may hold unusual line separators, which JSON leaves as they are
    for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), start=1):
        try:
            row = json.loads(line)
            questions.append(Question(row["id"], row["prompt"], row["gold"], row["row"], f"{path}, line {number}"))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number}: not a question ({error}); run the evaluation again") from None
    return questions
