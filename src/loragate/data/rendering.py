"""From turns to token ids with a response mask, and that mask shown to a person.

Prompt and response are tokenised separately, so the prompt's tokens are exactly those that generation feeds, whatever
the response begins with: joining the ids never depends on what follows. Three habits of tokenizers matter for that:
adding BOS in front of plain text, adding a space in front of every text (SentencePiece), adding special tokens at all.
Labels follow the convention of transformers: -100 outside of the response, the token itself on it; the shift by one
happens in the loss. Where rows come from is not this room's matter, only how to name them.

What is shown comes from data, so every control character is escaped: a row cannot move the cursor, recolour the
terminal or forge the marks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.text import Text

from loragate.data.chat import Chat, Segment
from loragate.data.formats import Turns
from loragate.errors import ConfigError, DataError
from loragate.printable import escape_controls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SegmentTokenizer:
    """Tokenises text pieces separately.

    Attributes:
        leading: ids that the tokenizer puts before plain text (BOS), often empty.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        bare, self._newline, after_newline = self._ids(["a", "\n", "\na"])
        complete = tokenizer("a", add_special_tokens=True)["input_ids"]
        starts = range(len(complete) - len(bare) + 1)
        self.leading: list[int] = next((complete[:k] for k in starts if complete[k : k + len(bare)] == bare), [])
        split = len(self._newline)
        self._adds_space = after_newline[:split] == self._newline and after_newline[split:] != bare

    def __call__(self, texts: Sequence[str], continues: Sequence[bool]) -> list[list[int]]:
        """Ids of each text without special tokens of the tokenizer's own; `continues[i]`: text i follows other text.

        A text that continues gets no space in front: it is tokenised after a newline, which is then taken off.
        """
        lead = [self._adds_space and continuing for continuing in continues]
        ids = self._ids(["\n" + text if led else text for text, led in zip(texts, lead)])
        split = len(self._newline)
        for index, led in enumerate(lead):
            if led:
                merged = ids[index][:split] != self._newline  # the newline became one token with the text's own
                ids[index] = self._ids([texts[index]])[0] if merged else ids[index][split:]
        return ids

    def plain_prompt(self, ids: list[int]) -> list[int]:
        """`ids` of a plain prompt with the tokenizer's BOS, unless the text begins with it already."""
        return ids if ids[: len(self.leading)] == self.leading else self.leading + ids

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        return self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


IGNORED = -100


@dataclass(frozen=True)
class Encoded:
    """One tokenised row.

    Attributes:
        input_ids, labels: equal lengths; a label is its token on responses and -100 elsewhere.
        truncated: the row was longer than max_length and was cut on the right.
        responses: response spans that still have a token; 0 means that nothing is left to learn.
        last_turn_only: earlier assistant turns are not trained because the template rewrites them later.
        keep_mask: 0/1 per position, 0 outside of responses; None when the row has none.
    """

    input_ids: list[int]
    labels: list[int]
    truncated: bool
    responses: int
    last_turn_only: bool = False
    keep_mask: list[int] | None = None


class Encoder:
    """Encodes turns with one tokenizer; probes its template once, so build one for many rows."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, max_length: int | None = None, system: str = "none"
    ) -> None:
        if max_length is not None and max_length < 2:
            raise ConfigError(f"found max_length={max_length!r}, expected at least 2 tokens, or None for no limit")
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.chat = Chat(tokenizer, system)
        self.tokenise = SegmentTokenizer(tokenizer)

    def encode(self, rows: Sequence[tuple[Turns, str]]) -> list[Encoded]:
        """Encode (turns, where) pairs with one call of the tokenizer."""
        cuts = [self._segments(turns, where) for turns, where in rows]
        texts = [segment.text for segments, _ in cuts for segment in segments]
        ids = iter(self.tokenise(texts, [index > 0 for segments, _ in cuts for index in range(len(segments))]))
        return [
            self._assemble(turns, [(segment, next(ids)) for segment in segments], rewritten, where)
            for (turns, where), (segments, rewritten) in zip(rows, cuts)
        ]

    def _segments(self, turns: Turns, where: str) -> tuple[list[Segment], bool]:
        if turns.completion is None:
            return self.chat.segments(turns, where)
        if self.tokenizer.eos_token_id is None:
            raise DataError(
                f"{where}: the tokenizer {self.tokenizer.name_or_path!r} has no end-of-sequence token, so a plain "
                "completion would have no end. Set tokenizer.eos_token."
            )
        return [Segment(turns.prompt or "", False), Segment(turns.completion, True)], False

    def _assemble(self, turns: Turns, pieces: list[tuple[Segment, list[int]]], rewritten: bool, where: str) -> Encoded:
        input_ids: list[int] = []
        labels: list[int] = []
        spans: list[int] = []  # start of each response
        for index, (segment, ids) in enumerate(pieces):
            if turns.is_plain and index == 0:
                ids = self.tokenise.plain_prompt(ids)
            elif turns.is_plain and ids[-1:] != [self.tokenizer.eos_token_id]:
                ids = [*ids, self.tokenizer.eos_token_id]  # a plain completion ends in EOS, once
            if segment.is_response:
                spans.append(len(input_ids))
            input_ids += ids
            labels += ids if segment.is_response else [IGNORED] * len(ids)
        if spans[0] == 0:
            raise DataError(f"{where}: the prompt is empty, so nothing predicts the first token of the response")
        keep_mask = _spread(turns.keep_mask, labels, rewritten, where)
        end = len(input_ids) if self.max_length is None else min(self.max_length, len(input_ids))
        return Encoded(
            input_ids=input_ids[:end],
            labels=labels[:end],
            truncated=end < len(input_ids),
            responses=sum(start < end for start in spans),
            last_turn_only=rewritten,
            keep_mask=None if keep_mask is None else keep_mask[:end],
        )


def render_prompt(
    prompt: str | Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, *, system: str = "none"
) -> str:
    """The text that a response follows: a plain prompt as it is, a conversation with the generation prompt.

    Take the ids from `prompt_ids`. A rendered conversation holds its own special tokens (tokenise it with
    add_special_tokens=False); a plain text does not.
    """
    if isinstance(prompt, str):
        return prompt
    return Chat(tokenizer, system).render(prompt, generation_prompt=True)


def prompt_ids(
    prompt: str | Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, *, system: str = "none"
) -> list[int]:
    """Token ids to generate from: those that precede the response in `encode`."""
    tokenise = SegmentTokenizer(tokenizer)
    ids = tokenise([render_prompt(prompt, tokenizer, system=system)], [False])[0]
    return tokenise.plain_prompt(ids) if isinstance(prompt, str) else ids


def _spread(mask: tuple[int, ...] | None, labels: list[int], rewritten: bool, where: str) -> list[int] | None:
    """Lay a mask over the response tokens out over the whole sequence, 0 elsewhere."""
    if mask is None:
        return None
    response_tokens = sum(label != IGNORED for label in labels)
    if len(mask) != response_tokens:
        which = "the last assistant turn, the only one that is trained here" if rewritten else "all trained responses"
        raise DataError(
            f"{where}: keep_mask has {len(mask)} entries, expected {response_tokens}: one per response token of "
            f"{which}, end-of-turn token included, before truncation, under this tokenizer and template"
        )
    bits = iter(mask)
    return [0 if label == IGNORED else next(bits) for label in labels]


OPEN, CLOSE = "⟦", "⟧"
MARKS = str.maketrans({OPEN: f"\\u{ord(OPEN):04x}", CLOSE: f"\\u{ord(CLOSE):04x}"})
STYLES = {(False, False): "dim", (False, True): "dim cyan", (True, False): "bold green", (True, True): "bold cyan"}


def preview(encoded_row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Text:
    """A row with every response between ⟦ and ⟧; where there is colour, prompt dim, response bold, special tokens cyan."""
    text = Text()
    for is_response, pieces in groupby(_pieces(encoded_row, tokenizer), key=lambda piece: piece[0]):
        text.append(OPEN if is_response else "")
        for _, is_special, piece in pieces:
            text.append(piece.translate(MARKS), style=STYLES[is_response, is_special])
        text.append(CLOSE if is_response else "")
    return text


def _pieces(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[bool, bool, str]]:
    """(is response, is special, printable text) of runs of tokens alike."""
    special = set(tokenizer.all_special_ids) | {
        index for index, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    ids: Sequence[int] = row["input_ids"]
    tokens = [(label != IGNORED, token in special, token) for token, label in zip(ids, row["labels"])]
    for (is_response, is_special), run in groupby(tokens, key=lambda token: token[:2]):
        text = tokenizer.decode(
            [token for _, _, token in run], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        yield is_response, is_special, escape_controls(text, keep="\n\t")
