"""Pieces of text and prompts to token ids, and a row's response mask shown to a person.

Prompt and response are tokenised separately, so the prompt's tokens are exactly those that generation feeds, whatever
the response begins with: joining the ids never depends on what follows. Three habits of tokenizers matter for that:
adding BOS in front of plain text, adding a space in front of every text (SentencePiece), adding special tokens at all.

What is shown comes from data, so every control character is escaped: a row cannot move the cursor, recolour the
terminal or forge the marks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.text import Text

from loragate.data.chat import Chat
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
        # "a" alone, a newline, and "a" where text comes before it
        bare, self._newline, after_newline = self._ids(["a", "\n", "\na"])
        complete = tokenizer("a", add_special_tokens=True)["input_ids"]
        # what stands before "a" with special tokens; what stands behind it, EOS of some, is left out
        starts = range(len(complete) - len(bare) + 1)
        self.leading: list[int] = next((complete[:k] for k in starts if complete[k : k + len(bare)] == bare), [])
        split = len(self._newline)
        # ids of "a" after a newline that differ from those of "a" alone: alone, a space was put before it
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


IGNORED = -100  # the label that cross-entropy of PyTorch passes over


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


OPEN, CLOSE = "⟦", "⟧"
# the marks themselves, where data holds them, as escapes
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
    # control tokens of a chat template are often added as special and named nowhere
    special = set(tokenizer.all_special_ids) | {
        index for index, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    ids: Sequence[int] = row["input_ids"]
    # decoded run by run, as a character may lie in several tokens
    tokens = [(label != IGNORED, token in special, token) for token, label in zip(ids, row["labels"])]
    for (is_response, is_special), run in groupby(tokens, key=lambda token: token[:2]):
        text = tokenizer.decode(
            [token for _, _, token in run], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        yield is_response, is_special, escape_controls(text, keep="\n\t")
