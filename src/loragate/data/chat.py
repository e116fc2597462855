"""Chat templates at the level of text: what a conversation looks like before it becomes tokens.

`Chat` probes a tokenizer's template once (which text ends a turn, which system message it slips in) and then renders
conversations and cuts them into prompt and response segments. Training and generation both render here, so they cannot
drift apart. Tokens are made in `encoding`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from loragate.data.formats import Message, Turns
from loragate.errors import ConfigError, DataError, nearest
from loragate.printable import excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM_MODES = ("none", "keep")

# Probe texts: letters only, so that no template trims, escapes or splits them.
_USER, _REPLY, _SYSTEM = "Qprobeuser", "Qprobereply", "Qprobesystem"
_ASK: Message = {"role": "user", "content": _USER}
_ANSWER: Message = {"role": "assistant", "content": _REPLY}


class Segment(NamedTuple):
    """A stretch of rendered text; consecutive segments concatenate to the sequence that is trained on."""

    text: str
    is_response: bool


class Chat:
    """The chat template of one tokenizer.

    Attributes:
        turn_end: text that the template writes after the content of an assistant turn, e.g. `<|im_end|>` and a newline;
            empty without a template or when the template refuses a plain question and answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str = "none") -> None:
        """`system="none"` renders without the system message that some templates slip in when a conversation has none;
        a system message of the conversation itself stays. `"keep"` leaves the template's text alone."""
        if system not in SYSTEM_MODES:
            raise ConfigError(
                f"found system={system!r}, expected one of {', '.join(SYSTEM_MODES)}{nearest(str(system), SYSTEM_MODES)}"
            )
        self.tokenizer = tokenizer
        self.template = active_template(tokenizer)
        # in this order: every probe after the first renders in the form that the first found
        self._as_blocks, self._loses_text = self._find_content_form()
        self.turn_end = _after_last(self._try([_ASK, _ANSWER]), _REPLY)
        self._opening = self._find_opening()
        self._injected, self._instead = self._find_injected_system() if system == "none" else ("", "")
        # Texts that may close a turn: the white space behind one of them is no part of the response. Any added token, as a
        # template may close a turn in another way than the probed one, such as one that calls a tool.
        added = (token for token in tokenizer.added_tokens_encoder if not token.isspace())
        self._turn_ends = tuple(text for text in (self.turn_end.rstrip(), *added) if text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = False,
        where: str = "",
    ) -> str:
        """Render `messages` to text, ending in the header of an assistant turn when `generation_prompt` is set.

        Raises:
            DataError: without a chat template, or when the template refuses the messages.
        """
        at = f"{where}: " if where else ""
        if self.template is None:
            raise DataError(
                f"{at}this is a conversation, but the tokenizer {self.tokenizer.name_or_path!r} has no chat template. "
                "Give one with --chat-template FILE (in Python: tokenizer.chat_template = TEXT), or use plain rows: the keys "
                "prompt and completion, both text."
            )
        if self._loses_text:
            raise DataError(
                f"{at}the chat template leaves out the text of messages; give another one with --chat-template FILE"
            )
        try:
            text = self._apply(messages, tools, generation_prompt)
        except Exception as error:  # templates are programs that came with the tokenizer; they raise anything
            roles = ", ".join(str(message.get("role")) for message in messages) or "no messages"
            raise DataError(
                f"{at}the chat template refuses the turns {roles}: {type(error).__name__}: {excerpt(str(error), 200)}. "
                "Change the row or give another template with --chat-template FILE."
            ) from error
        # A system message of the conversation itself replaces the injected one. With tools the injected block holds their
        # descriptions and must stay.
        if not self._injected or tools or messages[0]["role"] in ("system", "developer"):
            return text
        if not text.startswith(self._injected):
            raise DataError(
                f"{at}the chat template's own system message changed between two conversations, so it cannot be taken "
                f"out: expected {excerpt(self._injected, 200)}, found {excerpt(text, 200)}. Use system='keep'."
            )
        return self._instead + text[len(self._injected) :]

    def segments(self, turns: Turns, where: str = "") -> tuple[list[Segment], bool]:
        """Cut a conversation into prompt and response segments.

        For assistant turn i the prompt P_i is what generation would be given, render(messages[:i]) with the generation
        prompt, and the response is the rest of E_i = render(messages[: i + 1]), including its end-of-turn token but not
        the white space after it. Whatever follows the last response is left out, and so is an empty think block that the
        template opens a last answer with (Qwen3) and the row does not hold: generation is not given one, and the template
        itself writes none into earlier turns.

        Returns:
            The segments, and True when only the last assistant turn is a response because the template writes earlier
            turns differently once the conversation goes on (e.g. it removes their reasoning).

        Raises:
            DataError: when no response can be told apart from its prompt.
        """
        answers = [
            index
            for index, message in enumerate(turns.messages)
            # the first message has no prompt before it
            if message["role"] == "assistant" and index >= max(turns.trained_from, 1)
        ]
        if not answers:
            raise DataError(f"{where}: the conversation begins with its only assistant turn; a response needs a prompt")
        last = self._span(turns, answers[-1], where)
        full = last.text
        earlier = [self._span(turns, index, where) for index in answers[:-1]]
        # a turn stays as it was while the conversation goes on, up to its end; what follows there may be the next header
        rewritten = any(not span.fits or not full.startswith(span.text[: span.end]) for span in earlier)
        if not last.fits:
            raise DataError(
                f"{where}: the chat template's generation prompt ends in {excerpt(last.prompt[-40:])}, but it renders "
                f"the answer differently: {excerpt(full[_common_prefix(last.prompt, full) :], 80)}. The response cannot be "
                "told from its prompt; give a template whose answers begin with its generation prompt (--chat-template FILE)."
            )
        # the one text of all turns, cut: what lies between two responses is the prompt of the second
        segments, cursor = [], 0
        for span in (last,) if rewritten else (*earlier, last):
            segments += [
                Segment(full[cursor : len(span.prompt)], False),
                Segment(full[len(span.prompt) : span.end], True),
            ]
            cursor = span.end
        return segments, rewritten

    def _span(self, turns: Turns, index: int, where: str) -> _Span:
        prompt = self.render(turns.messages[:index], tools=turns.tools, generation_prompt=True, where=where)
        text = self.render(turns.messages[: index + 1], tools=turns.tools, where=where)
        # white space apart, as templates trim and pad around a think block that the row itself holds
        own = _dense(turns.messages[index]["content"]).startswith(_dense(self._opening))
        if self._opening and not own and text.startswith(prompt + self._opening):
            text = prompt + text[len(prompt) + len(self._opening) :]
        trimmed = text.rstrip()
        # where nothing closes the turn, white space may be the answer's own
        return _Span(prompt, text, len(trimmed) if trimmed.endswith(self._turn_ends) else len(text))

    def _find_content_form(self) -> tuple[bool, bool]:
        """(content goes in as a list of blocks, the text is lost either way); vision templates read blocks only."""
        self._as_blocks = False
        as_text = self._try([_ASK, _ANSWER])
        if _REPLY in as_text:
            return False, False
        self._as_blocks = True
        works = _REPLY in self._try([_ASK, _ANSWER])
        return works, not works and as_text != ""

    def _find_opening(self) -> str:
        """Find the text that the template writes between its generation prompt and the content of a last answer, and of no
        earlier one; empty for most."""
        # Qwen3: "…assistant\n" is the prompt, "…assistant\n<think>\n\n</think>\n\nQprobereply…" the answer; the block is between
        prompt, answered = self._try([_ASK], generation_prompt=True), self._try([_ASK, _ANSWER])
        opening = answered[len(prompt) :].partition(_REPLY)[0] if answered.startswith(prompt) else ""
        # once the talk goes on, the answer stands there without the block
        earlier = self._try([_ASK, _ANSWER, _ASK]).startswith(prompt + _REPLY)
        return opening if opening.strip() and earlier else ""

    def _find_injected_system(self) -> tuple[str, str]:
        """Find the system text that the template adds on its own: (beginning of a rendered text, what to put instead).

        The text of a user turn is what a second user turn adds to a conversation. The rendering of a lone user turn is
        that text with the injected part inserted. It is a default system message if giving a system message replaces
        it; a beginning that stays is a preamble and belongs to the template.
        """
        alone, answered, again = self._try([_ASK]), self._try([_ASK, _ANSWER]), self._try([_ASK, _ANSWER, _ASK])
        with_system = self._try([{"role": "system", "content": _SYSTEM}, _ASK])
        # behind the answer: its end and the second user turn; its end alone
        between, end = _after_last(again, _REPLY), _after_last(answered, _REPLY)
        if _SYSTEM not in with_system or not between.startswith(end):
            return "", ""
        user_turn = between[len(end) :]
        # Qwen2.5: alone is "SYSTEM<|im_start|>user\nQ…", bare "<|im_start|>user\nQ…", so the two part at the beginning (kept 0).
        # Llama 2: alone is "<s>[INST] <<SYS>>…<</SYS>>\n\nQ…", bare "<s>[INST] Q…", so "<s>[INST] " is kept.
        start = self.tokenizer.bos_token or ""
        bare = start + user_turn if alone.startswith(start) and not user_turn.startswith(start) else user_turn
        kept = len(bare) - _common_prefix(bare[::-1], alone[::-1])  # of `bare`, what stands before the common ending
        beginning = alone[: len(alone) - (len(bare) - kept)]
        # else the two renderings differ by something that is no insertion
        inserted = len(beginning) > kept and beginning.startswith(bare[:kept]) and _USER not in beginning
        if not inserted or with_system.startswith(beginning):
            return "", ""
        return beginning, bare[:kept]

    def _try(self, messages: list[Message], generation_prompt: bool = False) -> str:
        """Render a probe; a template that refuses it (no system role, say) yields the empty string."""
        try:
            return self._apply(messages, None, generation_prompt) if self.template is not None else ""
        except Exception:
            return ""

    def _apply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, generation_prompt: bool
    ) -> str:
        turns = [dict(message) for message in messages]  # templates may write into what they are given
        if self._as_blocks:
            turns = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
        return self.tokenizer.apply_chat_template(
            turns,
            tools=[dict(tool) for tool in tools] if tools else None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )


class _Span(NamedTuple):
    """One assistant turn: its prompt, the text up to the turn's end, and where the response ends in that text."""

    prompt: str
    text: str
    end: int

    @property
    def fits(self) -> bool:
        return self.text.startswith(self.prompt) and bool(self.text[len(self.prompt) : self.end].strip())


def active_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The tokenizer's chat template (the default one of several), or None."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return template.get("default")
    return template or None


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 (hex) of the chat template's text; "none" for a tokenizer without one."""
    template = active_template(tokenizer)
    return "none" if template is None else hashlib.sha256(template.encode()).hexdigest()


def _after_last(text: str, mark: str) -> str:
    return text.rpartition(mark)[2] if mark in text else ""


def _dense(text: str) -> str:
    return "".join(text.split())


def _common_prefix(first: str, second: str) -> int:
    length = 0
    for a, b in zip(first, second):
        if a != b:
            break
        length += 1
    return length
