"""`loragate diagnose tokens`: a few stored answers token by token, for the token view of `loragate report`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loragate.cli.diagnose_inputs import KINDS, begin, read_answers
from loragate.errors import ConfigError

MAX_TOKENS, QUESTIONS = 512, 8


def run(options: Any) -> int:
    """Read the answers of base, adapter and gated model, trace them, write tokens.json."""
    from loragate.analysis.token_traces import Answer, Question, trace_answers
    from loragate.files import write_json

    if not options.run:
        raise ConfigError("loragate diagnose tokens needs --run FOLDER, an evaluation whose stored answers are read")
    session = begin(options, gated=True)
    questions: dict[tuple[str, int], Question] = {}
    traced: dict[tuple[str, int], list[Answer]] = {}
    for of in KINDS[::-1]:
        session.options = replace(options, of=of, answers=1)
        found, _, _ = read_answers(session, of)
        for answers in found:
            task = answers.prepared.task.name
            grades = answers.grades or [None] * len(answers.samples)
            for sample, grade in zip(answers.samples, grades, strict=True):
                if sample.question >= (options.limit or QUESTIONS):
                    continue
                item = answers.prepared.questions.questions[sample.question]
                prompt = answers.prepared.prompts[sample.question]
                name = f"{task}/{item.id}"
                key = (task, sample.question)
                questions.setdefault(key, Question(name, prompt, str(item.gold), traced.setdefault(key, [])))
                verdict = (None, "") if grade is None else (grade.correct, grade.reason)
                traced[key].append(Answer(of, sample, *verdict))
    session.options = options
    if not questions:
        raise ConfigError(f"--run {options.run}: it holds no answers to trace")
    with session.display.job("reading the answers token by token", len(questions), "question") as job:
        record = trace_answers(
            session.loaded.model,
            session.loaded.tokenizer,
            list(questions.values()),
            max_tokens=min(options.max_length, MAX_TOKENS),
            on_question=job.advance_to,
        )
    path = session.folder / "tokens.json"
    write_json(path, record)
    session.out.print(f"{len(questions)} questions written to {path}", markup=False)
    session.out.print(f"next: loragate report {options.run} {options.out}", markup=False)
    return 0
