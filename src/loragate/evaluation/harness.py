"""The bridge to lm-evaluation-harness: retention suites on any of our engines, with scores that can be paired.

The harness supplies prompts, filters and metrics; this room supplies checked rows (`harness_rows.py`), an engine's answers
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
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from loragate.data import Chat, template_hash
from loragate.errors import ConfigError, DataError
from loragate.evaluation.harness_answers import Answer, greedy_answers
from loragate.evaluation.harness_rows import INDEX, Questions, Suite, load_questions, load_suite, task_name
from loragate.evaluation.harness_scores import HarnessScores, collect_scores
from loragate.files import write_text
from loragate.generation import ScoringEngine

OnProgress = Callable[[int, int], None]


def run_harness(
    engine: ScoringEngine,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    positions: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    data: Mapping[str, str] | None = None,
    revisions: Mapping[str, str] | None = None,
    max_new_tokens: int | None = None,
    chat_template: bool = True,
    system: str = "none",
    on_progress: OnProgress | None = None,
) -> dict[str, HarnessScores]:
    """Run retention suites zero-shot on an engine: its greedy answers and its log-likelihoods.

    Args:
        tasks: suites, such as "mmlu_pro", "bbh", "openbookqa" (see `suite_names`).
        positions: of the model, prompt and answer together; None where it has no limit.
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
    _check(tasks, data, limit, max_new_tokens, chat_template, tokenizer)
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
        for suite in suites:
            _write_tasks(suite, questions[suite.name], folder, Path(lm_eval.tasks.__file__).parent)
        with contextlib.redirect_stderr(io.StringIO()):
            manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
            loaded = manager.load([task_name(suite, "") for suite in suites])
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(seed)
            _guard_filters(task)
        bridge = _bridge(engine, tokenizer, positions, chat_template, system, meter)
        results = lm_eval.evaluator.evaluate(
            lm=bridge, task_dict=loaded, bootstrap_iters=0, log_samples=True, apply_chat_template=chat_template
        )
    ends = getattr(engine, "endings", None)  # replicas have theirs where they are
    common = {
        "lm_eval": metadata.version("lm_eval"),
        "limit": limit,
        "seed": seed,
        "num_fewshot": 0,
        "chat_template": template_hash(tokenizer) if chat_template else None,
        "max_length": positions,
        "stop_token_ids": None if ends is None else sorted(ends.token_ids),
    }
    return {
        suite.name: collect_scores(suite, questions[suite.name], results, bridge.answers, common, bridge.cut_choices)
        for suite in suites
    }


def _check(
    tasks: Sequence[str],
    data: Mapping[str, str],
    limit: int | None,
    max_new_tokens: int | None,
    chat_template: bool,
    tokenizer: Any,
) -> None:
    if isinstance(tasks, str) or not tasks:
        raise ConfigError(f"found tasks={tasks!r}, expected a list with at least one suite")
    for name in data:
        if name not in tasks:
            raise ConfigError(f"found data for {name!r}, which is not among the tasks {', '.join(tasks)}; leave it out")
    for key, value in {"limit": limit, "max_new_tokens": max_new_tokens}.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"found {key}={value!r}, expected a whole number of at least 1")
    if chat_template and template_hash(tokenizer) == "none":
        raise ConfigError(
            "the tokenizer has no chat template; pass chat_template=False to give the prompts as plain text"
        )


def _import_harness() -> Any:
    try:
        for name in ("evaluator", "tasks", "api.model", "api.task"):
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

    def part(self) -> OnProgress:
        """The progress of the requests that come next."""
        before = self.done

        def reach(done: int, _: int) -> None:
            self.done = min(before + done, self.total)
            if self.on_progress is not None:
                self.on_progress(self.done, self.total)

        return reach


def _bridge(
    engine: ScoringEngine, tokenizer: Any, positions: int | None, chat_template: bool, system: str, meter: _Meter
) -> Any:
    """The harness's model over an engine: its answers, its log-likelihoods and our chat rendering."""
    from lm_eval.api.model import TemplateLM

    class Bridge(TemplateLM):
        def __init__(self) -> None:
            super().__init__()
            self.tokenizer = tokenizer
            self.answers: dict[tuple[str, int], Answer] = {}
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
            groups: dict[str, list[Any]] = {}
            for request in requests:
                groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(request)
            for key, members in groups.items():
                wanted = json.loads(key)
                answers = greedy_answers(
                    engine,
                    [self.tok_encode(request.args[0]) for request in members],
                    stops=wanted["until"],
                    max_new_tokens=wanted["max_gen_toks"],
                    positions=positions,
                    on_progress=meter.part(),
                )
                self.answers |= {(r.task_name, r.doc[INDEX]): a for r, a in zip(members, answers)}
            return [self.answers[request.task_name, request.doc[INDEX]].text for request in requests]

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
            return engine.log_likelihoods(pairs, meter.part())

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
