"""The adapter's tokenizer and chat template against the base's, and whether an answer can end; no weights are read.

An adapter is trained on token ids. Where its tokenizer gives other ids than the base's, or its template writes tokens for which
nobody trained an embedding, it reads noise; where a template loses a turn, the model never sees it.
"""

from __future__ import annotations

import filecmp
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from loragate.data import ending_health, find_endings
from loragate.data.chat import Chat
from loragate.data.formats import Message
from loragate.display import pluralize
from loragate.errors import DataError
from loragate.gates.adapter_folder import AdapterFolder
from loragate.gates.adapter_rules import Finding, Severity
from loragate.gates.schema import own_tokenizer
from loragate.models import ModelSource, generation_config, open_tokenizer
from loragate.models.settings import Loading
from loragate.printable import excerpt

FOREIGN = 0.01
"""Share of the base's tokens that have another id, or none, in the adapter's tokenizer, from which on it is another one: people
rename a few reserved tokens of 128,000, and another vocabulary shares hardly an id."""
# of words, digits, other scripts, code and white space: what pre-tokenizers and normalisers differ in
_TEXTS = (
    "The quick brown fox doesn't jump over 13 lazy dogs.",
    "Größe, naïve, 東京, Москва: 3.14159",
    "def f(x):\n    return [x ** 2 for _ in range(10)]\n",
)
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.json"),
)
_USER: Message = {"role": "user", "content": "Qfirstquestion"}
_CONVERSATIONS: tuple[list[Message], ...] = (
    [_USER],
    [_USER, {"role": "assistant", "content": "Qfirstanswer"}],
    [
        _USER,
        {"role": "assistant", "content": "Qfirstanswer"},
        {"role": "user", "content": "Qsecondquestion"},
        {"role": "assistant", "content": "Qsecondanswer"},
    ],
    [{"role": "system", "content": "Qsysteminstruction"}, _USER],
)


def examine_tokens(
    place: ModelSource, loading: Loading, embeddings: int | None, system: str = "none"
) -> tuple[dict[str, Any], list[Finding]]:
    """({"endings", "stops"} of `Static`, findings) of the tokenizer that the adapter is used with.

    Args:
        embeddings: tokens that the base has embeddings for; None where that is not known.
        system: "none" leaves out the chat template's own system message, which is then a finding; "keep" keeps it.
    """
    own = own_tokenizer(place.adapter)
    if own is not None and _same_files(own, Path(place.base.name)):
        own = None  # reading a tokenizer twice takes longer than all that is said of it
    try:
        base: Any = open_tokenizer(replace(place, kind="base"), loading)
    except Exception:  # tokenizers and transformers raise anything for files that are not theirs
        base = None
    remedy = "copy the tokenizer of its training, or the base's, there"
    try:
        tokenizer: Any = open_tokenizer(place, loading) if own is not None or base is None else base
    except Exception as error:
        if place.tokenizer == place.base.name:
            message = f"the tokenizer of {place.base.name} cannot be read, so tokens and endings were not examined"
            message += f" ({_said(error)})"
            return {}, [Finding("tokenizer-unreadable", "note", message, "put the tokenizer into the adapter's folder")]
        # every program that takes the adapter's own tokenizer fails as well
        message = f"{place.tokenizer}: the adapter's own tokenizer cannot be read ({_said(error)})"
        return {}, [Finding("tokenizer-unreadable", "error", message, remedy)]
    try:
        measured, found = _compare_tokenizers(tokenizer, base if own is not None else None, place, loading, embeddings)
        return measured, [*found, *_default_system(Chat(tokenizer, system))]
    except Exception as error:  # what stands in a tokenizer's files is mostly used when it first reads a text
        message = f"{place.tokenizer}: the tokenizer fails at a text ({_said(error)})"
        return {}, [Finding("tokenizer-unreadable", "error", message, remedy)]


def _compare_tokenizers(
    tokenizer: Any, base: Any, place: ModelSource, loading: Loading, embeddings: int | None
) -> tuple[dict[str, Any], list[Finding]]:
    """The same of a tokenizer in memory; `base` is the base's where the adapter has another, else None."""
    found: list[Finding] = []
    vocabulary = None
    if base is not None:
        vocabulary = base.get_vocab()
        found += _differences(tokenizer, base, vocabulary, place.adapter_contents)
        found += _templates(Chat(tokenizer, "keep"), Chat(base, "keep"))
    if not any(one.severity == "error" for one in found):  # of another vocabulary nothing is said token by token
        found += _untrained(tokenizer, vocabulary, place.adapter_contents, embeddings)
    measured, more = _endings(tokenizer, generation_config(place.base, loading.trust_remote_code))
    return measured, [*found, *more]


def _same_files(one: Path, other: Path) -> bool:
    """Whether two folders hold the same tokenizer, byte for byte."""
    files = [name for name in _FILES if (one / name).exists() or (other / name).exists()]
    return other.is_dir() and filecmp.cmpfiles(one, other, files, shallow=False)[0] == files


def _said(error: Exception) -> str:
    return excerpt(str(error) or type(error).__name__, 300).strip("'")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


# ---- the vocabulary


def _differences(own: Any, base: Any, theirs: Mapping[str, int], contents: AdapterFolder) -> Iterator[Finding]:
    ids = own.get_vocab()
    moved = sorted(token for token, index in theirs.items() if token in ids and ids[token] != index)
    gone = sorted(set(theirs) - set(ids), key=theirs.__getitem__)
    new = sorted(set(ids) - set(theirs), key=ids.__getitem__)
    evidence = {
        "size": len(ids),
        "base_size": len(theirs),
        "moved": moved[:8],
        "moved_count": len(moved),
        "gone": gone[:8],
        "gone_count": len(gone),
        "new": {token: ids[token] for token in new[:8]},
        "new_count": len(new),
    }
    where = f"the adapter's tokenizer ({contents.path})"
    if moved or len(gone) > FOREIGN * len(theirs):
        said = [f"{token!r} has the id {ids[token]}, not {theirs[token]}" for token in moved[:1]]
        said = [f"{pluralize(len(moved), 'token')} with another id ({one})" for one in said]
        said += [
            f"{len(gone):,} of the base's {pluralize(len(theirs), 'token')} not in it (such as {_some(gone)})"
        ] * bool(gone)
        foreign = len(moved) + len(gone) > FOREIGN * len(theirs) and not _brings_embeddings(contents)
        yield Finding(
            "tokenizer-differs",
            "error" if foreign else "warning",
            f"{where} is not the base's: {'; '.join(said)}. The base would read other words than were written",
            "name the base that it was trained on with --base, or put that base's tokenizer into the adapter's folder",
            evidence,
        )
        return
    for text in _TEXTS:
        one, other = (list(each(text, add_special_tokens=False)["input_ids"]) for each in (own, base))
        if one != other:
            yield Finding(
                "tokenizer-differs",
                "warning",
                f"{where} has the base's tokens and splits text in another way: {excerpt(text)} is "
                f"{pluralize(len(one), 'token')}, and {len(other)} with the base's",
                "use the tokenizer of its training with the adapter, in every program",
                {
                    **evidence,
                    "text": text,
                    "tokens": own.convert_ids_to_tokens(one),
                    "base_tokens": base.convert_ids_to_tokens(other),
                },
            )
            return
    said = [f"{pluralize(len(new), 'more token')} ({_some(new)})"] * bool(new) + [f"without {_some(gone)}"] * bool(gone)
    if own.eos_token != base.eos_token:
        said.append(f"with {own.eos_token} as its end of sequence in place of {base.eos_token}")
    if said:
        remedy = "use the adapter's tokenizer with it: a server that is given the base alone takes the base's"
        yield Finding("tokenizer-differs", "note", f"{where} is the base's with {'; '.join(said)}", remedy, evidence)


def _brings_embeddings(contents: AdapterFolder) -> bool:
    """Whether the adapter holds embeddings, whole or as factors."""
    return any(re.search(r"embed|wte", key) and "trainable_tokens" not in key for key in contents.tensors)


def _untrained(
    own: Any, vocabulary: Mapping[str, int] | None, contents: AdapterFolder, embeddings: int | None
) -> Iterator[Finding]:
    """Tokens that conversations are written with, or that were added, without a trained embedding in the base or the adapter.

    Args:
        vocabulary: of the base's tokenizer; None where the adapter has no other.
    """
    if _brings_embeddings(contents):
        return
    chat = Chat(own, "keep")
    texts = filter(None, (chat.render_probe(one) for one in _CONVERSATIONS))
    used = {index for text in texts for index in own(text, add_special_tokens=False)["input_ids"]}
    used |= {own.eos_token_id} - {None}
    trained = contents.config.get("trainable_token_indices") or ()
    lists = trained.values() if isinstance(trained, dict) else [trained]
    trained = {index for one in lists if isinstance(one, list | tuple) for index in one}
    known = None if vocabulary is None else set(vocabulary.values())
    beyond = {index for index in used - trained if embeddings is not None and index >= embeddings}
    # padding is never read, and people add a token for it
    added = set() if known is None else set(own.get_vocab().values()) - known - trained - {own.pad_token_id}
    for ids, severity, what, remedy in (
        (
            beyond,
            "error",
            "the chat template, or the end of an answer, uses {}, which the base has no embeddings for",
            "the base was enlarged in training: name that base with --base, or train again with the new embeddings saved "
            "(modules_to_save or trainable_token_indices)",
        ),
        (
            added - beyond,
            "warning",
            "{} came to the tokenizer after the base was trained, and the adapter trained no embeddings for that: text that holds "
            "it is noise to the model",
            "leave these tokens out of prompts, or train them (trainable_token_indices) and the adapter again",
        ),
    ):
        if ids:
            numbers = sorted(ids)
            names = [str(token) for token in own.convert_ids_to_tokens(numbers)]
            evidence = {"tokens": names[:8], "ids": numbers[:8], "count": len(names), "used": sorted(ids & used)[:8]}
            message = what.format(f"{_some(names)} (ids {_some([str(index) for index in numbers])})")
            yield Finding("tokens-untrained", severity, message, remedy, {**evidence, "embeddings": embeddings})  # type: ignore[arg-type]


# ---- the chat template


def _templates(own: Chat, base: Chat) -> Iterator[Finding]:
    use = "use the adapter's tokenizer, with its template, in every program: a server may take the base's"
    if own.template is None:
        if base.template is not None:
            message = "the adapter's own tokenizer has no chat template, and the base's has one"
            remedy = "where it was trained on conversations, give their template: --chat-template FILE"
            yield Finding("template-differs", "note", message, remedy)
        return
    if not own.render_probe(_CONVERSATIONS[0]):
        try:
            own.render(_CONVERSATIONS[0])
        except DataError as error:
            remedy = "copy the template of its training there, or give one: --chat-template FILE"
            yield Finding(
                "template-differs", "error", f"the adapter's chat template writes no conversation: {error}", remedy
            )
        return
    for conversation in _CONVERSATIONS:
        text, theirs = own.render_probe(conversation), base.render_probe(conversation)
        # a template that refuses a conversation, such as one with a system message, loses nothing in silence
        lost = [one["role"] for one in conversation if text and one["content"] not in text]
        roles = ", ".join(one["role"] for one in conversation)
        if lost and (lost != ["system"] or conversation[0]["content"] in theirs):
            message = f"the adapter's chat template loses text: of the turns {roles} it leaves out {', '.join(lost)}"
            remedy = (
                "the model never saw those turns: mend the template and train again, or use the adapter without them"
            )
            yield Finding(
                "template-differs", "warning", message, remedy, {"roles": roles, "lost": lost, "text": text[:500]}
            )
            return
    first = _CONVERSATIONS[0]
    if own.render_probe(first, True) == own.render_probe(first) and base.render_probe(first, True) != base.render_probe(
        first
    ):
        message = (
            "the adapter's chat template does not open the assistant's turn when it is asked to (add_generation_prompt), as the "
            "base's does, so the model is asked in another form than it answers in"
        )
        remedy = "mend the template, or give that of the training: --chat-template FILE"
        yield Finding("template-differs", "warning", message, remedy, {"adapter": own.render_probe(first, True)[:500]})
        return
    if base.template is None:
        yield Finding("template-differs", "note", "the base has no chat template, and the adapter brings one", use)
        return
    for conversation, prompt in ((one, prompt) for one in _CONVERSATIONS for prompt in (False, True)):
        text, theirs = own.render_probe(conversation, prompt), base.render_probe(conversation, prompt)
        if text != theirs:
            at = next(
                (place for place, pair in enumerate(zip(text, theirs)) if pair[0] != pair[1]),
                min(len(text), len(theirs)),
            )
            roles = ", ".join(one["role"] for one in conversation)
            one, other = (excerpt(each[at:]) if each else "a refusal" for each in (text, theirs))
            yield Finding(
                "template-differs",
                "note",
                f"the adapter's chat template is not the base's: of {roles} it writes {one} where the base's has {other}",
                use,
                {"roles": roles, "adapter": text[:500], "base": theirs[:500]},
            )
            return


def _default_system(chat: Chat) -> Iterator[Finding]:
    if said := " ".join(chat.default_system.split()):
        yield Finding(
            "system-message",
            "note",
            f"the chat template adds a system message of its own, {excerpt(said, 100)}, which is left out here, as loragate sft "
            "does; TRL and most trainers keep it",
            "give every command --system keep if the adapter was trained with it; doctor --data FILE measures what suits it",
            {"system": said},
        )


# ---- the end of an answer


def _endings(tokenizer: Any, settings: Any) -> tuple[dict[str, Any], list[Finding]]:
    report = ending_health(tokenizer, None, settings)
    found = []
    for problem in islice(report.problems, 1):
        said, _, remedy = problem.partition("; " if "; " in problem else ". ")
        severity: Severity = "note" if report.stops else "warning"
        found.append(Finding("no-ending", severity, said, remedy, {"stops": report.stops}))
    if not found and report.stop_ids and (added := find_endings(tokenizer, settings).added):
        names = [str(token) for token in tokenizer.convert_ids_to_tokens(added.get("token_ids", []))]
        message = f"the chat template ends a turn with {_some(names)}, which neither the tokenizer nor the base names as an end"
        remedy = f"have other programs stop there too (stop_token_ids={added.get('token_ids')}); loragate does"
        found.append(Finding("ending-undeclared", "note", message, remedy, added))
    return {"endings": report.end_tokens, "stops": report.stops}, found
