"""Stage I from names to a finished adapter folder: the whole of `loragate sft`; `make_adapter` is the call.

folder/          the adapter, written last, with its tokenizer
folder/run/      what is trained on what (run.json), the log and checkpoints to go on from
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loragate.data import encode_rows
from loragate.generation import OnProgress
from loragate.losses.objectives import objective_of
from loragate.models import Loading, explained, open_base, open_tokenizer, resolve
from loragate.training.callbacks import OnStep
from loragate.training.fine_tuning import (
    FineTuningResult,
    adapter_settings,
    require_reference_read,
    train_adapter,
)
from loragate.training.preflight import require_free_out
from loragate.training.rows import read_rows, require_mask_column
from loragate.training.run_folder import RECORD
from loragate.training.settings import FineTuningSettings, RowsSettings
from loragate.training.strategy import launch_of, process_state


def make_adapter(
    model: str,
    data: str | RowsSettings,
    folder: str | Path,
    settings: FineTuningSettings | None = None,
    *,
    reference: str = "",
    max_rows: int = 0,
    loading: Loading | None = None,
    system: str = "none",
    resume: bool = False,
    on_step: OnStep | None = None,
) -> FineTuningResult:
    """Train an adapter on a base and rows that are given by name, and write it as an ordinary PEFT folder.

    The command `loragate sft` is this call. `train_adapter` does the same with a base in memory, and writes nothing.

    Args:
        model: base model, folder or hub id.
        data: the rows, a file or hub id; or `RowsSettings`, for a split, a revision or a subset.
        folder: where the adapter is written; must be new or empty, or hold the run to resume.
        settings: the paper's values by default; with `adapter` a finished adapter is trained on.
        reference: frozen model for the KL of eksft, folder or hub id; by default the base itself, adapter off.
        max_rows: number of rows to use (0: all); see `RowsSettings.select`.
        loading: how the models are loaded.
        system: "none" leaves out a default system message that the template injects, "keep" keeps it.
        resume: go on with what an interrupted call left in `folder`.
        on_step: called after every optimiser step.

    Raises:
        ConfigError: for settings that cannot be used together, rows without a keep_mask that the objective needs, or a folder
            that holds something else.
        DataError: for rows that cannot be used.
        TrainingError: as in `train_adapter`; also where rows or settings have changed since the run to resume began.
    """
    require_free_out(Path(folder), resume)
    run = AdapterRun(
        model,
        RowsSettings(data=data) if isinstance(data, str) else data,
        Path(folder),
        settings or FineTuningSettings(),
        reference,
        max_rows,
        loading or Loading(),
        system,
        resume,
    )
    run.read()
    run.load()
    return run.train(on_step)


@dataclass
class AdapterRun:
    """`make_adapter` in three steps, so that a command can say what it does in between: `read`, `load`, `train`.

    The fields are the arguments of `make_adapter`. `read` adds the settings of an adapter that is continued, the objective, the
    tokenizer, the rows in training order and their tokens; `load` the models.
    """

    model: str
    asked: RowsSettings
    folder: Path
    settings: FineTuningSettings
    reference: str
    max_rows: int
    loading: Loading
    system: str
    resume: bool

    def read(self, on_progress: OnProgress | None = None) -> None:
        """Read and check what needs no model; `on_progress` is called with the rows that are tokenised, and all rows."""
        self.place = resolve(self.model, expect="base")
        if self.settings.adapter:
            # the base is the one that is named here, so the adapter's own is not looked for
            adapter = resolve(self.settings.adapter, expect="adapter", base_later=True)
            self.settings = adapter_settings(replace(self.settings, adapter=adapter.source), adapter.peft_config())
        settings = self.settings
        self.objective = objective_of(settings.objective, settings.objective_options)
        self.other = None
        if self.reference:
            require_reference_read(self.objective)
            self.other = resolve(self.reference, expect="base", what="reference model")
        self.rows = read_rows(self.asked, self.max_rows, settings.seed).shuffled(settings.seed)
        self.tokenizer = open_tokenizer(self.place, self.loading)
        self.encoded = encode_rows(
            self.rows, self.tokenizer, max_length=settings.max_length, system=self.system, on_progress=on_progress
        )
        require_mask_column(self.objective, self.encoded, self.rows)

    def load(self) -> None:
        """The base, and the reference where there is one."""
        # under a launcher that shards, the base lies in host memory and its shards go to the devices
        with explained("base model", self.place.base.name):
            self.base = open_base(self.place.base, self.loading, host_memory=launch_of().sharded)
            self.reference_model: Any = open_base(self.other.base, self.loading) if self.other else None

    def train(self, on_step: OnStep | None = None) -> FineTuningResult:
        """Train, and write the adapter; on several processes only the main one writes."""
        run = self.folder / "run"
        result = train_adapter(
            self.base,
            self.tokenizer,
            self.rows,
            self.settings,
            run_folder=run,
            # stopped before its first step, a run has its configuration and nothing to go on with
            resume=self.resume and (run / RECORD).is_file(),
            encoded=self.encoded,
            reference_model=self.reference_model,
            on_step=on_step,
        )
        if process_state().is_main_process:
            result.save(self.folder, self.tokenizer, self.place.base)
        return result
