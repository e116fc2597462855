"""`loragate diagnose alignment`: entropy direction against task direction in the gates' parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loragate.cli.diagnose_inputs import Session, begin, classes_of, pad_id, read_answers, read_rows
from loragate.errors import ConfigError, DataError

ROWS = 48
START = "start"
MODULES_SHOWN = 12


@dataclass
class Material:
    """What directions are computed on: rows, their values, and which rows belong to one question.

    `prompt_lengths` is given where a row's first counted token is not the first of its answer.
    """

    rows: list[dict[str, Any]]
    values: list[Any]
    groups: list[int]
    source: str
    value_of: str
    prompt_lengths: list[int] | None = None


def run(options: Any) -> int:
    """Gather rows and values, compute directions at the gates and at every checkpoint, write alignment.json."""
    if options.value == "reference" and bool(options.rows) == bool(options.run or options.suite or options.tasks):
        raise ConfigError("--value reference needs rows to read: either --rows FILE, or answers with --run or --suite")
    if options.value != "reference" and options.rows:
        raise ConfigError(f"--value {options.value} needs graded answers, not --rows: give --run FOLDER, or --suite")
    from loragate.analysis.alignment import all_terms
    from loragate.analysis.alignment_record import AlignmentRecord, conclude
    from loragate.analysis.coordinates import CoordinateSums
    from loragate.analysis.directions import differentiable_gates, parameter_slices
    from loragate.analysis.reading import Reader, batches
    from loragate.losses.entropy import support_size

    session = begin(options, gated=True)
    model, tokenizer = session.loaded.model, session.loaded.tokenizer
    chosen = support_of(session.loaded.names["gated"]) if options.k is None else options.k
    k = support_size(chosen, model.get_output_embeddings().weight.shape[0])
    stored = read_checkpoints(Path(options.checkpoints), model) if options.checkpoints else {}
    material = gather(session)
    reader, classes = Reader(model), classes_of(session.loaded)
    sums = CoordinateSums(model)
    with differentiable_gates(model):
        with session.display.job("directions at the gates", len(material.rows)) as job:
            raw, rows = directions(reader, material, k, pad_id(tokenizer), job.advance_to)
        with session.display.job("single λ", len(material.rows)) as job:
            for index, (row, values) in enumerate(zip(material.rows, material.values, strict=True)):
                (batch,) = batches([row], pad_id(tokenizer), 1, reader.device)
                prompt_length = material.prompt_lengths[index] if material.prompt_lengths else None
                sums.add(reader, batch, values, k, classes, prompt_length)
                job.advance_to(index + 1)
        modules = all_terms(rows, parameter_slices(model), options.seed)
        checkpoints, updates = over_training(session, reader, material, k, stored) if stored else ((), ())
    tokens = sum(row.tokens for row in raw)
    record = AlignmentRecord(
        about=session.about(
            material.source, "value", "reference", "positions", "actions", "rollouts", "checkpoints", "max_rows"
        ),
        value=options.value,
        value_of=material.value_of,
        rows=len(material.rows),
        tokens=tokens,
        k=k,
        top_is_best=sum(row.top_is_best for row in raw) / tokens,
        all=modules[0],
        modules=modules[1:],
        checkpoints=checkpoints,
        updates=updates,
        coordinates=sums.summary(material.groups, options.seed),
        conclusion=(),
    )
    record = replace(record, conclusion=conclude(record))
    for table in tables(record):
        session.out.print(table)
    line = f"loragate diagnose interventions --model {options.model} --suite … --out {options.out}-interventions"
    return session.finish(record, "alignment", line)


def support_of(model: str) -> int:
    """The k that the gates were trained with, 0 for the whole vocabulary; the paper's 100 where the folder does not say."""
    from loragate.gates.schema import read_gate_config

    k = read_gate_config(Path(model))["k"]
    return 100 if k is None else int(k)


def directions(
    reader: Any, material: Material, k: int, pad: int, on_progress: Callable[[int, int], None] | None = None
) -> tuple[list[Any], list[Any]]:
    """Directions of every row, and merged by question."""
    from loragate.analysis.directions import merged, row_directions
    from loragate.analysis.reading import batches

    found = []
    for index, (row, values) in enumerate(zip(material.rows, material.values, strict=True)):
        (batch,) = batches([row], pad, 1, reader.device)
        found.append(row_directions(reader, batch, values, k))
        if on_progress is not None:
            on_progress(index + 1, len(material.rows))
    return found, merged(found, material.groups)


def gather(session: Session) -> Material:
    """Rows and action values as the options ask for them."""
    from loragate.analysis.reading import answer_rows

    options = session.options
    if options.rows:
        rows, source = read_rows(session, ROWS)
        return with_reference(session, rows, list(range(len(rows))), source)
    found, of, source = read_answers(session, "adapter")
    if len(found) > 1:
        source += f"; the first task, {found[0].prepared.task.name}, is used"
    answers = found[0]
    # one answer of every question before the second of any, so that a limit cuts answers and not questions
    order = sorted(
        range(len(answers.samples)), key=lambda at: (answers.samples[at].sample, answers.samples[at].question)
    )
    order = order[: options.max_rows or ROWS]
    samples = [answers.samples[at] for at in order]
    rows = answer_rows(session.loaded.tokenizer, answers.prepared.prompts, samples)
    groups = [sample.question for sample in samples]
    if options.value == "reference":
        return with_reference(session, rows, groups, source)
    if answers.grades is None:
        raise DataError(f"the answers of the {of} model are not graded; finish the evaluation first")
    if options.value == "reward":
        return with_reward(session, answers, rows, samples, of, source)
    return with_rollouts(session, answers, rows, samples, source)


def with_reference(session: Session, rows: list[dict[str, Any]], groups: list[int], source: str) -> Material:
    """Values from another policy on the same prefixes."""
    from loragate.analysis.reading import Reader
    from loragate.analysis.task_values import reference_values
    from loragate.cli.evaluating import load_inputs
    from loragate.evaluation.variants import Variant, acting

    loaded, name = session.loaded, session.options.reference
    context: Any = nullcontext()
    if name in ("base", "adapter"):
        reader, context = Reader(loaded.model), acting(loaded.model, Variant(name), loaded.kind)  # type: ignore[arg-type]
        what = f"log-probability under the {name} itself"
    else:
        with session.display.job("loading the reference"):
            other = load_inputs(_options_for(session.options, name), name)
        sizes = [len(item.tokenizer) for item in (loaded, other)]
        if sizes[0] != sizes[1] or loaded.tokenizer.get_vocab() != other.tokenizer.get_vocab():
            raise ConfigError(
                f"--reference {name} has another vocabulary ({sizes[1]} tokens, the model {sizes[0]}); values of actions need "
                "the same tokens"
            )
        reader, what = Reader(other.model), f"log-probability under {name}"
    with session.display.job("reading with the reference"), context:
        values = [reference_values(reader, row, pad_id(loaded.tokenizer)) for row in rows]
    return Material(rows, values, groups, source, what)


def _options_for(options: Any, reference: str) -> Any:
    """The options for loading a reference: --base says where an adapter's base is, and a whole model has none."""
    from loragate.models import resolve

    return replace(options, base="") if resolve(reference, base_later=True).kind == "base" else options


def with_reward(
    session: Session, answers: Any, rows: list[dict[str, Any]], samples: Sequence[Any], of: str, source: str
) -> Material:
    """Verdicts spread over the answers' own tokens."""
    from loragate.analysis.reading import Reader
    from loragate.analysis.task_values import leave_one_out, reward_values
    from loragate.evaluation.variants import Variant, acting

    sampling, loaded = answers.prepared.sampling, session.loaded
    if (sampling.temperature, sampling.top_p) != (1.0, 1.0):
        raise ConfigError(
            f"--value reward needs answers sampled at temperature 1 and top-p 1, found {sampling.temperature:g} and "
            f"{sampling.top_p:g}; use --value rollouts"
        )
    verdicts = {id(sample): grade for sample, grade in zip(answers.samples, answers.grades, strict=True)}
    rewards = [float(verdicts[id(sample)].correct) for sample in samples]
    baselines = leave_one_out([sample.question for sample in samples], rewards)
    reader, pad = Reader(loaded.model), pad_id(loaded.tokenizer)
    with acting(loaded.model, Variant(of), loaded.kind):  # type: ignore[arg-type]
        values = [
            reward_values(reader, row, reward, baseline, pad)
            for row, reward, baseline in zip(rows, rewards, baselines, strict=True)
        ]
    what = (
        f"verdicts of {answers.prepared.task.grader} on the {of} model's answers, with the question's mean as baseline"
    )
    return Material(rows, values, [sample.question for sample in samples], source, what)


def with_rollouts(
    session: Session, answers: Any, rows: list[dict[str, Any]], samples: Sequence[Any], source: str
) -> Material:
    """Values of the likeliest actions at a few positions, by completing and grading."""
    import numpy as np

    from loragate.analysis.reading import Reader
    from loragate.analysis.task_values import branches, rollout_values, some_positions
    from loragate.evaluation.judging import JudgeSettings, grader_for, judge
    from loragate.evaluation.variants import Variant, acting

    options, loaded, prepared = session.options, session.loaded, answers.prepared
    if prepared.sampling.stop:
        raise ConfigError(
            f"--value rollouts: {prepared.task.name} ends answers at texts, which rollouts do not know; use reward"
        )
    generator = np.random.default_rng(options.seed)
    lengths = [len(row["input_ids"]) - len(sample.token_ids) for row, sample in zip(rows, samples, strict=True)]
    rows = [some_positions(row, options.positions, generator) for row in rows]
    pad = pad_id(loaded.tokenizer)
    tried = branches(Reader(loaded.model), rows, lengths, options.actions, pad)
    settings = JudgeSettings(workers=options.workers, timeout_s=options.timeout, sandbox=options.sandbox)
    grader = grader_for(prepared.task, options.grader)

    def grade(whole: Sequence[tuple[int, Any]]) -> list[bool]:
        asked = [
            replace(answer, question=samples[row].question, sample=index) for index, (row, answer) in enumerate(whole)
        ]
        return [
            verdict.correct for verdict in judge(prepared.task, prepared.questions.questions, asked, grader, settings)
        ]

    sampling = replace(prepared.sampling, samples=options.rollouts, seed=options.seed)
    if sampling.temperature == 0:
        sampling = replace(sampling, samples=1)
    job_name = f"completing {len(tried) * sampling.samples:,} answers"
    with session.display.job(job_name) as job, acting(loaded.model, Variant("adapter"), loaded.kind):
        values = rollout_values(
            loaded.model,
            loaded.tokenizer,
            tried,
            grade,
            sampling,
            classes_of(loaded).ends,
            loaded.positions,
            options.batch_size,
            job.advance_to,
        )
    what = (
        f"mean verdict of {grader} over {sampling.samples} completions by the adapter, of the {options.actions} likeliest tokens "
        f"at {options.positions} positions per answer"
    )
    groups = [sample.question for sample in samples]
    return Material(rows, [values[index] for index in range(len(rows))], groups, source, what, lengths)


def over_training(
    session: Session, reader: Any, material: Material, k: int, checkpoints: dict[str, dict[str, Any]]
) -> tuple[Any, Any]:
    """Terms at the start of training, at every checkpoint and at the gates, and what training did between them."""
    import torch

    from loragate.analysis.alignment import InnerProducts, terms
    from loragate.analysis.alignment_record import mean_direction, updates
    from loragate.gates import gate_parameters

    parameters = gate_parameters(session.loaded.model)
    now = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    stored = {START: starting_point(session.loaded.model), **checkpoints}
    last = stored[list(stored)[-1]]
    if any(not torch.equal(last[name].to(value.device), value) for name, value in now.items()):
        stored["end"] = now  # a calibration that ran to its end keeps its last step as a checkpoint
    found, places, means = [], {}, {}
    try:
        with session.display.job("directions over training", len(stored)) as job:
            for index, (name, point) in enumerate(stored.items()):
                with torch.no_grad():
                    for key, parameter in parameters.items():
                        parameter.copy_(point[key])
                _, rows = directions(reader, material, k, pad_id(session.loaded.tokenizer))
                found.append(terms(name, InnerProducts(rows), session.options.seed))
                places[name] = torch.cat([point[key].reshape(-1).cpu() for key in parameters])
                means[name] = {key: mean_direction(rows, key) for key in ("entropy_semi", "value")}
                job.advance_to(index + 1)
    finally:
        with torch.no_grad():
            for key, parameter in parameters.items():
                parameter.copy_(now[key])
    return tuple(found), updates(places, means)


def starting_point(model: Any) -> dict[str, Any]:
    """The gate parameters as `attach_gates` makes them: the deterministic perturbation that training starts from."""
    import torch

    from loragate.gates.attach import GLOBAL_BIAS, gate_modules
    from loragate.gates.gate import initial_weight

    found: dict[str, Any] = {}
    for path, gate in gate_modules(model).items():
        start = 0.0 if gate.config.granularity == "token" else -gate.config.init_scale
        bias = torch.full((1,), start, device=gate.bias.device)
        if gate.config.granularity == "global":
            return {GLOBAL_BIAS: bias}
        if gate.weight is not None:
            found[f"{path}.weight"] = initial_weight(gate.weight.numel(), gate.config, path).to(gate.weight.device)
        found[f"{path}.bias"] = bias
    return found


def read_checkpoints(folder: Path, model: Any) -> dict[str, dict[str, Any]]:
    """{"step 100": gate parameters} of a calibration's folder, by step.

    Raises:
        ConfigError: if there is none, or one belongs to other gates.
    """
    from safetensors.torch import load_file

    from loragate.gates import gate_parameters

    like, found = gate_parameters(model), {}
    paths = [*folder.glob("checkpoint-*"), *folder.glob("run/checkpoint-*")]
    steps = [
        path for path in paths if path.name.rpartition("-")[2].isdigit() and (path / "trained.safetensors").is_file()
    ]
    for path in sorted(steps, key=lambda path: int(path.name.rpartition("-")[2])):
        tensors = load_file(str(path / "trained.safetensors"))
        if {name: tensor.shape for name, tensor in tensors.items()} != {name: t.shape for name, t in like.items()}:
            raise ConfigError(f"{path} holds other parameters than the gates of --model; it belongs to another run")
        found[f"step {path.name.rpartition('-')[2]}"] = tensors
    if not found:
        raise ConfigError(
            f"--checkpoints {folder}: no checkpoint-*/trained.safetensors in it or in its run folder; calibrate with "
            "--save-steps 25, for example, to keep some"
        )
    return found


def short_name(path: str) -> str:
    """A module path as a narrow table has room for: "layer 3 down_proj"."""
    import re

    number = re.search(r"\.(\d+)\.", path)
    return path if number is None else f"layer {number.group(1)} {path.rsplit('.', 1)[-1]}"


def tables(record: Any) -> list[Any]:
    """Terms overall, over training and per module; agreement of signs."""
    from rich.table import Table

    names = ("where", "angle", "cosine", "smallest ρ", "b_sg, %", "tail, %", "condition")
    shown = sorted(record.modules, key=lambda row: -abs(row.gain.mean))[:MODULES_SHOWN]
    modules = [row for row in record.modules if row in shown]
    title = "direction of training against the task value's; 95 % intervals over rows"
    if len(modules) < len(record.modules):
        title += f"\n({len(modules)} of {len(record.modules)} modules: the largest gains; alignment.json has all)"
    terms = Table(title=title)
    for name in names:
        terms.add_column(name, justify="left" if name in ("where", "condition") else "right")
    for row in (record.all, *record.checkpoints, *modules):
        total = row.total
        errors = ["–" if value is None else f"{100 * value:.1f}" for value in (row.stopped_error, row.tail_error)]
        if total.cosine is None:
            terms.add_row(short_name(row.name), "–", "–", "–", *errors, "direction is zero")
            continue
        ends = "" if total.cosine.low is None else f" ({total.cosine.low:+.2f} to {total.cosine.high:+.2f})"
        cosine = f"{total.cosine.mean:+.2f}{ends}"
        terms.add_row(
            short_name(row.name), f"{total.angle:.0f}°", cosine, f"{total.rho.mean:.3f}", *errors, total.verdict
        )
    signs = Table(title="single λ: does entropy push the way the task value would?")
    for name in ("next token", "λ", "right way, %", "weighted, %", "entropy wants more, %", "value wants more, %"):
        signs.add_column(name, justify="left" if name == "next token" else "right")
    names_of_modules = {row.name for row in record.modules}
    for row in record.coordinates:
        if row.name not in names_of_modules:
            shares = (row.share.mean, row.weighted.mean, row.raised, row.value_raised)
            signs.add_row(row.name, f"{row.coordinates:,}", *[f"{100 * share:.1f}" for share in shares])
    return [terms, signs]
