"""What is seen in an answer's text alone: whether it ends in a loop, in which language it is, whether it thinks first.

Small on purpose. The language is one of those of the shipped prompts, by script and by the commonest words; where a text does not
clearly show one of them, nothing is claimed. Nothing here knows a model.
"""

from __future__ import annotations

import re
from collections import Counter

LOOPS, LOOP_WORDS = 3, 12
"""A loop says the same at least so often, and so many words in all: fewer are how people write lists and refrains."""
_WORD = re.compile(r"[぀-ヿ㐀-鿿]|\w+|[^\w\s]")  # signs of Chinese and Japanese stand for words
_NUMBERING = re.compile(r"^\s*\d+[.)]\s+", re.MULTILINE)


def loops_at_end(text: str) -> bool:
    """Whether the text ends by saying the same words again and again, exactly; numbers of list items may differ.

    >>> loops_at_end("It is late. " * 5), loops_at_end("It is late, and we should go home before it gets dark.")
    (True, False)
    """
    words = _WORD.findall(_NUMBERING.sub("", text).rstrip("\ufffd"))
    # the length limit may cut through the last word
    return _in_loop(words) or _in_loop(words[:-1])


def _in_loop(words: list[str]) -> bool:
    for period in range(1, len(words) // LOOPS + 1):
        repeated = period
        while repeated < len(words) and words[-1 - repeated] == words[-1 - repeated + period]:
            repeated += 1
        if repeated >= max(LOOPS * period, LOOP_WORDS):
            return True
    return False


_SCRIPTS = {
    "kana": r"[぀-ヿ]",
    "han": r"[㐀-鿿]",
    "ko": r"[가-힯]",
    "ru": r"[Ѐ-ӿ]",
    "ar": r"[؀-ۿ]",
    "hi": r"[ऀ-ॿ]",
    "latin": r"[A-Za-zÀ-ɏ]",
}
_DENSE = 3
"""Latin letters that say about as much as one Chinese or Korean sign."""
_COMMON = {
    language: frozenset(words.split())
    for language, words in {
        "en": "the a an of and to in is are was were you i it that this for on with as not have has be can will do does what how "
        "there from by or at we they your my he she his her if but so which when because would their more",
        "de": "der die das und ist sind nicht ein eine einen einem einer ich du er es wir sie zu den dem des mit sich auf für von "
        "im in am an als auch wie wird werden kann hat haben oder aber bei nach aus nur über durch sehr viele zum zur",
        "fr": "le la les de des du un une et est sont ne pas que qui dans pour sur avec au aux ce cette ces il elle je nous vous "
        "ils plus par mais ou se en sa son ses leur être peut très à",
        "es": "el la los las de del un una y es son no que en con por para se lo al su sus como más pero o este esta estos muy "
        "puede hay está ser yo también a",
        "it": "il lo la i gli le di del della dei un una e è sono non che in con per si su come più ma o questo questa anche al "
        "alla nel nella da dal essere può ha ci",
        "pt": "o a os as de do da dos das um uma e é são não que em no na nos nas com por para se ao à como mais mas ou este esta "
        "também muito pode ser seu sua há você",
        "tr": "ve bir bu için ile da de ne olarak çok daha en gibi olan var ben sen o mi değil ama veya kadar sonra her olabilir "
        "olmalı ise ya şu biz",
    }.items()
}
_TELLING = {"de": "ß", "es": "ñ¿¡", "pt": "ãõ", "tr": "ğış", "fr": "œ"}
"""Letters that of these languages one alone has, or nearly so."""
HITS, LEAD = 2, 1.5
"""Common words that a text must hold of a language, and how many times those of the next one."""


def detect_language(text: str) -> str | None:
    """ISO 639-1 code of the language; None where the text, without its code, shows none of the known ones clearly.

    >>> detect_language("Das weiß ich leider nicht."), detect_language("我不知道。"), detect_language("42")
    ('de', 'zh', None)
    """
    text = re.sub(r"```.*?(```|\Z)", " ", text, flags=re.DOTALL)
    counts = {script: len(re.findall(pattern, text)) for script, pattern in _SCRIPTS.items()}
    counts["han"] += counts["kana"]
    weights = {**counts, "latin": counts["latin"] / _DENSE, "kana": 0}
    script = max(weights, key=lambda name: weights[name])
    if weights[script] <= sum(weights.values()) / 2:
        return None
    if script == "han":  # Japanese is written with both
        return "ja" if counts["kana"] > counts["han"] / 10 else "zh"
    if script != "latin":
        return script
    words = re.findall(r"[^\W\d_]+", text.replace("İ", "i").lower())
    hits = Counter({language: sum(word in common for word in words) for language, common in _COMMON.items()})
    for language, letters in _TELLING.items():
        hits[language] += sum(any(letter in word for letter in letters.lower()) for word in words) + sum(
            text.count(sign) for sign in letters if not sign.isalpha()
        )
    (first, most), (_, next_most) = hits.most_common(2)
    return first if most >= HITS and most >= LEAD * next_most else None


THOUGHTS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
)
"""Marks around thoughts: Qwen and DeepSeek, …, Magistral, Command A, OpenThinker, gpt-oss."""


def split_reasoning(prompt: str, answer: str) -> tuple[str, str | None]:
    """(thoughts, answer behind them) of an answer with all its special tokens; (thoughts, None) where they do not end.

    The template may have opened the block: then the prompt ends in its mark.

    >>> split_reasoning("", "<think>two and two</think>4"), split_reasoning("", "4")
    (('two and two', '4'), ('', '4'))
    """
    for begin, end in THOUGHTS:
        opened = prompt.rstrip().endswith(begin)
        if not opened and begin not in answer:
            continue
        inside = answer if opened and begin not in answer else answer.partition(begin)[2]
        thoughts, closed, behind = inside.partition(end)
        return thoughts.strip(), behind if closed else None
    return "", answer
