"""The bridge to lm-evaluation-harness: a retention suite on any of our engines, with scores that can be paired.

The harness supplies prompts, filters and metrics; this room supplies checked questions (`tasks/questions.py`), an engine's
answers and the chat rendering that training used. It is the only importer of `lm_eval`. Tasks are written to a temporary
folder as small YAML files that include the harness's own, point at local rows and put our changes on top, so the harness
itself never opens a connection. Programs are not run here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from loragate.data import Chat, template_hash
from loragate.errors import ConfigError, DataError
from loragate.evaluation.tasks import Harness, Questions, Task
from loragate.evaluation.tasks.questions import SUBSET
from loragate.files import write_text
from loragate.generation import Engine, OnProgress, SamplingConfig, ScoringEngine
from loragate.generation.requests import FinishReason

INDEX = "loragate_index"  # the column that carries a question's place through the harness


@dataclass(frozen=True)
class HarnessScores:
    """What one suite gave for one model. Q questions.

    Attributes:
        task: its name.
        version: "<the harness's>+loragate.<ours>".
        metric: "name,filter", as the harness writes it.
        scores: [Q] of that metric; the other metrics are in `samples`.
        questions: [Q] ids; `subsets` names each one's subset, "" where the suite has none.
        prompts_hash: SHA-256 over all prompts in order, as the model saw them before tokenising.
        samples: one dict per question: question, subset, prompt, gold, correct and scores (by metric); then text,
            extracted (by filter), tokens and finish_reason, or choices and loglikelihoods.
        settings: everything else that the scores depend on.
        warnings: what a reader must know beside the score, in sentences.
    """

    task: str
    version: str
    metric: str
    scores: tuple[float, ...]
    questions: tuple[str, ...]
    subsets: tuple[str, ...]
    prompts_hash: str
    samples: tuple[dict[str, Any], ...]
    settings: dict[str, Any]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """A greedy answer, and why it ended, which the harness does not tell.

    `text` is without the stop token or string; `tokens` counts what was generated, the stop included; `budget` is the
    token limit that held for it; `cut` counts the prompt tokens that had to be left out.
    """

    text: str
    tokens: int
    finish_reason: FinishReason
    budget: int
    cut: int


def run_harness(
    engine: ScoringEngine,
    tokenizer: Any,
    task: Task,
    questions: Questions,
    *,
    positions: int | None = None,
    max_new_tokens: int | None = None,
    system: str = "none",
    on_progress: OnProgress | None = None,
) -> HarnessScores:
    """Ask a retention suite zero-shot: the engine's greedy answers, or its log-likelihoods.

    Each prompt is rendered as one user turn where the tokenizer has a chat template. The harness's task description stands at the
    beginning of that turn, not in a system message.

    Args:
        task: of the engine lm-eval.
        questions: of `load_questions`.
        positions: of the model, prompt and answer together; None where it has no limit.
        max_new_tokens: token limit of an answer, in place of the suite's own.
        system: "none" leaves out a system message that the template would slip in, "keep" leaves the template alone.
        on_progress: called with (requests done, requests in all).

    Raises:
        ConfigError: when the harness is not installed.
    """
    harness = task.harness
    assert harness is not None, f"{task.name} is no task of the harness"
    chat_template = tokenizer.chat_template is not None
    try:
        for name in ("evaluator", "tasks", "api.model", "api.task"):
            importlib.import_module(f"lm_eval.{name}")
    except ImportError as error:
        raise ConfigError(
            f"lm-evaluation-harness cannot be imported ({error}). Install it with: pip install loragate[eval]"
        ) from error
    lm_eval: Any = importlib.import_module("lm_eval")
    limit = harness.max_new_tokens and (max_new_tokens or harness.max_new_tokens)
    rows = [question.row for question in questions.questions]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loragate-harness-")))
        stack.enter_context(_quiet())
        names = _write_tasks(task.name, harness, limit, rows, folder, Path(lm_eval.tasks.__file__).parent)
        with contextlib.redirect_stderr(io.StringIO()):
            manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
            loaded = manager.load(names)
        for one in loaded["tasks"].values():
            _guard_filters(one)
        bridge = _bridge(engine, tokenizer, positions, chat_template, system, on_progress)
        results = lm_eval.evaluator.evaluate(
            lm=bridge, task_dict=loaded, bootstrap_iters=0, log_samples=True, apply_chat_template=chat_template
        )
    samples = _samples(questions, results["samples"], bridge.answers, harness.metric)
    prompts = hashlib.sha256()
    for sample in samples:
        prompts.update(sample["prompt"].encode() + b"\0")
    ends = getattr(engine, "endings", None)  # replicas have theirs where they are
    return HarnessScores(
        task=task.name,
        version=f"{results['versions'][names[0]]}+loragate.{task.version}",
        metric=harness.metric,
        scores=tuple(sample["scores"][harness.metric] for sample in samples),
        questions=tuple(question.id for question in questions.questions),
        subsets=tuple(row[SUBSET] for row in rows),
        prompts_hash=prompts.hexdigest(),
        samples=tuple(samples),
        settings={
            "lm_eval": metadata.version("lm_eval"),
            "chat_template": template_hash(tokenizer) if chat_template else None,
            "positions": positions,
            "stop_token_ids": None if ends is None else sorted(ends.token_ids),
            "max_new_tokens": limit,
            "source": questions.source,
            "revision": questions.revision,
            "rows": questions.fingerprint,
        },
        warnings=(*questions.warnings, *_warnings(task.name, limit, list(bridge.answers.values()), bridge.cut_choices)),
    )


def greedy_answers(
    engine: Engine,
    prompts: Sequence[list[int]],
    *,
    stops: Sequence[str],
    max_new_tokens: int,
    positions: int | None,
    on_progress: OnProgress | None = None,
) -> list[Answer]:
    """Answer every prompt (token ids) greedily, in the order given.

    An answer gets `max_new_tokens`, or what the model's `positions` leave after its prompt (None: no limit). A prompt keeps at
    most the positions that leave a quarter of them (or `max_new_tokens`, if that is less) to its answer; it is cut at its
    beginning.
    """
    reserve = max(1, min(max_new_tokens, (positions or 0) // 4))
    kept = [ids if positions is None else ids[-(positions - reserve) :] for ids in prompts]
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=max_new_tokens, stop=tuple(stops))
    samples = engine.generate(kept, sampling, on_progress)
    return [
        Answer(
            sample.text,
            len(sample.token_ids),
            sample.finish_reason,
            max_new_tokens if positions is None else min(max_new_tokens, positions - len(own)),
            len(prompt) - len(own),
        )
        for sample, own, prompt in zip(samples, kept, prompts, strict=True)
    ]


def _write_tasks(
    name: str, harness: Harness, limit: int | None, rows: Sequence[dict[str, Any]], folder: Path, harness_tasks: Path
) -> list[str]:
    """Write rows and task file of each subset into `folder`; returns the names of the tasks."""
    names = []
    for subset in dict.fromkeys(row[SUBSET] for row in rows):
        file = subset.replace(" ", "_")
        names.append(f"loragate_{name}_{file}".rstrip("_"))
        members = [{**row, INDEX: index} for index, row in enumerate(rows) if row[SUBSET] == subset]
        place = folder / "rows" / f"{names[-1]}.jsonl"
        write_text(place, "".join(json.dumps(member, ensure_ascii=False) + "\n" for member in members))
        task = {
            "include": str(harness_tasks / harness.files.format(subset=file)),
            "task": names[-1],
            "num_fewshot": 0,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(place)}, "cache_dir": str(folder / "cache")},
            "test_split": "test",
            **harness.override,
        }
        if limit is not None:
            task["generation_kwargs"] = {**harness.override["generation_kwargs"], "max_gen_toks": limit}
        write_text(folder / "tasks" / f"{names[-1]}.yaml", yaml.safe_dump(task, sort_keys=False))
    return names


def _samples(
    questions: Questions,
    found: Mapping[str, Sequence[Mapping[str, Any]]],
    answers: Mapping[int, Answer],
    metric: str,
) -> list[dict[str, Any]]:
    """What the harness returned by task, filter and question, back in the order of the questions."""
    samples: list[dict[str, Any]] = [
        {"question": question.id, "subset": question.row[SUBSET], "scores": {}} for question in questions.questions
    ]
    for entry in (entry for entries in found.values() for entry in entries):
        index = entry["doc"][INDEX]
        sample, answer = samples[index], answers.get(index)
        sample.update(prompt=entry["arguments"][0][0], gold=entry["target"])
        sample["scores"] |= {f"{name},{entry['filter']}": float(entry[name]) for name in entry["metrics"]}
        if answer is None:
            sample["choices"] = [continuation for _, continuation in entry["arguments"]]
            sample["loglikelihoods"] = [float(responses[0][0]) for responses in entry["resps"]]
        else:
            sample.update(text=answer.text, tokens=answer.tokens, finish_reason=answer.finish_reason)
            sample.update(budget=answer.budget, prompt_tokens_cut=answer.cut)
            sample.setdefault("extracted", {})[entry["filter"]] = entry["filtered_resps"][0]
    for sample in samples:
        sample["correct"] = bool(sample["scores"][metric])
    return samples


def _warnings(name: str, limit: int | None, answers: Sequence[Answer], cut_choices: int) -> Iterator[str]:
    short = [answer.budget for answer in answers if answer.budget < (limit or 0)]
    if short:
        yield (
            f"{name}: {len(short)} of {len(answers)} answers had room for {min(short)} to {max(short)} new tokens only, not "
            f"{limit}: the model's positions end there."
        )
    if cut := sum(answer.cut > 0 for answer in answers) or cut_choices:
        yield f"{name}: {cut} prompts were cut at their beginning, as they do not fit the model's positions."


def _guard_filters(task: Any) -> None:
    """Make every filter take one answer at a time and read one that it fails on as "[invalid]".

    Some of the harness's filters raise on unusual text (number words that form no number), which would lose the run.
    """

    class Guarded:
        def __init__(self, build: Callable[[], Any]) -> None:
            self.inner = build()

        def apply(self, responses: Any, docs: Sequence[Any]) -> list[list[str]]:
            return [self._one(response, doc) for response, doc in zip(responses, docs)]

        def _one(self, response: Any, doc: Any) -> Any:
            try:
                return next(iter(self.inner.apply([response], [doc])))
            except Exception:
                return ["[invalid]"] * len(response)

    if task.OUTPUT_TYPE == "generate_until":
        for ensemble in task._filters:
            ensemble.filters = [functools.partial(Guarded, build) for build in ensemble.filters]


def _bridge(
    engine: ScoringEngine,
    tokenizer: Any,
    positions: int | None,
    chat_template: bool,
    system: str,
    on_progress: OnProgress | None,
) -> Any:
    """The harness's model over an engine: its answers, its log-likelihoods and our chat rendering."""
    from lm_eval.api.model import TemplateLM

    class Bridge(TemplateLM):
        def __init__(self) -> None:
            super().__init__()
            self.tokenizer = tokenizer
            self.answers: dict[int, Answer] = {}
            self.cut_choices = 0
            self._chat = Chat(tokenizer, system)

        @property
        def tokenizer_name(self) -> str:
            return str(tokenizer.name_or_path).replace("/", "__")

        @property
        def eot_token_id(self) -> int:
            return int(tokenizer.eos_token_id)

        @property
        def prefix_token_id(self) -> int:
            return self.eot_token_id if tokenizer.bos_token_id is None else int(tokenizer.bos_token_id)

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            first, *rest = chat_history
            if first["role"] == "system" and rest:
                chat_history = [{**rest[0], "content": first["content"] + rest[0]["content"]}, *rest[1:]]
            return self._chat.render(chat_history, generation_prompt=add_generation_prompt)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
            # a rendered conversation holds its special tokens already
            add = not chat_template and add_special_tokens is not False
            ids: list[int] = tokenizer.encode(string, add_special_tokens=add)
            return ids

        def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
            wanted = requests[0].args[1]  # the same for all subsets of a suite
            answers = greedy_answers(
                engine,
                [self.tok_encode(request.args[0]) for request in requests],
                stops=wanted["until"],
                max_new_tokens=wanted["max_gen_toks"],
                positions=positions,
                on_progress=on_progress,
            )
            self.answers = {request.doc[INDEX]: answer for request, answer in zip(requests, answers)}
            return [answer.text for answer in answers]

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: list[Any], **options: Any) -> list[tuple[float, bool]]:
            pairs = []
            for (_, continuation), before, after in requests:
                if not after:
                    raise DataError(
                        f"the tokenizer makes no token of the option {continuation!r:.60}, so its likelihood is not defined; "
                        "leave this task out for this model"
                    )
                over = max(0, len(before) + len(after) - (positions or math.inf))
                self.cut_choices += over > 0
                pairs.append((before[int(over) :], after))
            return engine.log_likelihoods(pairs, on_progress)

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            raise NotImplementedError("no retention suite asks for it")

    return Bridge()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the harness's log lines and the progress bar that it shows while it builds prompts."""
    logger, building = logging.getLogger("lm_eval"), importlib.import_module("lm_eval.api.task")
    level, bar = logger.level, building.tqdm
    logger.setLevel(logging.ERROR)
    building.tqdm = functools.partial(bar, disable=True)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        logger.setLevel(level)
        building.tqdm = bar  # type: ignore[attr-defined]
