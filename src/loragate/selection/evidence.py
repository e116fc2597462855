"""Where the evidence for a choice comes from.

labelled    questions with answers
agreement   questions without answers, or prompts of training rows that were set aside: the adapter's majority stands in

Where none can be had, that is said before anything is trained.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from loragate.data import EncodedRows, Rows, load_rows
from loragate.data.loading import RowsGiven
from loragate.data.rendering import IGNORED
from loragate.errors import ConfigError, DataError
from loragate.evaluation import grade_math
from loragate.evaluation.answers import grade_text, why_no_gold
from loragate.evaluation.judging import MATH, grade_tiny, require_graders
from loragate.evaluation.settings import GradingSettings
from loragate.evaluation.tasks import Task
from loragate.generation import Engine, OnProgress
from loragate.selection.guards import Reward
from loragate.selection.probe import COOL, MIN_QUESTIONS, Probe, by_agreement, no_evidence
from loragate.selection.questions import (
    ANSWERS,
    PROBE_TOKENS,
    Manner,
    ProbeQuestions,
    held_out_prompts,
    probe_task,
    prompts_of,
    prompts_to_exclude,
    read_probe,
)
from loragate.selection.settings import SelectionSettings

SAMPLED = 2_000  # rows whose answers are measured


def require_evidence(settings: SelectionSettings, probe: str, retention: str, *, set_aside: bool) -> None:
    """Refuse what no model is needed to refuse: before rows are read, and before a recipe's first stage.

    `set_aside` says whether training rows may stand in for a probe. The DataError or ConfigError names what cannot be used.
    """
    if settings.exclude and not (probe or retention):
        raise ConfigError("--exclude has no effect without --probe FILE")
    for file, task in ((probe, settings.probe_task), (retention, settings.retention_task)):
        if file:
            read_probe(file, task, settings)
    if set_aside and not probe:
        task_of_rows(settings)


def task_of_rows(settings: SelectionSettings) -> Task:
    """How prompts of training rows are asked; raises ConfigError where their answers cannot be read here."""
    task = probe_task(settings.probe_grader, labelled=False)
    require_graders([task], GradingSettings(sandbox=settings.probe_sandbox))
    return task


class Evidence:
    """The questions of one choice: the probe's, those of the retention probe, and rows set aside where there is no probe.

    Args:
        rows: all training rows, with which no question may be shared.
        probe, retention: files, or rows in memory; None where there are none.
        spare: rows that were set aside as questions; None where they are not needed.

    A DataError or ConfigError names what cannot be used, before anything long begins.
    """

    def __init__(
        self,
        rows: Rows,
        probe: RowsGiven | None,
        retention: RowsGiven | None,
        spare: Rows | None,
        settings: SelectionSettings,
    ) -> None:
        self.settings, self.spare = settings, spare
        taken = [(prompts_of(rows), "the training rows")]
        if settings.exclude:
            if probe is None and retention is None:
                raise ConfigError("--exclude has no effect without --probe FILE")
            name = f"the rows of {settings.exclude}"
            taken.append((prompts_to_exclude(load_rows(settings.exclude), name), name))
        self.questions = None if probe is None else read_probe(probe, settings.probe_task, settings, taken)
        self.retention_questions = None
        if retention is not None:  # what must not be lost needs labels
            self.retention_questions = read_probe(
                retention, settings.retention_task, settings, taken, need_answers=True
            )
        if spare is not None and len(spare) >= MIN_QUESTIONS:
            task_of_rows(settings)

    def probe(
        self,
        how: Manner,
        adapter: Engine,
        max_length: int,
        kept: Path | None = None,
        on_progress: OnProgress | None = None,
        whose: str = "",
    ) -> Probe:
        """The probe, or a ConfigError that says why no evidence can be had; without labels it is asked at T = 0.3 by default.

        Args:
            adapter: answers as the untouched adapter; asked where there are no labels.
            max_length: tokens from which a training row is cut.
            kept: file for the adapter's answers on the agreement path.
            whose: fingerprint of adapter and base, by which they are known.
        """
        found = self.questions
        if found is not None and found.labelled:
            return found.put(how)
        if found is None:
            assert self.spare is not None, "without a probe, rows are set aside"
            if len(self.spare) < MIN_QUESTIONS:
                raise no_evidence(
                    f"a tenth of {self.spare.source} leaves {len(self.spare)} prompts to set aside, and {MIN_QUESTIONS} "
                    "are needed"
                )
            limit = self.settings.probe_max_new_tokens or how.answer
            limit = limit if how.positions is None else max(1, min(limit, how.positions // 2))
            try:
                questions, prompts = held_out_prompts(self.spare, replace(how, answer=limit), max_length)
            except DataError as error:
                raise no_evidence(str(error)) from error
            source = f"{len(self.spare)} rows of {self.spare.source}, set aside"
            found = ProbeQuestions(source, task_of_rows(self.settings), questions, False, self.settings, prompts)
        probe = found.put(how)
        if self.settings.probe_temperature is None:
            # at T = 1 gates would win that lose to the adapter sampled cooler, which needs no training
            probe = probe.at(COOL)
        return by_agreement(probe, adapter, on_progress, kept, whose)

    def retention(self, how: Manner) -> Probe | None:
        """The retention probe, or None where none was given."""
        found = self.retention_questions
        return None if found is None else found.put(replace(how, answer=PROBE_TOKENS))


def answer_tokens(encoded: EncodedRows) -> int:
    """Tokens that a probe's answer may take: half more than all but a hundredth of the training answers, in steps of 16."""
    lengths = [
        sum(label != IGNORED for label in encoded[index]["labels"]) for index in range(min(len(encoded), SAMPLED))
    ]
    return 16 * math.ceil((1.5 * float(np.quantile(lengths, 0.99)) + 16) / 16)


def reward_of(rows: Rows, grader: str) -> Reward:
    """Reward 1 for an answer that the probe's grader finds right; a row without an answer is a ConfigError."""

    def answer(row: Any) -> Any:
        return next((row[name] for name in ANSWERS if row.get(name) is not None), None)

    missing = [index for index in range(len(rows)) if answer(rows[index]) is None]
    if missing:
        raise ConfigError(
            f"{rows.where(missing[0])}: --objective reward needs an answer in every row ({', '.join(ANSWERS)}), to compare "
            "sampled answers with"
        )

    for index in range(len(rows)):
        if why := why_no_gold(str(answer(rows[index])), grader):
            raise ConfigError(f"{rows.where(index)}: {why}")

    def reward(row: Any, text: str, finished: bool) -> float:
        gold = str(answer(row))
        if grader == "tiny":
            return float(grade_tiny(row, text, finished).correct)
        if not finished:
            return 0.0
        if grader in MATH:
            return float(grade_math(text, gold, grader).correct)
        return float(grade_text(text, gold, grader).correct)

    return reward
