"""Text to token ids: prompts, turns with a response mask, whole datasets with an account of their rows, and batches of them.

Prompt and response are tokenised separately, so the prompt's tokens are exactly those that generation feeds, whatever
the response begins with: joining the ids never depends on what follows. Three habits of tokenizers matter for that:
adding BOS in front of plain text, adding a space in front of every text (SentencePiece), adding special tokens at all.

Labels follow the convention of transformers: -100 outside of the response, the token itself on it; the shift by one happens in the
loss. A hundred thousand tokenised rows are small as numbers and large as Python lists; here they stay numbers until a row is asked
for. `preview` shows a row's response mask; what it shows comes from data, so every control character is escaped: a row cannot
move the cursor, recolour the terminal or forge the marks.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from rich.text import Text

from loragate.data.chat import Chat, Segment
from loragate.data.formats import FORMATS, EmptyResponse, Turns, detect_format, normalize, says_no_input, unused
from loragate.data.rows import Rows, load_rows
from loragate.errors import ConfigError, DataError
from loragate.printable import escape_controls, excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("loragate")


@cache
def _warn_once(text: str) -> None:
    """Rows are encoded more than once in a process."""
    logger.warning("%s", text)


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

    def prepend_bos(self, ids: list[int]) -> list[int]:
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
    return tokenise.prepend_bos(ids) if isinstance(prompt, str) else ids


def raw_text(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The plain prompt as a text whose tokens, with none added, are `prompt_ids`: with BOS in front where the tokenizer adds it.

    Raises:
        ConfigError: where the tokenizer reads no such text.
    """
    ids, begin = prompt_ids(text, tokenizer), tokenizer.bos_token or ""
    # behind BOS some tokenizers put no space in front (Llama's), so that one is written
    for written in (text, begin + text, f"{begin} {text}"):
        if tokenizer(written, add_special_tokens=False)["input_ids"] == ids:
            return written
    raise ConfigError(
        f"the tokenizer {tokenizer.name_or_path!r} begins a plain text with tokens that it reads from no text, here "
        f"{excerpt(str(tokenizer.convert_ids_to_tokens(ids[:4])))}, so raw prompts cannot be kept as text; use "
        "tasks that ask through a chat template"
    )


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


BATCH = 256  # rows per call of the tokenizer


@dataclass
class Summary:
    """What became of the rows.

    Attributes:
        format: the row format.
        rows: rows given.
        dropped: rows left out because max_length cut their whole response.
        truncated: kept rows that max_length cut.
        response_tokens, prompt_tokens: tokens of the kept rows after truncation, with and without a label.
        plain: rows used as plain text, without the chat template.
        last_turn_only: kept rows of which only the last assistant turn is trained (the template rewrites earlier ones).
        empty: rows left out because their response is empty, or switched off.
        unused: columns that hold something and that nothing reads.
        template_kwargs: rows that give variables to the chat template, which generation is not given.
        unasked: rows with an empty user turn.
        no_input: rows whose input only says that there is none.
        doubled: {special token that the chat template writes: rows that hold it in their own text as well}.
    """

    format: str
    rows: int
    dropped: int = 0
    truncated: int = 0
    response_tokens: int = 0
    prompt_tokens: int = 0
    last_turn_only: int = 0
    plain: int = 0
    empty: int = 0
    unused: tuple[str, ...] = ()
    template_kwargs: int = 0
    unasked: int = 0
    no_input: int = 0
    doubled: Counter[str] = field(default_factory=Counter)

    @property
    def all_plain(self) -> bool:
        """Whether every row with a response is plain text."""
        return self.plain == self.rows - self.empty


class Encoder:
    """Encodes turns with one tokenizer; probes its template once, so build one for many rows.

    Attributes:
        summary: counts what becomes of the rows.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        summary: Summary,
        *,
        max_length: int | None = None,
        system: str = "none",
    ) -> None:
        if max_length is not None and max_length < 2:
            raise ConfigError(f"found max_length={max_length!r}, expected at least 2 tokens, or None for no limit")
        self.tokenizer = tokenizer
        self.summary = summary
        self.max_length = max_length
        self._system = system
        self._chats: dict[str, Chat] = {}  # by the variables of the template that a row gives
        self.tokenise = SegmentTokenizer(tokenizer)

    def encode(self, rows: Sequence[tuple[Turns, str]]) -> list[dict[str, Any] | None]:
        """The items of (turns, where) pairs, with one call of the tokenizer; None where max_length leaves no response."""
        cuts = [self._segments(turns, where) for turns, where in rows]
        texts = [segment.text for segments, _ in cuts for segment in segments]
        # all segments of all rows at once: a fast tokenizer takes them in parallel; only the first of a row begins a text
        ids = iter(self.tokenise(texts, [index > 0 for segments, _ in cuts for index in range(len(segments))]))
        return [
            self._assemble(turns, [(segment, next(ids)) for segment in segments], rewritten, where)
            for (turns, where), (segments, rewritten) in zip(rows, cuts)
        ]

    def _segments(self, turns: Turns, where: str) -> tuple[list[Segment], bool]:
        if turns.completion is None:
            chat = self._chat(turns)
            texts = [message["content"] for message in turns.messages]
            self.summary.unasked += any(
                message["role"] == "user" and not message["content"].strip() for message in turns.messages
            )
            self.summary.doubled.update(token for token in chat.written_tokens if any(token in text for text in texts))
            return chat.segments(turns, where)
        if self.tokenizer.eos_token_id is None:
            raise DataError(
                f"{where}: the tokenizer {self.tokenizer.name_or_path!r} has no end-of-sequence token, so a plain "
                "completion would have no end. Set tokenizer.eos_token."
            )
        return [Segment(turns.prompt or "", False), Segment(turns.completion, True)], False

    def _chat(self, turns: Turns) -> Chat:
        key = json.dumps(turns.template_kwargs, sort_keys=True, default=str)
        if key not in self._chats:
            chat = self._chats[key] = Chat(self.tokenizer, self._system, turns.template_kwargs)
            for name in chat.template_kwargs:
                if name not in (chat.template or ""):
                    _warn_once(
                        f"chat_template_kwargs: the chat template reads no {escape_controls(name)}, which has no effect"
                    )
        return self._chats[key]

    def _assemble(
        self, turns: Turns, pieces: list[tuple[Segment, list[int]]], rewritten: bool, where: str
    ) -> dict[str, Any] | None:
        input_ids: list[int] = []
        labels: list[int] = []
        for index, (segment, ids) in enumerate(pieces):
            if turns.is_plain and index == 0:
                ids = self.tokenise.prepend_bos(ids)
            elif turns.is_plain and ids[-1:] != [self.tokenizer.eos_token_id]:
                ids = [*ids, self.tokenizer.eos_token_id]  # a plain completion ends in EOS, once
            if segment.is_response and not input_ids:
                raise DataError(f"{where}: the prompt is empty, so nothing predicts the first token of the response")
            input_ids += ids
            labels += ids if segment.is_response else [IGNORED] * len(ids)
        keep_mask = _expand_keep_mask(turns.keep_mask, labels, rewritten, where)  # before truncation, as masks are made
        end = self.max_length or len(input_ids)
        learned = sum(label != IGNORED for label in labels[:end])
        if not learned:
            return None
        self.summary.response_tokens += learned
        self.summary.prompt_tokens += len(labels[:end]) - learned
        self.summary.truncated += end < len(input_ids)
        self.summary.last_turn_only += rewritten
        item = {"input_ids": input_ids[:end], "labels": labels[:end]}
        return item if keep_mask is None else {**item, "keep_mask": keep_mask[:end]}


def _expand_keep_mask(mask: tuple[int, ...] | None, labels: list[int], rewritten: bool, where: str) -> list[int] | None:
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


class EncodedRows(Sequence[dict[str, Any]]):
    """Items `{"input_ids", "labels", "row"[, "keep_mask"]}`, kept as arrays; an item is made when it is read.

    Attributes:
        arrays: `ids`, `learned` and `kept` run over all positions of all items; `lengths` and `rows` have one entry per item,
            `rows` the index into the rows that were given.
        summary: what became of the rows.
    """

    def __init__(self, items: Iterable[dict[str, Any]], summary: Summary | None = None) -> None:
        """The labels of an item are the token itself or -100. Without a summary the tokens of the items are counted.

        Raises:
            DataError: for an item whose columns differ in length, or with a keep_mask unlike the first.
        """
        # 4 bytes a token id, one a label and one a mask; a Python list of small integers takes 8 for each alone
        ids, learned, kept, lengths, rows = array("i"), bytearray(), bytearray(), array("q"), array("q")
        columns: set[str] = set()
        for item in items:
            sizes = {key: len(item[key]) for key in ("input_ids", "labels", "keep_mask") if key in item}
            columns = columns or {*sizes}
            if len({*sizes.values()}) > 1 or sizes.keys() != columns:
                found = ", ".join(f"{size} {key}" for key, size in sizes.items())
                raise DataError(
                    f"item {len(lengths)} has {found}; give every token a label, and a keep_mask of the same length to every "
                    "item or to none"
                )
            ids.extend(item["input_ids"])
            learned.extend(label != IGNORED for label in item["labels"])
            kept.extend(item.get("keep_mask", ()))
            lengths.append(len(item["input_ids"]))
            rows.append(item["row"])
        self.arrays = {"ids": np.array(ids), "learned": np.array(learned, bool)}
        self.arrays |= {"lengths": np.array(lengths), "rows": np.array(rows)}
        if kept:  # `encode_rows` has refused a mask on some rows alone
            self.arrays["kept"] = np.array(kept, bool)
        if summary is None:
            tokens = int(self.arrays["learned"].sum())
            summary = Summary("", len(lengths), response_tokens=tokens, prompt_tokens=len(ids) - tokens)
        self.summary = summary
        # item i lies between _ends[i] and _ends[i + 1]
        self._ends = np.concatenate([[0], np.cumsum(self.arrays["lengths"])])

    def __repr__(self) -> str:
        return f"EncodedRows({len(self)} rows, {self.summary})"

    def __len__(self) -> int:
        return len(self.arrays["lengths"])

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        index = range(len(self))[index]  # a range counts from behind and raises IndexError as a list does
        span = slice(int(self._ends[index]), int(self._ends[index + 1]))
        ids, learned = self.arrays["ids"][span], self.arrays["learned"][span]
        item = {
            "input_ids": ids.tolist(),
            "labels": np.where(learned, ids, IGNORED).tolist(),
            "row": int(self.arrays["rows"][index]),
        }
        if "kept" in self.arrays:
            item["keep_mask"] = self.arrays["kept"][span].astype(np.int8).tolist()
        return item


def encode_rows(
    rows: Rows | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    system: str = "none",
    on_progress: Callable[[int, int], None] | None = None,
) -> EncodedRows:
    """Encode every row; rows without a response, or whose response is cut completely, are left out, counted and warned of.

    Args:
        rows: from `load_rows`, or a list of dicts; all of the format of the row that comes first in its file.
        max_length: longest sequence in tokens, cut on the right; None for no limit.
        system: "none" or "keep", see `Chat`.
        on_progress: called with (rows done, rows in all) after each batch.

    Raises:
        DataError: for the first row that cannot be used, named by its place; or when no row is left.
    """
    rows = load_rows(rows)
    first = rows.earliest()  # a shuffled file whose rows fit no format is then named by its first line
    try:
        name = detect_format(rows[first])
    except DataError as error:
        raise DataError(f"{rows.where(first)}: {error}") from None
    summary = Summary(name, len(rows))
    encoder = Encoder(tokenizer, summary, max_length=max_length, system=system)
    encoded = EncodedRows(_items(encoder, rows, on_progress or (lambda done, of: None)), summary)
    if summary.empty == len(rows):
        raise DataError(
            f"{rows.source}: the response of every one of {len(rows)} rows is empty or switched off, so there is nothing to learn"
        )
    if not len(encoded):
        without = f" ({summary.empty} of them have none)" if summary.empty else ""
        raise DataError(
            f"{rows.source}: max_length={max_length} cuts the whole response of every one of {len(rows)} rows{without}, so "
            "nothing is left to learn. Raise max_length."
        )
    summary.dropped = len(rows) - len(encoded) - summary.empty
    account = {
        "left out without a response, or switched off": summary.empty,
        "left out, as max_length cuts the whole response": summary.dropped,
        "cut by max_length": summary.truncated,
        "trained on their last answer only, as the template rewrites earlier turns": summary.last_turn_only,
        "with an empty user turn": summary.unasked,
        "whose input says that there is none (<noinput>), which is left out of the prompt": summary.no_input,
    }
    notes = [f"{count} {what}" for what, count in account.items() if count]
    if doubled := ", ".join(f"{count} hold {escape_controls(token)}" for token, count in summary.doubled.items()):
        notes.append(
            f"{doubled} in their own text, which the chat template writes as well; take such tokens out of the rows"
        )
    if notes:
        _warn_once(f"{rows.source}: of {len(rows)} rows {'; '.join(notes)}")
    if summary.unused:
        _warn_once(f"{rows.source}: columns that are not used: {escape_controls(', '.join(summary.unused))}")
    return encoded


def _items(encoder: Encoder, rows: Rows, on_progress: Callable[[int, int], None]) -> Iterator[dict[str, Any]]:
    """The item of every row that has a response."""
    summary = encoder.summary
    # of one row, and held against every other: a batch has the column or has it not
    masked = rows[0].get("keep_mask") is not None
    columns: dict[str, None] = {}  # in the order in which they are met
    for start in range(0, len(rows), BATCH):
        indices = range(start, min(start + BATCH, len(rows)))
        turns: list[tuple[Turns, str]] = []
        places: list[int] = []
        for index, row in zip(indices, rows.fetch(indices), strict=True):
            where = rows.where(index)
            columns.update(dict.fromkeys(unused(row, summary.format)))
            try:
                one = normalize(row, summary.format, where)
            except EmptyResponse:
                summary.empty += 1
                continue
            if (one.keep_mask is not None) != masked:
                raise DataError(
                    f"{where}: the row has {'no' if masked else 'a'} keep_mask, unlike {rows.where(0)}; "
                    "give it on every row or on none"
                )
            summary.no_input += not one.is_plain and "input" in FORMATS[summary.format].besides and says_no_input(row)
            turns.append((one, where))
            places.append(index)
        summary.plain += sum(one.is_plain for one, _ in turns)
        summary.template_kwargs += sum(one.template_kwargs is not None for one, _ in turns)
        summary.unused = tuple(columns)
        for index, item in zip(places, encoder.encode(turns), strict=True):
            if item is not None:
                yield {**item, "row": index}
        on_progress(indices.stop, len(rows))


@dataclass(frozen=True)
class Collator:
    """Pads encoded rows on the right to one length; a `collate_fn` for a DataLoader.

    Attributes:
        pad_token_id: id to pad `input_ids` with; attention is 0 there and the label -100, so any valid id serves.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return input_ids, attention_mask, labels [B,S] and row [B] as int64, and keep_mask [B,S] bool when present."""
        length = max(len(row["input_ids"]) for row in rows)

        def pad(columns: Iterable[Sequence[int]], value: int) -> torch.Tensor:
            return torch.tensor([[*column, *[value] * (length - len(column))] for column in columns], dtype=torch.int64)

        batch = {
            "input_ids": pad((row["input_ids"] for row in rows), self.pad_token_id),
            "attention_mask": pad(([1] * len(row["input_ids"]) for row in rows), 0),
            "labels": pad((row["labels"] for row in rows), IGNORED),
            "row": torch.tensor([row["row"] for row in rows], dtype=torch.int64),
        }
        if "keep_mask" in rows[0]:
            batch["keep_mask"] = pad((row["keep_mask"] for row in rows), 0).bool()
        return batch
