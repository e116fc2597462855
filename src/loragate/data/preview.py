"""What the model is trained on, shown to a person before the run: prompt dim, response bright.

The text comes from data, so every control character is escaped: a row cannot move the cursor, recolour the terminal or
forge the marks of the plain variant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.text import Text

from loragate.data.rendering import IGNORED
from loragate.printable import escape_controls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "⟦", "⟧"
STYLES = {(False, False): "dim", (False, True): "dim cyan", (True, False): "bold green", (True, True): "bold cyan"}


def preview(encoded_row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Text:
    """Coloured sample of an encoded row: prompt dim, response bold green, special tokens literal in cyan."""
    text = Text()
    for is_response, is_special, piece in _pieces(encoded_row, tokenizer):
        text.append(piece, style=STYLES[is_response, is_special])
    return text


def mask_as_text(encoded_row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """The same without colour, for logs: every response stands between ⟦ and ⟧."""
    parts = []
    for is_response, pieces in groupby(_pieces(encoded_row, tokenizer), key=lambda piece: piece[0]):
        marks = str.maketrans({OPEN: f"\\u{ord(OPEN):04x}", CLOSE: f"\\u{ord(CLOSE):04x}"})
        joined = "".join(piece for _, _, piece in pieces).translate(marks)
        parts.append(f"{OPEN}{joined}{CLOSE}" if is_response else joined)
    return "".join(parts)


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
