"""Chat templates at the level of text: what a conversation looks like before it becomes tokens.

`Chat` probes a tokenizer's template once (which text ends a turn, which system message it slips in) and then renders
conversations and cuts them into prompt and response segments. Training and generation both render here, so they cannot
drift apart. Tokens are made in `encoding`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from loragate.data.formats import REASONING, Message, Turns
from loragate.errors import ConfigError, DataError, nearest
from loragate.printable import excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM_MODES = ("none", "keep")

# Probe texts: letters only, so that no template trims, escapes or splits them.
_USER, _REPLY, _SYSTEM = "Qprobeuser", "Qprobereply", "Qprobesystem"
_ASK: Message = {"role": "user", "content": _USER}
_ANSWER: Message = {"role": "assistant", "content": _REPLY}
_NAME, _KEY, _VALUE = "Qprobename", "Qprobekey", "Qprobevalue"
_CALL = {"type": "function", "id": "Qprobe001", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
_CALLS: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: Message = {"role": "tool", "name": _NAME, "tool_call_id": "Qprobe001", "content": _SYSTEM}
# how a role that a template may leave out is tried; users and assistants are in every probe
_WITH_ROLE: dict[str, list[Message]] = {
    "system": [{"role": "system", "content": _SYSTEM}, _ASK],
    "developer": [{"role": "developer", "content": _SYSTEM}, _ASK],
    "tool": [_ASK, _CALLS, _RESULT, _ANSWER],
}


_WORD = re.compile(r"[^\W_]+")  # letters and digits of any script


class Segment(NamedTuple):
    """A stretch of rendered text; consecutive segments concatenate to the sequence that is trained on."""

    text: str
    is_response: bool


class Chat:
    """The chat template of one tokenizer.

    Attributes:
        turn_end: text that the template writes after the content of an assistant turn, e.g. `<|im_end|>` and a newline;
            empty without a template or when the template refuses a plain question and answer.
        written_tokens: special tokens that the template writes around a question and its answer, and EOS; a turn that holds one
            in its own text has it twice.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        system: str = "none",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`system="none"` renders without the system message that some templates slip in when a conversation has none;
        a system message of the conversation itself stays. `"keep"` leaves the template's text alone. `template_kwargs` are
        variables of the template, such as enable_thinking."""
        if system not in SYSTEM_MODES:
            raise ConfigError(
                f"found system={system!r}, expected one of {', '.join(SYSTEM_MODES)}{nearest(str(system), SYSTEM_MODES)}"
            )
        self.tokenizer = tokenizer
        self.template = active_template(tokenizer)
        self.template_kwargs = dict(template_kwargs or {})
        # in this order: every probe after the first renders in the form that the first found
        self._as_blocks, self._loses_text = self._find_content_form()
        self._as_text = self._wants_json_text()
        self._left_out: dict[str, bool] = {}  # by role
        answered = self.render_probe([_ASK, _ANSWER])
        self.turn_end = _after_last(answered, _REPLY)
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        written = {token for token in special | {*tokenizer.all_special_tokens} if token in answered}
        self.written_tokens = sorted(written | {*filter(None, [tokenizer.eos_token])})
        self._opening = self._find_opening()
        self._injected, self._instead = self._find_injected_system() if system == "none" else ("", "")
        # Texts that may close a turn: the white space behind one of them is no part of the response. Any added token, as a
        # template may close a turn in another way than the probed one, such as one that calls a tool.
        added = (token for token in tokenizer.added_tokens_encoder if not token.isspace())
        self._turn_ends = tuple(text for text in (self.turn_end.rstrip(), *added) if text)

    @property
    def default_system(self) -> str:
        """What the template writes on its own before a conversation without a system message; "" where nothing, or with "keep"."""
        return self._injected[len(self._instead) :]

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
        for role in {str(message.get("role")) for message in messages} & _WITH_ROLE.keys():
            if self._leaves_out(role):
                raise DataError(
                    f"{at}the chat template leaves out turns of the role {role}. Remove them from the conversation, or give "
                    "a template that writes them with --chat-template FILE"
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
            DataError: when no response can be told apart from its prompt, or the template does not write what a turn holds.
        """
        answers = [
            index
            for index, message in enumerate(turns.messages)
            # the first message has no prompt before it
            if message["role"] == "assistant" and index > 0 and (turns.trained is None or index in turns.trained)
        ]
        if not answers:
            raise DataError(f"{where}: the conversation begins with its only assistant turn; a response needs a prompt")
        last = self._span(turns, answers[-1], where)
        full = last.text
        earlier = [self._trim_final_ending(self._span(turns, index, where), full) for index in answers[:-1]]
        # a turn stays as it was while the conversation goes on, up to its end; what follows there may be the next header
        rewritten = any(not span.fits or not full.startswith(span.text[: span.end]) for span in earlier)
        if not last.fits:
            raise DataError(
                f"{where}: the chat template's generation prompt ends in {excerpt(last.prompt[-40:])}, but it renders "
                f"the answer differently: {excerpt(full[_common_prefix(last.prompt, full) :], 80)}. The response cannot be "
                "told from its prompt; give a template whose answers begin with its generation prompt (--chat-template FILE)."
            )
        # the one text of all turns, cut: what lies between two responses is the prompt of the second
        spans = dict(zip(answers[-1:], (last,)) if rewritten else zip(answers, (*earlier, last)))
        self._require_written(turns.messages, answers, spans, full, where)
        segments, cursor = [], 0
        for span in spans.values():
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

    def _trim_final_ending(self, span: _Span, full: str) -> _Span:
        """The span of an earlier turn without what closes a conversation behind the turn's own end (EOS, in Phi-3)."""
        text = span.text[: span.end]
        while not full.startswith(text):
            text = self._without_an_end(text)
            if not text.endswith(self._turn_ends):
                return span
        return span._replace(end=len(text))

    def _without_an_end(self, text: str) -> str:
        """The text without the last end of a turn and the white space around it; as it is where nothing ends it."""
        text = text.rstrip()
        ends = [end for end in self._turn_ends if text.endswith(end)]
        return text.removesuffix(min(ends, key=len)).rstrip() if ends else text

    def _require_written(
        self, messages: Sequence[Message], answers: Sequence[int], spans: Mapping[int, _Span], full: str, where: str
    ) -> None:
        """Refuse what the template leaves out: any part of a response, and a tool call of a turn that is context.

        Tool calls are looked for word by word, name and arguments, as every template has a form of its own for them.
        """
        for index, message in enumerate(messages[: answers[-1] + 1]):
            if message["role"] != "assistant":
                continue
            at = f"{where}: the assistant turn at message {index}"
            # of a turn that is switched off the channel does not matter: it is context
            channel = message.get("channel") if index in answers and not message.get("tool_calls") else None
            if channel not in (None, "", "final") and not self._reads_channel:
                raise DataError(
                    f"{at} has the channel {excerpt(str(channel))}, which the chat template does not read: it would be an answer "
                    "like any other. Put its text into the next answer, as the key thinking (reasoning_content, where the "
                    "template reads that), or give a template that reads channel with --chat-template FILE"
                )
            span = spans.get(index)
            text = full[len(span.prompt) : span.end] if span else full
            missing = [f"call of {name}" for name in _missing_tool_calls(message, text)]
            *thoughts, answer = re.split(r"</?think>", message["content"])
            if span:
                parts = [*thoughts, *(str(message.get(key) or "") for key in REASONING)]
                missing += ["text"] * (not _is_written(text, answer))
                missing += ["reasoning"] * (not all(_is_written(text, part) for part in parts))
            if missing:
                raise DataError(
                    f"{at}: the chat template does not write its {' and '.join(missing)}; it would become "
                    f"{excerpt(text, 80)}. Change the turn, or give a template that writes it with --chat-template FILE"
                )
            if span and thoughts and 0 < message["content"].count("</think>") < text.count("</think>"):
                raise DataError(
                    f"{at}: the chat template writes a think block of its own before that of the text, "
                    f"{excerpt(text, 80)}. Give the reasoning in the key reasoning_content"
                )
            learned = text
            while (shorter := self._without_an_end(learned)) != learned:
                learned = shorter
            if span and not learned:
                raise DataError(
                    f"{at} is the end of a turn alone, {excerpt(text)}: there is nothing to learn. Remove the row"
                )

    @cached_property
    def _reads_channel(self) -> bool:
        """Whether a turn's key `channel`, of OpenAI's Harmony, changes anything; gpt-oss' own template does not read it."""
        return self.render_probe([_ASK, {**_ANSWER, "channel": "analysis"}]) != self.render_probe([_ASK, _ANSWER])

    def _leaves_out(self, role: str) -> bool:
        if role not in self._left_out:
            text = self.render_probe(_WITH_ROLE[role])
            self._left_out[role] = bool(text) and _SYSTEM not in text
        return self._left_out[role]

    def _wants_json_text(self) -> bool:
        """Whether the template writes the arguments of a tool call rightly as JSON text alone; mostly it wants the object."""
        for self._as_text in (False, True):
            text = self.render_probe([_ASK, _CALLS])
            # quoted as Python does it, or twice
            wrong = f"'{_KEY}'" in text or f'\\"{_KEY}' in text
            if all(word in text for word in (_NAME, _KEY, _VALUE)) and not wrong:
                return self._as_text
        return False

    def _find_content_form(self) -> tuple[bool, bool]:
        """(content goes in as a list of blocks, the text is lost either way); vision templates read blocks only."""
        self._as_blocks, self._as_text = False, False
        as_text = self.render_probe([_ASK, _ANSWER])
        if _REPLY in as_text:
            return False, False
        self._as_blocks = True
        works = _REPLY in self.render_probe([_ASK, _ANSWER])
        return works, not works and as_text != ""

    def _find_opening(self) -> str:
        """Find the text that the template writes between its generation prompt and the content of a last answer, and of no
        earlier one; empty for most."""
        # Qwen3: "…assistant\n" is the prompt, "…assistant\n<think>\n\n</think>\n\nQprobereply…" the answer; the block is between
        prompt, answered = self.render_probe([_ASK], generation_prompt=True), self.render_probe([_ASK, _ANSWER])
        opening = answered[len(prompt) :].partition(_REPLY)[0] if answered.startswith(prompt) else ""
        # once the talk goes on, the answer stands there without the block
        earlier = self.render_probe([_ASK, _ANSWER, _ASK]).startswith(prompt + _REPLY)
        return opening if opening.strip() and earlier else ""

    def _find_injected_system(self) -> tuple[str, str]:
        """Find the system text that the template adds on its own: (beginning of a rendered text, what to put instead).

        The text of a user turn is what a second user turn adds behind the end of an answer. The rendering of a lone user turn
        is that text with the injected part inserted. It is a default system message if giving a system message replaces
        it; a beginning that stays is a preamble and belongs to the template.
        """
        alone, answered, again = (
            self.render_probe([_ASK]),
            self.render_probe([_ASK, _ANSWER]),
            self.render_probe([_ASK, _ANSWER, _ASK]),
        )
        with_system = self.render_probe(_WITH_ROLE["system"])
        # behind the answer: its end and the second user turn; its end alone
        between, end = _after_last(again, _REPLY), _after_last(answered, _REPLY)
        if _SYSTEM not in with_system or not between.startswith(end):
            return "", ""
        user_turn = between[len(end) :]
        header = user_turn.partition(_USER)[0]
        if not header.strip():  # GLM: an answer ends in the header of the next turn, "…<|user|>", which is the user's
            user_turn, header = between, between.partition(_USER)[0]
        # Before the first turn stands BOS, or what a system message has before its own header ("[gMASK]<sop>" of GLM).
        start, before = self.tokenizer.bos_token or "", with_system.partition(_SYSTEM)[0]
        of_system = header.replace("user", "system")
        if of_system != header and before.endswith(of_system):
            start = before.removesuffix(of_system)
        # Qwen2.5: alone is "SYSTEM<|im_start|>user\nQ…", bare "<|im_start|>user\nQ…", so the two part at the beginning (kept 0).
        # Llama 2: alone is "<s>[INST] <<SYS>>…<</SYS>>\n\nQ…", bare "<s>[INST] Q…", so "<s>[INST] " is kept.
        bare = start + user_turn if alone.startswith(start) and not user_turn.startswith(start) else user_turn
        kept = len(bare) - _common_prefix(bare[::-1], alone[::-1])  # of `bare`, what stands before the common ending
        beginning = alone[: len(alone) - (len(bare) - kept)]
        # else the two renderings differ by something that is no insertion
        inserted = len(beginning) > kept and beginning.startswith(bare[:kept]) and _USER not in beginning
        if not inserted or with_system.startswith(beginning):
            return "", ""
        return beginning, bare[:kept]

    def render_probe(self, messages: list[Message], generation_prompt: bool = False) -> str:
        """Render a probe as it stands; a template that refuses it (no system role, say) yields the empty string."""
        try:
            return self._apply(messages, None, generation_prompt) if self.template is not None else ""
        except Exception:
            return ""

    def _apply(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, generation_prompt: bool
    ) -> str:
        turns = [dict(message) for message in messages]  # templates may write into what they are given
        for turn in turns:
            if calls := turn.get("tool_calls"):
                turn["tool_calls"] = [self._call(call) for call in calls]
        if self._as_blocks:
            turns = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
        return self.tokenizer.apply_chat_template(
            turns,
            tools=[dict(tool) for tool in tools] if tools else None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **self.template_kwargs,
        )

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """A tool call with its arguments in the form that the template writes."""
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._call(call["function"])}
        arguments = call.get("arguments")
        as_text = self._as_text and isinstance(arguments, Mapping)
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)} if as_text else dict(call)


class _Span(NamedTuple):
    """One assistant turn: its prompt, the text up to the turn's end, and where the response ends in that text."""

    prompt: str
    text: str
    end: int

    @property
    def fits(self) -> bool:
        return self.text.startswith(self.prompt) and bool(self.text[len(self.prompt) : self.end].strip())


def describe_form(raw: bool, message: str | None = None, system: str = "none") -> str:
    """How prompts are put to a model, after "asked".

    Args:
        raw: as they are, without the chat template.
        message: the system message, or None for none.
        system: "none" or "keep", as of `Chat`.
    """
    if raw:
        return "as plain text to go on with, without a chat template"
    if message:
        return f"through the chat template, with the system message {message!r}"
    return "through the chat template, " + (
        "with the system message that it adds by itself, if any (system=keep)"
        if system == "keep"
        else "without the system message that a template may add by itself (system=none)"
    )


def is_same_form(one: str, other: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether two forms of `describe_form` put a prompt to a model alike: also where the template adds no system message."""
    free = {describe_form(False, system=system) for system in SYSTEM_MODES}
    return one == other or ({one, other} <= free and not Chat(tokenizer).default_system)


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


def _missing_tool_calls(message: Message, text: str) -> list[str]:
    """The names of a message's tool calls that a text does not hold, or not as often, or not with their arguments."""
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    names = Counter(str(function.get("name")) for function in functions)
    lost = [name for name, count in names.items() if text.count(name) < count]
    for function in functions:
        if not all(_is_written(text, leaf) for leaf in _leaves(function.get("arguments"))):
            lost.append(str(function.get("name")))
    return list(dict.fromkeys(lost))


def _leaves(value: Any) -> Iterator[str]:
    """The keys and values of an object at any depth, as text."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif value is not None:
        yield json.dumps(value) if isinstance(value, bool) else str(value)


def _is_written(text: str, part: str) -> bool:
    """Whether a text holds every word of a part, however it quotes, escapes and lays them out."""
    if part.strip() in text:
        return True
    text, words = text.casefold(), set(_WORD.findall(part.casefold()))
    if not words:
        return _dense(part) in _dense(text)
    return all(word in text or json.dumps(word)[1:-1] in text for word in words)


def _dense(text: str) -> str:
    return "".join(text.split())


def _common_prefix(first: str, second: str) -> int:
    length = 0
    for a, b in zip(first, second):
        if a != b:
            break
        length += 1
    return length
