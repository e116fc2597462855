"""How `calibrate` comes to its range: which evidence there is, and the transaction that uses it.

labelled    --probe FILE with answers
agreement   --probe FILE of prompts only, or no probe where the training rows' prompts have extractable answers
given       --range=L,U --unverified: taken as it is
none        no evidence can be had: one range is trained, and stays off until it is accepted
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from typing import Any

from loragate.cli.arguments import flag_of
from loragate.errors import ConfigError, nearest
from loragate.gates.range import Range
from loragate.training.settings import GATE_OBJECTIVES, ON_POLICY
from loragate.training.strategy import launch_of

CAUTIOUS = Range(0, 1)
PROBE_TOKENS = 512


@dataclass(frozen=True)
class SelectionOptions:
    """How the range is chosen.

    Attributes:
        range: "auto" tries the ranges below and keeps the best, or the adapter; or one range as L,U, such as --range=-3,1.
        ranges: candidates of --range auto, separated by semicolons; one may name its objective, as in -6,3@anchored.
        probe: questions that choose the range, at least 32: .jsonl, .json or .parquet with prompt and answer, or
            prompts only.
        probe_task: task (name or file) whose prompt, columns and grader the probe uses.
        probe_grader: how answers are judged without a task: default (math), math_verify, dft, exact, choice or tiny.
        probe_samples: samples per probe question.
        probe_temperature: sampling temperature of the probe; set the one that you will use.
        probe_max_new_tokens: token limit of a probe answer; 0 takes 512. An answer ends at the model's last position, too.
        probe_sandbox: where the programs of a code probe run: bubblewrap, or rlimits, which isolates nothing.
        exclude: file of evaluation rows; a probe that shares a question with it is refused.
        retention_probe: labelled questions of an ability to keep; a range that clearly loses on them is not picked.
        retention_task: task (name or file) of the retention probe; without it a file of prompts and answers.
        references: also score the base without adapter and the adapter at temperature 0.3 on a labelled probe, for
            comparison.
        guard: stop the training of anchored or reward when sampled answers collapse: they repeat, never end, change
            their length or lose variety.
        unverified: accept the gates of --range=L,U without a probe.
    """

    range: str = "auto"
    ranges: str = "0,1;-6,3;0,6"
    probe: str = ""
    probe_task: str = ""
    probe_grader: str = "default"
    probe_samples: int = 4
    probe_temperature: float = 1.0
    probe_max_new_tokens: int = 0
    probe_sandbox: str = "bubblewrap"
    exclude: str = ""
    retention_probe: str = ""
    retention_task: str = ""
    references: bool = True
    guard: bool = True
    unverified: bool = False


def candidates_of(options: Any) -> list[Any]:
    """The candidates: of `--ranges`, or the one range that was given.

    Raises:
        ConfigError: for what is no range, a range without evidence that was not accepted, a flag without effect, or
            several processes.
    """
    from loragate.selection.candidate import Candidate

    automatic = options.range.strip().lower() == "auto"
    if options.unverified and options.probe:
        raise ConfigError("--unverified accepts gates without a probe; leave out one of --unverified and --probe")
    if automatic and options.unverified:
        raise ConfigError("--unverified accepts one range, as in --range=0,1 --unverified; --range auto needs evidence")
    if not automatic and not options.probe and not options.unverified:
        raise ConfigError(
            f"nothing would show that --range={options.range} helps: on small worlds the paper's [-6,3] ended below the adapter "
            "it started from in 5 of 18 situations while its training loss fell as it should. Give --probe FILE (at least 32 "
            "prompts with answers), leave --range out to have it chosen, or accept the gates as they come with --unverified"
        )
    if not options.unverified and (processes := launch_of().processes) > 1:
        raise ConfigError(
            f"ranges are chosen in one process, and this is one of {processes}; start loragate without a "
            "distributed launcher, or train one range on all of them with --range=L,U --unverified"
        )
    _require_effect(options, automatic)
    texts = [part for part in options.ranges.split(";") if part.strip()] if automatic else [options.range]
    found = []
    for text in texts:
        bounds, _, objective = text.partition("@")
        name = objective.strip() or options.objective
        if name not in GATE_OBJECTIVES:
            raise ConfigError(f"--ranges {text}: unknown objective {name!r}{nearest(name, GATE_OBJECTIVES)}")
        found.append(Candidate(Range.parse(bounds), name))
    if len({candidate.slug for candidate in found}) != len(found):
        raise ConfigError(f"--ranges {options.ranges}: a range stands there twice")
    if not found:
        raise ConfigError("--ranges is empty; give at least one range")
    if not options.guard and not any(candidate.objective in ON_POLICY for candidate in found):
        raise ConfigError(f"--no-guard has no effect: only {' and '.join(ON_POLICY)} are watched by the guard")
    return found


def cautious_candidate(options: Any, candidates: list[Any]) -> Any:
    """What is trained where no evidence can be had: the range that was asked for, else the most cautious one."""
    if options.range.strip().lower() != "auto":
        return candidates[0]
    return type(candidates[0])(CAUTIOUS, options.objective)


def _require_effect(options: Any, automatic: bool) -> None:
    """Refuse flags that would be ignored, and numbers that cannot be used."""
    usual = SelectionOptions()
    changed = [
        item.name for item in fields(SelectionOptions) if getattr(options, item.name) != getattr(usual, item.name)
    ]
    for name, needed in (("probe_task", "probe"), ("retention_task", "retention_probe")):
        if name in changed and not getattr(options, needed):
            raise ConfigError(f"{flag_of(name)} has no effect without {flag_of(needed)} FILE")
    if options.exclude and not (options.probe or options.retention_probe):
        raise ConfigError("--exclude has no effect without --probe FILE")
    if "references" in changed and not options.probe:
        raise ConfigError(
            "--no-references has no effect without --probe FILE: only questions with answers are asked of them"
        )
    if "ranges" in changed and not automatic:
        raise ConfigError(f"--ranges has no effect beside --range={options.range}; leave out one of them")
    if "probe_grader" in changed and options.probe_task and options.objective != "reward":
        raise ConfigError(f"--probe-grader has no effect: the task {options.probe_task} names its own grader")
    asking = ("probe_samples", "probe_temperature", "probe_max_new_tokens", "probe_sandbox", "probe_grader")
    for name in (*asking, "retention_probe"):
        if name in changed and options.unverified and (name, options.objective) != ("probe_grader", "reward"):
            raise ConfigError(f"{flag_of(name)} has no effect with --unverified, which asks no probe")
    if (
        options.probe_samples < 1
        or options.probe_max_new_tokens < 0
        or not 0 <= options.probe_temperature < float("inf")
    ):
        raise ConfigError(
            "--probe-samples must be at least 1, --probe-max-new-tokens and --probe-temperature must not be negative"
        )


@dataclass(frozen=True)
class Asked:
    """Questions of a file, before the model is there.

    Attributes:
        file: where they come from.
        task: how they are asked and judged.
        questions: new to the training rows.
        labelled: whether their answers are known.
    """

    file: str
    task: Any
    questions: list[Any]
    labelled: bool


def read_files(options: Any, rows: Any, *, raw: bool) -> tuple[Asked | None, Asked | None]:
    """The questions of --probe and --retention-probe, checked before a model is loaded.

    Args:
        rows: all training rows, with which they must not share questions.
        raw: the training rows are plain text, so the questions of a plain file are too.

    Raises:
        DataError, ConfigError: naming what cannot be used.
    """
    if not (options.probe or options.retention_probe):
        return None, None
    from loragate.data import load_rows
    from loragate.evaluation.judging import require_graders
    from loragate.selection.disjoint import prompts_of, prompts_to_exclude, require_disjoint
    from loragate.selection.questions import read_probe

    taken = [(prompts_of(rows), "the training rows")]
    if options.exclude:
        name = f"the rows of {options.exclude}"
        taken.append((prompts_to_exclude(load_rows(options.exclude), name), name))

    def read(file: str, task_name: str) -> Asked:
        task, questions, labelled = read_probe(file, task_name, options.probe_grader, raw=raw)
        require_graders([task], "", _judging(options))
        for texts, what in taken:
            require_disjoint(questions, texts, what)
        return Asked(file, task, questions, labelled)

    probe = read(options.probe, options.probe_task) if options.probe else None
    retention = read(options.retention_probe, options.retention_task) if options.retention_probe else None
    if retention is not None and not retention.labelled:
        raise ConfigError(f"--retention-probe {retention.file} has no answers; what must not be lost needs labels")
    return probe, retention


def require_evidence(options: Any, spare: Any = None) -> None:
    """Refuse, before anything long begins, a probe that is not there or answers that could not be judged here.

    Args:
        spare: rows set aside as questions, once that has been done.

    Raises:
        ConfigError, DataError: naming what is missing.
    """
    from loragate.evaluation.judging import require_graders
    from loragate.evaluation.tasks import load_task
    from loragate.selection.probe import MIN_QUESTIONS
    from loragate.selection.questions import probe_task, require_file

    asked = [(options.probe, options.probe_task), (options.retention_probe, options.retention_task)]
    tasks = []
    for file, name in asked:
        if file:
            require_file(file)
            tasks.append(load_task(name) if name else probe_task(options.probe_grader))
    if spare is not None and len(spare) >= MIN_QUESTIONS:
        tasks.append(probe_task(options.probe_grader, labelled=False))
    if tasks:
        require_graders(tasks, "", _judging(options))


def build_probe(job: Any, on_progress: Any) -> tuple[Any, str]:
    """(probe, "") or (None, why no evidence can be had).

    Args:
        job: `calibration.Job`; its `asked` questions are used, else prompts of its `spare` rows.
    """
    from loragate.errors import DataError
    from loragate.evaluation.judging import require_graders
    from loragate.selection.probe import MIN_QUESTIONS, agreement_probe
    from loragate.selection.questions import held_out_prompts, probe_task

    options = job.options
    if job.asked is not None:
        task, questions, source = job.asked.task, job.asked.questions, job.asked.file
        prompts = _render(job, job.asked)
        if job.asked.labelled:
            return _labelled(job, job.asked, prompts), ""
    else:
        source = f"{len(job.spare)} rows of {options.data}, set aside"
        if len(job.spare) < MIN_QUESTIONS:
            return None, (
                f"a tenth of {options.data} leaves {len(job.spare)} prompts to set aside, and {MIN_QUESTIONS} are needed"
            )
        positions = job.positions
        limit = options.probe_max_new_tokens or PROBE_TOKENS
        limit = limit if positions is None else max(1, min(limit, positions // 2))
        task = probe_task(options.probe_grader, labelled=False)
        require_graders([task], "", _judging(options))
        try:
            questions, prompts = held_out_prompts(
                job.spare,
                job.tokenizer,
                max_length=job.settings.max_length,
                max_new_tokens=limit,
                positions=positions,
                system=options.system,
            )
        except DataError as error:
            return None, str(error)
    kept = job.folder / "run" / "candidates" / "majority.json"
    sampling = _sampling(job, task, prompts)
    return agreement_probe(task, questions, prompts, job.engine, sampling, _judging(options), source, on_progress, kept)


def build_retention(job: Any) -> Any:
    """The retention probe, or None where none was given."""
    return None if job.retained is None else _labelled(job, job.retained, _render(job, job.retained))


def _labelled(job: Any, asked: Asked, prompts: list[str]) -> Any:
    from loragate.selection.probe import labelled_probe

    sampling = _sampling(job, asked.task, prompts)
    return labelled_probe(asked.task, asked.questions, prompts, sampling, _judging(job.options), asked.file)


def _render(job: Any, asked: Asked) -> list[str]:
    from loragate.evaluation.tasks.questions import render_questions

    return render_questions(asked.task, asked.questions, job.tokenizer, job.options.system)


def _judging(options: Any) -> Any:
    from loragate.evaluation.judging import JudgeSettings

    return JudgeSettings(sandbox=options.probe_sandbox)


def _sampling(job: Any, task: Any, prompts: list[str]) -> Any:
    from loragate.generation import SamplingConfig

    options = job.options
    return SamplingConfig(
        temperature=options.probe_temperature,
        top_p=task.generation.top_p,
        max_new_tokens=answer_limit(options.probe_max_new_tokens, job.positions, prompts, job.tokenizer),
        samples=options.probe_samples if options.probe_temperature else 1,
        seed=options.seed + 1,
    )


def answer_limit(wanted: int, positions: int | None, prompts: list[str], tokenizer: Any) -> int:
    """`wanted` tokens, or 512; the engine lowers it for a prompt that leaves fewer of the model's positions.

    Raises:
        DataError: if a prompt leaves no position, which is better known before anything is trained.
    """
    from loragate.generation.requests import tokenize_prompts

    limit = wanted or PROBE_TOKENS
    tokenize_prompts(tokenizer, prompts, limit, positions)
    return limit


def accept_command(options: Any, candidate: Any) -> str:
    """The command that switches on what was trained without evidence; it names all that loading needs."""
    usual = type(options)()
    words = ["loragate", "calibrate", "--adapter", options.adapter, "--data", options.data, "--out", options.out]
    for name in ("base", "base_id", "chat_template", "dtype", "quantization", "device"):
        if getattr(options, name) != getattr(usual, name):
            words += [flag_of(name), getattr(options, name)]
    words += ["--trust-remote-code"] if options.trust_remote_code else []
    words += [f"--range={candidate.range.typed}", "--unverified", "--resume"]
    return shlex.join(words)
