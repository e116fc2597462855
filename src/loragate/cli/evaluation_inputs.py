"""What a command that scores models needs: which tasks on which files, and a loaded model with its tokenizer and names.

Shared by `eval` and by every later command that evaluates.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate.cli.arguments import comma_list
from loragate.cli.hub import on_disk
from loragate.cli.models import (
    adapter_record,
    load_tokenizer,
    quiet_logging,
    require_not_an_adapter,
    require_place,
    revision_for,
)
from loragate.cli.options import ModelOptions
from loragate.cli.places import is_gated
from loragate.cli.quantization import check_quantization
from loragate.errors import ConfigError, nearest


@dataclass(frozen=True)
class EvaluationInputs(ModelOptions):
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


@dataclass
class Loaded:
    """A model to be scored.

    Attributes:
        kind: "base", "adapter" or "gated".
        tokenizer: with its chat template.
        names: {"base": …, "adapter": …, "gated": …} for the record.
        model: in memory; None where vLLM loads it itself.
        dtype: of the base.
        positions: positions of the model; None where it has no limit.
        stop_token_ids: recorded by the gated folder, where vLLM loads the model; in memory its generation config has them.
        commit: of the base on the hub; empty for a folder, and where the hub cache does not tell.
        note: what a person must know about what was loaded; empty mostly.
    """

    kind: Any
    tokenizer: Any
    names: dict[str, str]
    model: Any = None
    dtype: str = ""
    positions: int | None = None
    note: str = ""
    commit: str = ""
    stop_token_ids: tuple[int, ...] = ()

    @property
    def endings(self) -> Any:
        """What ends an answer, whichever row gives it."""
        from loragate.data import find_endings

        if self.model is not None:
            return find_endings(self.tokenizer, self.model.generation_config)
        from loragate.generation.vllm_engine import base_generation_config

        settings = base_generation_config(self.names["base"], self.commit or None)
        return find_endings(self.tokenizer, settings, self.stop_token_ids)

    @property
    def told_endings(self) -> dict[str, Any]:
        """What an evaluation records of them: {} where the chat template adds no end to those that are declared."""
        added = self.endings.added
        return {"end_of_turn": added} if added else {}

    @property
    def sources(self) -> dict[str, str]:
        """`names`, with the commit of what came from the hub."""
        from loragate.gates.hub import hub_source

        found = {kind: hub_source(name) for kind, name in self.names.items()}
        return {**found, "base": f"{found['base']}@{self.commit}"} if self.commit else found

    @property
    def is_dora(self) -> bool:
        """Whether the adapter is DoRA: it takes no gates, and vLLM serves it merged into its base."""
        return self.kind == "adapter" and bool(getattr(adapter_record(self.names["adapter"]), "use_dora", False))

    def why_not(self, variant: Any) -> str:
        """Why the model cannot be this row, in a few words; empty where it can."""
        if variant.constant is None and variant.random is None:
            return ""
        if self.is_dora:
            return "DoRA"
        if self.model is not None:
            return ""
        if variant.random is not None:
            return "vLLM serves no random gates"
        from loragate.generation.vllm_engine import require_gate_plugin

        try:
            require_gate_plugin(self.names["adapter"])
        except ConfigError:
            return "this vLLM serves no gates"
        return ""


def load_inputs(options: Any, name: str, engine: str = "transformers") -> Loaded:
    """The model and tokenizer of `--model`.

    Raises:
        ConfigError: for a place that holds no model, or gates where the engine knows none.
    """
    check_quantization(options_with(options, name, engine))
    quiet_logging()
    name = on_disk(name)
    note = gates_are_off(name)
    if engine == "vllm":
        return _for_vllm(options, name, note)
    from loragate.cli.generate import load_any
    from loragate.gates.quantised import quantization_of

    model, tokenizer, gated = load_any(options_with(options, name))
    if gated and note:
        from loragate.gates import detach_gates

        model, gated = detach_gates(model), False
        name = str(Path(name) / "adapter")
    kind = "gated" if gated else "adapter" if hasattr(model, "peft_config") else "base"
    names = {"base": model.config._name_or_path or name}
    if kind != "base":
        names["adapter"] = str(Path(name) / "adapter") if kind == "gated" else name
    if kind == "gated":
        names["gated"] = name
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    dtype, stored = str(model.dtype).removeprefix("torch."), quantization_of(model)
    dtype = dtype if stored == "none" else f"{dtype}, {stored}"
    commit = _commit_of_base(names["base"], revision_for(name, options.base))
    return Loaded(kind, tokenizer, names, model, dtype, positions, note, commit)


def gates_are_off(name: str) -> str:
    """Why a gated folder holds the plain adapter, as one sentence; empty for anything else.

    Where calibration kept the adapter, or was left without evidence, the folder's gates are zero. Scoring them as a row
    of their own would compare the adapter with itself.
    """
    from loragate.gates.schema import read_gate_config, read_tensors

    folder = Path(name)
    if not is_gated(folder):
        return ""
    record = read_gate_config(folder)
    selection = record.get("selection")
    if not isinstance(selection, dict) or selection.get("accepted") is not False:
        return ""
    if any(bool(values.any()) for values in read_tensors(folder, record).values()):
        return ""  # whatever the record says, these gates act
    why = selection.get("reason") or "nothing beat the adapter on the probe when the range was chosen"
    return f"the gates of {name} are off: {why}. It answers as the plain adapter that it is"


def options_with(options: Any, name: str, served_by: str = "transformers") -> Any:
    """The fields that loading needs, with another model name."""

    class View:
        model, engine = name, served_by
        base, device, dtype = options.base, options.device, options.dtype
        chat_template, trust_remote_code = options.chat_template, options.trust_remote_code
        quantization = getattr(options, "quantization", "none")

    return View


def _commit_of_base(base: str, revision: str) -> str:
    """The commit of the base that was loaded just now; empty for a folder."""
    from loragate.gates.hub import cached_commit, is_hub_id

    return (cached_commit(base, revision or None) or revision) if is_hub_id(base) else ""


def _for_vllm(options: Any, name: str, note: str) -> Loaded:
    from transformers import AutoConfig

    from loragate.gates.hub import split_base
    from loragate.generation.vllm_engine import has_gates, require_gate_plugin
    from loragate.serving.vllm_server import require_served

    require_place("model", name)
    revision = revision_for(name, options.base)
    recorded, gated, stops = "", {}, ()
    if has_gates(name):
        from loragate.gates.schema import read_gate_config

        record = read_gate_config(Path(name))
        recorded, stops = str(record["base"]["id"]), tuple(record.get("stop_token_ids") or ())
        if not note:
            require_gate_plugin(name)
            gated = {"gated": name}
        name = str(Path(name) / "adapter")
    folder = Path(name)
    if (folder / "adapter_config.json").is_file() or options.base:
        base = split_base(options.base or recorded or adapter_record(name).base_model_name_or_path)[0]
        kind, names = "gated" if gated else "adapter", {"base": base, "adapter": name, **gated}
        places = [f"{name}/tokenizer", name, base]
    else:
        require_not_an_adapter(name)
        base = split_base(name)[0]
        kind, names, places = "base", {"base": base}, [base]
    config = AutoConfig.from_pretrained(base, revision=revision or None, trust_remote_code=options.trust_remote_code)
    require_served(base, config)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    tokenizer = load_tokenizer(
        places, revision=revision, chat_template=options.chat_template, trust=options.trust_remote_code
    )
    commit = _commit_of_base(base, revision)
    return Loaded(kind, tokenizer, names, None, options.dtype, positions, note, commit, stops)


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
