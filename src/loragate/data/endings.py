"""What ends an answer, for every engine and server; and whether the rows teach the model to end one.

A base model's tokenizer may name `<|endoftext|>` as its end of sequence while its chat template ends a turn with
`<|im_end|>` (Qwen2.5-Math, the base models of Qwen3). An adapter trained on that template learns to write `<|im_end|>`,
so generation has to stop there as well. `find_endings` is the one place that decides where.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loragate.data.chat import Chat
from loragate.data.encoding import IGNORED, SegmentTokenizer
from loragate.errors import ConfigError
from loragate.printable import escape_controls

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Endings:
    """What ends an answer.

    Attributes:
        token_ids: the tokenizer's EOS, those of the model's generation config, and the token that ends the chat
            template's assistant turn.
        texts: the end of the assistant turn where the template spells it in ordinary tokens; mostly empty.
        declared: of `token_ids`, those that the tokenizer and the generation config name, which every program knows.
    """

    token_ids: frozenset[int]
    texts: tuple[str, ...]
    declared: frozenset[int]

    @property
    def added(self) -> dict[str, list[Any]]:
        """What the chat template (or a record, or a caller) adds to what is declared, JSON-able; mostly {}."""
        found: dict[str, list[Any]] = {"token_ids": sorted(self.token_ids - self.declared), "texts": list(self.texts)}
        return {key: value for key, value in found.items() if value}


def find_endings(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None, extra: Collection[int] = ()
) -> Endings:
    """What ends an answer of this model; the set that training's rows end in is part of it.

    Args:
        tokenizer: with the chat template that is used.
        generation_config: of the model; it holds the ids that a gated adapter recorded, too.
        extra: further token ids.

    Raises:
        ConfigError: when no token ends an answer: none could ever stop.
    """
    # "keep": the end of a turn is probed, whatever the system message
    found = _endings(Chat(tokenizer, "keep"), generation_config, extra)
    if not found.token_ids:
        raise ConfigError(
            "Neither the tokenizer, its chat template nor the model's generation config names a token that ends an "
            "answer, so none could ever stop; pass stop_token_ids."
        )
    return found


def _endings(chat: Chat, generation_config: Any, extra: Collection[int] = ()) -> Endings:
    declared: set[int] = set()
    for named in (chat.tokenizer.eos_token_id, getattr(generation_config, "eos_token_id", None)):
        if named is not None:
            declared.update([named] if isinstance(named, int) else named)  # one id or a list, as configurations have it
    end = chat.turn_end.strip()
    token = _end_token(chat, end)
    found = frozenset({*declared, *extra, *([] if token is None else [token])})
    return Endings(found, (end,) if end and token is None else (), frozenset(declared))


def _end_token(chat: Chat, end: str) -> int | None:
    """The first control token in the text, or the first added one, which no text is merged into either; None without."""
    added = chat.tokenizer.added_tokens_decoder.items()
    # the least: special ones first, then the one that comes first, then the longest that begins there
    found = [
        (not token.special, end.find(token.content), -len(token.content), index)
        for index, token in added
        if token.content.strip() and token.content in end
    ]
    return min(found)[-1] if found else None


@dataclass(frozen=True)
class EndingReport:
    """How responses end.

    Attributes:
        end_tokens: texts of the tokens that end a response in training, first to last: the chat template's end of turn, or
            EOS for a tokenizer without a template. Empty when the template writes nothing.
        stop_ids: ids that generation stops at.
        stops: generation stops at the end of a response.
        problems: what is wrong, in sentences; empty when all is well.
    """

    end_tokens: tuple[str, ...]
    stop_ids: tuple[int, ...]
    stops: bool
    problems: list[str] = field(default_factory=list)


def ending_health(
    tokenizer: PreTrainedTokenizerBase,
    encoded_rows: Sequence[Mapping[str, Any]] | None = None,
    generation_config: GenerationConfig | None = None,
) -> EndingReport:
    """Compare the end of a response in training with what ends an answer in generation.

    Args:
        encoded_rows: rows from `encode_rows`, to count how many end where generation stops.
        generation_config: of the model, as for `find_endings`.
    """
    chat = Chat(tokenizer, "keep")
    endings, end, eos = _endings(chat, generation_config), chat.turn_end.rstrip(), tokenizer.eos_token_id
    # as training tokenises it, behind an answer
    end_ids: tuple[int, ...] = tuple(SegmentTokenizer(tokenizer)([end], [True])[0]) if end else ()
    if chat.template is None and eos is not None:
        end_ids = (eos,)
    stops = bool(endings.texts) or any(index in endings.token_ids for index in end_ids)
    share = None
    if encoded_rows:
        share = sum(_ends(row, endings, tokenizer) for row in encoded_rows) / len(encoded_rows)
    problems = []
    # rows that all stop are better evidence than a template that they may not use
    if (share != 1.0 or endings.texts) and (problem := _template_problem(tokenizer, end_ids, endings)):
        problems.append(problem)
    if share is not None and share < 1.0 and stops:
        problems.append(
            f"{1 - share:.1%} of the rows have a last response that does not end where generation stops (usually because "
            "max_length cuts it), so they teach the model to go on; raise max_length or drop those rows."
        )
    stop_ids = tuple(sorted(endings.token_ids))
    return EndingReport(tuple(_name(tokenizer, [i]) for i in end_ids), stop_ids, stops, problems)


def _template_problem(tokenizer: PreTrainedTokenizerBase, end_ids: tuple[int, ...], endings: Endings) -> str:
    if not endings.token_ids:
        return (
            "Neither the tokenizer nor the generation config names an end-of-sequence token, so generation never stops "
            "by itself; set tokenizer.eos_token."
        )
    if not end_ids:
        return (
            "The chat template writes no token after an assistant turn, so the model never learns to stop; end the "
            "assistant turn in the template with the end-of-sequence token."
        )
    if endings.texts:
        return (
            f"The chat template ends an assistant turn with {_name(tokenizer, end_ids)} as {len(end_ids)} ordinary "
            "token(s). Answers are cut where they spell this text, also inside of a quotation; vLLM's server does not "
            "stop there. Add the text to the tokenizer as one special token."
        )
    return ""


def _ends(row: Mapping[str, Any], endings: Endings, tokenizer: PreTrainedTokenizerBase) -> bool:
    labels = [label for label in row["labels"] if label != IGNORED]
    if not labels or labels[-1] in endings.token_ids:
        return bool(labels)
    # the last tokens are enough for a text of a few characters
    tail = tokenizer.decode(labels[-64:], skip_special_tokens=False).rstrip() if endings.texts else ""
    return bool(endings.texts) and tail.endswith(endings.texts)


def _name(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return escape_controls(tokenizer.decode(list(ids), skip_special_tokens=False))
