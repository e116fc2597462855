"""Where the evidence for a choice comes from, and why there is none where that is so.

labelled    questions with answers
agreement   questions without answers, or prompts of training rows that were set aside: the adapter's majority stands in
none        no evidence can be had: gates are trained, and stay off until they are accepted
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from loragate.data import EncodedRows, Rows, load_rows
from loragate.data.loading import RowsGiven
from loragate.data.rendering import IGNORED
from loragate.errors import ConfigError, DataError
from loragate.evaluation import grade_math
from loragate.evaluation.answers import grade_choice, grade_exact
from loragate.evaluation.judging import MATH, JudgeSettings, grade_tiny, require_graders
from loragate.evaluation.tasks import Question, Task, load_task
from loragate.evaluation.tasks.questions import render_questions
from loragate.generation import Engine, OnProgress, SamplingConfig
from loragate.generation.requests import tokenize_prompts
from loragate.selection.disjoint import prompts_of, prompts_to_exclude, require_disjoint
from loragate.selection.probe import MIN_QUESTIONS, Probe, agreement_probe, labelled_probe
from loragate.selection.questions import ANSWERS, held_out_prompts, probe_task, read_probe, require_file
from loragate.selection.settings import ProbeSettings, SelectionSettings
from loragate.training.rollouts import Reward

PROBE_TOKENS = 512  # where no training rows say how long an answer is
SAMPLED = 2_000  # rows whose answers are measured


@dataclass(frozen=True)
class Asked:
    """Questions as they were given, before the model is there.

    Attributes:
        source: where they come from.
        task: how they are asked and judged.
        questions: new to the training rows.
        labelled: whether their answers are known.
    """

    source: str
    task: Task
    questions: list[Question]
    labelled: bool

    def labelled_probe(
        self,
        tokenizer: Any,
        settings: ProbeSettings,
        judging: JudgeSettings,
        *,
        system: str,
        positions: int | None,
        seed: int,
    ) -> Probe:
        """The probe that they make for a model of so many positions."""
        prompts = render_questions(self.task, self.questions, tokenizer, system)
        sampling = sampling_of(settings, self.task, prompts, tokenizer, positions, seed)
        return labelled_probe(self.task, self.questions, prompts, sampling, judging, self.source)


def read_asked(
    questions: RowsGiven,
    task: str,
    settings: ProbeSettings,
    taken: Sequence[tuple[Sequence[str], str]],
    judging: JudgeSettings,
    *,
    raw: bool = False,
) -> Asked:
    """Questions of a file or of rows in memory, checked.

    Args:
        task: whose prompt, columns and grader are used; without one the grader is that of `settings`.
        taken: (prompts, what they are): questions must not be among them.
        raw: questions of a plain file are plain text to complete.

    Raises:
        DataError, ConfigError: naming what cannot be used.
    """
    named, found, labelled = read_probe(questions, task, settings.probe_grader, raw=raw)
    require_graders([named], "", judging)
    for texts, what in taken:
        require_disjoint(found, texts, what)
    source = str(questions) if isinstance(questions, str | Path) else f"{len(found)} questions in memory"
    return Asked(source, named, found, labelled)


class Evidence:
    """The questions of one choice: the probe's, those of the retention probe, and rows set aside where there is no probe.

    Args:
        rows: all training rows, with which no question may be shared.
        probe, retention: files, or rows in memory; None where there are none.
        spare: rows that were set aside as questions; None where they are not needed.
        settings: how they are asked.
        raw: the training rows are plain text, so the questions of a plain file are too.

    Raises:
        DataError, ConfigError: naming what cannot be used, before a model is loaded.
    """

    def __init__(
        self,
        rows: Rows,
        probe: RowsGiven | None,
        retention: RowsGiven | None,
        spare: Rows | None,
        settings: SelectionSettings,
        *,
        raw: bool,
    ) -> None:
        self.settings, self.spare = settings, spare
        self.judging = JudgeSettings(sandbox=settings.probe_sandbox)
        taken = []
        if probe is not None or retention is not None:
            taken = [(prompts_of(rows), "the training rows")]
            if settings.exclude:
                name = f"the rows of {settings.exclude}"
                taken.append((prompts_to_exclude(load_rows(settings.exclude), name), name))
        self.asked = self.retained = None
        if probe is not None:
            self.asked = read_asked(probe, settings.probe_task, settings, taken, self.judging, raw=raw)
        if retention is not None:
            self.retained = read_asked(retention, settings.retention_task, settings, taken, self.judging, raw=raw)
            if not self.retained.labelled:
                raise ConfigError(
                    f"--retention-probe {self.retained.source} has no answers; what must not be lost needs labels"
                )

    def probe(
        self,
        tokenizer: Any,
        adapter: Engine,
        *,
        system: str,
        positions: int | None,
        max_length: int,
        max_new_tokens: int,
        seed: int,
        kept: Path | None = None,
        on_progress: OnProgress | None = None,
    ) -> tuple[Probe | None, str]:
        """(probe, "") or (None, why no evidence can be had).

        Args:
            adapter: answers as the untouched adapter; asked where there are no labels.
            positions: of the model; None where it has no limit.
            max_length: tokens from which a training row is cut.
            max_new_tokens: of an answer, where the settings leave it open.
            seed: of the probe's samples.
            kept: file for the adapter's answers on the agreement path.
        """
        settings = self.settings
        if not settings.probe_max_new_tokens:
            settings = replace(settings, probe_max_new_tokens=max_new_tokens)
        if self.asked is not None:
            if self.asked.labelled:
                probe = self.asked.labelled_probe(
                    tokenizer, settings, self.judging, system=system, positions=positions, seed=seed
                )
                return probe, ""
            task, questions, source = self.asked.task, self.asked.questions, self.asked.source
            prompts = render_questions(task, questions, tokenizer, system)
        else:
            assert self.spare is not None, "without a probe, rows are set aside"
            source = f"{len(self.spare)} rows of {self.spare.source}, set aside"
            if len(self.spare) < MIN_QUESTIONS:
                return None, (
                    f"a tenth of {self.spare.source} leaves {len(self.spare)} prompts to set aside, and {MIN_QUESTIONS} "
                    "are needed"
                )
            limit = settings.probe_max_new_tokens
            limit = limit if positions is None else max(1, min(limit, positions // 2))
            task = probe_task(settings.probe_grader, labelled=False)
            require_graders([task], "", self.judging)
            try:
                questions, prompts = held_out_prompts(
                    self.spare,
                    tokenizer,
                    max_length=max_length,
                    max_new_tokens=limit,
                    positions=positions,
                    system=system,
                )
            except DataError as error:
                return None, str(error)
        sampling = sampling_of(settings, task, prompts, tokenizer, positions, seed)
        return agreement_probe(task, questions, prompts, adapter, sampling, self.judging, source, on_progress, kept)

    def retention(self, tokenizer: Any, *, system: str, positions: int | None, seed: int) -> Probe | None:
        """The retention probe, or None where none was given."""
        if self.retained is None:
            return None
        return self.retained.labelled_probe(
            tokenizer, self.settings, self.judging, system=system, positions=positions, seed=seed
        )


def answer_tokens(encoded: EncodedRows) -> int:
    """Tokens that a probe's answer may take: half more than all but a hundredth of the training answers, in steps of 16."""
    lengths = [
        sum(label != IGNORED for label in encoded[index]["labels"]) for index in range(min(len(encoded), SAMPLED))
    ]
    return 16 * math.ceil((1.5 * float(np.quantile(lengths, 0.99)) + 16) / 16)


def require_evidence(settings: SelectionSettings, probe: Any, retention: Any, spare: Any = None) -> None:
    """Refuse, before anything long begins, a probe that is not there or answers that could not be judged here.

    Args:
        probe, retention: files, or rows in memory; None where there are none.
        spare: rows set aside as questions, once that has been done.

    Raises:
        ConfigError, DataError: naming what is missing.
    """
    settings.check_probe()
    if settings.exclude and probe is None and retention is None:
        raise ConfigError("--exclude has no effect without --probe FILE")
    tasks = []
    for given, name in ((probe, settings.probe_task), (retention, settings.retention_task)):
        if given is not None:
            if isinstance(given, str | Path):
                require_file(str(given))
            tasks.append(load_task(name) if name else probe_task(settings.probe_grader))
    if spare is not None and len(spare) >= MIN_QUESTIONS:
        tasks.append(probe_task(settings.probe_grader, labelled=False))
    if tasks:
        require_graders(tasks, "", JudgeSettings(sandbox=settings.probe_sandbox))


def sampling_of(
    settings: ProbeSettings, task: Task, prompts: list[str], tokenizer: Any, positions: int | None, seed: int
) -> SamplingConfig:
    """How a candidate is sampled that has no temperature of its own.

    The engine lowers the token limit for a prompt that leaves fewer of the model's positions.

    Raises:
        DataError: if a prompt leaves no position, which is better known before anything is trained.
    """
    limit = settings.probe_max_new_tokens or PROBE_TOKENS
    temperature = 1.0 if settings.probe_temperature is None else settings.probe_temperature
    tokenize_prompts(tokenizer, prompts, limit, positions)
    return SamplingConfig(
        temperature=temperature,
        top_p=task.generation.top_p,
        max_new_tokens=limit,
        samples=settings.probe_samples if temperature else 1,
        seed=seed,
    )


def reward_of(rows: Rows, grader: str) -> Reward:
    """Reward 1 for a right answer: rows must carry an answer, judged by the probe's grader.

    Raises:
        ConfigError: if a row has no answer.
    """

    def answer(row: Any) -> Any:
        return next((row[name] for name in ANSWERS if row.get(name) is not None), None)

    missing = [index for index in range(len(rows)) if answer(rows[index]) is None]
    if missing:
        raise ConfigError(
            f"{rows.where(missing[0])}: --objective reward needs an answer in every row ({', '.join(ANSWERS)}), to compare "
            "sampled answers with"
        )

    def reward(row: Any, text: str, finished: bool) -> float:
        gold = str(answer(row))
        if grader == "tiny":
            return float(grade_tiny(row, text, finished).correct)
        if not finished:
            return 0.0
        if grader in MATH:
            return float(grade_math(text, gold, grader).correct)
        return float((grade_choice if grader == "choice" else grade_exact)(text, gold).correct)

    return reward
