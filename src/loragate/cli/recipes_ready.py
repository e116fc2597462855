"""What a run of a recipe asks before its first stage: is the work of earlier stages there, and can later ones run at all?

A recipe trains for hours and evaluates last, so an engine, a library or a data set that only the evaluation needs is missed
at once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError, LoragateError


def require_earlier(stages: Sequence[Any], wanted: Sequence[str], folder: Any) -> None:
    """Refuse `--stages` that leave out what a chosen stage reads.

    Args:
        stages: placed in the run's folder.
        wanted: names of the chosen stages; empty for all.
        folder: `RunFolder`, which knows what is finished.

    Raises:
        ConfigError: naming both stages.
    """
    for number, stage in enumerate(stages):
        if wanted and stage.name not in wanted:
            continue
        for done in stages[:number]:
            if not wanted or done.name in wanted or folder.is_finished(done):
                continue
            out = Path(folder.path) / done.output
            read = [str(value) for key, value in stage.values.items() if key != "out"]
            if any(text == str(out) or text.startswith(f"{out}/") for text in read):
                raise ConfigError(
                    f"--stages {','.join(wanted)}: stage '{stage.name}' reads what '{done.name}' leaves in {out}, and that has "
                    f"not been run there; give --stages {done.name},{','.join(wanted)} or leave --stages out"
                )


def require_parts(stages: Sequence[Any], options_of: Any) -> None:
    """Refuse an evaluation that could not run here, before anything is trained.

    Args:
        stages: those that are going to run.
        options_of: stage to the options of its command.

    Raises:
        ConfigError: naming stage, part and what to do instead.
    """
    for stage in stages:
        if stage.command != "eval":
            continue
        options = options_of(stage)
        rest = ",".join(other.name for other in stages if other.command != "eval")
        instead = f"; or leave the evaluations for later with --stages {rest}" if rest else ""
        try:
            _require(options)
        except LoragateError as error:
            change = f"; --set {stage.name}.engine=transformers does without vLLM" if options.engine == "vllm" else ""
            raise ConfigError(f"stage '{stage.name}' could not run here: {error}{change}{instead}") from error


def _require(options: Any) -> None:
    from loragate.cli.evaluation_inputs import chosen_tasks, harness_questions, own_questions
    from loragate.evaluation.judging import JudgeSettings, require_graders
    from loragate.generation.vllm_engine import require_vllm

    if options.engine == "vllm":
        require_vllm()
    tasks = chosen_tasks(options)
    if any(task.engine != "loragate" for task in tasks) and importlib.util.find_spec("lm_eval") is None:
        raise ConfigError('retention suites need lm-evaluation-harness; pip install "loragate[eval]"')
    require_graders(
        [task for task in tasks if task.engine == "loragate"], options.grader, JudgeSettings(sandbox=options.sandbox)
    )
    own_questions(options, tasks)
    harness_questions(options, tasks)
