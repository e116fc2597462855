"""Will the model stop? The chat template's end of turn, compared with the tokens that generation stops at.

The known failure: a base model's tokenizer stops at `<|endoftext|>` while its chat template ends a turn with
`<|im_end|>`. An adapter trained on that template learns to write `<|im_end|>`, nothing stops there, and every response
runs on to the token limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loragate.data.chat import Chat
from loragate.data.rendering import IGNORED
from loragate.data.tokens import SegmentTokenizer
from loragate.printable import escape_controls

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class EndingReport:
    """How responses end.

    Attributes:
        end_ids, end_tokens: ids and texts that end a response in training, first to last: the chat template's end of
            turn, or EOS for a tokenizer without a template. Empty when the template writes nothing.
        stop_ids: ids that generation stops at.
        stops: one of `end_ids` is among them.
        share_ending: share of the given rows whose last response ends in a stop token; None without rows.
        problems: what is wrong, in sentences; empty when all is well.
    """

    end_ids: tuple[int, ...]
    end_tokens: tuple[str, ...]
    stop_ids: tuple[int, ...]
    stops: bool
    share_ending: float | None
    problems: list[str] = field(default_factory=list)


def ending_health(
    tokenizer: PreTrainedTokenizerBase,
    encoded_rows: Sequence[Mapping[str, Any]] | None = None,
    generation_config: GenerationConfig | None = None,
) -> EndingReport:
    """Compare the end of a response in training with the stop tokens of generation.

    Args:
        encoded_rows: rows from `encode_rows`, to count how many end in a stop token.
        generation_config: its eos_token_id (one or a list) is what `generate` stops at; without it, or where it has
            none, the tokenizer's eos_token_id.
    """
    chat = Chat(tokenizer)
    end_ids = _end_ids(chat)
    stop_ids, source = _stop_ids(tokenizer, generation_config)
    stops = any(index in stop_ids for index in end_ids)
    share = None
    if encoded_rows:
        share = sum(_last_label(row) in stop_ids for row in encoded_rows) / len(encoded_rows)
    problems = _row_problems(share, stops)
    if share != 1.0:  # rows that all stop are better evidence than the template, which plain rows do not use
        problems = _template_problems(tokenizer, end_ids, stop_ids, source) + problems
    return EndingReport(end_ids, tuple(_name(tokenizer, [i]) for i in end_ids), stop_ids, stops, share, problems)


def _end_ids(chat: Chat) -> tuple[int, ...]:
    if chat.template is None:
        eos = chat.tokenizer.eos_token_id
        return () if eos is None else (eos,)
    end = chat.turn_end.rstrip()
    return tuple(SegmentTokenizer(chat.tokenizer)([end], [True])[0]) if end else ()


def _stop_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None
) -> tuple[tuple[int, ...], str]:
    stop = None if generation_config is None else generation_config.eos_token_id
    source = "generation_config.eos_token_id"
    if stop is None:
        stop, source = tokenizer.eos_token_id, "tokenizer.eos_token_id"
    if stop is None:
        return (), source
    return tuple(stop) if isinstance(stop, list | tuple) else (int(stop),), source


def _template_problems(
    tokenizer: PreTrainedTokenizerBase, end_ids: tuple[int, ...], stop_ids: tuple[int, ...], source: str
) -> list[str]:
    if not stop_ids:
        return [
            "Neither the tokenizer nor the generation config names an end-of-sequence token, so generation never stops "
            f"by itself; set {source}."
        ]
    if not end_ids:
        return [
            "The chat template writes no token after an assistant turn, so the model never learns to stop; end the "
            "assistant turn in the template with the end-of-sequence token."
        ]
    if any(index in stop_ids for index in end_ids):
        return []
    known = ", ".join(f"{_name(tokenizer, [index])} (id {index})" for index in stop_ids)
    if len(end_ids) > 1:
        written = f"{_name(tokenizer, end_ids)} as {len(end_ids)} tokens"
        cure = "Add the text to the tokenizer as one special token, or stop on it as a string."
    else:
        written = f"{_name(tokenizer, end_ids)} (id {end_ids[0]})"
        cure = f"Add {end_ids[0]} to generation_config.eos_token_id."
    return [
        f"The chat template ends an assistant turn with {written}, while generation stops only at {known}, from "
        f"{source}: responses will run on to the token limit. {cure}"
    ]


def _row_problems(share: float | None, stops: bool) -> list[str]:
    if share is None or share == 1.0 or not stops:
        return []
    return [
        f"{1 - share:.1%} of the rows have a last response that does not end in a stop token (usually because "
        "max_length cuts it), so they teach the model to go on; raise max_length or drop those rows."
    ]


def _last_label(row: Mapping[str, Any]) -> int:
    return next((label for label in reversed(row["labels"]) if label != IGNORED), IGNORED)


def _name(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return escape_controls(tokenizer.decode(list(ids), skip_special_tokens=False))
