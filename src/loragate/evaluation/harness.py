"""The bridge to lm-evaluation-harness: retention suites on a model in memory, with scores that can be paired.

The harness supplies prompts, filters and metrics; this room supplies checked rows (`harness_rows.py`), the answers
(`harness_answers.py`) and the chat rendering that training used. It is the only importer of `lm_eval`. Tasks are written
to a temporary folder as small YAML files that include the harness's own, point at local rows and put our changes on top,
so the harness itself never opens a connection. Programs are not run here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from loragate.data import Chat, find_endings, template_hash
from loragate.errors import ConfigError, DataError
from loragate.evaluation.harness_answers import Answer, greedy_answers
from loragate.evaluation.harness_rows import INDEX, Questions, Suite, load_questions, load_suite, task_name
from loragate.evaluation.harness_scores import HarnessScores, collect_scores
from loragate.files import write_text

OnProgress = Callable[[int, int], None]


def run_harness(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    data: Mapping[str, str] | None = None,
    revisions: Mapping[str, str] | None = None,
    max_new_tokens: int | None = None,
    chat_template: bool = True,
    system: str = "none",
    on_progress: OnProgress | None = None,
) -> dict[str, HarnessScores]:
    """Run retention suites zero-shot on `model`, as it is: base, adapter, gated, or inside `gate_override`.

    Args:
        tasks: suites, such as "mmlu_pro", "bbh", "openbookqa" (see `suite_names`).
        limit: first questions of each subset only.
        seed: recorded and handed to the harness; answers are greedy, so nothing is drawn.
        data: suite -> local file of its rows, read instead of the hub.
        revisions: suite -> commit of its hub data set, in place of the pinned one.
        max_new_tokens: token limit of an answer; None takes the suite's own (2048 for MMLU-Pro, 1024 for BBH).
        chat_template: render each prompt as one user turn. The harness's task description stands at the beginning of
            that turn, not in a system message.
        system: "none" leaves out a system message that the template would slip in, "keep" leaves the template alone.
        on_progress: called with (requests done, requests in all).

    Raises:
        ConfigError: when the harness is not installed or a setting cannot be used.
        DataError: for rows that cannot be read or used, or a hub that cannot be reached.
    """
    data = dict(data or {})
    _check(tasks, data, limit, batch_size, max_new_tokens, chat_template, tokenizer)
    suites = [load_suite(name, max_new_tokens) for name in dict.fromkeys(tasks)]
    lm_eval = _import_harness()
    commits = dict(revisions or {})
    questions = {
        suite.name: load_questions(suite, data.get(suite.name), limit, commits.get(suite.name)) for suite in suites
    }
    meter = _Meter(on_progress, sum(_requests(item.row) for part in questions.values() for item in part.items))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loragate-harness-")))
        stack.enter_context(_quiet())
        stack.enter_context(_modes_restored(model))
        for suite in suites:
            _write_tasks(suite, questions[suite.name], folder, Path(lm_eval.tasks.__file__).parent)
        with contextlib.redirect_stderr(io.StringIO()):
            manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
            loaded = manager.load([task_name(suite, "") for suite in suites])
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(seed)
            _guard_filters(task)
        bridge = _bridge(model, tokenizer, batch_size, chat_template, system, meter)
        results = lm_eval.evaluator.evaluate(
            lm=bridge, task_dict=loaded, bootstrap_iters=0, log_samples=True, apply_chat_template=chat_template
        )
    common = {
        "lm_eval": metadata.version("lm_eval"),
        "limit": limit,
        "batch_size": batch_size,
        "seed": seed,
        "num_fewshot": 0,
        "chat_template": template_hash(tokenizer) if chat_template else None,
        "max_length": bridge.max_length,
        "stop_token_ids": sorted(bridge.endings.token_ids),
    }
    return {
        suite.name: collect_scores(suite, questions[suite.name], results, bridge.answers, common, bridge.cut_choices)
        for suite in suites
    }


def _check(
    tasks: Sequence[str],
    data: Mapping[str, str],
    limit: int | None,
    batch_size: int,
    max_new_tokens: int | None,
    chat_template: bool,
    tokenizer: Any,
) -> None:
    if isinstance(tasks, str) or not tasks:
        raise ConfigError(f"found tasks={tasks!r}, expected a list with at least one suite")
    for name in data:
        if name not in tasks:
            raise ConfigError(f"found data for {name!r}, which is not among the tasks {', '.join(tasks)}; leave it out")
    for key, value in {"limit": limit, "batch_size": batch_size, "max_new_tokens": max_new_tokens}.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"found {key}={value!r}, expected a whole number of at least 1")
    if chat_template and template_hash(tokenizer) == "none":
        raise ConfigError(
            "the tokenizer has no chat template; pass chat_template=False to give the prompts as plain text"
        )


def _import_harness() -> Any:
    try:
        for name in ("evaluator", "tasks", "models.huggingface", "api.task"):
            importlib.import_module(f"lm_eval.{name}")
    except ImportError as error:
        raise ConfigError(
            f"lm-evaluation-harness cannot be imported ({error}). Install it with: pip install loragate[eval]"
        ) from error
    return importlib.import_module("lm_eval")


def _requests(row: Mapping[str, Any]) -> int:
    return len(row["choices"]["text"]) if "choices" in row else 1


def _write_tasks(suite: Suite, questions: Questions, folder: Path, harness_tasks: Path) -> None:
    """Write rows and task files of one suite into `folder`, and its group where it has subsets."""
    members = list(dict.fromkeys(item.subset for item in questions.items))
    for subset in members:
        name = task_name(suite, subset)
        lines = [
            json.dumps({**item.row, INDEX: index}, ensure_ascii=False)
            for index, item in enumerate(questions.items)
            if item.subset == subset
        ]
        write_text(folder / "rows" / f"{name}.jsonl", "\n".join(lines) + "\n")
        override = copy.deepcopy(suite.override)
        if suite.max_new_tokens is not None:
            override["generation_kwargs"]["max_gen_toks"] = suite.max_new_tokens
        task = {
            "include": str(harness_tasks / suite.harness_files.format(subset=subset.replace(" ", "_"))),
            "task": name,
            "num_fewshot": 0,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": {"test": str(folder / "rows" / f"{name}.jsonl")},
                "cache_dir": str(folder / "cache"),
            },
            "test_split": "test",
            **override,
        }
        write_text(folder / "tasks" / f"{name}.yaml", yaml.safe_dump(task, sort_keys=False))
    if members != [""]:
        metric = suite.metric.split(",")[0]
        filters = [each.split(",")[1] for each in (suite.metric, *suite.also)]
        weighted = {"metric": metric, "aggregation": "mean", "weight_by_size": True, "filter_list": filters}
        group = {
            "group": task_name(suite, ""),
            "task": [task_name(suite, subset) for subset in members],
            "aggregate_metric_list": [weighted],
        }
        write_text(folder / "tasks" / f"{task_name(suite, '')}.yaml", yaml.safe_dump(group, sort_keys=False))


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


class _Meter:
    """Counts requests and reports them."""

    def __init__(self, on_progress: OnProgress | None, total: int) -> None:
        self.on_progress, self.total, self.done = on_progress, total, 0

    def advance(self, count: int) -> None:
        self.reach(self.done + count)

    def reach(self, done: int) -> None:
        if done > self.done:
            self.done = min(done, self.total)
            if self.on_progress is not None:
                self.on_progress(self.done, self.total)


def _bridge(model: Any, tokenizer: Any, batch_size: int, chat_template: bool, system: str, meter: _Meter) -> Any:
    """The harness's model over ours: its log-likelihoods, our answers and our chat rendering."""
    import torch
    from lm_eval.models.huggingface import HFLM

    class Bridge(HFLM):
        def __init__(self) -> None:
            # a copy, as the harness sets a padding token; fp32, as bf16 log-probabilities would decide close choices
            super().__init__(
                pretrained=model,
                tokenizer=copy.deepcopy(tokenizer),
                backend="causal",
                batch_size=batch_size,
                softmax_dtype=torch.float32,
            )
            self.endings = find_endings(tokenizer, model.generation_config)
            self.answers: dict[tuple[str, int], Answer] = {}
            self.cut_choices = 0
            self._chat = Chat(tokenizer, system)

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            first, *rest = chat_history
            if first["role"] == "system" and rest:
                chat_history = [{**rest[0], "content": first["content"] + rest[0]["content"]}, *rest[1:]]
            return self._chat.render(chat_history, generation_prompt=add_generation_prompt)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
            # a rendered conversation holds its special tokens already
            add = False if chat_template else add_special_tokens
            return super().tok_encode(string, add_special_tokens=add, **options)

        def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
            groups: dict[str, list[Any]] = {}
            for request in requests:
                groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(request)
            for key, members in groups.items():
                wanted = json.loads(key)
                answers = greedy_answers(
                    model,
                    self.tokenizer,
                    [self.tok_encode(request.args[0]) for request in members],
                    stops=[*wanted["until"], *self.endings.texts],
                    stop_ids=self.endings.token_ids,
                    max_new_tokens=wanted["max_gen_toks"],
                    max_length=self.max_length,
                    batch_size=batch_size,
                    on_batch=meter.advance,
                )
                self.answers |= {(r.task_name, r.doc[INDEX]): a for r, a in zip(members, answers)}
            return [self.answers[request.task_name, request.doc[INDEX]].text for request in requests]

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
            start = meter.done
            results = super().loglikelihood(requests, disable_tqdm=True)
            meter.reach(start + len(requests))  # options of one token share a forward pass
            return results

        def _loglikelihood_tokens(self, requests: list[Any], **options: Any) -> list[tuple[float, bool]]:
            self.cut_choices += sum(len(before) + len(after) > self.max_length + 1 for _, before, after in requests)
            for (_, continuation), _, ids in requests:
                if not ids:
                    raise DataError(
                        f"the tokenizer makes no token of the option {continuation!r:.60}, so its likelihood is not defined; "
                        "leave this task out for this model"
                    )
            return super()._loglikelihood_tokens(requests, **options)

        def _model_call(self, inps: Any, *rest: Any, **options: Any) -> Any:
            logits = super()._model_call(inps, *rest, **options)
            meter.advance(len(inps))
            return logits

    return Bridge()


@contextlib.contextmanager
def _modes_restored(model: Any) -> Iterator[None]:
    """Undo the evaluation mode that the harness puts every module in."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


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
