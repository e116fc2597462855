"""`loragate mask`: which response tokens to learn from, by their influence between a base and a reference model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from loragate.cli.arguments import Command
from loragate.cli.options import ModelOptions, OutputOptions, require_files
from loragate.display import console, duration
from loragate.validate import NonNegativeInt, PositiveInt


@dataclass(frozen=True)
class MaskOptions(ModelOptions, OutputOptions):
    """Settings of `loragate mask`.

    Attributes:
        model: base model, folder or hub id.
        reference: the base after finetuning on good data: a LoRA adapter of this base, or a full model.
        data: prompts and responses: .jsonl, .json, .csv, .parquet or a hub id; any chat format.
        split: split of a hub data set.
        revision: branch, tag or commit of a hub data set.
        out: JSONL file to write: the rows with a column keep_mask, for sft --objective mask or forgetting.
        keep: share of the response tokens to keep.
        scope: rank the tokens of all rows together, or those of each row.
        max_rows: number of rows to use, from the first on (0: all).
        max_length: token limit of a row; later tokens are not scored and not kept. Use the limit of the training.
        per_device_train_batch_size: rows per forward pass.
    """

    model: str = ""
    reference: str = ""
    data: str = ""
    split: str = ""
    revision: str = ""
    keep: float = 0.6
    scope: Literal["global", "row"] = "global"
    max_rows: NonNegativeInt = 0
    max_length: Annotated[int, Ge(2)] = 2048
    per_device_train_batch_size: PositiveInt = 8


def run(options: MaskOptions) -> int:
    """Score every response token under both models, keep the best share, write the rows."""
    require_files(options)
    from loragate.training.token_mask import mask_rows

    out, began = console(), time.monotonic()
    summary = mask_rows(
        options.model,
        options.reference,
        options.data,
        options.out,
        keep=options.keep,
        scope=options.scope,
        split=options.split,
        revision=options.revision,
        max_rows=options.max_rows,
        max_length=options.max_length,
        per_device_train_batch_size=options.per_device_train_batch_size,
        system=options.system,
        loading=options,
        resume=options.resume,
    )
    share = 100 * summary["kept"] / max(1, summary["scored"])
    out.print(
        f"kept {summary['kept']:,} of {summary['scored']:,} scored response tokens ({share:.1f} %, {summary['scope']})"
    )
    if summary["scored"] < summary["tokens"]:
        out.print(f"{summary['tokens'] - summary['scored']:,} tokens lie beyond --max-length and are not kept")
    if summary["rows_without_a_kept_token"]:
        out.print(f"{summary['rows_without_a_kept_token']} rows keep no token")
    pair = [f"{value:+.3f}" for value in (summary["influence_kept"], summary["influence_dropped"]) if value is not None]
    out.print(f"mean gain of the reference in nats per token, kept and dropped: {' and '.join(pair)}")
    out.print(f"written to {options.out} in {duration(time.monotonic() - began)}")
    out.print(f"next: loragate sft --model {options.model} --data {options.out} --objective mask --out adapter")
    return 0


COMMAND = Command(
    name="mask",
    options=MaskOptions,
    run=run,
    required_at_run=("model", "reference", "data", "out"),
    examples=(
        "loragate mask --model path/to/base --reference warm-up-adapter --data train.jsonl --out masked.jsonl --keep 0.6",
        "loragate mask --model path/to/base --reference path/to/finetuned --data train.jsonl --out masked.jsonl --scope row",
    ),
    common="keep scope split revision max_rows max_length per_device_train_batch_size dtype quantization device resume",
)
