"""How `calibrate` comes to its range: which evidence there is, and the transaction that uses it.

labelled    --probe FILE with answers
agreement   --probe FILE of prompts only, or no probe where the training rows' prompts have extractable answers
given       --range=L,U --unverified: taken as it is
none        no evidence can be had: one range is trained, and stays off until it is accepted
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate.cli.models import parse_range
from loragate.errors import ConfigError, nearest
from loragate.training.settings import GATE_OBJECTIVES

CAUTIOUS = (0.0, 1.0)


@dataclass(frozen=True)
class SelectionOptions:
    """How the range is chosen.

    Attributes:
        range: "auto" tries the ranges below and keeps the best, or the adapter; or one range as L,U, such as --range=-3,1.
        ranges: candidates of --range auto, separated by semicolons; one may name its objective, as in -6,3@anchored.
        probe: questions that decide: .jsonl, .json or .parquet with prompt and answer (at least 32); prompts alone also do.
        probe_task: task (name or file) whose prompt and grader are used for the probe, which then has that task's columns.
        probe_grader: how answers are judged without a task: default (math), math_verify, dft, exact, choice or tiny.
        probe_samples: samples per probe question.
        probe_temperature: sampling temperature of the probe; take the one you will use.
        probe_max_new_tokens: token limit of a probe answer; 0 takes 512, or what the model's positions leave.
        exclude: file of evaluation rows; a probe that shares a prompt with it is refused.
        unverified: accept the gates of --range=L,U without a probe.
    """

    range: str = "auto"
    ranges: str = "-3,1;0,1;-6,3"
    probe: str = ""
    probe_task: str = ""
    probe_grader: str = "default"
    probe_samples: int = 4
    probe_temperature: float = 1.0
    probe_max_new_tokens: int = 0
    exclude: str = ""
    unverified: bool = False


def candidates_of(options: Any) -> list[Any]:
    """The candidates: of `--ranges`, or the one range that was given.

    Raises:
        ConfigError: for what is no range, or a range without evidence that was not accepted.
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
            "it started from in 5 of 8 situations while its training loss fell as it should. Give --probe FILE (at least 32 "
            "prompts with answers), leave --range out to have it chosen, or accept the gates as they come with --unverified"
        )
    for name in ("probe_task", "exclude"):
        if getattr(options, name) and not options.probe:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect without --probe FILE")
    texts = [part for part in options.ranges.split(";") if part.strip()] if automatic else [options.range]
    found = []
    for text in texts:
        bounds, _, objective = text.partition("@")
        name = objective.strip() or options.objective
        if name not in GATE_OBJECTIVES:
            raise ConfigError(f"--ranges {text}: unknown objective {name!r}{nearest(name, GATE_OBJECTIVES)}")
        found.append(Candidate(*parse_range(bounds), name))
    if len({candidate.slug for candidate in found}) != len(found):
        raise ConfigError(f"--ranges {options.ranges}: a range stands there twice")
    if not found:
        raise ConfigError("--ranges is empty; give at least one range")
    return found


def build_probe(
    options: Any, model: Any, tokenizer: Any, engine: Any, rows: Any, spare: Any, settings: Any, on_progress: Any
) -> tuple[Any, str]:
    """(probe, "") or (None, why no evidence can be had).

    Args:
        rows: training rows, with which a probe must not share prompts.
        spare: rows set aside, whose prompts serve where no probe is given; None where one is.
    """
    from loragate.data import load_rows
    from loragate.evaluation.judging import JudgeSettings, require_graders
    from loragate.evaluation.prompts import render_questions
    from loragate.generation import SamplingConfig
    from loragate.selection.probe import agreement_probe, labelled_probe, require_disjoint
    from loragate.selection.questions import held_out_prompts, probe_task, prompts_of, read_probe

    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    judging = JudgeSettings()
    if options.probe:
        task, questions, labelled = read_probe(options.probe, options.probe_task, options.probe_grader)
        require_graders([task], "", judging)
        require_disjoint(questions, prompts_of(rows), "the training rows")
        if options.exclude:
            require_disjoint(questions, prompts_of(load_rows(options.exclude)), f"the rows of {options.exclude}")
        prompts = render_questions(task, questions, tokenizer, options.system)
        source = options.probe
    else:
        labelled, source = False, f"{len(spare)} rows of {options.data}, set aside"
        limit = options.probe_max_new_tokens or 512
        if positions is not None:
            limit = min(limit, positions // 2)
        questions, prompts = held_out_prompts(
            spare,
            tokenizer,
            max_length=settings.max_length,
            max_new_tokens=limit,
            positions=positions,
            system=options.system,
        )
        task = probe_task(options.probe_grader, labelled=False)
        require_graders([task], "", judging)
    sampling = SamplingConfig(
        temperature=options.probe_temperature,
        max_new_tokens=answer_limit(options.probe_max_new_tokens, positions, prompts, tokenizer),
        samples=options.probe_samples if options.probe_temperature else 1,
        seed=options.seed + 1,
    )
    if labelled:
        return labelled_probe(task, questions, prompts, sampling, judging, source), ""
    return agreement_probe(task, questions, prompts, engine, sampling, judging, source, on_progress)


def answer_limit(wanted: int, positions: int | None, prompts: list[str], tokenizer: Any) -> int:
    """`wanted` tokens, or 512 and what the longest prompt leaves of the model's positions.

    Raises:
        ConfigError: if the longest prompt leaves less than was asked for.
    """
    longest = max(len(ids) for ids in tokenizer(list(prompts), add_special_tokens=False)["input_ids"])
    room = None if positions is None else positions - longest
    if room is not None and room < max(wanted, 1):
        raise ConfigError(
            f"the longest probe prompt has {longest} tokens and leaves {max(room, 0)} of the model's {positions} positions; "
            "lower --probe-max-new-tokens or shorten the probe's prompts"
        )
    return wanted or min(512, room if room is not None else 512)


def accept_command(options: Any, candidate: Any) -> str:
    """The command that switches on what was trained without evidence."""
    return (
        f"loragate calibrate --adapter {options.adapter} --data {options.data} --out {options.out} "
        f"--range={candidate.lower:g},{candidate.upper:g} --unverified --resume"
    )


def stored_candidate(folder: Path, candidate: Any) -> bool:
    """Whether this candidate was trained to its end in the folder."""
    return (folder / candidate.slug / "result.json").is_file()
