"""What the trials of a sweep are made of, by name, and the plan that follows from it.

Only names and settings are kept, so that the same object serves in this process and, sent by Ray, in a worker.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from loragate.cli.arguments import comma_list
from loragate.cli.preflight import quiet_logging
from loragate.errors import ConfigError, nearest
from loragate.gates.range import parse_ranges
from loragate.models import (
    Loading,
    ModelRef,
    Place,
    explained,
    folder_sha256,
    open_base,
    open_tokenizer,
    put_on,
    resolve,
)
from loragate.sweep.plan import SweepPlan, Trial, label_adapters, make_trials
from loragate.training.settings import CalibrationSettings

OBJECTIVES = ("entropy", "ce", "anchored")
PROBE_SEED = 1
FIXED = ("seed", "objective", "report_to")  # of the trial, or without influence on its numbers


@dataclass(frozen=True)
class SweepMaterials:
    """See `loragate.sweep.trials.Materials`.

    Attributes:
        options: of the command, with absolute paths.
        adapters: {label: folder or owner/name@commit}.
        base: folder or hub id; revision: of the base.
    """

    options: Any
    adapters: dict[str, str]
    base: str
    revision: str = ""

    @property
    def batch_size(self) -> int:
        return int(self.options.sampling_batch_size)

    @property
    def place_of_base(self) -> str:
        """The base with its revision, where it has one."""
        return f"{self.base}@{self.revision}" if self.revision else self.base

    @property
    def system(self) -> str:
        return str(self.options.system)

    def load_base(self) -> Any:
        quiet_logging()
        base = ModelRef.parse(self.place_of_base)
        with explained("base model", base.name):
            return open_base(base, Loading.of(self.options))

    def place(self, label: str) -> Place:
        """The adapter on the common base, as this machine has it."""
        return resolve(self.adapters[label], self.place_of_base, expect="adapter")

    def load_adapter(self, base: Any, label: str) -> Any:
        return put_on(base, self.place(label))

    def adapter_source(self, label: str) -> str | None:
        return str(self.place(label).adapter)

    def adapter_id(self, label: str) -> str | None:
        return self.place(label).hub_id

    def load_tokenizer(self, label: str) -> Any:
        return open_tokenizer(self.place(label), Loading.of(self.options))

    def load_rows(self) -> Any:
        from loragate.cli.run_rows import read_rows

        return read_rows(self.options)

    def settings(self, trial: Trial) -> CalibrationSettings:
        return dataclasses.replace(settings_for(self.options, trial.objective), seed=trial.seed)

    def gates(self, trial: Trial) -> Any:
        from loragate.cli.calibration import gate_config

        return gate_config(self.options, trial.range, trial.seed)

    def probes(self, model: Any, tokenizer: Any) -> tuple[Any, Any]:
        from loragate.cli.selecting import answer_limit
        from loragate.evaluation.judging import JudgeSettings
        from loragate.evaluation.tasks.questions import render_questions
        from loragate.generation import SamplingConfig
        from loragate.selection.probe import labelled_probe

        options = self.options
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)

        def make(file: str, samples: int) -> Any:
            task, questions = read_questions(file, options)
            prompts = render_questions(task, questions, tokenizer, options.system)
            limit = answer_limit(options.probe_max_new_tokens, positions, prompts, tokenizer)
            heat = options.probe_temperature
            sampling = SamplingConfig(heat, 1.0, limit, samples if heat else 1, PROBE_SEED)
            return labelled_probe(task, questions, prompts, sampling, JudgeSettings(), file)

        probe = make(options.probe, options.probe_samples) if options.probe else None
        test = make(options.test, options.test_samples or options.probe_samples) if options.test else None
        return probe, test


def prepare(options: Any) -> tuple[SweepMaterials, SweepPlan]:
    """Read and check everything that does not need the base in memory.

    Raises:
        ConfigError, DataError: naming what cannot be used.
    """
    from loragate.cli.run_rows import read_rows
    from loragate.evaluation.judging import JudgeSettings, require_graders
    from loragate.selection.probe import MIN_QUESTIONS, require_disjoint
    from loragate.selection.questions import prompts_of

    options = with_absolute_paths(options)
    places = {
        label: resolve(text, options.base, expect="adapter")
        for label, text in label_adapters(comma_list(options.adapters or options.adapter)).items()
    }
    adapters = {label: place.source for label, place in places.items()}
    ranges, seeds = parse_ranges(options.ranges), numbers(options.seeds)
    objectives = comma_list(options.objectives)
    records = {objective: _record(settings_for(options, objective)) for objective in objectives}
    base = common_base(list(places.values()))
    rows = read_rows(options)
    identity: dict[str, Any] = {
        "base": {
            "name": Path(base.name).name if Path(base.name).is_dir() else base.name,
            "files": folder_sha256(base.name) if Path(base.name).is_dir() else str(base),
        },
        "adapters": {label: place.fingerprint for label, place in places.items()},
        "data": {"rows": len(rows), "fingerprint": rows.fingerprint, "system": options.system},
        "training": records,
        "gates": {
            name: getattr(options, name)
            for name in ("tau", "init_scale", "granularity", "detach_input", "gate_modules")
        },
        "dtype": options.dtype,
        **({} if options.quantization == "none" else {"quantization": options.quantization}),
        "chat_template": _digest(Path(options.chat_template).read_text("utf-8")) if options.chat_template else None,
    }
    earlier: list[Any] = []
    for name, samples in (("probe", options.probe_samples), ("test", options.test_samples or options.probe_samples)):
        file = getattr(options, name)
        if not file:
            identity[name] = None
            continue
        task, questions = read_questions(file, options)
        if len(questions) < MIN_QUESTIONS:
            raise ConfigError(
                f"--{name} {file} has {len(questions)} questions; at least {MIN_QUESTIONS} are needed to tell cells apart"
            )
        require_graders([task], "", JudgeSettings())
        require_disjoint(questions, prompts_of(rows), "the training rows")
        require_disjoint(questions, [question.prompt for question in earlier], "the probe's")
        earlier = questions
        identity[name] = {
            "questions": _digest([[question.prompt, question.gold, question.row] for question in questions]),
            "task": task.fingerprint if options.probe_task else options.probe_grader,
            "samples": samples,
            "temperature": options.probe_temperature,
            "max_new_tokens": options.probe_max_new_tokens,
            "batch_size": options.sampling_batch_size,
        }
    materials = SweepMaterials(options, adapters, base.name, base.revision)
    plan = SweepPlan(make_trials(adapters, ranges, seeds, objectives), identity)
    for trial in plan.trials:
        if trial.kind == "gates":
            materials.gates(trial)  # an unknown granularity shows now
    return materials, plan


def settings_for(options: Any, objective: str) -> CalibrationSettings:
    """The training settings of one objective: those of the options that it reads.

    Raises:
        ConfigError: for an unknown objective, or a setting that none of the objectives reads.
    """
    given = {field.name: getattr(options, field.name) for field in fields(CalibrationSettings)}
    if objective == "adapter":  # nothing is trained
        objective = "entropy"
    if objective not in OBJECTIVES:
        more = "; a reward is a Python callable, see loragate.calibrate" if objective == "reward" else ""
        raise ConfigError(
            f"--objectives: {objective!r} is none of {', '.join(OBJECTIVES)}{nearest(objective, OBJECTIVES)}{more}"
        )
    read = [CalibrationSettings.read_by(name) for name in comma_list(options.objectives) if name in OBJECTIVES]
    somewhere = set().union(*read)
    unread = {name: value for name, value in given.items() if name not in somewhere}
    CalibrationSettings(**{**unread, "objective": objective})  # says which setting has no effect
    own = set(CalibrationSettings.read_by(objective))
    return CalibrationSettings(
        **{**{name: value for name, value in given.items() if name in own}, "objective": objective}
    )


def common_base(places: list[Place]) -> ModelRef:
    """The base of all adapters, with its revision; a folder as its absolute path.

    Raises:
        ConfigError: if they name different ones.
    """
    first, *others = [dataclasses.replace(place.base, name=place.base.lasting) for place in places]
    for place, base in zip(places[1:], others, strict=True):
        if base != first:
            raise ConfigError(
                f"the adapters have different bases: {places[0].ref} has {first.name}, {place.ref} has {base.name}; sweep "
                "them apart"
            )
    return first


def read_questions(file: str, options: Any) -> tuple[Any, list[Any]]:
    """Task and questions of a labelled file."""
    from loragate.selection.questions import read_probe

    task, questions, labelled = read_probe(file, options.probe_task, options.probe_grader)
    if not labelled:
        raise ConfigError(
            f"{file} has no answers; a sweep compares cells on labelled questions (columns prompt and answer)"
        )
    return task, questions


def with_absolute_paths(options: Any) -> Any:
    """The options as they hold in a worker, whatever its working directory."""
    changed = {
        name: str(Path(getattr(options, name)).resolve())
        for name in ("adapter", "base", "data", "probe", "test", "chat_template", "probe_task")
        if getattr(options, name) and Path(getattr(options, name)).exists()
    }
    if options.adapters:
        places = [str(Path(p).resolve()) if Path(p).exists() else p for p in comma_list(options.adapters)]
        changed["adapters"] = ",".join(places)
    return dataclasses.replace(options, **changed)


def numbers(text: str) -> list[int]:
    """Seeds: whole numbers separated by commas."""
    try:
        return [int(part) for part in comma_list(text)]
    except ValueError:
        raise ConfigError(
            f"--seeds: expected whole numbers separated by commas, such as 0,1,2, found {text!r}"
        ) from None


def _record(settings: CalibrationSettings) -> dict[str, Any]:
    return {name: value for name, value in settings.as_record().items() if name not in FIXED}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
