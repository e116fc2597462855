"""What a command that scores models needs: which tasks on which files, and a loaded model with its tokenizer and names.

Shared by `eval` and by every later command that evaluates.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loragate.cli.arguments import comma_list
from loragate.cli.options import AnswerOptions, GradingOptions, ModelOptions, OutputOptions
from loragate.display import quiet_logging
from loragate.errors import ConfigError, nearest
from loragate.training.preflight import check_loading

if TYPE_CHECKING:
    from loragate.models import Loaded


@dataclass(frozen=True)
class EvaluationInputs(ModelOptions, AnswerOptions, GradingOptions, OutputOptions):
    """Settings shared by commands that evaluate.

    Attributes:
        suite: math, retention, code, arithmetic, tiny or all.
        tasks: tasks by name, or your own task files, separated by commas; instead of a suite, or in addition to it.
        data: local files in place of hub data sets: TASK=FILE separated by commas, or a folder that holds TASK.jsonl files.
        revision: commits of hub data sets: TASK=COMMIT separated by commas.
        limit: first questions of each task only.
        samples: samples per question, in place of the task's own.
        temperature: sampling temperature, in place of the task's own.
        max_new_tokens: token limit of an answer, in place of the task's own.
        seed: seed of sampling, and of generated questions.
        base: where the base model is, instead of the recorded one.
    """

    suite: str = ""
    tasks: str = ""
    data: str = ""
    revision: str = ""
    limit: int | None = None
    samples: int | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None
    seed: int = 0
    base: str = ""


def load_inputs(options: Any, name: str, engine: str = "transformers") -> Loaded:
    """The model and tokenizer of `--model`; its plain adapter where the gates are off.

    Raises:
        ConfigError: for a place that holds no model, or gates where the engine knows none.
    """
    from loragate.models import open_model, open_without_weights, resolve

    how = check_loading(options)
    quiet_logging()
    place = resolve(name, options.base)
    if engine != "vllm":
        return open_model(place, how).without_idle_gates()
    from loragate.generation.vllm_engine import require_gate_plugin
    from loragate.serving.vllm_server import require_served

    loaded = open_without_weights(place, how).without_idle_gates()
    if loaded.kind == "gated":
        require_gate_plugin(loaded.names["gated"])
    require_served(loaded.names["base"], loaded.config)
    return loaded


def why_not(loaded: Loaded, variant: Any) -> str:
    """Why the model cannot be this row, in a few words; empty where it can."""
    if variant.constant is None and variant.random is None:
        return ""
    if loaded.place.is_dora:
        return "DoRA"
    if loaded.model is not None:
        return ""
    if variant.random is not None:
        return "vLLM serves no random gates"
    from loragate.generation.vllm_engine import require_gate_plugin

    try:
        require_gate_plugin(loaded.names["adapter"])
    except ConfigError:
        return "this vLLM serves no gates"
    return ""


def chosen_tasks(options: Any) -> list[Any]:
    """The tasks of `--suite` and `--tasks`, each once.

    Raises:
        ConfigError: if neither is given, or two files define a task of one name.
    """
    from loragate.evaluation.tasks import load_task, suite, task_names

    if not options.suite and not options.tasks:
        raise ConfigError(
            "say what to evaluate: --suite math, retention, code, arithmetic, tiny or all; or --tasks NAME,FILE.yaml with "
            f"any of {', '.join(task_names())}"
        )
    tasks = list(suite(options.suite)) if options.suite else []
    for name in comma_list(options.tasks):
        task = load_task(name)
        same = [other for other in tasks if other.name == task.name]
        if same and same[0].fingerprint != task.fingerprint:
            raise ConfigError(f"--tasks {name}: a task called {task.name} is in the list already; rename one of them")
        tasks += [] if same else [task]
    for task in tasks:
        built_in = task.name in task_names() and load_task(task.name).fingerprint == task.fingerprint
        if task.engine != "loragate" and not built_in:
            raise ConfigError(
                f"{task.path}: tasks with engine: lm-eval are built in, as their rows are checked here; leave the engine out "
                "and name an extractor and a grader"
            )
    return tasks


def assignments(text: str, flag: str, known: list[str]) -> dict[str, str]:
    """{task: value} of "TASK=VALUE,TASK=VALUE".

    Raises:
        ConfigError: for anything else, or a task that is not evaluated.
    """
    found: dict[str, str] = {}
    for part in comma_list(text):
        name, sign, value = part.partition("=")
        if not sign or not value:
            raise ConfigError(f"{flag} {part}: expected TASK=VALUE")
        if name not in known:
            raise ConfigError(
                f"{flag} {part}: {name} is not among the tasks{nearest(name, known)} ({', '.join(known)})"
            )
        found[name] = value
    return found


def files_of(options: Any, tasks: list[Any]) -> dict[str, str]:
    """Local files by task, from `--data`."""
    names = [task.name for task in tasks]
    if options.data and "=" not in options.data:
        folder = Path(options.data)
        if folder.is_file() and len(tasks) == 1:
            return {names[0]: options.data}
        if not folder.is_dir():
            raise ConfigError(f"--data {options.data}: expected TASK=FILE, or a folder that holds TASK.jsonl files")
        found = {name: options.data for name in names if _files_in(folder, name)}
        if not found:
            raise ConfigError(
                f"--data {options.data}: the folder holds a file of none of the tasks; expected {names[0]}.jsonl, .json or "
                ".parquet, and so on"
            )
        return found
    return assignments(options.data, "--data", names)


def local_file(path: str, task: str) -> str:
    """The file of a task where a folder was given."""
    inside = _files_in(Path(path), task) if Path(path).is_dir() else []
    return str(inside[0]) if inside else path


def _files_in(folder: Path, task: str) -> list[Path]:
    """The task's own files, or its folder of subsets, in a folder of data."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.name.split(".")[0] == task and (path.is_dir() or path.suffix in (".jsonl", ".json", ".parquet", ".gz"))
    ]


def commits_of(options: Any, tasks: list[Any]) -> dict[str, str]:
    """{task: commit} of `--revision`."""
    return assignments(options.revision, "--revision", [task.name for task in tasks])


def own_questions(options: Any, tasks: list[Any]) -> list[tuple[Any, Any]]:
    """(task, its questions) of the tasks that we ask ourselves."""
    from loragate.evaluation.tasks import load_questions

    files, commits = files_of(options, tasks), commits_of(options, tasks)
    return [
        (task, load_questions(task, files.get(task.name), options.limit, options.seed, commits.get(task.name)))
        for task in tasks
        if task.engine == "loragate"
    ]


def harness_questions(options: Any, tasks: list[Any]) -> dict[str, dict[str, Any]]:
    """{suite: what it is asked} of the tasks that the harness asks, their rows read and checked."""
    from loragate.evaluation.retention import describe_suite

    files, commits = files_of(options, tasks), commits_of(options, tasks)
    return {
        task.name: describe_suite(
            task.name,
            local_file(files[task.name], task.name) if task.name in files else None,
            options.limit,
            options.max_new_tokens,
            commits.get(task.name),
        )
        for task in tasks
        if task.engine != "loragate"
    }


def prepare_tasks(options: Any, loaded: Loaded, tasks: list[Any]) -> list[Any]:
    """The tasks that we ask ourselves, with questions and rendered prompts."""
    from loragate.evaluation.prepared import prepare

    prepared = []
    for task, questions in own_questions(options, tasks):
        prepared.append(
            prepare(
                task,
                questions,
                loaded.tokenizer,
                seed=options.seed,
                positions=loaded.positions,
                samples=options.samples,
                temperature=options.temperature,
                max_new_tokens=options.max_new_tokens,
                system=options.system,
            )
        )
    return prepared
