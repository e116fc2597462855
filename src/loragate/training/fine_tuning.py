"""Stage I: train a LoRA or DoRA adapter with one of the token objectives, from scratch or from a finished adapter.

`train_adapter` trains with a base in memory. `make_adapter`, the whole of `loragate sft`, goes from names to a finished folder:

folder/          the adapter, written last, with its tokenizer
folder/run/      what is trained on what (run.json), the log and checkpoints to go on from
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.pytorch_utils import Conv1D
from trl import SFTConfig

from loragate.data import EncodedRows, load_rows
from loragate.data.rows import RowsGiven
from loragate.errors import ConfigError
from loragate.files import RunFolder
from loragate.gates.artifact import write_adapter
from loragate.gates.control import as_base
from loragate.gates.eligibility import keep_unpacked
from loragate.gates.identity import base_weight_samples, config_fingerprint, weights_checksum
from loragate.gates.schema import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from loragate.losses.causal_head import Reference, ReferenceRequest, causal_model
from loragate.losses.objectives import Objective, make_objective
from loragate.models import Loading, ModelRef, explained, open_base, open_tokenizer, resolve
from loragate.models.peft_loading import load_peft, peft_config
from loragate.modes import evaluation_mode
from loragate.training.arguments import build_trainer_arguments
from loragate.training.callbacks import OnStep
from loragate.training.checkpoints import training_folder
from loragate.training.memory import fit_passes
from loragate.training.model_state import require_causal_model, train_in_fp32
from loragate.training.preflight import require_free_out
from loragate.training.rows import (
    check_encoded_matches_rows,
    check_fits_model,
    encoded_fingerprint,
    read_rows,
    require_mask_column,
    training_rows,
)
from loragate.training.run import TrainingOutcome, check_custom_objective, run_in_folder, save_tokenizer
from loragate.training.settings import FineTuningSettings, RowsSettings
from loragate.training.sharding import target_device
from loragate.training.strategy import detect_launch, process_state
from loragate.training.trainer import StatisticsTrainer
from loragate.validate import comma_list

logger = logging.getLogger("loragate")
# what a finished adapter decides: name of the setting, and of the field in its own record
SETTING_TO_PEFT_FIELD = {
    "rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "dora": "use_dora",
    "rslora": "use_rslora",
}


@dataclass(frozen=True, kw_only=True)
class FineTuningResult(TrainingOutcome):
    """A trained adapter on its base, with the run's log.

    `objective` is what trained it: `settings.objective`, or the name of an objective of one's own; `constants` are its.
    """

    model: Any
    settings: FineTuningSettings
    rows: int
    response_tokens: int
    data: dict[str, Any]
    objective: str
    constants: dict[str, Any]

    def save(self, folder: str | Path, tokenizer: Any, base: ModelRef) -> None:
        """Write an ordinary PEFT adapter folder with its tokenizer.

        Args:
            folder: adapter_config.json names the base so that it is found from any other folder, with its commit on the hub.
            tokenizer: of the training.
            base: where the base was loaded from.
        """
        config = self.model.peft_config["default"]
        config.base_model_name_or_path, config.revision = base.absolute_name, base.commit() or None
        write_adapter(self.model, "default", Path(folder))
        save_tokenizer(tokenizer, Path(folder))


def resolve_settings_from_adapter(settings: FineTuningSettings, record: Any) -> FineTuningSettings:
    """The settings with those of the adapter that is continued, `SETTING_TO_PEFT_FIELD`; a ConfigError for one that differs."""
    usual = FineTuningSettings()
    # a setting that has its usual value was not asked for, and gives way to the adapter's
    own: dict[str, Any] = {name: getattr(record, key) for name, key in SETTING_TO_PEFT_FIELD.items()}
    modules = record.target_modules
    own["target_modules"] = modules if isinstance(modules, str) else ",".join(sorted(modules))
    for name, value in own.items():
        asked = getattr(settings, name)
        if name == "target_modules" and asked != usual.target_modules:
            asked = ",".join(sorted(part.strip() for part in asked.split(",") if part.strip()))
        if asked != getattr(usual, name) and asked != value:
            raise ConfigError(
                f"{name} is {asked!r}, but the adapter {settings.adapter} has {value!r}, which training does not change; leave "
                f"{name} out, or train a new adapter without the adapter setting"
            )
    return replace(settings, **own)


def build_adapter(base_model: Any, settings: FineTuningSettings) -> Any:
    """A fresh adapter on `base_model`; the seed is set immediately before its factors are drawn."""
    targets: str | list[str] = settings.target_modules
    if targets != "all-linear":
        targets = comma_list(settings.target_modules)
        require_modules(base_model, targets)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
        use_dora=settings.dora,
        use_rslora=settings.rslora,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(settings.seed)
    try:
        return get_peft_model(base_model, config)
    except ValueError as error:
        if "arget module" not in str(error):
            raise
        said = re.sub(r"\(\n.*\n\)", "", str(error), flags=re.DOTALL)  # the parts of a module that is no layer
        linear = ", ".join(names_of_linear_layers(base_model))
        raise ConfigError(
            f"target_modules {settings.target_modules!r} cannot be adapted: the base's linear layers end in {linear} ({said:.200})"
        ) from error


def names_of_linear_layers(base_model: Any) -> list[str]:
    """The last parts of the paths of a base's linear layers, each once."""
    return sorted(
        {name.rsplit(".", 1)[-1] for name, part in base_model.named_modules() if isinstance(part, nn.Linear | Conv1D)}
    )


def require_modules(base_model: Any, targets: list[str]) -> None:
    """Refuse (ConfigError) names of modules that the base lacks: PEFT passes over them as long as another name fits."""
    paths = [path for path, _ in base_model.named_modules()]
    unknown = [name for name in targets if not any(path == name or path.endswith("." + name) for path in paths)]
    if unknown:
        linear, told = names_of_linear_layers(base_model), []
        for name in unknown:
            like = difflib.get_close_matches(name.rsplit(".", 1)[-1], linear, n=1)
            told.append(f"{name!r} (perhaps {like[0]!r})" if like else repr(name))
        raise ConfigError(
            f"target_modules names {', '.join(told)}, which matches no module of the base; its linear layers end in "
            + ", ".join(linear)
        )


@torch.no_grad()
def base_reference(model: Any, inputs: dict[str, Any]) -> Reference:
    """The distributions of a PeftModel's base on a batch, its adapter switched off for the pass: no second copy of the weights."""
    # DDP wraps the PeftModel
    with evaluation_mode(model), as_base(getattr(model, "module", model)):
        answer: Reference = model(**inputs, statistics=ReferenceRequest())
    return answer


def train_adapter(
    base_model: Any,
    tokenizer: Any,
    rows: RowsGiven,
    settings: FineTuningSettings | None = None,
    *,
    objective: Objective | None = None,
    run_folder: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_step: OnStep | None = None,
    encoded: EncodedRows | None = None,
) -> FineTuningResult:
    """Train an adapter on all response tokens of the rows.

    Args:
        base_model: a causal LM without adapters; `model.unload()` of an earlier result gives it back.
        tokenizer: its tokenizer.
        rows: in any of the known formats, or the path or hub id of a file with them; the objectives "mask" and "forgetting"
            need a keep_mask column.
        settings: the paper's values by default; with `adapter` a finished adapter is trained on.
        objective: one of your own in place of `settings.objective`: a `loragate.losses.WeightedCrossEntropy`, or an object of
            the protocol `loragate.losses.objectives.Objective`.
        run_folder, resume, overwrite, on_step: as in `train_gates`.
        encoded: rows already tokenised (`loragate.data.encode_rows`), in training order.

    Returns:
        The PeftModel with its log; `model.save_pretrained(folder)` writes an ordinary PEFT adapter.

    Raises:
        DataError, TrainingError: as in `train_gates`, also for a base that is no causal language model.
        ConfigError: for a base that carries an adapter, rows without a keep_mask that the objective needs, a setting that
            contradicts the adapter to continue, or an objective of one's own that the settings contradict.
    """
    settings = settings or FineTuningSettings()
    if objective is not None:
        check_custom_objective(objective, settings)
    adapted = next((name for name, part in base_model.named_modules() if isinstance(part, BaseTunerLayer)), "")
    if adapted or isinstance(base_model, PeftModel):
        found = f"{adapted} is an adapter's layer" if adapted else f"this is a {type(base_model).__name__}"
        raise ConfigError(
            f"the base already carries an adapter ({found}), which a second one would share and overwrite: load a fresh base, or "
            "take the adapter off with base = model.unload(). To train a finished adapter on, name its folder in "
            "FineTuningSettings(adapter=...)"
        )
    require_causal_model(base_model, "adapters", "Train one on it with PEFT, in a loop of your own")
    if settings.adapter:
        place = resolve(settings.adapter, expect="adapter", base_optional=True)
        settings = resolve_settings_from_adapter(settings, peft_config(place.adapter_contents, trainable=True))
    with training_folder(run_folder, resume, overwrite) as folder:
        source = load_rows(rows)
        check_encoded_matches_rows(encoded, source)
        if encoded is None:
            source, encoded = training_rows(source, tokenizer, settings)
        chosen = make_objective(settings.objective, settings.objective_options) if objective is None else objective
        require_mask_column(chosen, encoded, source.source)
        refers = "reference_kl" in chosen.requires  # to the base with the adapter off
        check_fits_model(base_model, encoded, source.where)
        keep_unpacked(base_model)
        base = {"config": config_fingerprint(base_model), "weights": base_weight_samples(base_model)}
        identity: dict[str, Any] = {"reference": "base"} if refers else {}
        if settings.adapter:
            with explained("adapter", settings.adapter):
                model = load_peft(base_model, place.adapter, trainable=True)  # its folder is only read
            train_in_fp32(model)
            logger.info(
                "going on from the adapter %s (rank %d, α %g) with a warm-up of %g of the steps",
                settings.adapter, settings.rank, settings.alpha, settings.warmup_ratio,
            )  # fmt: skip
        else:
            model = build_adapter(base_model, settings)
        causal, lengths = causal_model(model), encoded.arrays["lengths"]
        settings = fit_passes(settings, lengths, causal, chosen, chosen.k, folder.recorded_pass_rows)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if settings.adapter:
            identity["start"] = weights_checksum(trained.items())
        identity |= {
            "stage": "sft",
            "settings": {**settings.as_record(), "objective": chosen.name},
            "data": source.as_record(),
            "tokens": encoded_fingerprint(encoded),
            "base": base,
            "constants": chosen.settings,
        }
        trainer = StatisticsTrainer(
            model,
            build_trainer_arguments(SFTConfig, settings, folder, len(encoded), target_device(model).type),
            encoded,
            objective=chosen,
            trained=trained,
            processing_class=tokenizer,
            where=source.where,
            reference=base_reference if refers else None,
        )
        outcome = run_in_folder(trainer, folder, identity, on_step)
    return FineTuningResult(
        **vars(outcome),
        model=model,
        settings=settings,
        rows=len(encoded),
        response_tokens=encoded.summary.response_tokens,
        data={"source": source.source, "fingerprint": source.fingerprint},
        objective=chosen.name,
        constants=dict(chosen.settings),
    )


def make_adapter(
    model: str,
    data: str | RowsSettings,
    folder: str | Path,
    settings: FineTuningSettings | None = None,
    *,
    max_rows: int = 0,
    loading: Loading | None = None,
    system: str = "none",
    resume: bool = False,
    overwrite: bool = False,
    on_step: OnStep | None = None,
) -> FineTuningResult:
    """Train an adapter on a base and rows that are given by name, and write it as an ordinary PEFT folder.

    The command `loragate sft` is this call. `train_adapter` does the same with a base in memory, and writes nothing.

    Args:
        model: base model, folder or hub id.
        data: the rows, a file or hub id; or `RowsSettings`, for a split, a revision or a subset.
        folder: where the adapter is written; must be new or empty, or hold the run to resume.
        settings: the paper's values by default; with `adapter` a finished adapter is trained on.
        max_rows: number of rows to use (0: all); see `RowsSettings.select`.
        loading: how the base is loaded.
        system: "none" leaves out a default system message that the template injects, "keep" keeps it.
        resume: go on with what an interrupted call left in `folder`.
        overwrite: remove what an earlier call left in `folder`, finished or not, and begin anew.
        on_step: called after every optimiser step.

    Raises:
        ConfigError: for settings that cannot be used together, rows without a keep_mask that the objective needs, or a folder
            that holds something else, or the adapter that is trained on.
        DataError: for rows that cannot be used.
        TrainingError: as in `train_adapter`; also where rows or settings have changed since the run to resume began.
    """
    settings = settings or FineTuningSettings()
    require_free_out(Path(folder), resume, overwrite, settings.adapter)
    run = AdapterRun(
        model,
        RowsSettings(data=data) if isinstance(data, str) else data,
        Path(folder),
        settings,
        max_rows,
        loading or Loading(),
        system,
        resume,
        overwrite,
    )
    run.read()
    run.load()
    return run.train(on_step)


@dataclass
class AdapterRun:
    """`make_adapter` in three steps, so that a command can say what it does in between: `read`, `load`, `train`.

    The fields are the arguments of `make_adapter`. `read` adds the settings of an adapter that is continued, the objective, the
    tokenizer, the rows in training order and their tokens; `load` the base.
    """

    model: str
    asked: RowsSettings
    folder: Path
    settings: FineTuningSettings
    max_rows: int
    loading: Loading
    system: str
    resume: bool
    overwrite: bool = False

    def read(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Read and check what needs no model; `on_progress` is called with the rows that are tokenised, and all rows."""
        self.place = tokenized = resolve(self.model, expect="base")
        if self.settings.adapter:
            # the base is the one that is named here, so the adapter's own is not looked for
            adapter = resolve(self.settings.adapter, expect="adapter", base_optional=True)
            self.settings = resolve_settings_from_adapter(
                replace(self.settings, adapter=adapter.record_name),
                peft_config(adapter.adapter_contents, trainable=True),
            )
            # with its own tokenizer and template, where it has them: what it was trained with
            tokenized = replace(adapter, base=self.place.base)
        settings = self.settings
        self.objective = make_objective(settings.objective, settings.objective_options)
        rows = read_rows(self.asked, self.max_rows, settings.seed)
        self.tokenizer = open_tokenizer(tokenized, self.loading)
        self.rows, self.encoded = training_rows(rows, self.tokenizer, settings, self.system, on_progress=on_progress)
        require_mask_column(self.objective, self.encoded, self.rows.source)

    def load(self) -> None:
        """The base."""
        # under a launcher that shards, the base lies in host memory and its shards go to the devices
        with explained("base model", self.place.base.name):
            sharded, autocast = detect_launch().is_sharded, self.settings.precision != "fp32"
            self.base = open_base(self.place.base, self.loading, host_memory=sharded, autocast=autocast)

    def train(self, on_step: OnStep | None = None) -> FineTuningResult:
        """Train, and write the adapter; on several processes only the main one writes."""
        run = self.folder / "run"
        if self.overwrite and process_state().is_main_process:
            # or a second run that is cut short would leave the first one's result beside its own log
            for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
                (self.folder / name).unlink(missing_ok=True)
        result = train_adapter(
            self.base,
            self.tokenizer,
            self.rows,
            self.settings,
            run_folder=run,
            # stopped before its first step, a run has its configuration and nothing to go on with
            resume=self.resume and RunFolder(run).record_path.is_file(),
            overwrite=self.overwrite,
            encoded=self.encoded,
            on_step=on_step,
        )
        if process_state().is_main_process:
            result.save(self.folder, self.tokenizer, self.place.base)
        return result
