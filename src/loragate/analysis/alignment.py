"""Does the direction of training raise a task value? The theorem's terms at the gates, over training, and module by module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from loragate.analysis.directions import (
    NAMES,
    Agreement,
    RowDirections,
    agreements,
    by_group,
    coordinate_sums,
    parameter_slices,
    row_directions,
)
from loragate.analysis.settings import DiagnoseSettings
from loragate.analysis.subject import DiagnosticContext, Record
from loragate.analysis.task_values import gather
from loragate.analysis.theorem import DRAWS, Terms, terms
from loragate.errors import ConfigError
from loragate.gates import gate_parameters, train_gates_only
from loragate.gates.attach import GLOBAL_BIAS, gate_modules
from loragate.gates.gate import SignedGate
from loragate.gates.schema import read_gate_config
from loragate.losses.entropy import support_size

LEAST = 50  # coordinates that a class needs to be called the best or the worst


@dataclass(frozen=True)
class Update:
    """What training did between two stored points.

    Attributes:
        begin, end: names of the points.
        norm: ‖u‖ of the update u = ψ(end) − ψ(begin).
        gain: ⟨∇V(begin), u⟩, its first-order effect on the task value; above 0 it helped (the paper's test).
        cosine: between u and ∇V(begin); None where one is zero.
        descent: cosine between u and Ĝ_k(begin): how far the optimiser went along entropy descent.
    """

    begin: str
    end: str
    norm: float
    gain: float
    cosine: float | None
    descent: float | None


@dataclass(frozen=True, kw_only=True)
class AlignmentRecord(Record):
    """`alignment.json`.

    Attributes:
        value_of: what the value was taken from, in words.
        rows, tokens: what the means are over.
        k: support of the entropy objective.
        top_is_best: share of positions whose likeliest action is among those of the highest value on the support; the
            margin m > 0 of eq:rw-margin, read position by position.
        all: terms on all gate parameters.
        modules: terms on each module's own parameters.
        checkpoints: terms on all parameters at each stored point of training, in order; empty where none was given.
        updates: between consecutive points.
        coordinates: agreement of signs (eq:rw-coordinate-signal) over everything and per class.
    """

    value_of: str
    rows: int
    tokens: int
    k: int
    top_is_best: float
    all: Terms
    modules: tuple[Terms, ...]
    checkpoints: tuple[Terms, ...]
    updates: tuple[Update, ...]
    coordinates: tuple[Agreement, ...]
    kind: Literal["alignment"] = "alignment"


def diagnose_alignment(subject: DiagnosticContext, settings: DiagnoseSettings) -> AlignmentRecord:
    """The terms on rows, or on answers stored or drawn now; writes alignment.json.

    Raises:
        ConfigError: for rows and answers that do not fit the value, a folder without checkpoints, and as `DiagnosticContext.begin`.
    """
    if settings.value == "reference" and bool(settings.rows) == bool(settings.run or subject.has_tasks):
        raise ConfigError("--value reference needs rows to read: either --rows FILE, or answers with --run or --suite")
    if settings.value != "reference" and settings.rows:
        raise ConfigError(f"--value {settings.value} needs graded answers, not --rows: give --run FOLDER, or --suite")
    if not settings.rows:
        subject.require_answers(settings)
    loaded = subject.begin(drawing=not settings.run)
    model, reader, seed = loaded.model, subject.reader, subject.seed
    k = settings.k
    if k is None:  # the paper's where the folder does not say
        trained = read_gate_config(Path(loaded.names["gated"]))["k"]
        k = 100 if trained is None else int(trained)
    k = support_size(k, model.get_output_embeddings().weight.shape[0])
    points = training_points(model, settings.checkpoints)
    cases, source, value_of = gather(subject, settings)
    train_gates_only(model)  # gates that are loaded are frozen
    parameters = gate_parameters(model)
    at_points: list[Terms] = []
    updates: list[Update] = []
    before: ModelSource | None = None
    # the gates as they are come last, so that the model is left with them and `rows` are theirs
    for name, point in points.items():
        _set(parameters, point)
        with subject.job(f"directions at {name if settings.checkpoints else 'the gates'}", len(cases)) as on_progress:
            rows = by_group(cases, lambda case: row_directions(reader, case, k), on_progress)
        at_points.append(terms(name, rows, seed=seed))
        here = ModelSource.of(name, [point[key] for key in parameters], rows)
        updates += [update_between(before, here)] if before else []
        before = here
    with subject.job("single coefficients", len(cases)) as on_progress:
        sums = by_group(cases, lambda case: coordinate_sums(reader, case, k, subject.classes), on_progress)
    tokens = sum(row.tokens for row in rows)
    slices = parameter_slices(model).items()
    record = AlignmentRecord(
        about=subject.about(source, settings, "value reference positions actions rollouts checkpoints max_rows"),
        value_of=value_of,
        rows=len(cases),
        tokens=tokens,
        k=k,
        top_is_best=sum(row.top_is_best for row in rows) / tokens,
        all=replace(at_points[-1], name="all"),
        modules=tuple(terms(path, rows, place, seed, DRAWS // 2) for path, place in slices),
        checkpoints=tuple(at_points) if settings.checkpoints else (),
        updates=tuple(updates),
        coordinates=agreements(sums, seed),
    )
    return subject.keep(record, "alignment", conclude)


def training_points(model: Any, checkpoints: str) -> dict[str, dict[str, Tensor]]:
    """{name: gate parameters} of the start and the checkpoints of a training, where its folder is given, and of the gates now.

    A calibration that ran to its end keeps its last step as a checkpoint, which is then the gates; otherwise they are "end".
    """
    now = {name: parameter.detach().clone() for name, parameter in gate_parameters(model).items()}
    if not checkpoints:
        return {"end": now}
    points = {"start": starting_point(model), **read_checkpoints(Path(checkpoints), now)}
    last = list(points.values())[-1]
    same = all(torch.equal(last[name].to(value.device), value) for name, value in now.items())
    return points if same else {**points, "end": now}


@torch.no_grad()
def _set(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


def starting_point(model: Any) -> dict[str, Tensor]:
    """The gate parameters as `attach_gates` makes them: the deterministic perturbation that training starts from."""
    found: dict[str, Tensor] = {}
    for path, gate in gate_modules(model).items():
        # a gate's first values follow from its seed and path alone, so that no file of the start is needed
        fresh = SignedGate(0 if gate.weight is None else gate.weight.numel(), gate.config, path)
        if gate.config.granularity == "global":
            return {GLOBAL_BIAS: fresh.bias.detach()}
        found |= {f"{path}.{name}": parameter.detach() for name, parameter in fresh.named_parameters()}
    return found


def read_checkpoints(folder: Path, now: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """{"step 100": gate parameters} of a calibration's folder.

    Raises:
        ConfigError: for none, one that was not written to its end, and those of other gates than `now`.
    """
    like = {name: parameter.shape for name, parameter in now.items()}
    files = [path for run in (".", "run") for path in folder.glob(f"{run}/checkpoint-*/trained.safetensors")]
    by_step = {int(step): path for path in files if (step := path.parent.name.rpartition("-")[2]).isdigit()}
    try:
        found = {f"step {step}": load_file(str(path)) for step, path in sorted(by_step.items())}
    except SafetensorError as error:
        raise ConfigError(
            f"--checkpoints {folder}: a checkpoint was not written to its end, as by a run that was killed ({error}); resume the "
            "run, or remove the checkpoint"
        ) from error
    for name, tensors in found.items():
        if {key: tensor.shape for key, tensor in tensors.items()} != like:
            raise ConfigError(
                f"--checkpoints {folder}: {name} holds other parameters than the gates of --model; it belongs to another run"
            )
    if not found:
        raise ConfigError(
            f"--checkpoints {folder}: no checkpoint-*/trained.safetensors in it or in its run folder; calibrate with "
            "--save-steps 25, for example, to keep some"
        )
    return found


@dataclass(frozen=True)
class ModelSource:
    """Where training was at one point: the gate parameters, and the mean directions over all counted positions; [P] fp64 each."""

    name: str
    parameters: Tensor
    entropy: Tensor
    value: Tensor

    @classmethod
    def of(cls, name: str, parameters: Sequence[Tensor], rows: Sequence[RowDirections]) -> ModelSource:
        """From the gate parameters in their order, and the directions of rows there."""
        means = torch.stack([row.vectors.double() for row in rows]).sum(0) / sum(row.tokens for row in rows)
        at = torch.cat([parameter.reshape(-1).cpu() for parameter in parameters]).double()
        return cls(name, at, means[NAMES.index("entropy_semi")], means[NAMES.index("value")])


def update_between(before: ModelSource, after: ModelSource) -> Update:
    """What training did between two points, against the directions at the first."""
    moved = after.parameters - before.parameters
    cosines = _cosine(before.value, moved), _cosine(before.entropy, moved)
    return Update(before.name, after.name, float(moved.norm()), float(before.value @ moved), *cosines)


def _cosine(a: Tensor, b: Tensor) -> float | None:
    size = float(a.norm() * b.norm())
    return max(-1.0, min(1.0, float(a @ b) / size)) if size > 0 else None


def conclude(record: AlignmentRecord) -> tuple[str, ...]:
    """What was found, in sentences."""
    total = record.all.total
    text = []
    if total.cosine is None or total.angle is None or total.rho is None:
        which = "entropy" if total.entropy_norm == 0 else "task"
        text.append(f"Nothing can be said about the condition: the {which} direction is exactly zero at these gates.")
    else:
        says = {
            "holds": "the theorem's condition can be met: a small step of training raises the task value",
            "fails": "the theorem's condition fails for every β: a small step of training does not raise the task value",
            "not shown": "whether the theorem's condition can be met is not shown: the interval includes 90°",
        }[total.verdict]
        text.append(
            f"At these gates {says}. The direction of training and that of the task value enclose {total.angle:.0f}°, cosine "
            f"{total.cosine.mean:.2f}{total.cosine.ends()}, so the smallest ρ is {total.rho.mean:.3f}."
        )
    errors = []
    for what, share in (
        ("stopping the gradient at the gates' inputs changes the direction", record.all.stopped_error),
        (f"leaving out the tail beyond the top {record.k} changes the task direction", record.all.tail_error),
    ):
        if share is not None:
            errors.append(f"{what} by {100 * share:.1f} %" if share >= 5e-4 else f"{what} by less than 0.05 %")
    if errors:
        text.append(f"{'; '.join(errors)} of its length.".capitalize())
    if record.coordinates:
        everything, *classes = record.coordinates
        text.append(
            f"Single λ (module and position): entropy points the right way for {100 * everything.share.mean:.0f} % of "
            f"{everything.coordinates:,}, {100 * everything.weighted.mean:.0f} % when weighted by what they matter for the "
            f"value. The likeliest token is the best one at {100 * record.top_is_best:.0f} % of the positions."
        )
        known = sorted((row for row in classes if row.coordinates >= LEAST), key=lambda row: row.weighted.mean)
        if len(known) > 1:
            text.append(
                f"It is most often right where {_where(known[-1])} ({100 * known[-1].weighted.mean:.0f} %) and least where "
                f"{_where(known[0])} ({100 * known[0].weighted.mean:.0f} %)."
            )
    if record.modules:
        verdicts = [row.total.verdict for row in record.modules]
        text.append(
            f"Module by module the condition holds in {verdicts.count('holds')}, fails in {verdicts.count('fails')} and is open "
            f"in {verdicts.count('not shown')} of {len(verdicts)}."
        )
    if record.updates:
        helped = sum(update.gain > 0 for update in record.updates)
        text.append(
            f"Over training, {helped} of {len(record.updates)} stretches between checkpoints went towards a higher task value "
            "to first order."
        )
    return tuple(text)


def _where(row: Agreement) -> str:
    names = {"prompt": "the prompt is read", "end": "the answer's end comes next", "space": "white space comes next"}
    return names.get(row.name, f"{row.name} come next")
