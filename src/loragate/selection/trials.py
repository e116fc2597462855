"""A trial: gates trained in one range, with one objective and seed, and kept as a gated adapter.

    <folder>/<slug>/run/     log and checkpoints of the training
    <folder>/<slug>/gated/   the gated adapter; its `gate_config.json` is written last, so a trial that has one is finished
    <folder>/<slug>/failed.json   why the last attempt failed; where the training diverged, the next one would too

Each trial's folder holds gates of a few MB and hard links to one copy of the adapter's files. The model is left as it was found:
ungated.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from loragate.data import EncodedRows, Rows, find_endings
from loragate.errors import ConfigError, DivergenceError, LoragateError, StoppedError, nearest
from loragate.files import file_lock, read_json, write_json, write_text
from loragate.gates import GateConfig, attach_gates, detach_gates, gate_parameters, save_gates
from loragate.gates.artifact import require_readable, write_generation_config
from loragate.gates.attach import active_adapter, gate_modules, is_gated
from loragate.gates.card import render_card
from loragate.gates.override import Override
from loragate.gates.range import Range
from loragate.gates.schema import ADAPTER, CARD, CONFIG, GATES, copy_file, read_gate_config
from loragate.gates.signed_map import range_around
from loragate.gates.strength import overrides_by_module
from loragate.training import GateTrainingSettings, train_gates, training_rows
from loragate.training.callbacks import OnStep, StepReport
from loragate.training.gate_training import check_start
from loragate.training.run import save_tokenizer
from loragate.training.settings import GATE_OBJECTIVES
from loragate.validate import PositiveFloat, Seed, validate

GATED, RUN, FAILED = "gated", "run", "failed.json"
WAIT_S = 60.0  # for a worker that died to let go of a trial


@dataclass(frozen=True)
class Trial:
    """Gates to train.

    Attributes:
        range: of λ.
        objective: "entropy" is the paper's, "ce" its ablation.
        seed: of the gates' start and of the order of the examples.
        learning_rate: None for that of the settings.
    """

    range: Range
    objective: str = "entropy"
    seed: int = 42
    learning_rate: float | None = None

    @property
    def cell(self) -> str:
        """What its seeds have in common: "[-3,1]", "[-3,1] ce", "[-3,1] lr=0.001"."""
        objective = "" if self.objective == "entropy" else self.objective
        rate = "" if self.learning_rate is None else f"lr={self.learning_rate:g}"
        return " ".join(filter(None, (str(self.range), objective, rate)))

    @property
    def name(self) -> str:
        """As printed where seeds are told apart: "[-3,1], seed 0"."""
        return f"{self.cell}, seed {self.seed}"

    @property
    def slug(self) -> str:
        """Its folder: stable, unique, and fit for every file system."""
        rate = "" if self.learning_rate is None else f"_lr{self.learning_rate:g}"
        return f"{self.objective}_{self.range.slug}{rate}_seed{self.seed}"

    def config(self, config: GateConfig) -> GateConfig:
        """Its gates; raises ConfigError for some that no training moves."""
        own = replace(config, lower=self.range.lower, upper=self.range.upper, seed=self.seed)
        check_start(own)
        return own

    def as_record(self) -> dict[str, Any]:
        """As it stands in a run's identity."""
        own = {name: getattr(self, name) for name in ("objective", "seed", "learning_rate")}
        return {"lower": self.range.lower, "upper": self.range.upper, **own}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Trial:
        """The trial of `as_record`; raises KeyError, TypeError or GateError for what is none."""
        bounds = Range(record["lower"], record["upper"])
        return cls(bounds, record["objective"], record["seed"], record.get("learning_rate"))

    def training(self, settings: GateTrainingSettings) -> GateTrainingSettings:
        """Its settings."""
        rate = settings.learning_rate if self.learning_rate is None else self.learning_rate
        return replace(settings, objective=self.objective, seed=self.seed, learning_rate=rate)  # type: ignore[arg-type]


def make_trials(
    ranges: Sequence[Range],
    objectives: Sequence[str],
    seeds: Sequence[int],
    learning_rates: Sequence[float | None] = (None,),
) -> tuple[Trial, ...]:
    """The product; a ConfigError names what is missing, unknown, or there twice."""
    axes: tuple[tuple[str, Sequence[Any]], ...] = (
        ("range", ranges),
        ("objective", objectives),
        ("seed", seeds),
        ("learning rate", learning_rates),
    )
    for name, values in axes:
        if not values:
            raise ConfigError(f"no {name} to try; give at least one")
        if repeated := [value for value in values if list(values).count(value) > 1]:
            raise ConfigError(f"the {name} {repeated[0]} is given twice; each trial runs once")
    for seed in seeds:
        validate(Seed, seed, "seed")  # all of them, before the first is trained
    for objective in objectives:
        if objective not in GATE_OBJECTIVES:
            raise ConfigError(f"unknown objective {objective!r}{nearest(objective, GATE_OBJECTIVES)}")
    for rate in (one for one in learning_rates if one is not None):
        validate(PositiveFloat, rate, "learning rate")
    return tuple(
        Trial(one, objective, seed, rate)
        for objective in objectives
        for rate in learning_rates
        for one in ranges
        for seed in seeds
    )


@dataclass
class TrialContext:
    """What trials work on, in one process.

    Attributes:
        model: base with a plain LoRA adapter; gates come and go.
        tokenizer: of the base.
        examples: to train on, as given.
        config: of the gates; range and seed are the trial's.
        settings: of the training; objective and seed are the trial's, and a learning rate that it names.
        system: "none" leaves out a template's own system message, "keep" keeps it.
        heldout: tokenised examples that are only measured: entropy before and after.
        origin: arguments of `save_gates` that say where base and adapter come from.
    """

    model: Any
    tokenizer: Any
    examples: Rows
    config: GateConfig
    settings: GateTrainingSettings
    system: str = "none"
    heldout: EncodedRows | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    on_encoding: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        self._encoded: dict[int, tuple[Rows, EncodedRows]] = {}

    def encoded(self, seed: int) -> tuple[Rows, EncodedRows]:
        """The examples of a training with this seed, and their tokens; those of the last seed are kept."""
        if seed not in self._encoded:
            self._encoded.clear()
            settings = replace(self.settings, seed=seed)
            self._encoded[seed] = training_rows(
                self.examples, self.tokenizer, settings, self.system, on_progress=self.on_encoding
            )
        return self._encoded[seed]

    @cached_property
    def positions(self) -> int | None:
        """Of the model; None where it has no limit."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def train(self, trial: Trial, folder: Path, on_step: OnStep) -> Path:
        """Train a trial's gates, from where an earlier attempt was cut off; one that is finished is only looked up.

        Args:
            folder: of all trials.
            on_step: progress.

        Returns:
            The folder of the gated adapter.

        Raises:
            DivergenceError: if a value was not finite, now or in an earlier attempt.
            KeyboardInterrupt: on Ctrl-C, after a checkpoint.
        """
        place = folder / trial.slug
        gated = place / GATED
        with file_lock(place / "lock", WAIT_S, f"{place} is in use by another process; wait for it to end, or stop it"):
            if (gated / CONFIG).is_file():
                return gated
            before = read_json(place / FAILED)
            if before.get("diverged"):
                raise DivergenceError(str(before["error"]))
            (place / FAILED).unlink(missing_ok=True)
            try:
                evidence = self.fit(trial, place / RUN, on_step)
                shutil.rmtree(gated, ignore_errors=True)  # of an attempt that was cut off
                save_artifact(self, gated, evidence)
                share_files(gated / ADAPTER, folder / ADAPTER)
            except StoppedError as error:
                raise KeyboardInterrupt(str(error)) from error
            except Exception as error:
                note_failure(place, error)
                raise
            finally:
                if is_gated(self.model, active_adapter(self.model)):  # a training that failed has taken them off
                    detach_gates(self.model)
        return gated

    def fit(self, trial: Trial, run: Path, on_step: OnStep, *, resume: bool = True) -> dict[str, Any]:
        """Train a trial's gates on the model, which is left gated; returns the evidence of `save_gates`."""
        examples, encoded = self.encoded(trial.seed)
        result = train_gates(
            self.model,
            self.tokenizer,
            examples,
            trial.config(self.config),
            trial.training(self.settings),
            encoded=encoded,
            heldout=self.heldout,
            run_folder=run,
            resume=resume and (run / "run.json").is_file(),
            on_step=on_step,
        )
        return result.evidence()


def report_steps(report: Callable[[int, int, str], None]) -> OnStep:
    """An `OnStep` that reports (step, number of steps, the last entropy in words)."""
    entropy: float | None = None

    def on_step(step: StepReport) -> None:
        nonlocal entropy
        entropy = step.values.get("topk_entropy", entropy)
        report(step.step, step.total, "" if entropy is None else f"entropy {entropy:.3f}")

    return on_step


def save_artifact(
    context: TrialContext,
    folder: Path,
    evidence: dict[str, Any],
    k: int | None = None,
    temperature: float | None = None,
) -> None:
    """Write the model's gates as they are as a gated adapter, with its tokenizer.

    Args:
        evidence: what the artifact keeps, see `save_gates`.
        k: of the settings, where `evidence` holds no training.
        temperature: the recommended sampling; None for nothing to recommend.
    """
    endings = find_endings(context.tokenizer, context.model.generation_config)
    more = {"stop_token_ids": endings.token_ids, "evidence": evidence, "temperature": temperature}
    save_gates(context.model, folder, k=k, **{**context.origin, **more})
    save_tokenizer(context.tokenizer, folder / ADAPTER / "tokenizer")


def copy_artifact(source: Path, target: Path, selection: dict[str, Any], temperature: float) -> None:
    """Copy a trial's gated adapter, with the record of how it was chosen, and the sampling that it is recommended at."""
    record = {**read_gate_config(source), "selection": selection}
    copy_file(source / GATES, target / GATES)  # first, as by `save_gates`
    without = shutil.ignore_patterns(CONFIG, CARD)
    shutil.copytree(source, target, ignore=without, copy_function=copy_file, dirs_exist_ok=True)
    record |= write_generation_config(target, temperature)
    write_text(target / CARD, render_card(target.resolve().name, record))
    write_json(target / CONFIG, record)  # last: without it there is no artifact
    require_readable(target)


def attach_trained(context: TrialContext, trial: Trial, gated: Path | None) -> None:
    """Attach a trial's gates as they are in a folder, or zero gates in its range: λ = 1 everywhere, the adapter."""
    attach_gates(context.model, trial.config(context.config), active_adapter(context.model))
    _set_gates(context.model, {} if gated is None else load_file(gated / GATES))


def attach_constant(model: Any, scale: float, part: str | None = None) -> None:
    """Attach one λ for all tokens: gates without weights whose biases are `scale`, or λ = 1 outside of `part`."""
    bounds = range_around(scale)
    config = GateConfig(bounds.lower, bounds.upper, granularity="module")
    attach_gates(model, config, active_adapter(model))
    overrides = overrides_by_module(Override(constant=scale, part=part), gate_modules(model))
    logits = {path: torch.tensor([config.signed_map.logit(one.limits[0])]) for path, one in overrides.items()}
    _set_gates(model, {f"{path}.bias": logit for path, logit in logits.items()})


def _set_gates(model: Any, values: Mapping[str, torch.Tensor]) -> None:
    """Copy values into the attached gates; those that are not given become zero (λ = 1)."""
    with torch.no_grad():
        for name, parameter in gate_parameters(model).items():
            if name in values:
                parameter.copy_(values[name])
            else:
                parameter.zero_()
            parameter.requires_grad_(False)


def note_failure(place: Path, error: Exception) -> None:
    """Note in a trial's folder why its last attempt failed."""
    text = str(error) if isinstance(error, LoragateError) else f"{type(error).__name__}: {error}"
    with suppress(LoragateError):  # the failure itself matters more than its note
        write_json(place / FAILED, {"error": text[:2000], "diverged": isinstance(error, DivergenceError)})


def share_files(folder: Path, common: Path) -> None:
    """Have equal files of many folders take their room once: a hard link to the first in `common`, where there can be links."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        kept = common / file.relative_to(folder)
        kept.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, kept)
        except FileExistsError:
            if filecmp.cmp(file, kept, shallow=False):
                link = file.with_name(f"{file.name}.link")
                os.link(kept, link)
                link.replace(file)
        except OSError:
            return  # a file system without hard links: every folder keeps its own
