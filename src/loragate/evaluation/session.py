"""From settings to a record: one model, its tasks, and the rows that are scored side by side.

request = Request("gated", Path("runs/math"), TaskSettings(suite="math"))
tasks = request.check()                              # refuses what could not be judged, before anything is loaded
session = Session(request, tasks, load("gated"))     # reads the questions
evaluation = session.side_by_side("cheap")           # proves that adapter and gates act
record = session.run(evaluation)                     # samples, judges, writes run.json, samples/, grades/, results.json
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loragate.data import template_hash
from loragate.errors import ConfigError
from loragate.evaluation.engines import Engines, why_not
from loragate.evaluation.evaluate import EngineFor, Evaluation, OnEvent, no_progress
from loragate.evaluation.judging import require_graders
from loragate.evaluation.prepared import chosen_tasks, prepare, questions_of
from loragate.evaluation.results import EvaluationRecord
from loragate.evaluation.settings import EngineSettings, GradingSettings, TaskSettings
from loragate.evaluation.tasks import Task
from loragate.evaluation.variants import ModelVariant, canary, variants_for
from loragate.files import RunFolder, require_new
from loragate.gates.attach import active_adapter
from loragate.gates.eligibility import trains_biases
from loragate.gates.recommended import at, sampling_note
from loragate.generation.sharded import require_ray
from loragate.generation.vllm_engine import require_vllm
from loragate.models import Loaded

BIASES = (
    "the adapter trained biases along, which PEFT leaves in the model when it switches the adapter off: the row of the base has "
    "them too"
)


@dataclass(frozen=True)
class Request:
    """What an evaluation is asked for.

    Attributes:
        model: gated folder, adapter or base, or a hub id.
        out: run folder; new or empty, or that of the evaluation to resume.
        tasks: what is asked.
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
        tasks = chosen_tasks(self.tasks)
        require_graders(tasks, self.grading)
        if self.engine.engine == "vllm":
            require_vllm()
        if self.engine.replicas > 1:
            require_ray()
        if all(task.harness for task in tasks) and (
            self.tasks.samples is not None or self.tasks.temperature is not None
        ):
            names = ", ".join(task.name for task in tasks)
            raise ConfigError(
                f"--samples and --temperature have no effect: {names} are answered greedily, or not generated at all"
            )
        return tasks


class Session:
    """A model that `engines.load` gave, with the questions of the tasks that `Request.check` returned."""

    def __init__(self, request: Request, tasks: Sequence[Task], loaded: Loaded) -> None:
        self.request, self.loaded = request, loaded
        self.engines = Engines(request.engine, request.model, request.base, loaded, request.out)
        self.prepared = [
            prepare(
                task,
                questions_of(request.tasks, task, tasks),
                loaded.tokenizer,
                request.tasks,
                loaded.positions,
                request.system,
            )
            for task in tasks
        ]
        # suites of the harness are answered greedily
        self.sampled = [one for one in self.prepared if one.task.harness is None]

    @property
    def recommended(self) -> float | None:
        """The recommended temperature, where rows are added for it: the tasks sample at another, and none was asked for."""
        heat = self.loaded.place.recommended_temperature  # None where the folder recommends none
        elsewhere = any(one.sampling.temperature != heat for one in self.sampled)
        return heat if elsewhere and self.request.tasks.temperature is None else None

    @property
    def sampling_note(self) -> str:
        """One sentence on the sampling that the folder recommends and the rows that have it; empty where it recommends none."""
        model, asked = self.request.model, self.request.tasks.temperature
        if (heat := self.recommended) is None:
            return sampling_note(model, self.loaded.place.sampling, asked) if self.sampled else ""
        return (
            f"{model} recommends sampling {at(heat)}: rows of that temperature are among the controls; the first rows are sampled "
            "as their tasks say"
        )

    def side_by_side(self, controls: str = "cheap", constants: Sequence[float] = (0.5,)) -> Evaluation:
        """The evaluation of base, adapter and gates with their controls; see `variants_for`.

        Raises:
            GateError: where adapter or gates do not act.
        """
        loaded = self.loaded
        wanted = variants_for(loaded.kind, controls, constants, self.recommended)
        left_out = {variant.label: why for variant in wanted if (why := why_not(loaded, variant))}
        biased = loaded.model is not None and loaded.kind != "base"
        biased = biased and trains_biases(loaded.model, active_adapter(loaded.model))
        return self.evaluation(
            [variant for variant in wanted if variant.label not in left_out],
            notes=[BIASES] if biased else [],
            left_out=left_out,
            kind=loaded.kind,
        )

    def evaluation(
        self,
        variants: Sequence[ModelVariant],
        *,
        notes: Sequence[str] = (),
        left_out: dict[str, str] | None = None,
        **identity: Any,
    ) -> Evaluation:
        """The evaluation of these rows, after the canary has shown that adapter and gates act.

        A resumed run must share `identity` beside the model, the tasks and how they are answered.

        Raises:
            GateError: where adapter or gates do not act.
        """
        loaded, request = self.loaded, self.request
        figures: dict[str, float] = {}
        if loaded.model is not None:  # vLLM has the weights elsewhere
            figures = canary(loaded.model, loaded.tokenizer, self.prepared[0].prompts, loaded.kind)
        return Evaluation(
            request.out,
            self.prepared,
            list(variants),
            models=loaded.sources,
            canary=figures,
            notes=list(notes),
            left_out=left_out or {},
            seed=request.tasks.seed,
            facts={
                "engine": request.engine.engine,
                "dtype": loaded.dtype,
                "limit": request.tasks.limit,
                "max_new_tokens": request.tasks.max_new_tokens,
                "system": request.system,
                "chat_template": template_hash(loaded.tokenizer),
                **identity,
                # nothing where the chat template adds no end to those that are declared
                **({"end_of_turn": added} if (added := loaded.endings.added) else {}),
            },
            grading=request.grading,
        )

    def run(
        self, evaluation: Evaluation, on_event: OnEvent = no_progress, engine_for: EngineFor | None = None
    ) -> EvaluationRecord:
        """Sample and judge what is not on file yet, by the session's own engines or `engine_for`; writes results.json.

        Raises:
            LoragateError: if another process is at it in the same folder.
        """
        with closing(self.engines):
            record = evaluation.run(engine_for or self.engines, on_event)
        self.engines.finish()  # last: a run that is stopped before goes on with what it removes
        return record


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
        require_new(folder)


def trained_controls(loaded: Loaded) -> list[str]:
    """The controls that an evaluation cannot make, each with the command that trains it."""
    if loaded.kind == "base":
        return []
    base, adapter = loaded.names["base"], loaded.names["adapter"]
    gates = f"loragate calibrate --adapter {adapter} --data ROWS --ranges=L,U --skip-selection"
    more = f"loragate sft --model {base} --adapter {adapter} --data ROWS"
    of_gates = [
        f"  one λ per module            {gates} --granularity module --out OUT",
        f"  gates trained with CE       {gates} --objective ce --out OUT",
    ]
    return [
        "not run: controls that are trainings of their own. Make them on the gates' rows and score each like this model:",
        *([] if loaded.place.is_dora else of_gates),
        f"  LoRA, same rows again       {more} --out OUT",
        f"  LoRA trained with entropy   {more} --objective entropy --out OUT",
    ]
