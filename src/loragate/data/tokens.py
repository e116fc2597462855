"""Segments of text to token ids, one by one, so that joining the ids never depends on what follows.

Knows the three habits of tokenizers that matter here: adding BOS in front of plain text, adding a space in front of
every text (SentencePiece), and adding special tokens at all. Knows nothing of conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
