"""What is evaluated: tasks by name, their questions rendered for one model, the file of them that makes grading repeatable, and
the `Request` for all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loragate.data import describe_form, is_same_form
from loragate.data.rows import is_saved
from loragate.display import format_temperature, pluralize
from loragate.errors import ConfigError, DataError, nearest
from loragate.evaluation.grader_checks import check_references
from loragate.evaluation.judging import CODE_GRADERS, grader_version, require_graders, resolve_grader
from loragate.evaluation.lm_eval_tasks import add_harness_prompts, encode_options
from loragate.evaluation.results import TaskInfo
from loragate.evaluation.settings import EngineSettings, GradingSettings, TaskSettings
from loragate.evaluation.tasks import (
    Question,
    Questions,
    Task,
    load_questions,
    load_task,
    suite,
    task_names,
)
from loragate.evaluation.tasks.questions import files_in, render_questions
from loragate.evaluation.variants import ModelVariant, control_temperatures
from loragate.files import RunFolder, require_empty_folder, write_text
from loragate.gates.recommended import form_note, sampling_note
from loragate.generation import SamplingConfig
from loragate.generation.engine import Continuation
from loragate.generation.sharded import require_ray
from loragate.generation.vllm_engine import require_vllm
from loragate.models import Loaded
from loragate.records import read_lines
from loragate.validate import comma_list, validate


def select_tasks(settings: TaskSettings) -> list[Task]:
    """The tasks of `suite` and `tasks`, each once.

    Raises:
        ConfigError: if neither is given, or two files define a task of one name.
    """
    if not settings.suite and not settings.tasks:
        raise ConfigError(
            "say what to evaluate: --suite math, retention, code, arithmetic, tiny, tiny_retention or all; or "
            f"--tasks NAME,FILE.yaml with any of {', '.join(task_names())}"
        )
    tasks = suite(settings.suite) if settings.suite else []
    for name in comma_list(settings.tasks):
        task = load_task(name)
        same = [other for other in tasks if other.name == task.name]
        if same and same[0].fingerprint != task.fingerprint:
            raise ConfigError(f"--tasks {name}: a task called {task.name} is in the list already; rename one of them")
        tasks += [] if same else [task]
    for task in tasks:
        if task.harness is None:
            continue
        if task.name not in task_names() or load_task(task.name).fingerprint != task.fingerprint:
            raise ConfigError(
                f"{task.path}: tasks with grader: lm-eval are built in, as their rows are checked here; name another grader"
            )
    return tasks


def questions_of(settings: TaskSettings, task: Task, tasks: Sequence[Task]) -> Questions:
    """The questions of one of `tasks`, from the file that the settings name for it.

    Raises:
        ConfigError: for a file of no task.
        DataError: for rows that cannot be read or used.
    """
    file = _files(settings.data, [one.name for one in tasks]).get(task.name)
    return load_questions(task, file, settings.limit, settings.seed)


def _files(data: str, names: list[str]) -> dict[str, str]:
    """Local files by task, from `--data`: one file, a folder, or "TASK=FILE,TASK=FILE"."""
    folder, found = Path(data), dict[str, str]()
    if not data:
        return found
    if "=" in data:
        for part in comma_list(data):
            name, _, found[name] = part.partition("=")
            if not found[name]:
                raise ConfigError(f"--data {part}: expected TASK=FILE")
            if name not in names:
                near = nearest(name, names)
                raise ConfigError(f"--data {part}: {name} is not among the tasks{near} ({', '.join(names)})")
    elif (folder.is_file() or is_saved(folder)) and len(names) == 1:
        found = {names[0]: data}
    elif not folder.is_dir():
        raise ConfigError(f"--data {data}: expected TASK=FILE, or a folder that holds TASK.jsonl files")
    else:
        found = {name: data for name in names if files_in(folder, name)}
        if not found:
            raise ConfigError(
                f"--data {data}: the folder holds a file of none of the tasks; expected {names[0]}.jsonl, .json, .csv or "
                ".parquet, and so on"
            )
    return found


@dataclass(frozen=True, kw_only=True)
class PreparedTask(Questions):
    """The questions of a task, rendered for one model and limited to what it can hold: `prompt` of each is the rendered text.

    Attributes:
        task: as loaded.
        sampling: the task's, after overrides.
        option_pairs: of each question, (prompt, option) as token ids for every option; empty where nothing is compared by
            likelihood.
    """

    task: Task
    sampling: SamplingConfig
    option_pairs: tuple[tuple[Continuation, ...], ...] = ()

    @property
    def prompts(self) -> tuple[str, ...]:
        """The rendered prompts, in the order of the questions."""
        return tuple(question.prompt for question in self.questions)

    def info(self, grader: str = "", pattern: str = "") -> TaskInfo:
        """What the task is, judged by `grader`, for records; before that is known it names the task's own.

        Args:
            pattern: of the grader regex.
        """
        detail = self.task.harness.metric if self.task.harness else pattern
        return TaskInfo(
            name=self.task.name,
            version=str(self.task.version),
            fingerprint=self.fingerprint,
            # over the rendered prompts in their order, chat template included
            prompt_sha256=hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest(),
            dataset=self.source,
            dataset_revision=self.revision,
            grader=f"{grader} {detail}" if grader and detail else grader or self.task.grader,
            grader_version=grader_version(grader) if grader else "",
            sampling=self.sampling,
        )

    def count_samples(self, variant: ModelVariant) -> int:
        """How many answers a variant gives to the task; a suite of the harness has no controls."""
        if self.task.harness is not None and variant.control is not None:
            return 0
        return len(self.questions) * variant.sampling(self.sampling).samples

    def strata(self) -> list[np.ndarray]:
        """Places of the questions that count the same in the score of the task's suite: all of them, or those of each subset."""
        subsets = np.array([question.subset for question in self.questions])
        if self.task.harness is None or self.task.harness.average == "questions":
            return [np.arange(len(subsets))]
        return [np.flatnonzero(subsets == one) for one in dict.fromkeys(subsets)]


def prepare(
    task: Task,
    questions: Questions,
    tokenizer: Any,
    settings: TaskSettings,
    positions: int | None = None,
    system: str = "none",
) -> PreparedTask:
    """Render a task's prompts and settle how its answers are sampled.

    Args:
        settings: their samples, highest temperature and token limit stand in place of the task's own, but suites of the harness
            are answered greedily.
        positions: of the model; answers to prompts that leave fewer than the token limit get what is left, with a warning.
            A prompt of the harness is cut at its beginning where it would leave less than a quarter of them, or where an
            option of it that is compared would not fit.
        system: as of `render_questions`.

    Raises:
        ConfigError: for settings that cannot be used, such as several greedy samples.
        DataError: if a prompt leaves no room for an answer.
    """
    own, is_harness, given = task.generation, task.harness is not None, questions.questions
    if is_harness:
        given = add_harness_prompts(task, given, tokenizer.chat_template is not None)
    prompts, warnings = render_questions(task, given, tokenizer, system), list(questions.warnings)
    by_likelihood = any(one.options for one in given)  # then nothing is generated
    limit = own.max_new_tokens if by_likelihood else settings.max_new_tokens or own.max_new_tokens
    compared: tuple[tuple[Continuation, ...], ...] = ()
    cut, room_left = 0, list[int]()
    if repeats := len(given) - len({(one.prompt, one.gold, one.options) for one in given}):
        warnings.append(
            f"{task.name}: {repeats} of {len(given)} questions repeat another (same prompt and gold): intervals count each as "
            "one, so they are too narrow; leave the repeats out"
        )
    if by_likelihood:
        compared, cut = encode_options(tokenizer, prompts, given, positions)
    elif positions is not None:
        token_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
        if is_harness:
            most = positions - min(limit, max(1, positions // 4))  # tokens of a prompt
            long = [index for index, ids in enumerate(token_ids) if len(ids) > most]
            for index in long:
                # the end stays: it holds the question itself, and what makes the model answer
                token_ids[index] = token_ids[index][-most:]
                prompts[index] = tokenizer.decode(token_ids[index], clean_up_tokenization_spaces=False)
            cut = len(long)
        lengths = list(map(len, token_ids))
        if max(lengths) >= positions:
            place = given[lengths.index(max(lengths))].place
            raise DataError(f"{place}: the prompt has {max(lengths)} tokens, the model only {positions} positions")
        room_left = [positions - length for length in lengths if length + limit > positions]
    if cut:
        warnings.append(
            f"{task.name}: {pluralize(cut, 'prompt')} {'was' if cut == 1 else 'were'} cut at the beginning: longer than the "
            "model's positions allow"
        )
    if room_left:
        warnings.append(
            f"{task.name}: the prompts of {len(room_left)} of {len(prompts)} questions leave fewer than {limit} tokens of the "
            f"model's {positions} positions; their answers end there, the shortest after {min(room_left)} tokens"
        )
    temperature = own.temperature if is_harness else [*settings.temperatures, own.temperature][0]
    sampling = SamplingConfig(
        temperature=temperature,
        top_p=own.top_p,
        max_new_tokens=limit,
        # greedy decoding draws one answer; where several are wanted, SamplingConfig refuses them
        samples=(not is_harness and settings.samples) or (1 if temperature == 0 else own.samples),
        seed=settings.seed,
        stop=own.stop,
    )
    return PreparedTask(
        [replace(one, prompt=prompt) for one, prompt in zip(given, prompts, strict=True)],
        questions.source,
        questions.revision,
        questions.fingerprint,
        tuple(warnings),
        task=task,
        sampling=sampling,
        option_pairs=compared,
    )


def number_distinct_questions(tasks: Sequence[PreparedTask]) -> list[list[int]]:
    """Of each task a number for every question, the same where tasks ask the same one.

    One question has one prompt or row. The tests and columns of programs differ between editions of a set (HumanEval+, sanitized
    MBPP), and their ids do not; ids of other sets are often but places.
    """
    known: dict[str, int] = {}
    found = []
    for one in tasks:
        numbers = []
        for question in one.questions:
            keys = [f"prompt {question.prompt}", f"row {json.dumps(question.row, default=str)}"]
            keys += [f"id {one.task.grader} {question.id}"] if one.task.grader in CODE_GRADERS else []
            numbers.append(next((known[key] for key in keys if key in known), len(known)))
            known.update(dict.fromkeys(keys, numbers[-1]))
        found.append(numbers)
    return found


def write_questions(folder: Path, prepared: PreparedTask) -> None:
    """Write down the questions, so that samples can be judged again without the data set or the tokenizer."""
    lines = []
    for question in prepared.questions:
        record = asdict(question)
        del record["place"]
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
    remedy = "run the evaluation again"
    return [
        replace(validate(Question, row, where, DataError, remedy), place=where)
        for where, row in read_lines(path, remedy)
    ]


@dataclass(frozen=True)
class Request:
    """What an evaluation is asked for; refused where it could not be judged, before anything is loaded.

    Attributes:
        model: gated folder, adapter or base, or a hub id.
        out: folder of the evaluation; new or empty, or that of the evaluation to resume.
        tasks: which tasks, on which examples.
        engine: what answers.
        grading: how answers are judged.
        base: where the base is, instead of the recorded one.
        system: "none" leaves out a system message that the template would slip in, "keep" leaves the template alone.
        resume: whether the folder holds an evaluation that goes on.
    """

    model: str
    out: Path
    tasks: TaskSettings
    engine: EngineSettings = field(default_factory=EngineSettings)
    grading: GradingSettings = field(default_factory=GradingSettings)
    base: str = ""
    system: str = "none"
    resume: bool = False

    def check(self) -> list[Task]:
        """The tasks, after all that can be refused before a model is loaded.

        Raises:
            ConfigError: for a folder that is not free, unknown tasks, and graders, sandboxes or engines that do not work here.
        """
        require_run_folder(self.out, self.resume)
        tasks = select_tasks(self.tasks)
        require_graders(tasks, self.grading)
        if self.engine.engine == "vllm":
            require_vllm()
        if self.engine.replicas > 1:
            require_ray()
        own_sampling = bool(self.tasks.temperatures) or self.tasks.samples is not None
        if own_sampling and all(task.harness for task in tasks):
            names = ", ".join(task.name for task in tasks)
            raise ConfigError(
                f"--samples and --temperature have no effect: {names} are answered greedily, or not generated at all"
            )
        return tasks

    def prepare(self, tasks: Sequence[Task], loaded: Loaded) -> list[PreparedTask]:
        """The questions of the tasks that `check` returned, rendered for a model, after their grader was tried on right answers.

        Raises as `questions_of`, `check_references` and `prepare`.
        """
        found = []
        for task in tasks:
            questions = questions_of(self.tasks, task, tasks)
            grader = resolve_grader(task, self.grading.grader)
            said = check_references(task, questions.questions, grader, self.grading)
            questions = replace(questions, warnings=(*questions.warnings, *said))
            found.append(prepare(task, questions, loaded.tokenizer, self.tasks, loaded.max_positions, self.system))
        return found

    def added_temperatures(
        self, prepared: Sequence[PreparedTask], loaded: Loaded, controls: str = "none"
    ) -> list[float]:
        """The temperatures at which every variant is scored beside that of the tasks: those given, or those of the controls and
        what the folder recommends.
        """
        if self.tasks.temperatures:
            return self.tasks.temperatures[1:]
        own = {one.sampling.temperature for one in prepared if one.task.harness is None}
        recommended = loaded.model_source.recommended_temperature if own else None
        found = [*control_temperatures(loaded.kind, controls), *([] if recommended is None else [recommended])]
        return [one for one in dict.fromkeys(found) if own != {one}]

    def sampling_note(self, prepared: Sequence[PreparedTask], loaded: Loaded) -> str:
        """One sentence on the sampling that the folder recommends and what has it; empty where it recommends none."""
        if all(one.task.harness for one in prepared):  # suites of the harness are answered greedily
            return ""
        recommended = loaded.model_source.recommended_temperature
        if recommended is None or recommended not in self.added_temperatures(prepared, loaded):
            return sampling_note(self.model, loaded.model_source.sampling, next(iter(self.tasks.temperatures), None))
        return (
            f"{self.model} recommends sampling {format_temperature(recommended)}: every variant is scored at that temperature as "
            "well"
        )

    def form_notes(self, prepared: Sequence[PreparedTask], loaded: Loaded) -> list[str]:
        """A sentence for each form of the tasks' prompts that is another one than that in which the model was chosen."""
        forms = {
            describe_form(one.task.raw, one.task.system, self.system) for one in prepared if one.task.harness is None
        }
        same, record = partial(is_same_form, tokenizer=loaded.tokenizer), loaded.model_source.sampling
        return [note for now in sorted(forms) if (note := form_note(self.model, record, now, same))]


def require_run_folder(folder: Path, resume: bool) -> None:
    """Refuse a folder that holds anything but the evaluation to resume.

    Raises:
        ConfigError: naming the folder and what to do.
    """
    begun = (folder / RunFolder.RECORD).is_file()
    if resume and not begun:
        raise ConfigError(f"--resume: there is no evaluation in {folder}; run the command without --resume")
    if not resume and begun:
        raise ConfigError(
            f"--out {folder} holds an evaluation already; continue it with --resume, or give another folder"
        )
    if not resume:
        require_empty_folder(folder, "lock")
