"""What a caller gives to `train_adapter` and `calibrate`, looked at before a model is changed: one sentence for each mix-up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer

from loragate.data import EncodedRows, Rows, load_rows
from loragate.errors import ConfigError, DataError
from loragate.training.settings import CalibrationSettings, StageOneSettings, TrainSettings

RowsGiven = Rows | Sequence[dict[str, Any]] | str | Path
_STAGES: dict[type, str] = {StageOneSettings: "train_adapter", CalibrationSettings: "calibrate"}
_Settings = TypeVar("_Settings", bound=TrainSettings)


def settings_given(settings: _Settings | None, kind: type[_Settings]) -> _Settings:
    """The settings, or the stage's own values for None.

    Raises:
        ConfigError: for anything else than `kind`, such as the settings of the other stage.
    """
    if settings is None:
        return kind()
    if not isinstance(settings, kind):
        other = _STAGES.get(type(settings))
        raise ConfigError(
            f"settings of {_STAGES[kind]} are {kind.__name__}, found {type(settings).__name__}"
            + (f", which belong to {other}" if other else "")
        )
    return settings


def require_tokenizer(tokenizer: Any) -> None:
    """Raises ConfigError for what is no tokenizer; rows that are tokenised already need its padding."""
    if not hasattr(tokenizer, "pad_token_id"):
        raise ConfigError(
            f"the tokenizer is {type(tokenizer).__name__}; give the base's own, as AutoTokenizer.from_pretrained loads it, "
            "before the rows"
        )


def require_resumable(resume: bool, run_folder: str | Path | None) -> None:
    """Raises ConfigError for a run that is to go on from nowhere."""
    if resume and run_folder is None:
        raise ConfigError("resume=True needs run_folder, the folder of the run that is to go on")


def rows_given(rows: RowsGiven) -> Rows:
    """The rows themselves, or those of a path, a hub id or any iterable of dicts.

    Raises:
        DataError: for anything else, and as `load_rows` does.
    """
    if isinstance(rows, (Rows, str, Path, Mapping)) or not hasattr(rows, "__iter__"):
        return load_rows(rows)
    return load_rows(list(rows))


def require_encoded(encoded: Any, rows: Rows) -> None:
    """Refuse tokenised rows that are none, or that are not of `rows`; None is for the stage to tokenise.

    Raises:
        ConfigError: for another type.
        DataError: for more encoded rows than rows, or an index beyond them.
    """
    if encoded is None:
        return
    if not isinstance(encoded, EncodedRows):
        raise ConfigError(
            f"encoded is a {type(encoded).__name__}, expected EncodedRows: what loragate.data.encode_rows returns"
        )
    last = max(encoded.column("rows"), default=-1)
    if len(encoded) > len(rows) or last >= len(rows):
        raise DataError(
            f"encoded holds {len(encoded)} rows up to index {last}, and rows has {len(rows)} ({rows.source}): they do not "
            "belong together. Give the rows that were encoded, in their order"
        )


def require_plain_base(base_model: Any) -> None:
    """Refuse a base that wears an adapter: a second one would share its layers, and overwrite one of the same name.

    Raises:
        ConfigError: naming what was found and the two ways to a plain base.
    """
    layer = next((name for name, part in base_model.named_modules() if isinstance(part, BaseTunerLayer)), None)
    if layer is None and not isinstance(base_model, PeftModel):
        return
    found = f"{layer} is an adapter's layer" if layer is not None else f"this is a {type(base_model).__name__}"
    raise ConfigError(
        f"the base already carries an adapter ({found}), which a second one would share and overwrite: load a fresh base, or "
        "take the adapter off with base = model.unload(). To train a finished adapter on, name its folder in "
        "StageOneSettings(adapter=...)"
    )
