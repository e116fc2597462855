"""What kind of token a token is: digits, operators, words, punctuation, white space, special, end.

The class is read from the token's own text, without its context, so that it is the same in every place. White space
around the text does not count; a token of nothing else is "space".
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

CLASSES = ("digits", "operators", "words", "punctuation", "space", "mixed", "special", "end")
"""end: a token that ends an answer; special: the tokenizer's other special tokens; mixed: several kinds in one token, or a
part of a character."""
_OPERATORS = frozenset("+-*/=<>^%±×÷·−≤≥≠≈√∑∏∫")
_INNER = frozenset("'’-_")


def class_of_text(text: str) -> str:
    """The class of a token that is not special, by its text.

    >>> class_of_text(" 12"), class_of_text("+"), class_of_text("don't"), class_of_text("x2")
    ('digits', 'operators', 'words', 'mixed')
    """
    stripped = text.strip()
    if not stripped:
        return "space" if text else "mixed"
    if all(character.isdecimal() for character in stripped):
        return "digits"
    if all(character in _OPERATORS for character in stripped):
        return "operators"
    if stripped[0].isalpha() and all(character.isalpha() or character in _INNER for character in stripped):
        return "words"
    if all(unicodedata.category(character)[0] in "PS" and character != "\ufffd" for character in stripped):
        return "punctuation"
    return "mixed"


class TokenClasses:
    """Classes of a tokenizer's tokens, found when first asked for.

    Args:
        tokenizer: of the base.
        ends: ids that end an answer, the tokenizer's own end-of-sequence token included.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int]) -> None:
        self.tokenizer, self.ends = tokenizer, frozenset(ends)
        self.special = frozenset(tokenizer.all_special_ids)
        self._known: dict[int, int] = {}

    def index(self, token_id: int) -> int:
        """Position of the token's class in `CLASSES`."""
        if token_id not in self._known:
            self._known[token_id] = CLASSES.index(self._class(token_id))
        return self._known[token_id]

    def indices(self, token_ids: Iterable[int]) -> np.ndarray:
        """Positions of several tokens' classes in `CLASSES`, int64."""
        return np.array([self.index(int(token_id)) for token_id in token_ids], dtype=np.int64)

    def name(self, token_id: int) -> str:
        """The token's class."""
        return CLASSES[self.index(token_id)]

    def _class(self, token_id: int) -> str:
        if token_id in self.ends:
            return "end"
        if token_id in self.special:
            return "special"
        text = self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        if not text:  # a SentencePiece blank decodes to nothing when it stands alone
            piece = self.tokenizer.convert_ids_to_tokens(token_id)
            text = " " if isinstance(piece, str) and piece and not piece.strip("▁Ġ ") else text
        return class_of_text(text)
