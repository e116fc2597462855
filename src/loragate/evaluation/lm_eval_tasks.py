"""Retention suites: lm-evaluation-harness writes the prompts and judges the answers; all between is as for other tasks.

This is the only importer of `lm_eval`. The examples of a suite are checked by `tasks/questions.py` and handed to the harness's own
task definitions with our changes on top, so that the harness never opens a connection. Programs are not run here.

Some suites compare options by likelihood instead of reading a text. The answer to such a question is the log-likelihoods of its
options as JSON: [[log-likelihood in nats, whether the option is the greedy continuation], ...].
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError, DataError
from loragate.evaluation.answers import Grade
from loragate.evaluation.tasks import Question, Task
from loragate.generation import Engine, OnProgress, Sample, SampleWriter
from loragate.generation.engine import Continuation

INDEX = "loragate_index"  # the column that carries a question's place through the harness
INVALID = "[invalid]"  # the harness's own word for an answer in which nothing was found
Requests = Iterator[tuple[Any, list[tuple[int, list[Any]]]]]
"""The harness's task of each subset, with (place, requests) of each of its questions."""


def require_harness() -> None:
    """Raise `ConfigError` when the harness is not installed; it is not imported for that."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError('retention suites need lm-evaluation-harness; run: pip install ".[eval]" in a checkout')


def add_harness_prompts(task: Task, questions: Sequence[Question], chat: bool) -> list[Question]:
    """The questions with the harness's prompts, each begun by its task description, and the options that it compares.

    Args:
        chat: whether a chat template ends the prompt; without one an option begins with a blank.
    """
    found = list(questions)  # the harness goes subset by subset; places keep ours
    for one, by_question in _build_requests(task, questions, chat):
        compares = one.OUTPUT_TYPE == "multiple_choice"
        for index, requests in by_question:
            options = tuple(request.args[1] for request in requests) if compares else ()
            found[index] = replace(questions[index], prompt=requests[0].args[0], options=options)
    return found


def grade_by_harness(task: Task, questions: Sequence[Question], samples: Sequence[Sample]) -> list[Grade]:
    """The verdicts of the harness's filters and metrics on one answer to each question.

    `Grade.scores` holds all its figures by "metric,filter"; the task's own decides. An answer that a filter of the harness fails
    on (number words that form no number) holds nothing for it.
    """
    assert task.harness is not None
    metric, found = task.harness.metric, {}
    for one, by_question in _build_requests(task, questions, chat=False):
        for index, requests in by_question:
            # one request is a text, several are the options of one question
            answers = [samples[index].text] if len(requests) == 1 else json.loads(samples[index].text)
            for request, answer in zip(requests, answers, strict=True):
                request.resps.append(answer)
            scores, extracted = {}, {}
            for ensemble in one._filters:
                try:
                    ensemble.apply(requests)
                except Exception:  # whatever the harness's filter raises on an odd answer; see PLANTED in the tests
                    for request in requests:
                        request.filtered_resps[ensemble.name] = INVALID
                filtered = [request.filtered_resps[ensemble.name] for request in requests]
                for name, value in one.process_results(requests[0].doc, filtered).items():
                    scores[f"{name},{ensemble.name}"] = float(value)
                    extracted[f"{name},{ensemble.name}"] = filtered[0] if len(requests) == 1 else None
            text, correct = extracted[metric], bool(scores[metric])
            reason = "ok" if correct else "no_answer" if text == INVALID else "wrong"
            found[index] = Grade(correct, None if text == INVALID else text, reason, scores)
    return [found[index] for index in range(len(questions))]


def encode_options(
    tokenizer: Any, prompts: Sequence[str], questions: Sequence[Question], positions: int | None
) -> tuple[tuple[tuple[Continuation, ...], ...], int]:
    """(prompt, option) as token ids, for every option of every question, and how many prompts lost their beginning to fit.

    Blanks at the end of a prompt are read with the option, as tokenizers join them to the word that follows.
    """

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    found, cut = [], 0
    for prompt, question in zip(prompts, questions, strict=True):
        before, pairs = encode(prompt.rstrip()), []
        for option in question.options:
            # encoded together and cut apart, as the harness does: the option alone may become other tokens
            after = encode(prompt + option)[len(before) :]
            if not after:
                raise DataError(
                    f"the tokenizer makes no token of the option {option!r:.60}, so its likelihood is not defined; leave this "
                    "task out for this model"
                )
            over = max(0, len(before) + len(after) - (positions or len(before) + len(after)))
            pairs.append((before[over:], after))
        found.append(tuple(pairs))
        cut += any(len(kept) < len(before) for kept, _ in pairs)
    return tuple(found), cut


def write_option_likelihoods(
    engine: Engine,
    options: Sequence[Sequence[Continuation]],
    path: Path,
    on_progress: OnProgress,
) -> None:
    """Write the log-likelihoods of every question's options as its one answer, see above."""

    def report(done: int, total: int) -> None:  # the engine counts pairs, the evaluation questions
        on_progress(done * len(options) // total, len(options))

    figures = iter(engine.log_likelihoods([pair for pairs in options for pair in pairs], report))
    path.unlink(missing_ok=True)  # all answers are written at once, so that an earlier file was cut off
    with SampleWriter(path) as writer:
        writer.write(
            Sample(question, 0, json.dumps([next(figures) for _ in pairs]), (), "stop", None)
            for question, pairs in enumerate(options)
        )


def _build_requests(task: Task, questions: Sequence[Question], chat: bool) -> Requests:
    harness = task.harness
    assert harness is not None, f"{task.name} is no task of the harness"
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        build: Any = importlib.import_module("lm_eval.api.task")
        read: Any = importlib.import_module("lm_eval.tasks._yaml_loader")
    except ImportError as error:
        raise ConfigError(
            f'this lm-evaluation-harness cannot be used ({error}); run: pip install ".[eval]" in a checkout'
        ) from error
    folder = Path(read.__file__).parent
    columns = [name for name, kind in task.dataset.schema.items() if kind in ("text", "texts", "object")]
    for subset in dict.fromkeys(question.subset for question in questions):
        rows = [
            {INDEX: index, **{name: question.row[name] for name in columns}}
            for index, question in enumerate(questions)
            if question.subset == subset
        ]
        # every subset becomes a data set in memory, which the harness's own task takes in place of the hub's
        held = build.datasets.DatasetDict(test=build.datasets.Dataset.from_list(rows))
        content = read.load_yaml(folder / harness.files.format(subset=subset.replace(" ", "_")))
        content |= harness.override | {
            "num_fewshot": 0,
            "test_split": "test",
            "custom_dataset": lambda held=held, **_: held,  # bound now: `held` is another one for the next subset
        }
        harness_task = build.ConfigurableTask(config=content)
        by_question = []
        for number, doc in enumerate(harness_task.test_docs()):
            context = harness_task.fewshot_context(doc, num_fewshot=0)
            about = (task.name, number, 1)
            requests = harness_task.construct_requests(doc=doc, ctx=context, metadata=about, apply_chat_template=chat)
            by_question.append((doc[INDEX], requests if isinstance(requests, list) else [requests]))
        yield harness_task, by_question
