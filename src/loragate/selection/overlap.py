"""The leak check: which questions also stand among training examples, or among questions that a result is reported on.

Texts are compared without case, surplus white space and closing punctuation; signs inside stay, because "2 + 3" and "2 - 3" are
different questions. A long question also counts as shared where it stands inside a longer prompt, or where a long prompt stands
inside it. Where both put words of their own around one text, the answers say whether it is one question: "Translate S into German"
and "Translate S into French" are two. Nothing here knows dev sets, graders or models.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, NamedTuple

from loragate.data import Rows
from loragate.data.formats import BARE_PAIR, PAIRS, conversation, messages_of_json, question_text
from loragate.errors import DataError
from loragate.evaluation.answers import last_boxed, strip_reasoning
from loragate.evaluation.grading.numeric import grade_last_number, last_number
from loragate.evaluation.tasks import Question
from loragate.printable import excerpt


class Asked(NamedTuple):
    """A text that a user says in a row, the place of the row, and the answers that the row gives to it."""

    place: str
    text: str
    answers: tuple[str, ...] = ()


ExcludedPrompts = tuple[Sequence[Asked], str]
"""(prompts, what they are)"""
PROMPTS = ("prompt", "question", "problem", "instruction", "query")
ANSWERS = ("answer", "gold", "target")
RESPONSES = tuple(dict.fromkeys((*ANSWERS, *(pair[1] for pair in PAIRS))))
LONG = 60
"""Characters from which a text is looked for inside other prompts; shorter ones occur by accident."""
INSTRUCTION = 3
"""Dev questions that may hold one text of the examples; what more of them hold is an instruction, not a question."""
DISTINCTIVE = 0.05
"""Share of the other questions with the same answer up to which an answer tells one question from another."""
_STARTS = re.compile(r"\b\w|[^\w\s]")
_INSIDE_WORD = re.compile(r"\w\w")
_ANSWER_IS = re.compile(r"(?i)answer(?: is|:)\s*(.+?)\s*\Z")


def prompts_with_location(rows: Rows) -> list[Asked]:
    """The user's words in every row."""
    return [Asked(rows.where(index), text, answers) for index, row in enumerate(rows) for text, answers in _asked(row)]


def prompts_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The user's words in rows of any format, for the comparison with questions."""
    return [text for row in rows for text, _ in _asked(row)]


def _asked(row: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The user's words in a row of any format, each text with the answers to it."""
    beside = [messages_of_json(row[name]) for name in RESPONSES if row.get(name) is not None]
    answers = tuple(str(value) for value in beside if not isinstance(value, list))
    named = [name for name in ("messages", "conversations", *PROMPTS) if row.get(name) is not None]
    for name in named or BARE_PAIR[:1]:
        value = messages_of_json(row.get(name))
        with suppress(DataError):  # such as an image; rows to train on are refused by their line
            if isinstance(value, str):
                yield question_text(row, name), answers
            elif isinstance(value, list):
                turns = list(conversation(value, name))
                if name in PROMPTS:  # whose answer is a list of messages too
                    turns += (turn for part in beside if isinstance(part, list) for turn in conversation(part, name))
                for index, turn in enumerate(turns):
                    if turn["role"] == "user":
                        after = takewhile(lambda one: one["role"] != "user", turns[index + 1 :])
                        yield turn["content"], tuple(one["content"] for one in after if one["role"] == "assistant")


def normalize_question(text: str) -> str:
    """What two texts of one question have in common."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = re.sub(r"\s*([^\w\s])\s*", r"\1", text)  # "2+3" is "2 + 3"
    return re.sub(r"\s+", " ", text).strip(" .,;:!?\"'`*")


def find_overlap(questions: Sequence[Question], others: Iterable[Asked]) -> dict[str, list[str]]:
    """{where a question stands: where others say the same}; compared are its prompt and the row's own question."""
    places: dict[str, list[str]] = defaultdict(list)
    answers: dict[str, list[str]] = defaultdict(list)
    for other in others:
        if key := normalize_question(other.text):
            places[key].append(other.place)
            answers[key] += other.answers
    asked = {
        question.place: [
            key
            for text in dict.fromkeys([question.prompt, *prompts_of([question.row])])
            if (key := normalize_question(text))
        ]
        for question in questions
    }
    different = {key for own in asked.values() for key in own}
    holding: dict[str, list[str]] = defaultdict(list)  # {question: the other texts that hold it}
    lengths = _lengths_by_beginning(different)
    for known in places:
        for key in _texts_inside(known, lengths) & different:
            holding[key].append(known)
    lengths, held = _lengths_by_beginning(places), dict[str, set[str]]()
    for key in different:
        held[key] = _texts_inside(key, lengths) & places.keys()
    often = Counter(known for inside in held.values() for known in inside)
    found: dict[str, list[str]] = {}
    for place, own in asked.items():
        there: list[str] = []
        for key in own:
            # what many questions hold is an instruction that they share
            inside = sorted(known for known in held[key] if often[known] <= INSTRUCTION)
            for known in (key, *holding[key], *inside):
                there += places.get(known, [])
        if there:
            found[place] = list(dict.fromkeys(there))
    by_key: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        for key in asked[question.place]:
            by_key[key].append(question)
    shared = [one for one in _shared_texts(different, places) if answers[one.other]]
    for question, one in _same_answers(shared, by_key, answers, Counter(one.gold for one in questions)):
        there = found.setdefault(question.place, [])
        said = f"other words around {excerpt(normalize_question(one.text), 80)}, with the same answer {excerpt(question.gold)}"
        there += [f"{place} ({said})" for place in dict.fromkeys(places[one.other]) if place not in there]
    return found


class _SharedText(NamedTuple):
    """What a question and another text have in common, and what stands around it in each: before and behind it."""

    question: str
    other: str
    text: str
    around: tuple[str, str]
    around_other: tuple[str, str]


def _shared_texts(questions: Iterable[str], others: Iterable[str]) -> list[_SharedText]:
    """Long texts that a question and another text share, and that hold all of the question but what many questions begin or
    end with.

    The time is that of reading the texts: each is looked for by pieces of `LONG` characters at its own part.
    """
    keys = sorted(key for key in questions if len(key) >= LONG)
    own: dict[str, tuple[int, int]] = {}
    begins, ends = _common_beginnings(keys), _common_beginnings([key[::-1] for key in keys])
    pieces: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for key in keys:
        start, end = begins[key], len(key) - ends[key[::-1]]
        if start >= end:  # its beginning and its end are others', so that only both together are its own
            start, end = max(end - 1, 0), min(start + 1, len(key))
        starts = [match.start() for match in _STARTS.finditer(key)]
        start = max((at for at in starts if at <= start), default=0)  # the whole of a word that begins like others'
        own[key] = start, end
        for at in starts:
            if at + LONG <= len(key) and (at == start or (end - start < LONG and start - LONG < at < start)):
                pieces[key[at : at + LONG]].append((key, at))
    for piece in [piece for piece, found in pieces.items() if len(found) > INSTRUCTION]:
        del pieces[piece]
    found: dict[tuple[str, str], _SharedText] = {}
    for other in others:
        for match in _STARTS.finditer(other, 0, max(len(other) - LONG + 1, 0)):
            there = match.start()
            for key, at in pieces.get(other[there : there + LONG], ()):
                if (key, other) not in found and (one := _grown(key, at, other, there, *own[key])):
                    found[key, other] = one
    return list(found.values())


def _grown(key: str, at: int, other: str, there: int, start: int, end: int) -> _SharedText | None:
    """The text around a place that two texts share, in whole words; None where it leaves out the part `start` to `end` of the
    first, or where one of the texts has nothing around it."""
    before = _common_length(key[:at][::-1], other[:there][::-1])
    first, other_first = at - before, there - before
    length = _common_length(key[first:], other[other_first:])
    while length and (_cuts_word(key, first) or _cuts_word(other, other_first)):
        first, other_first, length = first + 1, other_first + 1, length - 1
    while length and (_cuts_word(key, first + length) or _cuts_word(other, other_first + length)):
        length -= 1
    if length < LONG or first > start or first + length < end:
        return None
    around = (key[:first], key[first + length :])
    around_other = (other[:other_first], other[other_first + length :])
    return _SharedText(key, other, key[first : first + length], around, around_other) if any(around) else None


def _cuts_word(text: str, at: int) -> bool:
    return bool(_INSIDE_WORD.fullmatch(text, max(at - 1, 0), at + 1))


def _common_length(one: str, other: str) -> int:
    """The number of characters with which both begin."""
    return next((at for at, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))


def _common_beginnings(texts: Sequence[str]) -> dict[str, int]:
    """{text: the number of characters with which more than `INSTRUCTION` of the texts begin as it does}."""
    ordered = sorted(texts)
    found = dict.fromkeys(ordered, 0)
    for at in range(len(ordered) - INSTRUCTION):
        near = ordered[at : at + INSTRUCTION + 1]
        length = _common_length(near[0], near[-1])
        found.update((text, max(found[text], length)) for text in near)
    return found


def _same_answers(
    shared: Iterable[_SharedText],
    questions: Mapping[str, Sequence[Question]],
    answers: Mapping[str, Sequence[str]],
    golds: Mapping[str, int],
) -> Iterator[tuple[Question, _SharedText]]:
    """The shared texts that are one question: most that stand between the same words have the same answers, and this one has an
    answer that few questions have.

    Args:
        questions: by their text.
        answers: to the other texts.
        golds: number of questions with each right answer.
    """
    groups: dict[tuple[str, ...], list[_SharedText]] = defaultdict(list)
    for one in shared:
        groups[*one.around, *one.around_other].append(one)
    pooled: dict[tuple[str, ...], list[_SharedText]] = defaultdict(list)
    for words, group in groups.items():
        pooled[words if len(group) > 1 else words[:2]] += group
    most = 1 + DISTINCTIVE * (sum(golds.values()) - 1)
    for group in pooled.values():
        pairs = [(question, one) for one in group for question in questions[one.question]]
        same = [pair for pair in pairs if any(is_answer(text, pair[0].gold) for text in answers[pair[1].other])]
        if 2 * len(same) > len(pairs):
            yield from (pair for pair in same if golds[pair[0].gold] <= most)


def is_answer(response: str, gold: str) -> bool:
    """Whether a response ends in a right answer: it is it, or has it in its last box, behind "####" or "answer is", or as its
    last number."""
    text = strip_reasoning(response)
    wanted = normalize_question(gold.rpartition("####")[2])
    phrase = _ANSWER_IS.search(text)
    given = (text, last_boxed(text) or "", text.rpartition("####")[2], phrase[1] if phrase else "")
    if wanted and wanted in map(normalize_question, given):
        return True
    number = last_number(gold)
    return number is not None and number.alone and grade_last_number(text, gold).correct


def _lengths_by_beginning(texts: Iterable[str]) -> dict[str, set[int]]:
    """{the first `LONG` characters: lengths of the texts that begin so}, of texts that are that long."""
    lengths: dict[str, set[int]] = defaultdict(set)
    for text in texts:
        if len(text) >= LONG:
            lengths[text[:LONG]].add(len(text))
    return lengths


def _texts_inside(text: str, lengths: Mapping[str, set[int]]) -> set[str]:
    """Pieces of a text, from one word's beginning to another's end, that begin like known texts and have their length.

    Which of them are known is for the caller to say. The time is that of reading the text, however many are known.
    """
    found = set()
    for start in _STARTS.finditer(text, 0, max(len(text) - LONG + 1, 0)):
        at = start.start()
        for length in lengths.get(text[at : at + LONG], ()):
            if not _INSIDE_WORD.fullmatch(text, at + length - 1, at + length + 1):
                found.add(text[at : at + length])
    return found - {text}
