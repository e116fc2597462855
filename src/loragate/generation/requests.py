"""What every engine does before and after the model runs: token ids, token limits, open samples, text.

The engines share these functions so that they accept the same prompts, end an answer at the same tokens and return the
same text for the same token ids. Nothing here knows how a token is drawn or which program runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal

from loragate.data import prompt_ids, render_prompt
from loragate.errors import ConfigError, DataError

FinishReason = Literal["stop", "stop_text", "length"]
"""Ended by the model (`loragate.data.find_endings`), by a text of `SamplingConfig.stop`, or by the token limit."""
Prompts = Sequence[str] | Sequence[Sequence[int]]
"""Rendered texts, or the token ids of each prompt."""


def begun(text: str, tokenizer: Any) -> str:
    """A raw text as a prompt: with the token that a text begins with, where the tokenizer adds one."""
    begin = tokenizer.bos_token
    # engines add nothing to a text, so that a rendered conversation does not begin twice
    adds = begin is not None and tokenizer.bos_token_id in prompt_ids(text, tokenizer)[:1]
    return begin + text if adds and not text.startswith(begin) else text


def rendered(messages: list[dict[str, Any]], tokenizer: Any, system: str) -> str:
    """A conversation as a prompt; see `data.render_prompt`.

    Raises:
        ConfigError: where the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise ConfigError(
            "the tokenizer has no chat template; give one with --chat-template FILE, or complete raw texts (--raw, or "
            "/v1/completions of a server)"
        )
    return render_prompt(messages, tokenizer, system=system)


def tokenize_prompts(
    tokenizer: Any, prompts: Prompts, max_new_tokens: int, positions: int | None
) -> tuple[list[list[int]], list[int]]:
    """Return the token ids of each prompt, to which the tokenizer adds nothing, and the token limit of its answers.

    Prompts that are token ids already are taken as they are.

    The limit is `max_new_tokens`, or what the prompt leaves of the model's `positions` (None: unlimited); no prompt lowers
    that of another.

    Raises `DataError` for an empty list, an empty prompt or one that leaves no position.
    """
    if isinstance(prompts, str) or not len(prompts):
        raise DataError(f"generate was given {prompts!r}; it needs a list with at least one rendered prompt.")
    rows: list[list[int]] = (
        tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
        if isinstance(prompts[0], str)
        else [[*ids] for ids in prompts]
    )
    limits: list[int] = []
    for index, ids in enumerate(rows):
        if not ids:
            raise DataError(f"Prompt {index} is empty: the model needs at least one token to continue from.")
        limits.append(max_new_tokens if positions is None else min(max_new_tokens, positions - len(ids)))
        if limits[-1] < 1:
            raise DataError(
                f"Prompt {index} has {len(ids)} tokens and leaves none of the model's {positions} positions to an "
                "answer: drop or shorten it."
            )
    return rows, limits


def batches(
    lengths: Sequence[int], limits: Sequence[int], size: int, positions: int | None = None
) -> Iterator[list[int]]:
    """Cut rows, the longest prompt first, into batches of at most `size`.

    With `positions` a batch ends before the first row whose answer would carry the longest prompt past that many: where a
    row that has ended is fed on until its batch is done, it must not pass the end of a table of positions.

    Args:
        lengths, limits: prompt and answer tokens of each row.
    """
    rows: list[int] = []
    for row in range(len(lengths)):
        if len(rows) == size or (rows and positions is not None and lengths[rows[0]] + limits[row] > positions):
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def positions_end(model: Any) -> bool:
    """Whether a table of positions ends somewhere (GPT-2, GPT-J, OPT, MPT, …). Rotary angles, whose frequencies are a buffer in
    every family that computes them, do not; a wrong True only costs speed."""
    return not any(name.endswith("inv_freq") for name, _ in model.named_buffers())


def pending_rows(questions: int, samples: int, pending: Collection[tuple[int, int]] | None) -> list[tuple[int, int]]:
    """Return the (question, sample) pairs still to be drawn, in order; `pending` None means all of them.

    Raises `DataError` for a pair that does not exist.
    """
    if pending is None:
        return [(question, sample) for question in range(questions) for sample in range(samples)]
    for question, sample in pending:
        if not (0 <= question < questions and 0 <= sample < samples):
            raise DataError(
                f"pending names question {question}, sample {sample}, but there are {questions} prompts with {samples} "
                "samples each; the samples on file belong to another run."
            )
    return sorted(set(pending))


def split_by_question(rows: Sequence[tuple[int, int]], questions: int) -> list[list[tuple[int, int]]]:
    """Cut ordered (question, sample) pairs after every `questions` distinct questions; each stays in one piece."""
    parts: list[list[tuple[int, int]]] = []
    seen: set[int] = set()
    for row in rows:
        if row[0] not in seen and len(seen) % questions == 0:
            parts.append([])
        seen.add(row[0])
        parts[-1].append(row)
    return parts


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return where the first of the texts `stop` begins in `text`, or None where there is none."""
    return min((place for place in map(text.find, stop) if place >= 0), default=None)


def stop_detector(tokenizer: Any, stop: Sequence[str]) -> Callable[[list[int]], bool] | None:
    """Return a test whether the last tokens of an answer have just completed one of the texts `stop`."""
    if not stop:
        return None
    # enough tokens for the longest text, as one may be a single byte; and one more, in which it may begin
    window = max(len(text.encode()) for text in stop) + 1

    def spells_stop(ids: list[int]) -> bool:
        return first_stop(_decode(tokenizer, ids[-window:]), stop) is not None

    return spells_stop


def finish_answers(
    tokenizer: Any,
    token_ids: Sequence[Sequence[int]],
    stopped: Sequence[bool],
    stop: Sequence[str] = (),
    turn_ends: Sequence[str] = (),
) -> list[tuple[tuple[int, ...], str, FinishReason]]:
    """Return (token ids, text, finish reason) of each answer; text and tokens end where the first of all texts does.

    The text is without the text that ended it; the tokens are those up to the one that completes it. One of `turn_ends`
    ends an answer as a stop token does.
    """
    texts = (*stop, *turn_ends)
    answers: list[tuple[tuple[int, ...], str, FinishReason]] = []
    for ids, ended in zip(token_ids, stopped):
        text = _decode(tokenizer, ids[:-1] if ended else ids)
        place = first_stop(text, texts)
        if place is None:
            answers.append((tuple(ids), text, "stop" if ended else "length"))
            continue
        # the fewest tokens that hold the text, by bisection: a longer beginning holds it where a shorter one does
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            found = first_stop(_decode(tokenizer, ids[:middle]), texts) is not None
            low, high = (low, middle) if found else (middle + 1, high)
        # what the template ends a turn with counts as the model's own end, unless a text of the caller comes first
        reason: FinishReason = "stop" if place == first_stop(text, turn_ends) else "stop_text"
        answers.append((tuple(ids[:low]), text[:place], reason))
    return answers


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    # cleaning up would rewrite answers, such as "a . b" in code
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
