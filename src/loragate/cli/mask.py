"""`loragate mask`: which response tokens to learn from, by their influence between a base and a reference model."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from loragate.cli.arguments import Command, require_given
from loragate.cli.options import DataOptions, ModelOptions, OutputOptions
from loragate.display import Display, console, duration, quiet_logging
from loragate.errors import ConfigError, DataError
from loragate.training.preflight import check_loading
from loragate.validate import Count

if TYPE_CHECKING:
    from loragate.models import Loading, Place


@dataclass(frozen=True)
class MaskOptions(DataOptions, ModelOptions, OutputOptions):
    """Settings of `loragate mask`.

    Attributes:
        model: base model, folder or hub id.
        reference: the base after finetuning on good data: a LoRA adapter of this base, or a full model.
        out: JSONL file to write: the rows with a column keep_mask, for sft --objective mask or forgetting.
        keep: share of the response tokens to keep.
        scope: rank the tokens of all rows together, or those of each row.
        max_rows: number of rows to use, from the first on (0: all).
        max_length: token limit of a row; later tokens are not scored and not kept. Use the limit of the training.
        micro_batch_size: rows per forward pass.
    """

    model: str = ""
    reference: str = ""
    keep: float = 0.6
    scope: Literal["global", "row"] = "global"
    max_rows: int = 0
    max_length: Annotated[int, Ge(2)] = 2048
    micro_batch_size: Count = 8


def run(options: MaskOptions) -> int:
    """Score every response token under both models, keep the best share, write the rows."""
    how = check_loading(options)
    out_file, base, reference = check(options)
    options = replace(options, reference=reference.source)
    quiet_logging()
    import time

    from loragate.data import encode_rows, load_rows
    from loragate.models import open_tokenizer
    from loragate.training.token_influence import (
        ScoreFolder,
        keep_masks,
        require_same_tokens,
        response_lengths,
    )

    out, display, began = console(), Display(), time.monotonic()
    rows = load_rows(
        options.data, split=options.split or None, revision=options.revision or None, limit=options.max_rows or None
    )
    if rows[0].get("keep_mask") is not None:
        raise DataError(f"{rows.where(0)}: the rows carry a keep_mask already; take that column out to have one made")
    tokenizer, other = open_tokenizer(base, how), open_tokenizer(reference, how)
    with display.job("reading the data"):
        whole = encode_rows(rows, tokenizer, max_length=None, system=options.system)
        require_same_tokens(tokenizer, other, [tokenizer.decode(row["input_ids"]) for row in list(whole[:20])])
    full_lengths = response_lengths(whole)
    scored = [_cut(row, options.max_length) for row in whole]
    lengths = response_lengths(scored)
    if not sum(lengths):
        raise DataError(
            f"{rows.source}: max_length={options.max_length} cuts the whole response of every row; raise it"
        )
    partial = out_file.with_name(out_file.name + ".partial")
    folder = ScoreFolder(partial, identity(options, base, reference, rows), lengths, resume=options.resume)
    score_both(base, reference, how, folder, scored, tokenizer, display, options.micro_batch_size)
    before, after = folder.read("base"), folder.read("reference")
    influence = [under - alone for alone, under in zip(before, after, strict=True)]
    masks = keep_masks(influence, options.keep, options.scope)
    write_rows(out_file, rows, whole, masks, full_lengths)
    summary = summarise(options, influence, masks, full_lengths, len(rows) - len(whole))
    from loragate.files import write_json

    write_json(
        out_file.with_name(out_file.name + ".record.json"), {**identity(options, base, reference, rows), **summary}
    )
    shutil.rmtree(partial)
    report(out, summary)
    out.print(f"written to {out_file} in {duration(time.monotonic() - began)}", markup=False)
    out.print(
        f"next: loragate sft --model {options.model} --data {out_file} --objective mask --out adapter", markup=False
    )
    return 0


def check(options: MaskOptions) -> tuple[Path, Place, Place]:
    """(the file to write, base, reference); refuses what cannot work before anything is read."""
    from loragate.models import resolve
    from loragate.training.token_influence import check_choice

    require_given(COMMAND, options)
    check_choice(options.keep, options.scope)
    out_file = Path(options.out)
    if out_file.suffix != ".jsonl":
        raise ConfigError(f"--out {options.out}: the masked rows are written as JSONL; give a name that ends in .jsonl")
    if out_file.exists():
        raise ConfigError(f"--out {options.out} exists already; choose another name or remove it first")
    base = resolve(options.model, expect="base")
    reference = resolve(options.reference, what="reference model", base_later=True)
    if reference.kind == "gated":
        raise ConfigError(f"--reference {options.reference} is gated; its plain adapter is {reference.adapter}")
    if reference.kind == "adapter":
        return out_file, base, replace(reference, base=base.base)
    if base.folder.exists() and reference.base.lasting == base.base.lasting:
        raise ConfigError("--reference is the base itself, so every influence would be zero; give a finetuned model")
    return out_file, base, reference


def identity(options: MaskOptions, base: Place, reference: Place, rows: Any) -> dict[str, Any]:
    """Names and fingerprints of the models and rows that the scores belong to."""
    return {
        "model": {"name": options.model, "files": base.fingerprint},
        "reference": {"name": options.reference, "files": reference.fingerprint},
        "data": rows.fingerprint,
        "max_length": options.max_length,
        "system": options.system,
        "chat_template": options.chat_template,
        "dtype": options.dtype,
        **({} if options.quantization == "none" else {"quantization": options.quantization}),
    }


def score_both(
    base: Place,
    reference: Place,
    how: Loading,
    folder: Any,
    encoded: list[dict[str, Any]],
    tokenizer: Any,
    display: Display,
    micro_batch_size: int,
) -> None:
    """One pass per model, one model in memory at a time; an adapter is put on the base that is there."""
    from loragate.models import open_weights, put_on
    from loragate.training.token_influence import response_log_probs

    def score(name: str, load: Callable[[], Any]) -> Any:
        first = folder.finished(name)
        if first == len(encoded):
            return None
        with display.job(f"scoring under the {name}", len(encoded), "row") as job:
            model = load()
            windows = response_log_probs(
                model, encoded, tokenizer.pad_token_id, micro_batch_size=micro_batch_size, first=first
            )
            folder.append(name, windows, lambda done: job.advance_to(done))
        return model

    plain = score("base", lambda: open_weights(base, how))
    if reference.kind == "adapter":
        score("reference", lambda: put_on(plain or open_weights(base, how), reference))
        return
    plain = None
    gc.collect()
    score("reference", lambda: open_weights(reference, how))


def write_rows(out_file: Path, rows: Any, whole: Any, masks: list[Any], lengths: list[int]) -> None:
    """The rows with their keep_mask; tokens beyond max_length were not scored and are not kept."""
    from loragate.files import write_atomically

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            for item, mask, length in zip(whole, masks, lengths, strict=True):
                kept = [*(int(bit) for bit in mask), *[0] * (length - len(mask))]
                try:
                    file.write(json.dumps({**rows[item["row"]], "keep_mask": kept}, ensure_ascii=False) + "\n")
                except TypeError as error:
                    raise DataError(f"{rows.where(item['row'])}: cannot be written as JSON ({error})") from error

    write_atomically(out_file, write)


def summarise(
    options: MaskOptions, influence: list[Any], masks: list[Any], lengths: list[int], left_out: int
) -> dict[str, Any]:
    """Counts and mean influences, for the record and the screen."""
    import numpy as np

    values, kept = np.concatenate(influence), np.concatenate(masks).astype(bool)

    def mean(chosen: Any) -> float | None:
        return float(values[chosen].astype(np.float64).mean()) if chosen.any() else None

    return {
        "keep": options.keep,
        "scope": options.scope,
        "rows": len(masks),
        "left_out": left_out,
        "tokens": int(sum(lengths)),
        "scored": len(values),
        "kept": int(kept.sum()),
        "rows_without_a_kept_token": int(sum(not mask.any() for mask in masks)),
        "influence_kept": mean(kept),
        "influence_dropped": mean(~kept),
        "lowest_kept": float(values[kept].min()) if kept.any() else None,
    }


def report(out: Any, summary: dict[str, Any]) -> None:
    """Print the share of tokens that the mask keeps."""
    share = 100 * summary["kept"] / max(1, summary["scored"])
    out.print(
        f"kept {summary['kept']:,} of {summary['scored']:,} scored response tokens ({share:.1f} %, {summary['scope']})"
    )
    if summary["scored"] < summary["tokens"]:
        out.print(f"{summary['tokens'] - summary['scored']:,} tokens lie beyond --max-length and are not kept")
    if summary["left_out"]:
        out.print(f"{summary['left_out']} rows without a response left out")
    if summary["rows_without_a_kept_token"]:
        out.print(f"{summary['rows_without_a_kept_token']} rows keep no token")
    pair = [f"{value:+.3f}" for value in (summary["influence_kept"], summary["influence_dropped"]) if value is not None]
    out.print(f"mean gain of the reference in nats per token, kept and dropped: {' and '.join(pair)}")


def _cut(row: dict[str, Any], length: int) -> dict[str, Any]:
    return {**row, "input_ids": list(row["input_ids"][:length]), "labels": list(row["labels"][:length])}


COMMAND = Command(
    name="mask",
    summary="Offline token mask: keep the response tokens on which a reference model gains most over the base.",
    options=MaskOptions,
    run=run,
    needs=("model", "reference", "data", "out"),
    examples=(
        "loragate mask --model path/to/base --reference warm-up-adapter --data train.jsonl --out masked.jsonl --keep 0.6",
        "loragate mask --model path/to/base --reference path/to/finetuned --data train.jsonl --out masked.jsonl --scope row",
    ),
    common="keep scope split revision max_rows max_length micro_batch_size dtype quantization device resume",
)
