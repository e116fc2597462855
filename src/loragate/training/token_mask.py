"""Offline token masks: how much a reference model that learned the task gains on each response token, and which to keep.

Token Cleaning (arXiv 2502.01968), fixed-model variant. With the base model θ and a reference θ′, a finetuned copy of it,

    influence_t = ℓ_t(θ) − ℓ_t(θ′),    ℓ_t = −log p(y_t | y_<t, x)

and the tokens of the largest influence are kept: the first `int(keep · N)` of all N response tokens ("global", the
method's own choice) or of each row ("row"). The scores of a finished pass are kept in a folder, so that an interrupted call goes
on with the other one. The self-evolving variant is this one repeated by hand on the parts of a data set, each time with the model
trained on the part before as the reference.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loragate.data import Collator, EncodedRows, encode_rows, load_rows, template_hash
from loragate.display import Display
from loragate.errors import ConfigError, DataError, LoragateError, nearest
from loragate.files import RunFolder, write_atomically, write_json, write_text
from loragate.losses import StatisticsRequest
from loragate.losses.causal_head import causal_model
from loragate.losses.head import IGNORE_INDEX
from loragate.models import Loading, load_adapter, open_tokenizer, open_weights, resolve
from loragate.models.passes import iter_passes
from loragate.printable import excerpt
from loragate.training.model_state import statistics_forward
from loragate.training.rows import check_fits_model

SCOPES = ("global", "row")
WINDOW = 16  # forward passes whose rows are sorted by length before they are cut into passes

Scores = list[np.ndarray]


def mask_rows(
    model: str,
    reference: str,
    data: str,
    out: str | Path,
    *,
    keep: float = 0.6,
    scope: str = "global",
    split: str = "",
    revision: str = "",
    max_rows: int = 0,
    max_length: int = 2048,
    per_device_train_batch_size: int = 8,
    system: str = "none",
    loading: Loading | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Score every response token under both models, keep the best share, and write the rows with a column keep_mask.

    Beside the rows, OUT.record.json says what was scored; its counts and mean influences are returned.

    Raises:
        ConfigError: for what cannot work, before anything is loaded, and for tokenizers or chat templates that differ.
        DataError: for rows that cannot be scored or written, or that carry a mask already.
        SetupError: for rows that are longer than a model has positions.
    """
    require_share(keep, scope)
    out, how = Path(out), loading or Loading()
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {out}: the masked rows are written as JSONL; give a name that ends in .jsonl")
    if out.exists():
        raise ConfigError(f"--out {out} exists already; choose another name or remove it first")
    base, other = resolve(model, expect="base"), resolve(reference, what="reference model", base_optional=True)
    if other.kind == "gated":
        raise ConfigError(f"--reference {reference} is gated; its plain adapter is {other.adapter}")
    if other.kind == "adapter":
        other = replace(other, base=base.base)
    elif base.folder.exists() and other.base.absolute_name == base.base.absolute_name:
        raise ConfigError("--reference is the base itself, so every influence would be zero; give a finetuned model")
    rows = load_rows(data, split=split or None, revision=revision or None, limit=max_rows or None)
    if rows[0].get("keep_mask") is not None:
        raise DataError(f"{rows.where(0)}: the rows carry a keep_mask already; take that column out to have one made")
    tokenizer, display = open_tokenizer(base, how), Display()
    with display.job("reading the data"):
        whole = encode_rows(rows, tokenizer, max_length=None, system=system)
        for item in whole:  # scoring can take hours
            try:
                json.dumps(rows[item["row"]], ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                near = excerpt(error.object[max(0, error.start - 30) : error.end])
                raise DataError(
                    f"{rows.where(item['row'])}: a text holds half of a surrogate pair, near {near}, and cannot be written as "
                    "UTF-8. Mend or remove it, also where it stands in a column that nothing reads"
                ) from None
            except TypeError as error:
                raise DataError(f"{rows.where(item['row'])}: cannot be written as JSON ({error})") from error
        texts = [tokenizer.decode(row["input_ids"]) for row in whole[:20]]
        reference_tokenizer = open_tokenizer(other, how)
        require_same_tokens(tokenizer, reference_tokenizer, texts)
        if not whole.summary.all_plain:  # which no template renders
            require_same_template(tokenizer, reference_tokenizer, reference)
    # a mask has an entry for every response token of `whole`, scored or not
    scored = EncodedRows({**row, **{key: row[key][:max_length] for key in ("input_ids", "labels")}} for row in whole)
    lengths = response_lengths(scored)
    if not sum(lengths):
        raise DataError(f"{rows.source}: max_length={max_length} cuts the whole response of every row; raise it")
    identity = {
        "model": {"name": model, "files": base.fingerprint},
        "reference": {"name": other.record_name, "files": other.fingerprint},
        "data": rows.fingerprint,
        "max_length": max_length,
        "system": system,
        "chat_template": how.chat_template,
        "dtype": how.dtype,
        **({} if how.quantization == "none" else {"quantization": how.quantization}),
    }
    partial = out.with_name(out.name + ".partial")
    RunFolder(partial).begin(identity, resume=resume)

    def score(name: str, load: Callable[[], Any]) -> Any:
        path, found = partial / f"{name}.npy", Scores()
        if path.is_file():
            return None
        with display.job(f"scoring under the {name}", len(scored), "row") as job:
            scorer, pad = load(), tokenizer.pad_token_id
            try:
                check_fits_model(scorer, scored, rows.where)
            except LoragateError:
                if not any(
                    partial.glob("*.npy")
                ):  # nothing was scored: the same call with another max_length may begin
                    shutil.rmtree(partial)
                raise
            for window in response_log_probs(
                scorer, scored, pad, per_device_train_batch_size=per_device_train_batch_size
            ):
                found += window
                job(len(found))
        assert [len(values) for values in found] == lengths

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:
                np.save(file, np.concatenate(found))

        write_atomically(path, write)
        return scorer

    def scores(name: str) -> Scores:
        return np.split(np.load(partial / f"{name}.npy"), np.cumsum(lengths)[:-1])

    # one model in memory at a time; an adapter is put on the base that is there
    plain = score("base", lambda: open_weights(base, how))
    if other.kind == "adapter":
        score("reference", lambda: load_adapter(plain or open_weights(base, how), other))
    else:
        plain = None
        gc.collect()
        score("reference", lambda: open_weights(other, how))
    influence = [under - alone for alone, under in zip(scores("base"), scores("reference"), strict=True)]
    masks, full_lengths = keep_masks(influence, keep, scope), response_lengths(whole)
    lines = []
    for item, mask, length in zip(whole, masks, full_lengths, strict=True):
        row = {**rows[item["row"]], "keep_mask": [*mask.tolist(), *[0] * (length - len(mask))]}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_text(out, "".join(lines))
    values, kept = np.concatenate(influence), np.concatenate(masks).astype(bool)

    def mean(chosen: np.ndarray) -> float | None:
        return float(values[chosen].astype(np.float64).mean()) if chosen.any() else None

    summary = {
        "keep": keep,
        "scope": scope,
        "rows": len(masks),
        "left_out": len(rows) - len(whole),
        "tokens": sum(full_lengths),
        "scored": len(values),
        "kept": int(kept.sum()),
        "rows_without_a_kept_token": sum(not mask.any() for mask in masks),
        "influence_kept": mean(kept),
        "influence_dropped": mean(~kept),
        "lowest_kept": float(values[kept].min()) if kept.any() else None,
    }
    write_json(out.with_name(out.name + ".record.json"), {**identity, **summary})
    shutil.rmtree(partial)
    return summary


@torch.no_grad()
def response_log_probs(
    model: Any,
    encoded: Sequence[dict[str, Any]],
    pad_token_id: int,
    *,
    per_device_train_batch_size: int = 8,
) -> Iterator[Scores]:
    """log p of every response token, window by window in the order of the rows, each row [tokens] fp32; a DataError for NaN."""
    device, collate = next(model.parameters()).device, Collator(pad_token_id)
    request = StatisticsRequest(2, ("log_prob",), ())
    step = WINDOW * per_device_train_batch_size
    model.eval()
    with statistics_forward(model):
        for start in range(0, len(encoded), step):
            rows = list(encoded[start : start + step])
            found: Scores = [np.empty(0, dtype=np.float32)] * len(rows)
            # like lengths share a pass, which saves padding; scores go back in the order of the rows
            order = sorted(range(len(rows)), key=lambda index: (-len(rows[index]["input_ids"]), index))
            lengths = [len(rows[index]["input_ids"]) for index in order]
            for together in iter_passes(causal_model(model), lengths, per_device_train_batch_size):
                members = [order[place] for place in together]
                batch = collate([{k: v for k, v in rows[i].items() if k != "keep_mask"} for i in members])
                chosen = {name: batch[name].to(device) for name in ("input_ids", "attention_mask", "labels")}
                stats = model(**chosen, statistics=request)
                for index, values, mask in zip(members, stats.log_prob.float().cpu(), stats.mask.cpu(), strict=True):
                    found[index] = values[mask].numpy().astype(np.float32)  # [response tokens]
            if not all(np.isfinite(values).all() for values in found):
                bad = next(i for i, values in enumerate(found) if not np.isfinite(values).all())
                raise DataError(f"row {rows[bad]['row']}: the model gives a response token no finite probability")
            yield found


def keep_masks(influence: Scores, keep: float, scope: str = "global") -> list[np.ndarray]:
    """1 for the tokens of the largest influence, 0 for the others, per row like `influence`.

    "global" ranks all tokens together, "row" those of each row. Among equal influences the earlier token is kept.
    """
    require_share(keep, scope)
    if scope == "row":
        return [_top_share_mask(values, keep) for values in influence]
    lengths = [len(values) for values in influence]
    return np.split(_top_share_mask(np.concatenate(influence), keep), np.cumsum(lengths)[:-1])


def require_share(keep: float, scope: str) -> None:
    """Raises ConfigError for what is no share, or no scope."""
    if not 0 < keep <= 1:
        raise ConfigError(f"keep is a share of the tokens in (0, 1], found {keep!r}; Token Cleaning keeps 0.6")
    if scope not in SCOPES:
        raise ConfigError(f"scope must be one of {', '.join(SCOPES)}, found {scope!r}{nearest(scope, SCOPES)}")


def require_same_tokens(base: Any, reference: Any, texts: Sequence[str]) -> None:
    """Refuse (ConfigError) two tokenizers that cut text differently: a difference of losses then compares different tokens."""
    one, other = base.get_vocab(), reference.get_vocab()
    if one != other:
        token = min((t for t in {*one, *other} if one.get(t) != other.get(t)), key=str)
        raise ConfigError(
            f"the tokenizers of base and reference differ: {token!r} is {one.get(token, 'unknown')} in the base and "
            f"{other.get(token, 'unknown')} in the reference. Influence compares the same tokens under two models; take a "
            "reference that was trained from this base"
        )
    for text in texts:
        if base(text, add_special_tokens=False)["input_ids"] != reference(text, add_special_tokens=False)["input_ids"]:
            raise ConfigError(
                f"the tokenizers of base and reference cut {text[:60]!r} differently; take a reference that was trained "
                "from this base"
            )


def require_same_template(base: Any, reference: Any, name: str) -> None:
    """Refuse (ConfigError) a reference with another chat template: it would be scored on texts that it has never learned."""
    own, other = template_hash(base), template_hash(reference)
    if own != other:
        lacking = next(
            (f" (the {who} has none)" for who, found in (("base", own), ("reference", other)) if found == "none"), ""
        )
        raise ConfigError(
            f"the chat template of the reference {name} is not the base's{lacking}. Rows are rendered once, for both: give the "
            "template that the reference was trained with by --chat-template FILE, here and to sft"
        )


def response_lengths(encoded: Sequence[dict[str, Any]]) -> list[int]:
    """Response tokens of each row."""
    return [sum(label != IGNORE_INDEX for label in row["labels"]) for row in encoded]


def _top_share_mask(values: np.ndarray, keep: float) -> np.ndarray:
    mask = np.zeros(len(values), dtype=np.int8)
    mask[np.argsort(-values, kind="stable")[: int(len(values) * keep)]] = 1
    return mask
